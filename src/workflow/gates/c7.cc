// C7: gradients against a reference of the same contract that shares no code with them, in three
// layers, and the three-way finetuning control. Bitwise and tolerance results stay apart.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "workflow/gates/evidence_parts.h"

namespace tare::workflow {
namespace {

constexpr std::array<std::string_view, 3> kLayers = {"operator", "module", "model"};
constexpr std::array<std::string_view, 4> kInputs = {"input", "weights", "saved state", "upstream"};

struct Tolerance {
  std::string id, layer, metric, reason;
  double bound = 0;
};
struct Quantity {
  std::string name, tolerance;
  int64_t elements = 0, equal = 0, differ = 0, non_finite = 0, worst_index = 0;
  uint32_t production = 0, reference = 0;  // f32 words at the worst element
  std::optional<uint32_t> largest;         // f32 word of the largest reference element
  double error = 0;
  bool all_zero = false;
};
struct Case {
  std::string where, production_dtype, upstream_dtype;
  bool representable = false;
  std::map<std::string, std::pair<std::string, std::string>> inputs;  // production, reference
  std::vector<Quantity> quantities;
};
struct Arm {
  std::string data, weights, forward;  // forward: empty for native
  int64_t steps = 0, result = 0;
};
struct Evidence {
  Subject subject;
  std::string kind, quality, quality_evidence;
  std::vector<std::string> order, parameters;
  std::vector<Tolerance> tolerances;
  std::set<std::string> production_code, reference_code;
  std::string production_before, production_after, reference_before, reference_after;
  std::map<std::string, std::vector<Case>> layers;
  std::vector<Quantity> masters, first_moments, second_moments;
  std::vector<std::string> required_by;
  bool sft = false;
  std::map<std::string, Arm> arms;
  std::string evaluation;
  int64_t margin = 0, production_native = 0, production_surrogate = 0;
};

std::vector<Quantity> ReadQuantities(const Field& field) {
  std::vector<Quantity> out;
  for (const Field& item : field.Items()) {
    Quantity q;
    q.name = item.At("name").Str();
    q.tolerance = item.At("tolerance").Str();
    q.elements = item.At("elements").Int(1, INT64_MAX / 4);
    q.equal = item.At("bitwise_equal").Int(0, INT64_MAX / 4);
    q.differ = item.At("bitwise_different").Int(0, INT64_MAX / 4);
    q.non_finite = item.At("non_finite").Int(0, INT64_MAX / 4);
    q.all_zero = item.At("all_zero").Bool();
    const Field worst = item.At("worst");
    q.worst_index = worst.At("index").Int(0, INT64_MAX / 4);
    q.production = worst.At("production").Bits32();
    q.reference = worst.At("reference").Bits32();
    if (const std::optional<Field> largest = item.MaybeAt("largest")) q.largest = largest->Bits32();
    q.error = item.At("error").Real(0, 1e30);
    out.push_back(std::move(q));
  }
  return out;
}

void ReadSft(const Field& at, Evidence* e) {
  e->required_by = at.At("required_by").Strings();
  const Field control = at.At("control");
  e->sft = !control.IsNull();
  if (!e->sft) return;
  for (const auto& [name, item] : control.At("arms").Members()) {
    Arm arm;
    arm.data = item.At("data").Hash();
    arm.weights = item.At("initial_weights").Hash();
    arm.steps = item.At("steps").Int(1, INT32_MAX);
    if (name != "native") arm.forward = item.At("visible_forward").Hash();
    arm.result = item.At("result_ppm").Int(0, INT32_MAX);
    e->arms[name] = std::move(arm);
  }
  const Field evaluation = control.At("evaluation");
  e->evaluation = evaluation.At("declared").Str();
  e->margin = evaluation.At("margin_ppm").Int(0, INT32_MAX);
  e->production_native = evaluation.At("production_minus_native_ppm").Int(-INT32_MAX, INT32_MAX);
  e->production_surrogate =
      evaluation.At("production_minus_surrogate_ppm").Int(-INT32_MAX, INT32_MAX);
}

Evidence Read(const Field& root) {
  Evidence e;
  e.subject = ReadSubject(root);
  e.kind = root.At("kind").Str();
  e.order = root.At("order").Strings();
  e.parameters = root.At("parameters").Strings(1);
  for (const Field& item : root.At("tolerances").Items()) {
    Tolerance t;
    t.id = item.At("id").Str();
    t.layer = item.At("layer").OneOf({"operator", "module", "model", "step"});
    t.metric = item.At("metric").OneOf({"absolute", "relative", "of-largest"});
    t.bound = item.At("bound").Real(0, 1);
    t.reason = item.At("reason").Str();
    e.tolerances.push_back(std::move(t));
  }
  const Field code = root.At("code");
  e.production_code = code.At("production").StringSet(1);
  e.reference_code = code.At("reference").StringSet(1);
  const Field moved = root.At("perturbation");
  e.production_before = moved.At("production_before").Hash();
  e.production_after = moved.At("production_after").Hash();
  e.reference_before = moved.At("reference_before").Hash();
  e.reference_after = moved.At("reference_after").Hash();
  for (const auto& [name, cases] : root.At("layers").Members()) {
    for (const Field& item : cases.Items()) {
      Case c;
      c.where = item.At("where").Str();
      c.production_dtype = item.At("production_dtype").Str();
      c.upstream_dtype = item.At("upstream_dtype").Str();
      c.representable = item.At("upstream_representable").Bool();
      for (const auto& [input, sides] : item.At("inputs").Members()) {
        c.inputs[input] = {sides.At("production").Hash(), sides.At("reference").Hash()};
      }
      c.quantities = ReadQuantities(item.At("quantities"));
      e.layers[name].push_back(std::move(c));
    }
  }
  const Field step = root.At("step");
  e.masters = ReadQuantities(step.At("masters"));
  e.first_moments = ReadQuantities(step.At("first_moments"));
  e.second_moments = ReadQuantities(step.At("second_moments"));
  ReadSft(root.At("sft"), &e);
  e.quality = root.At("quality").OneOf({"covered", "not covered"});
  e.quality_evidence =
      root.At("quality_evidence").OneOf({"none", "declared evaluation", "falling loss"});
  return e;
}

class Judge7 {
 public:
  Judge7(Judging* judging, const Evidence& evidence) : j_(*judging), e_(evidence) {}

  void Run() {
    j_.Require("C7-09", e_.kind == "E7", reason::kWrongEvidenceKind,
               fmt::format("evidence of kind {}; gradients are E7", e_.kind));
    std::vector<std::string> order = {"tolerances", "operator", "module", "model", "step"};
    if (e_.sft) order.insert(order.end(), {"evaluation declared", "finetuning"});
    j_.Require("C7-04", e_.order == order, reason::kToleranceAfterResult,
               fmt::format("order was {}; {} is wanted", fmt::join(e_.order, ", "),
                           fmt::join(order, ", ")));
    Tolerances();
    Independent();
    Layers();
    Step();
    Quality();
    for (const auto& [id, count] : used_) {
      j_.Require("C7-04", count > 0, reason::kToleranceAfterResult,
                 fmt::format("tolerance {} is used by nothing", id));
    }
    j_.Note(fmt::format("{} of {} quantities are equal in every bit; {} within their tolerance",
                        bitwise_, quantities_, within_));
  }

 private:
  void Tolerances() {
    std::vector<std::string> ids;
    for (const Tolerance& t : e_.tolerances) {
      ids.push_back(t.id);
      used_[t.id] = 0;
      j_.Require("C7-04", t.reason.size() >= 10, reason::kToleranceAfterResult,
                 fmt::format("{}: `{}` is no reason for a tolerance", t.id, t.reason));
    }
    j_.Require("C7-04", AllDifferent(ids), reason::kDuplicateName, "two tolerances have one name");
  }

  // C7-02: no code in common, and a planted ulp moves production alone.
  void Independent() {
    for (const std::string& file : e_.reference_code) {
      j_.Require("C7-02", !e_.production_code.contains(file), reason::kNotIndependent,
                 fmt::format("reference and production share {}", file));
    }
    j_.Require("C7-02", e_.reference_before == e_.reference_after, reason::kNotIndependent,
               "the reference moved when the backward under test was changed by one ulp");
    j_.Require("C7-02", e_.production_before != e_.production_after, reason::kNotIndependent,
               "the planted change did not reach the backward under test");
  }

  void Layers() {
    for (const std::string_view name : kLayers) {
      const auto it = e_.layers.find(std::string(name));
      if (!j_.Require("DOC-28", it != e_.layers.end() && !it->second.empty(), reason::kLayerMissing,
                      fmt::format("layer {} was not compared", name))) {
        continue;
      }
      std::vector<std::string> wheres;
      std::set<std::string> dtypes;
      for (const Case& c : it->second) {
        std::vector<std::string> names;
        wheres.push_back(c.where);
        dtypes.insert(c.production_dtype);
        Inputs(name, c);
        for (const Quantity& q : c.quantities) {
          names.push_back(q.name);
          Judge("C7-03", fmt::format("{} {}", c.where, q.name), name, q);
        }
        j_.Require("C7-03", !c.quantities.empty(), reason::kInventoryIncomplete,
                   fmt::format("{}: no gradient was compared", c.where));
        if (name == "model") Complete("C7-03", c.where, std::move(names));
      }
      j_.Require("C7-03", AllDifferent(wheres), reason::kDuplicateName,
                 fmt::format("layer {} holds a case twice", name));
      ScopeBox box;
      box.shape = {fmt::format("cases={}", it->second.size())};
      box.topology = {"1 process"};
      box.dtype.assign(dtypes.begin(), dtypes.end());
      box.model = {e_.subject.weights};
      box.path = {fmt::format("backward.{}", name)};
      box.contracts = {e_.subject.contracts};
      j_.Cover(std::move(box));
    }
    j_.Require("DOC-28", e_.layers.size() == kLayers.size(), reason::kLayerMissing,
               fmt::format("{} layers; operator, module and model", e_.layers.size()));
  }

  // C7-01, BWD-03.
  void Inputs(std::string_view layer, const Case& c) {
    for (const std::string_view name : kInputs) {
      const auto it = c.inputs.find(std::string(name));
      j_.Require("C7-01", it != c.inputs.end() && it->second.first == it->second.second,
                 reason::kInputDiffers,
                 fmt::format("{} {}: the two backwards did not get one {}", layer, c.where, name));
    }
    j_.Require(
        "C7-01", c.inputs.size() == kInputs.size(), reason::kInputDiffers,
        fmt::format("{} {}: {} inputs; {}", layer, c.where, c.inputs.size(), kInputs.size()));
    j_.Require("BWD-03", c.upstream_dtype == c.production_dtype && c.representable,
               reason::kInputDiffers,
               fmt::format("{} {}: upstream gradient in {}, production in {}, {}", layer, c.where,
                           c.upstream_dtype, c.production_dtype,
                           c.representable ? "representable" : "not representable"));
  }

  // C7-05, C7-10: what it says must follow from the two words.
  void Judge(std::string_view row, const std::string& where, std::string_view layer,
             const Quantity& q) {
    ++quantities_;
    j_.Require("C7-10",
               q.equal + q.differ == q.elements && q.worst_index < q.elements &&
                   q.non_finite <= q.elements,
               reason::kReceiptContradicted,
               fmt::format("{}: {} equal and {} different of {} elements", where, q.equal, q.differ,
                           q.elements));
    if (!j_.Require("CHEAP-05", q.non_finite == 0, reason::kNonFinite,
                    fmt::format("{}: {} elements", where, q.non_finite))) {
      return;
    }
    j_.Require("BWD-02", !q.all_zero, reason::kGradientNotMeaningful,
               fmt::format("{}: all {} elements are zero", where, q.elements));
    const Tolerance* tolerance = nullptr;
    for (const Tolerance& t : e_.tolerances) {
      if (t.id == q.tolerance && t.layer == layer) tolerance = &t;
    }
    if (!j_.Require(
            "C7-04", tolerance != nullptr, reason::kToleranceAfterResult,
            fmt::format("{}: no tolerance {} was fixed for layer {}", where, q.tolerance, layer))) {
      return;
    }
    ++used_[tolerance->id];
    const double p = static_cast<double>(std::bit_cast<float>(q.production));
    const double r = static_cast<double>(std::bit_cast<float>(q.reference));
    double scale = tolerance->metric == "relative" ? std::fabs(r) : 1.0;
    if (tolerance->metric == "of-largest") {
      const double largest =
          q.largest ? std::fabs(static_cast<double>(std::bit_cast<float>(*q.largest))) : 0;
      if (!j_.Require(
              "C7-10", std::isfinite(largest) && largest > 0 && largest >= std::fabs(r),
              reason::kReceiptContradicted,
              fmt::format("{}: the largest element of the reference is {}, the worst has {}", where,
                          largest, r))) {
        return;
      }
      scale = largest;
    }
    const double error = scale == 0 ? std::fabs(p - r) : std::fabs(p - r) / scale;
    j_.Require("C7-10",
               std::isfinite(error) && std::fabs(error - q.error) <= 1e-6 * error + 1e-30 &&
                   (q.production == q.reference) == (q.differ == 0),
               reason::kReceiptContradicted,
               fmt::format("{}: {} {} and {} different elements, but the worst words give {}",
                           where, tolerance->metric, q.error, q.differ, error));
    if (q.differ == 0) {
      ++bitwise_;
      return;
    }
    if (j_.Require(row, error <= tolerance->bound, reason::kGradientDiffers,
                   fmt::format("{}: {} error {:.3g} at element {}, tolerance {} is {:.3g}", where,
                               tolerance->metric, error, q.worst_index, tolerance->id,
                               tolerance->bound))) {
      ++within_;
    }
  }

  void Complete(std::string_view row, std::string_view what, std::vector<std::string> names) {
    std::vector<std::string> want = e_.parameters;
    std::sort(want.begin(), want.end());
    std::sort(names.begin(), names.end());
    std::vector<std::string> missing;
    std::set_difference(want.begin(), want.end(), names.begin(), names.end(),
                        std::back_inserter(missing));
    j_.Require(row, want == names, reason::kInventoryIncomplete,
               fmt::format("{}: {} of {} trainable parameters, missing {}", what, names.size(),
                           want.size(), fmt::join(missing, ", ")));
  }

  void Step() {
    const std::pair<const char*, const std::vector<Quantity>*> parts[] = {
        {"masters after the step", &e_.masters},
        {"first moments", &e_.first_moments},
        {"second moments", &e_.second_moments}};
    for (const auto& [what, list] : parts) {
      std::vector<std::string> names;
      for (const Quantity& q : *list) {
        names.push_back(q.name);
        Judge("C7-03", fmt::format("{} {}", what, q.name), "step", q);
      }
      Complete("C7-03", what, names);
    }
  }

  // C7-06 to C7-08.
  void Quality() {
    static const std::set<std::string> kReasons = {"surrogate gradient", "approximate gradient",
                                                   "newly written backward", "quality is claimed",
                                                   "asked for"};
    for (const std::string& why : e_.required_by) {
      j_.Require("C7-06", kReasons.contains(why), reason::kArmMissing,
                 fmt::format("{} is no reason for the control", why));
    }
    j_.Require("C7-08", e_.quality_evidence != "falling loss", reason::kLossNotQuality,
               "a falling loss was handed in as quality");
    // The control may be run for its forwards alone: then quality stays not covered.
    const bool claimed = e_.quality == "covered";
    j_.Require("C7-07",
               claimed == (e_.quality_evidence == "declared evaluation") && (!claimed || e_.sft),
               reason::kLossNotQuality,
               fmt::format("quality is marked {}, its evidence is {}, the control {}", e_.quality,
                           e_.quality_evidence, e_.sft ? "ran" : "did not run"));
    if (!e_.sft) {
      const bool needed = std::any_of(
          e_.required_by.begin(), e_.required_by.end(),
          [](const std::string& w) { return w == "quality is claimed" || w == "asked for"; });
      j_.Require("C7-06", !needed, reason::kArmMissing,
                 fmt::format("the control is required ({}) and did not run",
                             fmt::join(e_.required_by, ", ")));
      j_.NotCovered("C7-07", "quality not covered: the three-way finetuning control did not run",
                    "run production, surrogate and native on one data order");
      return;
    }
    if (!claimed) {
      j_.NotCovered(
          "C7-07",
          fmt::format("quality not covered: the control's evaluation is `{}`", e_.evaluation),
          "declare an evaluation of quality before the arms run");
    }
    const auto production = e_.arms.find("production"), surrogate = e_.arms.find("surrogate"),
               native = e_.arms.find("native");
    if (!j_.Require("C7-06",
                    e_.arms.size() == 3 && production != e_.arms.end() &&
                        surrogate != e_.arms.end() && native != e_.arms.end(),
                    reason::kArmMissing,
                    "production, surrogate and native are wanted, no others")) {
      return;
    }
    const Arm &p = production->second, &s = surrogate->second, &n = native->second;
    for (const Arm* arm : {&p, &s, &n}) {
      j_.Require("C7-06",
                 arm->data == p.data && arm->steps == p.steps && arm->weights == e_.subject.weights,
                 reason::kInputDiffers,
                 "the arms did not get one data order, number of steps and initial weights");
    }
    j_.Require("C7-06", p.forward == s.forward, reason::kSurrogateDiffers,
               "the surrogate's visible forward is not that of production");
    j_.Require("C7-08",
               p.result - n.result == e_.production_native &&
                   p.result - s.result == e_.production_surrogate,
               reason::kReceiptContradicted,
               "the differences of the arms do not follow from their results");
    j_.Require(
        "C7-06",
        std::abs(e_.production_native) <= e_.margin &&
            std::abs(e_.production_surrogate) <= e_.margin,
        reason::kGradientDiffers,
        fmt::format("{}: production differs by {} ppm from native and by {} ppm from the "
                    "surrogate; {} ppm were declared",
                    e_.evaluation, e_.production_native, e_.production_surrogate, e_.margin));
    j_.Note(fmt::format("{}: forward effect {} ppm, backward effect {} ppm", e_.evaluation,
                        s.result - n.result, p.result - s.result));
  }

  Judging& j_;
  const Evidence& e_;
  std::map<std::string, int> used_;
  int64_t quantities_ = 0, bitwise_ = 0, within_ = 0;
};

}  // namespace

GateJudgement JudgeC7(const Json& evidence) {
  Judging judging("C7", evidence);
  const Evidence e = Read(judging.root());
  if (judging.WellFormed()) Judge7(&judging, e).Run();
  return judging.Finish();
}

}  // namespace tare::workflow
