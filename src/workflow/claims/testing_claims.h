#pragma once

// Honest claims, one of each kind: complete documents that their judges pass. Tests break them.

#include <fmt/format.h>

#include <functional>
#include <map>
#include <string>

#include "base/sha256.h"
#include "workflow/claims/claim.h"
#include "workflow/testing_json.h"

namespace tare::workflow {

inline std::string ClaimHash(const std::string& of) { return Hex(Sha256Of(of)); }

inline Json Ref(const std::string& artifact, const std::string& kind, const Json& depends,
                const std::string& verdict = "pass",
                const std::string& time = "2026-11-29T12:00:00Z", bool fresh = true) {
  return {{"artifact", ClaimHash(artifact)},
          {"kind", kind},
          {"verdict", verdict},
          {"fresh", fresh},
          {"time", time},
          {"depends", depends}};
}

inline Json ClaimSubject() {
  return {{"model", "small"},
          {"weights", ClaimHash("weights")},
          {"recipe", ClaimHash("recipe")},
          {"image", "sha256:" + ClaimHash("image")},
          {"contracts", ClaimHash("contracts 2")}};
}

inline Json HonestBaselineChange() {
  const Json before = {{"contract:all", ClaimHash("contracts 1")}},
             after = {{"contract:all", ClaimHash("contracts 2")}};
  return {
      {"schema", "tare.claim.baseline-change/v1"},
      {"subject", ClaimSubject()},
      {"why", "attention accumulates in one order on both sides"},
      {"operators", Json::array({"attention"})},
      {"sides", {"rollout", "trainer"}},
      {"old",
       {{"contracts", ClaimHash("contracts 1")},
        {"baseline", Ref("baseline 1", "E10", before, "pass", "2026-11-01T00:00:00Z", false)},
        {"rollout", Ref("rollout 1", "E6", before, "pass", "2026-11-01T00:00:00Z", false)}}},
      {"new",
       {{"contracts", ClaimHash("contracts 2")},
        {"baseline", Ref("baseline 2", "E10", after)},
        {"rollout", Ref("rollout 2", "E6", after)}}},
      {"statement", kChangeSentence},
      {"delivery_notes", Json::array({kChangeSentence})},
      {"alignment",
       {{"rollout", ClaimHash("rollout 2")}, {"record", Ref("dual path", "E6", after)}}},
      {"regressions",
       {{"quality", Ref("quality", "E9", after)}, {"performance", Ref("pairs", "E10", after)}}},
      {"citations",
       {{{"what", "1,446 tokens, 0 differ"},
         {"about", "new"},
         {"record", Ref("dual path", "E6", after)}},
        {{"what", "was 1.26 of the peer"},
         {"about", "old"},
         {"record", Ref("baseline 1", "E10", before, "pass", "2026-11-01T00:00:00Z", false)}}}}};
}

inline Json HonestDefect() {
  const Json fixed = {{"tool:tare", ClaimHash("fixed program")},
                      {"weights:model", ClaimHash("weights")}};
  return {{"schema", "tare.claim.defect-closed/v1"},
          {"subject", ClaimSubject()},
          {"defect", "one token of theta1 differs"},
          {"found", Ref("failure", "E8", Json::object(), "fail", "2026-11-28T00:00:00Z", false)},
          {"fix",
           {{"commit", std::string(40, 'a')},
            {"time", "2026-11-29T08:00:00Z"},
            {"executable", ClaimHash("fixed program")}}},
          {"replay", Ref("replay", "E4", fixed)},
          {"loop", Ref("receipt", "E8", fixed)}};
}

inline Json HonestPreset() {
  const Json here = {{"weights:model", ClaimHash("weights")},
                     {"hardware:device", ClaimHash("device")}};
  return {{"schema", "tare.claim.preset/v1"},
          {"subject", ClaimSubject()},
          {"hardware", ClaimHash("device")},
          {"source", "a reference pull request"},
          {"settings",
           {{{"name", "logprob"},
             {"kind", "tolerance"},
             {"value", "0"},
             {"measurement", Ref("sweep", "E6", here)}},
            {{"name", "fp32 router"},
             {"kind", "switch"},
             {"value", "on"},
             {"measurement", Ref("router", "E3", here)}}}}};
}

inline Json HonestPathReuse() {
  const Json here = {{"weights:model", ClaimHash("weights")}};
  return {{"schema", "tare.claim.path-reuse/v1"},
          {"subject", ClaimSubject()},
          {"framework", "a framework"},
          {"path", "true-on-policy"},
          {"numbers", Ref("dual path", "E6", here)},
          {"step_time", Ref("steps", "E10", here)}};
}

inline Json HonestRouteCoverage() {
  const Json point = {{"tp", "2"}, {"cp", "1"},           {"ep", "1"},
                      {"pp", "1"}, {"recompute", "full"}, {"checkpoint", "sharded"}};
  return {{"schema", "tare.claim.route-coverage/v1"},
          {"subject", ClaimSubject()},
          {"route", "mlite"},
          {"because", ""},
          {"recipe", point},
          {"runs", Json::array({Json{
                       {"recipe", point},
                       {"record", Ref("run", "E8", {{"weights:model", ClaimHash("weights")}})}}})}};
}

inline Json HonestPlan() {
  return {{"schema", "tare.claim.plan/v1"},
          {"track", "consistency"},
          {"grants",
           {{"devices", Json::array({"cuda:0"})},
            {"nodes", Json::array({"a"})},
            {"publish", Json::array()},
            {"own_jobs", Json::array({"4711"})}}},
          {"budget", {{"nodes", 1}, {"devices", 1}}},
          {"actions",
           {{{"do", "use-node"}, {"what", "a"}},
            {{"do", "use-device"}, {"what", "cuda:0"}},
            {{"do", "run-command"}, {"what", "tare invariance"}},
            {{"do", "stop-job"}, {"what", "4711"}}}}};
}

inline Json HonestReplayClaim() {
  const std::string batch = ClaimHash("batch");
  const Json on = {{"tokens:batch", batch}};
  return {{"schema", "tare.claim.replay/v1"},
          {"original",
           {{"record", Ref("failure", "E6", on, "fail")},
            {"batch", batch},
            {"valid_tokens", 47},
            {"mismatches", 3}}},
          {"replays",
           {{{"arms", "A/C"},
             {"batch", batch},
             {"compared", 47},
             {"mismatches", 3},
             {"mismatching_tokens", {"s0:4", "s0:9", "s2:1"}},
             {"record", Ref("replay", "E4", on, "fail")}},
            {{"arms", "A/A"},
             {"batch", batch},
             {"compared", 47},
             {"mismatches", 0},
             {"mismatching_tokens", Json::array()},
             {"record", Ref("self", "E4", on)}}}}};
}

inline Json HonestEngineCases() {
  Json cases = Json::array();
  for (const char* axis :
       {"composition", "prefill-decode", "chunk-boundary", "cache-graph", "parallelism"}) {
    cases.push_back(
        {{"axis", axis}, {"topology", "tp4"}, {"record", Ref(axis, "E5", Json::object())}});
  }
  return {{"schema", "tare.claim.engine-cases/v1"}, {"recipe_topology", "tp4"}, {"cases", cases}};
}

inline Json ProbeOf(const std::string& layer, const std::string& token,
                    const std::string& operand = "output", const std::string& schedule = "alone") {
  return {{"layer", layer}, {"token", token}, {"operand", operand}, {"scheduling", schedule}};
}
inline Json HonestProbe() {
  const auto run = [](const Json& probe, const Json& candidates) {
    return Json{{"probe", probe},
                {"candidates", candidates},
                {"record", Ref("probe", "E4", Json::object(), "inconclusive")}};
  };
  return {{"schema", "tare.claim.probe/v1"},
          {"runs",
           {run(ProbeOf("15", "40"), {"scan", "conv", "rope"}),
            run(ProbeOf("7", "40"), {"conv", "rope"}), run(ProbeOf("7", "40"), {"conv", "rope"})}},
          {"next", ProbeOf("7", "3")}};
}

inline Json HonestOperatorCase() {
  const Json rows = {{"sha256", ClaimHash("x")},
                     {"dtype", "bf16"},
                     {"shape", {4, 64}},
                     {"strides", {192, 1}}},
             weight = {{"sha256", ClaimHash("w")},
                       {"dtype", "bf16"},
                       {"shape", Json::array({64})},
                       {"strides", Json::array({1})}};
  return {{"schema", "tare.claim.operator-case/v1"},
          {"operator", "rmsnorm"},
          {"cases", Json::array({Json{{"name", "rows inside a wider buffer"},
                                      {"capture", Ref("dump", "E3", Json::object())},
                                      {"inputs",
                                       {{"x", {{"captured", rows}, {"executed", rows}}},
                                        {"w", {{"captured", weight}, {"executed", weight}}}}},
                                      {"compared", 256},
                                      {"mismatches", 0}}})}};
}

inline Json HonestFirstCause() {
  const auto op = [](const char* name, int64_t layer, int64_t first) {
    return Json{{"operator", name},
                {"layer", layer},
                {"positions_compared", 41},
                {"first_difference", first}};
  };
  return {{"schema", "tare.claim.first-cause/v1"},
          {"offered_as", "cause"},
          {"tokens", 41},
          {"blamed", {{"operator", "conv"}, {"layer", 2}}},
          {"operators", {op("norm", 2, -1), op("conv", 2, 3), op("scan", 2, 3), op("norm", 3, 3)}},
          {"record", Ref("dump", "E4", Json::object())}};
}

inline Json CountsOf(int64_t compared, int64_t mismatches, const std::string& first = "") {
  return {{"compared", compared}, {"mismatches", mismatches}, {"first", first}};
}

inline Json HonestEqualOutput() {
  return {
      {"schema", "tare.claim.equal-output/v1"},
      {"basis", "bits"},
      {"launches",
       {{"a", {{"grid", "8x1"}, {"tile", "64x64"}}}, {"b", {{"grid", "8x1"}, {"tile", "64x64"}}}}},
      {"formulas", {{"a", "x w"}, {"b", "x w"}}},
      {"inputs", {{"a", ClaimHash("x")}, {"b", ClaimHash("x")}}},
      {"outputs", CountsOf(4096, 0)}};
}

inline Json HonestOneRecurrence() {
  const Json side = {{"chunk_grid", "64"}, {"boundary_state", "f32"}, {"gate_order", "before add"}};
  return {{"schema", "tare.claim.one-recurrence/v1"},
          {"switches", Json::array()},
          {"sides", {{"a", side}, {"b", side}}},
          {"outputs", CountsOf(4096, 0)}};
}

inline Json HonestQuantisedView() {
  Json versions = Json::array();
  for (int v = 0; v < 3; ++v) {
    const std::string theta = "theta" + std::to_string(v);
    const std::string bytes = ClaimHash(theta + " bytes"), scales = ClaimHash(theta + " scales");
    versions.push_back(
        {{"version", v},
         {"weights", ClaimHash(theta)},
         {"trainer", {{"bytes", bytes}, {"scales", scales}}},
         {"engine", {{"bytes", bytes}, {"scales", scales}, {"read_from", "process"}}},
         {"recomputed", {{"weights", ClaimHash(theta)}, {"bytes", bytes}, {"scales", scales}}}});
  }
  return {{"schema", "tare.claim.quantised-view/v1"},
          {"format", "e4m3, blocks of 128x128"},
          {"versions", versions}};
}

inline Json HonestRewrite() {
  return {{"schema", "tare.claim.rewrite/v1"},
          {"change", "round once more before the add"},
          {"replaces", "one fused add"},
          {"proof",
           {{"kind", "exhaustive"},
            {"inputs", 65536},
            {"domain", 65536},
            {"text", ""},
            {"tests", Json::array({"Cast.EveryPattern"})},
            {"record", Ref("every pattern", "E2", Json::object())}}},
          {"sample", CountsOf(4096, 0)}};
}

inline Json HonestCallRecord() {
  const Json call = {{"kernel", ClaimHash("kernel")},
                     {"compile_boundary", "opaque"},
                     {"arguments", {{"scale", "0x3e000000"}, {"causal", "true"}}},
                     {"layout", {{"q", "bf16 [4,9,64] strides [576,64,1]"}}},
                     {"stream_order", {"rope", "attention"}}};
  return {{"schema", "tare.claim.call-record/v1"}, {"name", "attention"}, {"a", call}, {"b", call}};
}

inline std::map<std::string, Json> HonestClaims() {
  return {{"baseline-change", HonestBaselineChange()},
          {"defect-closed", HonestDefect()},
          {"preset", HonestPreset()},
          {"path-reuse", HonestPathReuse()},
          {"route-coverage", HonestRouteCoverage()},
          {"plan", HonestPlan()},
          {"replay", HonestReplayClaim()},
          {"engine-cases", HonestEngineCases()},
          {"probe", HonestProbe()},
          {"operator-case", HonestOperatorCase()},
          {"first-cause", HonestFirstCause()},
          {"equal-output", HonestEqualOutput()},
          {"one-recurrence", HonestOneRecurrence()},
          {"quantised-view", HonestQuantisedView()},
          {"rewrite", HonestRewrite()},
          {"call-record", HonestCallRecord()}};
}

// What a judgement found.
inline std::string Faults(const GateJudgement& j) {
  std::string out;
  for (const GateFinding& f : j.findings) {
    if (f.verdict != Verdict::kPass)
      out += fmt::format("{} {} {}: {}\n", f.row, VerdictName(f.verdict), f.reason, f.detail);
  }
  return out;
}

}  // namespace tare::workflow
