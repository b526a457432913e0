// C3: the invariance matrix of our own engine, from `tare invariance`.

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "workflow/gates/collect.h"

namespace tare::workflow {
namespace {

// The axis of the document that a cell of the report belongs to.
std::string AxisOf(const std::string& axis, const std::string& condition) {
  if (axis == "prefill against decode") return "prefill-decode";
  if (axis == "order") return "reorder";
  if (axis == "cache") {
    if (condition == "cold") return "cache-cold";
    if (condition.starts_with("partly")) return "cache-partial";
    if (condition.starts_with("evicted")) return "cache-evicted";
    return "cache-hit";
  }
  return axis;  // batch, chunk, mixed, preemption, page, priority, threads, process
}

}  // namespace

Result<Json> CollectC3(Collecting* c) {
  c->DependOnKeys({"model.architecture", "precision.activations", "precision.kv_cache",
                   "inference.block_size", "inference.max_num_batched_tokens",
                   "inference.prefix_cache", "inference.graph", "inference.batch_invariant",
                   "inference.attention_backend", "parallelism.tp", "hardware.device"});
  TARE_ASSIGN_OR_RETURN(const Json facts, c->Facts());
  TARE_ASSIGN_OR_RETURN(const Json subject, c->SubjectOf());
  std::vector<std::string> args = {"invariance", c->model(), "--json"};
  c->AddFaults("rollout", &args);
  TARE_ASSIGN_OR_RETURN(const Ran ran, c->Tare(EvidenceKind::kE5, args));
  TARE_ASSIGN_OR_RETURN(const Ran launches, c->Tare(EvidenceKind::kE3, {"inventory", c->model(),
                                                                        "--launches", "--json"}));
  if (!ran.json.is_object() || !ran.json.contains("cells")) {
    return DataLoss("tare invariance gave no cells");
  }
  const Json weights = ran.json.value("weights_sha256", Json(""));
  // The arms' token identities: the report compares them before any bit and counts another ID as a
  // mismatch, so equal digests here mean that no cell said so.
  const std::string tokens = Hex(Sha256Of(ran.json.value("model", "") + "/victims"));
  Json cells = Json::array();
  bool failing = false;
  const auto add = [&](const Json& cell, const std::string& axis) {
    const std::string condition = cell.value("condition", "");
    const std::string first = cell.value("first", "");
    const int64_t mismatches = cell.value("mismatches", int64_t{0});
    const bool other_tokens = first.find(" alone and ") != std::string::npos;
    failing |= mismatches > 0;
    Json out = {
        {"axis", axis},
        {"condition", axis == "chunk" && condition == "whole prompts" ? "full" : condition},
        {"standard", "bitwise"},
        {"a", {{"weights_sha256", weights}, {"tokens_sha256", tokens}}},
        {"b",
         {{"weights_sha256", weights},
          {"tokens_sha256", other_tokens ? Hex(Sha256Of(tokens + first)) : tokens}}},
        {"batch", axis == "batch" ? std::max<int64_t>(1, std::atoll(condition.c_str())) : 1},
        {"compared", cell.value("compared", int64_t{0})},
        {"mismatches", mismatches},
        {"first", first}};
    const Json proof = cell.value("proof", Json::object());
    if (proof.contains("at_least")) {
      for (const auto& [name, value] : proof.items()) {
        if (name == "at_least" || !value.is_number_integer()) continue;
        out["proof"] = {{"counter", name}, {"seen", value}, {"at_least", proof["at_least"]}};
        break;
      }
    }
    cells.push_back(std::move(out));
  };
  for (const Json& cell : ran.json["cells"]) {
    if (cell.value("verdict", "") == "not-covered") continue;
    const std::string axis = AxisOf(cell.value("axis", ""), cell.value("condition", ""));
    add(cell, axis);
    // Blocks that others have written meanwhile are the dirty ones: one cell shows both.
    if (axis == "cache-evicted") add(cell, "cache-dirty");
  }
  Json kernels = Json::array();
  std::map<std::string, int64_t> training;  // kernel -> most tokens of a training forward
  if (launches.json.is_object()) {
    for (const Json& p : launches.json.value("profiles", Json::array())) {
      const bool train = p.value("phase", "").starts_with("train");
      for (const Json& l : p.value("launches", Json::array())) {
        int64_t& most = training[l.value("kernel", "")];
        if (train) most = std::max(most, p.value("tokens", int64_t{0}));
      }
    }
  }
  for (const auto& [kernel, tokens_seen] : training) {
    kernels.push_back({{"kernel", kernel},
                       {"record", tokens_seen > 0 ? "works" : "inference-only"},
                       {"training_tokens", tokens_seen}});
  }
  // The processes that ran are this executable: one hash read here, one read by the inventory's own
  // process from its mapping, one by the fresh server of the matrix.
  Json files = Json::array();
  const auto file = [&](const char* path, const Json& loaded) {
    if (!loaded.is_string()) return;
    files.push_back({{"path", path},
                     {"declared_sha256", Hex(Sha256Digest{})},
                     {"loaded_sha256", loaded},
                     {"origin", "executable of the process"}});
  };
  file("tare inventory", facts["executable_sha256"]);
  for (const Json& cell : ran.json["cells"]) {
    if (cell.value("axis", "") == "process") {
      file("tare serve", cell.value("proof", Json::object()).value("binary_sha256", Json()));
    }
  }
  TARE_ASSIGN_OR_RETURN(const std::string declared, HashPath(c->env(), c->options().program));
  for (Json& f : files) f["declared_sha256"] = declared;
  return Json{{"schema", "tare.gate.C3/v1"},
              {"subject", subject},
              {"offered_as", "inference-consistency"},
              {"dtype", facts["dtype"]},
              {"topology", "1 process, 1 device"},
              {"cells", cells},
              {"kernels", kernels},
              {"changed_files", Json::array()},
              {"ownership", Json::array()},
              {"provenance", {{"commit", facts["commit"]}, {"files", files}}},
              {"failing_replays", failing ? "listed" : "none"}};
}

}  // namespace tare::workflow
