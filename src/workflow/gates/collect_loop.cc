#include "workflow/gates/collect_loop.h"

#include <fmt/format.h>

#include <cmath>

#include "base/sha256.h"
#include "workflow/signoff.h"
#include "workflow/staleness.h"
#include "workflow/layout.h"

namespace tare::workflow {
namespace {

Result<Json> ReadJson(Env* env, const std::string& path) {
  TARE_ASSIGN_OR_RETURN(const std::string text, env->ReadFile(path));
  Result<Json> json = ParseJson(text);
  if (!json.ok()) return json.status().Annotate(path);
  return json;
}

// Every contract ID of this build, put together by operator.
Result<Recipe> Contracts(Collecting* c) {
  TARE_ASSIGN_OR_RETURN(const Ran ran, c->Tare(EvidenceKind::kE1, {"contract", "list", "--json"}));
  if (!ran.json.is_object() || !ran.json.contains("contracts")) {
    return DataLoss("tare contract list gave no list of contracts");
  }
  std::map<std::string, Recipe> by_operator;
  for (const Json& item : ran.json.at("contracts")) {
    by_operator[item.value("name", "")][item.value("key", "")] = item.value("id", "");
  }
  Recipe out;
  for (const auto& [op, ids] : by_operator) out[op] = RecipeId(ids);
  return out;
}

Result<Json> ConfigOf(Collecting* c) {
  return ReadJson(c->env(), JoinPath(c->model(), "config.json"));
}

bool IsMini(const Json& config) { return config.contains("tare_mini_version"); }

}  // namespace

Result<bool> IsMini(Collecting* c) {
  TARE_ASSIGN_OR_RETURN(const Json model, ConfigOf(c));
  return IsMini(model);
}

Result<LoopRun> RecordLoop(Collecting* c, const std::vector<std::string>& more) {
  LoopRun out;
  TARE_ASSIGN_OR_RETURN(const Json model, ConfigOf(c));
  std::vector<std::string> args = {
      "rl", "run", c->model(), "--out", "{out}/loop", "--no-keep-weights", "--json"};
  if (!IsMini(model)) {
    args.insert(args.end(),
                {"--task", "arithmetic", "--max-tokens", "12", "--lr", kTrainedModelRate});
  }
  args.insert(args.end(), more.begin(), more.end());
  c->AddFaults("both", &args);
  TARE_ASSIGN_OR_RETURN(const Ran ran, c->Tare(EvidenceKind::kE8, args));
  out.folder = JoinPath(ran.out, "loop");
  out.verdict = ran.json.is_object() ? ran.json.value("verdict", "inconclusive") : "inconclusive";
  TARE_ASSIGN_OR_RETURN(out.receipt, ReadJson(c->env(), JoinPath(out.folder, "receipt.json")));
  const Json rounds = out.receipt.value("rounds", Json::array());
  for (const Json& round : rounds) {
    const Json paths = round.value("paths", Json::object());
    for (const auto& [name, path] : paths.items()) {
      const std::string file = path.value("file", "");
      if (file.empty() || file.find('/') != std::string::npos) {
        return DataLoss("the receipt names `{}` where a plain file name belongs", Printable(file));
      }
      TARE_ASSIGN_OR_RETURN(out.files[file], c->env()->ReadFile(JoinPath(out.folder, file)));
    }
  }
  // The libraries are those of the launcher, which is the executable that both processes run: each
  // states its digest.
  TARE_ASSIGN_OR_RETURN(const Json identity,
                        ReadJson(c->env(), JoinPath(ran.out, "../identity.json")));
  Json libraries = Json::object();
  for (const Json& l : identity.value("libraries", Json::array())) {
    const std::string path = l.value("path", "");
    libraries[path.substr(path.rfind('/') + 1)] = l.value("sha256", "");
  }
  TARE_ASSIGN_OR_RETURN(out.contracts, Contracts(c));
  TARE_ASSIGN_OR_RETURN(const Json facts, c->Facts());
  out.runtime = {{"images", {{facts["executable_sha256"].get<std::string>(), facts["image"]}}},
                 {"interpreter", "none"},
                 {"packages", "none"},
                 {"libraries", libraries},
                 {"driver", identity.value("driver", "none")},
                 {"topology", "1 process"},
                 {"contracts", RecipeId(out.contracts)},
                 {"vocabulary", model.value("vocab_size", 0)}};
  return out;
}

Recipe RecipeFromJson(const Json& object) {
  Recipe out;
  for (const auto& [key, value] : object.items()) out[key] = value.get<std::string>();
  return out;
}

Result<RecordedEvidence> RecordedEvidenceOf(Collecting* c, const std::string& gate) {
  TARE_ASSIGN_OR_RETURN(RecordedEvidence out, [&]() -> Result<RecordedEvidence> {
    RecordedEvidence found;
    TARE_ASSIGN_OR_RETURN(found.document, c->EvidenceOf(gate));
    TARE_ASSIGN_OR_RETURN(const TaskView view, ReadTask(c->env(), c->options().task));
    for (const RunRecord& run : view.state.runs) {
      if (run.step != gate || !run.ended) continue;
      for (const size_t i : run.artifacts) {
        const ArtifactRecord& a = view.state.artifacts[i];
        const auto path = ParseArtifactPath(a.path);
        if (!path.ok() || path->name != "evidence.json") continue;
        found.sha256 = a.sha256;
        found.owner = run.actor;
        found.time = run.finished;
        found.verdict = run.conclusion ? VerdictName(run.conclusion->verdict) : "inconclusive";
      }
    }
    if (found.sha256.empty()) return Error(Code::kNotFound, "no evidence of {}", gate);
    return found;
  }());
  return out;
}

Result<Json> AgreementOf(Collecting* c) {
  TARE_ASSIGN_OR_RETURN(const TaskView view, ReadTask(c->env(), c->options().task));
  Staleness staleness(view.state);
  if (StatusOfSignOff(view.state, &staleness, "C1").verdict != Verdict::kPass) return Json(nullptr);
  TARE_ASSIGN_OR_RETURN(const Json c1, c->EvidenceOf("C1"));
  try {
    // "a percent" as parts per million of the time that is the denominator.
    const auto ppm = [](const Json& part) {
      return std::to_string(
          std::llround(1e6 + part.at("max_slowdown_percent").get<double>() * 1e4));
    };
    const Json& workload = c1.at("tuning").at("workload");
    std::string concurrency, main;
    for (const Json& n : workload.at("concurrencies")) {
      concurrency += (concurrency.empty() ? "" : "|") + std::to_string(n.get<int64_t>());
    }
    for (const Json& t : c1.at("topologies").at("main"))
      main += (main.empty() ? "" : "|") + t.get<std::string>();
    const Json& budget = c1.at("budgets").at(0);
    return Json{{"concurrency", concurrency},
                {"forward_ratio_ppm", ppm(budget.at("training_forward"))},
                {"input_tokens", std::to_string(workload.at("input_tokens").get<int64_t>())},
                {"main_topologies", main},
                {"output_tokens", std::to_string(workload.at("output_tokens").get<int64_t>())},
                {"pairs", "6"},
                {"standard", c1.at("recipe").at("standard").at("kind")},
                {"step_ratio_ppm", ppm(budget.at("training_step"))},
                {"throughput_ratio_ppm", ppm(budget.at("inference_throughput"))}};
  } catch (const nlohmann::json::exception& e) {
    return DataLoss("the evidence of C1 holds no agreement: {}", e.what());
  }
}

}  // namespace tare::workflow
