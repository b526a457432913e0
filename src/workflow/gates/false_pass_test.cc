// The tempting false passes T-01 to T-25 and the reserve list of the requirements: complete bundles
// in which everything else is green. Each gets the verdict and reason it deserves, from one gate
// only, and each has an honest twin that passes: no false alarms.

#include <gtest/gtest.h>

#include "workflow/gates/testing_evidence_c0_c4.h"
#include "workflow/gates/testing_mutate.h"
#include "workflow/scope.h"

namespace tare::workflow {
namespace {

struct Case {
  const char* name;
  const char* gate;
  std::function<void(Json&)> change;
  Verdict verdict;
  std::string_view reason;
  std::string_view row;
};

GateJudgement JudgeDoc(const std::string& gate, const Json& doc) {
  const GateJudge judge = FindJudge(gate);
  EXPECT_NE(judge, nullptr) << gate;
  return judge(doc);
}

std::string Faults(const GateJudgement& judgement) {
  std::string out;
  for (const GateFinding& f : judgement.findings) {
    if (f.verdict == Verdict::kPass) continue;
    out += fmt::format("{} {} {}: {}\n", f.row, VerdictName(f.verdict), f.reason, f.detail);
  }
  return out;
}

bool HasFinding(const GateJudgement& judgement, std::string_view reason, std::string_view row) {
  for (const GateFinding& f : judgement.findings) {
    if (f.reason == reason && (row.empty() || f.row == row)) return true;
  }
  return false;
}

void JudgeCases(const std::vector<Case>& cases) {
  const Bundle honest = HonestBundle();
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    Bundle bundle = honest;
    Json& doc = bundle.at(c.gate);
    c.change(doc);
    const GateJudgement judged = JudgeDoc(c.gate, doc);
    EXPECT_EQ(VerdictName(judged.verdict), VerdictName(c.verdict)) << Faults(judged);
    EXPECT_EQ(judged.reason, c.reason) << Faults(judged);
    EXPECT_TRUE(HasFinding(judged, c.reason, c.row)) << c.row << "\n" << Faults(judged);
    for (const GateFinding& f : judged.findings) {
      if (f.verdict == Verdict::kPass) continue;
      EXPECT_FALSE(f.detail.empty() && f.row.empty());
      EXPECT_FALSE(f.next.empty()) << f.reason;
    }
  }
}

void ExpectTwin(const char* name, const char* gate, const std::function<void(Json&)>& change) {
  SCOPED_TRACE(name);
  Bundle bundle = HonestBundle();
  change(bundle.at(gate));
  const GateJudgement judged = JudgeDoc(gate, bundle.at(gate));
  EXPECT_EQ(judged.verdict, Verdict::kPass) << Faults(judged);
}

// Everything is green but for what a case changes.
TEST(FalsePassTest, TheHonestTaskPassesEveryGate) {
  for (const auto& [gate, doc] : HonestBundle()) {
    const GateJudgement judged = JudgeDoc(gate, doc);
    EXPECT_EQ(judged.verdict, Verdict::kPass) << gate << "\n" << Faults(judged);
    EXPECT_FALSE(judged.scope.at("covers").empty()) << gate;
  }
}

// T-01 to T-06: C5-05 to C5-08, C5-10, CHEAP-13, DOC-09.
TEST(FalsePassTest, DualPath) {
  const auto words = [](Json& doc, const std::function<Json(int, int)>& word) {
    ForPaths(doc, kAllPaths, [&](Json& path) { SetWords(path, word); });
  };
  JudgeCases({
      {"T-01 the mask is all false", "C5",
       [](Json& d) {
         MaskAll(d);
         At(d, "/contract/scope/valid_tokens") = 0;
         At(d, "/contract/scope/masked_tokens") = kQuestions * kSamples * kResponse;
         At(d, "/contract/scope/eos_tokens") = 0;
       },
       Verdict::kInconclusive, reason::kNoValidTokens, "C5-08"},
      {"T-01 all arrays are cut to the shorter one", "C5",
       [](Json& d) { ForPaths(d, kAllPaths, [](Json& path) { CutShort(path, 1); }); },
       Verdict::kInconclusive, reason::kCountMismatch, "C5-08"},
      {"T-01 one side is shorter", "C5",
       [](Json& d) { ForPaths(d, kTrainerPaths, [](Json& path) { CutShort(path, 1); }); },
       Verdict::kInconclusive, reason::kCountMismatch, "C5-08"},
      {"T-02 old logprobs are the rollout's own buffer", "C5",
       [](Json& d) {
         d["paths"]["old_logprob"]["source"] = "copied";
         d["paths"]["old_logprob"]["rows"] = 0;
       },
       Verdict::kRefused, reason::kPathUnexecuted, "C5-05"},
      {"T-02 the bypass does not say so", "C5",
       [](Json& d) { d["paths"]["old_logprob"]["rows"] = 0; }, Verdict::kRefused,
       reason::kPathUnexecuted, "CHEAP-14"},
      {"T-03 largest difference of probabilities is 0, the bits differ", "C5",
       [](Json& d) {
         ForPaths(d, kTrainerPaths, [](Json& path) { OneUlp(path, 2, 3); });
         d["metrics"] = {{{"name", "probs diff max"}, {"value", "0.0"}},
                         {{"name", "kl"}, {"value", "0.0"}}};
       },
       Verdict::kFail, reason::kBitMismatch, "C5-07"},
      {"T-04 four decimals on both sides", "C5",
       [&](Json& d) {
         words(d, [](int s, int t) {
           return Word(static_cast<float>(-1.0 - 0.0137 * s - 0.0001 * t));
         });
       },
       Verdict::kRefused, reason::kNotOriginalDtype, "C5-07"},
      {"T-04 downcast to bf16 on both sides", "C5",
       [&](Json& d) {
         words(d, [](int s, int t) {
           return Word(HonestWord(fmt::format("bf {} {}", s, t)) & 0xffff0000u);
         });
       },
       Verdict::kRefused, reason::kNotOriginalDtype, "C5-07"},
      {"T-05 missing values are 0.0 on both sides", "C5",
       [&](Json& d) { words(d, [](int, int) { return Word(0.0f); }); }, Verdict::kRefused,
       reason::kDefaultFilled, "CHEAP-13"},
      {"T-05 a value is missing on both sides", "C5",
       [&](Json& d) {
         ForPaths(d, kAllPaths, [](Json& path) { path["sequences"][0]["bits"][0] = nullptr; });
       },
       Verdict::kRefused, reason::kDefaultFilled, "CHEAP-13"},
      {"T-06 the grad-enabled forward was not compared", "C5",
       [](Json& d) { d["paths"].erase("actor"); }, Verdict::kRefused, reason::kPathMissing,
       "C5-06"},
      {"T-06 it is compared, and fused otherwise", "C5",
       [](Json& d) { ForPaths(d, {"actor"}, [](Json& path) { OneUlp(path, 3, 0); }); },
       Verdict::kFail, reason::kBitMismatch, "C5-07"},
      {"T-12 the switch did not reach a worker", "C5",
       [](Json& d) { At(d, "/identities/rollout/switch/workers/1") = 0; }, Verdict::kRefused,
       reason::kSwitchNotEffective, "SYS-03"},
      {"T-12 the switch was read before it was set", "C5",
       [](Json& d) { At(d, "/identities/trainer/switch/at_start") = ""; }, Verdict::kRefused,
       reason::kSwitchNotEffective, "SYS-03"},
  });
  ExpectTwin("T-03: the metrics beside equal bits are a note", "C5", [](Json& d) {
    d["metrics"] = {{{"name", "kl"}, {"value", "0.0"}}};
  });
  ExpectTwin("T-05: one logprob of 0.0 is legal", "C5", [](Json& d) {
    ForPaths(d, kAllPaths, [](Json& path) { path["sequences"][4]["bits"][2] = "0x00000000"; });
  });
  ExpectTwin("T-04: one value is a short decimal", "C5", [](Json& d) {
    ForPaths(d, kAllPaths, [](Json& path) { path["sequences"][4]["bits"][2] = Word(-1.25f); });
  });
}

// T-16 to T-18: DISC-02, DISC-10, DISC-16, A-34.
TEST(FalsePassTest, Decisions) {
  const auto replay = [](Json& d) {
    d["decisions"]["replayed"] = true;
    d["decisions"]["statement"] = "the rollout's choice is replayed; this masks set differences";
  };
  JudgeCases({
      {"T-16 forced experts, flips of the router uncounted", "C5",
       [&](Json& d) {
         replay(d);
         At(d, "/decisions/choices/0/trainer") = {0, 6};
       },
       Verdict::kFail, reason::kSetDiffers, "DISC-10"},
      {"T-17 the same set in another order", "C5",
       [](Json& d) {
         At(d, "/decisions/choices/0/trainer") = {4, 0};
         At(d, "/decisions/choices/0/trainer_used") = {4, 0};
       },
       Verdict::kFail, reason::kOrderDiffers, "DISC-02"},
      {"T-18 replay without the statement that it masks set differences", "C5",
       [&](Json& d) {
         replay(d);
         d["decisions"]["statement"] = "";
       },
       Verdict::kRefused, reason::kReplayUnstated, "DISC-16"},
      {"T-18 the flip rate was computed from the replayed set", "C5",
       [&](Json& d) {
         replay(d);
         At(d, "/decisions/choices/2/trainer") = {2, 9};
       },
       Verdict::kRefused, reason::kReplayUnstated, "DISC-16"},
      {"H09 one expert twice", "C5",
       [](Json& d) {
         for (const char* side : {"rollout", "trainer", "trainer_used"})
           At(d, std::string("/decisions/choices/0/") + side) = {3, 3};
       },
       Verdict::kFail, reason::kDuplicateChoice, "DISC-04"},
  });
  ExpectTwin("T-18: replay, stated, with its flips counted", "C5", [&](Json& d) {
    replay(d);
    At(d, "/decisions/choices/2/trainer") = {2, 9};
    At(d, "/decisions/flips/candidates") = 1;
  });
  ExpectTwin("T-16: the router's flips counted; its consistency stays not covered", "C5",
             [&](Json& d) {
               replay(d);
               At(d, "/decisions/choices/0/trainer") = {0, 6};
               At(d, "/decisions/flips/router") = 1;
             });
}

// T-07 to T-12: C8-04, C8-06, C8-07, RL-07, RL-08, SYS-03, SYS-28, SYS-30, A-09, BWD-06.
TEST(FalsePassTest, Loop) {
  JudgeCases({
      {"T-07 warm-up: the first learning rate is 0", "C8",
       [](Json& d) {
         KeepWeights(d["loop"], 0, true);
         At(d, "/loop/updates/0/lr") = Word(0.0f);
       },
       Verdict::kRefused, reason::kMasterUnchanged, "C8-04"},
      {"T-07 the step was skipped for a non-finite norm", "C8",
       [](Json& d) {
         KeepWeights(d["loop"], 1, true);
         At(d, "/loop/updates/1/skipped") = true;
       },
       Verdict::kRefused, reason::kMasterUnchanged, "C8-04"},
      {"T-08 the master changed, no deployed byte did", "C8",
       [](Json& d) { KeepWeights(d["loop"], 0, false); }, Verdict::kInconclusive,
       reason::kDeployedUnchanged, "SYS-28"},
      {"T-09 equal rewards, the actor forward was skipped", "C8",
       [](Json& d) {
         for (Json& q : At(d, "/loop/versions/0/questions")) {
           for (Json& r : q["rewards"]) r = 0.5;
           for (Json& a : q["advantages"]) a = Word(0.0f);
         }
         At(d, "/loop/versions/0/paths").erase("actor");
       },
       Verdict::kRefused, reason::kPathMissing, "C5-06"},
      {"T-09 equal rewards, the forward ran", "C8",
       [](Json& d) {
         for (Json& q : At(d, "/loop/versions/0/questions")) {
           for (Json& r : q["rewards"]) r = 0.5;
           for (Json& a : q["advantages"]) a = Word(0.0f);
         }
       },
       Verdict::kRefused, reason::kDegenerateAdvantage, "C8-07"},
      {"T-10 theta1 was never loaded, and the trainer's snapshot is theta0 too", "C8",
       [](Json& d) {
         At(d, "/loop/versions/1/trainer_deployed") = H("theta0");
         At(d, "/loop/versions/1/engine_held") = H("theta0");
         At(d, "/loop/updates/1/deployed_before") = H("theta0");
       },
       Verdict::kRefused, reason::kWeightHashMismatch, "RL-07"},
      {"T-10 the engine holds theta0 under the label theta1", "C8",
       [](Json& d) { At(d, "/loop/versions/1/engine_held") = H("theta0"); }, Verdict::kRefused,
       reason::kWeightHashMismatch, "RL-08"},
      {"T-11 the loop ran without the recipe's prefix cache", "C8",
       [](Json& d) {
         At(d, "/loop/identities/rollout/prefix_caching") = false;
         At(d, "/loop/identities/trainer/prefix_caching") = false;
         for (Json& u : At(d, "/loop/updates")) u["cache_reset"] = false;
       },
       Verdict::kRefused, reason::kConfigDiffers, "SYS-30"},
      {"T-11 with the cache on, stale rows are served at theta1 (H13)", "C8",
       [](Json& d) { OneUlp(At(d, "/loop/versions/1/paths/rollout"), 0, 0); }, Verdict::kFail,
       reason::kBitMismatch, "RL-06"},
      {"T-11 nothing was dropped from the cache", "C8",
       [](Json& d) { At(d, "/loop/updates/0/cache_reset") = false; }, Verdict::kRefused,
       reason::kConfigDiffers, "SYS-30"},
      {"T-12 the switch is exported in the launcher only", "C8",
       [](Json& d) {
         At(d, "/loop/identities/rollout/switch/workers") = {0, 0};
         At(d, "/loop/identities/rollout/switch/effective") = 0;
         At(d, "/loop/identities/rollout/switch/at_start") = "";
       },
       Verdict::kRefused, reason::kSwitchNotEffective, "SYS-03"},
      {"T-22 one image, two environments", "C8",
       [](Json& d) {
         At(d, "/loop/identities/trainer/interpreter") = "/opt/venv-b/bin/python3";
         At(d, "/loop/identities/trainer/packages") = "torch 2.13.0";
       },
       Verdict::kRefused, reason::kTwoEnvironments, "RL-04"},
      {"T-22 one image, another CUDA library in one process", "C8",
       [](Json& d) { At(d, "/loop/identities/trainer/libraries/libc.so.6") = H("other"); },
       Verdict::kRefused, reason::kTwoEnvironments, "RL-02"},
  });
  ExpectTwin("T-09: one group is all equal, another is not", "C8", [](Json& d) {
    Json& q = At(d, "/loop/versions/0/questions/0");
    for (Json& r : q["rewards"]) r = 0.5;
    for (Json& a : q["advantages"]) a = Word(0.0f);
  });
  // RL-03: other hosts are allowed; nothing of the document names one.
}

// T-19 to T-21: C7-02, C7-04, C7-08, BWD-05.
TEST(FalsePassTest, Gradients) {
  JudgeCases({
      {"T-19 the reference calls the backward under test", "C7",
       [](Json& d) { d["code"]["reference"].push_back("linear_bwd.o"); }, Verdict::kRefused,
       reason::kNotIndependent, "C7-02"},
      {"T-19 the reference moves with the backward under test", "C7",
       [](Json& d) { At(d, "/perturbation/reference_after") = H("moved too"); }, Verdict::kRefused,
       reason::kNotIndependent, "C7-02"},
      {"T-20 native + detach(inference - native)", "C6",
       [](Json& d) { At(d, "/graph/trained_value") = "native + detach(inference - native)"; },
       Verdict::kRefused, reason::kDetachedSubstitute, "BWD-05"},
      {"T-20 the inference output is detached", "C6",
       [](Json& d) { At(d, "/graph/detached_outputs") = 1; }, Verdict::kRefused,
       reason::kDetachedSubstitute, "BWD-05"},
      {"T-21 the tolerance came after the error", "C7",
       [](Json& d) {
         d["order"] = {"operator", "tolerances",          "module",    "model",
                       "step",     "evaluation declared", "finetuning"};
       },
       Verdict::kRefused, reason::kToleranceAfterResult, "C7-04"},
      {"T-21 a falling loss as quality", "C7",
       [](Json& d) { d["quality_evidence"] = "falling loss"; }, Verdict::kRefused,
       reason::kLossNotQuality, "C7-08"},
      {"C7-09 perfect forward, finite gradients, one with its sign flipped", "C7",
       [](Json& d) {
         Json& q = At(d, "/layers/model/0/quantities/3");
         q["worst"]["production"] = Word(-0.125f);
         const float r = 0.125f * 1.01f;
         q["error"] = (0.125 + static_cast<double>(r)) / static_cast<double>(r);
       },
       Verdict::kFail, reason::kGradientDiffers, "C7-03"},
  });
  ExpectTwin("T-21: without the control quality stays not covered", "C7", [](Json& d) {
    d["sft"]["control"] = nullptr;
    d["quality"] = "not covered";
    d["quality_evidence"] = "none";
    d["order"] = {"tolerances", "operator", "module", "model", "step"};
  });
}

// T-23 to T-25: STOP-08, C1-12, TRACK-02, TRACK-07, C1-10, TRACK-11, C10-10, CHEAP-12, C9-09.
TEST(FalsePassTest, Delivery) {
  const auto baseline = [](Json& d, const std::function<void(Recipe&)>& change) {
    Recipe r = HonestFormalRecipe();
    r["VLLM_BATCH_INVARIANT"] = "0";
    change(r);
    At(d, "/inputs/baseline/recipe") = RecipeJson(r);
    At(d, "/inputs/baseline/id") = RecipeId(r);
    At(d, "/manifest/baseline") = RecipeId(r);
  };
  const auto arms = [](Json& d, const std::function<void(Json&)>& change) {
    for (Json& point : At(d, "/pairing/points"))
      for (Json& pair : point["pairs"]) change(pair["on"]);
  };
  JudgeCases({
      {"T-23 no person confirmed the baseline", "C10",
       [](Json& d) { At(d, "/inputs/baseline/confirmed_by") = nullptr; }, Verdict::kRefused,
       reason::kBaselineUnconfirmed, "STOP-08"},
      {"T-23 the serving-only optimum", "C10",
       [&](Json& d) { baseline(d, [](Recipe& r) { r["prefix_caching"] = "false"; }); },
       Verdict::kRefused, reason::kServingOnlyOptimum, "C1-12"},
      {"T-23 slowed for consistency", "C10",
       [&](Json& d) { baseline(d, [](Recipe& r) { r["enforce_eager"] = "true"; }); },
       Verdict::kRefused, reason::kServingOnlyOptimum, "C1-12"},
      {"T-23 patched BI=0", "C10", [](Json& d) { At(d, "/inputs/baseline/patched") = true; },
       Verdict::kRefused, reason::kConsistencyHandicap, "TRACK-07"},
      {"T-24 end of sequence was not ignored", "C10",
       [&](Json& d) {
         arms(d, [](Json& arm) {
           arm["output_tokens"] = arm["output_tokens"].get<int64_t>() - 3;
           arm["output_throughput_micro"] = std::llround(arm["output_tokens"].get<double>() /
                                                         arm["duration_us"].get<double>() * 1e12);
         });
       },
       Verdict::kRefused, reason::kWrongLength, "C1-10"},
      {"T-24 prompts were truncated", "C10",
       [&](Json& d) {
         arms(d, [](Json& arm) { arm["input_tokens"] = arm["requests"].get<int64_t>() * 4096; });
       },
       Verdict::kRefused, reason::kWrongLength, "C1-10"},
      {"T-24 the other track loaded the node", "C10",
       [](Json& d) { At(d, "/pairing/points/0/pairs/2/off/loaded_samples") = 4; },
       Verdict::kRefused, reason::kNodeLoaded, "TRACK-11"},
      {"T-25 the image was built again; C5 is the old one's", "C9",
       [](Json& d) {
         d["c5"]["image"] = "sha256:" + H("image before");
         d["failures"] = {{{"what", "a logprob differs at times"},
                           {"seen", 2},
                           {"runs", 40},
                           {"cause_found", false},
                           {"seen_after", 0},
                           {"runs_after", 20},
                           {"full_runs_after", 0},
                           {"shrunk", nullptr},
                           {"attempt", ""}}};
       },
       Verdict::kRefused, reason::kGateNotPassed, "C9-09"},
      {"CHEAP-12 not seen any more is no pass", "C9",
       [](Json& d) {
         d["failures"] = {{{"what", "a logprob differs at times"},
                           {"seen", 2},
                           {"runs", 40},
                           {"cause_found", false},
                           {"seen_after", 0},
                           {"runs_after", 20},
                           {"full_runs_after", 0},
                           {"shrunk", nullptr},
                           {"attempt", ""}}};
       },
       Verdict::kInconclusive, reason::kNotReproduced, "CHEAP-12"},
  });
  ExpectTwin("T-25: the cause was found and shrunk", "C9", [](Json& d) {
    d["failures"] = {{{"what", "a logprob differs at times"},
                      {"seen", 2},
                      {"runs", 40},
                      {"cause_found", true},
                      {"seen_after", 0},
                      {"runs_after", 20},
                      {"full_runs_after", 1},
                      {"shrunk", H("replay")},
                      {"attempt", ""}}};
  });
}

// T-13 to T-15: SHAPE-01 to SHAPE-04, SHAPE-07, SHAPE-14, NUM-08, C3-09, C4-07.
TEST(FalsePassTest, InferenceShapes) {
  const Json honest = HonestEvidence("C3");
  // T-13: a pass covers the shapes that ran, and the question beside them is not covered.
  const GateJudgement judged = JudgeC3(honest);
  ASSERT_EQ(judged.verdict, Verdict::kPass) << Faults(judged);
  const Scope scope = *Scope::FromJson(judged.scope.at("covers"));
  ASSERT_FALSE(scope.empty());
  const ScopeBox& box = scope.boxes()[0];
  ScopePoint point{box.shape[0], box.topology[0], box.dtype[0], box.model[0], box.path[0]};
  EXPECT_TRUE(scope.Covers(point));
  point.shape = "batch 3 slot 2";
  EXPECT_FALSE(scope.Covers(point));
  // T-13: repeats of one shape are called batch invariance.
  Json repeats = honest;
  Json kept = Json::array();
  for (const Json& cell : honest.at("cells")) {
    if (cell.at("axis") == "process" || cell.at("axis") == "cache-cold") kept.push_back(cell);
  }
  repeats["cells"] = kept;
  const GateJudgement claimed = JudgeC3(repeats);
  EXPECT_EQ(claimed.reason, reason::kMatrixGap) << Faults(claimed);
  // T-14: repeats in one process agree, a second process chose another kernel.
  Json fresh = honest;
  for (Json& cell : fresh["cells"]) {
    if (cell.at("axis") != "process") continue;
    cell["mismatches"] = 3;
    cell["first"] = "token 4: 0xbf800001 against 0xbf800002";
    cell["replay"] = {{"sha256", H("replay")}, {"minimal", true}};
  }
  fresh["failing_replays"] = "listed";
  const GateJudgement second = JudgeC3(fresh);
  EXPECT_EQ(second.verdict, Verdict::kFail) << Faults(second);
  EXPECT_EQ(second.reason, reason::kBitMismatch);
  // T-15: the captured graph is replayed on its warm-up inputs, and equal to itself.
  Json stale = HonestEvidence("C4");
  stale["graph"]["inputs_changed"] = false;
  const GateJudgement graph = JudgeC4(stale);
  EXPECT_EQ(graph.verdict, Verdict::kRefused) << Faults(graph);
  EXPECT_EQ(graph.reason, reason::kGraphUnproven);
}

// STOP-12, STOP-13: a path or a log level is not reviewed again; with a seed beside it, it is.
TEST(FalsePassTest, WhatVoidsAReview) {
  const Recipe confirmed = HonestFormalRecipe();
  const auto with = [&](const std::string& key, const std::string& value) {
    Recipe r = confirmed;
    r[key] = value;
    return r;
  };
  EXPECT_TRUE(StillConfirmed(confirmed, confirmed));
  EXPECT_TRUE(StillConfirmed(confirmed, with("trainer.output_dir", "/elsewhere")));
  EXPECT_TRUE(StillConfirmed(confirmed, with("log_level", "debug")));
  for (const char* key : {"task", "max_tokens", "group", "loss", "clip_low", "optimizer", "lr",
                          "precision", "parallelism", "seed", "data_path", "kv_cache"}) {
    EXPECT_FALSE(StillConfirmed(confirmed, with(key, "other"))) << key;
  }
  Recipe both = with("log_level", "debug");
  both["seed"] = "7";
  EXPECT_FALSE(StillConfirmed(confirmed, both));
}

// The reserve list, as far as the gates C5 to C10 see it.
TEST(FalsePassTest, Reserve) {
  JudgeCases({
      {"RL-09 a cold start with theta1 as live update", "C8",
       [](Json& d) { d["loop"]["mode"] = "cold-start"; }, Verdict::kDiagnosticOnly,
       reason::kOfflineReplay, "RL-09"},
      {"RL-09 another rollout process samples theta1", "C8",
       [](Json& d) { At(d, "/loop/versions/1/rollout_pid") = 99; }, Verdict::kDiagnosticOnly,
       reason::kOfflineReplay, "RL-09"},
      {"BWD-04 whole-model gradient claimed from operators", "C7",
       [](Json& d) { d["layers"].erase("model"); }, Verdict::kRefused, reason::kLayerMissing,
       "DOC-28"},
      {"C8-06 a rollout of theta0 scored by theta1, so small a step that bits agree", "C8",
       [](Json& d) { At(d, "/loop/versions/1/sampled_versions") = Json::array({0}); },
       Verdict::kRefused, reason::kVersionContradiction, "C8-06"},
      {"FIND-18 seeds are not forwarded: all samples are one", "C8",
       [](Json& d) {
         for (auto& [name, path] : At(d, "/loop/versions/0/paths").items()) {
           const Json first = path["sequences"];
           for (size_t s = 0; s < first.size(); ++s) {
             path["sequences"][s]["tokens"] = first[s < 3 ? 0 : 3]["tokens"];
             path["sequences"][s]["mask"] = first[s < 3 ? 0 : 3]["mask"];
             path["sequences"][s]["bits"] = first[s < 3 ? 0 : 3]["bits"];
           }
         }
       },
       Verdict::kRefused, reason::kIdenticalSamples, "FIND-18"},
      {"DISC-12 raw against processed under p = 1, where they coincide", "C5",
       [](Json& d) { ForPaths(d, kTrainerPaths, [](Json& p) { p["kind"] = "processed"; }); },
       Verdict::kRefused, reason::kSemanticsDiffer, "C5-07"},
      {"C8-05 a worker dies in teardown after every check passed", "C8",
       [](Json& d) {
         At(d, "/loop/processes/1/signal") = 6;
         At(d, "/loop/processes/1/code") = -1;
       },
       Verdict::kRefused, reason::kProcessExit, "C8-05"},
      {"STOP-11 the author confirms the recipe", "C9",
       [](Json& d) { At(d, "/confirmation/person") = "Ann"; }, Verdict::kRefused,
       reason::kSelfApproval, "STOP-11"},
      {"SYS-04 BI=0 was invariant all along", "C10",
       [](Json& d) {
         for (Json& point : At(d, "/pairing/points"))
           for (Json& pair : point["pairs"]) pair["off"]["kernels"] = pair["on"]["kernels"];
       },
       Verdict::kRefused, reason::kPairInvalid, "C10-10"},
      {"C5-10 inference invariance as dual path", "C5", [](Json& d) { d["kind"] = "E5"; },
       Verdict::kRefused, reason::kWrongEvidenceKind, "C5-10"},
      {"C8-08 a task limited to logprobs", "C8",
       [](Json& d) {
         d["task_scope"] = "logprob-only";
         d["plan"] = Json::array({"none"});
         d["loop"] = nullptr;
       },
       Verdict::kNotCovered, reason::kLoopNotVerified, "C8-08"},
      {"C9-04 nobody confirmed the recipe", "C9", [](Json& d) { d["confirmation"] = nullptr; },
       Verdict::kWaitingHuman, reason::kNoSignoff, "STOP-11"},
  });
}

}  // namespace
}  // namespace tare::workflow
