// C6: the backward inventory, the surrogate gradients at rounding points, what a backward reads,
// and the step's time against the budget that a person fixed at C1 (until then provisional, A-35).

#include <fmt/format.h>

#include <algorithm>

#include "workflow/gates/evidence_parts.h"

namespace tare::workflow {
namespace {

struct Module {
  std::string id, verdict, rationale, existing, gradient;
  std::vector<std::string> saved, reads;
};
struct Rounding {
  std::string site, surrogate, value, scale_rule;
  // What the test that tells the variants apart saw: gradient at an in-range and a saturated value.
  std::string in_range, saturated, executed_value, executed_scale;
};
struct Poison {
  std::string what, before, after;
};
struct Timing {
  std::string topology;
  Series forward_native, forward_aligned, step_native, step_aligned;  // us
};
const std::set<std::string> kPoisons = {"caches", "quantized views", "rng", "router state",
                                        "scales"};

// Median against median, within parts per million of the denominator.
bool Within(const Series& aligned, const Series& native, int64_t ppm) {
  return static_cast<double>(aligned.median) * 1e6 <=
         static_cast<double>(native.median) * static_cast<double>(ppm);
}

}  // namespace

GateJudgement JudgeC6(const Json& evidence) {
  Judging judging("C6", evidence);
  const Field root = judging.root();
  const Subject subject = ReadSubject(root);
  const std::string kind = root.At("kind").Str();
  const std::vector<std::string> inventory = root.At("inventory").Strings(1);  // module rows of C0
  const std::set<std::string> registry = root.At("registry").StringSet();  // backwards that exist
  std::vector<Module> modules;
  for (const Field& item : root.At("modules").Items()) {
    Module m;
    m.id = item.At("module").Str();
    m.verdict = item.At("verdict").OneOf({"reuse", "glue", "newly written"});
    m.rationale = item.At("rationale").Text();
    m.existing = item.At("existing").Str();
    m.gradient = item.At("gradient").OneOf({"exact", "surrogate", "approximate"});
    m.saved = item.At("saved").Strings();
    m.reads = item.At("reads").Strings();
    modules.push_back(std::move(m));
  }
  const std::vector<std::string> sites = root.At("rounding_sites").Strings();  // from the trace
  std::vector<Rounding> roundings;
  for (const Field& item : root.At("surrogates").Items()) {
    Rounding r;
    r.site = item.At("site").Str();
    r.surrogate = item.At("surrogate").OneOf({"identity", "clipping"});
    r.value = item.At("value").OneOf({"master", "dequantized"});
    r.scale_rule = item.At("scale_rule").Str();
    const Field executed = item.At("executed");
    r.in_range = executed.At("in_range").OneOf({"passes", "zero"});
    r.saturated = executed.At("saturated").OneOf({"passes", "zero"});
    r.executed_value = executed.At("value").OneOf({"master", "dequantized"});
    r.executed_scale = executed.At("scale_rule").Str();
    roundings.push_back(std::move(r));
  }
  std::vector<Poison> poisons;
  for (const Field& item : root.At("poisoned").Items()) {
    poisons.push_back({item.At("what").Str(), item.At("gradient_before").Hash(),
                       item.At("gradient_after").Hash()});
  }
  // State of the list that the model does not have: named with a reason, never silent.
  std::vector<std::pair<std::string, std::string>> absent;
  if (const std::optional<Field> list = root.MaybeAt("absent")) {
    for (const Field& item : list->Items())
      absent.emplace_back(item.At("what").Str(), item.At("why").Str());
  }
  const bool raises = root.At("weight_change_raises").Bool();
  const Field graph = root.At("graph");
  const int64_t detached = graph.At("detached_outputs").Int(0, INT32_MAX);
  const std::string formula = graph.At("trained_value").Str();
  const Field scan = root.At("production_scan");
  const int64_t built = scan.At("sources_built").Int(0, INT32_MAX);
  const int64_t scanned = scan.At("sources_scanned").Int(0, INT32_MAX);
  const std::vector<std::string> hits = scan.At("hits").Strings();
  const std::vector<std::string> loaded = scan.At("run_time_hits").Strings();
  const std::string preload = scan.At("preload").Text();
  const Recipe agreement = ReadAgreement(root.At("agreement"));
  std::vector<Timing> times;
  for (const Field& item : root.At("step_times").Items()) {
    Timing t;
    t.topology = item.At("topology").Str();
    t.forward_native = ReadSeries(item.At("forward_native_us"), 3);
    t.forward_aligned = ReadSeries(item.At("forward_aligned_us"), 3);
    t.step_native = ReadSeries(item.At("step_native_us"), 3);
    t.step_aligned = ReadSeries(item.At("step_aligned_us"), 3);
    times.push_back(std::move(t));
  }
  const std::string denominator = root.At("denominator").Str();
  if (!judging.WellFormed()) return judging.Finish();
  Judging& j = judging;

  j.Require("C6-08", kind == "E7" || kind == "E1", reason::kWrongEvidenceKind,
            fmt::format("evidence of kind {}; the inventory is E1, its tests E7", kind));
  // C6-05: every module once, with a reason.
  std::vector<std::string> ids;
  std::set<std::string> used;
  for (const Module& m : modules) {
    ids.push_back(m.id);
    j.Require("C6-05", std::count(inventory.begin(), inventory.end(), m.id) == 1,
              reason::kInventoryIncomplete,
              fmt::format("{} stands in no row of the module inventory", m.id));
    j.Require("C6-05", m.rationale.size() >= 10, reason::kInventoryIncomplete,
              fmt::format("{}: `{}` is no rationale", m.id, m.rationale));
    // C6-01: what is there is reused.
    j.Require("C6-01", (m.verdict == "newly written") == (m.existing == "none"),
              reason::kInventoryIncomplete,
              fmt::format("{}: verdict {} while the existing backward is {}", m.id, m.verdict,
                          m.existing));
    j.Require("C6-01", m.existing == "none" || registry.contains(m.existing),
              reason::kInventoryIncomplete,
              fmt::format("{}: {} is no backward of the registry", m.id, m.existing));
    used.insert(m.existing);
    j.Require("C6-03", m.gradient != "approximate", reason::kApproximateGradient,
              fmt::format("{}: an approximate gradient ({})", m.id, m.rationale));
    for (const std::string& read : m.reads) {
      j.Require(
          "C6-06", std::count(m.saved.begin(), m.saved.end(), read) == 1, reason::kStateRecomputed,
          fmt::format("{}: its backward reads {}, which its forward did not save", m.id, read));
    }
    j.Require("C6-06", AllDifferent(m.saved) && m.saved.size() == m.reads.size(),
              reason::kStateRecomputed,
              fmt::format("{}: saved [{}], read [{}]", m.id, fmt::join(m.saved, " "),
                          fmt::join(m.reads, " ")));
    const bool rounds = std::count(sites.begin(), sites.end(), m.id) > 0;
    j.Require("C6-02", (m.gradient == "surrogate") == rounds, reason::kSurrogateDiffers,
              fmt::format("{}: gradient {}, rounding in its path: {}", m.id, m.gradient, rounds));
  }
  for (const std::string& id : inventory) {
    j.Require("C6-05", std::count(ids.begin(), ids.end(), id) == 1, reason::kInventoryIncomplete,
              fmt::format("{} has {} verdicts", id, std::count(ids.begin(), ids.end(), id)));
  }
  for (const std::string& name : registry) {
    j.Require("C6-01", used.contains(name), reason::kInventoryIncomplete,
              fmt::format("the registry holds the backward {} and no module uses it", name));
  }
  // C6-02: declared and executed.
  std::vector<std::string> declared;
  for (const Rounding& r : roundings) {
    declared.push_back(r.site);
    j.Require("C6-02", std::count(sites.begin(), sites.end(), r.site) == 1,
              reason::kSurrogateDiffers,
              fmt::format("{}: the trace shows no rounding there", r.site));
    j.Require("C6-02",
              r.in_range == "passes" &&
                  r.saturated == (r.surrogate == "clipping" ? "zero" : "passes") &&
                  r.executed_value == r.value && r.executed_scale == r.scale_rule,
              reason::kSurrogateDiffers,
              fmt::format("{}: declared {} of the {} value, {}; executed: in range {}, saturated "
                          "{}, {} value, {}",
                          r.site, r.surrogate, r.value, r.scale_rule, r.in_range, r.saturated,
                          r.executed_value, r.executed_scale));
  }
  for (const std::string& site : sites) {
    j.Require("C6-02", std::count(declared.begin(), declared.end(), site) == 1,
              reason::kSurrogateDiffers, fmt::format("{}: no surrogate is declared", site));
  }
  // C6-06: poison everything between forward and backward.
  std::set<std::string> poisoned;
  for (const Poison& p : poisons) {
    poisoned.insert(p.what);
    j.Require("C6-06", p.before == p.after, reason::kStateRecomputed,
              fmt::format("the gradient moved when {} changed after the forward", p.what));
  }
  for (const auto& [what, why] : absent) {
    poisoned.insert(what);
    j.Require("C6-06", why.size() >= 10, reason::kStateRecomputed,
              fmt::format("{}: `{}` does not say why there is none", what, why));
    j.NotCovered("C6-06", fmt::format("{}: {}", what, why), "");
  }
  // What every trainer has is poisoned, not excused.
  j.Require(
      "C6-06",
      std::none_of(absent.begin(), absent.end(), [](const auto& a) { return a.first == "caches"; }),
      reason::kStateRecomputed, "buffers of a forward were not poisoned");
  j.Require("C6-06", poisoned == kPoisons && poisons.size() + absent.size() == kPoisons.size(),
            reason::kStateRecomputed,
            fmt::format("poisoned: {}; {} are wanted", fmt::join(poisoned, ", "),
                        fmt::join(kPoisons, ", ")));
  j.Require("C6-06", raises, reason::kStateRecomputed,
            "a weight changed in place between forward and backward was used silently");
  // BWD-05, T-20: both cheats leave the forward as it is.
  j.Require("BWD-05", detached == 0 && formula == "executed forward", reason::kDetachedSubstitute,
            fmt::format("{} outputs are cut from the graph; the loss sees {}", detached, formula));
  j.Require("C6-04", hits.empty() && loaded.empty() && preload.empty(), reason::kProductionPatched,
            fmt::format("{} in sources, {} at run time, preload `{}`", fmt::join(hits, ", "),
                        fmt::join(loaded, ", "), preload));
  j.Require("C6-04", built > 0 && built == scanned, reason::kNothingCompared,
            fmt::format("{} sources were built, {} were scanned", built, scanned));
  // C6-07, C6-08, GEN-27.
  j.Require("GEN-27", denominator == "native training path", reason::kServingOnlyOptimum,
            fmt::format("the denominator is {}, not the native training path", denominator));
  const int64_t forward_ppm = Agreed(agreement, "forward_ratio_ppm").value_or(0),
                step_ppm = Agreed(agreement, "step_ratio_ppm").value_or(0);
  std::vector<std::string> topologies = AgreedList(agreement, "main_topologies");
  const bool decided = !agreement.empty();
  if (!decided) {
    j.Provisional("main topologies and budgets await the person's decision at C1");
    j.NotCovered("C6-07", "step time against a budget: budget-undecided", "close C1");
    j.Require("C6-07", times.empty(), reason::kBudgetUndecided,
              "step times were handed in and no person has decided what to hold them against");
    topologies = {"1 process"};
  } else if (j.Require("C1-08", forward_ppm > 0 && step_ppm > 0 && !topologies.empty(),
                       reason::kInventoryIncomplete,
                       "the agreement lacks forward_ratio_ppm, step_ratio_ppm or "
                       "main_topologies")) {
    std::vector<std::string> measured;
    for (const Timing& t : times) {
      measured.push_back(t.topology);
      for (const Series* s :
           {&t.forward_native, &t.forward_aligned, &t.step_native, &t.step_aligned}) {
        j.Require("C6-08", SeriesFollows(*s), reason::kReceiptContradicted,
                  fmt::format("{}: a median or sum does not follow from its values", t.topology));
      }
      j.Require("C6-07", Within(t.forward_aligned, t.forward_native, forward_ppm),
                reason::kOverBudget,
                fmt::format("{}: forward {} us against {} us, {} ppm agreed", t.topology,
                            t.forward_aligned.median, t.forward_native.median, forward_ppm));
      j.Require("C6-07", Within(t.step_aligned, t.step_native, step_ppm), reason::kOverBudget,
                fmt::format("{}: step {} us against {} us, {} ppm agreed", t.topology,
                            t.step_aligned.median, t.step_native.median, step_ppm));
    }
    std::sort(measured.begin(), measured.end());
    std::sort(topologies.begin(), topologies.end());
    j.Require("C6-07", measured == topologies, reason::kOverBudget,
              fmt::format("measured [{}]; the person fixed [{}]", fmt::join(measured, " "),
                          fmt::join(topologies, " ")));
  }
  ScopeBox box;
  box.shape = {fmt::format("modules={}", modules.size())};
  box.topology = topologies;
  box.dtype = {"f32 gradients"};
  box.model = {subject.weights};
  box.path = {"backward"};
  box.contracts = {subject.contracts};
  j.Cover(std::move(box));
  return j.Finish();
}

}  // namespace tare::workflow
