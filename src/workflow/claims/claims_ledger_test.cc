// Claims in a task: they stand or fall with the records that they name, and a delivery after a
// change of both sides' arithmetic waits for a whole record of it.

#include <gtest/gtest.h>

#include <functional>

#include "workflow/claims/testing_claims.h"
#include "workflow/index.h"
#include "workflow/testing_task.h"
#include "workflow/verify.h"

namespace tare::workflow {
namespace {

// A task, claims judged in it, and references to its runs.
class InTask : public ::testing::Test {
 protected:
  Json RefTo(const std::string& run_id, const Json& depends = Json::object()) {
    const auto view = ReadTask(&env_, dir_ / "t");
    const RunRecord* run = view->state.FindRun(run_id);
    Staleness staleness(view->state);
    return {{"artifact", view->state.ArtifactOf(*run, Role::kRaw)->sha256},
            {"kind", EvidenceKindName(*run->kind)},
            {"verdict", VerdictName(run->conclusion->verdict)},
            {"fresh", !staleness.Of(*run).has_value()},
            {"time", run->finished.substr(0, 19) + "Z"},
            {"depends", depends}};
  }
  RunGateReport Judge(const Json& doc) {
    auto report = JudgeClaimDocument(&env_, "ann", dir_ / "t", doc);
    EXPECT_TRUE(report.ok()) << report.status().ToString();
    return report.ok() ? *report : RunGateReport();
  }

  TempDir dir_;
  TestEnv env_;
};

// In a task: references are held to the ledger, and the claim is recorded with what came out.
class ClaimInTask : public InTask {
 protected:
  void SetUp() override {
    auto task = InitTask(&env_, dir_ / "t");
    RunSpec found;
    found.step = "C8";
    found.kind = EvidenceKind::kE8;
    found.conclusion = FailConclusion();
    found.exit_code = 1;
    found_ = AddRun(task.get(), found);
    for (const auto& [kind, id] :
         {std::pair<EvidenceKind, std::string*>{EvidenceKind::kE4, &replay_},
          {EvidenceKind::kE8, &loop_}}) {
      RunSpec spec;
      spec.step = "C8";
      spec.kind = kind;
      spec.raw = {{"raw.jsonl", fmt::format("{{\"of\":\"{}\"}}\n", EvidenceKindName(kind))}};
      spec.dependencies = {{DependencyType::kTool, "tare", ClaimHash("fixed program")},
                           {DependencyType::kWeights, "model", ClaimHash("weights")}};
      *id = AddRun(task.get(), spec);
    }
  }
  Json Closed() {
    const Json fixed = {{"tool:tare", ClaimHash("fixed program")},
                        {"weights:model", ClaimHash("weights")}};
    Json doc = HonestDefect();
    doc["found"] = RefTo(found_);
    doc["replay"] = RefTo(replay_, fixed);
    doc["loop"] = RefTo(loop_, fixed);
    doc["fix"]["time"] = "2020-01-01T00:00:00Z";
    return doc;
  }

  std::string found_, replay_, loop_;
};

TEST_F(ClaimInTask, StandsOnRecordsThatAreThere) {
  const RunGateReport r = Judge(Closed());
  EXPECT_EQ(r.verdict, Verdict::kPass) << Faults(r.judgement);
  const auto view = ReadTask(&env_, dir_ / "t");
  const RunRecord* run = view->state.FindRun(r.run_id);
  ASSERT_NE(run, nullptr);
  EXPECT_EQ(run->step, "task");
  EXPECT_EQ(run->conclusion->verdict, Verdict::kPass);
  EXPECT_EQ(VerifyTask(&env_, dir_ / "t", {})->verdict, Verdict::kPass);
}

TEST_F(ClaimInTask, FallsWithRecordsThatAreNot) {
  const std::vector<std::pair<const char*, std::function<void(Json&)>>> lies = {
      {"an artifact that nobody recorded", Set("/loop/artifact", ClaimHash("made up"))},
      {"a failing run called a pass",
       [](Json& d) { d["loop"]["artifact"] = d["found"]["artifact"]; }},
      {"a replay called a loop", [](Json& d) { d["loop"]["artifact"] = d["replay"]["artifact"]; }},
      {"another end", Set("/loop/time", "2099-01-01T00:00:00Z")},
      {"another program than recorded",
       [](Json& d) {
         d["loop"]["depends"]["tool:tare"] = ClaimHash("other");
         d["replay"]["depends"]["tool:tare"] = ClaimHash("other");
         d["fix"]["executable"] = ClaimHash("other");
       }},
      {"a stale run called fresh", [](Json& d) { d["found"]["fresh"] = !d["found"]["fresh"]; }},
  };
  for (const auto& [what, lie] : lies) {
    SCOPED_TRACE(what);
    Json doc = Closed();
    lie(doc);
    const RunGateReport r = Judge(doc);
    EXPECT_EQ(r.verdict, Verdict::kRefused);
    EXPECT_NE(Faults(r.judgement).find("reference-unrecorded"), std::string::npos)
        << Faults(r.judgement);
  }
  // The file itself is gone: known to the log, and not there.
  const Json doc = Closed();
  const auto view = ReadTask(&env_, dir_ / "t");
  const RunRecord* run = view->state.FindRun(loop_);
  ASSERT_TRUE(env_.Remove(dir_ / ("t/" + view->state.ArtifactOf(*run, Role::kRaw)->path)).ok());
  EXPECT_NE(Faults(Judge(doc).judgement).find("artifact-missing"), std::string::npos);
}

// Figures that fit together are not yet figures of anything.
TEST_F(ClaimInTask, AClaimOfFiguresNamesWhatTheyWereTakenFrom) {
  for (const Json& honest :
       {HonestEqualOutput(), HonestOneRecurrence(), HonestQuantisedView(), HonestCallRecord()}) {
    SCOPED_TRACE(honest.at("schema"));
    ASSERT_EQ(JudgeClaimDocument(&env_, "ann", "", honest)->verdict, Verdict::kPass);
    EXPECT_EQ(Judge(honest).reason, reason::kReferenceUnrecorded);
    Json named = honest;
    named["records"] = {RefTo(replay_)};
    const RunGateReport r = Judge(named);
    EXPECT_EQ(r.verdict, Verdict::kPass) << Faults(r.judgement);
    named["records"][0]["verdict"] = "fail";
    EXPECT_EQ(Judge(named).reason, reason::kReferenceUnrecorded);
    for (const Json& wrong : {Json::array(), Json("none"), Json({{{"artifact", "x"}}})}) {
      named["records"] = wrong;
      EXPECT_EQ(Judge(named).reason, reason::kMalformedEvidence) << wrong.dump();
    }
    // The judge's own reading stays as strict as before.
    named["records"] = {RefTo(replay_)};
    named["remarks"] = "all well";
    EXPECT_EQ(Judge(named).reason, reason::kMalformedEvidence);
  }
}

// TRACK-09: a plan cannot grant itself more than the task has.
TEST_F(ClaimInTask, APlansBudgetIsTheTasks) {
  EXPECT_EQ(Judge(HonestPlan()).verdict, Verdict::kPass);
  Json doc = HonestPlan();
  doc["budget"]["devices"] = 8;
  EXPECT_EQ(Judge(doc).reason, reason::kPlanOverBudget);
}

// BASE-01 to BASE-05 in a ledger: every gate before the delivery has passed, twice, under the old
// and the new contracts.
class ChangeInTask : public InTask {
 protected:
  void SetUp() override {
    auto task = InitTask(&env_, dir_ / "t");
    EXPECT_EQ(Approve(task.get(), "task", "bob", kBob, true).verdict, Verdict::kPass);
  }
  std::string Add(const std::string& step, EvidenceKind kind, const std::string& contracts,
                  const std::string& name, const std::string& text) {
    auto task = Task::Open(&env_, dir_ / "t", "ann");
    EXPECT_TRUE(task.ok());
    RunSpec spec;
    spec.step = step;
    spec.kind = kind;
    spec.raw = {{name, fmt::format("{{\"schema\":\"x\",\"of\":\"{} {}\"}}\n", text, contracts)}};
    spec.dependencies = {{DependencyType::kContract, "all", ClaimHash(contracts)}};
    return AddRun(task->get(), spec);
  }
  void PassGates(const std::string& contracts) {
    for (int gate = 0; gate < 10; ++gate) {
      const std::string step = fmt::format("C{}", gate);
      const EvidenceKind kind = KindsThatOpen(step).front();
      const std::string run = Add(step, kind, contracts, "evidence.json", step);
      auto task = Task::Open(&env_, dir_ / "t", "ann");
      ASSERT_TRUE(
          (*task)
              ->Append({run,
                        "gate",
                        {{"gate", step}, {"verdict", "pass"}, {"reason", ""}, {"detail", ""}}})
              .ok());
      if (gate == 5) dual_[contracts] = run;
      if (gate == 1) {
        EXPECT_EQ(Approve(task->get(), "C1", "carol", kCarol, false).verdict, Verdict::kPass);
      }
      if (gate == 9) {
        EXPECT_EQ(Approve(task->get(), "C9", "bob", kBob, true).verdict, Verdict::kPass);
      }
    }
    baseline_[contracts] = Add("C1", EvidenceKind::kE9, contracts, "baseline.json", "baseline");
    rollout_[contracts] = Add("C5", EvidenceKind::kE1, contracts, "rollout.json", "rollout");
  }
  EvidenceStatus Delivery() {
    const auto view = ReadTask(&env_, dir_ / "t");
    Staleness staleness(view->state);
    return MayRun(view->state, &staleness, "C10");
  }
  Json RefTo(const std::string& run_id) {
    const auto view = ReadTask(&env_, dir_ / "t");
    const std::string contracts = view->state.FindRun(run_id)->dependencies[0].digest;
    return InTask::RefTo(run_id, {{"contract:all", contracts}});
  }
  Json Change() {
    Json doc = HonestBaselineChange();
    for (const auto& [side, contracts] :
         {std::pair<const char*, const char*>{"old", "contracts 1"}, {"new", "contracts 2"}}) {
      doc[side]["baseline"] = RefTo(baseline_.at(contracts));
      doc[side]["rollout"] = RefTo(rollout_.at(contracts));
    }
    doc["alignment"]["rollout"] = doc["new"]["rollout"]["artifact"];
    doc["alignment"]["record"] = RefTo(dual_.at("contracts 2"));
    doc["regressions"]["quality"] = RefTo(quality_);
    doc["regressions"]["performance"] = RefTo(pairs_);
    doc["citations"][0]["record"] = RefTo(dual_.at("contracts 2"));
    doc["citations"][1]["record"] = RefTo(baseline_.at("contracts 1"));
    return doc;
  }

  std::map<std::string, std::string> dual_, baseline_, rollout_;
  std::string quality_, pairs_;
};

TEST_F(ChangeInTask, TheDeliveryWaitsForAWholeRecordOfTheChange) {
  PassGates("contracts 1");
  EXPECT_EQ(Delivery().verdict, Verdict::kPass) << Delivery().detail;
  PassGates("contracts 2");
  quality_ = Add("C9", EvidenceKind::kE9, "contracts 2", "quality.json", "quality");
  pairs_ = Add("C9", EvidenceKind::kE10, "contracts 2", "pairs.json", "pairs");
  // Every gate passes under the new contracts, and nobody said that they are new.
  EXPECT_EQ(Delivery().verdict, Verdict::kRefused);
  EXPECT_EQ(Delivery().reason, reason::kChangeUnstated);
  // Recorded, and half done.
  Json half = Change();
  half["regressions"]["quality"] = nullptr;
  EXPECT_EQ(Judge(half).verdict, Verdict::kNotCovered);
  EXPECT_EQ(Delivery().verdict, Verdict::kRefused);
  EXPECT_EQ(Delivery().reason, reason::kChangeProvisional);
  // A record of another change is none of this one.
  Json other = Change();
  other["old"]["contracts"] = ClaimHash("contracts 0");
  EXPECT_EQ(Judge(other).verdict, Verdict::kRefused);
  EXPECT_EQ(Delivery().reason, reason::kChangeProvisional);
  const RunGateReport whole = Judge(Change());
  EXPECT_EQ(whole.verdict, Verdict::kPass) << Faults(whole.judgement);
  EXPECT_EQ(Delivery().verdict, Verdict::kPass) << Delivery().detail;
  EXPECT_EQ(VerifyTask(&env_, dir_ / "t", {})->verdict, Verdict::kPass);
  // Both baselines are reachable by their IDs; overwritten or deleted, the old one is missed.
  const auto view = ReadTask(&env_, dir_ / "t");
  const std::string old_file =
      dir_ /
      ("t/" +
       view->state.ArtifactOf(*view->state.FindRun(baseline_.at("contracts 1")), Role::kRaw)->path);
  const std::string bytes = *env_.ReadFile(old_file);
  const Json doc = Change();
  ASSERT_TRUE(env_.WriteFileAtomic(old_file, "{\"schema\":\"x\",\"of\":\"new numbers\"}\n").ok());
  EXPECT_NE(Faults(Judge(doc).judgement).find("artifact-changed"), std::string::npos);
  EXPECT_NE(VerifyTask(&env_, dir_ / "t", {})->verdict, Verdict::kPass);
  ASSERT_TRUE(env_.Remove(old_file).ok());
  EXPECT_NE(Faults(Judge(doc).judgement).find("artifact-missing"), std::string::npos);
  EXPECT_EQ(Delivery().verdict, Verdict::kRefused);  // the last word on this change is a refusal
  ASSERT_TRUE(env_.WriteFileAtomic(old_file, bytes).ok());
  EXPECT_EQ(Judge(doc).verdict, Verdict::kPass);
  EXPECT_EQ(Delivery().verdict, Verdict::kPass);
}

}  // namespace
}  // namespace tare::workflow
