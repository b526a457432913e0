// Ladder, tracks, lease and hand-over: what may run next, and who has what.

#include "workflow/tracks.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "base/reasons.h"
#include "workflow/index.h"
#include "workflow/ladder.h"
#include "workflow/lease.h"
#include "workflow/record.h"
#include "workflow/testing_task.h"
#include "workflow/verify.h"

namespace tare::workflow {
namespace {

class TracksTest : public ::testing::Test {
 protected:
  void SetUp() override { auto task = InitTask(&env_, Dir()); }
  std::string Dir() { return dir_ / "t"; }
  State Now() {
    auto view = ReadTask(&env_, Dir());
    EXPECT_TRUE(view.ok()) << view.status().ToString();
    return view->state;
  }
  std::unique_ptr<Task> Open() {
    auto task = Task::Open(&env_, Dir(), "ann");
    EXPECT_TRUE(task.ok());
    return *std::move(task);
  }
  // A run of C1 as its judge leaves it: frozen.
  std::string Freeze() {
    RunSpec spec;
    spec.step = "C1";
    spec.kind = EvidenceKind::kE10;
    spec.raw = {{"evidence.json", "{\"schema\":\"tare.gate.C1/v1\"}\n"}};
    spec.dependencies = {{DependencyType::kCode, "baseline/tune.py", std::string(64, 'b')}};
    return AddRun(Open().get(), spec);
  }
  Json Baseline() {
    const State state = Now();
    Staleness staleness(state);
    return BaselineOf(state, &staleness).ToJson();
  }
  EvidenceStatus Tune() {
    const State state = Now();
    Staleness staleness(state);
    return MayTune(state, &staleness);
  }
  RecordReport Record(const std::string& step, EvidenceKind kind, const std::string& candidate,
                      const std::string& shell, const std::string& skip = "") {
    RecordOptions o;
    o.step = step;
    o.kind = kind;
    o.candidate = candidate;
    o.skip_levels = skip;
    o.command = {"sh", "-c", shell};
    o.conclude = "exit-status";
    o.scope = TestScope();
    o.quiet = true;
    o.config_keys = {"none"};
    auto report = RecordCommand(&env_, Dir(), "ann", o);
    EXPECT_TRUE(report.ok()) << report.status().ToString();
    return report.ok() ? *report : RecordReport();
  }

  TempDir dir_;
  TestEnv env_;
};

// CHEAP-01: the lowest level first; a level above a failed or unrun one is refused before it runs.
TEST_F(TracksTest, CheapestLevelFirst) {
  const auto ladder = [&] {
    const State state = Now();
    Staleness staleness(state);
    return LadderOf(state, &staleness, "tile-64");
  };
  EXPECT_EQ(LowestOpen(ladder()), 1);
  const std::string ran = dir_ / "ran";
  const RecordReport early = Record("C8", EvidenceKind::kE8, "tile-64", "echo x; touch " + ran);
  EXPECT_EQ(early.status.verdict, Verdict::kRefused);
  EXPECT_EQ(early.status.reason, reason::kLevelSkipped);
  EXPECT_TRUE(early.run_id.empty());
  EXPECT_FALSE(env_.Exists(ran));  // nothing was started
  EXPECT_EQ(Record("C3", EvidenceKind::kE2, "tile-64", "echo shapes").status.verdict,
            Verdict::kPass);
  EXPECT_EQ(LowestOpen(ladder()), 2);
  // Level 2 fails: nothing above it runs, and no reason excuses a failure.
  EXPECT_EQ(
      Record("C3", EvidenceKind::kE3, "tile-64", "echo op; sleep 0.05; exit 1").status.verdict,
      Verdict::kFail);
  EXPECT_EQ(LowestOpen(ladder()), 2);
  EXPECT_EQ(Record("C3", EvidenceKind::kE4, "tile-64", "echo x").status.reason,
            reason::kLevelSkipped);
  EXPECT_EQ(Record("C3", EvidenceKind::kE4, "tile-64", "echo x", "no time").status.reason,
            reason::kLevelSkipped);
  // Another candidate has a ladder of its own, and the level below may always be run again.
  EXPECT_EQ(Record("C3", EvidenceKind::kE4, "tile-32", "echo x").status.reason,
            reason::kLevelSkipped);
  EXPECT_EQ(Record("C3", EvidenceKind::kE2, "tile-64", "echo again").status.verdict,
            Verdict::kPass);
  EXPECT_EQ(Record("C3", EvidenceKind::kE3, "tile-64", "echo op").status.verdict, Verdict::kPass);
  // Level 3 never ran; with a recorded reason level 4 may.
  EXPECT_EQ(Record("C3", EvidenceKind::kE5, "tile-64", "echo x").status.reason,
            reason::kLevelSkipped);
  EXPECT_EQ(Record("C3", EvidenceKind::kE5, "tile-64", "echo x", "no failing batch is stored")
                .status.verdict,
            Verdict::kPass);
  const auto levels = ladder();
  EXPECT_EQ(LowestOpen(levels), 5);
  EXPECT_EQ(levels[2].state, LadderLevel::State::kExcused);
  // The cost of a level is that of its runs, the failed one too.
  EXPECT_EQ(levels[1].runs, 2);
  EXPECT_GE(levels[1].cost_s, 0.05);
  EXPECT_LT(levels[1].cost_s, 60);
  EXPECT_EQ(Now().refusals.size(), 5u);
  EXPECT_EQ(VerifyTask(&env_, Dir(), {})->verdict, Verdict::kPass);
}

// TRACK-01: the baseline's candidate, table and audit are its own.
TEST_F(TracksTest, ConsistencyEventsNeverAlterTheBaseline) {
  EXPECT_EQ(Baseline()["state"], "untuned");
  const std::string frozen = Freeze();
  const Json before = Baseline();
  EXPECT_EQ(before["state"], "waiting-human");
  EXPECT_EQ(before["candidate"], frozen);
  std::mt19937 random(5);
  for (int i = 0; i < 40; ++i) {
    auto task = Open();
    RunSpec spec;
    spec.step = fmt::format("C{}", 2 + random() % 7);
    spec.kind = AllEvidenceKinds()[random() % AllEvidenceKinds().size()];
    spec.candidate = random() % 2 == 0 ? "" : fmt::format("tile-{}", random() % 3);
    spec.conclusion = random() % 3 == 0 ? FailConclusion() : PassConclusion();
    spec.raw = {{"evidence.json", fmt::format("{{\"n\":{}}}\n", i)}};
    spec.dependencies = {
        {DependencyType::kCode, "consistency/kernel.cu", Hex(Sha256Of(std::to_string(i)))}};
    AddRun(task.get(), spec);
    if (i % 10 == 0) {
      ASSERT_TRUE(PrepareReview(task.get(), "C9", {}, {}).ok());
    }
    ASSERT_TRUE(task->Refuse("run C5", reason::kPrerequisiteOpen, "test").ok());
  }
  EXPECT_EQ(Baseline(), before);
  // And the other way round: tuning events leave the consistency track as it was.
  const auto consistency = [&] {
    const State state = Now();
    Staleness staleness(state);
    return ConsistencyOf(state, &staleness).ToJson();
  };
  const Json other = consistency();
  Freeze();
  EXPECT_EQ(consistency(), other);
  EXPECT_NE(Baseline(), before);  // the baseline's own event does alter it
}

// TRACK-03, STOP-02: frozen is frozen, until a person rejects it or an input of it changes.
TEST_F(TracksTest, AFrozenBaselineIsNotTuned) {
  {
    auto task = Open();
    EXPECT_EQ(Approve(task.get(), "task", "bob", kBob, true).verdict, Verdict::kPass);
  }
  const auto tune = [&] { return Record("C1", EvidenceKind::kE10, "", "echo tokens").status; };
  EXPECT_EQ(tune().verdict, Verdict::kPass);
  Freeze();
  EXPECT_EQ(Tune().reason, reason::kTuningFrozen);
  EXPECT_EQ(tune().reason, reason::kTuningFrozen);
  EXPECT_EQ(Now().refusals.back().reason, reason::kTuningFrozen);
  // Other work at C1 and tuning-like work of the other track go on.
  EXPECT_EQ(Record("C1", EvidenceKind::kE1, "", "echo reading").status.verdict, Verdict::kPass);
  EXPECT_EQ(Record("C4", EvidenceKind::kE10, "", "echo profile").status.verdict, Verdict::kPass);
  // The requester cannot open it again; a reviewer's rejection does.
  ReviewRequest request;
  {
    auto task = Open();
    request = *PrepareReview(task.get(), "C1", {}, {});
    const std::string by_ann = StatementFor(*task, request, "ann", "reject");
    EXPECT_EQ(AcceptSignOff(task.get(), by_ann, kAnn.Sign(by_ann), {})->verdict, Verdict::kRefused);
  }
  EXPECT_EQ(tune().reason, reason::kTuningFrozen);
  {
    auto task = Open();
    const std::string by_carol = StatementFor(*task, request, "carol", "reject");
    (void)AcceptSignOff(task.get(), by_carol, kCarol.Sign(by_carol), {});
  }
  EXPECT_EQ(Baseline()["state"], "reopened");
  EXPECT_EQ(tune().verdict, Verdict::kPass);
  // Frozen again and confirmed: closed as before. A changed input voids it.
  Freeze();
  {
    auto task = Open();
    EXPECT_EQ(Approve(task.get(), "C1", "carol", kCarol, false).verdict, Verdict::kPass);
  }
  EXPECT_EQ(Baseline()["state"], "confirmed");
  EXPECT_EQ(tune().reason, reason::kTuningFrozen);
  {
    auto task = Open();
    RunSpec changed;
    changed.step = "C0";
    changed.dependencies = {{DependencyType::kCode, "baseline/tune.py", std::string(64, 'c')}};
    AddRun(task.get(), changed);
  }
  EXPECT_EQ(Baseline()["state"], "stale");
  EXPECT_EQ(tune().verdict, Verdict::kPass);
}

// TRACK-06: each of the four parts.
TEST_F(TracksTest, TracksShareOneContract) {
  const std::string toml = *env_.ReadFile(Dir() + "/task.toml");
  const auto amend = [&](const std::string& from, const std::string& to) {
    std::string text = toml;
    text.replace(text.find(from), from.size(), to);
    ASSERT_TRUE(env_.WriteFileAtomic(Dir() + "/task.toml", text).ok());
    auto task = Open();
    const auto report = task->Amend("test");
    ASSERT_TRUE(report.ok()) << report.status().ToString();
  };
  const auto dual = [&](const std::string& weights, const std::string& image) {
    RunSpec spec;
    spec.step = "C5";
    spec.kind = EvidenceKind::kE6;
    spec.raw = {{"evidence.json", "{\"schema\":\"tare.gate.C5/v1\"}\n"}};
    spec.dependencies = {{DependencyType::kWeights, "model", weights}};
    if (!image.empty()) spec.dependencies.push_back({DependencyType::kImage, "image", image});
    AddRun(Open().get(), spec);
  };
  const auto shared = [&] { return TracksShareContract(Now()); };
  const std::string w = std::string(64, '1');
  RunSpec spec;
  spec.step = "C1";
  spec.kind = EvidenceKind::kE10;
  spec.raw = {{"evidence.json", "{\"schema\":\"tare.gate.C1/v1\"}\n"}};
  spec.dependencies = {{DependencyType::kWeights, "model", w}};
  AddRun(Open().get(), spec);
  EXPECT_EQ(shared().verdict, Verdict::kNotCovered);  // nothing to compare yet
  dual(w, "");
  EXPECT_EQ(shared().verdict, Verdict::kPass) << shared().detail;
  dual(std::string(64, '2'), "");
  EXPECT_EQ(shared().reason, reason::kTrackContract);
  EXPECT_NE(shared().detail.find("model: "), std::string::npos) << shared().detail;
  dual(w, std::string(64, '3'));
  EXPECT_NE(shared().detail.find("image: "), std::string::npos) << shared().detail;
  for (const auto& [from, to, part] :
       {std::tuple<const char*, const char*, const char*>{"kv_cache = \"bf16\"",
                                                          "kv_cache = \"e4m3\"", "precision: "},
        {"count = 1", "count = 2", "hardware: "}}) {
    amend(from, to);
    dual(w, "");
    EXPECT_EQ(shared().verdict, Verdict::kRefused) << part;
    EXPECT_NE(shared().detail.find(part), std::string::npos) << shared().detail;
  }
}

// STOP-10: what waits for a person goes on elsewhere, as it was.
TEST_F(TracksTest, AWaitingTaskIsHandedOver) {
  const std::string package = dir_ / "package", there = dir_ / "there";
  EXPECT_EQ(WriteHandover(&env_, Dir(), package, "ann", {}).status().code(), Code::kPrecondition);
  EXPECT_FALSE(env_.Exists(package));
  Freeze();
  const auto given = WriteHandover(&env_, Dir(), package, "ann", {"cuda:0 (baseline track)"});
  ASSERT_TRUE(given.ok()) << given.status().ToString();
  ASSERT_EQ(given->waiting.size(), 1u);
  EXPECT_TRUE(given->waiting[0].starts_with("C1: no-signoff")) << given->waiting[0];
  const std::string text = *env_.ReadFile(package + "/handover.json");
  EXPECT_NE(text.find("cuda:0 (baseline track)"), std::string::npos);
  const auto taken = ResumeHandover(&env_, package, there, "zoe");
  ASSERT_TRUE(taken.ok()) << taken.status().ToString();
  const auto resumed = ReadTask(&env_, there);
  ASSERT_TRUE(resumed.ok());
  EXPECT_EQ(resumed->state.ToJson(), Now().ToJson());
  // It goes on there: the reviewers sign, and the stop is passed.
  {
    auto task = Task::Open(&env_, there, "zoe");
    ASSERT_TRUE(task.ok());
    EXPECT_EQ(Approve(task->get(), "task", "bob", kBob, true).verdict, Verdict::kPass);
    EXPECT_EQ(Approve(task->get(), "C1", "carol", kCarol, false).verdict, Verdict::kPass);
  }
  // A package that was changed on the way is not taken up.
  const std::string log = package + "/task/events.jsonl";
  std::string bytes = *env_.ReadFile(log);
  bytes.resize(bytes.rfind('\n', bytes.size() - 2) + 1);
  ASSERT_TRUE(env_.WriteFileAtomic(log, bytes).ok());
  EXPECT_FALSE(ResumeHandover(&env_, package, dir_ / "again", "zoe").ok());
  EXPECT_FALSE(env_.Exists(dir_ / "again"));
}

// TRACK-10: a hundred requests from two tracks, in processes of their own; some of them die while
// they hold the device.
struct Shared {
  std::atomic<int> inside{0}, overlaps{0}, served{0}, out_of_order{0};
  std::atomic<uint64_t> last{0};
};

TEST_F(TracksTest, ADeviceIsOneJobsAtATime) {
  void* page =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(page, MAP_FAILED);
  Shared* shared = new (page) Shared;
  const std::string dir = dir_.path();
  std::vector<pid_t> children;
  for (int p = 0; p < 10; ++p) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      std::mt19937 random(static_cast<uint32_t>(p));
      for (int i = 0; i < 10; ++i) {
        auto lease =
            Lease::Acquire(Env::Real(), dir, "gpu0", p % 2 == 0 ? "baseline" : "consistency", 60);
        if (!lease.ok()) ::_exit(3);
        if (shared->inside.fetch_add(1) != 0) shared->overlaps.fetch_add(1);
        // Within one queue numbers rise; a new queue begins at a low number again.
        const uint64_t last = shared->last.exchange((*lease)->ticket());
        if ((*lease)->ticket() < last && (*lease)->ticket() != 1) shared->out_of_order.fetch_add(1);
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
        shared->served.fetch_add(1);
        shared->inside.fetch_sub(1);
        if (p == 3 && i == 4) ::_exit(0);  // with the lease in its hands
      }
      ::_exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  EXPECT_EQ(shared->overlaps, 0);
  EXPECT_EQ(shared->served, 95);
  EXPECT_EQ(shared->out_of_order, 0);
  EXPECT_TRUE(Leases(Env::Real(), dir)->empty());
  ::munmap(page, sizeof(Shared));
}

// Fair: served in the order of asking, also when the one ahead gives up; and a wait has an end.
TEST_F(TracksTest, LeasesAreServedInTheOrderOfAsking) {
  const std::string dir = dir_.path();
  auto first = Lease::Acquire(Env::Real(), dir, "gpu0", "first", 1);
  ASSERT_TRUE(first.ok());
  const auto late = Lease::Acquire(Env::Real(), dir, "gpu0", "late", 0.02);
  EXPECT_EQ(late.status().code(), Code::kExhausted);
  EXPECT_NE(late.status().message().find("first"), std::string::npos);
  EXPECT_TRUE(Lease::Acquire(Env::Real(), dir, "gpu1", "other", 0).ok());  // another device
  std::vector<int> order;
  std::vector<std::thread> threads;
  for (int i = 0; i < 5; ++i) {
    threads.emplace_back([&, i] {
      auto lease = Lease::Acquire(Env::Real(), dir, "gpu0", std::to_string(i), 60);
      ASSERT_TRUE(lease.ok());
      order.push_back(i);  // the lease is the lock
    });
    // Each has its ticket before the next asks.
    while (Leases(Env::Real(), dir)->size() < static_cast<size_t>(i) + 2)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(order.empty());
  first->reset();
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4}));
  for (const char* bad : {"", "../x", "a/b", "a b", "gpu.0"})
    EXPECT_EQ(Lease::Acquire(Env::Real(), dir, bad, "x", 0).status().code(),
              Code::kInvalidArgument);
}

}  // namespace
}  // namespace tare::workflow
