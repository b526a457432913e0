#include "workflow/gates/collect_loop.h"

#include <fmt/format.h>

#include "base/sha256.h"
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

}  // namespace

Result<LoopRun> RecordLoop(Collecting* c) {
  LoopRun out;
  TARE_ASSIGN_OR_RETURN(const Json model, ReadJson(c->env(), JoinPath(c->model(), "config.json")));
  std::vector<std::string> args = {
      "rl", "run", c->model(), "--out", "{out}/loop", "--no-keep-weights", "--json"};
  // MINI was trained on no text: its questions are patterns of tokens.
  if (!model.contains("tare_mini_version")) {
    args.insert(args.end(), {"--task", "arithmetic", "--max-tokens", "12", "--lr", "2e-5"});
  }
  TARE_ASSIGN_OR_RETURN(const Ran ran, c->Tare(EvidenceKind::kE8, args));
  out.folder = JoinPath(ran.out, "loop");
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

}  // namespace tare::workflow
