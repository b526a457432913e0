// Checks of the judges that no other test saw refuse, or whose removal no other test noticed: found
// by counting over all tests of this folder, then by taking each of the 438 away in turn. Where one
// broken thing is seen by several checks, the detail tells whose finding is meant.

#include <gtest/gtest.h>

#include "workflow/gates/testing_mutate.h"

namespace tare::workflow {
namespace {

std::function<void(Json&)> Again(const std::string& list) {
  return [list](Json& d) {
    const Json first = At(d, list)[0];
    At(d, list).push_back(first);
  };
}

TEST(GateChecksTest, C0ToC4) {
  ExpectBroken({
      {"C0-08", "C0", Set("/route/answers/batch_invariance_needed", "perhaps"),
       reason::kAnswerMissing, "yes or no is needed"},
      {"C0-05", "C0",
       [](Json& d) {
         At(d, "/trace/choices") = Json::array();
         for (Json& row : d["rows"]) row["choices"] = Json::array();
       },
       reason::kChoiceUndeclared, "no discrete decision at all"},
      {"C1-01", "C1", Set("/inputs/model/sha256", H("another model")), reason::kWeightHashMismatch},
      {"C1-03", "C1", Set("/recipe/execution", Json::object()), reason::kInputMissing},
      {"C1-11", "C1", Again("/tuning/cells"), reason::kDuplicateName},
      {"C2-06", "C2", Set("/coverage/0/layer", 99), reason::kTestDangling, "has no layer 99"},
      {"C3-09", "C3", Again("/cells"), reason::kDuplicateName},
      {"C4-01", "C4",
       [](Json& d) {
         std::erase_if(d["profiles"].get_ref<Json::array_t&>(),
                       [](const Json& p) { return p["phase"] == "decode"; });
       },
       reason::kProfileMissing, "no profile of decode"},

      {"GEN-25", "C0",
       [](Json& d) { At(d, "/route/unsupported")["mlite"] = "no such router there"; },
       reason::kRouteLacksFeature},
      {"C0-06", "C0", [](Json& d) { At(d, "/route/rejected")["mlite"] = "it is too new"; },
       reason::kRouteUnfounded, "is chosen and rejected"},
      {"C0-07", "C0", Set("/rows/1/id", "M01"), reason::kDuplicateName},
      {"C1-06", "C1", Set("/recipe/scoring_scope/sha256", ""), reason::kScopeNotAgreed,
       "has no digest"},
      {"C1-07", "C1", Set("/compares/0/standard", "tolerance"), reason::kCriterionLate,
       "was held to `tolerance`"},
      {"C1-07", "C1",
       [](Json& d) {
         At(d, "/recipe/standard/kind") = "tolerance";
         At(d, "/compares/0/standard") = "tolerance";
       },
       reason::kCriterionLate, "a tolerance without a fixed bound"},
      {"C1-11", "C1",
       [](Json& d) {
         Json cell = At(d, "/tuning/cells/0");
         cell["id"] = "beyond";
         cell["concurrency"] = 3;
         At(d, "/tuning/cells").push_back(cell);
       },
       reason::kAnswerContradicted, "is outside the plan"},
      {"C1-10", "C1",
       [](Json& d) {
         At(d, "/tuning/workload/declared") = "formal";
         At(d, "/tuning/workload/input_tokens") = 8192;
         At(d, "/tuning/workload/output_tokens") = 1024;
       },
       reason::kPointMissing, "no point at concurrency 64"},
      {"C2-06", "C2", Set("/coverage/0/feature", "feature:none"), reason::kTestDangling,
       "which the proxy does not have"},
      {"C3-02", "C3",
       [](Json& d) {
         for (Json& cell : d["cells"]) {
           if (cell["axis"] == "batch") cell.erase("proof");
         }
       },
       reason::kConditionUnmet, "no counter shows"},
  });
}

TEST(GateChecksTest, C5) {
  ExpectBroken({
      {"C5-09", "C5",
       Set("/identities/rollout/kernels",
           {"attention_fwd", "linear_fwd", "router_fwd", "linear_fwd"}),
       reason::kInventoryIncomplete},
      {"NUM-17", "C5", Set("/chain/2/from", H("other bytes")), reason::kInputDiffers,
       "same format, other bytes"},
      {"C5-03", "C5",
       [](Json& d) {
         d["packings"]["first"] = d["packings"]["base"];
         d["packings"].erase("base");
       },
       reason::kOrderOfWork, "no packing is named base"},
      {"C5-03", "C5", Erase("/same_packing/actor/1"), reason::kOrderOfWork, "a fresh process"},
      {"C5-03", "C5", [](Json& d) { d["same_packing"]["another"] = d["same_packing"]["actor"]; },
       reason::kOrderOfWork, "no others"},
      {"C5-04", "C5",
       [](Json& d) {
         d["packings"]["again"] = d["packings"]["base"];
         d["repacked"]["again"] = d["repacked"]["shuffled"];
       },
       reason::kOrderOfWork, "packing again is the base packing again"},
      {"C5-04", "C5", Erase("/repacked/shuffled/actor"), reason::kPathMissing,
       "both paths are wanted"},
      {"C5-04", "C5",
       [](Json& d) {
         Json& runs = d["repacked"]["shuffled"];
         runs["another"] = runs["actor"];
         runs.erase("actor");
       },
       reason::kPathMissing, "packing shuffled: no actor"},
      {"C5-04", "C5", [](Json& d) { d["repacked"]["extra"] = d["repacked"]["shuffled"]; },
       reason::kOrderOfWork, "each repacked run needs its packing"},
      {"C5-04", "C5",
       [](Json& d) {
         for (auto& [name, packing] : d["packings"].items()) packing["padding_rows"] = 7;
       },
       reason::kOrderOfWork, "padding must change"},
      {"C5-05", "C5", Erase("/paths/rollout"), reason::kPathMissing, "no logprobs of the rollout"},
      {"C5-08", "C5",
       [](Json& d) {
         ForPaths(d, kAllPaths, [](Json& p) { p["sequences"][1]["sequence"] = "q0/0"; });
       },
       reason::kDuplicateName},
      {"C5-08", "C5",
       [](Json& d) {
         ForPaths(d, {"actor"}, [](Json& p) {
           p["rows"] = p["rows"].get<int64_t>() - kPrompt - kResponse + 1;
           p["sequences"].erase(5);
         });
       },
       reason::kCountMismatch, "6 sequences against 5"},
      {"DISC-01", "C5", Set("/decisions/choices", Json::array()), reason::kNothingCompared},
      {"DISC-01", "C5",
       [](Json& d) { At(d, "/decisions/choices/1/where") = At(d, "/decisions/choices/0/where"); },
       reason::kDuplicateName},
      {"DISC-10", "C5",
       [](Json& d) {
         d["decisions"]["replayed"] = true;
         d["decisions"]["statement"] = "replay masks set differences";
         At(d, "/decisions/choices/0/trainer_used") = {8, 9};
       },
       reason::kReplayUnstated, "is not the rollout's"},

      {"C5-01", "C5", [](Json& d) { d["semantics"]["another"] = d["semantics"]["mask"]; },
       reason::kSemanticsDiffer, "9 semantics"},
      {"C5-09", "C5", Set("/identities/trainer/prefix_caching", false), reason::kIdentityDiffers,
       "another prefix caching"},
      {"C5-09", "C5",
       [](Json& d) {
         for (const char* side : {"rollout", "trainer"})
           At(d, "/identities")[side]["contracts"] = H("other contracts");
       },
       reason::kIdentityDiffers, "the contract IDs are not those"},
      {"C0-02", "C5", Erase("/kernels/router_fwd"), reason::kInventoryIncomplete,
       "stands in no inventory"},
      {"C5-09", "C5", Set("/kernels/router_fwd", "gate"), reason::kInventoryIncomplete,
       "which has no contract"},
      {"CHEAP-14", "C5", Set("/identities/trainer/kernels", {"attention_fwd", "linear_fwd"}),
       reason::kPathUnexecuted, "router was executed by rollout only"},
      {"NUM-17", "C5", Erase("/chain/2"), reason::kInventoryIncomplete,
       "2 conversions are recorded"},
      {"NUM-17", "C5", Set("/chain/1/from", H("other")), reason::kInventoryIncomplete,
       "the one before gave"},
      {"C5-11", "C5", Set("/chain/0/from", H("other")), reason::kWeightHashMismatch},
      {"C5-04", "C5", Erase("/packings/shuffled/micro_batches/2/1"), reason::kTokensDiffer},
      {"C5-08", "C5", MaskAll, reason::kNoValidTokens, "=30 tokens, none of them valid"},
      {"C5-08", "C5", MaskAll, reason::kNoValidTokens, ": 30 tokens, none of them valid"},
      {"DISC-10", "C5", Set("/decisions/choices/0/trainer_used", {8, 9}), reason::kReplayUnstated,
       "without declared replay"},
      {"DISC-01", "C5",
       [](Json& d) {
         At(d, "/decisions/choices/0/trainer") = {0, 5};
         At(d, "/decisions/choices/0/trainer_used") = {0, 5};
       },
       reason::kSetDiffers},
      {"DISC-10", "C5",
       [](Json& d) {
         d["decisions"]["replayed"] = true;
         d["decisions"]["statement"] = "replay masks set differences";
         At(d, "/decisions/choices/0/trainer") = {0, 5};
       },
       reason::kForcedDecisions},
      {"CHEAP-13", "C5", Set("/paths/actor/sequences/1/bits/2", nullptr), reason::kDefaultFilled,
       "1 of 30 tokens have no logprob"},
      {"CHEAP-13", "C5", Set("/paths/actor/sequences/1/bits/2", nullptr), reason::kDefaultFilled,
       "q0/1 token 2 has no logprob"},
      {"CHEAP-13", "C5",
       [](Json& d) { SetWords(d["paths"]["actor"], [](int, int) { return Json("0x00000000"); }); },
       reason::kDefaultFilled, ": every logprob is 0.0"},
      {"CHEAP-13", "C5",
       [](Json& d) {
         ForPaths(d, kAllPaths,
                  [](Json& path) { SetWords(path, [](int, int) { return Json("0x00000000"); }); });
       },
       reason::kDefaultFilled, "0.0 on both sides"},
      {"C5-07", "C5", Set("/paths/actor/temperature", Word(0.5f)), reason::kSemanticsDiffer,
       "over 512 tokens against 0x3f000000"},
      {"C5-07", "C5", Set("/paths/actor/dtype", "bf16"), reason::kDtypeDiffers},
  });
}

TEST(GateChecksTest, C6ToC9) {
  ExpectBroken({
      {"C6-07", "C6",
       Set("/step_times/0/forward_aligned_us",
           {{"values", {700, 705, 695}}, {"median", 700}, {"sum", 2100}}),
       reason::kOverBudget, "forward 700 us"},
      {"C7-04", "C7", Again("/tolerances"), reason::kDuplicateName},
      {"C7-03", "C7", Set("/layers/module/0/quantities", Json::array()),
       reason::kInventoryIncomplete, "no gradient was compared"},
      {"C7-03", "C7", Again("/layers/module"), reason::kDuplicateName},
      {"C7-01", "C7",
       [](Json& d) {
         Json& inputs = At(d, "/layers/module/0/inputs");
         inputs["another"] = inputs["input"];
       },
       reason::kInputDiffers, "5 inputs"},
      {"C7-06", "C7",
       [](Json& d) {
         d["sft"] = {{"required_by", Json::array({"asked for"})}, {"control", nullptr}};
         d["order"] = {"tolerances", "operator", "module", "model", "step"};
         d["quality"] = "not covered";
         d["quality_evidence"] = "none";
       },
       reason::kArmMissing, "the control is required (asked for)"},
      {"C7-06", "C7",
       [](Json& d) {
         Json& control = At(d, "/sft/control");
         control["arms"]["production"]["result_ppm"] = 583000;
         control["evaluation"]["production_minus_native_ppm"] = 583000 - 615000;
         control["evaluation"]["production_minus_surrogate_ppm"] = 583000 - 611000;
       },
       reason::kGradientDiffers, "-32000 ppm from native"},
      {"C8-08", "C8",
       [](Json& d) {
         d["task_scope"] = "logprob-only";
         d["plan"] = Json::array({"none"});
       },
       reason::kOrderOfWork, "the task does not hold one"},
      {"C9-02", "C9",
       [](Json& d) {
         At(d, "/reference/recipe") = At(d, "/inputs/recipe");
         d["differences"] = Json::array();
       },
       reason::kDifferenceUnlisted, "is it the recipe itself"},

      {"C6-08", "C6", Set("/kind", "E5"), reason::kWrongEvidenceKind},
      {"C6-05", "C6", Erase("/inventory/2"), reason::kInventoryIncomplete,
       "router stands in no row"},
      {"C6-01", "C6", Set("/modules/1/existing", "other_bwd"), reason::kInventoryIncomplete,
       "other_bwd is no backward of the registry"},
      {"C6-06", "C6", Set("/modules/2/saved", {"scores", "chosen", "scores"}),
       reason::kStateRecomputed, "saved [scores chosen scores]"},
      {"C6-02", "C6", Set("/modules/1/gradient", "surrogate"), reason::kSurrogateDiffers,
       "attention: gradient surrogate"},
      {"C6-01", "C6", [](Json& d) { d["registry"].push_back("other_bwd"); },
       reason::kInventoryIncomplete, "no module uses it"},
      {"C6-02", "C6", Set("/rounding_sites", Json::array({"attention"})), reason::kSurrogateDiffers,
       "the trace shows no rounding there"},
      {"C6-04", "C6", Set("/production_scan/sources_scanned", 119), reason::kNothingCompared},
      {"C1-08", "C6", Erase("/agreement/forward_ratio_ppm"), reason::kInventoryIncomplete},
      {"C7-04", "C7",
       [](Json& d) {
         Json tolerance = At(d, "/tolerances/0");
         tolerance["id"] = "T-none";
         d["tolerances"].push_back(tolerance);
       },
       reason::kToleranceAfterResult, "T-none is used by nothing"},
      {"DOC-28", "C7", [](Json& d) { d["layers"]["another"] = d["layers"]["module"]; },
       reason::kLayerMissing, "4 layers"},
      // Each whole model, in whichever dtype, has every parameter: none lends its gradients to
      // another.
      {"C7-03", "C7",
       [](Json& d) {
         Json again = At(d, "/layers/model/0");
         again["where"] = "loss again";
         At(again, "/quantities").erase(0);
         At(d, "/layers/model").push_back(again);
       },
       reason::kInventoryIncomplete, "loss again"},
      {"C7-04", "C7", Set("/layers/module/0/quantities/0/tolerance", "T-none"),
       reason::kToleranceAfterResult, "no tolerance T-none was fixed"},
      {"C7-10", "C7",
       [](Json& d) {
         for (Json& t : At(d, "/tolerances")) {
           if (t["id"] == "T-module") t["metric"] = "of-largest";
         }
         At(d, "/layers/module/0/quantities/0/largest") = Word(0.125f);
       },
       reason::kReceiptContradicted, "the largest element of the reference is 0.125"},
      {"C7-06", "C7", Set("/sft/required_by", Json::array({"because"})), reason::kArmMissing,
       "because is no reason"},
      {"C7-08", "C7", Set("/sft/control/evaluation/production_minus_native_ppm", -2999),
       reason::kReceiptContradicted},
      {"C8-08", "C8", Set("/kind", "E6"), reason::kWrongEvidenceKind},
      {"C9-12", "C9", Set("/kind", "E6"), reason::kWrongEvidenceKind},
      {"C9-01", "C9", Set("/inputs/image", "sha256:" + H("other")), reason::kSubjectDiffers},
      {"C9-09", "C9", Set("/c5/artifact", H("other")), reason::kGateNotPassed,
       "name different artifacts"},
      {"C9-03", "C9", Set("/two_step/receipt", H("other")), reason::kSmokeMissing,
       "name different receipts"},
      {"C9-05", "C9", Erase("/entry_table/0"), reason::kEntryRowOpen, "are wanted"},
      {"C9-09", "C9", Set("/c5/artifact", nullptr), reason::kGateNotPassed, "C5 has no artifact"},
      {"C9-04", "C9", [](Json& d) { At(d, "/six/length").push_back("no_such_key"); },
       reason::kInventoryIncomplete, "the recipe has no key no_such_key"},
      {"C9-04", "C9", [](Json& d) { At(d, "/six/length").push_back("lr"); },
       reason::kInventoryIncomplete, "lr stands in 2 parts"},
      {"C9-04", "C9", [](Json& d) { d["six"]["another"] = Json::array({"lr"}); },
       reason::kInventoryIncomplete, "the review covers another"},
      {"C9-06", "C9", Set("/escalation/stages/1/from", HonestScale(30, 128, 6, 1)),
       reason::kTwoAxes, "does not start where the one before ended"},
      {"C9-06", "C9", Set("/escalation/stages/1/verdict", "fail"), reason::kGateNotPassed},
      {"C9-06", "C9", Set("/escalation/target", HonestScale(30, 1024, 6, 1)), reason::kTwoAxes,
       "do not end at the target scale"},
      {"C9-07", "C9", Set("/counters/updates/delta", 5), reason::kReceiptContradicted},
      {"C9-08", "C9", Set("/restore", nullptr), reason::kRestoreUnchecked, "was not compared"},
      {"C9-08", "C9", Erase("/restore/rng"), reason::kRestoreUnchecked, "are wanted"},
  });
}

TEST(GateChecksTest, Loop) {
  const auto parameters = [](const std::function<void(Json&)>& change) {
    return [change](Json& d) {
      for (Json& update : At(d, "/loop/updates")) {
        change(update["parameters"]);
        Total(update);
      }
    };
  };
  ExpectBroken({
      {"SYS-36", "C8", Set("/loop/versions/0/questions/1/question", "q0"),
       reason::kReceiptContradicted, "rewards of 2 questions"},
      {"BWD-02", "C8", parameters([](Json& p) { p[1]["gradient_nonzero"] = 49; }),
       reason::kReceiptContradicted, "more changes than elements"},
      {"BWD-02", "C8", parameters([](Json& p) { p[1]["name"] = p[0]["name"]; }),
       reason::kReceiptContradicted, "stands in it twice"},
      {"SYS-28", "C8", parameters([](Json& list) {
         for (Json& p : list) p["deployed_changed"] = 0;
       }),
       reason::kReceiptContradicted, "no element did"},

      {"C8-05", "C8", Again("/loop/processes"), reason::kProcessExit,
       "one rollout and one trainer process"},
      {"C5-09", "C8", Set("/loop/recipe/profile", "sm90-mma"), reason::kConfigDiffers,
       "profile: the recipe says sm90-mma"},
      {"C8-01", "C8", Set("/loop/recipe/steps", "3"), reason::kLoopIncomplete, "the recipe says 3"},
      {"C8-06", "C8", Set("/loop/versions/1/version", 2), reason::kVersionContradiction,
       "version 2 stands at place 1"},
      {"C5-11", "C8", Set("/loop/versions/0/trainer_deployed", H("other")),
       reason::kWeightHashMismatch, "theta0 is not the subject's weights"},
      {"SYS-36", "C8", Erase("/loop/versions/0/questions/0/advantages/2"),
       reason::kReceiptContradicted, "3 rewards, 2 advantages, 3 samples"},
      {"C8-01", "C8", Set("/loop/updates/1/to", 3), reason::kVersionContradiction,
       "theta1 to theta3, published as 2"},
      {"RL-05", "C8", Set("/loop/updates/1/trainer_pid", 99), reason::kReceiptContradicted},
      {"C8-01", "C8", Set("/loop/updates/1/lr", Word(0.002f)), reason::kConfigDiffers},
      {"BWD-06", "C8", Set("/loop/updates/1/moments_before", H("other")),
       reason::kReceiptContradicted},
      {"RL-07", "C8", Set("/loop/updates/1/master_before", H("other")),
       reason::kWeightHashMismatch},
      {"BWD-02", "C8", [](Json& d) { At(d, "/loop/updates/1/parameters/0/name") = "other"; },
       reason::kReceiptContradicted, "other is not that of the first update"},
      {"BWD-02", "C8", Set("/loop/updates/0/totals/gradient_nonzero", 1),
       reason::kReceiptContradicted, "the totals are not the sums"},
      {"SYS-36", "C8", Set("/loop/updates/0/ratio_not_one", 3), reason::kReceiptContradicted,
       "0 tokens have another ratio than 1"},
      {"C5-06", "C8", Set("/loop/versions/0/paths/actor/recorded", false), reason::kPathUnexecuted,
       "actor: gradients were not recorded"},
  });
}

TEST(GateChecksTest, C10) {
  const auto arms = [](const std::string& pair, const std::function<void(Json&)>& change) {
    return [pair, change](Json& d) {
      for (const char* side : {"off", "on"}) change(At(d, "/pairing/points/" + pair)[side]);
    };
  };
  ExpectBroken({
      {"C10-12", "C10", Set("/micro", nullptr), reason::kManifestIncomplete,
       "4 of profile, kernels, scan, micro and regressions"},
      {"C10-11", "C10", Erase("/loop/updates/1"), reason::kExtraGate, "1 updates"},
      {"RL-11", "C10", Erase("/manifest/pull_requests/1"), reason::kManifestIncomplete,
       "2 pull requests"},
      {"RL-13", "C10", Set("/manifest/pull_requests/2/files/0/class", "image script"),
       reason::kUnlistedChange, "its path says recipe"},
      {"RL-14", "C10",
       [](Json& d) {
         Json& vllm = At(d, "/manifest/pull_requests/0");
         vllm["files"].push_back(HonestFile("csrc/bi_linear.so", "source"));
         vllm["diff"].push_back("csrc/bi_linear.so");
       },
       reason::kUnlistedChange, "is no source"},
      {"C10-06", "C10", Again("/kernels"), reason::kInventoryIncomplete, "has two records"},
      {"C10-07", "C10", Again("/regressions"), reason::kRegressionMissing, "stands there twice"},
      {"A-17", "C10", Set("/agreement/pairs", "4"), reason::kTooFewPairs, "4 pairs were agreed"},
      {"C10-10", "C10", arms("0/pairs/1", [](Json& arm) { arm["workload"] = H("workload 1 0"); }),
       reason::kPairInvalid, "5 workloads in 6 pairs"},
      {"C1-10", "C10",
       arms("1/pairs/2",
            [](Json& arm) {
              arm["requests"] = 3;
              arm["completed"] = 3;
              arm["input_tokens"] = 3 * 8192;
              arm["output_tokens"] = 3 * 1024;
              arm["output_throughput_micro"] =
                  std::llround(3 * 1024 / arm["duration_us"].get<double>() * 1e12);
            }),
       reason::kPairInvalid, "3 requests never reach concurrency 4"},

      {"C10-01", "C10", Set("/kind", "E6"), reason::kWrongEvidenceKind},
      {"GEN-29", "C10", [](Json& d) { At(d, "/inputs/baseline/recipe/VLLM_BATCH_INVARIANT") = ""; },
       reason::kServingOnlyOptimum, "baseline ``"},
      {"C10-01", "C10", Set("/loop/recipe/lr", "0.002"), reason::kConfigDiffers},
      {"RL-16", "C10",
       [](Json& d) {
         for (const char* side : {"in_image", "commit_tree"})
           At(d, "/manifest/image")[side]["someone/else"] = H("tree");
       },
       reason::kDirtyBuild, "someone/else is in the image"},
      {"RL-14", "C10", Set("/manifest/pull_requests/0/diff_base", HonestCommit("other")),
       reason::kUnlistedChange, "the merge base is"},
      {"C10-02", "C10",
       [](Json& d) {
         At(d, "/profile/hot_spots/0/shape") = "many";
         At(d, "/micro/0/shape") = "many";
       },
       reason::kShapeUnmeasured, "no shape like 16x576"},
      {"C10-02", "C10", Set("/profile/other_ppm", 1), reason::kReceiptContradicted,
       "are not all of the time"},
      {"C10-04", "C10", Set("/micro/0/compared", 100), reason::kCountMismatch},
      {"C10-04", "C10", Set("/micro/0/before_ns/median", 4001), reason::kReceiptContradicted},
      {"C10-06", "C10", Set("/kernels/1/arms", {"BI=0", "BI=1", "BI=1"}),
       reason::kInventoryIncomplete, "runs in BI=0, BI=1, BI=1"},
      {"C10-06", "C10", Set("/kernels/0/technology", "opencl"), reason::kForbiddenTechnology,
       "technology opencl"},
      {"C10-06", "C10", Set("/kernels/0/source", "a binary"), reason::kForbiddenTechnology,
       "no source in the image"},
      {"C10-06", "C10", Set("/kernels/0/new", false), reason::kForbiddenTechnology,
       "stands in a delivered diff"},
      {"C10-06", "C10", Set("/kernels/0/arms", Json::array({"BI=0"})), reason::kInventoryIncomplete,
       "has no record as running in BI=1"},
      {"C10-06", "C10",
       [](Json& d) {
         Json kernel = At(d, "/kernels/0");
         kernel["name"] = "unused";
         d["kernels"].push_back(kernel);
       },
       reason::kShapeUnmeasured, "unused is new and in no hot spot"},
      {"C10-07", "C10", [](Json& d) { At(d, "/regressions/2/touches").push_back("weather"); },
       reason::kRegressionMissing, "weather is no impact"},
      {"C10-07", "C10", Erase("/regressions/2"), reason::kRegressionMissing,
       "each delivered change needs its regression"},
      {"CHEAP-10", "C10", Set("/acceptance/agreed steps", "not-covered"),
       reason::kVerdictContradicted},
      {"A-17", "C10", Erase("/pairing/points/0/pairs/5"), reason::kTooFewPairs, "5 pairs, 6"},
      {"C10-10", "C10", Set("/pairing/points/0/pairs/1/on/workload", H("other")),
       reason::kPairInvalid, "the arms served different requests"},
      {"C10-10", "C10", Set("/pairing/points/0/pairs/1/on/kernels", H("other")),
       reason::kPairInvalid, "other kernels than in the first pair"},
      {"C10-12", "C10", Set("/pairing/points/0/median_slowdown_ppm", 1),
       reason::kReceiptContradicted, "median 1 ppm"},
      {"C10-10", "C10", Set("/pairing/points/0/pairs/1/on/failed", 1), reason::kRequestsFailed},
      {"C10-10", "C10", Set("/pairing/points/0/pairs/1/on/served_before", 1), reason::kPairInvalid,
       "had served 1 requests before"},
      {"C10-12", "C10", Set("/pairing/points/0/pairs/1/on/output_throughput_micro", 1),
       reason::kResultInconsistent},
      {"C1-08", "C10", Erase("/agreement/pairs"), reason::kInventoryIncomplete},
  });
}

// What a document leaves open is named in the scope of the judgement that passes.
TEST(GateChecksTest, WhatIsLeftOpenIsNamed) {
  struct Open {
    const char* gate;
    std::function<void(Json&)> change;
    const char* row;
    const char* what;
  };
  const Open all[] = {
      {"C2",
       [](Json& d) {
         At(d, "/proxy/geometry/experts") = "4";
         At(d, "/proxy/exceptions")["experts"] = "eight do not fit beside the trainer";
       },
       "C2-04", "experts 8 of the full model"},
      {"C3", Set("/kernels/0/record", "inference-only"), "C3-07", "linear_fwd_tile in training"},
      {"C4",
       [](Json& d) {
         d["graph"].update({{"used", "no"}, {"reason", "the CPU has none"}, {"captured", false}});
       },
       "C4-07", "capture and replay: the CPU has none"},
      {"C5",
       [](Json& d) {
         d["decisions"]["replayed"] = true;
         d["decisions"]["statement"] = "replay masks set differences";
         d["decisions"]["flips"]["router"] = 1;
         At(d, "/decisions/choices/0/trainer") = {0, 5};
       },
       "DISC-10", "consistency of the router: 1 flips under replay"},
      {"C6",
       [](Json& d) {
         d["agreement"] = nullptr;
         d["step_times"] = Json::array();
       },
       "C6-07", "budget-undecided"},
      {"C7",
       [](Json& d) {
         d["sft"]["control"] = nullptr;
         d["order"] = {"tolerances", "operator", "module", "model", "step"};
         d["quality"] = "not covered";
         d["quality_evidence"] = "none";
       },
       "C7-07", "the three-way finetuning control did not run"},
      {"C9", [](Json&) {}, "C9-07", "the recipe runs without a graph"},
      {"C10", Set("/acceptance/quality evaluation", "not-covered"), "CHEAP-10",
       "quality evaluation: production acceptance is not reached"},
  };
  const Bundle honest = HonestBundle();
  for (const Open& o : all) {
    SCOPED_TRACE(o.gate);
    const auto at = honest.find(o.gate);
    Json doc = at == honest.end() ? HonestEvidence(o.gate) : at->second;
    o.change(doc);
    const GateJudgement judged = FindJudge(o.gate)(doc);
    EXPECT_EQ(judged.verdict, Verdict::kPass) << judged.ToJson().dump(1);
    bool found = false;
    for (const Json& open : judged.scope.at("not_covered")) {
      found |= open.at("row") == o.row &&
               open.at("what").get<std::string>().find(o.what) != std::string::npos;
    }
    EXPECT_TRUE(found) << judged.scope.dump(1);
  }
}

}  // namespace
}  // namespace tare::workflow
