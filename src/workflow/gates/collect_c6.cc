// Acts for C6: `tare backward --inventory`: which backward each launched operator has, what each
// reads, poisons between forward and backward, the scan for patched code; step times of both arms
// once a person has decided at C1 what they are held against.

#include <fmt/format.h>

#include <map>

#include "workflow/gates/collect.h"
#include "workflow/gates/collect_loop.h"

namespace tare::workflow {
namespace {

// Rows of the inventory of C0 that training runs, each cut by operator: one backward belongs to one
// operator.
Json ModulesOf(const Json& rows, const Json& by_row, const Json& operators) {
  std::map<std::string, const Json*> by_name;
  for (const Json& op : operators) by_name[op.at("name").get<std::string>()] = &op;
  Json modules = Json::array();
  const auto add = [&](const std::string& id, const std::string& op, const std::string& why) {
    const Json& o = *by_name.at(op);
    modules.push_back({{"module", id},
                       {"verdict", "reuse"},
                       {"rationale", why},
                       {"existing", op},
                       {"gradient", "exact"},
                       {"saved", o.at("saved")},
                       {"reads", o.at("reads")}});
  };
  for (const Json& row : rows) {
    const std::string id =
        row.at("id").get<std::string>() + " " + row.at("module").get<std::string>();
    const Json list = by_row.value(row.at("id").get<std::string>(), Json::array());
    for (const Json& name : list) {
      const std::string op = name.get<std::string>();
      if (!by_name.contains(op)) continue;  // has no gradient, or was not part of the walk
      add(id + ": " + op, op,
          fmt::format("the registry's backward of {}, of the contract {} that its forward ran", op,
                      by_name.at(op)->at("contract").get<std::string>().substr(0, 16)));
    }
  }
  return modules;
}

}  // namespace

Result<Json> CollectC6(Collecting* c) {
  c->DependOnKeys({"model.architecture", "precision.activations", "precision.gradients",
                   "training.route", "training.recompute", "hardware.device", "parallelism.tp",
                   "target.max_slowdown_percent"});
  TARE_ASSIGN_OR_RETURN(const Json subject, c->SubjectOf());
  TARE_ASSIGN_OR_RETURN(const Json c0, c->EvidenceOf("C0"));
  TARE_ASSIGN_OR_RETURN(const Json agreement, AgreementOf(c));
  TARE_ASSIGN_OR_RETURN(const Ran inventoried,
                        c->Tare(EvidenceKind::kE1, {"inventory", c->model(), "--json"}));
  std::vector<std::string> args = {"backward", c->model(), "--inventory", "--json"};
  if (!agreement.is_null()) args.push_back("--times");
  c->AddFaults("trainer", &args);
  TARE_ASSIGN_OR_RETURN(const Ran ran, c->Tare(EvidenceKind::kE7, args));
  try {
    const Json& facts = ran.json.at("inventory");
    const Json modules =
        ModulesOf(c0.at("rows"), inventoried.json.at("operators"), facts.at("operators"));
    Json inventory = Json::array(), registry = Json::array(), poisoned = Json::array(),
         times = Json::array();
    for (const Json& m : modules) inventory.push_back(m.at("module"));
    for (const Json& op : facts.at("operators")) registry.push_back(op.at("name"));
    for (const Json& p : facts.at("poisoned")) {
      poisoned.push_back({{"what", p.at("what")},
                          {"gradient_before", p.at("gradient_before")},
                          {"gradient_after", p.at("gradient_after")}});
    }
    if (!agreement.is_null()) {
      for (const std::string& topology : AgreedList(RecipeFromJson(agreement), "main_topologies")) {
        Json row = facts.at("times");
        row["topology"] = topology;
        times.push_back(std::move(row));
        break;  // one process and one device is what Tare runs; others stay unmeasured and fail
      }
    }
    Json doc = {{"schema", "tare.gate.C6/v1"},
                {"subject", subject},
                {"kind", "E7"},
                {"agreement", agreement},
                {"inventory", inventory},
                {"registry", registry},
                {"modules", modules},
                // Quantisers that the trace of C0 saw: rounding that a gradient would pass through.
                {"rounding_sites", c0.at("trace").at("quantized")},
                {"surrogates", Json::array()},
                {"poisoned", poisoned},
                {"absent", facts.at("absent")},
                {"weight_change_raises", facts.at("weight_change_raises")},
                {"graph",
                 {{"detached_outputs", facts.at("graph").at("detached_outputs").size()},
                  {"trained_value", facts.at("graph").at("trained_value")}}},
                {"production_scan", facts.at("scan")},
                {"denominator", "native training path"},
                {"step_times", times}};
    return doc;
  } catch (const nlohmann::json::exception& e) {
    return DataLoss("what the commands of C6 said cannot be put together: {}", e.what());
  }
}

}  // namespace tare::workflow
