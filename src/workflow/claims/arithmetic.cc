// Claims about numbers: where two runs first part, that two executions are equal, that two
// recurrences are one, that a quantised view is of the present weights, that rewritten arithmetic
// and a second caller change nothing. Bits decide; formulas, flags and launches do not.

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "workflow/claims/claim.h"

namespace tare::workflow {
namespace {

using TextMap = std::map<std::string, std::string>;
TextMap ReadTexts(const Field& f, size_t min = 0) {
  TextMap out;
  for (const auto& [key, value] : f.Members(min)) out[key] = value.Str();
  return out;
}

struct Counts {
  int64_t compared = 0, mismatches = 0;
  std::string first;
};
Counts ReadCounts(const Field& f) {
  return {f.At("compared").Int(0, INT64_MAX), f.At("mismatches").Int(0, INT64_MAX),
          f.At("first").Text()};
}
void RequireEqual(Judging* j, const char* row, const Counts& c) {
  j->Require(row, c.mismatches == 0, reason::kBitMismatch,
             fmt::format("{} of {} elements differ; first: {}", c.mismatches, c.compared,
                         c.first.empty() ? "not recorded" : c.first));
}

// "key: a against b" for every key that differs.
std::vector<std::string> Differences(const TextMap& a, const TextMap& b) {
  std::set<std::string> keys;
  for (const auto* map : {&a, &b}) {
    for (const auto& [key, value] : *map) keys.insert(key);
  }
  std::vector<std::string> out;
  for (const std::string& key : keys) {
    const auto x = a.find(key), y = b.find(key);
    const std::string left = x == a.end() ? "nothing" : x->second,
                      right = y == b.end() ? "nothing" : y->second;
    if (left != right) out.push_back(fmt::format("{}: {} against {}", key, left, right));
  }
  return out;
}

}  // namespace

GateJudgement JudgeFirstCause(const Json& document) {
  struct Op {
    std::string name;
    int64_t layer = 0, compared = 0, first = -1;  // first differing position; -1: none
    std::string Text() const { return fmt::format("{} of layer {}", name, layer); }
  };
  Judging j("first-cause", document, "tare.claim.first-cause/v1");
  const Field root = j.root();
  const std::string offered = root.At("offered_as").OneOf({"cause", "candidate"});
  const int64_t tokens = root.At("tokens").Int(1, INT64_MAX);
  const Field blamed = root.At("blamed");
  const std::string name = blamed.At("operator").Str();
  const int64_t layer = blamed.At("layer").Int(-1, 1 << 20);
  std::vector<Op> ops;
  for (const Field& f : root.At("operators").Items(1)) {
    Op op;
    op.name = f.At("operator").Str();
    op.layer = f.At("layer").Int(-1, 1 << 20);
    op.compared = f.At("positions_compared").Int(0, INT64_MAX);
    op.first = f.At("first_difference").Int(-1, INT64_MAX);
    ops.push_back(std::move(op));
  }
  ReadReference(root.At("record"));
  if (!j.WellFormed()) return j.Finish();

  const auto at = std::find_if(ops.begin(), ops.end(),
                               [&](const Op& op) { return op.name == name && op.layer == layer; });
  if (j.Require("SHAPE-13", at != ops.end() && at->first >= 0, reason::kCauseUnproven,
                fmt::format("{} of layer {} is blamed and shows no difference", name, layer))) {
    // Execution order: the first operator whose output differs at any position, however late the
    // probe looked. A scan or a convolution only carries on what came before it.
    const auto first =
        std::find_if(ops.begin(), ops.end(), [](const Op& op) { return op.first >= 0; });
    j.Require("SHAPE-10", first == at, reason::kUpstreamDiffers,
              fmt::format("{} is blamed; {} differs before it, from token {} on", at->Text(),
                          first->Text(), first->first));
    for (auto op = ops.begin(); op <= at; ++op) {
      j.Require("SHAPE-13", op->compared == tokens, reason::kCauseUnproven,
                fmt::format("{} was compared at {} of {} positions: it stays a candidate",
                            op->Text(), op->compared, tokens));
    }
  }
  if (offered == "candidate") {
    j.Find(Verdict::kInconclusive, "SHAPE-13", reason::kCandidateOnly,
           fmt::format("{} of layer {} is a candidate, and is called one", name, layer));
  }
  j.Cover(BoxOf({.shape = {fmt::format("{} positions", tokens)}, .path = name}));
  return j.Finish();
}

GateJudgement JudgeEqualOutput(const Json& document) {
  Judging j("equal-output", document, "tare.claim.equal-output/v1");
  const Field root = j.root();
  const std::string basis = root.At("basis").OneOf({"bits", "formula", "launch"});
  const Field launches = root.At("launches"), formulas = root.At("formulas"),
              inputs = root.At("inputs");
  const TextMap launch_a = ReadTexts(launches.At("a")), launch_b = ReadTexts(launches.At("b"));
  const std::string formula_a = formulas.At("a").Text(), formula_b = formulas.At("b").Text();
  const std::string input_a = inputs.At("a").Hash(), input_b = inputs.At("b").Hash();
  const Counts counts = ReadCounts(root.At("outputs"));
  if (!j.WellFormed()) return j.Finish();

  const char* row = basis == "formula" ? "NUM-01" : "SHAPE-06";
  j.Require(row, basis == "bits", reason::kNotMeasured,
            basis == "formula"
                ? fmt::format("equality is claimed because both compute {}", Printable(formula_a))
                : std::string("equality is claimed because of the launch"));
  j.Require(row, counts.compared > 0, reason::kNotMeasured, "no element of an output was compared");
  j.Require(row, input_a == input_b, reason::kInputDiffers,
            "the two executions had other inputs, so their outputs answer other questions");
  RequireEqual(&j, row, counts);
  // Said of the launch, never judged by it.
  if (const auto other = Differences(launch_a, launch_b); !other.empty()) {
    j.Note(fmt::format("the launches differ, which is no difference of numbers: {}",
                       fmt::join(other, "; ")));
  }
  if (formula_a != formula_b) j.Note("the formulas are written differently");
  j.Cover(BoxOf({.shape = {fmt::format("{} elements", counts.compared)}, .path = "output"}));
  return j.Finish();
}

GateJudgement JudgeOneRecurrence(const Json& document) {
  static constexpr std::array kMatched = {"chunk_grid", "boundary_state", "gate_order"};
  Judging j("one-recurrence", document, "tare.claim.one-recurrence/v1");
  const Field root = j.root();
  const std::vector<std::string> switches = root.At("switches").Strings();
  TextMap a, b;
  for (const char* what : kMatched) {
    a[what] = root.At("sides").At("a").At(what).Str();
    b[what] = root.At("sides").At("b").At(what).Str();
  }
  const Counts counts = ReadCounts(root.At("outputs"));
  if (!j.WellFormed()) return j.Finish();

  bool matched = true;
  for (const char* what : kMatched) {
    const bool same = a[what] == b[what];
    matched &= same;
    j.Require("SHAPE-09", same, switches.empty() ? reason::kSemanticsDiffer : reason::kFlagAlone,
              fmt::format("{} is {} on one side and {} on the other{}", what, a[what], b[what],
                          switches.empty() ? ""
                                           : fmt::format("; {} does not change that",
                                                         fmt::join(switches, ", "))));
  }
  j.Require("SHAPE-09", counts.compared > 0, reason::kNothingCompared,
            "no state or output was compared");
  RequireEqual(&j, "SHAPE-09", counts);
  if (!matched && counts.mismatches == 0 && counts.compared > 0) {
    j.Note("equal on these inputs only: what is not matched may round apart on others");
  }
  j.Cover(BoxOf({.shape = {fmt::format("{} elements", counts.compared)}, .path = "recurrence"}));
  return j.Finish();
}

GateJudgement JudgeQuantisedView(const Json& document) {
  struct View {
    std::string bytes, scales;
  };
  struct Version {
    int64_t version = 0;
    std::string weights, recomputed_from, read_from;
    View trainer, engine, again;
  };
  Judging j("quantised-view", document, "tare.claim.quantised-view/v1");
  const auto view = [](const Field& f) {
    return View{f.At("bytes").Hash(), f.At("scales").Hash()};
  };
  const Field root = j.root();
  const std::string format = root.At("format").Str();
  std::vector<Version> versions;
  for (const Field& f : root.At("versions").Items()) {
    Version v;
    v.version = f.At("version").Int(0, 1 << 20);
    v.weights = f.At("weights").Hash();
    v.trainer = view(f.At("trainer"));
    v.engine = view(f.At("engine"));
    v.read_from = f.At("engine").At("read_from").OneOf({"process", "checkpoint", "recomputed"});
    v.again = view(f.At("recomputed"));
    v.recomputed_from = f.At("recomputed").At("weights").Hash();
    versions.push_back(std::move(v));
  }
  if (!j.WellFormed()) return j.Finish();

  j.Require("SYS-28", versions.size() >= 3, reason::kLoopIncomplete,
            fmt::format("{} versions; theta0, theta1 and theta2 are wanted", versions.size()));
  for (size_t i = 0; i < versions.size(); ++i) {
    const Version& v = versions[i];
    const std::string theta = fmt::format("theta{}", v.version);
    j.Require("SYS-28", v.version == static_cast<int64_t>(i), reason::kVersionContradiction,
              fmt::format("{} stands where theta{} belongs", theta, i));
    j.Require("SYS-28", i == 0 || v.weights != versions[i - 1].weights, reason::kDeployedUnchanged,
              theta + " has the weights of the version before");
    j.Require("SYS-28", v.recomputed_from == v.weights, reason::kStaleScale,
              theta + ": the independent quantisation read other weights");
    // What the runner multiplies with counts, not what a file or a formula says it should be.
    j.Require("NUM-13", v.read_from == "process", reason::kStaleScale,
              fmt::format("{}: the engine's scales were taken from a {}", theta, v.read_from));
    for (const auto& [side, seen] :
         {std::pair<const char*, const View&>{"engine", v.engine}, {"trainer", v.trainer}}) {
      std::string which = "of none of the recorded versions";
      for (const Version& other : versions) {
        if (seen.scales == other.again.scales) which = fmt::format("of theta{}", other.version);
      }
      j.Require("NUM-13", seen.scales == v.again.scales, reason::kStaleScale,
                fmt::format("{}: the {} uses scales {}", theta, side, which));
      j.Require(
          "SYS-28", seen.bytes == v.again.bytes, reason::kBitMismatch,
          fmt::format("{}: the {}'s quantised bytes are not those of the weights", theta, side));
    }
  }
  j.Cover(BoxOf({.shape = {fmt::format("{} versions", versions.size())}, .path = format}));
  return j.Finish();
}

GateJudgement JudgeRewrite(const Json& document) {
  Judging j("rewrite", document, "tare.claim.rewrite/v1");
  const Field root = j.root();
  const std::string change = root.At("change").Str(), replaces = root.At("replaces").Str();
  const Field proof = root.At("proof");
  const std::string kind = proof.At("kind").OneOf({"exhaustive", "derivation", "none"});
  const int64_t tried = proof.At("inputs").Int(0, INT64_MAX),
                domain = proof.At("domain").Int(0, INT64_MAX);
  const std::string text = proof.At("text").Text();
  const std::vector<std::string> tests = proof.At("tests").Strings();
  const std::optional<Reference> record = ReadMaybeReference(proof.At("record"));
  const Counts sample = ReadCounts(root.At("sample"));
  if (!j.WellFormed()) return j.Finish();

  RequireEqual(&j, "NUM-12", sample);
  j.Require("NUM-12", kind != "none", reason::kRewriteUnproven,
            fmt::format("{} in place of {}: {} sampled elements agree, which is no proof", change,
                        replaces, sample.compared));
  if (kind == "exhaustive") {
    j.Require("NUM-12", domain > 0 && tried == domain, reason::kRewriteUnproven,
              fmt::format("{} of {} inputs were tried", tried, domain));
  }
  if (kind == "derivation") {
    j.Require("NUM-12", text.size() >= 40 && !tests.empty(), reason::kRewriteUnproven,
              tests.empty() ? "the derivation has no test" : "the derivation is not written down");
  }
  if (kind != "none") {
    j.Require("NUM-12", record && record->Passes(), reason::kRewriteUnproven,
              "no passed run stands behind the proof");
  }
  j.Cover(BoxOf({.shape = {kind == "exhaustive" ? fmt::format("{} inputs", domain) : "derived"},
                 .path = change}));
  return j.Finish();
}

GateJudgement JudgeCallRecord(const Json& document) {
  struct Call {
    std::string kernel, boundary;
    TextMap arguments, layout;
    std::vector<std::string> order;
  };
  Judging j("call-record", document, "tare.claim.call-record/v1");
  const auto read = [](const Field& f) {
    return Call{f.At("kernel").Hash(), f.At("compile_boundary").Str(),
                ReadTexts(f.At("arguments"), 1), ReadTexts(f.At("layout"), 1),
                f.At("stream_order").Strings(1)};
  };
  const Field root = j.root();
  const std::string name = root.At("name").Str();
  const Call a = read(root.At("a")), b = read(root.At("b"));
  if (!j.WellFormed()) return j.Finish();

  j.Require("NUM-09", a.kernel == b.kernel, reason::kCallDiffers,
            "the two callers do not run the same kernel");
  for (const auto& [what, left, right] : {std::tuple<const char*, const TextMap&, const TextMap&>{
                                              "argument", a.arguments, b.arguments},
                                          {"layout", a.layout, b.layout}}) {
    const std::vector<std::string> other = Differences(left, right);
    j.Require("NUM-09", other.empty(), reason::kCallDiffers,
              fmt::format("{}: {} {}", name, what, fmt::join(other, "; ")));
  }
  j.Require("NUM-09", a.order == b.order, reason::kCallDiffers,
            fmt::format("{}: order on the stream is {} against {}", name, fmt::join(a.order, " "),
                        fmt::join(b.order, " ")));
  j.Require("NUM-09", a.boundary == b.boundary, reason::kCallDiffers,
            fmt::format("{}: compile boundary {} against {}", name, a.boundary, b.boundary));
  j.Cover(BoxOf({.shape = {"one call"}, .path = name}));
  return j.Finish();
}

}  // namespace tare::workflow
