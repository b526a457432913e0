#pragma once

// Shared by the tests of this room: test keys that sign (the product never does), and a small task
// with everything in it: configuration, runs that pass, fail and are incomplete, a signed list of
// reviewers and an approved C1.

#include <openssl/evp.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/sha256.h"
#include "workflow/layout.h"
#include "workflow/signoff.h"
#include "workflow/task.h"
#include "workflow/testing.h"

namespace tare::workflow {

// A key made from one byte, so that tests are the same every time.
struct TestKey {
  explicit TestKey(uint8_t byte) {
    seed.fill(byte);
    Pkey key = Make();
    size_t size = 32;
    EXPECT_EQ(EVP_PKEY_get_raw_public_key(key.get(), public_key.bytes.data(), &size), 1);
  }
  std::string Sign(std::string_view message) const {
    Pkey key = Make();
    std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(),
                                                                    EVP_MD_CTX_free);
    std::string out(64, '\0');
    size_t size = out.size();
    EXPECT_EQ(EVP_DigestSignInit(context.get(), nullptr, nullptr, nullptr, key.get()), 1);
    EXPECT_EQ(
        EVP_DigestSign(context.get(), reinterpret_cast<unsigned char*>(out.data()), &size,
                       reinterpret_cast<const unsigned char*>(message.data()), message.size()),
        1);
    return out;
  }
  // As `ssh-keygen -Y sign` writes it.
  std::string SshSign(std::string_view message,
                      const std::string& name_space = "tare-review") const {
    const auto wire = [](std::string_view s) {
      std::string out(4, '\0');
      for (int i = 0; i < 4; ++i)
        out[static_cast<size_t>(i)] = static_cast<char>(s.size() >> (24 - 8 * i));
      return out.append(s);
    };
    const std::string raw(reinterpret_cast<const char*>(public_key.bytes.data()), 32);
    const Sha256Digest digest = Sha256Of(message);
    const std::string hash(reinterpret_cast<const char*>(digest.data()), digest.size());
    const std::string head = wire(name_space) + wire("") + wire("sha256");
    const std::string signature = Sign("SSHSIG" + head + wire(hash));
    std::string blob = "SSHSIG";
    blob += std::string("\0\0\0\1", 4) + wire(wire("ssh-ed25519") + wire(raw)) + head;
    blob += wire(wire("ssh-ed25519") + wire(signature));
    const std::string base64 = EncodeBase64(blob);
    std::string out = "-----BEGIN SSH SIGNATURE-----\n";
    for (size_t i = 0; i < base64.size(); i += 70) out += base64.substr(i, 70) + "\n";
    return out + "-----END SSH SIGNATURE-----\n";
  }
  std::string RawText() const { return "ed25519:" + HexOf(public_key.bytes); }
  std::string SshText() const {
    std::string blob("\0\0\0\x0bssh-ed25519\0\0\0\x20", 19);
    blob.append(reinterpret_cast<const char*>(public_key.bytes.data()), 32);
    return "ssh-ed25519 " + EncodeBase64(blob) + " test";
  }

  std::array<uint8_t, 32> seed{};
  PublicKey public_key;

 private:
  using Pkey = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;
  Pkey Make() const {
    return Pkey(EVP_PKEY_new_raw_private_key(EVP_PKEY_ED25519, nullptr, seed.data(), 32),
                EVP_PKEY_free);
  }
};

inline const TestKey kAnn(1);    // the requester
inline const TestKey kBob(2);    // a reviewer with an OpenSSH key
inline const TestKey kCarol(3);  // a reviewer with a raw key
inline const TestKey kEve(9);    // on no list

inline std::string TestToml() {
  return fmt::format(
      "schema = \"tare-task-1\"\n"
      "[task]\nname = \"small\"\n[model]\narchitecture = \"LlamaForCausalLM\"\nhidden_size = 64\n"
      "num_layers = 4\nnum_attention_heads = 4\nnum_key_value_heads = 2\nvocab_size = 512\n"
      "[weights]\ndtype = \"bf16\"\n[inference]\nimplementation = \"tare\"\n"
      "[training]\nroute = \"tare\"\noptimizer = \"adamw\"\nlearning_rate = 1e-3\n"
      "[target]\nconsistency = \"bitwise\"\n[hardware]\ndevice = \"cpu\"\ncount = 1\n"
      "[workload]\ninput_tokens = 64\noutput_tokens = 32\nconcurrency = [1, 2]\n"
      "[precision]\nactivations = \"bf16\"\nkv_cache = \"bf16\"\n[parallelism]\ntp = 1\npp = 1\n"
      "[requester]\nperson = \"ann\"\nkeys = [\"{}\"]\n"
      "[[reviewer]]\nperson = \"bob\"\nkey = \"{}\"\nsteps = [\"task\", \"C1\", \"C9\"]\n"
      "valid_from = \"2020-01-01T00:00:00Z\"\nvalid_until = \"2100-01-01T00:00:00Z\"\n"
      "[[reviewer]]\nperson = \"carol\"\nkey = \"{}\"\nsteps = [\"task\", \"C1\"]\n",
      kAnn.RawText(), kBob.SshText(), kCarol.RawText());
}

inline Scope TestScope() {
  return *Scope::FromText("shape=b1|b2;topology=1;dtype=bf16;model=mini;path=decode");
}

inline Conclusion PassConclusion() {
  Conclusion c;
  c.verdict = Verdict::kPass;
  c.scope = TestScope();
  return c;
}

inline Conclusion FailConclusion(const std::string& reason = "bit-mismatch") {
  Conclusion c;
  c.verdict = Verdict::kFail;
  c.reason = reason;
  c.scope = TestScope();
  return c;
}

inline std::unique_ptr<Task> InitTask(Env* env, const std::string& dir,
                                      const std::string& toml = TestToml()) {
  const std::string from = dir + ".user.toml";
  EXPECT_TRUE(env->WriteFileAtomic(from, toml).ok());
  InitOptions options;
  options.user_toml = from;
  InitReport report;
  auto task = Task::Init(env, dir, "ann", options, &report);
  EXPECT_TRUE(task.ok()) << task.status().ToString();
  EXPECT_TRUE(env->Remove(from).ok());
  return task.ok() ? *std::move(task) : nullptr;
}

struct RunSpec {
  std::string step = "C1";
  EvidenceKind kind = EvidenceKind::kE10;
  std::string candidate;
  std::optional<Conclusion> conclusion = PassConclusion();
  std::vector<Dependency> dependencies = {
      {DependencyType::kCode, "src/a.cc", std::string(64, 'a')}};
  std::optional<int64_t> exit_code = 0;
  std::vector<std::pair<std::string, std::string>> raw = {
      {"raw.jsonl", "{\"logprob\":\"bf800000\"}\n"}};
  std::string skip;  // a role to leave out
  std::vector<std::string> command = {"measure", "--all"};
};

inline std::string AddRun(Task* task, const RunSpec& spec) {
  RunStart start;
  start.step = spec.step;
  start.kind = spec.kind;
  start.command = spec.command;
  start.candidate = spec.candidate;
  start.content_id = std::string(64, 'c');
  start.dependencies = spec.dependencies;
  auto id = task->StartRun(start);
  EXPECT_TRUE(id.ok()) << id.status().ToString();
  const auto add = [&](const std::string& name, Role role, std::string_view bytes) {
    if (RoleName(role) == spec.skip) return;
    const Status status = task->AddBytes(*id, name, role, bytes);
    EXPECT_TRUE(status.ok()) << status.ToString();
  };
  add("config.json", Role::kConfig, "{\"command\":[\"measure\"]}\n");
  add("identity.json", Role::kIdentity, "{\"host\":\"h\"}\n");
  for (const auto& [name, bytes] : spec.raw) add(name, Role::kRaw, bytes);
  if (spec.conclusion)
    add("conclusion.json", Role::kConclusion, spec.conclusion->ToJson().dump() + "\n");
  RunEnd end;
  end.exit_code = spec.exit_code;
  end.conclusion = spec.conclusion;
  const Status ended = task->EndRun(*id, end);
  EXPECT_TRUE(ended.ok()) << ended.ToString();
  return *id;
}

inline std::string StatementFor(const Task& task, const ReviewRequest& request,
                                const std::string& person,
                                const std::string& decision = "approve") {
  Statement s;
  s.task_id = task.state().task_id;
  s.step = request.step;
  s.bundle_sha256 = request.bundle_sha256;
  s.person = person;
  s.decision = decision;
  s.time = std::max(FormatUtc(task.env()->NowNs()), task.state().latest_time);
  return *EncodeStatement(s);
}

// Request, statement, signature, acceptance.
inline AcceptResult Approve(Task* task, const std::string& step, const std::string& person,
                            const TestKey& key, bool ssh) {
  auto request = PrepareReview(task, step, {}, {});
  EXPECT_TRUE(request.ok()) << request.status().ToString();
  const std::string statement = StatementFor(*task, *request, person);
  auto result =
      AcceptSignOff(task, statement, ssh ? key.SshSign(statement) : key.Sign(statement), {});
  EXPECT_TRUE(result.ok()) << result.status().ToString();
  return *result;
}

// A task with all kinds of records, for crash and tamper tests.
inline void BuildSmallTask(Env* env, const std::string& dir) {
  auto task = InitTask(env, dir);
  EXPECT_EQ(Approve(task.get(), "task", "bob", kBob, true).verdict, Verdict::kPass);
  RunSpec bad;
  bad.candidate = "tile-64";
  bad.conclusion = FailConclusion();
  bad.exit_code = 1;
  AddRun(task.get(), bad);
  RunSpec good;
  good.candidate = "tile-32";
  AddRun(task.get(), good);
  EXPECT_EQ(Approve(task.get(), "C1", "carol", kCarol, false).verdict, Verdict::kPass);
  EXPECT_TRUE(task->WriteIndexes().ok());
}

}  // namespace tare::workflow
