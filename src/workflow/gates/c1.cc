// Gate C1: the recipe is decided and is what really ran, the criteria are older than the results,
// and the baseline was tuned, frozen and made ready for audit. The audit itself is a person's, held
// by the ledger: this judge only says `waiting-human` where a decision has to be in the document.

#include "workflow/gates/c1.h"

#include <fmt/format.h>

#include <algorithm>

namespace tare::workflow {
namespace {

struct Precision {
  std::string weights, activations, kv_cache;
};
Precision ReadPrecision(const Field& f) {
  return {f.At("weights").Str(), f.At("activations").Str(), f.At("kv_cache").Str()};
}

struct Compare {
  std::string id, time, scope, standard;
  int64_t counted = 0, in_scope = 0;
};

struct Budget {
  std::string topology;
  std::vector<std::string> incomplete;
};
Budget ReadBudget(const Field& f) {
  Budget b{f.At("topology").Str(), {}};
  for (const char* key : {"inference_throughput", "training_forward", "training_step"}) {
    const std::optional<Field> at = f.MaybeAt(key);
    if (!at) {
      b.incomplete.emplace_back(key);
      continue;
    }
    at->At("max_slowdown_percent").Real(0, 1e6);
    const std::string denominator = at->At("denominator").Text();
    if (denominator.empty()) b.incomplete.push_back(std::string(key) + " has no denominator");
  }
  return b;
}

struct Tensor {
  std::string name, ours, official;
};

bool Before(const std::string& a, const std::string& b) {
  // RFC 3339 UTC without offset: without fraction the texts order as the times do; a fraction only
  // follows an equal second.
  return a.substr(0, 19) < b.substr(0, 19) ||
         (a.substr(0, 19) == b.substr(0, 19) && a.substr(19) < b.substr(19) && a.back() == 'Z');
}

}  // namespace

GateJudgement JudgeC1(const Json& evidence) {
  Judging j("C1", evidence);
  const Field root = j.root();
  const Subject subject = ReadSubject(root);
  const Field inputs = root.At("inputs");
  inputs.At("model").At("name").Str();
  const std::string model = inputs.At("model").At("sha256").Hash();
  const std::optional<Field> context = inputs.MaybeAt("context_length");
  const int64_t context_length = context ? context->Int(1, int64_t{1} << 30) : 0;
  inputs.At("hardware").At("descriptor").Str();
  inputs.At("hardware").At("sha256").Hash();

  const Field recipe = root.At("recipe");
  const Precision planned = ReadPrecision(recipe.At("precision"));
  for (const auto& [what, rule] : recipe.At("quantization").Members()) {
    for (const char* key : {"format", "granularity", "scale_rule"}) rule.At(key).Str();
  }
  const TextMap execution = ReadTextMap(recipe.At("execution"));
  for (const auto& [axis, size] : recipe.At("parallelism").Members(1)) size.Int(1, 1 << 20);
  recipe.At("runner").Str();
  const Field start = recipe.At("start");
  const std::string start_kind = start.At("kind").OneOf({"bf16-original", "dequantized", "f32"});
  const std::string start_master = start.At("master_sha256").Hash();
  const Field scope = recipe.At("scoring_scope");
  const std::string scope_sha256 = scope.At("sha256").Text();
  for (const char* part : {"response", "prompt", "tool", "padding", "truncated", "eos"}) {
    scope.At(part).OneOf({"counted", "excluded"});
  }
  const Field standard = recipe.At("standard");
  const std::string standard_kind = standard.At("kind").OneOf({"bitwise", "tolerance"});
  const std::string bound = standard.At("bound").Text();
  const std::string standard_time = standard.At("recorded").Time();
  const bool loosened = standard.At("loosened").Bool();
  const bool amended = standard.At("amendment").Bool();

  const Field live = root.At("live");
  const Precision allocated = ReadPrecision(live.At("precision"));
  const TextMap effective = ReadTextMap(live.At("execution"));
  const std::set<std::string> accepted = live.At("accepted").StringSet();
  const std::string live_master = live.At("master_sha256").Hash();
  const std::string source = live.At("source").OneOf({"process", "command-line", "file"});
  const std::string live_image = live.At("image").Text();

  const Field theta = root.At("theta0");
  const bool claims_equal = theta.At("equals_checkpoint").Bool();
  const std::string theta_reason = theta.At("reason").Text();
  std::vector<Tensor> tensors;
  for (const Field& t : theta.At("tensors").Items(1)) {
    tensors.push_back({t.At("name").Str(), t.At("ours").Hash(), t.At("official").Hash()});
  }
  std::vector<Compare> compares;
  for (const Field& c : root.At("compares").Items()) {
    compares.push_back({c.At("id").Str(), c.At("time").Time(), c.At("scope_sha256").Text(),
                        c.At("standard").OneOf({"bitwise", "tolerance"}),
                        c.At("counted").Int(0, INT64_MAX), c.At("in_scope").Int(0, INT64_MAX)});
  }
  std::vector<Budget> budgets;
  for (const Field& b : root.At("budgets").Items()) budgets.push_back(ReadBudget(b));
  const Field topologies = root.At("topologies");
  const std::vector<std::string> main = topologies.At("main").Strings(1);
  const std::string decided = topologies.At("decided_by").OneOf({"nobody", "tool", "person"});
  const std::string statement = topologies.At("statement").Text();
  const Tuning tuning = ReadTuning(root.At("tuning"));
  const Baseline baseline = ReadBaseline(root.At("baseline"));
  std::string image;
  bool failed_none = false;
  const std::vector<std::string> empty = ReadMaterials(root.At("audit"), &image, &failed_none);
  if (!j.WellFormed()) return j.Finish();

  j.Require("C1-01", context_length > 0, reason::kInputMissing, "no target context length");
  j.Require("C1-01", model == subject.weights, reason::kWeightHashMismatch,
            "the model is not the one that the subject names");
  for (const auto& [what, want, got] : {std::tuple<const char*, std::string, std::string>{
                                            "weights", planned.weights, allocated.weights},
                                        {"activations", planned.activations, allocated.activations},
                                        {"kv_cache", planned.kv_cache, allocated.kv_cache}}) {
    j.Require("C1-02", want == got, reason::kPrecisionDiffers,
              fmt::format("{}: the recipe says {}, {} was allocated", what, want, got));
  }
  j.Require("C1-03", source == "process", reason::kEffectiveDiffers,
            fmt::format("the resolved configuration was taken from the {}", source),
            "dump it from the live process");
  std::set<std::string> keys;
  for (const auto& [key, value] : execution) keys.insert(key);
  for (const auto& [key, value] : effective) keys.insert(key);
  for (const std::string& key : keys) {
    const auto want = execution.find(key), got = effective.find(key);
    const bool same =
        want != execution.end() && got != effective.end() && want->second == got->second;
    j.Require("C1-03", same || accepted.contains(key), reason::kEffectiveDiffers,
              fmt::format("{}: written {}, in effect {}", key,
                          want == execution.end() ? "nothing" : want->second,
                          got == effective.end() ? "nothing" : got->second));
  }
  j.Require("C1-03", !execution.empty(), reason::kInputMissing, "the recipe's execution is empty");
  j.Require("C1-04", start_master == live_master, reason::kStartDiffers,
            fmt::format("the recipe starts ({}) from {}, the trainer loaded {}", start_kind,
                        start_master.substr(0, 12), live_master.substr(0, 12)));
  std::vector<std::string> changed;
  for (const Tensor& t : tensors) {
    if (t.ours != t.official) changed.push_back(t.name);
  }
  j.Require("C1-05", claims_equal == changed.empty(), reason::kThetaClaim,
            claims_equal
                ? fmt::format("answered yes; {} of {} tensors differ, first {}", changed.size(),
                              tensors.size(), changed.empty() ? "" : changed[0])
                : fmt::format("answered no; all {} tensors are equal", tensors.size()));
  j.Require("C1-05", claims_equal || !theta_reason.empty(), reason::kThetaClaim,
            "answered no without a reason");
  const bool agreed = scope_sha256.size() == 64;
  j.Require("C1-06", agreed, reason::kScopeNotAgreed, "the scoring scope has no digest");
  for (const Compare& c : compares) {
    j.Require("C1-06", agreed && c.scope == scope_sha256, reason::kScopeNotAgreed,
              fmt::format("compare {} used another scope", c.id));
    j.Require(
        "C1-06", c.counted == c.in_scope && c.counted > 0, reason::kScopeNotAgreed,
        fmt::format("compare {} counted {} tokens, its scope has {}", c.id, c.counted, c.in_scope));
    j.Require("C1-07", Before(standard_time, c.time), reason::kCriterionLate,
              fmt::format("compare {} is of {}, the standard of {}", c.id, c.time, standard_time));
    j.Require("C1-07", c.standard == standard_kind, reason::kCriterionLate,
              fmt::format("compare {} was held to `{}`, the standard is `{}`", c.id, c.standard,
                          standard_kind));
  }
  j.Require("C1-07", standard_kind == "bitwise" || !bound.empty(), reason::kCriterionLate,
            "a tolerance without a fixed bound");
  j.Require("C1-07", !loosened || amended, reason::kCriterionLate,
            "the standard was loosened without an amendment");
  for (const std::string& topology : main) {
    const auto at = std::find_if(budgets.begin(), budgets.end(),
                                 [&](const Budget& b) { return b.topology == topology; });
    j.Require("C1-08", at != budgets.end() && at->incomplete.empty(), reason::kBudgetIncomplete,
              at == budgets.end()
                  ? fmt::format("no budget for topology {}", topology)
                  : fmt::format("{}: {}", topology, fmt::join(at->incomplete, ", ")));
  }
  j.Require("C1-09", decided == "person" && !statement.empty(), reason::kTopologyUndecided,
            fmt::format("main topologies {} were decided by {}", fmt::join(main, ", "), decided));

  JudgeTuning(&j, tuning, context_length);
  JudgeBaseline(&j, baseline);
  const bool digest = image.starts_with("sha256:") && image.size() == 71;
  j.Require("C1-15", digest, reason::kImageByTag,
            fmt::format("the image is given as `{}`", Printable(image)));
  j.Require("C1-15", !digest || (image == subject.image && image == live_image),
            reason::kIdentityDiffers, "audit, live process and subject name different images");
  for (const std::string& item : empty) {
    j.Require(item.substr(0, 7), false, reason::kMaterialMissing, item.substr(8));
  }
  if (empty.empty()) j.Pass("STOP-03", "all audit items are there");
  j.Require("STOP-06", !failed_none || tuning.failed_in_log.empty(), reason::kFailedRowsDropped,
            "the materials say that nothing failed; the log holds failed runs");

  ScopeBox box{.shape = {},
               .topology = main,
               .dtype = {planned.activations},
               .model = {subject.weights},
               .path = {"baseline " + baseline.switch_name + "=" + baseline.switch_value},
               .contracts = {subject.contracts}};
  for (const int64_t c : tuning.concurrencies) {
    box.shape.push_back(
        fmt::format("in={},out={},c={}", tuning.input_tokens, tuning.output_tokens, c));
  }
  j.Cover(std::move(box));
  return j.Finish();
}

}  // namespace tare::workflow
