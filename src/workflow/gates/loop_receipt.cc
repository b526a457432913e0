// From a receipt of `tare rl run` (docs/formats/receipt.md) to the "loop" of an evidence document.
// Nothing is judged here, only brought into one form; what the receipt does not say is not made up.

#include <fmt/format.h>

#include <bit>

#include "base/sha256.h"
#include "workflow/gates/loop_check.h"

namespace tare::workflow {
namespace {

std::string Word(float value) { return fmt::format("0x{:08x}", std::bit_cast<uint32_t>(value)); }

// One file of logprobs as {"sequences": [...]}, with what all lines share beside it.
Result<Json> PathOf(const Json& path, const std::string& text, int64_t version,
                    const std::string& temperature, int64_t vocabulary) {
  Json out = {{"version", version}, {"source", "forward"}, {"recorded", false}};
  Json lines = Json::array();
  std::string dtype, kind;
  int64_t rows = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    if (end == std::string::npos) return DataLoss("the last line has no newline");
    TARE_ASSIGN_OR_RETURN(const Json line, ParseJson(std::string_view(text).substr(at, end - at)));
    at = end + 1;
    Json bits = Json::array();
    for (const Json& word : line.at("bits")) {
      bits.push_back(word.is_null() ? Json(nullptr) : Json("0x" + word.get<std::string>()));
    }
    Json mask = line.value("mask", Json());
    if (mask.is_null()) mask = Json(std::vector<int>(line.at("tokens").size(), 1));
    rows += static_cast<int64_t>(line.at("prompt").size() + line.at("tokens").size()) - 1;
    dtype = line.at("dtype");
    kind = line.at("kind");
    // The label that the file itself carries, not the one that is expected.
    const std::string label = line.at("weights");
    if (label != fmt::format("theta{}", version)) out["version"] = int64_t{1} << 20;
    lines.push_back({{"sequence", line.at("sequence")},
                     {"prompt", line.at("prompt")},
                     {"tokens", line.at("tokens")},
                     {"mask", mask},
                     {"bits", bits}});
  }
  out["dtype"] = dtype;
  out["kind"] = kind;
  out["temperature"] = temperature;
  out["vocabulary"] = vocabulary;
  // The engine's rows are those that it served; the trainer counts its own.
  out["rows"] = path.contains("rows") ? path.at("rows") : Json(rows);
  if (path.contains("recorded")) out["recorded"] = path.at("recorded");
  if (path.contains("launches") && path.at("launches").get<int64_t>() < 1) out["source"] = "copied";
  out["sequences"] = std::move(lines);
  return out;
}

Json IdentityOf(const Json& side, bool rollout, const Json& runtime, bool prefix_caching) {
  const Json at = rollout ? side.at("switch") : Json();
  const int effective = rollout ? at.at("effective").get<int>()
                                : static_cast<int>(side.at("batch_invariant").get<bool>());
  std::string start = "";
  const Json value = rollout ? at.at("at_start") : side.at("VLLM_BATCH_INVARIANT");
  if (value.is_string()) start = value.get<std::string>();
  const std::string digest = side.at("binary_sha256");
  // The image is named after the executable, unless the caller knows what lies beside it there.
  const Json images = runtime.value("images", Json::object());
  Json out = {{"image", images.value(digest, "sha256:" + digest)}, {"executable", digest}};
  for (const char* key : {"interpreter", "packages", "libraries"}) out[key] = runtime.at(key);
  out["overlay"] = Json::array();
  out["switch"] = {{"name", "VLLM_BATCH_INVARIANT"},
                   {"at_start", start},
                   {"effective", effective},
                   {"workers", Json::array({effective})},
                   {"worker_count", 1}};
  out["profile"] = side.at("profile");
  out["device"] = rollout ? side.at("device") : Json("cpu");
  out["driver"] = runtime.at("driver");
  out["topology"] = runtime.at("topology");
  out["contracts"] = runtime.at("contracts");
  out["prefix_caching"] = rollout ? side.at("prefix_caching") : Json(prefix_caching);
  out["faults"] = side.at("faults");
  return out;
}

Json UpdateOf(const Json& u, const Json& trainer_pid) {
  Json parameters = Json::array();
  Json totals = {{"elements", int64_t{0}},
                 {"gradient_nonzero", int64_t{0}},
                 {"gradient_non_finite", int64_t{0}},
                 {"master_changed", int64_t{0}},
                 {"deployed_changed", int64_t{0}}};
  for (const Json& p : u.at("parameters")) {
    Json parameter = {{"name", p.at("name")}};
    for (auto& [key, sum] : totals.items()) {
      parameter[key] = p.at(key);
      sum = sum.get<int64_t>() + p.at(key).get<int64_t>();
    }
    parameters.push_back(std::move(parameter));
  }
  const Json& publish = u.at("publish");
  const Json& engine = publish.at("engine");
  const std::string none(64, '0');
  const int64_t from = u.at("from");
  Json out = {{"from", from},
              {"to", publish.at("version")},
              {"trainer_pid", trainer_pid},
              {"ratio_not_one", u.at("ratio_not_one")},
              {"kl_coefficient", u.at("kl_coef")},
              {"entropy_coefficient", u.at("entropy_coef")},
              {"lr", Word(u.at("lr").get<float>())},
              {"skipped", u.at("skipped")},
              {"cache_reset", !engine.is_null() && engine.value("dropped_blocks", 0) > 0}};
  for (const char* key : {"master_before", "master_after", "deployed_before", "deployed_after"}) {
    out[key] = u.at(key);
  }
  for (const char* key : {"moments_before", "moments_after"}) {
    if (u.contains(key)) out[key] = u.at(key);
  }
  out["published"] = {{"version", engine.is_null() ? publish.at("version") : engine.at("version")},
                      {"sent", publish.at("sha256")},
                      {"held", engine.is_null() ? Json(none) : engine.at("sha256")}};
  out["parameters"] = std::move(parameters);
  out["totals"] = std::move(totals);
  return out;
}

Result<Json> Make(const Json& receipt, const std::map<std::string, std::string>& files,
                  const Json& runtime) {
  if (receipt.at("schema") != "tare.receipt/1") {
    return InvalidArgument("schema is {}; tare.receipt/1", receipt.at("schema").dump());
  }
  const Json& config = receipt.at("config");
  Json recipe = Json::object();
  for (const auto& [key, value] : config.items()) {
    // Where it lies and what is planted are no part of the recipe: weights and faults are judged.
    if (key == "model" || key == "faults" || key == "threads") continue;
    recipe[key] = value.is_string() ? value.get<std::string>() : value.dump();
  }
  const Json& ids = receipt.at("identities");
  // Part of every recipe, and told by the processes alone.
  recipe["VLLM_BATCH_INVARIANT"] = ids.at("rollout").at("switch").at("effective").dump();
  recipe["parallelism"] = runtime.at("topology");
  const bool caching = config.at("prefix_caching");
  const std::string temperature = Word(config.at("temperature").get<float>());
  bool flushed = true;
  Json versions = Json::array();
  bool moments = !receipt.at("updates").empty();
  for (const Json& u : receipt.at("updates")) moments = moments && u.contains("moments_before");
  for (const Json& round : receipt.at("rounds")) {
    const int64_t version = round.at("version");
    Json paths = Json::object();
    for (const auto& [name, path] : round.at("paths").items()) {
      const std::string file = path.at("file");
      const auto it = files.find(file);
      if (it == files.end()) return InvalidArgument("{}: the file is not there", file);
      flushed = flushed && path.at("sha256") == Hex(Sha256Of(it->second));
      Result<Json> one =
          PathOf(path, it->second, version, temperature, runtime.at("vocabulary").get<int64_t>());
      if (!one.ok()) return one.status().Annotate(file);
      paths[name == "score" ? "old_logprob" : name == "train" ? "actor" : name] = *std::move(one);
    }
    Json questions = Json::array();
    if (round.contains("reward")) {
      for (const Json& g : round.at("reward").at("groups")) {
        questions.push_back({{"question", g.at("question")},
                             {"rewards", g.at("rewards")},
                             {"advantages", g.at("advantages")}});
      }
    }
    const Json& w = round.at("weights");
    versions.push_back({{"version", version},
                        {"rollout_pid", ids.at("rollout").at("pid")},
                        {"engine_version", w.at("engine_version")},
                        {"trainer_deployed", w.at("trainer_deployed")},
                        {"trainer_master", w.at("trainer_master")},
                        {"engine_held", w.at("engine_held")},
                        {"sampled_versions", round.at("rollout").at("weight_versions")},
                        {"questions", std::move(questions)},
                        {"paths", std::move(paths)}});
  }
  Json processes = Json::array();
  for (const Json& p : receipt.at("processes")) {
    processes.push_back({{"name", p.at("name")},
                         {"pid", p.at("pid")},
                         {"ended", p.at("ended")},
                         {"code", p.at("code")},
                         {"signal", p.at("signal")},
                         {"flushed", flushed}});
  }
  Json events = Json::array();
  for (const Json& e : receipt.at("events")) {
    events.push_back({{"event", e.at("event")}, {"version", e.at("version")}});
  }
  Json updates = Json::array();
  for (const Json& u : receipt.at("updates"))
    updates.push_back(UpdateOf(u, ids.at("trainer").at("pid")));
  return Json{{"entry", "tare rl run"},
              {"mode", "live"},
              {"recipe", std::move(recipe)},
              {"prior_receipt", nullptr},
              {"moments_recorded", moments},
              {"processes", std::move(processes)},
              {"identities",
               {{"rollout", IdentityOf(ids.at("rollout"), true, runtime, caching)},
                {"trainer", IdentityOf(ids.at("trainer"), false, runtime, caching)}}},
              {"events", std::move(events)},
              {"versions", std::move(versions)},
              {"updates", std::move(updates)}};
}

}  // namespace

Result<Json> LoopFromReceipt(const Json& receipt, const std::map<std::string, std::string>& files,
                             const Json& runtime) {
  try {
    return Make(receipt, files, runtime);
  } catch (const nlohmann::json::exception& e) {
    return InvalidArgument("not a receipt: {}", e.what());
  }
}

}  // namespace tare::workflow
