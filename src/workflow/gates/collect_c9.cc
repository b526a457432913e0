// Acts for C9. Before a person has signed: the materials of the review, as a run of the step, and
// no more. After: the stages up to the scale of the recipe, one axis each, and the entry gate's
// record from the ledger.

#include <fmt/format.h>

#include <algorithm>

#include "workflow/gates/collect_loop.h"
#include "workflow/gates/recipe_diff.h"
#include "workflow/gates/table.h"
#include "workflow/layout.h"
#include "workflow/signoff.h"
#include "workflow/staleness.h"

namespace tare::workflow {
namespace {

// Part of the review that a key of the recipe belongs to.
std::string PartOf(const std::string& key) {
  static const std::map<std::string, std::set<std::string>> parts = {
      {"data",
       {"task", "seed", "same_questions", "filter_groups", "held_out", "held_out_samples",
        "temperature", "top_p", "max_num_gen_batches"}},
      {"length", {"max_tokens", "prompt_tokens"}},
      {"batch", {"prompts", "group", "micro_batch_tokens", "eval_every"}},
      {"parallelism", {"parallelism"}},
      {"precision", {"profile", "arm", "recompute", "prefix_caching", "VLLM_BATCH_INVARIANT"}}};
  for (const auto& [part, keys] : parts) {
    if (keys.contains(key)) return part;
  }
  if (key == "keep_weights" || key == "stop_at_event") return "data";
  return "optimizer";
}

Json RecipeJson(const Recipe& recipe) {
  Json out = Json::object();
  for (const auto& [key, value] : recipe) out[key] = value;
  return out;
}

struct Review {
  Json c8;  // its evidence document
  Recipe two_step, formal, reference;
  std::string reference_name, script;
  RecordedEvidence c8_record;
};

Result<Review> ReviewOf(Collecting* c) {
  Review r;
  TARE_ASSIGN_OR_RETURN(r.c8_record, RecordedEvidenceOf(c, "C8"));
  r.c8 = r.c8_record.document;
  r.two_step = RecipeFromJson(r.c8.at("loop").at("recipe"));
  r.formal = r.two_step;
  r.formal["steps"] = std::to_string(c->options().formal_steps);
  if (c->options().reference.empty()) {
    TARE_ASSIGN_OR_RETURN(const Ran ran, c->Tare(EvidenceKind::kE1, {"rl", "defaults"}));
    r.reference_name = "the loop's own defaults (tare rl defaults)";
    for (const auto& [key, value] : ran.json.items()) {
      if (!r.two_step.contains(key)) continue;
      r.reference[key] = value.is_string() ? value.get<std::string>() : value.dump();
    }
    for (const char* key : {"VLLM_BATCH_INVARIANT", "parallelism"})
      r.reference[key] = r.formal[key];
  } else {
    TARE_ASSIGN_OR_RETURN(const std::string text, c->env()->ReadFile(c->options().reference));
    TARE_ASSIGN_OR_RETURN(const Json json, ParseJson(text));
    r.reference_name = c->options().reference;
    r.reference = RecipeFromJson(json);
  }
  // What starts the loop: the recorded configuration of the run that made C8's evidence names the
  // command; the smoke and the entry gate start the same.
  std::string script = "tare rl run";
  for (const auto& [key, value] : r.two_step) {
    if (key != "steps") script += fmt::format(" {}={}", key, value);
  }
  r.script = Hex(Sha256Of(script));
  return r;
}

Json Differences(const Review& r) {
  Json out = Json::array();
  for (const RecipeDifference& d : DiffRecipes(r.reference, r.formal)) {
    out.push_back({{"key", d.key},
                   {"change", d.change},
                   {"class", d.key_class},
                   {"reference", d.reference},
                   {"ours", d.ours}});
  }
  return out;
}

Json Six(const Recipe& formal) {
  Json six = Json::object();
  for (const char* part : {"batch", "data", "length", "optimizer", "parallelism", "precision"})
    six[part] = Json::array();
  for (const auto& [key, value] : formal) six[PartOf(key)].push_back(key);
  return six;
}

Result<Json> EntryTable(Collecting* c) {
  Json table = Json::array();
  for (const std::string& gate : TheWorkflow().Find("C9")->needs) {
    TARE_ASSIGN_OR_RETURN(const RecordedEvidence r, RecordedEvidenceOf(c, gate));
    table.push_back({{"row", gate},
                     {"state", r.verdict},
                     {"evidence", r.sha256},
                     {"owner", r.owner},
                     {"time", r.time}});
  }
  return table;
}

Result<Json> Collect(Collecting* c) {
  TARE_ASSIGN_OR_RETURN(const Json facts, c->Facts());
  TARE_ASSIGN_OR_RETURN(const Json subject, c->SubjectOf());
  TARE_ASSIGN_OR_RETURN(const Json agreement, AgreementOf(c));
  TARE_ASSIGN_OR_RETURN(const Review r, ReviewOf(c));
  TARE_ASSIGN_OR_RETURN(const RecordedEvidence c5, RecordedEvidenceOf(c, "C5"));
  TARE_ASSIGN_OR_RETURN(const Json table, EntryTable(c));
  Json confirmation = nullptr;
  {
    TARE_ASSIGN_OR_RETURN(const TaskView view, ReadTask(c->env(), c->options().task));
    Staleness staleness(view.state);
    const SignOffStatus signoff = StatusOfSignOff(view.state, &staleness, "C9");
    if (signoff.verdict == Verdict::kPass && signoff.request != nullptr) {
      confirmation = {{"person", signoff.person},
                      {"author", signoff.request->requester},
                      {"recipe", RecipeId(r.formal)}};
    }
  }
  // From half of length and of questions up to the recipe's scale, one axis a stage; each is a
  // whole two-step loop on the model itself.
  const auto number = [&](const char* key) { return std::stoll(r.formal.at(key)); };
  const int64_t length = number("max_tokens"), questions = number("prompts"),
                layers = facts.at("layers").get<int64_t>();
  const auto scale = [&](int64_t tokens, int64_t prompts) {
    return Json{
        {"layers", layers}, {"length", tokens}, {"concurrency", prompts}, {"parallelism", 1}};
  };
  const Json at[] = {scale(std::max<int64_t>(1, length / 2), std::max<int64_t>(1, questions / 2)),
                     scale(length, std::max<int64_t>(1, questions / 2)), scale(length, questions)};
  Json stages = Json::array();
  Json counters = Json::object();
  const char* axes[] = {"length", "concurrency"};
  for (int i = 0; i < 2; ++i) {
    if (at[i] == at[i + 1]) continue;
    TARE_ASSIGN_OR_RETURN(const LoopRun run,
                          RecordLoop(c, {"--max-tokens", at[i + 1].at("length").dump(), "--prompts",
                                         at[i + 1].at("concurrency").dump()}));
    TARE_ASSIGN_OR_RETURN(const std::string receipt,
                          HashPath(c->env(), JoinPath(run.folder, "receipt.json")));
    stages.push_back({{"axis", axes[i]},
                      {"from", at[i]},
                      {"to", at[i + 1]},
                      {"verdict", run.verdict},
                      {"evidence", receipt}});
    const Json now = run.receipt.at("identities").at("rollout").value("counters", Json::object());
    counters = Json::object();
    for (const char* name : {"mixed_steps", "cache_hits", "updates"}) {
      const int64_t after = now.value(name, int64_t{0});
      counters[name] = {{"before", 0}, {"after", after}, {"delta", after}};
    }
  }
  if (r.formal.at("prefix_caching") != "true") counters.erase("cache_hits");
  return Json{{"schema", "tare.gate.C9/v1"},
              {"subject", subject},
              {"kind", "E8"},
              {"agreement", agreement},
              {"inputs",
               {{"launch_script", r.script},
                {"image", facts.at("image")},
                {"code_version", facts.at("executable_sha256")},
                {"recipe", RecipeJson(r.formal)}}},
              {"reference", {{"name", r.reference_name}, {"recipe", RecipeJson(r.reference)}}},
              {"differences", Differences(r)},
              {"open_questions", Json::array({"none"})},
              {"smoke",
               {{"launch_script", r.script},
                {"image", r.c8.at("subject").at("image")},
                {"recipe", RecipeId(r.two_step)},
                {"code_version", r.c8.at("loop").at("identities").at("trainer").at("executable")},
                {"verdict", r.c8_record.verdict},
                {"receipt", r.c8_record.sha256}}},
              {"six", Six(r.formal)},
              {"confirmation", confirmation},
              {"entry_table", table},
              {"c5",
               {{"verdict", c5.verdict},
                {"artifact", c5.sha256},
                {"image", c5.document.at("subject").at("image")}}},
              {"two_step", {{"recipe", RecipeJson(r.two_step)}, {"receipt", r.c8_record.sha256}}},
              {"escalation", {{"proxy", at[0]}, {"target", at[2]}, {"stages", stages}}},
              {"counters", counters},
              {"restore", nullptr},
              {"failures", Json::array()}};
}

void DependOnRecipe(Collecting* c) {
  c->DependOnKeys({"model.architecture", "training.optimizer", "training.learning_rate",
                   "training.route", "precision.activations", "inference.prefix_cache",
                   "hardware.device", "parallelism.tp", "image.digest"});
}

}  // namespace

Status PrepareC9(Collecting* c) {
  DependOnRecipe(c);
  try {
    TARE_ASSIGN_OR_RETURN(const Review r, ReviewOf(c));
    TARE_ASSIGN_OR_RETURN(const Json table, EntryTable(c));
    return c->Keep(
        EvidenceKind::kE1, "review.json", Role::kMaterial,
        {{"schema", "tare.review-materials/1"},
         {"launch_script", r.script},
         {"recipe", RecipeJson(r.formal)},
         {"recipe_sha256", RecipeId(r.formal)},
         {"reference", {{"name", r.reference_name}, {"recipe", RecipeJson(r.reference)}}},
         {"differences", Differences(r)},
         {"open_questions", Json::array({"none"})},
         {"covers", Six(r.formal)},
         {"two_step", {{"recipe", RecipeJson(r.two_step)}, {"receipt", r.c8_record.sha256}}},
         {"entry_table", table}});
  } catch (const nlohmann::json::exception& e) {
    return DataLoss("the evidence before C9 cannot be put together: {}", e.what());
  }
}

Result<Json> CollectC9(Collecting* c) {
  DependOnRecipe(c);
  try {
    return Collect(c);
  } catch (const nlohmann::json::exception& e) {
    return DataLoss("what the commands of C9 said cannot be put together: {}", e.what());
  }
}

}  // namespace tare::workflow
