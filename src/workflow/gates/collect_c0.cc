// C0: the inventory of the checkpoint, and the route that follows from it.

#include <fmt/format.h>

#include "workflow/gates/c0.h"
#include "workflow/gates/collect.h"

namespace tare::workflow {

Result<Json> CollectC0(Collecting* c) {
  c->DependOnKeys({"model.architecture", "model.num_layers", "weights.dtype",
                   "inference.implementation", "inference.batch_invariant", "training.route",
                   "target.consistency", "hardware.device", "parallelism.tp", "parallelism.pp"});
  TARE_ASSIGN_OR_RETURN(const Json facts, c->Facts());
  TARE_ASSIGN_OR_RETURN(const Json subject, c->SubjectOf());
  TARE_ASSIGN_OR_RETURN(const Ran ran,
                        c->Tare(EvidenceKind::kE1, {"inventory", c->model(), "--json"}));
  if (!ran.json.is_object() || !ran.json.contains("rows") || !ran.json.contains("trace")) {
    return DataLoss("tare inventory gave no inventory");
  }
  TARE_ASSIGN_OR_RETURN(const TaskView view, ReadTask(c->env(), c->options().task));
  const TaskConfig* config = view.state.config() ? &view.state.config()->config : nullptr;
  const auto text = [&](const char* key, const char* otherwise) {
    const std::string value = config == nullptr ? "" : std::string(config->Text(key));
    return value.empty() ? std::string(otherwise) : value;
  };
  int64_t missing = 0;
  for (const Json& row : ran.json["rows"]) missing += row.value("backward", "") == "missing";
  const bool invariant = text("inference.batch_invariant", "true") == "true";
  const std::string device = config == nullptr ? "cpu" : config->String("hardware.device");
  const Json identity = ExecutionIdentity(c->env(), {}, {});
  const std::string hardware =
      identity.value("cpu", "unknown") + "; " + identity.value("kernel", "");
  // The route is the user's where task.toml names one; what it needs is read from the inventory.
  const std::string route = config == nullptr || config->String("training.route").empty()
                                ? std::string("tare")
                                : config->String("training.route");
  Json rejected = Json::object();
  for (const char* other : {"mlite", "fsdp2", "megatron-bridge"}) {
    if (route == other) continue;
    rejected[other] = route == "tare"
                          ? fmt::format(
                                "the user's route is Tare's own trainer, which shares the "
                                "inference forward; {} missing backwards call for no other",
                                missing)
                          : fmt::format("{} is the user's route and runs the model", route);
  }
  Json ids = Json::array();
  for (const Json& row : ran.json["rows"]) ids.push_back(row.value("id", ""));
  return Json{
      {"schema", "tare.gate.C0/v1"},
      {"subject", subject},
      {"inputs",
       {{"checkpoint", {{"name", facts["source"]}, {"sha256", facts["weights"]}}},
        {"implementation",
         {{"name", "tare"}, {"sha256", facts["executable_sha256"]}, {"commit", facts["commit"]}}},
        {"target", {{"batch_invariant", invariant ? "1" : "0"}}},
        {"hardware",
         {{"device", device.empty() ? "cpu" : device},
          {"descriptor", hardware},
          {"sha256", Hex(Sha256Of(hardware))}}}}},
      {"tensors", ran.json["tensors"]},
      {"trace", ran.json["trace"]},
      {"rows", ran.json["rows"]},
      {"route",
       {{"chosen", route},
        {"answers",
         {{"batch_invariance_needed", invariant ? "yes" : "no"},
          {"missing_backwards", std::to_string(missing)},
          {"parallelism",
           fmt::format("tp{} pp{}", text("parallelism.tp", "1"), text("parallelism.pp", "1"))}}},
        {"unsupported", Json::object()},
        {"rejected", rejected},
        {"rationale",
         {{"text", fmt::format("{} rows, {} missing backwards; the inference forward is reused",
                               ids.size(), missing)},
          {"rows", ids},
          {"inventory_sha256", InventoryDigest(ran.json["rows"])}}}}}};
}

}  // namespace tare::workflow
