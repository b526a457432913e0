// Checks of the judges that no other test sees refuse: found by counting, over all tests of this
// folder, how often each check held and how often it did not.

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
  });
}

}  // namespace
}  // namespace tare::workflow
