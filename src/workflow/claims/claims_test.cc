// Claims beside the gates: each honest one passes, each tempting one gets its own reason, and a
// claim in a task stands or falls with the records that it names. Of the reserve list of false
// passes these are here, each with its honest twin: SHAPE-06, SHAPE-09, SHAPE-10 with SHAPE-13,
// SYS-28 with NUM-13.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>

#include "workflow/claims/testing_claims.h"

namespace tare::workflow {
namespace {

struct Broken {
  const char* what;
  const char* claim;
  std::function<void(Json&)> change;
  Verdict verdict;
  std::string_view reason;
  std::string_view row;
};

void Check(const std::vector<Broken>& all) {
  const std::map<std::string, Json> honest = HonestClaims();
  for (const Broken& b : all) {
    SCOPED_TRACE(b.what);
    Json doc = honest.at(b.claim);
    b.change(doc);
    const GateJudgement judged = FindClaim(b.claim)->judge(doc);
    EXPECT_EQ(judged.verdict, b.verdict) << Faults(judged);
    EXPECT_EQ(judged.reason, b.reason) << Faults(judged);
    bool found = false;
    for (const GateFinding& f : judged.findings) {
      found |= f.reason == b.reason && f.row == b.row;
      if (f.verdict != Verdict::kPass) {
        EXPECT_FALSE(f.next.empty()) << f.reason;
      }
    }
    EXPECT_TRUE(found) << b.row << "\n" << Faults(judged);
  }
}

GateJudgement Changed(const char* claim, const std::function<void(Json&)>& change) {
  Json doc = HonestClaims().at(claim);
  change(doc);
  return FindClaim(claim)->judge(doc);
}

constexpr Verdict kRefused = Verdict::kRefused;

TEST(ClaimTest, HonestOnesPassWithAScope) {
  const std::map<std::string, Json> honest = HonestClaims();
  for (const ClaimSpec& c : AllClaims()) {
    SCOPED_TRACE(c.name);
    ASSERT_TRUE(honest.contains(std::string(c.name)));
    const Json& doc = honest.at(std::string(c.name));
    EXPECT_EQ(ClaimOfSchema(doc.at("schema").get<std::string>()), FindClaim(c.name));
    const GateJudgement judged = c.judge(doc);
    EXPECT_EQ(judged.verdict, Verdict::kPass) << Faults(judged);
    EXPECT_FALSE(judged.scope.at("covers").empty());
  }
  for (const char* schema : {"tare.claim./v1", "tare.claim.plan/v2", "tare.claim.plan", "/v1",
                             "tare.gate.C5/v1", "tare.claim.nothing/v1"})
    EXPECT_EQ(ClaimOfSchema(schema), nullptr) << schema;
}

// No member may be missing, unknown or of another type: a claim that says less passes nothing.
TEST(ClaimTest, NoMemberMayBeMissingUnknownOrMistyped) {
  for (const auto& [name, doc] : HonestClaims()) {
    const ClaimSpec* claim = FindClaim(name);
    const Json flat = doc.flatten();
    std::set<std::string> places;
    for (const auto& [pointer, value] : flat.items()) {
      for (std::string p = pointer; !p.empty(); p = p.substr(0, p.rfind('/'))) places.insert(p);
    }
    for (const std::string& place : places) {
      const Json::json_pointer at(place);
      SCOPED_TRACE(name + place);
      // Names that are data: of a launch's settings (said, never judged) and of an operator's
      // inputs.
      if (place.starts_with("/launches/") && place.size() > 10) continue;
      const bool data = place.starts_with("/cases/0/inputs/") && place.rfind('/') == 15;
      if (doc.at(at.parent_pointer()).is_object() && !data) {
        Json less = doc;
        less[at.parent_pointer()].erase(at.back());
        EXPECT_NE(claim->judge(less).verdict, Verdict::kPass);
      }
      Json other = doc;
      other[at] = Json{{"something", "else"}};
      EXPECT_NE(claim->judge(other).verdict, Verdict::kPass);
    }
    Json more = doc;
    more["and"] = "more";
    EXPECT_EQ(claim->judge(more).reason, reason::kMalformedEvidence) << name;
  }
}

// Checks whose removal no other test notices (tools/mutate_judges.py): their own finding, by what
// it says where others find the same broken thing too.
TEST(ClaimTest, EveryCheckFindsByItself) {
  struct Broke {
    const char* claim;
    std::function<void(Json&)> change;
    std::string_view row, reason, says;
  };
  const Broke all[] = {
      {"equal-output", Set("/basis", "launch"), "SHAPE-06", reason::kNotMeasured,
       "because of the launch"},
      {"equal-output", Set("/basis", "formula"), "NUM-01", reason::kNotMeasured,
       "because both compute x w"},
      {"equal-output", Set("/outputs", CountsOf(0, 0)), "SHAPE-06", reason::kNotMeasured,
       "no element of an output was compared"},
      {"equal-output", Set("/inputs/b", ClaimHash("y")), "SHAPE-06", reason::kInputDiffers,
       "the two executions had other inputs"},
      {"one-recurrence", Set("/outputs", CountsOf(0, 0)), "SHAPE-09", reason::kNothingCompared, ""},
      {"quantised-view", Set("/versions/1/version", 2), "SYS-28", reason::kVersionContradiction,
       "theta2 stands where theta1 belongs"},
      {"call-record", Set("/b/kernel", ClaimHash("other kernel")), "NUM-09", reason::kCallDiffers,
       "do not run the same kernel"},
      {"baseline-change", Set("/old/contracts", ClaimHash("contracts 2")), "BASE-01",
       reason::kBaselineLost, "old and new contracts are both"},
      {"baseline-change", Set("/subject/contracts", ClaimHash("contracts 3")), "BASE-01",
       reason::kSubjectDiffers, "not those of the subject"},
      {"probe", Set("/runs/2/candidates", Json::array()), "CHEAP-11", reason::kNothingCompared,
       "left no candidate at all"},
      {"operator-case", Set("/cases/0/compared", 0), "CHEAP-04", reason::kNothingCompared, ""},
      {"replay", Set("/replays/0/record/kind", "E5"), "CHEAP-07", reason::kWrongEvidenceKind,
       "its record is E5"},
  };
  for (const Broke& b : all) {
    SCOPED_TRACE(fmt::format("{} {}", b.claim, b.reason));
    const GateJudgement judged = Changed(b.claim, b.change);
    EXPECT_NE(judged.verdict, Verdict::kPass);
    EXPECT_TRUE(std::any_of(judged.findings.begin(), judged.findings.end(), [&](const auto& f) {
      return f.row == b.row && f.reason == b.reason && f.detail.find(b.says) != std::string::npos;
    })) << Faults(judged);
  }
  const GateJudgement elsewhere = Changed("engine-cases", Set("/cases/4/topology", "tp2"));
  EXPECT_NE(elsewhere.scope.at("not_covered").dump().find("axis parallelism at tp4"),
            std::string::npos)
      << elsewhere.scope.dump(1);
}

// BASE-01, BASE-02, BASE-03, BASE-04, BASE-05: as documents; in a ledger below.
TEST(ClaimTest, AChangeOfBothSidesArithmetic) {
  const Json before = {{"contract:all", ClaimHash("contracts 1")}};
  Check({
      {"the new baseline stands over the old one", "baseline-change",
       [](Json& d) { At(d, "/new/baseline/artifact") = At(d, "/old/baseline/artifact"); }, kRefused,
       reason::kBaselineLost, "BASE-01"},
      {"the contracts did not change", "baseline-change",
       [](Json& d) { At(d, "/old/contracts") = At(d, "/new/contracts"); }, kRefused,
       reason::kBaselineLost, "BASE-01"},
      {"what is called old was measured under the new contracts", "baseline-change",
       Set("/old/baseline/depends/contract:all", ClaimHash("contracts 2")), kRefused,
       reason::kBaselineLost, "BASE-01"},
      {"one side only", "baseline-change", Erase("/sides/1"), kRefused, reason::kSemanticsDiffer,
       "BASE-01"},
      {"new arithmetic on the old frozen rollout", "baseline-change",
       Set("/alignment/rollout", ClaimHash("rollout 1")), kRefused, reason::kOldRollout, "BASE-02"},
      {"old tokens under a new name", "baseline-change",
       Set("/new/rollout/depends/contract:all", ClaimHash("contracts 1")), kRefused,
       reason::kOldRollout, "BASE-02"},
      {"the alignment is the old one", "baseline-change", Set("/alignment/record/depends", before),
       kRefused, reason::kOldRollout, "BASE-02"},
      {"inference invariance as alignment", "baseline-change", Set("/alignment/record/kind", "E5"),
       kRefused, reason::kOldRollout, "BASE-02"},
      {"no sentence", "baseline-change", Set("/statement", ""), kRefused, reason::kChangeUnstated,
       "BASE-03"},
      {"a softer sentence", "baseline-change", Set("/statement", "results may vary slightly"),
       kRefused, reason::kChangeUnstated, "BASE-03"},
      {"the delivery does not say it", "baseline-change",
       Set("/delivery_notes", Json::array({"faster attention"})), kRefused, reason::kChangeUnstated,
       "BASE-03"},
      {"no quality regression", "baseline-change", Set("/regressions/quality", nullptr),
       Verdict::kNotCovered, reason::kChangeProvisional, "BASE-04"},
      {"no performance regression", "baseline-change", Set("/regressions/performance", nullptr),
       Verdict::kNotCovered, reason::kChangeProvisional, "BASE-04"},
      {"the quality of before", "baseline-change", Set("/regressions/quality/depends", before),
       Verdict::kNotCovered, reason::kChangeProvisional, "BASE-04"},
      {"zero diff as quality", "baseline-change", Set("/regressions/quality/kind", "E6"),
       Verdict::kNotCovered, reason::kChangeProvisional, "BASE-04"},
      {"a regression that failed", "baseline-change",
       Set("/regressions/performance/verdict", "fail"), Verdict::kNotCovered,
       reason::kChangeProvisional, "BASE-04"},
      {"an old speed for the new arithmetic", "baseline-change", Set("/citations/1/about", "new"),
       kRefused, reason::kOldNumberCited, "BASE-05"},
      {"a new number from a stale run", "baseline-change", Set("/citations/0/record/fresh", false),
       kRefused, reason::kOldNumberCited, "BASE-05"},
  });
  // Provisional is said, not only refused later.
  EXPECT_TRUE(Changed("baseline-change", Set("/regressions/quality", nullptr))
                  .scope.contains("provisional"));
  EXPECT_EQ(Changed("baseline-change", Set("/citations", Json::array())).verdict, Verdict::kPass);
}

// GEN-03: a defect is closed by the loop on the fixed program, not by a replay.
TEST(ClaimTest, AGreenReplayDoesNotCloseADefect) {
  Check({
      {"replay only", "defect-closed", Set("/loop", nullptr), kRefused, reason::kLoopNotReverified,
       "GEN-03"},
      {"a loop from before the fix", "defect-closed", Set("/loop/time", "2026-11-29T07:59:59Z"),
       kRefused, reason::kLoopNotReverified, "GEN-03"},
      {"the loop of another program", "defect-closed",
       Set("/loop/depends/tool:tare", ClaimHash("program before")), kRefused,
       reason::kLoopNotReverified, "GEN-03"},
      {"a dual path as the loop", "defect-closed", Set("/loop/kind", "E6"), kRefused,
       reason::kLoopNotReverified, "GEN-03"},
      {"a loop that failed", "defect-closed", Set("/loop/verdict", "fail"), kRefused,
       reason::kLoopNotReverified, "GEN-03"},
      {"nothing ever failed", "defect-closed", Set("/found/verdict", "pass"), kRefused,
       reason::kInputMissing, "GEN-03"},
      {"the cheaper replay was left out", "defect-closed", Set("/replay", nullptr), kRefused,
       reason::kGateNotPassed, "GEN-03"},
  });
  const GateJudgement replayed = Changed("defect-closed", Set("/loop", nullptr));
  EXPECT_NE(replayed.Gravest()->detail.find("fixed in replay, loop not re-verified"),
            std::string::npos);
  EXPECT_EQ(Changed("defect-closed", Set("/loop/time", "2026-11-29T08:00:00.5Z")).verdict,
            Verdict::kPass);
  EXPECT_NE(Changed("defect-closed", Set("/loop/time", "2026-11-29T08:00:00.0Z")).verdict,
            Verdict::kPass);
}

// GEN-05, GEN-06, GEN-28: experience of elsewhere, another's path and a framework's name cover
// nothing here.
TEST(ClaimTest, WhatWasTakenOverIsMeasuredHere) {
  Check({
      {"a preset without measurement", "preset", Set("/settings/0/measurement", nullptr), kRefused,
       reason::kPresetUnmeasured, "GEN-05"},
      {"measured on another model", "preset",
       Set("/settings/1/measurement/depends/weights:model", ClaimHash("other")), kRefused,
       reason::kPresetUnmeasured, "GEN-05"},
      {"measured on other hardware", "preset",
       Set("/settings/0/measurement/depends/hardware:device", ClaimHash("other")), kRefused,
       reason::kPresetUnmeasured, "GEN-05"},
      {"measured long ago", "preset", Set("/settings/0/measurement/fresh", false), kRefused,
       reason::kPresetUnmeasured, "GEN-05"},
      {"no numbers", "path-reuse", Set("/numbers", nullptr), kRefused, reason::kReuseUnmeasured,
       "GEN-06"},
      {"no step time", "path-reuse", Set("/step_time", nullptr), kRefused, reason::kReuseUnmeasured,
       "GEN-06"},
      {"a number as step time", "path-reuse", Set("/step_time/kind", "E6"), kRefused,
       reason::kReuseUnmeasured, "GEN-06"},
      {"because mLite", "route-coverage",
       [](Json& d) {
         d["because"] = "mLite";
         d["runs"] = Json::array();
       },
       kRefused, reason::kUniversalClaim, "GEN-28"},
      {"inherited from another recipe", "route-coverage", Set("/runs/0/recipe/tp", "1"), kRefused,
       reason::kUniversalClaim, "GEN-28"},
      {"a run that failed", "route-coverage", Set("/runs/0/record/verdict", "fail"), kRefused,
       reason::kUniversalClaim, "GEN-28"},
  });
  // The absent one is named, and the accepted preset is linked.
  EXPECT_NE(Changed("path-reuse", Set("/step_time", nullptr)).Gravest()->detail.find("step-time"),
            std::string::npos);
  EXPECT_NE(FindClaim("preset")->judge(HonestPreset()).scope.dump().find(ClaimHash("sweep")),
            std::string::npos);
  // Each of the recipe's points is listed as not covered.
  const GateJudgement none = Changed("route-coverage", [](Json& d) { d["runs"] = Json::array(); });
  for (const char* key : {"tp", "cp", "ep", "pp", "recompute", "checkpoint"}) {
    bool listed = false;
    for (const GateFinding& f : none.findings) {
      listed |= f.verdict == Verdict::kNotCovered &&
                f.detail.find(fmt::format(" {} = ", key)) != std::string::npos;
    }
    EXPECT_TRUE(listed) << key;
  }
  // Each value was run, never together.
  const GateJudgement apart = Changed("route-coverage", [](Json& d) {
    Json second = d["runs"][0];
    d["runs"][0]["recipe"]["tp"] = "1";
    second["recipe"]["recompute"] = "none";
    d["runs"].push_back(second);
  });
  EXPECT_EQ(apart.verdict, kRefused);
  EXPECT_NE(Faults(apart).find("never together"), std::string::npos);
}

// GEN-30, TRACK-09: as a plan; that a whole run does no such thing is traced in
// tests/permission_test.cc.
TEST(ClaimTest, APlanStaysWithinGrantsAndBudget) {
  const auto also = [](const char* verb, const char* what) {
    return [verb, what](Json& d) { d["actions"].push_back(Json{{"do", verb}, {"what", what}}); };
  };
  Check({
      {"an ungranted device", "plan", Set("/actions/1/what", "cuda:1"), kRefused,
       reason::kNoPermission, "GEN-30"},
      {"a foreign job", "plan", also("stop-job", "1234"), kRefused, reason::kNoPermission,
       "GEN-30"},
      {"an image", "plan", also("push-image", "registry/x"), kRefused, reason::kNoPermission,
       "GEN-30"},
      {"a pull request", "plan", also("open-pull-request", "vllm-project/vllm"), kRefused,
       reason::kNoPermission, "GEN-30"},
      {"a second node that is granted and over the budget", "plan",
       [](Json& d) {
         d["grants"]["nodes"].push_back("b");
         d["actions"].push_back(Json{{"do", "use-node"}, {"what", "b"}});
       },
       kRefused, reason::kPlanOverBudget, "TRACK-09"},
      {"a device over the budget", "plan",
       [](Json& d) {
         d["grants"]["devices"].push_back("cuda:1");
         d["actions"].push_back(Json{{"do", "use-device"}, {"what", "cuda:1"}});
       },
       kRefused, reason::kPlanOverBudget, "TRACK-09"},
  });
  EXPECT_EQ(FindReason(reason::kNoPermission)->sentence, "no permission");
  const auto granted = [](Json& d) {
    d["grants"]["publish"].push_back("vllm-project/vllm");
    d["actions"].push_back(Json{{"do", "open-pull-request"}, {"what", "vllm-project/vllm"}});
  };
  EXPECT_EQ(Changed("plan", granted).verdict, Verdict::kPass);
}

// CHEAP-07: the stored failure itself, all of its tokens, and A against A beside it.
TEST(ClaimTest, TheOriginalFailureIsReplayedInFull) {
  Check({
      {"the first tokens only", "replay", Set("/replays/0/compared", 40), kRefused,
       reason::kReplayPartial, "CHEAP-07"},
      {"another batch", "replay", Set("/replays/0/batch", ClaimHash("new batch")), kRefused,
       reason::kReplayPartial, "CHEAP-07"},
      {"another batch under the stored one's name", "replay",
       Set("/replays/0/record/depends/tokens:batch", ClaimHash("new batch")), kRefused,
       reason::kReplayPartial, "CHEAP-07"},
      {"only the first mismatch is reported", "replay",
       Set("/replays/0/mismatching_tokens", Json::array({"s0:4"})), kRefused,
       reason::kReplayPartial, "CHEAP-07"},
      {"no A/A", "replay", Erase("/replays/1"), kRefused, reason::kReplayPartial, "CHEAP-07"},
      {"A differs from A", "replay",
       [](Json& d) {
         d["replays"][1]["mismatches"] = 1;
         d["replays"][1]["mismatching_tokens"] = Json::array({"s0:4"});
       },
       Verdict::kFail, reason::kSelfInconsistent, "CHEAP-07"},
      {"no stored failure", "replay", Set("/original/mismatches", 0), kRefused,
       reason::kInputMissing, "CHEAP-07"},
  });
}

// CHEAP-08: five axes, and the parallelism of the recipe.
TEST(ClaimTest, EngineEvidenceIsOfTheRecipesTopology) {
  const auto rank = [](Json& d) {
    for (Json& c : d["cases"]) c["topology"] = "tp1";
  };
  Check({
      {"one rank for four", "engine-cases", rank, Verdict::kNotCovered, reason::kRecipeNotCovered,
       "CHEAP-08"},
      {"an axis left out", "engine-cases", Erase("/cases/2"), kRefused, reason::kMatrixGap,
       "CHEAP-08"},
      {"a case that failed", "engine-cases", Set("/cases/1/record/verdict", "fail"), kRefused,
       reason::kGateNotPassed, "CHEAP-08"},
      {"a replay as engine evidence", "engine-cases", Set("/cases/0/record/kind", "E4"), kRefused,
       reason::kGateNotPassed, "CHEAP-08"},
  });
}

// CHEAP-11: after two runs that told nothing new the third of the same kind is refused, and another
// is proposed.
TEST(ClaimTest, AProbeThatToldNothingIsChanged) {
  Check({{"a third run of the same probe", "probe", Set("/next", ProbeOf("7", "40")), kRefused,
          reason::kProbeRepeated, "CHEAP-11"},
         {"back to the first probe", "probe", Set("/next", ProbeOf("15", "40")), kRefused,
          reason::kProbeRepeated, "CHEAP-11"}});
  const GateJudgement j = Changed("probe", Set("/next", ProbeOf("7", "40")));
  for (const char* axis :
       {"another layer", "another token", "another operand", "another scheduling"})
    EXPECT_NE(j.Gravest()->next.find(axis), std::string::npos) << j.Gravest()->next;
  // While candidates still fall, a repeat tells something.
  const auto falling = [](Json& d) {
    d["runs"][2]["candidates"] = Json::array({"conv"});
    d["next"] = ProbeOf("7", "40");
  };
  EXPECT_EQ(Changed("probe", falling).verdict, Verdict::kPass);
}

// CHEAP-04: the captured bytes as they lay.
TEST(ClaimTest, AnOperatorSeesTheCapturedInputs) {
  const std::string x = "/cases/0/inputs/x/";
  Check({
      {"a contiguous copy", "operator-case", Set(x + "executed/strides", {64, 1}), kRefused,
       reason::kInputSubstituted, "CHEAP-04"},
      {"fp32 in place of bf16", "operator-case",
       [x](Json& d) {
         At(d, x + "executed/dtype") = "f32";
         At(d, x + "executed/sha256") = ClaimHash("x upcast");
       },
       kRefused, reason::kInputSubstituted, "CHEAP-04"},
      {"random bytes of the same form", "operator-case",
       Set(x + "executed/sha256", ClaimHash("random")), kRefused, reason::kInputSubstituted,
       "CHEAP-04"},
      {"no case with strides", "operator-case",
       [x](Json& d) {
         for (const char* side : {"captured", "executed"})
           At(d, x + side + "/strides") = Json::array({64, 1});
       },
       kRefused, reason::kFeatureUncovered, "CHEAP-04"},
      {"one bit differs", "operator-case", Set("/cases/0/mismatches", 1), Verdict::kFail,
       reason::kBitMismatch, "CHEAP-04"},
  });
}

// SHAPE-10, SHAPE-13: a fault at token 3 upstream, looked at from token 40.
TEST(ClaimTest, ALastTokenProbeDoesNotBlameTheScan) {
  Check({
      {"the scan is blamed for what the convolution did", "first-cause",
       Set("/blamed/operator", "scan"), Verdict::kFail, reason::kUpstreamDiffers, "SHAPE-10"},
      {"one position was probed", "first-cause",
       [](Json& d) {
         for (Json& op : d["operators"]) op["positions_compared"] = 1;
       },
       kRefused, reason::kCauseUnproven, "SHAPE-13"},
      {"the operator before it was seen at the last token only", "first-cause",
       Set("/operators/0/positions_compared", 1), kRefused, reason::kCauseUnproven, "SHAPE-13"},
      {"an operator that does not differ", "first-cause", Set("/operators/1/first_difference", -1),
       kRefused, reason::kCauseUnproven, "SHAPE-13"},
      {"offered as a candidate", "first-cause", Set("/offered_as", "candidate"),
       Verdict::kInconclusive, reason::kCandidateOnly, "SHAPE-13"},
  });
  const GateJudgement j = Changed("first-cause", Set("/blamed/operator", "scan"));
  EXPECT_NE(j.Gravest()->detail.find("conv of layer 2 differs before it, from token 3"),
            std::string::npos)
      << j.Gravest()->detail;
}

// SHAPE-06, NUM-01: the output's bits decide; formulas and launches are no proof either way. Two
// sums of one formula in two orders are really computed here.
TEST(ClaimTest, OnlyBitsMakeOutputsEqual) {
  Check({
      {"equal launch, other bits", "equal-output", Set("/outputs", CountsOf(4096, 2, "row 3")),
       Verdict::kFail, reason::kBitMismatch, "SHAPE-06"},
      {"equal launch taken as equal output", "equal-output",
       [](Json& d) {
         d["basis"] = "launch";
         d["outputs"] = CountsOf(0, 0);
       },
       kRefused, reason::kNotMeasured, "SHAPE-06"},
      {"the same formula", "equal-output",
       [](Json& d) {
         d["basis"] = "formula";
         d["outputs"] = CountsOf(0, 0);
       },
       kRefused, reason::kNotMeasured, "NUM-01"},
      {"other inputs", "equal-output", Set("/inputs/b", ClaimHash("y")), kRefused,
       reason::kInputDiffers, "SHAPE-06"},
  });
  // Another launch with equal bits is a pass with a note.
  const GateJudgement other = Changed("equal-output", Set("/launches/b/tile", "64x128"));
  EXPECT_EQ(other.verdict, Verdict::kPass) << Faults(other);
  EXPECT_NE(other.scope.at("notes").dump().find("64x128"), std::string::npos);
  const auto sums = [](bool backwards) {
    std::vector<float> out;
    for (int row = 0; row < 64; ++row) {
      float sum = 0;
      for (int i = 0; i < 64; ++i) {
        const int k = backwards ? 63 - i : i;
        sum += 1.0f / static_cast<float>(1 + k + row);
      }
      out.push_back(sum);
    }
    return out;
  };
  const std::vector<float> a = sums(false), b = sums(true);
  int64_t differ = 0;
  for (size_t i = 0; i < a.size(); ++i) differ += a[i] != b[i];
  ASSERT_GT(differ, 0);
  const GateJudgement measured = Changed("equal-output", [&](Json& d) {
    d["formulas"] = {{"a", "sum of 1/(1+k+row)"}, {"b", "sum of 1/(1+k+row)"}};
    d["outputs"] = CountsOf(static_cast<int64_t>(a.size()), differ, "row 0");
  });
  EXPECT_EQ(measured.reason, reason::kBitMismatch);
}

// SHAPE-09: a gated recurrence by chunks against token by token, really computed: a deterministic
// switch changes nothing, each of the three things that must match moves bits, all three give 0.
namespace recurrence {

struct Way {
  int chunk = 1;            // tokens between two boundaries
  bool narrow = false;      // the boundary's state is kept in 12 bits of mantissa, not 24
  bool gate_first = false;  // the input enters before the gate, not after it
};
float Narrow(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  word &= 0xfffff000u;
  std::memcpy(&x, &word, 4);
  return x;
}
std::vector<float> Run(const Way& way) {
  std::vector<float> out;
  float state = 0;
  for (int t = 0; t < 256;) {
    // Within a chunk: the inputs' own recurrence from 0, then the carried state times the product
    // of the gates, as a chunked scan does.
    float inner = 0, gates = 1;
    const int end = std::min(t + way.chunk, 256);
    for (; t < end; ++t) {
      const float gate = 1.0f - 1.0f / static_cast<float>(3 + t % 7);
      const float x = 1.0f / static_cast<float>(1 + t);
      inner = way.gate_first ? gate * (inner + x) : gate * inner + x;
      gates *= gate;
      out.push_back(inner + gates * state);
    }
    state = inner + gates * state;
    if (way.narrow) state = Narrow(state);
  }
  return out;
}
Json Claim(const Way& a, const Way& b, const Json& switches) {
  const auto side = [](const Way& w) {
    return Json{{"chunk_grid", std::to_string(w.chunk)},
                {"boundary_state", w.narrow ? "12 bits" : "f32"},
                {"gate_order", w.gate_first ? "after the input" : "before the input"}};
  };
  const std::vector<float> x = Run(a), y = Run(b);
  int64_t differ = 0;
  for (size_t i = 0; i < x.size(); ++i) differ += x[i] != y[i];
  Json doc = HonestOneRecurrence();
  doc["switches"] = switches;
  doc["sides"] = {{"a", side(a)}, {"b", side(b)}};
  doc["outputs"] = CountsOf(static_cast<int64_t>(x.size()), differ, differ > 0 ? "a token" : "");
  return doc;
}

}  // namespace recurrence

TEST(ClaimTest, TwoRecurrencesAreOneWhenThreeThingsMatch) {
  using recurrence::Way;
  const ClaimSpec* claim = FindClaim("one-recurrence");
  const Way base{64, true, false};
  const Json deterministic = Json::array({"deterministic"}), nothing = Json::array();
  EXPECT_EQ(claim->judge(recurrence::Claim(base, base, nothing)).verdict, Verdict::kPass);
  for (const auto& [what, other] : {std::pair<const char*, Way>{"chunk_grid", {1, true, false}},
                                    {"boundary_state", {64, false, false}},
                                    {"gate_order", {64, true, true}}}) {
    SCOPED_TRACE(what);
    const Json alone = recurrence::Claim(base, other, nothing);
    EXPECT_GT(alone["outputs"]["mismatches"], 0);
    const GateJudgement named = claim->judge(alone);
    EXPECT_NE(named.verdict, Verdict::kPass);
    EXPECT_NE(Faults(named).find(what), std::string::npos) << Faults(named);
    const GateJudgement flagged = claim->judge(recurrence::Claim(base, other, deterministic));
    EXPECT_NE(Faults(flagged).find("flag-alone"), std::string::npos);
    EXPECT_EQ(flagged.verdict, Verdict::kFail);  // the bits differ all the same
  }
  // Unmatched on inputs where the bits happen to agree is still refused.
  Json lucky = recurrence::Claim(base, {1, true, false}, deterministic);
  lucky["outputs"] = CountsOf(16, 0);
  EXPECT_EQ(claim->judge(lucky).reason, reason::kFlagAlone);
}

// SYS-28, NUM-13: the quantiser that reads theta0's scale after the update, alone and on both
// sides.
TEST(ClaimTest, AQuantisedViewIsOfThePresentWeights) {
  Check({
      {"the engine multiplies with theta0's scales", "quantised-view",
       [](Json& d) { At(d, "/versions/1/engine/scales") = At(d, "/versions/0/recomputed/scales"); },
       kRefused, reason::kStaleScale, "NUM-13"},
      {"both sides use theta0's scales, and agree", "quantised-view",
       [](Json& d) {
         for (const char* side : {"engine", "trainer"})
           At(d, fmt::format("/versions/2/{}/scales", side)) =
               At(d, "/versions/0/recomputed/scales");
       },
       kRefused, reason::kStaleScale, "NUM-13"},
      {"scales of the checkpoint", "quantised-view",
       Set("/versions/1/engine/read_from", "checkpoint"), kRefused, reason::kStaleScale, "NUM-13"},
      {"bytes of the weights before", "quantised-view",
       [](Json& d) { At(d, "/versions/1/engine/bytes") = At(d, "/versions/0/engine/bytes"); },
       Verdict::kFail, reason::kBitMismatch, "SYS-28"},
      {"theta2 is missing", "quantised-view", Erase("/versions/2"), kRefused,
       reason::kLoopIncomplete, "SYS-28"},
      {"the check read theta0 again", "quantised-view",
       Set("/versions/1/recomputed/weights", ClaimHash("theta0")), kRefused, reason::kStaleScale,
       "SYS-28"},
      {"nothing was updated", "quantised-view",
       [](Json& d) {
         d["versions"][1] = d["versions"][0];
         d["versions"][1]["version"] = 1;
       },
       Verdict::kInconclusive, reason::kDeployedUnchanged, "SYS-28"},
  });
}

// NUM-12, NUM-09.
TEST(ClaimTest, RewritesAreProvenAndCallsAreCompared) {
  Check({
      {"samples agree", "rewrite",
       [](Json& d) {
         d["proof"]["kind"] = "none";
         d["proof"]["record"] = nullptr;
       },
       kRefused, reason::kRewriteUnproven, "NUM-12"},
      {"half of the inputs", "rewrite", Set("/proof/inputs", 32768), kRefused,
       reason::kRewriteUnproven, "NUM-12"},
      {"a derivation without a test", "rewrite",
       [](Json& d) {
         d["proof"]["kind"] = "derivation";
         d["proof"]["text"] = std::string(60, 'x');
         d["proof"]["tests"] = Json::array();
       },
       kRefused, reason::kRewriteUnproven, "NUM-12"},
      {"no run behind the proof", "rewrite", Set("/proof/record", nullptr), kRefused,
       reason::kRewriteUnproven, "NUM-12"},
      {"other strides", "call-record", Set("/b/layout/q", "bf16 [4,9,64] strides [64,256,1]"),
       Verdict::kFail, reason::kCallDiffers, "NUM-09"},
      {"another scale", "call-record", Set("/b/arguments/scale", "0x3e000001"), Verdict::kFail,
       reason::kCallDiffers, "NUM-09"},
      {"another order on the stream", "call-record", Set("/b/stream_order", {"attention", "rope"}),
       Verdict::kFail, reason::kCallDiffers, "NUM-09"},
      {"inlined by the compiler", "call-record", Set("/b/compile_boundary", "inlined"),
       Verdict::kFail, reason::kCallDiffers, "NUM-09"},
  });
  const GateJudgement j = Changed("call-record", Set("/b/arguments/scale", "0x3e000001"));
  EXPECT_NE(j.Gravest()->detail.find("scale: 0x3e000000 against 0x3e000001"), std::string::npos);
}

// The page names every claim and row, and no other.
TEST(ClaimTest, ThePageHasEveryClaim) {
  std::ifstream in(TARE_SOURCE_DIR "/docs/formats/claims.md");
  const std::string page((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  for (const ClaimSpec& c : AllClaims()) {
    EXPECT_NE(page.find(fmt::format("## `{}`", c.name)), std::string::npos) << c.name;
    EXPECT_NE(page.find(c.rows), std::string::npos) << c.rows;
  }
  EXPECT_NE(page.find(kChangeSentence), std::string::npos);
}

}  // namespace
}  // namespace tare::workflow
