#include "workflow/gates/contract_check.h"

#include <fmt/format.h>

namespace tare::workflow {
namespace {

// Places of evidence documents that speak of a key. "*" as gate: every document.
struct Place {
  std::string_view gate, pointer, key;
};
constexpr Place kPlaces[] = {
    {"*", "/subject/weights", "weights.sha256"},
    {"C1", "/recipe/precision/weights", "precision.weights"},
    {"C1", "/recipe/precision/activations", "precision.activations"},
    {"C1", "/recipe/precision/kv_cache", "precision.kv_cache"},
    {"C1", "/recipe/parallelism/tp", "parallelism.tp"},
    {"C1", "/recipe/parallelism/pp", "parallelism.pp"},
    {"C1", "/recipe/parallelism/cp", "parallelism.cp"},
    {"C1", "/recipe/parallelism/ep", "parallelism.ep"},
    {"C1", "/recipe/parallelism/dp", "parallelism.dp"},
    {"C1", "/recipe/standard/kind", "target.consistency"},
    {"C1", "/live/precision/weights", "precision.weights"},
    {"C1", "/live/precision/activations", "precision.activations"},
    {"C1", "/live/precision/kv_cache", "precision.kv_cache"},
    {"C3", "/dtype", "precision.activations"},
    {"C5", "/contract/standard", "target.consistency"},
};

std::string Plain(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

}  // namespace

std::vector<ContractChange> ContractChanges(const TaskConfig& user, const Json& evidence) {
  std::vector<ContractChange> out;
  const std::string schema = evidence.is_object() && evidence.value("schema", Json()).is_string()
                                 ? evidence["schema"].get<std::string>()
                                 : std::string();
  for (const Place& p : kPlaces) {
    if (p.gate != "*" && schema != fmt::format("tare.gate.{}/v1", p.gate)) continue;
    const std::string_view text = user.Text(p.key);
    const Json::json_pointer at{std::string(p.pointer)};
    if (text.empty() || !evidence.contains(at)) continue;
    const Result<Json> wanted = ParseJson(text);
    if (!wanted.ok() || *wanted == evidence.at(at)) continue;
    out.push_back({std::string(p.key), Plain(*wanted), Plain(evidence.at(at))});
  }
  return out;
}

std::vector<GateFinding> ContractFindings(const TaskConfig& user, const Json& evidence) {
  std::vector<GateFinding> out;
  for (const ContractChange& c : ContractChanges(user, evidence)) {
    out.push_back(FindingOf("GEN-04", reason::kContractChanged,
                            fmt::format("{}: the user asks for {}, the evidence is of {}", c.key,
                                        Printable(c.user), Printable(c.evidence))));
  }
  return out;
}

std::string_view ContractPart(std::string_view key) {
  if (key.starts_with("model.") || key == "weights.sha256" || key == "weights.dtype" ||
      key == "weights.quantization") {
    return "model";
  }
  if (key.starts_with("precision.")) return "precision";
  if (key.starts_with("parallelism.")) return "parallelism";
  return key.starts_with("target.") ? "target" : "";
}

std::vector<ContractChange> UnrecordedChanges(const TaskConfig& recorded, const TaskConfig& now) {
  std::vector<ContractChange> out;
  for (const KeySpec& spec : AllKeys()) {
    if (ContractPart(spec.key).empty() || recorded.KeyDigest(spec.key) == now.KeyDigest(spec.key))
      continue;
    const auto text = [&](const TaskConfig& c) {
      const std::string_view t = c.Text(spec.key);
      return t.empty() ? std::string("unset") : std::string(t);
    };
    out.push_back({std::string(spec.key), text(recorded), text(now)});
  }
  return out;
}

}  // namespace tare::workflow
