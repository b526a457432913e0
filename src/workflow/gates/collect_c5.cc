// Acts for C5: a rollout by a serving engine, then `tare dual-path` over its tokens in two trainer
// processes: the no-grad and the grad-enabled forward, repeated, repacked and in a fresh process.

#include <fmt/format.h>
#include <stdlib.h>

#include "workflow/gates/collect_loop.h"
#include "workflow/gates/loop_check.h"
#include "workflow/layout.h"

namespace tare::workflow {
namespace {

// The run of `tare dual-path` with this packing and path, the `nth` of them.
const Json& RunOf(const Json& dual, std::string_view packing, std::string_view path, int nth) {
  static const Json null;
  for (const Json& run : dual.at("runs")) {
    if (run.at("packing") == packing && run.at("path") == path && nth-- == 0) return run;
  }
  return null;
}

Json PathFrom(const Json& dual, const Json& run, bool source) {
  Json out = {{"dtype", "f32"},
              {"kind", "raw"},
              {"temperature", dual.at("temperature")},
              {"vocabulary", dual.at("vocabulary")},
              {"rows", run.at("rows")},
              {"sequences", run.at("sequences")}};
  if (source) {
    out["source"] = "forward";
    out["recorded"] = run.at("recorded");
  }
  return out;
}

// Kernels that move bits compute nothing, and only the rollout samples.
std::string OperatorOf(const std::string& op) { return op == "kv_cache" ? "copy" : op; }

Result<Json> Assemble(const Json& subject, const LoopRun& run, const Json& loop, const Json& first,
                      const Json& second) {
  Json rollout = loop.at("identities").at("rollout"), trainer = rollout;
  const std::string executable = first.at("executable");
  trainer["image"] = run.runtime.at("images").value(executable, "sha256:" + executable);
  trainer["executable"] = executable;
  const int on = first.at("batch_invariant").get<bool>() ? 1 : 0;
  trainer["switch"]["at_start"] = first.at("at_start");
  trainer["switch"]["effective"] = on;
  trainer["switch"]["workers"] = Json::array({on});
  trainer["profile"] = first.at("profile");
  trainer["faults"] = first.at("faults");

  Json kernels = Json::object(), contracts = Json::object();
  Json rollout_ran = Json::array(), trainer_ran = Json::array();
  std::set<std::string> seen;
  const auto ran = [&](const std::string& kernel, const std::string& op, Json* list) {
    kernels[kernel] = OperatorOf(op);
    list->push_back(kernel);
    const auto contract = run.contracts.find(OperatorOf(op));
    if (contract != run.contracts.end() && op != "sampling") contracts[op] = contract->second;
  };
  // "operator kernel dtypes" of the engine; one kernel may serve several dtypes.
  for (const auto& [text, count] :
       run.receipt.at("identities").at("rollout").at("kernels_since_last_call").items()) {
    const size_t space = text.find(' '), end = text.find(' ', space + 1);
    const std::string kernel = text.substr(space + 1, end - space - 1);
    if (seen.insert(kernel).second) ran(kernel, text.substr(0, space), &rollout_ran);
  }
  for (const auto& [kernel, op] : first.at("kernels").items())
    ran(kernel, op.get<std::string>(), &trainer_ran);
  Recipe in_force;
  for (const auto& [op, id] : contracts.items()) in_force[op] = id.get<std::string>();
  for (Json* side : {&rollout, &trainer}) (*side)["contracts"] = RecipeId(in_force);
  rollout["kernels"] = rollout_ran;
  trainer["kernels"] = trainer_ran;

  // What each side executes for a semantics: its profile and the contract in force there.
  const std::map<std::string, std::string> kSemantics = {
      {"primitives", "linear"}, {"quantization", "cast"},   {"layout", "attention"},
      {"mask", "attention"},    {"position", "rope"},       {"routing", "router"},
      {"reduction", "rmsnorm"}, {"logprob", "head_logprob"}};
  Json semantics = Json::object();
  for (const auto& [name, op] : kSemantics) {
    const auto id = run.contracts.find(op);
    const std::string contract = id == run.contracts.end() ? "none" : id->second.substr(0, 16);
    const auto side = [&, op = op](const Json& identity) {
      return fmt::format("{}/{} in {} of {}", op, contract, identity.at("profile").dump(),
                         identity.at("executable").get<std::string>().substr(0, 16));
    };
    semantics[name] = {{"rollout", side(rollout)}, {"trainer", side(trainer)}};
  }

  Json base = loop.at("versions").at(0).at("paths").at("rollout");
  base.erase("version");
  int64_t valid = 0, masked = 0;
  for (const Json& s : base.at("sequences")) {
    for (const Json& m : s.at("mask")) ++(m == 1 ? valid : masked);
  }
  Json paths = {{"rollout", base}}, same = Json::object(), repacked = Json::object();
  for (const char* name : {"old_logprob", "actor"}) {
    paths[name] = PathFrom(first, RunOf(first, "base", name, 0), true);
    same[name] = Json::array({PathFrom(first, RunOf(first, "base", name, 1), false),
                              PathFrom(second, RunOf(second, "base", name, 0), false)});
    repacked["shuffled"][name] = PathFrom(first, RunOf(first, "shuffled", name, 0), false);
  }
  const Json &weights = first.at("weights"), &master = first.at("master");
  const auto conversion = [](const char* step, const char* a, const char* b, const char* rounding,
                             const Json& from, const Json& to) {
    return Json{{"step", step},         {"from_format", a}, {"to_format", b}, {"scale", "none"},
                {"rounding", rounding}, {"from", from},     {"to", to}};
  };
  const Json held = run.receipt.at("rounds").at(0).at("weights").at("engine_held");
  return Json{
      {"schema", "tare.gate.C5/v1"},
      {"subject", subject},
      {"kind", "E6"},
      {"order", {"contract", "rollout", "same packing", "repacked", "old_logprob", "actor"}},
      {"contracts", contracts},
      {"kernels", kernels},
      {"contract",
       {{"standard", "bitwise"},
        {"dtype", "f32"},
        {"kind", "raw"},
        {"temperature", first.at("temperature")},
        {"vocabulary", first.at("vocabulary")},
        {"scope",
         {{"valid_tokens", valid},
          {"masked_tokens", masked},
          {"eos_token", 0},
          {"eos_tokens", 0}}}}},
      {"semantics", semantics},
      {"state", {{"rollout", "empty"}, {"trainer", "empty"}}},
      {"chain",
       Json::array({conversion("checkpoint to master", "bf16", "f32", "exact", weights, master),
                    conversion("master to deployed", "f32", "bf16", "nearest-even", master,
                               first.at("optimizer_parameters")),
                    conversion("deployed to engine", "bf16", "bf16", "exact", weights, held)})},
      {"trainer",
       {{"entry", "tare dual-path"},
        {"optimizer_parameters", first.at("optimizer_parameters")},
        {"forward_parameters", first.at("forward_parameters")},
        {"weight_copies", 1}}},
      {"identities", {{"rollout", rollout}, {"trainer", trainer}}},
      {"packings", first.at("packings")},
      {"paths", paths},
      {"same_packing", same},
      {"repacked", repacked},
      {"decisions",
       {{"recorded", false},
        {"replayed", false},
        {"statement", ""},
        {"flips", {{"router", 0}, {"indexer", 0}, {"candidates", 0}}},
        {"choices", Json::array()}}},
      {"metrics", Json::array()}};
}

// Valid end-of-sequence tokens are part of the scope, counted from the rollout.
void CountEos(Json* doc, int64_t eos) {
  int64_t count = 0;
  for (const Json& s : doc->at("paths").at("rollout").at("sequences")) {
    for (size_t t = 0; t < s.at("tokens").size(); ++t)
      count += s.at("tokens")[t] == eos && s.at("mask")[t] == 1;
  }
  Json& scope = (*doc)["contract"]["scope"];
  scope["eos_token"] = eos;
  scope["eos_tokens"] = count;
}

}  // namespace

Result<Json> CollectC5(Collecting* c) {
  TARE_ASSIGN_OR_RETURN(const Json subject, c->SubjectOf());
  TARE_ASSIGN_OR_RETURN(const LoopRun run, RecordLoop(c));
  TARE_ASSIGN_OR_RETURN(const Json loop, LoopFromReceipt(run.receipt, run.files, run.runtime));
  // The switch must be in the trainer's own environment; the commands inherit this process's.
  ::setenv("VLLM_BATCH_INVARIANT", "1", 1);
  std::vector<std::string> args = {"dual-path", c->model(), "--rollout",
                                   JoinPath(run.folder, "theta0.rollout.jsonl")};
  c->AddFaults("trainer", &args);
  TARE_ASSIGN_OR_RETURN(const Ran first, c->Tare(EvidenceKind::kE6, args));
  TARE_ASSIGN_OR_RETURN(const Ran second, c->Tare(EvidenceKind::kE6, args));
  TARE_ASSIGN_OR_RETURN(const std::string text,
                        c->env()->ReadFile(JoinPath(c->model(), "config.json")));
  TARE_ASSIGN_OR_RETURN(const Json model, ParseJson(text));
  try {
    TARE_ASSIGN_OR_RETURN(Json doc, Assemble(subject, run, loop, first.json, second.json));
    const Json eos = model.value("eos_token_id", Json(0));
    CountEos(&doc, eos.is_array() ? eos.at(0).get<int64_t>() : eos.get<int64_t>());
    return doc;
  } catch (const nlohmann::json::exception& e) {
    return DataLoss("what the commands of C5 said cannot be put together: {}", e.what());
  }
}

}  // namespace tare::workflow
