// C4: launches of prefill, decode and training at N, 2N and 4N tokens, from `tare inventory
// --launches`. A CPU has no timeline and no graph, which the document says.

#include <fmt/format.h>

#include "workflow/gates/collect.h"

namespace tare::workflow {

Result<Json> CollectC4(Collecting* c) {
  c->DependOnKeys({"model.architecture", "model.hidden_size", "precision.activations",
                   "inference.graph", "inference.max_num_batched_tokens", "hardware.device",
                   "training.recompute"});
  // Fixed before the profile is taken: a fused layer of this engine launches below 30 operators, a
  // training step with its backward about four times that.
  const std::string fixed = c->Now();
  constexpr int64_t kLaunchesPerLayer = 160;
  TARE_ASSIGN_OR_RETURN(const Json facts, c->Facts());
  TARE_ASSIGN_OR_RETURN(const Json subject, c->SubjectOf());
  TARE_ASSIGN_OR_RETURN(const Ran ran, c->Tare(EvidenceKind::kE10,
                                               {"inventory", c->model(), "--launches", "--json"}));
  if (!ran.json.is_object() || !ran.json.contains("profiles")) {
    return DataLoss("tare inventory --launches gave no profiles");
  }
  TARE_ASSIGN_OR_RETURN(const std::string raw, CanonicalJson(ran.json["profiles"]));
  Json profiles = Json::array();
  for (const Json& p : ran.json["profiles"]) {
    Json launches = Json::array();
    for (const Json& l : p["launches"]) {
      launches.push_back(
          {{"site", l["op"].get<std::string>() + "/" + l["kernel"].get<std::string>()},
           {"op", l["op"]},
           {"count", l["count"]}});
    }
    profiles.push_back({{"id", p["id"]},
                        {"phase", p["phase"]},
                        {"device", "cpu"},
                        {"time", c->Now()},
                        {"raw_sha256", Hex(Sha256Of(raw))},
                        {"weights_sha256", facts["weights"]},
                        {"tokens", p["tokens"]},
                        {"chunks", p["chunks"]},
                        {"layers", facts["layers"]},
                        {"hidden", facts["hidden"]},
                        {"launches", launches},
                        {"host_measured", false},
                        {"host_gaps", Json::array()},
                        {"synchronisations", Json::array()},
                        {"repeated", Json::array()},
                        {"steady_allocations", ran.json["steady_allocation_bytes"]},
                        {"workspaces", Json::array()}});
  }
  return Json{
      {"schema", "tare.gate.C4/v1"},
      {"subject", subject},
      {"model",
       {{"hidden", facts["hidden"]},
        {"dtype", facts["dtype"]},
        {"topology", "1 process, 1 device"}}},
      {"training_wired", true},
      {"limits",
       {{"host_gap_us", 100.0}, {"launches_per_layer", kLaunchesPerLayer}, {"fixed", fixed}}},
      {"profiles", profiles},
      {"graph",
       {{"used", "no"},
        {"reason", "the CPU engine launches directly; it has no graph to capture"},
        {"eager_sha256", ""},
        {"replay_sha256", ""},
        {"captured", false},
        {"inputs_changed", false},
        {"fallback", false},
        {"stale_pointers", false},
        {"replays", 0}}},
      {"binary_sha256", facts["executable_sha256"]},
      {"defects", Json::array()}};
}

}  // namespace tare::workflow
