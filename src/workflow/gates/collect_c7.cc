// Acts for C7: tolerances first, as a run of their own; then `tare backward --gradients`, and with
// a text the three arms of finetuning from `tare train`.

#include <fmt/format.h>

#include <cmath>

#include "workflow/gates/collect.h"
#include "workflow/gates/collect_loop.h"
#include "workflow/layout.h"

namespace tare::workflow {
namespace {

constexpr int64_t kMarginPpm = 50'000;
constexpr const char* kDeclared =
    "mean negative logprob of a held-out token after the last step: a diagnosis, no quality";

Json Evaluation() { return {{"declared", kDeclared}, {"margin_ppm", kMarginPpm}}; }

// The three arms over one text, and their records.
Result<Json> Control(Collecting* c, const Json& subject) {
  TARE_ASSIGN_OR_RETURN(const bool mini, IsMini(c));
  Json arms = Json::object();
  for (const char* arm : {"production", "surrogate", "native"}) {
    std::vector<std::string> args = {"train",
                                     c->model(),
                                     c->options().text,
                                     "--arm",
                                     arm,
                                     "--steps",
                                     "4",
                                     "--batch",
                                     "4",
                                     "--max-tokens",
                                     "64",
                                     "--out",
                                     std::string("{out}/") + arm};
    if (!mini) args.insert(args.end(), {"--lr", kTrainedModelRate});
    TARE_ASSIGN_OR_RETURN(const Ran ran, c->Tare(EvidenceKind::kE9, args));
    TARE_ASSIGN_OR_RETURN(const std::string text,
                          c->env()->ReadFile(JoinPath(ran.out, std::string(arm) + "/train.json")));
    TARE_ASSIGN_OR_RETURN(const Json r, ParseJson(text));
    Json out = {{"data", r.at("data_sha256")},
                {"initial_weights", r.at("initial_weights")},
                {"steps", r.at("steps").size()},
                {"result_ppm", std::llround(r.at("held_out_after").get<double>() * 1e6)}};
    if (std::string_view(arm) != "native")
      out["visible_forward"] = r.at("steps").at(0).at("forward_sha256");
    arms[arm] = std::move(out);
  }
  const auto result = [&](const char* arm) { return arms[arm]["result_ppm"].get<int64_t>(); };
  Json evaluation = Evaluation();
  evaluation["production_minus_native_ppm"] = result("production") - result("native");
  evaluation["production_minus_surrogate_ppm"] = result("production") - result("surrogate");
  (void)subject;
  return Json{{"arms", arms}, {"evaluation", evaluation}};
}

}  // namespace

Result<Json> CollectC7(Collecting* c) {
  c->DependOnKeys({"model.architecture", "precision.activations", "precision.gradients",
                   "training.route", "training.optimizer", "training.recompute",
                   "hardware.device"});
  TARE_ASSIGN_OR_RETURN(const Json subject, c->SubjectOf());
  const bool control = !c->options().text.empty();
  std::vector<std::string> args = {"backward", c->model(), "--gradients", "--json"};
  c->AddFaults("trainer", &args);
  try {
    TARE_ASSIGN_OR_RETURN(const Ran fixed, c->Tare(EvidenceKind::kE2, {"backward", c->model(),
                                                                       "--tolerances", "--json"}));
    // Recorded before any gradient: the task's judge compares what was used with this.
    const Json tolerances = {{"tolerances", fixed.json.at("tolerances")},
                             {"evaluation", control ? Evaluation() : Json(nullptr)}};
    TARE_RETURN_IF_ERROR(c->Keep(EvidenceKind::kE2, "tolerances.json", Role::kRaw, tolerances));
    TARE_ASSIGN_OR_RETURN(const Ran ran, c->Tare(EvidenceKind::kE7, args));
    const Json& facts = ran.json.at("gradients");
    Json order = {"tolerances", "operator", "module", "model", "step"};
    Json sft = {{"required_by", Json::array()}, {"control", nullptr}};
    if (control) {
      sft["required_by"].push_back("asked for");
      TARE_ASSIGN_OR_RETURN(sft["control"], Control(c, subject));
      order.push_back("evaluation declared");
      order.push_back("finetuning");
    }
    return Json{{"schema", "tare.gate.C7/v1"},
                {"subject", subject},
                {"kind", "E7"},
                {"order", order},
                {"parameters", facts.at("parameters")},
                {"tolerances", tolerances.at("tolerances")},
                {"code", facts.at("code")},
                {"perturbation", facts.at("perturbation")},
                {"layers", facts.at("layers")},
                {"step", facts.at("step")},
                {"sft", sft},
                {"quality", "not covered"},
                {"quality_evidence", "none"}};
  } catch (const nlohmann::json::exception& e) {
    return DataLoss("what the commands of C7 said cannot be put together: {}", e.what());
  }
}

}  // namespace tare::workflow
