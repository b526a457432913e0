// Two arms of a real system, compared token by token: which question does the difference answer?
// Tokens before dtype, dtype before bits, and where bits differ, whether layout or meaning moved
// them. No tolerance is looked at anywhere: a small distance explains nothing.

#include <fmt/format.h>

#include <algorithm>

#include "workflow/gates/arms.h"

namespace tare::workflow {
namespace {

struct Arm {
  std::string name, weights, stored, effective, layout, computation, system;
  bool exists = false;
};
Arm ReadArm(const Field& f) {
  Arm a;
  a.name = f.At("name").Str();
  a.exists = f.At("exists").Bool();
  a.system = f.At("system").OneOf({"rollout", "trainer", "unknown"});
  a.weights = f.At("weights_sha256").Text();
  a.stored = f.At("stored_dtype").Text();
  a.effective = f.At("effective_dtype").Text();
  a.layout = f.At("layout").Text();
  a.computation = f.At("computation").Text();
  return a;
}

struct Sequence {
  int64_t tokens = 0, common = 0, equal = 0, max_ulp = 0;
  double max_abs = 0;
};
std::vector<Sequence> ReadSequences(const Field& f) {
  std::vector<Sequence> out;
  for (const Field& s : f.Items()) {
    out.push_back({s.At("tokens").Int(0, INT64_MAX), s.At("common").Int(0, INT64_MAX),
                   s.At("equal").Int(0, INT64_MAX), s.At("max_ulp").Int(0, INT64_MAX),
                   s.At("max_abs").Real(0, 1e30)});
  }
  return out;
}

struct Total {
  int64_t tokens = 0, common = 0, equal = 0, diverged = 0, max_ulp = 0;
  double max_abs = 0;
};
Total Sum(const std::vector<Sequence>& sequences) {
  Total t;
  for (const Sequence& s : sequences) {
    t.tokens += s.tokens;
    t.common += s.common;
    t.equal += s.equal;
    t.diverged += s.common < s.tokens ? 1 : 0;
    t.max_ulp = std::max(t.max_ulp, s.max_ulp);
    t.max_abs = std::max(t.max_abs, s.max_abs);
  }
  return t;
}

// The first sequence of a packed row has nothing before it. Where it equals the same packing with
// isolated sequences and the others do not, they read what lies before them.
bool Leaks(const std::vector<Sequence>& against_isolated) {
  if (against_isolated.size() < 2) return false;
  const Sequence& first = against_isolated.front();
  if (first.common == 0 || first.equal != first.common) return false;
  return std::all_of(against_isolated.begin() + 1, against_isolated.end(),
                     [](const Sequence& s) { return s.common > 0 && s.equal == 0; });
}

}  // namespace

GateJudgement JudgeArms(const Json& evidence) {
  Judging j("arms", evidence);
  const Field root = j.root();
  const std::string question = root.At("question").OneOf({"C3", "C5"});
  const Arm a = ReadArm(root.At("a")), b = ReadArm(root.At("b"));
  const std::vector<Sequence> sequences = ReadSequences(root.At("sequences"));
  std::string isolated;
  std::vector<Sequence> against_isolated;
  if (const std::optional<Field> control = root.MaybeAt("isolated_control")) {
    isolated = control->At("name").Str();
    against_isolated = ReadSequences(control->At("sequences"));
  }
  std::map<std::string, double> metrics;
  for (const auto& [name, value] : root.At("diagnostic_metrics").Members()) {
    metrics[name] = value.Real(-1e30, 1e30);
  }
  if (!j.WellFormed()) return j.Finish();

  const char* row = question == "C3" ? "C3-09" : "C5-07";
  const std::string pair = fmt::format("{} against {}", a.name, b.name);
  bool exist = true;
  for (const Arm* arm : {&a, &b}) {
    exist &= j.Require(question == "C3" ? "C3-09" : "C5-06", arm->exists, reason::kNotImplemented,
                       fmt::format("no arm `{}` was recorded", arm->name));
  }
  if (!exist) return j.Finish();
  if (question == "C5" &&
      !j.Require("C5-10", a.system != b.system || a.system == "unknown", reason::kInferenceInternal,
                 fmt::format("{}: both arms are of the {}", pair, a.system))) {
    return j.Finish();
  }
  j.Require(
      "C3-01", a.weights == b.weights && !a.weights.empty(), reason::kWeightHashMismatch,
      fmt::format("{}: weights {} and {}", pair, a.weights.substr(0, 12), b.weights.substr(0, 12)));
  const Total t = Sum(sequences);
  if (t.diverged > 0) {
    j.Find(Verdict::kRefused, "C3-01", reason::kTokensDiffer,
           fmt::format("{}: {} of {} sequences part; {} of {} bits agree on the {} tokens before",
                       pair, t.diverged, sequences.size(), t.equal, t.common, t.common));
  }
  if (!j.Require(row, t.common > 0, reason::kNothingCompared, pair + ": no common token")) {
    return j.Finish();
  }
  const std::string counts =
      fmt::format("{}: {} of {} tokens differ in their bits; largest distance {:.4g}, {} ulp", pair,
                  t.common - t.equal, t.common, t.max_abs, t.max_ulp);
  const bool same_dtype = a.effective == b.effective;
  if (!same_dtype) {
    j.Find(Verdict::kInconclusive, "C5-07", reason::kDtypeDiffers,
           fmt::format("{} holds {} values and {} holds {}, whatever they are stored as", a.name,
                       a.effective, b.name, b.effective));
    j.Note(fmt::format("diagnosis by exact upcast: {}", counts));
  } else if (t.equal < t.common) {
    const bool trainers = a.system == "trainer" && b.system == "trainer";
    if (trainers && Leaks(against_isolated)) {
      j.Find(
          Verdict::kFail, "C5-04", reason::kContextLeak,
          fmt::format("{}: the first sequence of the packed row equals {} in every bit, no other "
                      "does in any: the later ones read the earlier; {}",
                      b.name, isolated, counts));
    } else if (trainers && a.layout != b.layout && a.computation == b.computation) {
      j.Find(Verdict::kFail, "C5-04", reason::kLayoutMovesBits,
             fmt::format("layout {} against {}: {}", a.layout, b.layout, counts));
    } else {
      j.Find(Verdict::kFail, row, reason::kBitMismatch, counts);
    }
  } else {
    j.Pass(row, fmt::format("{}: {} tokens equal in every bit", pair, t.equal));
  }
  for (const auto& [name, value] : metrics) {
    j.Note(fmt::format("diagnostic-only, of the other system: {} = {:.6g}", name, value));
  }
  if (question == "C3") j.Note("consistency inside one system only");
  j.Cover({.shape = {fmt::format("{} sequences, {} tokens", sequences.size(), t.common)},
           .topology = {"as recorded"},
           .dtype = {a.effective.empty() ? "unknown" : a.effective},
           .model = {a.weights.empty() ? "unknown" : a.weights},
           .path = {pair},
           .contracts = {}});
  return j.Finish();
}

}  // namespace tare::workflow
