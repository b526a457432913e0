// Tamper tests: every byte of a small task flipped, records and files removed, moved, replaced;
// both verifiers, `tare verify` and tools/verify_min.py, must see each (GEN-14, GEN-15, GEN-19).

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <map>

#include "base/reasons.h"
#include "workflow/archive.h"
#include "workflow/testing_agree.h"
#include "workflow/testing_task.h"
#include "workflow/verify.h"

namespace tare::workflow {
namespace {

namespace fs = std::filesystem;

VerifyOptions OneThread() {
  VerifyOptions options;
  options.threads = 1;
  return options;
}

// One digit a case: the exit status of `tare verify`.
std::string FlipAll(Env* env, const std::string& dir, int mask, size_t stride,
                    std::string* missed) {
  std::vector<std::string> paths;
  for (const TreeEntry& e : *ListTree(env, dir)) paths.push_back(dir + "/" + e.path);
  std::sort(paths.begin(), paths.end());
  std::string digits;
  size_t number = 0;
  for (const std::string& path : paths) {
    const std::string data = *env->ReadFile(path);
    FILE* file = std::fopen(path.c_str(), "r+b");
    for (size_t i = 0; i < data.size(); ++i) {
      if (++number % stride != 0) continue;
      const auto put = [&](char c) {
        std::fseek(file, static_cast<long>(i), SEEK_SET);
        std::fputc(c, file);
        std::fflush(file);
      };
      put(static_cast<char>(data[i] ^ mask));
      digits += OwnStatus(env, dir);
      if (digits.back() == '0') *missed += fmt::format("{} byte {}\n", path, i);
      put(data[i]);
    }
    std::fclose(file);
  }
  return digits;
}

void FlipAndCompare(int mask, size_t stride) {
  TempDir dir;
  TestEnv env;
  BuildSmallTask(&env, dir / "t");
  ASSERT_EQ(VerifyTask(&env, dir / "t")->verdict, Verdict::kPass);
  // The second verifier works on a copy, beside the first.
  fs::copy(dir / "t", dir / "u", fs::copy_options::recursive);
  const std::string command = PythonCommand(fmt::format("flips {} {} {}", dir / "u", mask, stride));
  FILE* pipe = ::popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string missed;
  const std::string ours = FlipAll(&env, dir / "t", mask, stride, &missed);
  EXPECT_EQ(missed, "") << "flipped bytes that verify did not see";
  EXPECT_EQ(VerifyTask(&env, dir / "t")->verdict, Verdict::kPass);  // put back as it was
  const std::string theirs = ReadAll(pipe);
  ASSERT_EQ(theirs.size(), ours.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    ASSERT_EQ(theirs[i], ours[i]) << "the verifiers disagree on flip " << i;
  }
  std::printf("%zu flips, each reported by both verifiers\n", ours.size());
}

TEST(Tamper, FlippedBytesAreSeenByBothVerifiers) { FlipAndCompare(0x01, 61); }
TEST(Tamper, SlowEveryByteFlippedIsSeenByBothVerifiers) {
  FlipAndCompare(0x01, 1);
  FlipAndCompare(0x80, 11);
}

// The lines of a log, edited and put back.
std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> out;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    out.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return out;
}
// Recomputes seq, prev and self of every line: what someone with write access can do.
std::string Reseal(const std::vector<std::string>& lines) {
  std::string out, prev = kNoPrevious;
  uint64_t seq = 0;
  for (const std::string& line : lines) {
    auto event = ParseEvent(line, false);
    EXPECT_TRUE(event.ok());
    event->seq = seq++;
    event->prev = prev;
    const std::string sealed = *EncodeEvent(*event);
    prev = LineHash(sealed);
    out += sealed + "\n";
  }
  return out;
}

// Another actor in one line; with `seal` its own hash is made again.
void EditActor(std::string* line, bool seal) {
  const size_t at = line->find("\"actor\":\"") + 9;
  (*line)[at] = (*line)[at] == 'x' ? 'y' : 'x';
  if (!seal) return;
  line->replace(line->size() - 66, 64,
                Hex(Sha256Of(std::string_view(*line).substr(0, line->size() - 75))));
}

TEST(Tamper, StructuralChangesAreSeenByBothVerifiers) {
  TempDir dir;
  TestEnv env;
  BuildSmallTask(&env, dir / "t");
  const Checkpoint head = VerifyTask(&env, dir / "t")->head;
  auto view = ReadTask(&env, dir / "t");
  const State& state = view->state;
  const ArtifactRecord* raw = nullptr;
  for (const ArtifactRecord& a : state.artifacts) {
    if (a.role == Role::kRaw) raw = &a;
  }
  ASSERT_NE(raw, nullptr);
  const std::string sidecar = raw->path + ".intoto.jsonl";
  const ArtifactRecord& other = state.artifacts[0];
  const std::string log = *env.ReadFile(dir / "t/events.jsonl");
  const auto edit_log = [&](const std::string& at,
                            const std::function<void(std::vector<std::string>&)>& change,
                            bool reseal) {
    std::vector<std::string> lines = Lines(log);
    change(lines);
    std::string text;
    if (reseal) {
      text = Reseal(lines);
    } else {
      for (const std::string& l : lines) text += l + "\n";
    }
    std::ofstream(at + "/events.jsonl", std::ios::binary) << text;
  };
  // The last digit of one event's time, and every hash after it made again.
  const auto rewrite = [&](const std::string& at) {
    edit_log(
        at,
        [](auto& l) {
          char& digit = l[1][l[1].find("\"time\":\"") + 8 + 28];
          digit = digit == '0' ? '1' : '0';
          l[1].replace(l[1].size() - 66, 64,
                       Hex(Sha256Of(std::string_view(l[1]).substr(0, l[1].size() - 75))));
        },
        true);
    for (const char* p : {"/index.md", "/C1/index.md", "/task/index.md"}) fs::remove(at + p);
  };
  struct Case {
    const char* name;
    bool pass;
    std::function<void(const std::string&)> change;
    bool with_checkpoint = false;
  };
  const std::vector<Case> cases = {
      {"untouched", true, [](const std::string&) {}},
      {"artifact removed", false, [&](const std::string& at) { fs::remove(at + "/" + raw->path); }},
      {"sidecar removed", false, [&](const std::string& at) { fs::remove(at + "/" + sidecar); }},
      {"sidecars swapped", false,
       [&](const std::string& at) {
         const std::string a = at + "/" + sidecar, b = at + "/" + other.path + ".intoto.jsonl";
         fs::rename(a, a + "x");
         fs::rename(b, a);
         fs::rename(a + "x", b);
       }},
      {"artifacts swapped", false,
       [&](const std::string& at) {
         const std::string a = at + "/" + raw->path, b = at + "/" + other.path;
         fs::rename(a, a + "x");
         fs::rename(b, a);
         fs::rename(a + "x", b);
       }},
      {"artifact replaced by a link to equal bytes", false,
       [&](const std::string& at) {
         const std::string a = at + "/" + raw->path;
         fs::rename(a, at + ".elsewhere");
         fs::create_symlink(at + ".elsewhere", a);
       }},
      {"run folder replaced by a link", false,
       [&](const std::string& at) {
         const std::string a = at + "/" + raw->path.substr(0, raw->path.rfind('/'));
         fs::rename(a, at + ".folder");
         fs::create_directory_symlink(at + ".folder", a);
       }},
      {"artifact replaced by a folder", false,
       [&](const std::string& at) {
         fs::remove(at + "/" + raw->path);
         fs::create_directory(at + "/" + raw->path);
       }},
      {"artifact grown", false,
       [&](const std::string& at) { std::ofstream(at + "/" + raw->path, std::ios::app) << "x"; }},
      {"artifact emptied", false,
       [&](const std::string& at) { fs::resize_file(at + "/" + raw->path, 0); }},
      {"task.toml commented", false,
       [](const std::string& at) { std::ofstream(at + "/task.toml", std::ios::app) << "# x\n"; }},
      {"task.toml removed", false, [](const std::string& at) { fs::remove(at + "/task.toml"); }},
      {"index removed", true, [](const std::string& at) { fs::remove(at + "/index.md"); }},
      {"index edited", false,
       [](const std::string& at) { std::ofstream(at + "/C1/index.md", std::ios::app) << "x\n"; }},
      {"lock filled", false,
       [](const std::string& at) { std::ofstream(at + "/events.lock") << "x"; }},
      {"stray file", true, [](const std::string& at) { std::ofstream(at + "/notes.txt") << "x"; }},
      {"log torn", false,
       [](const std::string& at) {
         fs::resize_file(at + "/events.jsonl", fs::file_size(at + "/events.jsonl") - 9);
       }},
      {"a record begun after the last", false,
       [](const std::string& at) {
         std::ofstream(at + "/events.jsonl", std::ios::app | std::ios::binary) << "{\"seq\":";
       }},
      {"record deleted", false,
       [&](const std::string& at) {
         edit_log(
             at, [](auto& l) { l.erase(l.begin() + 5); }, false);
       }},
      {"record duplicated", false,
       [&](const std::string& at) {
         edit_log(
             at, [](auto& l) { l.insert(l.begin() + 5, l[5]); }, false);
       }},
      {"records reordered", false,
       [&](const std::string& at) {
         edit_log(
             at, [](auto& l) { std::swap(l[5], l[6]); }, false);
       }},
      // Each of the three links of the chain alone: what the other two would let through.
      {"last record edited", false,
       [&](const std::string& at) {
         edit_log(
             at, [](auto& l) { EditActor(&l.back(), false); }, false);
         for (const char* p : {"/index.md", "/C1/index.md", "/task/index.md"}) fs::remove(at + p);
       }},
      {"record edited and sealed again", false,
       [&](const std::string& at) {
         edit_log(
             at, [](auto& l) { EditActor(&l[5], true); }, false);
         for (const char* p : {"/index.md", "/C1/index.md", "/task/index.md"}) fs::remove(at + p);
       }},
      {"last record numbered otherwise and sealed again", false,
       [&](const std::string& at) {
         edit_log(
             at,
             [](auto& l) {
               auto event = ParseEvent(l.back(), false);
               event->seq += 1;
               l.back() = *EncodeEvent(*event);
             },
             false);
         for (const char* p : {"/index.md", "/C1/index.md", "/task/index.md"}) fs::remove(at + p);
       }},
      {"cut back to a whole line, no checkpoint", true,
       [&](const std::string& at) {
         edit_log(
             at, [](auto& l) { l.pop_back(); }, false);
         for (const char* p : {"/index.md", "/C1/index.md", "/task/index.md"}) fs::remove(at + p);
       }},
      {"cut back to a whole line, checkpoint", false,
       [&](const std::string& at) {
         edit_log(
             at, [](auto& l) { l.pop_back(); }, false);
         for (const char* p : {"/index.md", "/C1/index.md", "/task/index.md"}) fs::remove(at + p);
       },
       true},
      {"rewritten from scratch, checkpoint", false,
       [&](const std::string& at) {
         edit_log(
             at, [](auto& l) { l.pop_back(); }, true);
         for (const char* p : {"/index.md", "/C1/index.md", "/task/index.md"}) fs::remove(at + p);
       },
       true},
      // A bundle holds the head of the log that it was made from.
      {"rewritten with as many records, no checkpoint", false, rewrite},
      {"rewritten with as many records, checkpoint", false, rewrite, true},
      {"untouched, checkpoint", true, [](const std::string&) {}, true},
      {"a bundle's statement re-sealed for another decision", false,
       [&](const std::string& at) {
         const SignOffRecord& s = state.signoffs.back();
         std::string statement = *env.ReadFile(at + "/" + s.statement_path);
         statement.replace(statement.find("approve"), 7, "reject!");
         std::ofstream(at + "/" + s.statement_path, std::ios::binary) << statement;
         const std::string old = state.FindArtifact(s.statement_path)->sha256;
         const std::string now = Hex(Sha256Of(statement));
         edit_log(
             at,
             [&](auto& l) {
               for (std::string& line : l) {
                 for (size_t p; (p = line.find(old)) != std::string::npos;)
                   line.replace(p, 64, now);
                 const size_t self = line.size() - 66;
                 line.replace(self, 64,
                              Hex(Sha256Of(std::string_view(line).substr(0, line.size() - 75))));
               }
             },
             true);
         for (const char* p : {"/index.md", "/C1/index.md", "/task/index.md"}) fs::remove(at + p);
       }},
  };
  std::string ours, directories;
  for (size_t i = 0; i < cases.size(); ++i) {
    const std::string at = dir / fmt::format("case{}", i);
    fs::copy(dir / "t", at, fs::copy_options::recursive);
    cases[i].change(at);
    VerifyOptions options = OneThread();
    if (cases[i].with_checkpoint) {
      options.checkpoint = head;
      std::ofstream(at + ".checkpoint") << EncodeCheckpoint(head);
    }
    auto report = VerifyTask(&env, at, options);
    ASSERT_TRUE(report.ok()) << cases[i].name;
    EXPECT_EQ(report->verdict == Verdict::kPass, cases[i].pass)
        << cases[i].name << ": "
        << (report->findings.empty()
                ? ""
                : report->findings[0].reason + " " + report->findings[0].message);
    EXPECT_FALSE(report->not_proven.empty());
    ours += static_cast<char>('0' + ExitCode(report->verdict));
    directories += " " + at;
  }
  const std::string theirs = RunTool(PythonCommand("dirs" + directories));
  ASSERT_EQ(theirs.size(), ours.size());
  for (size_t i = 0; i < cases.size(); ++i) EXPECT_EQ(theirs[i], ours[i]) << cases[i].name;
}

// Someone with write access and no key exchanges a sign-off and makes every digest after it again:
// files, sidecars and the whole log agree. Only the signature and what it says are left to tell.
TEST(Tamper, ASignOffForgedWithEveryDigestMadeAgainIsSeenByBothVerifiers) {
  TempDir dir;
  TestEnv env;
  BuildSmallTask(&env, dir / "t");
  const State state = ReadTask(&env, dir / "t")->state;
  const SignOffRecord& s = state.signoffs.back();
  ASSERT_EQ(s.person, "carol");
  const std::string statement = *env.ReadFile(dir / "t/" + s.statement_path);
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string out = statement;
    const size_t at = out.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return out.replace(at, from.size(), to);
  };
  std::string other_bundle = s.bundle_sha256;
  other_bundle[0] = other_bundle[0] == '0' ? '1' : '0';
  struct Case {
    const char* name;
    bool pass;
    std::string statement, signature;
  };
  const auto signed_case = [&](const char* name, bool pass, const std::string& text) {
    return Case{name, pass, text, kCarol.Sign(text)};
  };
  const std::vector<Case> cases = {
      signed_case("the same, made again", true, statement),
      {"signed by another key", false, statement, TestKey(0x77).Sign(statement)},
      {"signed over something else", false, statement, kCarol.Sign("never said")},
      signed_case("about another bundle", false, with(s.bundle_sha256, other_bundle)),
      signed_case("of another person", false, with("carol", "bob")),
      signed_case("for another step", false, with("\"C1\"", "\"C2\"")),
      signed_case("decided otherwise", false, with("approve", "reject")),
  };
  std::string ours, directories;
  for (size_t i = 0; i < cases.size(); ++i) {
    const std::string at = dir / fmt::format("case{}", i);
    fs::copy(dir / "t", at, fs::copy_options::recursive);
    std::map<std::string, std::string> now;  // path to new bytes
    now[s.statement_path] = cases[i].statement;
    now[s.signature_path] = cases[i].signature;
    std::string log;
    std::string prev = kNoPrevious;
    for (const std::string& line : Lines(*env.ReadFile(at + "/events.jsonl"))) {
      Event event = *ParseEvent(line, false);
      if (event.type == "artifact" && now.count(event.data["path"].get<std::string>()) > 0) {
        const std::string path = event.data["path"], &bytes = now[path];
        const std::string old = event.data["sha256"], digest = Hex(Sha256Of(bytes));
        std::string sidecar = *env.ReadFile(at + "/" + path + ".intoto.jsonl");
        sidecar.replace(sidecar.find(old), 64, digest);
        std::ofstream(at + "/" + path, std::ios::binary) << bytes;
        std::ofstream(at + "/" + path + ".intoto.jsonl", std::ios::binary) << sidecar;
        event.data["sha256"] = digest;
        event.data["bytes"] = bytes.size();
        event.data["sidecar"] = Hex(Sha256Of(sidecar));
      }
      event.prev = prev;
      const std::string sealed = *EncodeEvent(event);
      prev = LineHash(sealed);
      log += sealed + "\n";
    }
    std::ofstream(at + "/events.jsonl", std::ios::binary) << log;
    for (const char* p : {"/index.md", "/C1/index.md", "/task/index.md"}) fs::remove(at + p);
    auto report = VerifyTask(&env, at, OneThread());
    ASSERT_TRUE(report.ok()) << cases[i].name;
    EXPECT_EQ(report->verdict == Verdict::kPass, cases[i].pass)
        << cases[i].name << ": "
        << (report->findings.empty()
                ? ""
                : report->findings[0].reason + " " + report->findings[0].message);
    if (!cases[i].pass && !report->findings.empty()) {
      EXPECT_EQ(report->findings[0].reason, reason::kSignatureFailed) << cases[i].name;
    }
    ours += static_cast<char>('0' + ExitCode(report->verdict));
    directories += " " + at;
  }
  const std::string theirs = RunTool(PythonCommand("dirs" + directories));
  ASSERT_EQ(theirs.size(), ours.size());
  for (size_t i = 0; i < cases.size(); ++i) EXPECT_EQ(theirs[i], ours[i]) << cases[i].name;
}

// Someone with write access and no key appends records that are in order by themselves: what was
// signed is put up once more with other dependencies or runs, or an old word is repeated.
TEST(Tamper, AWordIsNotStretchedOverMoreByBothVerifiers) {
  TempDir dir;
  TestEnv env;
  {
    auto task = InitTask(&env, dir / "t");
    ASSERT_EQ(Approve(task.get(), "task", "bob", kBob, true).verdict, Verdict::kPass);
    AddRun(task.get(), {});
    ASSERT_EQ(Approve(task.get(), "C1", "bob", kBob, true).verdict, Verdict::kPass);
    AddRun(task.get(), {});
    AddRun(task.get(), {});
  }
  const State state = ReadTask(&env, dir / "t")->state;
  const ReviewRequest& review = state.reviews.back();
  const std::string newest = state.runs.back().id;
  struct Case {
    const char* name;
    bool pass;
    std::function<void(std::vector<Event>*)> change;
  };
  const auto of_type = [](std::vector<Event>* events, const char* type) -> Event* {
    Event* found = nullptr;
    for (Event& e : *events) {
      if (e.type == type) found = &e;
    }
    return found;
  };
  const auto in_place = [&](const std::function<void(Json*)>& edit) {
    return [&of_type, edit](std::vector<Event>* events) {
      edit(&of_type(events, "review-requested")->data);
    };
  };
  const std::vector<Case> cases = {
      {"nothing", true, [](std::vector<Event>*) {}},
      {"the bundle put up again for another run, and signed by the old word", false,
       [&](std::vector<Event>* events) {
         Event request = *of_type(events, "review-requested"), word = *of_type(events, "signoff");
         request.data["dependencies"] = Json::array();
         request.data["runs"] = {newest};
         events->push_back(request);
         events->push_back(word);
       }},
      {"the old word repeated", false,
       [&](std::vector<Event>* events) { events->push_back(*of_type(events, "signoff")); }},
      {"the request without its dependencies", false,
       in_place([](Json* data) { (*data)["dependencies"] = Json::array(); })},
      {"the request with one run more", false,
       in_place([&](Json* data) { (*data)["runs"].push_back(newest); })},
      {"the request without its run", false,
       in_place([](Json* data) { (*data)["runs"] = Json::array(); })},
      {"the request of another person", false,
       in_place([](Json* data) { (*data)["requester"] = "dan"; })},
      {"the request without the requester's keys", false,
       in_place([](Json* data) { (*data)["requester_keys"] = Json::array(); })},
  };
  ASSERT_EQ(review.runs.size(), 1u);
  std::string ours, directories;
  for (size_t i = 0; i < cases.size(); ++i) {
    const std::string at = dir / fmt::format("case{}", i);
    fs::copy(dir / "t", at, fs::copy_options::recursive);
    std::vector<Event> events;
    for (const std::string& line : Lines(*env.ReadFile(at + "/events.jsonl")))
      events.push_back(*ParseEvent(line, false));
    cases[i].change(&events);
    std::string log, prev = kNoPrevious;
    for (size_t n = 0; n < events.size(); ++n) {
      events[n].seq = n;
      events[n].prev = prev;
      const std::string sealed = *EncodeEvent(events[n]);
      prev = LineHash(sealed);
      log += sealed + "\n";
    }
    std::ofstream(at + "/events.jsonl", std::ios::binary) << log;
    for (const char* p : {"/index.md", "/C1/index.md", "/task/index.md"}) fs::remove(at + p);
    const auto report = VerifyTask(&env, at, OneThread());
    ASSERT_TRUE(report.ok()) << cases[i].name;
    EXPECT_EQ(report->verdict == Verdict::kPass, cases[i].pass) << cases[i].name;
    ours += static_cast<char>('0' + ExitCode(report->verdict));
    directories += " " + at;
  }
  const std::string theirs = RunTool(PythonCommand("dirs" + directories));
  ASSERT_EQ(theirs.size(), ours.size());
  for (size_t i = 0; i < cases.size(); ++i) EXPECT_EQ(theirs[i], ours[i]) << cases[i].name;
}

TEST(Tamper, UnreadableFilesAreReportedAndHideNothing) {
  TempDir dir;
  TestEnv env;
  BuildSmallTask(&env, dir / "t");
  auto view = ReadTask(&env, dir / "t");
  env.unreadable = dir / ("t/" + view->state.artifacts[0].path);
  auto report = VerifyTask(&env, dir / "t");
  EXPECT_EQ(report->verdict, Verdict::kFail);
  ASSERT_EQ(report->findings.size(), 1u);
  EXPECT_EQ(report->findings[0].reason, reason::kUnreadable);
}

TEST(Tamper, OneBadRecordNeverHidesTheOthers) {
  TempDir dir;
  TestEnv env;
  BuildSmallTask(&env, dir / "t");
  auto view = ReadTask(&env, dir / "t");
  std::vector<std::string> raws;
  for (const ArtifactRecord& a : view->state.artifacts) {
    if (a.role == Role::kRaw) raws.push_back(a.path);
  }
  ASSERT_EQ(raws.size(), 2u);
  for (const std::string& path : raws) fs::remove(dir / ("t/" + path));
  std::ofstream(dir / "t/task.toml", std::ios::app) << "#\n";
  auto report = VerifyTask(&env, dir / "t");
  EXPECT_EQ(report->findings.size(), 3u);
}

TEST(Tamper, NamesNeverReachATerminalRaw) {
  TempDir dir;
  TestEnv env;
  BuildSmallTask(&env, dir / "t");
  std::ofstream(dir / "t/\x1b[2Jevil\n\xe2\x80\xae\xff") << "x";
  auto report = VerifyTask(&env, dir / "t");
  ASSERT_TRUE(report.ok());
  ASSERT_EQ(report->findings.size(), 1u);
  EXPECT_EQ(Printable(report->findings[0].where), report->findings[0].where);
  EXPECT_NE(report->findings[0].where.find("evil"), std::string::npos);
}

TEST(Archive, TheExampleInTheRepositoryVerifies) {  // DOC-30
  const std::string dir = TARE_SOURCE_DIR "/tests/data/ledger/example";
  TestEnv env;
  VerifyOptions options = OneThread();
  options.checkpoint = *ParseCheckpoint(*env.ReadFile(dir + ".checkpoint"));
  auto report = VerifyTask(&env, dir, options);
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report->verdict, Verdict::kPass);
  EXPECT_TRUE(report->findings.empty()) << report->findings[0].where;
  EXPECT_EQ(report->signoffs, 2u);
  EXPECT_TRUE(CheckArchive(&env, dir)->empty());
  EXPECT_EQ(RunTool(PythonCommand("dirs " + dir)), "0");
}

TEST(Archive, MovesWithLinksAndItsCheckFindsStrays) {  // GEN-19, DOC-30
  TempDir dir;
  TestEnv env;
  BuildSmallTask(&env, dir / "t");
  auto report = ArchiveTask(&env, dir / "t", dir / "a", "ann");
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  fs::create_directory(dir / "elsewhere");
  fs::rename(dir / "a", dir / "elsewhere/b");
  VerifyOptions options;
  options.checkpoint = report->checkpoint;
  EXPECT_EQ(VerifyTask(&env, dir / "elsewhere/b", options)->verdict, Verdict::kPass);
  EXPECT_TRUE(CheckArchive(&env, dir / "elsewhere/b")->empty());
  EXPECT_FALSE(ArchiveTask(&env, dir / "t", dir / "elsewhere/b", "ann").ok());  // exists

  auto view = ReadTask(&env, dir / "t");
  const ArtifactRecord* raw = nullptr;
  for (const ArtifactRecord& a : view->state.artifacts) {
    if (a.role == Role::kRaw) raw = &a;
  }
  const auto first = [&](const std::function<void(const std::string&)>& change) {
    const std::string at = dir / "case";
    fs::remove_all(at);
    fs::copy(dir / "t", at, fs::copy_options::recursive);
    change(at);
    auto findings = CheckArchive(&env, at);
    return findings->empty() ? std::string("none") : (*findings)[0].reason;
  };
  const std::string folder = raw->path.substr(0, raw->path.rfind('/'));
  EXPECT_EQ(first([](const std::string&) {}), "none");
  EXPECT_EQ(first([](const std::string& at) { std::ofstream(at + "/x.txt") << "x"; }),
            reason::kUnrecordedFile);
  EXPECT_EQ(
      first([&](const std::string& at) { std::ofstream(at + "/" + folder + "/late.txt") << "x"; }),
      reason::kLateFile);
  EXPECT_EQ(
      first([&](const std::string& at) { fs::rename(at + "/" + raw->path, at + "/C1/raw.jsonl"); }),
      reason::kMisplacedFile);
  EXPECT_EQ(first([&](const std::string& at) { fs::remove(at + "/" + raw->path); }),
            reason::kArtifactMissing);
  std::ofstream(dir / "t/x.txt") << "x";
  EXPECT_FALSE(ArchiveTask(&env, dir / "t", dir / "c", "ann").ok());
  EXPECT_FALSE(env.Exists(dir / "c"));
}

}  // namespace
}  // namespace tare::workflow
