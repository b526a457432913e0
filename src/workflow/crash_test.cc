// Crash tests: nothing acknowledged is ever lost, and nothing unacknowledged counts (GEN-14).

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <random>
#include <set>
#include <thread>

#include "base/fault_env.h"
#include "workflow/index.h"
#include "workflow/record.h"
#include "workflow/testing_agree.h"
#include "workflow/testing_task.h"
#include "workflow/verify.h"

namespace tare::workflow {
namespace {

// A small life of a task in memory. Every acknowledged event is noted by its hash.
void Live(FaultEnv* env, std::vector<std::string>* acknowledged) {
  const auto note = [&](const Task& task) { acknowledged->push_back(task.log().head()); };
  InitReport report;
  auto task = Task::Init(env, "t", "ann", {}, &report);
  if (!task.ok()) return;
  note(**task);
  RunStart start;
  start.step = "C3";
  start.kind = EvidenceKind::kE5;
  start.command = {"x"};
  start.dependencies = {{DependencyType::kCode, "a", std::string(64, 'a')}};
  auto run = (*task)->StartRun(start);
  if (!run.ok()) return;
  note(**task);
  for (const auto& [name, role] :
       {std::make_pair("config.json", Role::kConfig), {"r.jsonl", Role::kRaw}}) {
    if (!(*task)->AddBytes(*run, name, role, "{\"value\":1}\n").ok()) return;
    note(**task);
  }
  RunEnd end;
  end.exit_code = 0;
  if (!(*task)->EndRun(*run, end).ok()) return;
  note(**task);
  if (!(*task)->WriteIndexes().ok()) return;
}

// What a restart finds must hold every acknowledged event, and every file that an event names.
void CheckRestart(FaultEnv* env, const std::vector<std::string>& acknowledged,
                  const std::string& where) {
  auto log = ReadLog(env, "t");
  if (!log.ok()) {
    EXPECT_TRUE(acknowledged.empty()) << where << ": " << log.status().ToString();
    return;
  }
  ASSERT_TRUE(log->scan.broken.ok()) << where << ": " << log->scan.broken.ToString();
  std::set<std::string> found;
  for (const std::string_view line : log->scan.lines) found.insert(LineHash(line));
  for (const std::string& hash : acknowledged)
    ASSERT_EQ(found.count(hash), 1u) << where << ": event lost";
  VerifyOptions options;
  options.threads = 1;
  auto before = VerifyTask(env, "t", options);
  ASSERT_TRUE(before.ok()) << where;
  if (!acknowledged.empty()) {
    for (const Finding& f : before->findings) {
      EXPECT_TRUE(f.reason == "log-torn" || f.reason == "unrecorded-file" ||
                  f.reason == "generated-outdated")
          << where << ": " << f.reason << " " << f.where << " " << f.message;
    }
  }
  // The next writer goes on, and what it writes verifies.
  auto task = Task::Open(env, "t", "bob");
  if (!task.ok()) {
    EXPECT_TRUE(acknowledged.empty()) << where << ": " << task.status().ToString();
    InitReport report;
    task = Task::Init(env, "t", "bob", {}, &report);
    ASSERT_TRUE(task.ok()) << where << ": " << task.status().ToString();
  }
  ASSERT_TRUE((*task)->Refuse("x", "no-evidence", "after the crash").ok()) << where;
  ASSERT_TRUE((*task)->WriteIndexes().ok()) << where;
  const std::string live = (*task)->state().ToJson().dump();
  task->reset();
  auto after = VerifyTask(env, "t", options);
  ASSERT_EQ(after->verdict, Verdict::kPass)
      << where << ": " << after->findings[0].reason << " " << after->findings[0].where << " "
      << after->findings[0].message;
  EXPECT_EQ(ReadTask(env, "t")->state.ToJson().dump(), live) << where;
}

// At every step of the life the process dies; of what was not synced, every combination of up to
// three operations is lost (and all, and none, and writes cut in half).
void CrashEverywhere(bool tear_renames) {
  int64_t total = 0;
  {
    FaultEnv env;
    std::vector<std::string> acknowledged;
    Live(&env, &acknowledged);
    ASSERT_EQ(acknowledged.size(), 5u);
    total = env.steps();
  }
  int64_t restarts = 0;
  SecondVerifier second;
  for (int64_t step = 0; step <= total; ++step) {
    FaultEnv env;
    env.TearRenames(tear_renames);
    env.CrashAtStep(step);
    std::vector<std::string> acknowledged;
    Live(&env, &acknowledged);
    const size_t n = env.pending().size();
    std::vector<std::vector<size_t>> lost = {{}};
    for (size_t a = 0; a < n; ++a) {
      lost.push_back({a});
      for (size_t b = a + 1; b < n; ++b) {
        lost.push_back({a, b});
        for (size_t c = b + 1; c < n; ++c) lost.push_back({a, b, c});
      }
    }
    for (const auto& set : lost) {
      for (const bool half : {false, true}) {
        size_t index = 0;
        auto restarted = env.Crash([&](const FaultEnv::Pending& op) -> size_t {
          const size_t i = index++;
          if (std::find(set.begin(), set.end(), i) == set.end()) return FaultEnv::kAll;
          return half ? op.bytes.size() / 2 : 0;
        });
        const std::string where = fmt::format("step {} of {}", step, total);
        second.Add(restarted.get(), where);
        CheckRestart(restarted.get(), acknowledged, where);
        ++restarts;
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
    CheckRestart(env.CrashLosingAll().get(), acknowledged, fmt::format("step {}, all lost", step));
    ++restarts;
  }
  second.Check();
  EXPECT_GT(second.Count('0'), 0u);
  EXPECT_GT(second.Count('2'), 0u);
  std::printf("%lld restarts over %lld steps\n", static_cast<long long>(restarts),
              static_cast<long long>(total));
}

TEST(Crash, AtEveryStepLosingUpToThreeUnsyncedWrites) { CrashEverywhere(false); }
TEST(Crash, TheSameWithoutAtomicRename) { CrashEverywhere(true); }

// The recovery of a torn log dies too, at every step: the next one must find the same events. The
// tails are what a crash leaves; the last one, longer than the line that replaces it, ends in a
// newline without the NUL that marks it, if only its front is written over.
TEST(Crash, DuringTheRecoveryItself) {
  const std::string tails[] = {"{\"seq\":6", std::string("abc\0\0\n", 6),
                               std::string("\0", 1) + std::string(900, 'x') + "\n"};
  int64_t restarts = 0;
  for (const std::string& tail : tails) {
    const auto torn = [&](std::vector<std::string>* acknowledged) {
      auto env = std::make_unique<FaultEnv>();
      Live(env.get(), acknowledged);
      auto file = env->OpenWritable("t/events.jsonl", Env::Mode::kAppend);
      EXPECT_TRUE((*file)->Append(tail).ok() && (*file)->Sync().ok());
      file->reset();
      return env;
    };
    const auto recover = [](FaultEnv* env) {
      auto task = Task::Open(env, "t", "bob");
      if (task.ok()) (void)(*task)->Refuse("x", "no-evidence", "in the recovery");
    };
    std::vector<std::string> acknowledged;
    auto whole = torn(&acknowledged);
    const int64_t begin = whole->steps();
    recover(whole.get());
    const int64_t end = whole->steps();
    ASSERT_GT(end, begin + 5);
    for (int64_t step = begin; step <= end; ++step) {
      std::vector<std::string> known;
      auto env = torn(&known);
      env->CrashAtStep(step);
      recover(env.get());
      const size_t n = env->pending().size();
      for (size_t subset = 0; subset < size_t{1} << std::min<size_t>(n, 6); ++subset) {
        for (const size_t kept : {size_t{0}, size_t{1}, size_t{100}}) {
          size_t i = 0;
          auto restarted = env->Crash(
              [&](const FaultEnv::Pending&) { return subset >> i++ & 1 ? kept : FaultEnv::kAll; });
          CheckRestart(restarted.get(), known, fmt::format("tail {} step {}", tail.size(), step));
          ++restarts;
          if (HasFatalFailure()) return;
        }
      }
    }
  }
  std::printf("%lld restarts\n", static_cast<long long>(restarts));
}

TEST(Crash, DiskFullAtEverySize) {
  uint64_t used = 0;
  {
    FaultEnv env;
    std::vector<std::string> acknowledged;
    Live(&env, &acknowledged);
    for (const TreeEntry& e : *ListTree(&env, "t")) used += e.info.size_bytes;
  }
  SecondVerifier second;
  for (uint64_t bytes = 0; bytes < used; bytes += 97) {
    FaultEnv env;
    env.SetDiskBytes(bytes);
    std::vector<std::string> acknowledged;
    Live(&env, &acknowledged);
    env.SetDiskBytes(UINT64_MAX);
    second.Add(&env, fmt::format("disk of {} bytes", bytes));
    CheckRestart(&env, acknowledged, fmt::format("disk of {} bytes", bytes));
    if (HasFatalFailure()) return;
  }
  second.Check();
}

// A file of a small task cut at every byte: `tare verify` gives one digit a cut, the second
// verifier the same. The log's own cuts are torn tails, whole shorter logs or no task at all.
TEST(Crash, BothVerifiersSeeEveryCut) {
  TempDir dir;
  TestEnv env;
  BuildSmallTask(&env, dir / "t");
  auto view = ReadTask(&env, dir / "t");
  std::vector<std::pair<std::string, size_t>> files = {{"events.jsonl", 41}, {"task.toml", 61}};
  for (const ArtifactRecord& a : view->state.artifacts) {
    if (a.role != Role::kRaw) continue;
    files.emplace_back(a.path, 1);
    files.emplace_back(a.path + ".intoto.jsonl", 61);
    break;
  }
  files.emplace_back(view->state.signoffs.back().signature_path, 7);
  files.emplace_back("C1/index.md", 17);
  for (const auto& [path, stride] : files) {
    const std::string full = dir / ("t/" + path);
    const std::string bytes = *env.ReadFile(full);
    std::string ours;
    for (size_t cut = 0; cut < bytes.size(); cut += stride) {
      ASSERT_TRUE(env.WriteFileAtomic(full, std::string_view(bytes).substr(0, cut)).ok());
      ours += OwnStatus(&env, dir / "t");
    }
    ASSERT_TRUE(env.WriteFileAtomic(full, bytes).ok());
    const std::string theirs =
        RunTool(PythonCommand(fmt::format("cuts {} {} {} 2>/dev/null", dir / "t", path, stride)));
    EXPECT_EQ(theirs, ours) << path;
    EXPECT_EQ(ours.find('0'), std::string::npos) << path << " cut and passed";
  }
  EXPECT_EQ(OwnStatus(&env, dir / "t"), '0');
}

TEST(Crash, AnArtifactCutAtEveryByteIsSeen) {
  TempDir dir;
  TestEnv env;
  BuildSmallTask(&env, dir / "t");
  auto view = ReadTask(&env, dir / "t");
  VerifyOptions options;
  options.threads = 1;
  for (const ArtifactRecord& a : view->state.artifacts) {
    if (a.role != Role::kRaw && a.role != Role::kConclusion) continue;
    for (const std::string& path : {a.path, a.path + ".intoto.jsonl"}) {
      const std::string full = dir / ("t/" + path);
      const std::string bytes = *env.ReadFile(full);
      for (size_t cut = 0; cut < bytes.size(); cut += path == a.path ? 1 : 13) {
        ASSERT_TRUE(env.WriteFileAtomic(full, std::string_view(bytes).substr(0, cut)).ok());
        EXPECT_EQ(VerifyTask(&env, dir / "t", options)->verdict, Verdict::kFail)
            << path << " cut at " << cut;
      }
      ASSERT_TRUE(env.WriteFileAtomic(full, bytes).ok());
    }
  }
  EXPECT_EQ(VerifyTask(&env, dir / "t")->verdict, Verdict::kPass);
}

TEST(Crash, AClockThatGoesBackChangesNothing) {
  TempDir dir;
  TestEnv env;
  env.now_ns = 1'800'000'000'000'000'000;
  auto task = InitTask(&env, dir / "t");
  AddRun(task.get(), {});
  env.now_ns -= 1'000'000'000'000'000;
  const std::string id = AddRun(task.get(), {});
  EXPECT_GT(task->state().FindRun(id)->start_seq, 0u);
  EXPECT_EQ(task->state().latest_time.substr(0, 4), "2027");
  ASSERT_TRUE(task->WriteIndexes().ok());
  task.reset();
  EXPECT_EQ(VerifyTask(&env, dir / "t")->verdict, Verdict::kPass);
}

// A process that records runs of a real command until it is killed; it names each acknowledged run.
[[noreturn]] void RecordForever(const std::string& dir, int pipe) {
  RecordOptions options;
  options.step = "C3";
  options.kind = EvidenceKind::kE5;
  options.command = {"/bin/sh", "-c", "echo value; echo '{\"x\":1}' > $TARE_OUT/r.json"};
  options.conclude = "exit-status";
  options.scope = TestScope();
  options.quiet = true;
  while (true) {
    auto report = RecordCommand(Env::Real(), dir, "ann", options);
    if (!report.ok()) ::_exit(1);
    const std::string line = report->run_id + "\n";
    if (::write(pipe, line.data(), line.size()) < 0) ::_exit(1);
  }
}

void KillMany(int kills) {
  TempDir dir;
  TestEnv env;
  InitTask(&env, dir / "t").reset();
  // How long one run takes here and now; moments are drawn from twice that.
  const auto begin = std::chrono::steady_clock::now();
  {
    RecordOptions once;
    once.step = "C3";
    once.command = {"/bin/true"};
    once.quiet = true;
    ASSERT_TRUE(RecordCommand(Env::Real(), dir / "t", "ann", once).ok());
  }
  const auto run_us = std::chrono::duration_cast<std::chrono::microseconds>(
                          std::chrono::steady_clock::now() - begin)
                          .count();
  std::mt19937 random(7);
  size_t acknowledged = 0, lost = 0;
  std::string known;  // run IDs that a recorder was told about
  for (int k = 0; k < kills; ++k) {
    int fds[2];
    ASSERT_EQ(::pipe(fds), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      ::close(fds[0]);
      RecordForever(dir / "t", fds[1]);
    }
    ::close(fds[1]);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % (2 * run_us + 1000)));
    ASSERT_EQ(::kill(child, SIGKILL), 0) << "the recorder stopped by itself";
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status));
    char buffer[4096];
    while (const ssize_t n = ::read(fds[0], buffer, sizeof(buffer))) {
      if (n < 0) break;
      known.append(buffer, static_cast<size_t>(n));
    }
    ::close(fds[0]);
    if (k % 10 != 9 && k + 1 != kills) continue;
    auto report = VerifyTask(&env, dir / "t");
    ASSERT_TRUE(report.ok());
    ASSERT_NE(report->verdict, Verdict::kFail)
        << report->findings[0].reason << " " << report->findings[0].where << " "
        << report->findings[0].message;
    EXPECT_EQ(RunTool(PythonCommand("dirs " + dir / "t")),
              std::string(1, static_cast<char>('0' + ExitCode(report->verdict))));
    auto view = ReadTask(&env, dir / "t");
    acknowledged = lost = 0;
    for (size_t at = 0; at + 37 <= known.size(); at += 37) {
      const RunRecord* run = view->state.FindRun(known.substr(at, 36));
      ASSERT_NE(run, nullptr) << "an acknowledged run is lost";
      ASSERT_TRUE(run->ended);
      ++acknowledged;
    }
  }
  auto task = OpenWaiting(Env::Real(), dir / "t", "bob");
  ASSERT_TRUE(task.ok()) << task.status().ToString();
  ASSERT_TRUE((*task)->MarkLostRuns().ok());
  ASSERT_TRUE((*task)->WriteIndexes().ok());
  for (const RunRecord& run : (*task)->state().runs) {
    ASSERT_TRUE(run.ended || run.lost) << "a dead run still counts as open";
    lost += run.lost;
    Staleness s((*task)->state());
    if (run.lost) {
      EXPECT_NE(AssessRun((*task)->state(), &s, run).verdict, Verdict::kPass);
    }
  }
  task->reset();
  EXPECT_EQ(VerifyTask(&env, dir / "t")->verdict, Verdict::kPass);
  std::printf("%d kills: %zu runs acknowledged and kept, %zu lost and marked\n", kills,
              acknowledged, lost);
}

TEST(Crash, KillNineAtRandomMoments) { KillMany(20); }
TEST(Crash, SlowKillNineAtAThousandRandomMoments) { KillMany(1000); }

TEST(Crash, TwoWritersTakeTurns) {
  TempDir dir;
  TestEnv env;
  InitTask(&env, dir / "t").reset();
  const size_t before = ReadLog(&env, dir / "t")->scan.lines.size();
  std::vector<pid_t> children;
  for (int w = 0; w < 2; ++w) {
    const pid_t child = ::fork();
    if (child == 0) {
      TestEnv own;
      for (int i = 0; i < 60; ++i) {
        auto task = OpenWaiting(&own, dir / "t", fmt::format("writer-{}", w));
        if (!task.ok() || !(*task)->Refuse("x", "no-evidence", fmt::format("{}", i)).ok())
          ::_exit(1);
      }
      ::_exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  auto view = ReadTask(&env, dir / "t");
  EXPECT_EQ(view->log.scan.lines.size(), before + 120);
  EXPECT_EQ(VerifyTask(&env, dir / "t")->verdict, Verdict::kPass);
}

// 100,000 artifacts of 16 KiB: figures for docs/results, no assertion on time.
TEST(Scale, SlowAHundredThousandArtifacts) {
  TempDir dir;
  TestEnv env;
  auto task = InitTask(&env, dir / "t");
  RunStart start;
  start.step = "C5";
  start.kind = EvidenceKind::kE6;
  start.dependencies = {{DependencyType::kCode, "a", std::string(64, 'a')}};
  std::string payload(16384, 'x');
  std::string run;
  for (int i = 0; i < 100000; ++i) {
    if (i % 1000 == 0) {
      if (!run.empty()) {
        ASSERT_TRUE(task->EndRun(run, {0, 0, std::nullopt, {}}).ok());
      }
      run = *task->StartRun(start);
    }
    std::snprintf(payload.data(), 32, "%d", i);
    ASSERT_TRUE(task->AddBytes(run, fmt::format("{}.bin", i), Role::kRaw, payload).ok());
  }
  ASSERT_TRUE(task->EndRun(run, {0, 0, std::nullopt, {}}).ok());
  ASSERT_TRUE(task->WriteIndexes().ok());
  task.reset();
  const auto seconds = [](const std::function<void()>& work) {
    double best = 1e9;
    for (int i = 0; i < 3; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      work();
      best = std::min(
          best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    return best;
  };
  const double status = seconds([&] {
    auto view = ReadTask(&env, dir / "t");
    Staleness s(view->state);
    EXPECT_EQ(Board(view->state, &s).size(), 11u);
    EXPECT_EQ(view->state.artifacts.size(), 100000u);
  });
  uint64_t bytes = 0;
  double verify = 1e9, verify1 = 1e9, plain = 1e9;
  for (int i = 0; i < 3; ++i) {  // interleaved: others load the machine
    const auto timed = [&](double* best, const std::function<void()>& work) {
      const auto begin = std::chrono::steady_clock::now();
      work();
      *best = std::min(
          *best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    };
    timed(&plain, [&] {
      const std::string command =
          "find " + (dir / "t") + " -type f -print0 | xargs -0 sha256sum > /dev/null";
      EXPECT_EQ(std::system(command.c_str()), 0);
    });
    for (const int threads : {0, 1}) {
      timed(threads == 0 ? &verify : &verify1, [&] {
        VerifyOptions options;
        options.threads = threads;
        auto report = VerifyTask(&env, dir / "t", options);
        EXPECT_EQ(report->verdict, Verdict::kPass);
        bytes = report->bytes_hashed;
      });
    }
  }
  std::printf(
      "status %.2f s; verify %.2f s (one thread %.2f s) of %.2f GB; sha256sum %.2f s: ratio %.2f "
      "(%.2f)\n",
      status, verify, verify1, static_cast<double>(bytes) / 1e9, plain, plain / verify,
      plain / verify1);
}

}  // namespace
}  // namespace tare::workflow
