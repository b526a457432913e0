// C2: the proxy. The smallest set of layers that keeps every feature is cut from the real
// checkpoint
// (`tare model proxy`); where nothing can be left out, the model is its own proxy. The coverage
// table is made of what `tare invariance` ran on that very proxy.

#include <fmt/format.h>

#include <algorithm>

#include "workflow/gates/c2.h"
#include "workflow/gates/collect.h"

namespace tare::workflow {
namespace {

constexpr double kLimitSeconds = 600;

std::vector<std::string> Texts(const Json& list) {
  std::vector<std::string> out;
  if (!list.is_array()) return out;
  for (const Json& item : list) {
    if (item.is_string()) out.push_back(item.get<std::string>());
  }
  return out;
}

std::vector<LayerShape> Shapes(const Json& list) {
  std::vector<LayerShape> out;
  for (const Json& l : list) {
    out.push_back({Texts(l.value("types", Json())), Texts(l.value("states", Json())),
                   Texts(l.value("shares", Json()))});
  }
  return out;
}

// The layer of the proxy that shows a feature, and the axis of the matrix that exercises it.
size_t LayerOf(const std::vector<LayerShape>& layers, const std::string& feature) {
  for (size_t l = 0; l < layers.size(); ++l) {
    const std::set<std::string> alone =
        FeaturesOf({layers.begin(), layers.begin() + static_cast<std::ptrdiff_t>(l + 1)});
    if (alone.contains(feature)) return l;
  }
  return layers.empty() ? 0 : layers.size() - 1;
}

}  // namespace

Result<Json> CollectC2(Collecting* c) {
  c->DependOnKeys({"model.architecture", "model.num_layers", "model.hidden_size",
                   "precision.activations", "precision.kv_cache", "parallelism.tp",
                   "parallelism.pp"});
  TARE_ASSIGN_OR_RETURN(const Json facts, c->Facts());
  TARE_ASSIGN_OR_RETURN(const Json subject, c->SubjectOf());
  const std::vector<LayerShape> full = Shapes(facts.value("layer_shapes", Json::array()));
  if (full.empty()) return DataLoss("tare inventory gave no layer shapes");
  const std::vector<size_t> chosen = ChooseLayers(full);
  std::string proxy = c->model();
  Json proxy_facts = facts;
  if (chosen.size() < full.size()) {
    TARE_ASSIGN_OR_RETURN(
        const Ran cut,
        c->Tare(EvidenceKind::kE1, {"model", "proxy", c->model(), "{out}/proxy", "--layers",
                                    fmt::format("{}", fmt::join(chosen, ",")), "--json"}));
    if (cut.exit_code != 0) return DataLoss("tare model proxy ended with {}", cut.exit_code);
    proxy = cut.out + "/proxy";
    TARE_ASSIGN_OR_RETURN(const Ran asked,
                          c->Tare(EvidenceKind::kE1, {"inventory", proxy, "--subject", "--json"}));
    if (!asked.json.is_object()) return DataLoss("tare inventory --subject gave no JSON object");
    proxy_facts = asked.json;
  }
  const int64_t begin = c->env()->MonotonicNs();
  TARE_ASSIGN_OR_RETURN(const Ran smoke,
                        c->Tare(EvidenceKind::kE5, {"invariance", proxy, "--max-batch", "8",
                                                    "--no-boundaries", "--json"}));
  const double seconds = static_cast<double>(c->env()->MonotonicNs() - begin) * 1e-9;
  // One test per axis of the matrix: it passed, failed, or was left out.
  std::map<std::string, std::string> tests;
  int64_t chunked = 0;
  for (const Json& cell : smoke.json.value("cells", Json::array())) {
    const std::string verdict = cell.value("verdict", "");
    if (verdict == "not-covered") continue;
    std::string& so_far = tests["invariance." + cell.value("axis", "")];
    if (so_far != "fail")
      so_far = verdict == "pass"   ? (so_far.empty() ? "pass" : so_far)
               : verdict == "fail" ? "fail"
                                   : "never-ran";
    const Json proof = cell.value("proof", Json::object());
    if (proof.contains("chunked_runs")) chunked += proof["chunked_runs"].get<int64_t>();
  }
  const std::vector<LayerShape> have = Shapes(proxy_facts.value("layer_shapes", Json::array()));
  const auto stack = [&](const Json& of, const std::vector<LayerShape>& layers) {
    Json list = Json::array();
    for (const LayerShape& l : layers) {
      list.push_back(Json{{"types", l.types}, {"states", l.states}, {"shares", l.shares}});
    }
    return Json{
        {"layers", list},
        {"geometry", of.value("geometry", Json::object())},
        {"shards", Json{{"tp", "1"}, {"heads_per_rank", of["geometry"].value("q_heads", "")}}},
        {"features", Json::array()}};
  };
  Json coverage = Json::array();
  for (const std::string& feature : FeaturesOf(have)) {
    const std::string axis = feature.starts_with("state:")  ? "invariance.chunk"
                             : feature.starts_with("pair:") ? "invariance.prefill against decode"
                                                            : "invariance.batch";
    const size_t layer = LayerOf(have, feature);
    const auto ran = tests.find(axis);
    coverage.push_back(Json{{"feature", feature},
                            {"layer", layer},
                            {"module", fmt::format("layers.{}", layer)},
                            {"test", axis},
                            {"proxy_sha256", proxy_facts["weights"]},
                            {"verdict", ran == tests.end() ? "never-ran" : ran->second}});
  }
  Json names = Json::array(), boundaries = Json::object();
  for (const auto& [name, verdict] : tests) names.push_back(name);
  for (const std::string& feature : FeaturesOf(have)) {
    if (feature.starts_with("state:")) boundaries[feature.substr(6)] = chunked;
  }
  TARE_ASSIGN_OR_RETURN(const std::string structure, CanonicalJson(facts["layer_shapes"]));
  Json full_json = stack(facts, full), proxy_json = stack(proxy_facts, have);
  full_json["name"] = facts["model"];
  full_json["structure_sha256"] = Hex(Sha256Of(structure));
  proxy_json["weights_sha256"] = proxy_facts["weights"];
  proxy_json["source_layers"] = chosen;
  proxy_json["weights_from_checkpoint"] = true;
  proxy_json["exceptions"] = Json::object();
  proxy_json["topology"] = "1 process, 1 device";
  proxy_json["dtype"] = facts["dtype"];
  return Json{
      {"schema", "tare.gate.C2/v1"},
      {"subject", subject},
      {"full", full_json},
      {"proxy", proxy_json},
      {"coverage", coverage},
      {"tests", names},
      {"uncovered", Json::array()},
      {"state_boundaries_crossed", boundaries},
      {"daily",
       Json{{"command", fmt::format("tare invariance {} --max-batch 8 --no-boundaries", proxy)},
            {"seconds", seconds},
            {"limit_seconds", kLimitSeconds},
            {"verdict", smoke.exit_code == 0 ? "pass" : "fail"},
            {"needs_full_weights", false}}}};
}

}  // namespace tare::workflow
