// Every row of C5 to C10 and RL once: the honest task with that one obligation broken, and the
// finding that names the row. The honest documents themselves pass (false_pass_test.cc).

#include <gtest/gtest.h>

#include "workflow/gates/testing_mutate.h"

namespace tare::workflow {
namespace {

TEST(GateRowsTest, C5) {
  ExpectBroken({
      {"C5-01", "C5", Set("/semantics/reduction/trainer", "reduction/2"), reason::kSemanticsDiffer},
      {"C5-01", "C5", Erase("/semantics/routing"), reason::kSemanticsDiffer},
      {"C5-02", "C5", Set("/trainer/weight_copies", 2), reason::kSecondCopy},
      {"C5-02", "C5", Set("/trainer/entry", "bench.py"), reason::kSecondCopy},
      {"C5-03", "C5",
       Set("/order", {"contract", "rollout", "repacked", "same packing", "old_logprob", "actor"}),
       reason::kOrderOfWork},
      {"C5-03", "C5", [](Json& d) { OneUlp(d["same_packing"]["actor"][1], 0, 0); },
       reason::kSelfInconsistent},
      {"C5-04", "C5", [](Json& d) { OneUlp(d["repacked"]["shuffled"]["old_logprob"], 5, 4); },
       reason::kSelfInconsistent},
      {"C5-04", "C5",
       [](Json& d) {
         d["packings"].erase("shuffled");
         d["repacked"].erase("shuffled");
       },
       reason::kOrderOfWork},
      {"C5-05", "C5", Erase("/paths/old_logprob"), reason::kPathMissing},
      {"C5-06", "C5", Set("/paths/actor/recorded", false), reason::kPathUnexecuted},
      {"C5-07", "C5", Set("/paths/actor/vocabulary", 514), reason::kSemanticsDiffer},
      {"C5-07", "C5", Set("/paths/rollout/dtype", "bf16"), reason::kNotOriginalDtype},
      {"C5-08", "C5", Set("/contract/scope/valid_tokens", 30), reason::kCountMismatch},
      {"C5-09", "C5", Set("/identities/rollout/device", "cuda sm90"), reason::kIdentityDiffers},
      {"C5-09", "C5", Set("/identities/rollout/faults", "rope.cast"), reason::kIdentityDiffers},
      {"C5-10", "C5", Set("/kind", "E3"), reason::kWrongEvidenceKind},
      {"C5-11", "C5", Set("/state/trainer", "one page of keys"), reason::kInputDiffers},
      {"C5-11", "C5", Set("/paths/actor/sequences/0/prompt/1", 77), reason::kTokensDiffer},
      {"C5-12", "C5", [](Json& d) { d["paths"]["extra"] = d["paths"]["actor"]; },
       reason::kPathMissing},
      {"C0-02", "C5", Set("/kernels/unused_fwd", "linear"), reason::kPathUnexecuted},
      {"C1-06", "C5", Set("/contract/scope/eos_tokens", 0), reason::kCountMismatch},
      {"C1-07", "C5", Set("/contract/standard", "within 1e-3"), reason::kSemanticsDiffer},
      {"NUM-17", "C5", Erase("/chain/1"), reason::kInventoryIncomplete},
      {"NUM-17", "C5", Set("/chain/1/rounding", "exact"), reason::kSemanticsDiffer},
      {"CHEAP-05", "C5",
       [](Json& d) {
         ForPaths(d, kAllPaths, [](Json& p) { p["sequences"][2]["bits"][1] = "0x7fc00000"; });
       },
       reason::kNonFinite},
      {"CHEAP-14", "C5", Set("/paths/old_logprob/rows", 47), reason::kPathUnexecuted},
  });
}

TEST(GateRowsTest, C6) {
  ExpectBroken({
      {"C6-01", "C6", Set("/modules/2/existing", "linear_bwd"), reason::kInventoryIncomplete},
      {"C6-02", "C6", Set("/surrogates/0/executed/saturated", "passes"), reason::kSurrogateDiffers},
      {"C6-02", "C6", Erase("/surrogates/0"), reason::kSurrogateDiffers},
      {"C6-03", "C6", Set("/modules/1/gradient", "approximate"), reason::kApproximateGradient},
      {"C6-04", "C6", Set("/production_scan/preload", "libpatch.so"), reason::kProductionPatched},
      {"C6-04", "C6", Set("/production_scan/run_time_hits", Json::array({"import hook"})),
       reason::kProductionPatched},
      {"C6-05", "C6", Erase("/modules/0"), reason::kInventoryIncomplete},
      {"C6-05", "C6", Set("/modules/0/rationale", "ok"), reason::kInventoryIncomplete},
      {"C6-06", "C6", Set("/poisoned/0/gradient_after", H("moved")), reason::kStateRecomputed},
      {"C6-06", "C6", Set("/modules/2/reads", {"scores", "router weights"}),
       reason::kStateRecomputed},
      {"C6-06", "C6", Set("/weight_change_raises", false), reason::kStateRecomputed},
      {"C6-07", "C6",
       Set("/step_times/0/step_aligned_us",
           {{"values", {1700, 1710, 1690}}, {"median", 1700}, {"sum", 5100}}),
       reason::kOverBudget},
      {"C6-07", "C6", Set("/agreement/main_topologies", "1 process|tp2"), reason::kOverBudget},
      {"C6-07", "C6", Set("/agreement", nullptr), reason::kBudgetUndecided},
      {"C6-08", "C6", Set("/step_times/0/step_aligned_us/median", 1200),
       reason::kReceiptContradicted},
      {"GEN-27", "C6", Set("/denominator", "BI=0 inference"), reason::kServingOnlyOptimum},
      {"BWD-05", "C6", Set("/graph/detached_outputs", 2), reason::kDetachedSubstitute},
  });
  // without the person's decision correctness passes, provisionally.
  Json undecided = HonestC6();
  undecided["agreement"] = nullptr;
  undecided["step_times"] = Json::array();
  const GateJudgement judged = JudgeC6(undecided);
  EXPECT_EQ(judged.verdict, Verdict::kPass) << judged.ToJson().dump(1);
  EXPECT_TRUE(judged.scope.contains("provisional"));
}

TEST(GateRowsTest, C7) {
  ExpectBroken({
      {"C7-01", "C7", Set("/layers/module/0/inputs/upstream/reference", H("ones")),
       reason::kInputDiffers},
      {"BWD-03", "C7", Set("/layers/operator/0/upstream_dtype", "f32"), reason::kInputDiffers},
      {"BWD-03", "C7", Set("/layers/operator/0/upstream_representable", false),
       reason::kInputDiffers},
      {"C7-02", "C7", Set("/perturbation/production_after", H("gradient")),
       reason::kNotIndependent},
      {"C7-03", "C7", Erase("/layers/model/0/quantities/2"), reason::kInventoryIncomplete},
      {"C7-03", "C7", Erase("/step/second_moments/0"), reason::kInventoryIncomplete},
      {"C7-04", "C7", Set("/tolerances/0/reason", "fits"), reason::kToleranceAfterResult},
      {"C7-06", "C7", Erase("/sft/control/arms/surrogate"), reason::kArmMissing},
      {"C7-06", "C7", Set("/sft/control/arms/native/data", H("other data")), reason::kInputDiffers},
      {"C7-06", "C7", Set("/sft/control/arms/surrogate/visible_forward", H("other")),
       reason::kSurrogateDiffers},
      {"C7-07", "C7",
       [](Json& d) {
         d["sft"]["control"] = nullptr;
         d["order"] = {"tolerances", "operator", "module", "model", "step"};
       },
       reason::kLossNotQuality},
      {"C7-08", "C7", Set("/quality_evidence", "falling loss"), reason::kLossNotQuality},
      {"C7-09", "C7", Set("/kind", "E6"), reason::kWrongEvidenceKind},
      {"C7-10", "C7", Set("/layers/operator/0/quantities/0/error", 0.0),
       reason::kReceiptContradicted},
      {"C7-10", "C7", Set("/layers/operator/0/quantities/1/bitwise_equal", 47),
       reason::kReceiptContradicted},
      {"BWD-02", "C7", Set("/layers/model/0/quantities/1/all_zero", true),
       reason::kGradientNotMeaningful},
      {"CHEAP-05", "C7", Set("/layers/model/0/quantities/1/non_finite", 1), reason::kNonFinite},
      {"DOC-28", "C7", Erase("/layers/module"), reason::kLayerMissing},
  });
  // C7-05: bitwise and tolerance results are told apart.
  const GateJudgement judged = JudgeC7(HonestC7());
  EXPECT_EQ(judged.scope.at("notes").at(1),
            "5 of 19 quantities are equal in every bit; 14 within their tolerance");
}

TEST(GateRowsTest, C8) {
  ExpectBroken({
      {"C8-01", "C8", Erase("/loop/events/9"), reason::kLoopIncomplete},
      {"C8-01", "C8", Erase("/loop/versions/2"), reason::kLoopIncomplete},
      {"C8-02", "C8", Set("/loop/entry", "call_workers.py"), reason::kHelperEntry},
      {"C8-03", "C8",
       [](Json& d) {
         At(d, "/loop/updates/0/parameters/1/gradient_nonzero") = 0;
         Total(At(d, "/loop/updates/0"));
       },
       reason::kGradientNotMeaningful},
      {"C8-03", "C8", Set("/loop/updates/1/entropy_coefficient", 0.01),
       reason::kGradientNotMeaningful},
      {"C8-04", "C8", [](Json& d) { KeepWeights(d["loop"], 0, true); }, reason::kMasterUnchanged},
      {"C8-05", "C8", Set("/loop/processes/0/ended", false), reason::kProcessExit},
      {"C8-05", "C8", Set("/loop/processes/1/flushed", false), reason::kProcessExit},
      {"C8-06", "C8", Set("/loop/versions/1/sampled_versions", {0, 1}),
       reason::kVersionContradiction},
      {"C8-06", "C8", Set("/loop/versions/2/paths/actor/version", 1),
       reason::kVersionContradiction},
      {"C8-07", "C8", Set("/loop/versions/0/paths/actor/source", "copied"),
       reason::kPathUnexecuted},
      {"C8-08", "C8",
       [](Json& d) {
         d["task_scope"] = "logprob-only";
         d["plan"] = Json::array({"none"});
         d["loop"] = nullptr;
       },
       reason::kLoopNotVerified},
      {"C8-09", "C8",
       [](Json& d) {
         d["task_scope"] = "forward-only";
         d["plan"] = {"C8", "full-model zero-update compare", "C6", "C7"};
         d["loop"] = nullptr;
       },
       reason::kOrderOfWork},
      {"C8-10", "C8", Set("/loop/prior_receipt", H("receipt")), reason::kOrderOfWork},
      {"C8-11", "C8", Set("/loop", nullptr), reason::kLoopIncomplete},
      {"BWD-06", "C8", Set("/loop/updates/1/moments_after", H("moments1")),
       reason::kMomentsUnchanged},
      {"SYS-36", "C8", Set("/loop/versions/0/questions/0/rewards/0", 0.75),
       reason::kReceiptContradicted},
      {"SYS-36", "C8", Set("/loop/updates/0/ratio_not_one", 3), reason::kRatioNotOne},
  });
}

// CHEAP-09: level 5 is five things, and each that is taken away refuses by its own reason, whatever
// the other four show.
TEST(GateRowsTest, LevelFiveIsFiveThings) {
  ExpectBroken({
      {"C8-07", "C8",
       [](Json& d) {
         for (Json& q : At(d, "/loop/versions/0/questions")) {
           for (Json& r : q["rewards"]) r = 0.5;
           for (Json& a : q["advantages"]) a = "0x00000000";
         }
       },
       reason::kDegenerateAdvantage},
      {"C8-03", "C8",
       [](Json& d) {
         At(d, "/loop/updates/0/parameters/2/gradient_non_finite") = 1;
         Total(At(d, "/loop/updates/0"));
       },
       reason::kGradientNotMeaningful},
      {"C8-04", "C8", Set("/loop/updates/0/skipped", true), reason::kMasterUnchanged},
      {"C8-04", "C8",
       [](Json& d) {
         At(d, "/loop/updates/1/parameters/0/master_changed") = 0;
         Total(At(d, "/loop/updates/1"));
       },
       reason::kMasterUnchanged},
      {"RL-06", "C8",
       [](Json& d) {
         Json& word = At(d, "/loop/versions/1/paths/actor/sequences/2/bits/3");
         const uint32_t bits =
             static_cast<uint32_t>(std::stoul(word.get<std::string>().substr(2), nullptr, 16));
         word = Word(bits ^ 1u);
       },
       reason::kBitMismatch},
  });
}

// C10-09: equal numbers are no 0 diff while weights, tokens, mask or dtype are not the same; with
// all of them the same, one bit is a fail.
TEST(GateRowsTest, ZeroDiffHasPreconditions) {
  const auto both = [](const char* what, const Json& value) {
    return [what, value](Json& d) {
      for (const char* path : {"old_logprob", "actor"})
        At(d, fmt::format("/loop/versions/1/paths/{}/sequences/1/{}", path, what)) = value;
    };
  };
  ExpectBroken({
      {"RL-08", "C10", Set("/loop/versions/1/engine_held", H("theta0")),
       reason::kWeightHashMismatch},
      {"C8-06", "C10", Set("/loop/versions/1/engine_version", 0), reason::kVersionContradiction},
      {"C5-11", "C10", both("tokens/0", 7), reason::kTokensDiffer},
      {"C5-11", "C10", both("prompt/0", 99), reason::kTokensDiffer},
      {"C5-08", "C10", both("mask/2", 0), reason::kMaskDiffers},
      {"C5-07", "C10",
       [](Json& d) {
         for (auto& [name, path] : At(d, "/loop/versions/1/paths").items()) path["dtype"] = "bf16";
       },
       reason::kNotOriginalDtype},
      {"DISC-12", "C10",
       [](Json& d) { At(d, "/loop/versions/1/paths/rollout/kind") = "processed"; },
       reason::kLogprobKind},
  });
  Json doc = HonestBundle().at("C10");
  Json& word = At(doc, "/loop/versions/2/paths/rollout/sequences/5/bits/0");
  const uint32_t bits =
      static_cast<uint32_t>(std::stoul(word.get<std::string>().substr(2), nullptr, 16));
  word = Word(bits ^ 1u);
  const GateJudgement judged = JudgeC10(doc);
  EXPECT_EQ(judged.verdict, Verdict::kFail);
  EXPECT_EQ(judged.reason, reason::kBitMismatch);
}

// C10 on a machine that delivers to nobody: loop and pairs are judged, manifest and device profile
// are not covered, and half of a profile is no profile.
TEST(GateRowsTest, WhatIsNotDeliveredIsNotCovered) {
  Json doc = HonestBundle().at("C10");
  doc["commits"] = At(doc, "/pairing/points/0/pairs/0/off/commits");
  for (const char* part : {"manifest", "profile", "kernels", "scan", "micro", "regressions"})
    doc[part] = nullptr;
  const GateJudgement judged = JudgeC10(doc);
  EXPECT_EQ(judged.verdict, Verdict::kNotCovered) << judged.ToJson().dump(1);
  Json half = HonestBundle().at("C10");
  half["micro"] = nullptr;
  EXPECT_EQ(JudgeC10(half).reason, reason::kManifestIncomplete);
  // The loop is looked at all the same.
  At(doc, "/loop/updates/0/skipped") = true;
  EXPECT_EQ(JudgeC10(doc).reason, reason::kMasterUnchanged);
}

// C6-06: state that a model does not have is named with its reason; what it has is poisoned.
TEST(GateRowsTest, AbsentStateIsNamed) {
  Json doc = HonestBundle().at("C6");
  Json& poisoned = At(doc, "/poisoned");
  for (size_t i = poisoned.size(); i-- > 0;) {
    const std::string what = poisoned[i]["what"];
    if (what == "rng" || what == "scales") poisoned.erase(i);
  }
  EXPECT_NE(JudgeC6(doc).verdict, Verdict::kPass);
  doc["absent"] = {{{"what", "rng"}, {"why", "no operator of a training step draws a number"}},
                   {{"what", "scales"}, {"why", "no value of the step is quantised by a scale"}}};
  const GateJudgement named = JudgeC6(doc);
  EXPECT_EQ(named.verdict, Verdict::kPass) << named.ToJson().dump(1);
  EXPECT_NE(named.scope.at("not_covered").dump().find("rng"), std::string::npos);
  At(doc, "/absent/0/why") = "none";
  EXPECT_EQ(JudgeC6(doc).reason, reason::kStateRecomputed);
  // Named and poisoned at once is a contradiction, and buffers are not excused.
  doc = HonestBundle().at("C6");
  doc["absent"] = Json::array({{{"what", "rng"}, {"why", "no operator draws a number here"}}});
  EXPECT_NE(JudgeC6(doc).verdict, Verdict::kPass);
  doc = HonestBundle().at("C6");
  std::erase_if(At(doc, "/poisoned").get_ref<Json::array_t&>(),
                [](const Json& p) { return p["what"] == "caches"; });
  doc["absent"] = Json::array({{{"what", "caches"}, {"why", "this trainer keeps no buffers"}}});
  EXPECT_NE(JudgeC6(doc).verdict, Verdict::kPass);
}

// C7-05, C7-10: an error as a share of the tensor's largest element, which must be there and be the
// largest.
TEST(GateRowsTest, ErrorsOfTheLargestElement) {
  Json doc = HonestBundle().at("C7");
  for (Json& t : At(doc, "/tolerances")) {
    if (t["id"] == "T-module") t["metric"] = "of-largest", t["bound"] = 0.002;
  }
  Json& q = At(doc, "/layers/module/0/quantities/0");
  q["worst"] = {{"index", 3}, {"production", Word(0.2501f)}, {"reference", Word(0.25f)}};
  q["largest"] = Word(-2.0f);
  q["error"] = static_cast<double>(0.2501f - 0.25f) / 2.0;
  EXPECT_EQ(JudgeC7(doc).verdict, Verdict::kPass) << JudgeC7(doc).ToJson().dump(1);
  Json changed = doc;
  At(changed, "/layers/module/0/quantities/0/largest") = Word(0.125f);
  EXPECT_EQ(JudgeC7(changed).reason, reason::kReceiptContradicted);
  changed = doc;
  At(changed, "/layers/module/0/quantities/0").erase("largest");
  EXPECT_EQ(JudgeC7(changed).reason, reason::kReceiptContradicted);
  changed = doc;
  At(changed, "/layers/module/0/quantities/0/error") = 0.25;
  EXPECT_EQ(JudgeC7(changed).reason, reason::kReceiptContradicted);
  for (Json& t : At(doc, "/tolerances")) {
    if (t["id"] == "T-module") t["bound"] = 1e-6;
  }
  EXPECT_EQ(JudgeC7(doc).reason, reason::kGradientDiffers);
}

// C7-07: the control may run for its forwards alone; then quality is not covered, and a claim of it
// needs its evaluation.
TEST(GateRowsTest, AControlIsNoQualityByItself) {
  Json doc = HonestBundle().at("C7");
  doc["quality"] = "not covered";
  EXPECT_NE(JudgeC7(doc).verdict, Verdict::kPass);
  doc["quality_evidence"] = "none";
  const GateJudgement judged = JudgeC7(doc);
  EXPECT_EQ(judged.verdict, Verdict::kPass) << judged.ToJson().dump(1);
  EXPECT_NE(judged.scope.at("not_covered").dump().find("quality not covered"), std::string::npos);
  doc["quality_evidence"] = "falling loss";
  EXPECT_EQ(JudgeC7(doc).reason, reason::kLossNotQuality);
}

TEST(GateRowsTest, C9) {
  ExpectBroken({
      {"C9-01", "C9", Set("/smoke/launch_script", H("other.sh")), reason::kConfigDiffers},
      {"C9-02", "C9", Erase("/differences/0"), reason::kDifferenceUnlisted},
      {"C9-02", "C9", Set("/differences/1/class", "workload"), reason::kDifferenceUnlisted},
      {"C9-03", "C9", Set("/smoke/image", "sha256:" + H("old image")), reason::kSmokeMissing},
      {"C9-04", "C9", Set("/confirmation/recipe", H("another version")), reason::kSignoffVoid},
      {"C9-04", "C9", Erase("/six/optimizer"), reason::kInventoryIncomplete},
      {"C9-05", "C9", Set("/entry_table/2/state", "ok"), reason::kEntryRowOpen},
      {"C9-05", "C9", Set("/entry_table/2/evidence", nullptr), reason::kEntryRowOpen},
      {"C9-06", "C9",
       [](Json& d) {
         At(d, "/escalation/stages/0/to/length") = 512;
         At(d, "/escalation/stages/1/from/length") = 512;
       },
       reason::kTwoAxes},
      {"C9-07", "C9",
       [](Json& d) {
         d["counters"]["mixed_steps"] = {{"before", 3}, {"after", 3}, {"delta", 0}};
       },
       reason::kFeatureUnexecuted},
      {"C9-07", "C9", Erase("/counters/cache_hits"), reason::kFeatureUnexecuted},
      {"C9-08", "C9", Set("/restore", nullptr), reason::kRestoreUnchecked},
      {"C9-08", "C9", Set("/restore/second moments/restored", H("fresh")), reason::kRestoreDiffers},
      {"C9-09", "C9", Set("/c5/verdict", "fail"), reason::kGateNotPassed},
      {"C9-09", "C9", Set("/c5/verdict", "inconclusive"), reason::kGateNotPassed},
      {"C9-09", "C9", Set("/c5/artifact", nullptr), reason::kGateNotPassed},
      {"C9-10", "C9", Set("/two_step/recipe/max_tokens", "3"), reason::kConfigDiffers},
      {"C9-10", "C9", Set("/two_step/recipe/steps", "3"), reason::kConfigDiffers},
      {"C9-11", "C9",
       [](Json& d) {
         d["failures"] = Json::array({{{"what", "out of memory"},
                                       {"seen", 1},
                                       {"runs", 1},
                                       {"cause_found", true},
                                       {"seen_after", 0},
                                       {"runs_after", 1},
                                       {"full_runs_after", 1},
                                       {"shrunk", nullptr},
                                       {"attempt", ""}}});
       },
       reason::kShrinkFirst},
      {"C9-12", "C9", Set("/open_questions", Json::array({"which data?"})), reason::kOpenQuestion},
      {"STOP-11", "C9", Set("/confirmation", nullptr), reason::kNoSignoff},
  });
}

TEST(GateRowsTest, C10) {
  ExpectBroken({
      {"C10-01", "C10", Set("/inputs/entry_gate/verdict", "waiting-human"), reason::kGateNotPassed},
      {"C10-02", "C10", Set("/profile/arm", "BI=0"), reason::kShapeUnmeasured},
      {"C10-02", "C10", Set("/profile/hot_spots/0/share_ppm", 1), reason::kReceiptContradicted},
      {"C10-03", "C10", Set("/micro/0/shape", "4096x4096"), reason::kShapeUnmeasured},
      {"C10-04", "C10", Erase("/micro/1"), reason::kShapeUnmeasured},
      {"C10-04", "C10", Set("/micro/1/mismatches", 1), reason::kBitMismatch},
      {"C10-05", "C10", Set("/kernels/0/technology", "triton"), reason::kForbiddenTechnology},
      {"C10-05", "C10", Set("/scan/triton", Json::array({"kernel cache: fused_add"})),
       reason::kForbiddenTechnology},
      {"C10-05", "C10", Erase("/scan/scanned/3"), reason::kForbiddenTechnology},
      {"C10-06", "C10", Set("/kernels/0/source", "a binary"), reason::kForbiddenTechnology},
      {"C10-07", "C10", Erase("/regressions/0/ran/C7"), reason::kRegressionMissing},
      {"C10-08", "C10", Set("/manifest/image/digest", "sha256:" + H("dev image")),
       reason::kManifestIncomplete},
      {"RL-06", "C10", [](Json& d) { OneUlp(At(d, "/loop/versions/2/paths/actor"), 1, 1); },
       reason::kBitMismatch},
      {"C10-10", "C10", Set("/agreement/input_tokens", "128"), reason::kOutsideScope},
      {"C10-10", "C10", Set("/pairing/points/0/pairs/1/on/node", "node-8"), reason::kPairInvalid},
      {"C10-10", "C10", Erase("/pairing/points/1"), reason::kTooFewPairs},
      {"C10-10", "C10", Set("/pairing/points/0/pairs/1/on/cache_hits", 64), reason::kWarmCache},
      {"H20", "C10", Set("/pairing/points/0/pairs/0/on/switch_value", "0"), reason::kPairInvalid},
      {"A-17", "C10", Set("/pairing/points/0/pairs/0/order", "on first"), reason::kPairInvalid},
      {"C10-11", "C10",
       Set("/gates", {"delivery manifest", "pairing results", "loop receipt", "one more"}),
       reason::kExtraGate},
      {"C10-12", "C10", Erase("/manifest/receipts/1"), reason::kManifestIncomplete},
      {"CHEAP-10", "C10", Erase("/acceptance/restore lifecycle"), reason::kManifestIncomplete},
      {"GEN-18", "C10", Set("/manifest/baseline", H("numbers")), reason::kBaselineUnconfirmed},
      {"TRACK-12", "C10", [](Json& d) { At(d, "/agreement/throughput_ratio_ppm") = "1010000"; },
       reason::kMarginExceeded},
  });
  // A bound above the margin with a mean below it is inconclusive, not a pass.
  Json wide = HonestC10();
  BenchPoint point;
  Json& pairs = At(wide, "/pairing/points/0/pairs");
  int i = 0;
  for (Json& pair : pairs) {
    BenchPair read;
    for (const char* side : {"off", "on"}) {
      Json& arm = pair[side];
      const int64_t us = std::string(side) == "off" ? 10'000'000 : 9'000'000 + 2'400'000 * (i % 4);
      arm["duration_us"] = us;
      arm["output_throughput_micro"] =
          std::llround(arm["output_tokens"].get<double>() / static_cast<double>(us) * 1e12);
      BenchArm& to = std::string(side) == "off" ? read.off : read.on;
      to.output_tokens = arm["output_tokens"];
      to.duration_us = us;
    }
    point.pairs.push_back(read);
    ++i;
  }
  const Slowdown s = SlowdownOf(point);
  ASSERT_LT(s.mean, 1.2);
  ASSERT_GT(s.upper, 1.2);
  At(wide, "/pairing/points/0/median_slowdown_ppm") = std::llround(s.median * 1e6);
  At(wide, "/pairing/points/0/upper_slowdown_ppm") = std::llround(s.upper * 1e6);
  const GateJudgement judged = JudgeC10(wide);
  EXPECT_EQ(judged.verdict, Verdict::kInconclusive) << judged.ToJson().dump(1);
  EXPECT_EQ(judged.reason, reason::kIntervalWide);
}

TEST(GateRowsTest, RL) {
  ExpectBroken({
      {"RL-01", "C8", Set("/loop/identities/trainer/image", "sha256:" + H("other")),
       reason::kIdentityDiffers},
      {"RL-01", "C8", Set("/loop/identities/trainer/overlay", Json::array({"ops.py"})),
       reason::kIdentityDiffers},
      {"RL-02", "C8", Erase("/loop/identities/trainer/libraries/libcrypto.so.3"),
       reason::kTwoEnvironments},
      {"RL-04", "C8", Set("/loop/identities/trainer/packages", "torch 2.12"),
       reason::kTwoEnvironments},
      {"RL-05", "C8", Erase("/loop/updates/1"), reason::kLoopIncomplete},
      {"RL-06", "C8", Erase("/loop/versions/1/paths/old_logprob"), reason::kPathMissing},
      {"RL-07", "C8", Set("/loop/updates/1/lr", Word(0.0f)), reason::kMasterUnchanged},
      {"RL-08", "C8", Set("/loop/updates/0/published/held", H("theta0")),
       reason::kWeightHashMismatch},
      {"RL-09", "C10", Set("/loop/mode", "offline-replay"), reason::kOfflineReplay},
      {"RL-10", "C10", Set("/manifest/statement", "RL requires bitwise equality."),
       reason::kUniversalClaim},
      {"RL-11", "C10",
       [](Json& d) {
         d["manifest"]["pull_requests"].push_back(At(d, "/manifest/pull_requests/2"));
       },
       reason::kManifestIncomplete},
      {"RL-12", "C10", Set("/manifest/pull_requests/1/branch", "main"), reason::kWrongBranch},
      {"RL-12", "C10", Set("/manifest/pull_requests/0/repository", "someone/vllm"),
       reason::kWrongBranch},
      {"RL-13", "C10",
       [](Json& d) {
         Json& verl = At(d, "/manifest/pull_requests/2");
         verl["files"].push_back(HonestFile("verl/trainer/core_algos.py", "other"));
         verl["diff"].push_back("verl/trainer/core_algos.py");
       },
       reason::kUnlistedChange},
      {"RL-14", "C10",
       [](Json& d) { At(d, "/manifest/pull_requests/0/diff").push_back("debug.py"); },
       reason::kUnlistedChange},
      {"RL-15", "C10",
       Set("/manifest/image/built_from/vllm-project~1vllm", HonestCommit("another")),
       reason::kDirtyBuild},
      {"RL-16", "C10", Set("/manifest/image/dirty", true), reason::kDirtyBuild},
  });
  // RL-03: separate hosts are no fault; RL-13: pure metrics are accepted.
  Json metrics = HonestC10();
  Json& verl = At(metrics, "/manifest/pull_requests/2");
  verl["files"].push_back(HonestFile("verl/utils/metric.py", "observability"));
  verl["diff"].push_back("verl/utils/metric.py");
  EXPECT_EQ(JudgeC10(metrics).verdict, Verdict::kPass) << JudgeC10(metrics).ToJson().dump(1);
}

}  // namespace
}  // namespace tare::workflow
