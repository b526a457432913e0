// Claims about experiments: that the stored failure itself was replayed, that the engine was tried
// on its five axes, that the next probe can tell something, that an operator saw the real inputs.

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "workflow/claims/claim.h"

namespace tare::workflow {
namespace {

const std::string kTokens = "tokens:batch";

// ---- CHEAP-11

using Probe = std::map<std::string, std::string>;
constexpr std::array<const char*, 4> kProbeAxes = {"layer", "token", "operand", "scheduling"};

Probe ReadProbe(const Field& f) {
  Probe p;
  for (const char* axis : kProbeAxes) p[axis] = f.At(axis).Str();
  return p;
}
std::string ProbeText(const Probe& p) {
  std::string out;
  for (const char* axis : kProbeAxes)
    out += fmt::format("{}{} {}", out.empty() ? "" : ", ", axis, p.at(axis));
  return out;
}

}  // namespace

GateJudgement JudgeReplayClaim(const Json& document) {
  struct Replay {
    std::string arms, batch;
    int64_t compared = 0, mismatches = 0;
    std::vector<std::string> tokens;  // that differ
    Reference record;
  };
  Judging j("replay", document, "tare.claim.replay/v1");
  const Field root = j.root();
  const Field o = root.At("original");
  const Reference original = ReadReference(o.At("record"));
  const std::string batch = o.At("batch").Hash();
  const int64_t valid = o.At("valid_tokens").Int(0, INT64_MAX),
                differed = o.At("mismatches").Int(0, INT64_MAX);
  std::vector<Replay> replays;
  for (const Field& f : root.At("replays").Items()) {
    Replay r;
    r.arms = f.At("arms").OneOf({"A/C", "A/A"});
    r.batch = f.At("batch").Hash();
    r.compared = f.At("compared").Int(0, INT64_MAX);
    r.mismatches = f.At("mismatches").Int(0, INT64_MAX);
    r.tokens = f.At("mismatching_tokens").Strings();
    r.record = ReadReference(f.At("record"));
    replays.push_back(std::move(r));
  }
  if (!j.WellFormed()) return j.Finish();

  j.Require("CHEAP-07", original.verdict == "fail" && differed > 0 && valid > 0,
            reason::kInputMissing, "no stored failure: its run did not fail or counts nothing");
  j.Require("CHEAP-07", original.On(kTokens) == batch, reason::kReplayPartial,
            "the batch is not the one that the failing run declares");
  for (const char* arms : {"A/C", "A/A"}) {
    j.Require("CHEAP-07",
              std::any_of(replays.begin(), replays.end(),
                          [&](const Replay& r) { return r.arms == arms; }),
              reason::kReplayPartial, fmt::format("{} was not replayed", arms));
  }
  for (const Replay& r : replays) {
    j.Require("CHEAP-07", r.batch == batch && r.record.On(kTokens) == batch, reason::kReplayPartial,
              r.arms + ": another batch was replayed");
    j.Require("CHEAP-07", r.compared == valid, reason::kReplayPartial,
              fmt::format("{}: {} of {} valid tokens were compared", r.arms, r.compared, valid));
    const std::set<std::string> distinct(r.tokens.begin(), r.tokens.end());
    j.Require(
        "CHEAP-07",
        static_cast<int64_t>(distinct.size()) == r.mismatches && distinct.size() == r.tokens.size(),
        reason::kReplayPartial,
        fmt::format("{}: {} tokens differ, {} are reported", r.arms, r.mismatches, distinct.size()),
        "report every token that differs, not the first ones");
    j.Require("CHEAP-07", r.arms != "A/A" || r.mismatches == 0, reason::kSelfInconsistent,
              "A/A: the side differs from itself, so A/C says nothing yet");
    j.Require("CHEAP-07", r.record.kind == "E4" && r.record.fresh, reason::kWrongEvidenceKind,
              fmt::format("{}: its record is {}{}", r.arms, r.record.kind,
                          r.record.fresh ? "" : ", stale"));
  }
  j.Cover(BoxOf({.shape = {fmt::format("batch {}, {} valid tokens", batch.substr(0, 12), valid)}}));
  return j.Finish();
}

GateJudgement JudgeEngineCases(const Json& document) {
  static constexpr std::array kAxes = {"composition", "prefill-decode", "chunk-boundary",
                                       "cache-graph", "parallelism"};
  struct Case {
    std::string axis, topology;
    Reference record;
  };
  Judging j("engine-cases", document, "tare.claim.engine-cases/v1");
  const Field root = j.root();
  const std::string topology = root.At("recipe_topology").Str();
  std::vector<Case> cases;
  for (const Field& c : root.At("cases").Items()) {
    cases.push_back({c.At("axis").OneOf({"composition", "prefill-decode", "chunk-boundary",
                                         "cache-graph", "parallelism"}),
                     c.At("topology").Str(), ReadReference(c.At("record"))});
  }
  if (!j.WellFormed()) return j.Finish();

  for (const char* axis : kAxes) {
    const bool any =
        std::any_of(cases.begin(), cases.end(), [&](const Case& c) { return c.axis == axis; });
    j.Require("CHEAP-08", any, reason::kMatrixGap, fmt::format("no case on axis {}", axis));
  }
  std::set<std::string> at_topology;
  for (const Case& c : cases) {
    j.Require("CHEAP-08", c.record.kind == "E5" && c.record.Passes(), reason::kGateNotPassed,
              fmt::format("{} at {}: {} {}{}", c.axis, c.topology, c.record.kind, c.record.verdict,
                          c.record.fresh ? "" : ", stale"));
    if (c.topology == topology) at_topology.insert(c.axis);
  }
  // Evidence of one rank is none of four.
  j.Require("CHEAP-08", at_topology.contains("parallelism"), reason::kRecipeNotCovered,
            fmt::format("axis parallelism: no case at {}, which is the recipe's", topology));
  ScopeBox box = BoxOf({.shape = {at_topology.begin(), at_topology.end()}, .topology = topology});
  if (box.shape.empty()) box.shape = {"none"};
  j.Cover(std::move(box));
  for (const char* axis : kAxes) {
    if (!at_topology.contains(axis))
      j.NotCovered("CHEAP-08", fmt::format("axis {} at {}", axis, topology), "run it there");
  }
  return j.Finish();
}

GateJudgement JudgeProbeClaim(const Json& document) {
  struct Run {
    Probe probe;
    std::set<std::string> candidates;
  };
  Judging j("probe", document, "tare.claim.probe/v1");
  const Field root = j.root();
  std::vector<Run> runs;
  for (const Field& f : root.At("runs").Items()) {
    runs.push_back({ReadProbe(f.At("probe")), f.At("candidates").StringSet()});
    ReadReference(f.At("record"));
  }
  const Probe next = ReadProbe(root.At("next"));
  if (!j.WellFormed()) return j.Finish();

  const size_t n = runs.size();
  const bool stuck = n >= 2 && runs[n - 1].candidates == runs[n - 2].candidates;
  const bool repeated =
      std::any_of(runs.begin(), runs.end(), [&](const Run& r) { return r.probe == next; });
  // Which axis was moved least among the runs that left these candidates: that one is proposed.
  std::string proposals;
  if (stuck) {
    std::vector<std::pair<size_t, const char*>> tried;
    for (const char* axis : kProbeAxes) {
      std::set<std::string> values;
      for (const Run& r : runs) {
        if (r.candidates == runs[n - 1].candidates) values.insert(r.probe.at(axis));
      }
      tried.emplace_back(values.size(), axis);
    }
    std::stable_sort(tried.begin(), tried.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& [count, axis] : tried) {
      proposals += fmt::format("{}another {} (now {})", proposals.empty() ? "" : ", or ", axis,
                               runs[n - 1].probe.at(axis));
    }
  }
  j.Require("CHEAP-11", !(stuck && repeated), reason::kProbeRepeated,
            fmt::format("{} was run, and the last two runs left the same {} candidates",
                        ProbeText(next), n == 0 ? 0 : runs[n - 1].candidates.size()),
            proposals.empty() ? "" : "probe " + proposals);
  j.Require("CHEAP-11", n == 0 || !runs[n - 1].candidates.empty(), reason::kNothingCompared,
            "the last run left no candidate at all: it looked elsewhere than at the difference");
  j.Cover(BoxOf({.shape = {ProbeText(next)}, .topology = "one probe"}));
  return j.Finish();
}

GateJudgement JudgeOperatorCase(const Json& document) {
  struct Input {
    std::string sha256, dtype;
    std::vector<int64_t> shape, strides;
    bool operator==(const Input&) const = default;
    bool Contiguous() const {
      int64_t step = 1;
      for (size_t i = shape.size(); i-- > 0; step *= shape[i]) {
        if (shape[i] != 1 && strides[i] != step) return false;
      }
      return true;
    }
    std::string Text() const {
      return fmt::format("{} {} [{}] strides [{}]", sha256.substr(0, 12), dtype,
                         fmt::join(shape, ","), fmt::join(strides, ","));
    }
  };
  struct Case {
    std::string name;
    std::vector<std::tuple<std::string, Input, Input>> inputs;  // name, captured, executed
    int64_t compared = 0, mismatches = 0;
    Reference captured;
  };
  Judging j("operator-case", document, "tare.claim.operator-case/v1");
  const auto read = [](const Field& f) {
    Input in{f.At("sha256").Hash(), f.At("dtype").Str(), f.At("shape").Ints(0, INT64_MAX, 1), {}};
    const Field strides = f.At("strides");
    in.strides = strides.Ints(0, INT64_MAX, 1);
    if (in.strides.size() != in.shape.size()) {
      strides.Malformed("has another number of dimensions than the shape");
      in.strides.resize(in.shape.size());
    }
    return in;
  };
  const Field root = j.root();
  const std::string op = root.At("operator").Str();
  std::vector<Case> cases;
  for (const Field& f : root.At("cases").Items(1)) {
    Case c;
    c.name = f.At("name").Str();
    c.captured = ReadReference(f.At("capture"));
    for (const auto& [name, in] : f.At("inputs").Members(1))
      c.inputs.emplace_back(name, read(in.At("captured")), read(in.At("executed")));
    c.compared = f.At("compared").Int(0, INT64_MAX);
    c.mismatches = f.At("mismatches").Int(0, INT64_MAX);
    cases.push_back(std::move(c));
  }
  if (!j.WellFormed()) return j.Finish();

  bool strided = false;
  for (const Case& c : cases) {
    for (const auto& [name, captured, executed] : c.inputs) {
      j.Require("CHEAP-04", captured == executed, reason::kInputSubstituted,
                fmt::format("{}: {} was captured as {} and run as {}", c.name, name,
                            captured.Text(), executed.Text()));
      strided = strided || !captured.Contiguous();
    }
    j.Require("CHEAP-04", c.compared > 0, reason::kNothingCompared,
              c.name + ": no element of the output was compared");
    j.Require("CHEAP-04", c.mismatches == 0, reason::kBitMismatch,
              fmt::format("{}: {} of {} elements", c.name, c.mismatches, c.compared));
  }
  j.Require("CHEAP-04", strided, reason::kFeatureUncovered,
            fmt::format("{}: every input lies contiguous, so strides were never read", op),
            "add a captured case whose rows do not follow one another");
  std::vector<std::string> names;
  names.reserve(cases.size());
  for (const Case& c : cases) names.push_back(c.name);
  ScopeBox box = BoxOf({.shape = std::move(names), .topology = "one operator"});
  box.path = {op};
  j.Cover(std::move(box));
  return j.Finish();
}

}  // namespace tare::workflow
