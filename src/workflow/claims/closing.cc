// Claims that close something or take something over: a defect, a preset, an existing path, the
// coverage of a route. Each names the runs of this model, this hardware and this recipe.

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "workflow/claims/claim.h"

namespace tare::workflow {
namespace {

const std::string kWeights = "weights:model", kHardware = "hardware:device", kTool = "tool:tare";

std::string Describe(const std::optional<Reference>& r) {
  return r ? fmt::format("{} {}{}", r->kind, r->verdict, r->fresh ? "" : ", stale") : "missing";
}

}  // namespace

GateJudgement JudgeDefectClosed(const Json& document) {
  Judging j("defect-closed", document, "tare.claim.defect-closed/v1");
  const Field root = j.root();
  const Subject subject = ReadSubject(root);
  const std::string defect = root.At("defect").Str();
  const Reference found = ReadReference(root.At("found"));
  const Field fix = root.At("fix");
  const std::string commit = fix.At("commit").Commit(), fixed = fix.At("time").Time(),
                    executable = fix.At("executable").Hash();
  const std::optional<Reference> replay = ReadMaybeReference(root.At("replay")),
                                 loop = ReadMaybeReference(root.At("loop"));
  if (!j.WellFormed()) return j.Finish();

  j.Require("GEN-03", found.verdict == "fail", reason::kInputMissing,
            fmt::format("{}: no run that failed stands behind it", defect));
  j.Require("GEN-03",
            replay && replay->kind == "E4" && replay->Passes() && TimeBefore(fixed, replay->time) &&
                replay->On(kTool) == executable && replay->On(kWeights) == subject.weights,
            reason::kGateNotPassed,
            fmt::format("{}: the replay of the fixed program is {}", defect, Describe(replay)),
            "replay the stored failure with the fixed program first: it is the cheaper run");
  // A replay shows the operator; what was broken is the loop.
  j.Require("GEN-03", loop && loop->kind == "E8" && loop->Passes(), reason::kLoopNotReverified,
            fmt::format("{}: fixed in replay, loop not re-verified (the loop's record is {})",
                        defect, Describe(loop)));
  if (loop) {
    j.Require("GEN-03", TimeBefore(fixed, loop->time), reason::kLoopNotReverified,
              fmt::format("{}: the loop ran at {}, the fix is of {}", defect, loop->time, fixed));
    j.Require("GEN-03", loop->On(kTool) == executable && loop->On(kWeights) == subject.weights,
              reason::kLoopNotReverified,
              fmt::format("{}: the loop ran another program or model than the fixed one", defect));
  }
  ScopeBox box = BoxOf({.shape = {"defect " + defect}, .model = subject.weights});
  box.contracts = {subject.contracts};
  j.Cover(std::move(box));
  j.Note(fmt::format("fixed by {}", commit));
  return j.Finish();
}

GateJudgement JudgePreset(const Json& document) {
  struct Setting {
    std::string name, kind, value;
    std::optional<Reference> measured;
  };
  Judging j("preset", document, "tare.claim.preset/v1");
  const Field root = j.root();
  const Subject subject = ReadSubject(root);
  const std::string hardware = root.At("hardware").Hash();
  const std::string source = root.At("source").Str();
  std::vector<Setting> settings;
  for (const Field& s : root.At("settings").Items(1)) {
    settings.push_back({s.At("name").Str(),
                        s.At("kind").OneOf({"tolerance", "switch", "layers", "threshold", "path"}),
                        s.At("value").Str(), ReadMaybeReference(s.At("measurement"))});
  }
  if (!j.WellFormed()) return j.Finish();

  for (const Setting& s : settings) {
    const std::string text = fmt::format("{} {} = {} (from {})", s.kind, s.name, s.value, source);
    j.Require("GEN-05", s.measured && s.measured->Passes(), reason::kPresetUnmeasured,
              fmt::format("{}: the measurement is {}", text, Describe(s.measured)));
    if (!s.measured) continue;
    j.Require("GEN-05", s.measured->On(kWeights) == subject.weights, reason::kPresetUnmeasured,
              text + ": measured on another model");
    j.Require("GEN-05", s.measured->On(kHardware) == hardware, reason::kPresetUnmeasured,
              text + ": measured on other hardware");
    j.Note(fmt::format("{}: artifact {}", text, s.measured->artifact));
  }
  ScopeBox box = BoxOf({.shape = {"preset of " + source}, .model = subject.weights});
  box.topology = {hardware};
  j.Cover(std::move(box));
  return j.Finish();
}

GateJudgement JudgePathReuse(const Json& document) {
  Judging j("path-reuse", document, "tare.claim.path-reuse/v1");
  const Field root = j.root();
  const Subject subject = ReadSubject(root);
  const std::string framework = root.At("framework").Str(), path = root.At("path").Str();
  const std::optional<Reference> numbers = ReadMaybeReference(root.At("numbers")),
                                 step_time = ReadMaybeReference(root.At("step_time"));
  if (!j.WellFormed()) return j.Finish();

  for (const auto& [what, kind, r] :
       {std::tuple<const char*, const char*, const std::optional<Reference>&>{"numeric record (E6)",
                                                                              "E6", numbers},
        {"step-time record (E10)", "E10", step_time}}) {
    j.Require("GEN-06", r && r->kind == kind && r->Passes(), reason::kReuseUnmeasured,
              fmt::format("{} of {}: its {} is {}", path, framework, what, Describe(r)));
    j.Require("GEN-06", !r || r->On(kWeights) == subject.weights, reason::kReuseUnmeasured,
              fmt::format("{} of {}: its {} is of another model", path, framework, what));
  }
  j.Cover(BoxOf({.shape = {framework + " " + path}, .model = subject.weights}));
  return j.Finish();
}

GateJudgement JudgeRouteCoverage(const Json& document) {
  static constexpr std::array kKeys = {"tp", "cp", "ep", "pp", "recompute", "checkpoint"};
  using Point = std::map<std::string, std::string>;
  Judging j("route-coverage", document, "tare.claim.route-coverage/v1");
  const auto read = [](const Field& f) {
    Point p;
    for (const char* key : kKeys) p[key] = f.At(key).Str();
    return p;
  };
  const Field root = j.root();
  const Subject subject = ReadSubject(root);
  const std::string route = root.At("route").OneOf({"mlite", "fsdp2", "megatron-bridge", "tare"});
  const std::string because = root.At("because").Text();
  const Point recipe = read(root.At("recipe"));
  std::vector<std::pair<Point, Reference>> runs;
  for (const Field& r : root.At("runs").Items())
    runs.emplace_back(read(r.At("recipe")), ReadReference(r.At("record")));
  if (!j.WellFormed()) return j.Finish();

  std::map<std::string, bool> shown;
  bool together = false;
  for (const auto& [point, record] : runs) {
    if (!record.Passes() || record.On(kWeights) != subject.weights) continue;
    for (const char* key : kKeys) {
      if (point.at(key) == recipe.at(key)) shown[key] = true;
    }
    together = together || point == recipe;
  }
  for (const char* key : kKeys) {
    j.Require("GEN-28", shown[key], reason::kRecipeNotCovered,
              fmt::format("{}: no passed run at {} = {}", route, key, recipe.at(key)));
  }
  const bool all = std::all_of(kKeys.begin(), kKeys.end(), [&](const char* k) { return shown[k]; });
  j.Require("GEN-28", !all || together, reason::kRecipeNotCovered,
            fmt::format("{}: each value was run, and never together", route));
  // What is missing is not covered; that it is claimed all the same is refused.
  j.Require("GEN-28", together, reason::kUniversalClaim,
            fmt::format("coverage is claimed{}", because.empty() ? "" : " because: " + because));
  ScopeBox box = BoxOf({.shape = {"recipe"}, .model = subject.weights});
  box.topology.clear();
  std::string point;
  for (const char* key : kKeys)
    point += fmt::format("{}{}={}", point.empty() ? "" : ",", key, recipe.at(key));
  box.topology = {point};
  box.path = {route};
  j.Cover(std::move(box));
  return j.Finish();
}

}  // namespace tare::workflow
