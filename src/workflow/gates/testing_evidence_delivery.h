#pragma once

// The second half of the honest task: the entry gate C9 and the delivery C10. `digests` name what
// they refer to (SHA-256 of the evidence of other gates, or stand-ins where no ledger is involved).

#include "workflow/gates/testing_evidence.h"

namespace tare::workflow {

// SHA-256 of the evidence of a gate, and who recorded it when; a test with a ledger gives the real
// ones.
struct HonestRef {
  std::string sha256, owner = "ann", time = "2026-01-02T03:04:05Z";
};
using HonestRefs = std::map<std::string, HonestRef>;  // "C1" ... "C9"; "stage 1", ...
inline HonestRef RefOf(const HonestRefs& refs, const std::string& name) {
  const auto it = refs.find(name);
  return it == refs.end() ? HonestRef{H("evidence " + name)} : it->second;
}

inline Json HonestScale(int layers, int length, int concurrency, int parallelism) {
  return {{"layers", layers},
          {"length", length},
          {"concurrency", concurrency},
          {"parallelism", parallelism}};
}

inline Json HonestC9(const HonestRefs& refs = {}) {
  Recipe reference = HonestFormalRecipe();
  reference["lr"] = "0.01";
  reference["log_level"] = "info";
  reference.erase("checkpoint_restore");
  Json differences = Json::array(), entry = Json::array(), counters = Json::object(),
       restore = Json::object(), stages = Json::array();
  for (const RecipeDifference& d : DiffRecipes(reference, HonestFormalRecipe())) {
    differences.push_back({{"key", d.key},
                           {"change", d.change},
                           {"class", d.key_class},
                           {"reference", d.reference},
                           {"ours", d.ours}});
  }
  for (const char* gate : {"C1", "C3", "C4", "C5", "C6", "C7", "C8"}) {
    const HonestRef ref = RefOf(refs, gate);
    entry.push_back({{"row", gate},
                     {"state", "pass"},
                     {"evidence", ref.sha256},
                     {"owner", ref.owner},
                     {"time", ref.time}});
  }
  int64_t at = 3;
  for (const char* name : {"mixed_steps", "cache_hits", "updates"}) {
    counters[name] = {{"before", at}, {"after", at + 17}, {"delta", 17}};
    at += 5;
  }
  for (const char* name : {"masters", "first moments", "second moments", "step count", "rng",
                           "data position", "logprobs after a step"}) {
    restore[name] = {{"unbroken", H(name)}, {"restored", H(name)}};
  }
  const Json scales[] = {HonestScale(4, 64, 6, 1), HonestScale(30, 64, 6, 1),
                         HonestScale(30, 512, 6, 1)};
  const char* axes[] = {"layers", "length"};
  for (int i = 0; i < 2; ++i) {
    stages.push_back({{"axis", axes[i]},
                      {"from", scales[i]},
                      {"to", scales[i + 1]},
                      {"verdict", "pass"},
                      {"evidence", RefOf(refs, fmt::format("stage {}", i + 1)).sha256}});
  }
  return {
      {"schema", "tare.gate.C9/v1"},
      {"subject", HonestSubject()},
      {"kind", "E8"},
      {"agreement", RecipeJson(HonestAgreement())},
      {"inputs",
       {{"launch_script", H("launch.sh")},
        {"image", HonestImage()},
        {"code_version", HonestCommit("code")},
        {"recipe", RecipeJson(HonestFormalRecipe())}}},
      {"reference", {{"name", "verl #7688"}, {"recipe", RecipeJson(reference)}}},
      {"differences", differences},
      {"open_questions", Json::array({"none"})},
      {"smoke",
       {{"launch_script", H("launch.sh")},
        {"image", HonestImage()},
        {"recipe", RecipeId(HonestTwoStepRecipe())},
        {"code_version", HonestCommit("code")},
        {"verdict", "pass"},
        {"receipt", RefOf(refs, "C8").sha256}}},
      {"six",
       {{"data", Json::array({"task"})},
        {"length", Json::array({"max_tokens"})},
        {"batch", Json::array({"batch_prompts", "group"})},
        {"parallelism", Json::array({"parallelism"})},
        {"precision",
         Json::array({"VLLM_BATCH_INVARIANT", "graph", "precision", "prefix_caching", "profile"})},
        {"optimizer", Json::array({"checkpoint_restore", "loss", "lr", "optimizer", "steps"})}}},
      {"confirmation",
       {{"person", "bob"}, {"author", "ann"}, {"recipe", RecipeId(HonestFormalRecipe())}}},
      {"entry_table", entry},
      {"c5",
       {{"verdict", "pass"}, {"artifact", RefOf(refs, "C5").sha256}, {"image", HonestImage()}}},
      {"two_step",
       {{"recipe", RecipeJson(HonestTwoStepRecipe())}, {"receipt", RefOf(refs, "C8").sha256}}},
      {"escalation", {{"proxy", scales[0]}, {"target", scales[2]}, {"stages", stages}}},
      {"counters", counters},
      {"restore", restore},
      {"failures", Json::array()}};
}

inline Json HonestPull(const std::string& repository, const std::string& branch, Json files) {
  Json diff = Json::array();
  for (const Json& f : files) diff.push_back(f.at("path"));
  return {{"repository", repository},
          {"branch", branch},
          {"head", HonestCommit(repository)},
          {"merge_base", HonestCommit(repository + " base")},
          {"diff_base", HonestCommit(repository + " base")},
          {"files", std::move(files)},
          {"diff", diff}};
}
inline Json HonestFile(const std::string& path, const std::string& file_class) {
  return {{"path", path}, {"class", file_class}, {"justification", ""}};
}

// Six pairs in balanced order; BI=1 takes about 8 % more time, each pair its own workload.
inline Json HonestPoint(int concurrency, const std::string& commits) {
  Json pairs = Json::array();
  BenchPoint point;
  for (int i = 0; i < 6; ++i) {
    Json arms[2];
    BenchPair pair;
    for (int on = 0; on < 2; ++on) {
      const int64_t requests = concurrency * 4, output = requests * 1024;
      const int64_t duration = (on == 0 ? 10'000'000 : 10'800'000) + 20'011 * (i % 3) + 5'003 * on;
      BenchArm& arm = on == 0 ? pair.off : pair.on;
      arm.output_tokens = output;
      arm.duration_us = duration;
      arms[on] = {{"switch_value", std::to_string(on)},
                  {"kernels", H(on == 0 ? "kernels off" : "kernels on")},
                  {"image", HonestImage()},
                  {"commits", commits},
                  {"workload", H(fmt::format("workload {} {}", concurrency, i))},
                  {"node", "node-7"},
                  {"requests", requests},
                  {"completed", requests},
                  {"failed", 0},
                  {"input_tokens", requests * 8192},
                  {"output_tokens", output},
                  {"cache_hits", 0},
                  {"served_before", 0},
                  {"loaded_samples", 0},
                  {"duration_us", duration},
                  {"output_throughput_micro", std::llround(static_cast<double>(output) /
                                                           static_cast<double>(duration) * 1e12)}};
    }
    pairs.push_back({{"order", i == 0 || i == 3 || i == 4 ? "off first" : "on first"},
                     {"off", arms[0]},
                     {"on", arms[1]}});
    point.pairs.push_back(pair);
  }
  const Slowdown s = SlowdownOf(point);
  return {{"concurrency", concurrency},
          {"pairs", pairs},
          {"median_slowdown_ppm", std::llround(s.median * 1e6)},
          {"upper_slowdown_ppm", std::llround(s.upper * 1e6)}};
}

inline Json HonestC10(const HonestRefs& refs = {}) {
  const std::string vllm = "vllm-project/vllm", megatron = "NVIDIA/Megatron-LM",
                    verl = "verl-project/verl";
  Recipe built, baseline = HonestFormalRecipe();
  Json trees = Json::object(), regressions = Json::array();
  for (const std::string& repo : {vllm, megatron, verl}) {
    built[repo] = HonestCommit(repo);
    trees[repo] = H("tree of " + repo);
  }
  regressions.push_back({{"change", HonestCommit(vllm)},
                         {"touches", Json::array({"inference", "training forward", "gradients"})},
                         {"ran",
                          {{"C3", RefOf(refs, "C3").sha256},
                           {"C5", RefOf(refs, "C5").sha256},
                           {"C7", RefOf(refs, "C7").sha256}}}});
  regressions.push_back(
      {{"change", HonestCommit(megatron)},
       {"touches", Json::array({"training forward", "gradients"})},
       {"ran", {{"C5", RefOf(refs, "C5").sha256}, {"C7", RefOf(refs, "C7").sha256}}}});
  regressions.push_back({{"change", HonestCommit(verl)},
                         {"touches", Json::array({"bench"})},
                         {"ran", Json::object()}});
  baseline["VLLM_BATCH_INVARIANT"] = "0";
  const auto spot = [](const char* kernel, const char* shape) {
    return Json{{"kernel", kernel}, {"shape", shape}, {"dtype", "bf16"}, {"layout", "row"}};
  };
  const int64_t ns[] = {200 * 3000, 100 * 2000}, other = 200'000, total = ns[0] + ns[1] + other;
  const auto ppm = [&](int64_t time) {
    return static_cast<int64_t>(static_cast<double>(time) * 1e6 / static_cast<double>(total));
  };
  Json linear = spot("bi_linear", "16x576"), attention = spot("flash_attn_split", "16x9x64");
  Json micro = Json::array();
  for (const auto& [at, elements] : {std::pair(linear, 16 * 576), std::pair(attention, 9216)}) {
    Json m = at;
    m["compared"] = elements;
    m["mismatches"] = 0;
    m["before_ns"] = {{"values", {4000, 4020, 3990}}, {"median", 4000}, {"sum", 12010}};
    m["after_ns"] = {{"values", {3000, 3010, 2990}}, {"median", 3000}, {"sum", 9000}};
    micro.push_back(m);
  }
  linear.update({{"calls", 200}, {"ns_per_call", 3000}, {"share_ppm", ppm(ns[0])}});
  attention.update({{"calls", 100}, {"ns_per_call", 2000}, {"share_ppm", ppm(ns[1])}});
  const Json kernels = {
      {{"name", "bi_linear"},
       {"technology", "cuda"},
       {"source", fmt::format("{}@{}:csrc/bi_linear.cu", vllm, HonestCommit(vllm))},
       {"arms", Json::array({"BI=1"})},
       {"new", true}},
      {{"name", "flash_attn_split"},
       {"technology", "existing"},
       {"source", fmt::format("{}@{}:csrc/flash_attn.cu", vllm, HonestCommit(vllm))},
       {"arms", Json::array({"BI=0", "BI=1"})},
       {"new", false}}};
  Json acceptance = Json::object();
  for (const char* item : {"agreed steps", "full model", "paired performance", "quality evaluation",
                           "restore lifecycle"}) {
    acceptance[item] = "pass";
  }
  return {
      {"schema", "tare.gate.C10/v1"},
      {"subject", HonestSubject()},
      {"kind", "E8"},
      {"agreement", RecipeJson(HonestAgreement())},
      {"inputs",
       {{"entry_gate",
         {{"verdict", "pass"}, {"image", HonestImage()}, {"evidence", RefOf(refs, "C9").sha256}}},
        {"recipe", RecipeJson(HonestFormalRecipe())},
        {"baseline",
         {{"id", RecipeId(baseline)},
          {"recipe", RecipeJson(baseline)},
          {"image", HonestImage()},
          {"patched", false},
          {"confirmed_by", "carol"}}}}},
      {"manifest",
       {{"pull_requests",
         Json::array(
             {HonestPull(vllm, "main",
                         Json::array({HonestFile("csrc/bi_linear.cu", "source"),
                                      HonestFile("vllm/envs.py", "source")})),
              HonestPull(megatron, "dev",
                         Json::array({HonestFile("megatron/lite/ops.py", "source")})),
              HonestPull(verl, "main",
                         Json::array({HonestFile("recipe/bi/run.sh", "recipe"),
                                      HonestFile("docker/Dockerfile.bi", "image script")}))})},
        {"image",
         {{"digest", HonestImage()},
          {"built_from", RecipeJson(built)},
          {"in_image", trees},
          {"commit_tree", trees},
          {"dirty", false},
          {"overlay", Json::array()}}},
        {"baseline", RecipeId(baseline)},
        {"recipe", RecipeId(HonestFormalRecipe())},
        {"receipts", Json::array({RefOf(refs, "C5").sha256, RefOf(refs, "C8").sha256})},
        {"statement",
         "This is a delivery agreement for the named model, recipe, precision, hardware and image; "
         "it is no claim about all RL systems."}}},
      {"profile",
       {{"arm", "BI=1"},
        {"hot_spots", Json::array({linear, attention})},
        {"other_ns", other},
        {"other_ppm", ppm(other)}}},
      {"kernels", kernels},
      {"scan",
       {{"scanned", Json::array({"sources", "wheels", "loaded modules", "kernel caches"})},
        {"triton", Json::array()}}},
      {"micro", micro},
      {"regressions", regressions},
      {"gates", Json::array({"delivery manifest", "pairing results", "loop receipt"})},
      {"acceptance", acceptance},
      {"loop", HonestLoop()},
      {"pairing",
       {{"node", "node-7"},
        {"points",
         Json::array({HonestPoint(1, RecipeId(built)), HonestPoint(4, RecipeId(built))})}}}};
}

}  // namespace tare::workflow
