// Gates C0 to C4: every obligation met by its planted defect. The honest documents pass in
// judge_test.cc; each test here changes one thing of them.

#include <gtest/gtest.h>

#include "workflow/gates/c0.h"
#include "workflow/gates/c2.h"
#include "workflow/gates/testing_evidence_c0_c4.h"

namespace tare::workflow {
namespace {

using enum Verdict;
constexpr char kOther[] = "00000000000000000000000000000000000000000000000000000000000000ff";

// The rationale is about the inventory as it is now.
Json Relinked(Json doc) {
  doc["route"]["rationale"]["inventory_sha256"] = InventoryDigest(doc["rows"]);
  return doc;
}

TEST(GateC0, InputsAreHashedAndNamed_C0_01) {
  const Json doc = HonestC0();
  for (const char* input : {"checkpoint", "implementation", "hardware"}) {
    const std::string at = std::string("/inputs/") + input + "/sha256";
    ExpectFinding(With(doc, at, ""), kRefused, "input-missing", "C0-01");
    ExpectFinding(With(doc, at, "small-v1"), kRefused, "input-missing", "C0-01");
    ExpectFinding(Without(doc, std::string("/inputs/") + input), kRefused, "malformed-evidence",
                  "C0");
  }
  ExpectFinding(With(doc, "/inputs/implementation/commit", ""), kRefused, "input-missing", "C0-01");
  ExpectFinding(With(doc, "/inputs/target/batch_invariant", "maybe"), kRefused,
                "malformed-evidence", "C0");
  ExpectFinding(With(doc, "/inputs/checkpoint/sha256", kOther), kRefused, "weight-hash-mismatch",
                "C0-01");
}

TEST(GateC0, KernelsAreThoseThatRan_C0_02) {
  Json doc = HonestC0();
  const Json launch = {{"phase", "decode"},
                       {"op", "linear"},
                       {"kernel", "linear_fwd_one_row"},
                       {"dtypes", "bf16,bf16->bf16"},
                       {"count", 9}};
  doc["trace"]["launches"].push_back(launch);
  ExpectFinding(doc, kFail, "kernel-unlisted", "C0-02");
  // In a row but never launched.
  Json read_from_source = HonestC0();
  Json kernel = launch;
  kernel.erase("count");
  read_from_source["rows"][1]["kernels"].push_back(kernel);
  ExpectFinding(Relinked(read_from_source), kFail, "kernel-unlisted", "C0-02");
  // A trace without decode shows no decode kernel.
  Json prefill_only = HonestC0();
  for (Json* list : {&prefill_only["trace"]["launches"], &prefill_only["rows"][0]["kernels"],
                     &prefill_only["rows"][1]["kernels"], &prefill_only["rows"][2]["kernels"],
                     &prefill_only["rows"][3]["kernels"]}) {
    for (size_t i = list->size(); i-- > 0;) {
      if ((*list)[i]["phase"] == "decode") list->erase(i);
    }
  }
  ExpectFinding(Relinked(prefill_only), kRefused, "condition-unmet", "C0-02");
}

TEST(GateC0, DifferentMathIsNamedByItsTerm_C0_03) {
  for (const auto& [term, value] : {std::pair<const char*, const char*>{"sink", "no"},
                                    {"rope.theta", "f32:0x47c35000"},
                                    {"window", "full"}}) {
    Json doc = HonestC0();
    doc["rows"][1]["training_terms"][term] = value;
    const GateJudgement got = FindJudge("C0")(Relinked(doc));
    EXPECT_EQ(got.verdict, kFail);
    EXPECT_EQ(got.reason, "different-math");
    EXPECT_NE(got.Gravest()->detail.find(term), std::string::npos) << got.Gravest()->detail;
    // Omitted altogether is different too.
    doc["rows"][1]["training_terms"].erase(term);
    ExpectFinding(Relinked(doc), kFail, "different-math", "C0-03");
  }
}

TEST(GateC0, QuantisersAndChoicesOfTheTraceAreDeclared_C0_04_C0_05) {
  ExpectFinding(With(HonestC0(), "/trace/quantized/1", "activation of mlp.down"), kFail,
                "quantizer-undeclared", "C0-04");
  for (const char* choice : {"indexer.top_k", "dispatch.capacity", "cache.eviction"}) {
    ExpectFinding(With(HonestC0(), "/trace/choices/3", choice), kFail, "choice-undeclared",
                  "C0-05");
  }
  // Deleting a row's choice fails against the trace.
  Json doc = HonestC0();
  doc["rows"][2]["choices"] = Json::array();
  ExpectFinding(Relinked(doc), kFail, "choice-undeclared", "C0-05");
  for (const char* key : {"format", "granularity", "scale_rule", "rounding", "saturation"}) {
    ExpectFinding(With(HonestC0(), std::string("/rows/1/quantization/0/") + key, ""), kRefused,
                  "malformed-evidence", "C0");
  }
}

TEST(GateC0, RouteFollowsFromItsAnswers_C0_06_C0_08_C0_09) {
  const Json doc = HonestC0();
  ExpectFinding(With(doc, "/route/chosen", "fsdp2"), kRefused, "route-unfounded", "C0-06");
  ExpectFinding(Without(doc, "/route/rejected/fsdp2"), kRefused, "route-unfounded", "C0-06");
  ExpectFinding(With(doc, "/route/rejected/fsdp2", " "), kRefused, "route-unfounded", "C0-06");
  for (const char* answer : {"batch_invariance_needed", "missing_backwards", "parallelism"}) {
    for (const char* blank : {"", "  ", "unknown", "Unknown", "?"}) {
      ExpectFinding(With(doc, std::string("/route/answers/") + answer, blank), kRefused,
                    "answer-missing", "C0-08");
    }
  }
  ExpectFinding(With(doc, "/route/answers/missing_backwards", "1"), kRefused, "answer-contradicted",
                "C0-08");
  Json missing = HonestC0();
  missing["rows"][1]["backward"] = "missing";
  ExpectFinding(Relinked(missing), kRefused, "answer-contradicted", "C0-08");
  missing["route"]["answers"]["missing_backwards"] = "1";
  ExpectPass(Relinked(missing));
  ExpectFinding(With(doc, "/route/rationale/rows", {"M99"}), kRefused, "rationale-unlinked",
                "C0-09");
  ExpectFinding(With(doc, "/route/rationale/rows", Json::array()), kRefused, "rationale-unlinked",
                "C0-09");
  // Editing the inventory later turns the route stale.
  ExpectFinding(With(doc, "/rows/0/module", "embedding"), kRefused, "rationale-unlinked", "C0-09");
}

TEST(GateC0, TheDecisionTableIsOne_C0_06) {
  EXPECT_EQ(ChooseRoute({}), "mlite");
  for (const bool bi : {false, true}) {
    for (const int64_t missing : {0, 3}) {
      const auto route = [&](std::set<std::string> unsupported) {
        return ChooseRoute({bi, missing, std::move(unsupported)});
      };
      EXPECT_EQ(route({"fsdp2", "megatron-bridge"}), "mlite");
      EXPECT_EQ(route({"mlite"}), bi || missing > 0 ? "megatron-bridge" : "fsdp2");
      EXPECT_EQ(route({"mlite", "megatron-bridge"}), "fsdp2");
      EXPECT_EQ(route({"mlite", "fsdp2"}), "megatron-bridge");
      EXPECT_EQ(route({"mlite", "fsdp2", "megatron-bridge"}), "none");
    }
  }
}

// GEN-25: mLite where the user chose nothing and it fits; a choice stands; what a route lacks is
// said, whether it was the default or a choice.
TEST(GateC0, MliteIsTheDefaultAndAChoiceStands) {
  EXPECT_EQ(ChooseRoute({.batch_invariance = true}), "mlite");
  EXPECT_EQ(HonestC0()["route"]["chosen"], "mlite");
  ExpectPass(HonestC0());
  for (const char* route : {"fsdp2", "megatron-bridge", "mlite"}) {
    EXPECT_EQ(ChooseRoute({.batch_invariance = true, .user = route}), route);
    Json doc = With(HonestC0(), "/route/user_choice", route);
    if (std::string(route) != "mlite") {
      // The default is not put over the choice ...
      ExpectFinding(doc, Verdict::kRefused, reason::kRouteUnfounded, "C0-06");
      // ... and neither is our own trainer.
      ExpectFinding(With(doc, "/route/chosen", "tare"), Verdict::kRefused, reason::kRouteUnfounded,
                    "C0-06");
      doc["route"]["chosen"] = route;
      doc["route"]["rejected"].erase(route);
      doc["route"]["rejected"]["mlite"] = "the user asks for another route";
    }
    ExpectPass(doc);
  }
  Json needs = With(HonestC0(), "/route/features",
                    Json{{"sliding window", {"mlite", "megatron-bridge"}},
                         {"attention sink", Json::array({"megatron-bridge"})}});
  ExpectFinding(needs, Verdict::kRefused, reason::kRouteLacksFeature, "GEN-25");
  EXPECT_NE(JudgeC0(needs).Gravest()->detail.find("attention sink"), std::string::npos);
  needs["route"]["features"]["attention sink"].push_back("mlite");
  ExpectPass(needs);
  ExpectFinding(With(HonestC0(), "/route/unsupported/mlite", "no sink"), Verdict::kRefused,
                reason::kRouteUnfounded, "C0-06");
}

TEST(GateC0, EveryTensorAndOperatorIsInOneRow_C0_07) {
  Json extra = HonestC0();
  extra["tensors"].push_back(
      {{"name", "rotary.inv_freq"}, {"dtype", "f32"}, {"sha256", kOther}, {"origin", "buffer"}});
  ExpectFinding(extra, kRefused, "inventory-incomplete", "C0-07");
  Json twice = HonestC0();
  twice["rows"][0]["tensors"].push_back("model.layers.0.mlp.gate.weight");
  ExpectFinding(Relinked(twice), kRefused, "inventory-incomplete", "C0-07");
  Json ghost = HonestC0();
  ghost["rows"][0]["tensors"].push_back("lm_head.weight");
  ExpectFinding(Relinked(ghost), kRefused, "inventory-incomplete", "C0-07");
  ExpectFinding(With(HonestC0(), "/trace/ops/5", "layers.*.mlp.act.out"), kRefused,
                "inventory-incomplete", "C0-07");
  Json same = HonestC0();
  same["rows"][1]["id"] = "M01";
  EXPECT_EQ(FindJudge("C0")(Relinked(same)).verdict, kRefused);
}

TEST(GateC1, InputsAndContext_C1_01) {
  const Json doc = HonestC1();
  ExpectFinding(Without(doc, "/inputs/context_length"), kRefused, "input-missing", "C1-01");
  ExpectFinding(With(doc, "/tuning/cells/0/rounds/1/max_model_len", 4096), kRefused,
                "context-below-target", "C1-01");
}

TEST(GateC1, TheRecipeIsWhatRan_C1_02_C1_03_C1_04) {
  const Json doc = HonestC1();
  for (const char* what : {"weights", "activations", "kv_cache"}) {
    ExpectFinding(With(doc, std::string("/live/precision/") + what, "e4m3"), kRefused,
                  "precision-differs", "C1-02");
  }
  const Json clamped = With(doc, "/live/execution/max_num_batched_tokens", "1024");
  ExpectFinding(clamped, kRefused, "effective-differs", "C1-03");
  ExpectPass(With(clamped, "/live/accepted", {"max_num_batched_tokens"}));
  ExpectFinding(With(doc, "/live/execution/autotuned_tile", "64"), kRefused, "effective-differs",
                "C1-03");
  ExpectFinding(With(doc, "/live/source", "command-line"), kRefused, "effective-differs", "C1-03");
  ExpectFinding(With(doc, "/live/master_sha256", kOther), kRefused, "start-differs", "C1-04");
}

TEST(GateC1, ThetaZeroIsAnsweredFromBytes_C1_05) {
  const Json doc = HonestC1();
  ExpectFinding(With(doc, "/theta0/tensors/0/ours", kOther), kRefused, "theta0-claim", "C1-05");
  ExpectFinding(With(doc, "/theta0/equals_checkpoint", false), kRefused, "theta0-claim", "C1-05");
  Json honest_no = With(doc, "/theta0/equals_checkpoint", false);
  honest_no["theta0"]["tensors"][0]["ours"] = kOther;
  ExpectFinding(honest_no, kRefused, "theta0-claim", "C1-05");  // without a reason
  honest_no["theta0"]["reason"] = "dequantised start";
  ExpectPass(honest_no);
}

TEST(GateC1, ScopeAndStandardComeFirst_C1_06_C1_07) {
  const Json doc = HonestC1();
  ExpectFinding(With(doc, "/recipe/scoring_scope/sha256", ""), kRefused, "scope-not-agreed",
                "C1-06");
  ExpectFinding(With(doc, "/compares/0/scope_sha256", kOther), kRefused, "scope-not-agreed",
                "C1-06");
  ExpectFinding(With(doc, "/compares/0/counted", 39), kRefused, "scope-not-agreed", "C1-06");
  ExpectFinding(With(doc, "/compares/0/time", "2026-11-01T07:59:59Z"), kRefused, "criterion-late",
                "C1-07");
  ExpectFinding(With(doc, "/recipe/standard/kind", "tolerance"), kRefused, "criterion-late",
                "C1-07");
  ExpectFinding(With(doc, "/recipe/standard/loosened", true), kRefused, "criterion-late", "C1-07");
}

TEST(GateC1, BudgetsAndTopologies_C1_08_C1_09) {
  const Json doc = HonestC1();
  for (const char* part : {"inference_throughput", "training_forward", "training_step"}) {
    const std::string at = std::string("/budgets/0/") + part;
    ExpectFinding(Without(doc, at), kRefused, "budget-incomplete", "C1-08");
    ExpectFinding(With(doc, at + "/denominator", ""), kRefused, "budget-incomplete", "C1-08");
  }
  ExpectFinding(With(doc, "/topologies/main/1", "tp2"), kRefused, "budget-incomplete", "C1-08");
  for (const char* who : {"nobody", "tool"}) {
    ExpectFinding(With(doc, "/topologies/decided_by", who), kWaitingHuman, "topology-undecided",
                  "C1-09");
  }
  ExpectFinding(With(doc, "/topologies/statement", ""), kWaitingHuman, "topology-undecided",
                "C1-09");
}

TEST(GateC1, TheWorkloadIsExact_C1_10) {
  const Json doc = HonestC1();
  ExpectFinding(With(doc, "/tuning/cells/0/rounds/0/output_tokens/3", 31), kRefused, "wrong-length",
                "C1-10");
  ExpectFinding(With(doc, "/tuning/cells/0/rounds/0/input_tokens", Json::array()), kRefused,
                "wrong-length", "C1-10");
  ExpectFinding(With(doc, "/tuning/cells/0/rounds/0/ignore_eos", false), kRefused, "wrong-length",
                "C1-10");
  ExpectFinding(With(doc, "/tuning/workload/declared", "formal"), kRefused, "wrong-length",
                "C1-10");
  // The short workload passes, and says what it does not cover.
  const GateJudgement got = FindJudge("C1")(doc);
  EXPECT_NE(got.scope["not_covered"].dump().find("8192"), std::string::npos);
}

TEST(GateC1, TheTableIsWhole_C1_11_C1_13_GEN_18) {
  const Json doc = HonestC1();
  ExpectFinding(Without(doc, "/tuning/cells/2"), kRefused, "cell-missing", "C1-11");
  ExpectFinding(With(doc, "/tuning/cells/1/failure", ""), kRefused, "cell-missing", "C1-11");
  Json narrowed = doc;  // a plan without the backend that failed
  narrowed["tuning"]["axes"]["moe_backend"] = {"cutlass"};
  narrowed["tuning"]["cells"].erase(1);
  narrowed["tuning"]["cells"].erase(0);
  ExpectFinding(narrowed, kRefused, "failed-rows-dropped", "GEN-18");
  Json measured = doc;
  measured["tuning"]["cells"][1] = measured["tuning"]["cells"][3];
  measured["tuning"]["cells"][1]["id"] = "triton-c2";
  measured["tuning"]["cells"][1]["axes"]["moe_backend"] = "triton";
  ExpectFinding(measured, kRefused, "failed-rows-dropped", "GEN-18");
  ExpectFinding(Without(doc, "/tuning/cells/0/rounds/2"), kRefused, "too-few-rounds", "C1-13");
  ExpectFinding(With(doc, "/tuning/rounds_planned", 1), kRefused, "too-few-rounds", "C1-13");
  ExpectFinding(With(doc, "/tuning/cells/0/rounds/0/backend_source", "flag"), kRefused,
                "backend-not-live", "C1-13");
  ExpectFinding(With(doc, "/tuning/last_step/gain_percent", 3.0), kInconclusive, "still-improving",
                "STOP-01");
}

TEST(GateC1, TheBaselineIsTheRecipes_C1_12_TRACK_02_TRACK_07) {
  const Json doc = HonestC1();
  for (const auto& [key, value] : {std::pair<const char*, const char*>{"r3", "off"},
                                   {"prefix_cache", "off"},
                                   {"gpu_mem", "0.97"}}) {
    ExpectFinding(With(doc, std::string("/baseline/config/") + key, value), kRefused,
                  "serving-only-optimum", "C1-12");
  }
  ExpectFinding(With(doc, "/baseline/switch/value", "1"), kRefused, "serving-only-optimum",
                "C1-12");
  ExpectFinding(With(doc, "/baseline/consistency_settings/0", "graph off"), kRefused,
                "consistency-handicap", "TRACK-02");
  ExpectFinding(With(doc, "/baseline/patched_symbols_executed/0", "linear_fwd_invariant"), kRefused,
                "consistency-handicap", "TRACK-07");
  ExpectFinding(With(doc, "/baseline/patch_compare/patched_sha256", kOther), kRefused,
                "consistency-handicap", "STOP-05");
}

TEST(GateC1, FrozenAndAudited_C1_14_C1_15_STOP_03_04_06_07) {
  const Json doc = HonestC1();
  ExpectFinding(With(doc, "/baseline/config_sha256", kOther), kRefused, "frozen-changed", "C1-14");
  ExpectFinding(With(doc, "/audit/image", "registry/small:latest"), kRefused, "image-by-tag",
                "C1-15");
  ExpectFinding(With(doc, "/audit/image", std::string("sha256:") + kOther), kRefused,
                "identity-differs", "C1-15");
  for (const auto& [row, item] : {std::pair<const char*, const char*>{"STOP-03", "hardware"},
                                  {"STOP-03", "launch_command"},
                                  {"STOP-04", "live_backends"},
                                  {"STOP-05", "patches_statement"},
                                  {"STOP-06", "valid_tokens"},
                                  {"STOP-07", "open_questions"}}) {
    ExpectFinding(With(doc, std::string("/audit/") + item, " "), kRefused, "material-missing", row);
    ExpectFinding(Without(doc, std::string("/audit/") + item), kRefused, "material-missing", row);
  }
  ExpectFinding(With(doc, "/audit/failed_items", "none"), kRefused, "failed-rows-dropped",
                "STOP-06");
}

TEST(GateC2, TypesPairsAndStates_C2_01_C2_02_C2_03) {
  // The first layers of the hybrid: a type is lost, and it is named.
  Json first = HonestC2();
  first["proxy"]["layers"].erase(first["proxy"]["layers"].size() - 1);
  first["proxy"]["source_layers"].erase(first["proxy"]["source_layers"].size() - 1);
  const GateJudgement got = FindJudge("C2")(first);
  EXPECT_EQ(got.verdict, kRefused);
  std::set<std::string> reasons;
  for (const GateFinding& f : got.findings) reasons.insert(f.reason);
  EXPECT_TRUE(reasons.contains("feature-uncovered"));
  // The types are there, a pair is not.
  Json swapped = HonestC2();
  std::swap(swapped["proxy"]["layers"][0], swapped["proxy"]["layers"][1]);
  ExpectFinding(swapped, kRefused, "feature-uncovered", "C2-02");
  // A state path that never crossed a chunk boundary was not read.
  ExpectFinding(With(HonestC2(), "/state_boundaries_crossed/kv", 0), kRefused, "condition-unmet",
                "C2-03");
  Json stateless = HonestC2();
  for (Json& layer : stateless["proxy"]["layers"]) layer["states"] = Json::array();
  ExpectFinding(stateless, kRefused, "feature-uncovered", "C2-03");
}

TEST(GateC2, GeometryIsReal_C2_04_C2_05) {
  for (const char* width : {"hidden", "experts", "top_k", "head_dim", "quant_block", "vocab"}) {
    const Json doc = With(HonestC2(), std::string("/proxy/geometry/") + width, "halved");
    ExpectFinding(doc, kRefused, "geometry-differs", "C2-04");
    ExpectPass(With(doc, std::string("/proxy/exceptions/") + width, "kernels do not read it"));
  }
  ExpectFinding(With(HonestC2(), "/proxy/shards/tp", "2"), kRefused, "shard-differs", "C2-05");
  ExpectFinding(With(HonestC2(), "/proxy/weights_from_checkpoint", false), kRefused,
                "geometry-differs", "C2-04");
  ExpectFinding(With(HonestC2(), "/proxy/source_layers/0", 11), kRefused, "answer-contradicted",
                "C2-01");
}

TEST(GateC2, TheTableHoldsRealTests_C2_06) {
  ExpectFinding(With(HonestC2(), "/coverage/0/test", "no.such.test"), kRefused, "test-dangling",
                "C2-06");
  ExpectFinding(With(HonestC2(), "/coverage/0/verdict", "never-ran"), kRefused, "test-dangling",
                "C2-06");
  ExpectFinding(With(HonestC2(), "/coverage/0/proxy_sha256", kOther), kRefused, "test-dangling",
                "C2-06");
  ExpectFinding(With(HonestC2(), "/coverage/0/verdict", "fail"), kFail, "test-dangling", "C2-06");
  ExpectFinding(Without(HonestC2(), "/coverage/0"), kRefused, "test-dangling", "C2-06");
}

TEST(GateC2, GapsAreListedAndStayInTheScope_C2_07) {
  ExpectFinding(With(HonestC2(), "/uncovered", Json::array()), kRefused, "gap-unlisted", "C2-07");
  const GateJudgement got = FindJudge("C2")(HonestC2());
  EXPECT_NE(got.scope["not_covered"].dump().find("feature:long.context"), std::string::npos);
  ExpectFinding(With(HonestC2(), "/uncovered/1", "type:moe"), kRefused, "answer-contradicted",
                "C2-07");
}

TEST(GateC2, OneCommandADay_C2_08) {
  ExpectFinding(With(HonestC2(), "/daily/verdict", "never-ran"), kRefused, "condition-unmet",
                "C2-08");
  ExpectFinding(With(HonestC2(), "/daily/seconds", 601.0), kRefused, "condition-unmet", "C2-08");
  ExpectFinding(With(HonestC2(), "/daily/needs_full_weights", true), kRefused, "condition-unmet",
                "C2-08");
}

// Three architectures: what is chosen keeps every type, pair and state (C2-01, C2-02).
TEST(GateC2, ChosenLayersKeepEveryFeature) {
  const LayerShape dense = {{"attention.full", "mlp"}, {"kv"}, {}};
  const LayerShape window = {{"attention.window", "sink", "mlp"}, {"kv.window"}, {}};
  const LayerShape moe = {{"attention.full", "moe"}, {"kv"}, {}};
  const LayerShape ssm = {{"ssm"}, {"ssm", "conv"}, {}};
  const std::vector<std::vector<LayerShape>> models = {
      std::vector<LayerShape>(30, dense),
      {dense, window, moe, window, moe, dense},
      {ssm, ssm, ssm, dense, ssm, ssm, ssm, moe, ssm, ssm, ssm, dense, ssm, ssm, moe, ssm}};
  const size_t expected[] = {2, 6, 9};
  for (size_t m = 0; m < models.size(); ++m) {
    const std::vector<size_t> chosen = ChooseLayers(models[m]);
    std::vector<LayerShape> picked;
    for (const size_t i : chosen) picked.push_back(models[m][i]);
    EXPECT_EQ(FeaturesOf(picked), FeaturesOf(models[m])) << m;
    EXPECT_LT(chosen.size(), models[m].size() + (m == 1 ? 1 : 0)) << m;
    EXPECT_LE(chosen.size(), expected[m]) << m;
    EXPECT_EQ(ChooseLayers(models[m], 4).size() >= 4, true) << m;
  }
}

TEST(GateC3, ArmsShareWeightsAndTokens_C3_01) {
  ExpectFinding(With(HonestC3(), "/cells/0/b/weights_sha256", kOther), kRefused,
                "weight-hash-mismatch", "C3-01");
  ExpectFinding(With(HonestC3(), "/cells/0/b/tokens_sha256", kOther), kRefused, "tokens-differ",
                "C3-01");
}

TEST(GateC3, EveryCellIsThereAndBitwise_C3_02_to_C3_06_C3_09) {
  const Json honest = HonestC3();
  std::set<std::string> axes;
  for (const Json& c : honest["cells"]) axes.insert(c["axis"].get<std::string>());
  for (const std::string& axis : axes) {
    Json doc = honest;
    for (size_t i = doc["cells"].size(); i-- > 0;) {
      if (doc["cells"][i]["axis"] == axis) doc["cells"].erase(i);
    }
    ExpectFinding(doc, kRefused, "matrix-gap", "C3-09");
  }
  for (size_t i = 0; i < honest["cells"].size(); ++i) {
    const std::string at = fmt::format("/cells/{}", i);
    ExpectFinding(With(honest, at + "/compared", 0), kRefused, "matrix-gap", "C3-09");
    ExpectFinding(With(honest, at + "/standard", "tolerance"), kRefused, "matrix-gap", "C3-09");
    const GateJudgement differs = FindJudge("C3")(With(honest, at + "/mismatches", 1));
    EXPECT_EQ(differs.verdict, kFail);
    EXPECT_EQ(differs.reason, "bit-mismatch");
    if (honest["cells"][i].contains("proof")) {
      const GateJudgement unproven = FindJudge("C3")(With(honest, at + "/proof/seen", 0));
      EXPECT_EQ(unproven.reason, "condition-unmet") << i;
    }
  }
  // Batch passes, prefill against decode does not: fail (C3-03).
  Json pd = honest;
  for (Json& c : pd["cells"]) {
    if (c["axis"] == "prefill-decode") c["mismatches"] = 3;
  }
  ExpectFinding(pd, kFail, "bit-mismatch", "C3-03");
  Json no64 = honest;
  no64["cells"][5]["batch"] = 33;
  ExpectFinding(no64, kRefused, "matrix-gap", "C3-02");
}

TEST(GateC3, TrainingSizesOwnersAndProvenance_C3_07_C3_12_C3_13) {
  ExpectFinding(With(HonestC3(), "/kernels/0/record", "none"), kRefused, "training-size-unknown",
                "C3-07");
  ExpectFinding(With(HonestC3(), "/kernels/0/training_tokens", 0), kRefused,
                "training-size-unknown", "C3-07");
  ExpectFinding(With(HonestC3(), "/changed_files/1", "src/ops/gate/gate.cc"), kRefused,
                "ownership-missing", "C3-12");
  ExpectFinding(With(HonestC3(), "/ownership/0/consumers", Json::array()), kRefused,
                "ownership-missing", "C3-12");
  ExpectFinding(With(HonestC3(), "/provenance/files/0/loaded_sha256", kOther), kRefused,
                "provenance-differs", "C3-13");
}

TEST(GateC3, ProvesInferenceAlone_C3_10_C3_11) {
  for (const char* use : {"train-inference", "delivery"}) {
    ExpectFinding(With(HonestC3(), "/offered_as", use), kRefused, "inference-internal", "C3-10");
  }
  ExpectFinding(With(HonestC3(), "/failing_replays", "listed"), kRefused, "replay-missing",
                "C3-11");
  Json failing = With(With(HonestC3(), "/cells/0/mismatches", 2), "/failing_replays", "listed");
  const auto has = [](const Json& doc) {
    for (const GateFinding& f : FindJudge("C3")(doc).findings) {
      if (f.reason == "replay-missing") return true;
    }
    return false;
  };
  EXPECT_TRUE(has(failing));
  failing["cells"][0]["replay"] = {{"sha256", kOther}, {"minimal", false}};
  EXPECT_TRUE(has(failing));
  failing["cells"][0]["replay"]["minimal"] = true;
  EXPECT_FALSE(has(failing));
  EXPECT_EQ(FindJudge("C3")(failing).verdict, kFail);
}

TEST(GateC4, ProfilesAreReal_C4_01_C4_02) {
  ExpectFinding(With(HonestC4(), "/profiles/0/hidden", 32), kRefused, "profile-unreal", "C4-01");
  ExpectFinding(With(HonestC4(), "/profiles/0/phase", "mixed"), kRefused, "profile-unreal",
                "C4-01");
  Json no_training = HonestC4();
  for (size_t i = no_training["profiles"].size(); i-- > 0;) {
    if (no_training["profiles"][i]["phase"].get<std::string>().starts_with("train")) {
      no_training["profiles"].erase(i);
    }
  }
  ExpectFinding(no_training, kRefused, "profile-missing", "C4-02");
  // Before wiring they are not covered, and say so.
  const Json before = With(no_training, "/training_wired", false);
  ExpectPass(before);
  EXPECT_NE(FindJudge("C4")(before).scope["not_covered"].dump().find("train-step"),
            std::string::npos);
}

TEST(GateC4, LoopsOverTokensAreFlaggedAndChunksAreNot_C4_03_C4_08) {
  Json loop = HonestC4();  // one launch a token
  for (Json& p : loop["profiles"]) {
    if (p["phase"] == "prefill") {
      p["launches"][2]["count"] = p["tokens"];
      p["layers"] = 64;
    }
  }
  ExpectFinding(loop, kFail, "per-token-loop", "C4-08");
  // The profile with four chunks has four times the launches, and the honest document passes.
  ExpectPass(HonestC4());
  Json ladder = HonestC4();
  ladder["profiles"].erase(2);  // prefill at 4N
  ladder["profiles"].erase(ladder["profiles"].size() - 1);
  ExpectFinding(ladder, kRefused, "profile-missing", "C4-03");
  Json tiny = HonestC4();
  tiny["profiles"][3]["launches"][0]["count"] = 6 * 40;
  EXPECT_EQ(FindJudge("C4")(tiny).reason, "tiny-kernels");
}

TEST(GateC4, GapsCopiesAndWorkspaces_C4_04_C4_05_C4_06) {
  ExpectFinding(With(HonestC4(), "/profiles/0/host_gaps/0/us", 200.0), kFail, "host-gap", "C4-04");
  ExpectFinding(With(HonestC4(), "/profiles/0/synchronisations/0", "sampler"), kFail, "host-gap",
                "C4-04");
  ExpectFinding(With(HonestC4(), "/limits/fixed", "2026-11-03T00:00:00Z"), kRefused,
                "criterion-late", "C4-04");
  ExpectFinding(With(HonestC4(), "/profiles/0/repeated/0/times", 2), kFail, "repeated-work",
                "C4-05");
  ExpectFinding(With(HonestC4(), "/profiles/0/steady_allocations", 1), kFail, "repeated-work",
                "C4-05");
  ExpectFinding(With(HonestC4(), "/profiles/0/workspaces/0/peak_bytes", 4097), kFail,
                "workspace-abnormal", "C4-06");
}

TEST(GateC4, GraphsReplayOrAreAbsentForAReason_C4_07) {
  for (const auto& [key, value] : {std::pair<const char*, Json>{"captured", false},
                                   {"inputs_changed", false},
                                   {"fallback", true},
                                   {"stale_pointers", true},
                                   {"replays", 0},
                                   {"replay_sha256", kOther}}) {
    ExpectFinding(With(HonestC4(), std::string("/graph/") + key, value), kRefused, "graph-unproven",
                  "C4-07");
  }
  const Json without = With(HonestC4(), "/graph/used", "no");
  ExpectFinding(without, kRefused, "graph-unproven", "C4-07");
  ExpectPass(With(without, "/graph/reason", "a CPU has none"));
}

TEST(GateC4, RepairsAreRetested_C4_09_C4_10) {
  ExpectFinding(Without(HonestC4(), "/defects/0/retests/1"), kRefused, "retest-missing", "C4-09");
  ExpectFinding(With(HonestC4(), "/defects/0/retests/0/binary_sha256", kOther), kRefused,
                "retest-missing", "C4-09");
  ExpectFinding(With(HonestC4(), "/defects/0/state", "open"), kFail, "retest-missing", "C4-10");
  ExpectFinding(With(HonestC4(), "/defects/0/owner", ""), kRefused, "material-missing", "C4-10");
  ExpectFinding(With(HonestC4(), "/profiles/0/raw_sha256", "profile.png"), kRefused,
                "profile-missing", "C4-10");
}

}  // namespace
}  // namespace tare::workflow
