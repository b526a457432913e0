#pragma once

// One honest task as evidence of C5 to C10, built by code: a small model with a router, one rollout
// and one trainer process, two updates. Tests change one thing in it and ask what the judges say.
// Everything that must agree is written once and derived; nothing here is a random number that a
// judge would not look at.

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/sha256.h"
#include "workflow/gates/evidence_parts.h"
#include "workflow/gates/pairing.h"
#include "workflow/gates/recipe_diff.h"

namespace tare::workflow {

inline std::string H(const std::string& name) { return tare::Hex(Sha256Of(name)); }
inline std::string HonestImage() { return "sha256:" + H("image"); }
inline std::string HonestCommit(const std::string& name) { return H(name).substr(0, 40); }

inline Json RecipeJson(const Recipe& recipe) {
  Json out = Json::object();
  for (const auto& [key, value] : recipe) out[key] = value;
  return out;
}

// What C1 agreed.
inline Recipe HonestAgreement() {
  return {{"concurrency", "1|4"},
          {"forward_ratio_ppm", "1500000"},
          {"input_tokens", "8192"},
          {"main_topologies", "1 process"},
          {"output_tokens", "1024"},
          {"pairs", "6"},
          {"standard", "bitwise"},
          {"step_ratio_ppm", "1600000"},
          {"throughput_ratio_ppm", "1200000"}};
}

// The formal recipe; the two-step acceptance is it with two steps.
inline Recipe HonestFormalRecipe() {
  return {{"VLLM_BATCH_INVARIANT", "1"},
          {"batch_prompts", "2"},
          {"checkpoint_restore", "true"},
          {"graph", "false"},
          {"group", "3"},
          {"loss", "grpo"},
          {"lr", "0.001"},
          {"max_tokens", "5"},
          {"optimizer", "adamw"},
          {"parallelism", "1"},
          {"precision", "bf16"},
          {"prefix_caching", "true"},
          {"profile", "ieee-f32"},
          {"steps", "200"},
          {"task", "pattern"}};
}
inline Recipe HonestTwoStepRecipe() {
  Recipe r = HonestFormalRecipe();
  r["steps"] = "2";
  return r;
}

inline const std::map<std::string, std::string>& HonestContracts() {
  static const std::map<std::string, std::string> contracts = {
      {"attention", H("attention/1")}, {"linear", H("linear/1")}, {"router", H("router/1")}};
  return contracts;
}

inline Json HonestSubject() {
  return {{"model", "small"},
          {"weights", H("theta0")},
          {"recipe", RecipeId(HonestTwoStepRecipe())},
          {"image", HonestImage()},
          {"contracts", RecipeId(HonestContracts())}};
}

inline std::string Word(uint32_t word) { return fmt::format("0x{:08x}", word); }
inline std::string Word(float value) { return Word(std::bit_cast<uint32_t>(value)); }
// A logprob in (-2, -1] with a full mantissa, always the same for the same name.
inline uint32_t HonestWord(const std::string& name) {
  const Sha256Digest d = Sha256Of(name);
  return 0xbf800000u | (static_cast<uint32_t>(d[0]) << 15) | (static_cast<uint32_t>(d[1]) << 7) |
         (d[2] >> 1);
}

inline constexpr int kQuestions = 2, kSamples = 3, kPrompt = 4, kResponse = 5, kEos = 2;

// The three paths hold the same bits. One token of q0/0 is masked; q1/2 ends with the end of
// sequence.
inline Json HonestPath(int version, const std::string& name, int64_t padding = 0) {
  Json sequences = Json::array();
  int64_t rows = padding;
  for (int q = 0; q < kQuestions; ++q) {
    for (int s = 0; s < kSamples; ++s) {
      const std::string sequence = fmt::format("q{}/{}", q, s);
      Json prompt = Json::array(), tokens = Json::array(), mask = Json::array(),
           bits = Json::array();
      for (int t = 0; t < kPrompt; ++t) prompt.push_back(10 * q + t + 3);
      for (int t = 0; t < kResponse; ++t) {
        const bool eos = q == 1 && s == 2 && t == kResponse - 1;
        const std::string at = fmt::format("theta{} {} {}", version, sequence, t);
        tokens.push_back(eos ? kEos : static_cast<int>(Sha256Of(at)[3]) + 100);
        mask.push_back(q == 0 && s == 0 && t == 1 ? 0 : 1);
        bits.push_back(Word(HonestWord(at)));
      }
      rows += kPrompt + kResponse - 1;
      sequences.push_back({{"sequence", sequence},
                           {"prompt", prompt},
                           {"tokens", tokens},
                           {"mask", mask},
                           {"bits", bits}});
    }
  }
  return {{"dtype", "f32"},
          {"kind", "raw"},
          {"temperature", Word(1.0f)},
          {"vocabulary", 512},
          {"rows", rows},
          {"sequences", sequences},
          {"source", "forward"},
          {"recorded", name == "actor"}};
}
inline Json WithoutSource(Json path) {
  path.erase("source");
  path.erase("recorded");
  return path;
}

inline Json HonestIdentity() {
  return {{"image", HonestImage()},
          {"executable", H("executable")},
          {"interpreter", "none"},
          {"packages", "none"},
          {"libraries", {{"libc.so.6", H("libc")}, {"libcrypto.so.3", H("libcrypto")}}},
          {"overlay", Json::array()},
          {"switch",
           {{"name", "VLLM_BATCH_INVARIANT"},
            {"at_start", "1"},
            {"effective", 1},
            {"workers", {1, 1}},
            {"worker_count", 2}}},
          {"profile", "ieee-f32"},
          {"device", "cpu"},
          {"driver", "none"},
          {"topology", "1 process"},
          {"contracts", RecipeId(HonestContracts())},
          {"prefix_caching", true},
          {"faults", ""}};
}

inline Json HonestC5() {
  Json rollout = HonestIdentity(), trainer = HonestIdentity();
  rollout["kernels"] = {"attention_fwd", "linear_fwd", "router_fwd"};
  trainer["kernels"] = {"attention_fwd", "linear_fwd", "router_fwd"};
  Json contracts = Json::object(), semantics = Json::object(), choices = Json::array();
  for (const auto& [op, id] : HonestContracts()) contracts[op] = id;
  for (const char* name : {"primitives", "quantization", "layout", "mask", "position", "routing",
                           "reduction", "logprob"}) {
    semantics[name] = {{"rollout", fmt::format("{}/1", name)},
                       {"trainer", fmt::format("{}/1", name)}};
  }
  for (int t = 0; t < 3; ++t) {
    choices.push_back({{"where", fmt::format("layer 2, q0/1, token {}", t)},
                       {"what", t == 2 ? "candidates" : "router"},
                       {"rollout", {t, t + 4}},
                       {"trainer", {t, t + 4}},
                       {"trainer_used", {t, t + 4}}});
  }
  Json repeats = Json::object(), repacked = Json::object(), paths = Json::object();
  paths["rollout"] = HonestPath(0, "rollout");
  for (const char* name : {"old_logprob", "actor"}) {
    paths[name] = HonestPath(0, name);
    repeats[name] =
        Json::array({WithoutSource(HonestPath(0, name)), WithoutSource(HonestPath(0, name))});
    repacked["shuffled"][name] = WithoutSource(HonestPath(0, name));
    repacked["padded"][name] = WithoutSource(HonestPath(0, name, 7));
  }
  return {{"schema", "tare.gate.C5/v1"},
          {"subject", HonestSubject()},
          {"kind", "E6"},
          {"order", {"contract", "rollout", "same packing", "repacked", "old_logprob", "actor"}},
          {"contracts", contracts},
          {"kernels",
           {{"attention_fwd", "attention"}, {"linear_fwd", "linear"}, {"router_fwd", "router"}}},
          {"contract",
           {{"standard", "bitwise"},
            {"dtype", "f32"},
            {"kind", "raw"},
            {"temperature", Word(1.0f)},
            {"vocabulary", 512},
            {"scope",
             {{"valid_tokens", kQuestions * kSamples * kResponse - 1},
              {"masked_tokens", 1},
              {"eos_token", kEos},
              {"eos_tokens", 1}}}}},
          {"semantics", semantics},
          {"state", {{"rollout", "empty"}, {"trainer", "empty"}}},
          {"chain",
           {{{"step", "checkpoint to master"},
             {"from_format", "bf16"},
             {"to_format", "f32"},
             {"scale", "none"},
             {"rounding", "exact"},
             {"from", H("theta0")},
             {"to", H("master0")}},
            {{"step", "master to deployed"},
             {"from_format", "f32"},
             {"to_format", "bf16"},
             {"scale", "none"},
             {"rounding", "nearest-even"},
             {"from", H("master0")},
             {"to", H("theta0")}},
            {{"step", "deployed to engine"},
             {"from_format", "bf16"},
             {"to_format", "bf16"},
             {"scale", "none"},
             {"rounding", "exact"},
             {"from", H("theta0")},
             {"to", H("theta0")}}}},
          {"trainer",
           {{"entry", "tare rl-worker"},
            {"optimizer_parameters", H("parameters")},
            {"forward_parameters", H("parameters")},
            {"weight_copies", 1}}},
          {"identities", {{"rollout", rollout}, {"trainer", trainer}}},
          {"packings",
           {{"base",
             {{"micro_batches", {{"q0/0", "q0/1", "q0/2"}, {"q1/0", "q1/1", "q1/2"}}},
              {"padding_rows", 0}}},
            {"shuffled",
             {{"micro_batches",
               Json::array({Json::array({"q1/2", "q0/0"}), Json::array({"q1/1", "q0/2"}),
                            Json::array({"q0/1", "q1/0"})})},
              {"padding_rows", 0}}},
            {"padded",
             {{"micro_batches", {{"q0/0", "q0/1", "q0/2"}, {"q1/0", "q1/1", "q1/2"}}},
              {"padding_rows", 7}}}}},
          {"paths", paths},
          {"same_packing", repeats},
          {"repacked", repacked},
          {"decisions",
           {{"recorded", true},
            {"replayed", false},
            {"statement", ""},
            {"flips", {{"router", 0}, {"indexer", 0}, {"candidates", 0}}},
            {"choices", choices}}},
          {"metrics", Json::array()}};
}

inline const std::vector<std::pair<std::string, int64_t>>& HonestParameters() {
  static const std::vector<std::pair<std::string, int64_t>> parameters = {
      {"embed", 64}, {"layers.0.qkv", 48}, {"layers.0.router", 12}, {"norm", 8}};
  return parameters;
}

inline Json HonestC6() {
  const Json step = {{"values", {1300, 1310, 1290}}, {"median", 1300}, {"sum", 3900}};
  const Json forward = {{"values", {500, 505, 495}}, {"median", 500}, {"sum", 1500}};
  const Json native_step = {{"values", {1000, 1004, 996}}, {"median", 1000}, {"sum", 3000}};
  const Json native_forward = {{"values", {400, 402, 398}}, {"median", 400}, {"sum", 1200}};
  Json poisoned = Json::array();
  for (const char* what : {"caches", "quantized views", "rng", "router state", "scales"}) {
    poisoned.push_back(
        {{"what", what}, {"gradient_before", H("gradient")}, {"gradient_after", H("gradient")}});
  }
  return {{"schema", "tare.gate.C6/v1"},
          {"subject", HonestSubject()},
          {"kind", "E7"},
          {"agreement", RecipeJson(HonestAgreement())},
          {"inventory", {"embedding", "attention", "router", "quantized linear"}},
          {"registry", {"embedding_bwd", "attention_bwd", "linear_bwd"}},
          {"modules",
           {{{"module", "embedding"},
             {"verdict", "reuse"},
             {"rationale", "the existing backward has the same contract"},
             {"existing", "embedding_bwd"},
             {"gradient", "exact"},
             {"saved", Json::array({"token ids"})},
             {"reads", Json::array({"token ids"})}},
            {{"module", "attention"},
             {"verdict", "glue"},
             {"rationale", "the saved statistics are handed to the existing backward"},
             {"existing", "attention_bwd"},
             {"gradient", "exact"},
             {"saved", {"q", "k", "v", "log-sum-exp"}},
             {"reads", {"q", "k", "v", "log-sum-exp"}}},
            {{"module", "router"},
             {"verdict", "newly written"},
             {"rationale", "no backward with the tie rule of the contract existed"},
             {"existing", "none"},
             {"gradient", "exact"},
             {"saved", {"scores", "chosen"}},
             {"reads", {"scores", "chosen"}}},
            {{"module", "quantized linear"},
             {"verdict", "glue"},
             {"rationale", "the linear backward with a clipping surrogate around it"},
             {"existing", "linear_bwd"},
             {"gradient", "surrogate"},
             {"saved", {"x", "scale"}},
             {"reads", {"x", "scale"}}}}},
          {"rounding_sites", Json::array({"quantized linear"})},
          {"surrogates",
           {{{"site", "quantized linear"},
             {"surrogate", "clipping"},
             {"value", "dequantized"},
             {"scale_rule", "amax / 448 per block of 128"},
             {"executed",
              {{"in_range", "passes"},
               {"saturated", "zero"},
               {"value", "dequantized"},
               {"scale_rule", "amax / 448 per block of 128"}}}}}},
          {"poisoned", poisoned},
          {"weight_change_raises", true},
          {"graph", {{"detached_outputs", 0}, {"trained_value", "executed forward"}}},
          {"production_scan",
           {{"sources_built", 120},
            {"sources_scanned", 120},
            {"hits", Json::array()},
            {"run_time_hits", Json::array()},
            {"preload", ""}}},
          {"denominator", "native training path"},
          {"step_times",
           {{{"topology", "1 process"},
             {"forward_native_us", native_forward},
             {"forward_aligned_us", forward},
             {"step_native_us", native_step},
             {"step_aligned_us", step}}}}};
}

// One compared quantity; `off` is the relative departure of the worst element.
inline Json HonestQuantity(const std::string& name, const std::string& tolerance, int64_t elements,
                           float production, float off) {
  const float reference = production * (1.0f + off);
  const bool equal = reference == production;
  const double error = std::fabs(static_cast<double>(production) - static_cast<double>(reference)) /
                       std::fabs(static_cast<double>(reference));
  return {
      {"name", name},
      {"tolerance", tolerance},
      {"elements", elements},
      {"bitwise_equal", equal ? elements : elements - 3},
      {"bitwise_different", equal ? 0 : 3},
      {"non_finite", 0},
      {"all_zero", false},
      {"worst",
       {{"index", elements / 2}, {"production", Word(production)}, {"reference", Word(reference)}}},
      {"error", error}};
}

inline Json HonestCase(const std::string& where, Json quantities) {
  Json inputs = Json::object();
  for (const char* name : {"input", "weights", "saved state", "upstream"}) {
    inputs[name] = {{"production", H(where + name)}, {"reference", H(where + name)}};
  }
  return {{"where", where},           {"production_dtype", "bf16"},
          {"upstream_dtype", "bf16"}, {"upstream_representable", true},
          {"inputs", inputs},         {"quantities", std::move(quantities)}};
}

inline Json HonestC7() {
  Json names = Json::array(), whole = Json::array(), masters = Json::array(), m = Json::array(),
       v = Json::array(), tolerances = Json::array();
  const auto tolerance = [&](const char* id, const char* layer, double bound, const char* why) {
    tolerances.push_back(
        {{"id", id}, {"layer", layer}, {"metric", "relative"}, {"bound", bound}, {"reason", why}});
  };
  tolerance("T-op", "operator", 0.01, "bf16 rounds by 2^-9 and five roundings lie on the path");
  tolerance("T-module", "module", 0.02, "twenty roundings of bf16 in a random walk");
  tolerance("T-model", "model", 0.05, "sixty roundings of bf16 in a random walk, times three");
  tolerance("T-step", "step", 0.001, "only roundings of f32 lie between gradient and master");
  for (const auto& [name, elements] : HonestParameters()) {
    names.push_back(name);
    whole.push_back(HonestQuantity(name, "T-model", elements, 0.125f, 0.01f));
    masters.push_back(HonestQuantity(name, "T-step", elements, 0.5f, 1e-5f));
    m.push_back(HonestQuantity(name, "T-step", elements, 0.25f, 0.0f));
    v.push_back(HonestQuantity(name, "T-step", elements, 0.0625f, 1e-5f));
  }
  const auto arm = [&](const std::string& name, int64_t result) {
    Json out = {{"data", H("sft data")},
                {"initial_weights", H("theta0")},
                {"steps", 20},
                {"result_ppm", result}};
    if (name != "native") out["visible_forward"] = H("sft forward");
    return out;
  };
  return {
      {"schema", "tare.gate.C7/v1"},
      {"subject", HonestSubject()},
      {"kind", "E7"},
      {"order",
       {"tolerances", "operator", "module", "model", "step", "evaluation declared", "finetuning"}},
      {"parameters", names},
      {"tolerances", tolerances},
      {"code",
       {{"production", Json::array({"linear_bwd.o", "attention_bwd.o"})},
        {"reference", Json::array({"reference64.o"})}}},
      {"perturbation",
       {{"production_before", H("gradient")},
        {"production_after", H("gradient moved")},
        {"reference_before", H("reference gradient")},
        {"reference_after", H("reference gradient")}}},
      {"layers",
       {{"operator", Json::array({HonestCase(
                         "linear", Json::array({HonestQuantity("dx", "T-op", 32, 0.75f, 0.002f),
                                                HonestQuantity("dw", "T-op", 48, 1.5f, 0.0f)}))})},
        {"module",
         Json::array({HonestCase(
             "layers.0", Json::array({HonestQuantity("dx", "T-module", 32, -0.25f, 0.004f)}))})},
        {"model", Json::array({HonestCase("loss", whole)})}}},
      {"step", {{"masters", masters}, {"first_moments", m}, {"second_moments", v}}},
      {"sft",
       {{"required_by", Json::array({"surrogate gradient"})},
        {"control",
         {{"arms",
           {{"production", arm("production", 612000)},
            {"surrogate", arm("surrogate", 611000)},
            {"native", arm("native", 615000)}}},
          {"evaluation",
           {{"declared", "share of held-out answers that are right"},
            {"margin_ppm", 10000},
            {"production_minus_native_ppm", -3000},
            {"production_minus_surrogate_ppm", 1000}}}}}}},
      {"quality", "covered"},
      {"quality_evidence", "declared evaluation"}};
}

inline Json HonestLoop() {
  Json versions = Json::array(), updates = Json::array(), events = Json::array();
  const auto theta = [](int v) { return H(fmt::format("theta{}", v)); };
  const auto master = [](int v) { return H(fmt::format("master{}", v)); };
  for (int k = 0; k <= 2; ++k) {
    events.push_back({{"event", "rollout"}, {"version", k}});
    events.push_back({{"event", "compare"}, {"version", k}});
    Json questions = Json::array(), paths = Json::object();
    for (int q = 0; q < kQuestions; ++q) {
      const std::vector<double> rewards = {0.25, 0.5, 1.0};
      double mean = 0, square = 0;
      for (const double r : rewards) mean += r / 3;
      for (const double r : rewards) square += (r - mean) * (r - mean);
      Json advantages = Json::array();
      for (const double r : rewards)
        advantages.push_back(Word(static_cast<float>((r - mean) / std::sqrt(square / 3))));
      questions.push_back(
          {{"question", fmt::format("q{}", q)}, {"rewards", rewards}, {"advantages", advantages}});
    }
    for (const char* name : {"rollout", "old_logprob", "actor"}) {
      paths[name] = HonestPath(k, name);
      paths[name]["version"] = k;
    }
    versions.push_back({{"version", k},
                        {"rollout_pid", 71},
                        {"engine_version", k},
                        {"trainer_deployed", theta(k)},
                        {"trainer_master", master(k)},
                        {"engine_held", theta(k)},
                        {"sampled_versions", Json::array({k})},
                        {"questions", questions},
                        {"paths", paths}});
    if (k == 2) break;
    events.push_back({{"event", "update"}, {"version", k}});
    events.push_back({{"event", "publish"}, {"version", k + 1}});
    Json parameters = Json::array();
    Json totals = {{"elements", 0},
                   {"gradient_nonzero", 0},
                   {"gradient_non_finite", 0},
                   {"master_changed", 0},
                   {"deployed_changed", 0}};
    for (const auto& [name, elements] : HonestParameters()) {
      Json p = {{"name", name},
                {"elements", elements},
                {"gradient_nonzero", elements - 1},
                {"gradient_non_finite", 0},
                {"master_changed", elements - 1},
                {"deployed_changed", elements / 4}};
      for (auto& [key, sum] : totals.items()) sum = sum.get<int64_t>() + p.at(key).get<int64_t>();
      parameters.push_back(std::move(p));
    }
    updates.push_back(
        {{"from", k},
         {"to", k + 1},
         {"trainer_pid", 72},
         {"ratio_not_one", 0},
         {"kl_coefficient", 0.0},
         {"entropy_coefficient", 0.0},
         {"lr", Word(0.001f)},
         {"skipped", false},
         {"cache_reset", true},
         {"master_before", master(k)},
         {"master_after", master(k + 1)},
         {"deployed_before", theta(k)},
         {"deployed_after", theta(k + 1)},
         {"moments_before", H(fmt::format("moments{}", k))},
         {"moments_after", H(fmt::format("moments{}", k + 1))},
         {"published", {{"version", k + 1}, {"sent", theta(k + 1)}, {"held", theta(k + 1)}}},
         {"parameters", parameters},
         {"totals", totals}});
  }
  events.push_back({{"event", "end"}, {"version", 2}});
  Json processes = Json::array();
  for (const auto& [name, pid] : {std::pair("rollout", 71), std::pair("trainer", 72)}) {
    processes.push_back({{"name", name},
                         {"pid", pid},
                         {"ended", true},
                         {"code", 0},
                         {"signal", 0},
                         {"flushed", true}});
  }
  return {{"entry", "tare rl run"},
          {"mode", "live"},
          {"recipe", RecipeJson(HonestTwoStepRecipe())},
          {"prior_receipt", nullptr},
          {"moments_recorded", true},
          {"processes", processes},
          {"identities", {{"rollout", HonestIdentity()}, {"trainer", HonestIdentity()}}},
          {"events", events},
          {"versions", versions},
          {"updates", updates}};
}

inline Json HonestC8() {
  return {{"schema", "tare.gate.C8/v1"},
          {"subject", HonestSubject()},
          {"kind", "E8"},
          {"task_scope", "loop"},
          {"plan", Json::array({"two-step loop"})},
          {"loop", HonestLoop()}};
}

}  // namespace tare::workflow
