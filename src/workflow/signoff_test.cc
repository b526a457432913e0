// Sign-off: what is accepted, and every way of getting past a person that is refused. Rows GEN-22,
// STOP-08..STOP-13 (the sign-off's part).

#include "workflow/signoff.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <thread>

#include "base/reasons.h"
#include "workflow/index.h"
#include "workflow/testing_task.h"
#include "workflow/verify.h"

namespace tare::workflow {
namespace {

class SignOffTest : public ::testing::Test {
 protected:
  void SetUp() override { Start(TestToml()); }

  void Start(const std::string& toml) {
    task_.reset();
    std::filesystem::remove_all(dir_ / "t");
    task_ = InitTask(&env_, dir_ / "t", toml);
  }
  void SignList() {
    ASSERT_EQ(Approve(task_.get(), "task", "bob", kBob, true).verdict, Verdict::kPass);
  }
  void Amend(const std::string& from, const std::string& to) {
    std::string toml = *env_.ReadFile(dir_ / "t/task.toml");
    const size_t at = toml.rfind(from);
    ASSERT_NE(at, std::string::npos) << from;
    toml.replace(at, from.size(), to);
    ASSERT_TRUE(env_.WriteFileAtomic(dir_ / "t/task.toml", toml).ok());
    auto report = task_->Amend("test");
    ASSERT_TRUE(report.ok()) << report.status().ToString();
  }
  // Signs the latest request of `step` in a given way; the reason code of the refusal, or "".
  std::string Offer(const std::string& step, const std::string& person, const TestKey& key,
                    const AcceptContext& context = {},
                    const std::function<void(std::string*, std::string*)>& change = nullptr) {
    auto request = PrepareReview(task_.get(), step, {}, {});
    EXPECT_TRUE(request.ok()) << request.status().ToString();
    std::string statement = StatementFor(*task_, *request, person);
    std::string signature = key.SshSign(statement);
    if (change) change(&statement, &signature);
    const uint64_t before = task_->log().size();
    auto result = AcceptSignOff(task_.get(), statement, signature, context);
    EXPECT_TRUE(result.ok()) << result.status().ToString();
    if (result->verdict == Verdict::kRefused) {
      EXPECT_EQ(task_->log().size(),
                before + 1);  // a refusal is one record and changes nothing else
      EXPECT_EQ(task_->state().refusals.back().reason, result->reason);
    }
    return result->verdict == Verdict::kPass ? "" : result->reason;
  }
  SignOffStatus StatusOf(const std::string& step) {
    Staleness s(task_->state());
    return StatusOfSignOff(task_->state(), &s, step);
  }

  TempDir dir_;
  TestEnv env_;
  std::unique_ptr<Task> task_;
};

TEST_F(SignOffTest, BothFormsOfSignatureAreAccepted) {
  EXPECT_EQ(StatusOf("C1").verdict, Verdict::kWaitingHuman);
  SignList();
  AddRun(task_.get(), {});
  EXPECT_EQ(Approve(task_.get(), "C1", "bob", kBob, true).verdict, Verdict::kPass);
  EXPECT_EQ(StatusOf("C1").verdict, Verdict::kPass);
  EXPECT_EQ(Approve(task_.get(), "C1", "carol", kCarol, false).verdict, Verdict::kPass);
  EXPECT_EQ(StatusOf("C1").person, "carol");
  task_->WriteIndexes().ok();
  task_.reset();
  EXPECT_EQ(VerifyTask(&env_, dir_ / "t")->verdict, Verdict::kPass);
}

TEST_F(SignOffTest, TheRealSshKeygenSigns) {
  if (std::system("command -v ssh-keygen >/dev/null 2>&1") != 0)
    GTEST_SKIP() << "no ssh-keygen here";
  const std::string key = dir_ / "id";
  ASSERT_EQ(std::system(("ssh-keygen -q -t ed25519 -N '' -C dave -f " + key).c_str()), 0);
  std::string text = *env_.ReadFile(key + ".pub");
  text.pop_back();
  Start(TestToml() +
        fmt::format("[[reviewer]]\nperson = \"dave\"\nkey = \"{}\"\nsteps = [\"task\"]\n", text));
  auto request = PrepareReview(task_.get(), "task", {}, {});
  const std::string statement = StatementFor(*task_, *request, "dave");
  std::ofstream(dir_ / "s.json", std::ios::binary) << statement;
  ASSERT_EQ(std::system(("ssh-keygen -q -Y sign -f " + key + " -n tare-review " +
                         (dir_ / "s.json") + " 2>/dev/null")
                            .c_str()),
            0);
  auto result = AcceptSignOff(task_.get(), statement, *env_.ReadFile(dir_ / "s.json.sig"), {});
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->verdict, Verdict::kPass) << result->reason << result->detail;
  // Fingerprints are the ones that ssh-keygen prints.
  std::system(("ssh-keygen -l -f " + key + ".pub > " + (dir_ / "fp")).c_str());
  EXPECT_NE(env_.ReadFile(dir_ / "fp")->find(task_->state().signoffs.back().key),
            std::string::npos);
}

TEST_F(SignOffTest, TheListItselfMustBeSignedFirst) {
  AddRun(task_.get(), {});
  EXPECT_EQ(Offer("C1", "bob", kBob), reason::kConfigUnsigned);
  SignList();
  EXPECT_EQ(Offer("C1", "bob", kBob), "");
  // Eve adds herself: her list is not in force until someone of the old list signs it.
  Amend("revoked = false\n",
        fmt::format("revoked = false\n[[reviewer]]\nperson = \"eve\"\nkey = \"{}\"\n"
                    "steps = [\"task\", \"C1\"]\n",
                    kEve.RawText()));
  EXPECT_EQ(Offer("C1", "eve", kEve), reason::kConfigUnsigned);
  EXPECT_EQ(Offer("task", "eve", kEve), reason::kReviewerNotAllowed);
  EXPECT_EQ(Offer("task", "bob", kBob), "");
  EXPECT_EQ(Offer("C1", "eve", kEve), "");
}

TEST_F(SignOffTest, RefusedEveryWayAround) {
  SignList();
  AddRun(task_.get(), {});
  EXPECT_EQ(Offer("C1", "ann", kAnn), reason::kReviewerNotAllowed);
  EXPECT_EQ(Offer("C1", "eve", kEve), reason::kReviewerNotAllowed);
  EXPECT_EQ(Offer("C1", "bob", kEve), reason::kReviewerNotAllowed);      // bob's name, eve's key
  EXPECT_EQ(Offer("C9", "carol", kCarol), reason::kReviewerNotAllowed);  // not carol's step
  for (const char* word : {"--force", "TARE_FORCE", "--yes"}) {
    AcceptContext context;
    context.force_words = {word};
    EXPECT_EQ(Offer("C1", "bob", kBob, context), reason::kForceRefused);
  }
  const auto changed = [&](const std::function<void(std::string*, std::string*)>& change) {
    return Offer("C1", "bob", kBob, {}, change);
  };
  EXPECT_EQ(
      changed([](std::string*, std::string* sig) { (*sig)[120] = (*sig)[120] == 'A' ? 'B' : 'A'; }),
      reason::kSignatureInvalid);
  EXPECT_EQ(changed([](std::string*, std::string* sig) { *sig = "yes, approved"; }),
            reason::kSignatureInvalid);
  EXPECT_EQ(changed([](std::string*, std::string* sig) { sig->clear(); }),
            reason::kSignatureInvalid);
  EXPECT_EQ(changed([&](std::string* s, std::string* sig) { *sig = kBob.SshSign(*s, "git"); }),
            reason::kSignatureInvalid);  // a signature for another purpose
  EXPECT_EQ(changed([](std::string* s, std::string*) { *s = "approve\n"; }),
            reason::kStatementMalformed);
  EXPECT_EQ(changed([](std::string* s, std::string*) { s->insert(1, " "); }),
            reason::kStatementMalformed);
  EXPECT_EQ(
      changed([](std::string* s, std::string*) { s->replace(s->find("\"bob\""), 5, "\"Bob\""); }),
      reason::kReviewerNotAllowed);
  const auto resigned = [&](const std::function<void(Statement*)>& edit) {
    return changed([&](std::string* text, std::string* sig) {
      Statement s = *ParseStatement(*text);
      edit(&s);
      *text = *EncodeStatement(s);
      *sig = kBob.SshSign(*text);
    });
  };
  EXPECT_EQ(resigned([](Statement* s) { s->bundle_sha256 = std::string(64, '0'); }),
            reason::kWrongDigest);
  EXPECT_EQ(resigned([](Statement* s) { s->step = "C9"; }), reason::kWrongDigest);
  EXPECT_EQ(resigned([](Statement* s) { s->task_id = "01890000-0000-7000-8000-000000000001"; }),
            reason::kWrongDigest);
  EXPECT_EQ(resigned([](Statement* s) { s->time = "2020-01-01T00:00:00.000000000Z"; }),
            reason::kWrongDigest);
  EXPECT_EQ(resigned([](Statement* s) { s->time = "2999-01-01T00:00:00.000000000Z"; }),
            reason::kWrongDigest);
  EXPECT_EQ(StatusOf("C1").verdict, Verdict::kWaitingHuman);  // all that changed nothing
  EXPECT_EQ(Offer("C1", "bob", kBob), "");
}

TEST_F(SignOffTest, TheRequesterCannotApproveUnderAnyNameOrKey) {  // STOP-11
  // The requester's key on the list under another name, and the requester's name with another key.
  Start(TestToml() +
        fmt::format("[[reviewer]]\nperson = \"zoe\"\nkey = \"{}\"\nsteps = [\"C1\"]\n"
                    "[[reviewer]]\nperson = \"Ann \"\nkey = \"{}\"\nsteps = [\"C1\"]\n",
                    kAnn.RawText(), kEve.RawText()));
  SignList();
  AddRun(task_.get(), {});
  EXPECT_EQ(Offer("C1", "zoe", kAnn), reason::kSelfApproval);
  EXPECT_EQ(Offer("C1", "Ann ", kEve), reason::kSelfApproval);
}

TEST_F(SignOffTest, ExpiredAndRevokedKeys) {
  SignList();
  AddRun(task_.get(), {});
  ASSERT_EQ(Offer("C1", "bob", kBob), "");
  Amend("valid_until = \"2100-01-01T00:00:00Z\"", "valid_until = \"2021-01-01T00:00:00Z\"");
  EXPECT_EQ(Offer("task", "bob", kBob), reason::kKeyExpired);
  ASSERT_EQ(Offer("task", "carol", kCarol), "");
  EXPECT_EQ(Offer("C1", "bob", kBob), reason::kKeyExpired);
  // A clock set back does not bring the key to life: the log remembers later times.
  env_.now_ns = 1'600'000'000'000'000'000;
  EXPECT_EQ(Offer("C1", "bob", kBob), reason::kKeyExpired);
  env_.now_ns = 0;
  ASSERT_EQ(Offer("C1", "carol", kCarol), "");
  EXPECT_EQ(StatusOf("C1").verdict, Verdict::kPass);
}

TEST_F(SignOffTest, RevocationVoidsWhatTheKeySigned) {
  SignList();
  AddRun(task_.get(), {});
  ASSERT_EQ(Offer("C1", "carol", kCarol), "");
  ASSERT_EQ(StatusOf("C1").verdict, Verdict::kPass);
  Amend("revoked = false", "revoked = true");  // the last table is carol's
  EXPECT_EQ(StatusOf("C1").verdict, Verdict::kWaitingHuman);
  EXPECT_EQ(StatusOf("C1").reason, reason::kSignoffVoid);
  EXPECT_EQ(Offer("task", "carol", kCarol), reason::kKeyRevoked);
  ASSERT_EQ(Offer("task", "bob", kBob), "");
  EXPECT_EQ(Offer("C1", "carol", kCarol), reason::kKeyRevoked);
}

TEST_F(SignOffTest, APrivateKeyInsideTheTask) {
  SignList();
  AddRun(task_.get(), {});
  const std::string raw(reinterpret_cast<const char*>(kBob.seed.data()), 32);
  for (const std::string& bytes : {raw, HexOf(kBob.seed), HexOf(kBob.seed) + "\n"}) {
    std::ofstream(dir_ / "t/C1/notes", std::ios::binary) << bytes;
    EXPECT_EQ(Offer("C1", "bob", kBob), reason::kKeyInTask);
  }
  std::filesystem::remove(dir_ / "t/C1/notes");
  if (std::system("command -v ssh-keygen >/dev/null 2>&1") == 0) {
    // An encrypted OpenSSH key shows its public half all the same.
    ASSERT_EQ(std::system(("ssh-keygen -q -t ed25519 -N 'a secret' -f " + (dir_ / "k")).c_str()),
              0);
    const PrivateKeyScan scan = FindPrivateKeys(*env_.ReadFile(dir_ / "k"));
    ASSERT_EQ(scan.keys.size(), 1u);
    std::string text = *env_.ReadFile(dir_ / "k.pub");
    text.pop_back();
    EXPECT_EQ(Fingerprint(scan.keys[0]), Fingerprint(*ParsePublicKey(text)));
  }
  EXPECT_EQ(Offer("C1", "bob", kBob), "");
}

TEST_F(SignOffTest, AKeyIsFoundInEveryFormAndAtEveryDepth) {
  SignList();
  AddRun(task_.get(), {});
  const std::string seed(reinterpret_cast<const char*>(kBob.seed.data()), 32);
  const std::string pair =
      seed + std::string(reinterpret_cast<const char*>(kBob.public_key.bytes.data()), 32);
  const std::string der =
      std::string("\x30\x2e\x02\x01\x00\x30\x05\x06\x03\x2b\x65\x70\x04\x22\x04\x20", 16) + seed;
  for (const std::string& bytes :
       {pair, der, "before" + der + "after", EncodeBase64(seed), EncodeBase64(pair) + "\n"}) {
    std::ofstream(dir_ / "t/C1/notes", std::ios::binary) << bytes;
    EXPECT_EQ(Offer("C1", "bob", kBob), reason::kKeyInTask) << bytes.size();
  }
  // As openssl writes it, and encrypted: then nobody can tell whose it is.
  if (std::system("command -v openssl >/dev/null 2>&1") == 0) {
    const std::string key = dir_ / "k.pem", at = dir_ / "t/C1/notes";
    ASSERT_EQ(std::system(("openssl genpkey -algorithm ed25519 -out " + key +
                           " 2>/dev/null && "
                           "openssl pkcs8 -topk8 -in " +
                           key + " -passout pass:x -outform DER -out " + at + " 2>/dev/null")
                              .c_str()),
              0);
    EXPECT_EQ(Offer("C1", "bob", kBob), reason::kKeyInTask);
  }
  // A raw signature has 64 bytes too and is no key.
  std::ofstream(dir_ / "t/C1/notes", std::ios::binary) << kBob.Sign("something");
  EXPECT_EQ(Offer("C1", "bob", kBob), "");
  std::filesystem::remove(dir_ / "t/C1/notes");
  std::string deep = dir_ / "t/C1";
  for (int i = 0; i < 60; ++i) deep += "/d";
  std::filesystem::create_directories(deep);
  EXPECT_EQ(Offer("C1", "bob", kBob), "");
  std::ofstream(deep + "/notes", std::ios::binary) << seed;
  EXPECT_EQ(Offer("C1", "bob", kBob), reason::kKeyInTask);
  task_.reset();
  const auto report = VerifyTask(&env_, dir_ / "t");
  EXPECT_TRUE(std::any_of(report->findings.begin(), report->findings.end(),
                          [](const Finding& f) { return f.reason == reason::kKeyBesideTask; }));
}

TEST_F(SignOffTest, ARejectionIsNotUndoneByAnOlderApproval) {
  SignList();
  AddRun(task_.get(), {});
  const ReviewRequest request = *PrepareReview(task_.get(), "C1", {}, {});
  const auto offer = [&](const std::string& statement) {
    return AcceptSignOff(task_.get(), statement, kBob.SshSign(statement), {})->reason;
  };
  const std::string held_back = StatementFor(*task_, request, "bob");  // signed, not handed in
  const std::string approval = StatementFor(*task_, request, "bob");
  EXPECT_EQ(offer(approval), "");
  EXPECT_EQ(offer(StatementFor(*task_, request, "bob", "reject")), reason::kSignoffRejected);
  EXPECT_EQ(offer(approval), reason::kWrongDigest);
  EXPECT_EQ(offer(held_back), reason::kWrongDigest);
  EXPECT_EQ(StatusOf("C1").verdict, Verdict::kFail);
  EXPECT_EQ(offer(StatementFor(*task_, request, "bob")), "");  // a new word
  EXPECT_EQ(StatusOf("C1").verdict, Verdict::kPass);
}

TEST_F(SignOffTest, ARevocationIsNotUndoneByAnEdit) {
  SignList();
  AddRun(task_.get(), {});
  ASSERT_EQ(Offer("C1", "carol", kCarol), "");
  Amend("revoked = false", "revoked = true");
  ASSERT_EQ(StatusOf("C1").reason, reason::kSignoffVoid);
  Amend("revoked = true", "revoked = false");
  EXPECT_EQ(StatusOf("C1").reason, reason::kSignoffVoid);
  ASSERT_EQ(Offer("C1", "carol", kCarol), "");  // a new word of a key that is trusted again
  EXPECT_EQ(StatusOf("C1").verdict, Verdict::kPass);
}

TEST_F(SignOffTest, AnExpiredKeyDoesNotExtendItself) {
  SignList();
  Amend("valid_until = \"2100-01-01T00:00:00Z\"", "valid_until = \"2021-01-01T00:00:00Z\"");
  ASSERT_EQ(Offer("task", "carol", kCarol), "");
  Amend("valid_until = \"2021-01-01T00:00:00Z\"", "valid_until = \"2100-01-01T00:00:00Z\"");
  EXPECT_EQ(Offer("task", "bob", kBob), reason::kReviewerNotAllowed);
  EXPECT_EQ(Offer("task", "carol", kCarol), "");
}

TEST_F(SignOffTest, TheRequesterIsNotSomeoneElseByANewList) {  // STOP-11
  Start(TestToml() + fmt::format("[[reviewer]]\nperson = \"ann\"\nkey = \"{}\"\nsteps = [\"task\", "
                                 "\"C1\"]\n",
                                 kAnn.RawText()));
  SignList();
  EXPECT_EQ(Offer("task", "ann", kAnn), reason::kSelfApproval);
  std::string toml = *env_.ReadFile(dir_ / "t/task.toml");
  const auto put = [&](const std::string& from, const std::string& to) {
    const size_t at = toml.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    toml.replace(at, from.size(), to);
  };
  put("person = \"ann\"", "person = \"zed\"");
  put(fmt::format("keys = [\"{}\"]", kAnn.RawText()), "keys = []");
  ASSERT_TRUE(env_.WriteFileAtomic(dir_ / "t/task.toml", toml).ok());
  ASSERT_TRUE(task_->Amend("another requester").ok());
  EXPECT_EQ(Offer("task", "ann", kAnn), reason::kSelfApproval);
  EXPECT_EQ(Offer("task", "bob", kBob), "");
}

TEST_F(SignOffTest, NamesThatLookTheSameAreTheRequesters) {  // STOP-11
  const std::vector<std::string> names = {"ANN", "ann\u00a0", "a\u00adnn", "a\u2060nn", "\uff41nn"};
  std::string toml = TestToml();
  for (size_t i = 0; i < names.size(); ++i) {
    toml += fmt::format("[[reviewer]]\nperson = \"{}\"\nkey = \"{}\"\nsteps = [\"C1\"]\n", names[i],
                        TestKey(static_cast<uint8_t>(20 + i)).RawText());
  }
  Start(toml);
  SignList();
  AddRun(task_.get(), {});
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(Offer("C1", names[i], TestKey(static_cast<uint8_t>(20 + i))), reason::kSelfApproval)
        << names[i];
  }
}

TEST_F(SignOffTest, ValidityEndsBetweenTheCheckAndTheRecord) {
  SignList();
  AddRun(task_.get(), {});
  // The clock runs on at every look, over the last seconds of validity: whatever was accepted
  // verifies, and what was not is refused as expired, before its run began or just after.
  env_.now_ns = 4'102'444'800'000'000'000 - 8'000'000'000;
  env_.step_ns = 37'000'000;
  int accepted = 0;
  std::string why;
  for (; why.empty() && accepted < 100; accepted += why.empty()) {
    const ReviewRequest request = *PrepareReview(task_.get(), "C1", {}, {});
    const std::string statement = StatementFor(*task_, request, "bob");
    why = AcceptSignOff(task_.get(), statement, kBob.SshSign(statement), {})->reason;
  }
  EXPECT_GT(accepted, 0);
  EXPECT_EQ(why, reason::kKeyExpired);
  task_.reset();
  const auto report = VerifyTask(&env_, dir_ / "t");
  EXPECT_EQ(report->verdict, Verdict::kPass)
      << report->findings[0].where << " " << report->findings[0].message;
}

TEST_F(SignOffTest, AForgedRecordOpensNothing) {
  SignList();
  AddRun(task_.get(), {});
  const ReviewRequest request = *PrepareReview(task_.get(), "C1", {}, {});
  // An event that names the signature of another step: in order for the log, borne out by no file.
  const SignOffRecord& list = task_->state().signoffs.back();
  EventDraft forged{request.run_id,
                    "signoff",
                    {{"step", "C1"},
                     {"bundle", request.bundle_sha256},
                     {"statement", list.statement_path},
                     {"signature", list.signature_path},
                     {"person", "bob"},
                     {"key", list.key},
                     {"decision", "approve"}}};
  ASSERT_TRUE(task_->Append(forged).ok());
  const auto view = ReadTask(&env_, dir_ / "t");
  Staleness s(view->state);
  EXPECT_EQ(StatusOfSignOff(view->state, &s, "C1").reason, reason::kSignoffVoid);
  task_.reset();
  task_ = *Task::Open(&env_, dir_ / "t", "ann");
  EXPECT_EQ(StatusOf("C1").reason, reason::kSignoffVoid);
  EXPECT_EQ(VerifyTask(&env_, dir_ / "t")->verdict, Verdict::kFail);
}

// Answers one request for identities as ssh-agent does.
class FakeAgent {
 public:
  FakeAgent(const std::string& path, const PublicKey& key) : path_(path) {
    fd_ = ::socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::snprintf(address.sun_path, sizeof(address.sun_path), "%s", path.c_str());
    EXPECT_EQ(::bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(::listen(fd_, 4), 0);
    const auto wire = [](std::string_view s) {
      std::string out(4, '\0');
      for (int i = 0; i < 4; ++i)
        out[static_cast<size_t>(i)] = static_cast<char>(s.size() >> (24 - 8 * i));
      return out.append(s);
    };
    const std::string raw(reinterpret_cast<const char*>(key.bytes.data()), 32);
    const std::string body =
        std::string("\x0c\0\0\0\1", 5) + wire(wire("ssh-ed25519") + wire(raw)) + wire("k");
    answer_ = wire(body);
    thread_ = std::thread([this] {
      while (true) {
        const int client = ::accept(fd_, nullptr, nullptr);
        if (client < 0) return;
        char request[5];
        if (::recv(client, request, 5, MSG_WAITALL) == 5) {
          if (!silent) (void)::send(client, answer_.data(), answer_.size(), MSG_NOSIGNAL);
        }
        ::close(client);
      }
    });
  }
  std::atomic<bool> silent = false;  // hangs up without a word
  ~FakeAgent() {
    ::shutdown(fd_, SHUT_RDWR);
    thread_.join();
    ::close(fd_);
  }

 private:
  std::string path_, answer_;
  int fd_ = -1;
  std::thread thread_;
};

TEST_F(SignOffTest, AnAgentsKeyNeedsAPersonAtATerminal) {
  SignList();
  AddRun(task_.get(), {});
  FakeAgent agent(dir_ / "a.sock", kBob.public_key);
  AcceptContext context;
  context.agent_socket = dir_ / "a.sock";
  EXPECT_EQ(Offer("C1", "bob", kBob, context), reason::kAgentUnattended);
  EXPECT_EQ(Offer("C1", "carol", kCarol, context), "");  // a key that the agent does not offer
  agent.silent = true;  // whether it offers the key is not known then
  EXPECT_EQ(Offer("C1", "carol", kCarol, context), reason::kAgentUnattended);
  context.person_at_terminal = true;
  EXPECT_EQ(Offer("C1", "bob", kBob, context), "");
  context.person_at_terminal = false;
  context.agent_socket = dir_ / "nobody.sock";
  EXPECT_EQ(Offer("C1", "bob", kBob, context), "");
}

TEST_F(SignOffTest, AnyChangeUnderneathVoidsIt) {  // STOP-09, STOP-12, STOP-13
  SignList();
  RunSpec spec;
  const std::string run = AddRun(task_.get(), spec);
  ASSERT_EQ(Offer("C1", "bob", kBob), "");
  const auto state = [&] { return StatusOf("C1").reason; };
  EXPECT_EQ(state(), "");
  Amend("level = \"info\"", "level = \"debug\"");
  EXPECT_EQ(state(), "");  // a log level is not reviewed again
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"input_tokens = 64", "input_tokens = 65"},
           {"learning_rate = 0.001", "learning_rate = 0.002"},
           {"tp = 1", "tp = 2"},
           {"kv_cache = \"bf16\"", "kv_cache = \"e4m3\""},
           {"device = \"cpu\"", "device = \"h200\""},
           {"hidden_size = 64", "hidden_size = 65"}}) {
    Amend(from, to);
    EXPECT_EQ(state(), reason::kSignoffVoid) << to;
    Amend(to, from);
    EXPECT_EQ(state(), "") << from;
  }
  EventDraft seen{
      task_->state().task_id,
      "observed",
      {{"candidate", ""},
       {"dependencies",
        DependenciesToJson({{DependencyType::kCode, "src/a.cc", std::string(64, 'f')}})},
       {"unknown", Json::array()}}};
  ASSERT_TRUE(task_->Append(seen).ok());
  EXPECT_EQ(state(), reason::kSignoffVoid);
}

TEST_F(SignOffTest, ARejectionStandsAndAnOldApprovalDoesNotCoverANewRequest) {
  SignList();
  AddRun(task_.get(), {});
  auto request = PrepareReview(task_.get(), "C1", {}, {"is the spread acceptable?"});
  std::string statement = StatementFor(*task_, *request, "bob", "reject");
  auto result = AcceptSignOff(task_.get(), statement, kBob.SshSign(statement), {});
  EXPECT_EQ(result->verdict, Verdict::kFail);
  EXPECT_EQ(StatusOf("C1").reason, reason::kSignoffRejected);
  ASSERT_EQ(Offer("C1", "bob", kBob), "");
  ASSERT_TRUE(PrepareReview(task_.get(), "C1", {}, {}).ok());
  EXPECT_EQ(StatusOf("C1").verdict, Verdict::kWaitingHuman);
}

TEST(PublicKeys, ParsedStrictly) {
  EXPECT_TRUE(ParsePublicKey(kBob.SshText()).ok());
  EXPECT_TRUE(ParsePublicKey(kBob.RawText()).ok());
  EXPECT_EQ(*ParsePublicKey(kBob.SshText()), *ParsePublicKey(kBob.RawText()));
  for (const std::string& bad :
       {std::string("ssh-rsa AAAAB3NzaC1yc2EAAAADAQAB"), std::string("ed25519:00"),
        std::string("ssh-ed25519"), std::string("ssh-ed25519 !!!!"),
        std::string("ssh-ed25519 AAAA"), std::string(),
        "ed25519:" + std::string(64, '0'),  // small order
        "ed25519:01" + std::string(62, '0'), "ed25519:01" + std::string(60, '0') + "80"}) {
    EXPECT_FALSE(ParsePublicKey(bad).ok()) << bad;
  }
  for (const char* text : {"", "QQ=", "QR==", "QQ==QQ==", "Q===", "QUJ\n"}) {
    EXPECT_EQ(DecodeBase64(text).ok(), text[0] == '\0') << text;
  }
  // RFC 8032, test 2.
  const PublicKey key =
      *ParsePublicKey("ed25519:3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c");
  const Signature s = *ParseSignature(
      "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
      "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00");
  EXPECT_TRUE(VerifySignature(key, s, "\x72").ok());
  EXPECT_FALSE(VerifySignature(key, s, "\x73").ok());
  // S + L is another spelling of the same number and must not count.
  Signature malleable = s;
  const uint8_t order[32] = {0xed, 0xd3, 0xf5, 0x5c, 0x1a, 0x63, 0x12, 0x58, 0xd6, 0x9c, 0xf7,
                             0xa2, 0xde, 0xf9, 0xde, 0x14, 0,    0,    0,    0,    0,    0,
                             0,    0,    0,    0,    0,    0,    0,    0,    0,    0x10};
  int carry = 0;
  for (size_t i = 0; i < 32; ++i) {
    carry += malleable.bytes[32 + i] + order[i];
    malleable.bytes[32 + i] = static_cast<uint8_t>(carry);
    carry >>= 8;
  }
  EXPECT_FALSE(VerifySignature(key, malleable, "\x72").ok());
}

}  // namespace
}  // namespace tare::workflow
