#include "compare/probe.h"

#include <fmt/format.h>

#include "base/reasons.h"
#include "compare/dump_diff.h"

namespace tare::compare {

Result<ProbeReport> Probe(const Bundle& bundle, int64_t layers, ThreadPool* pool,
                          const ProbeRun& run) {
  TARE_CHECK(pool != nullptr && layers >= 1);
  ProbeReport report;
  report.layers = layers;
  for (const char* side : {"a", "b"}) {
    if (!ReplayCommand(bundle, side).empty()) continue;
    report.reason = reason::kMissingCapture;
    report.why = fmt::format("side {} recorded no command", side);
    return report;
  }
  DiffOptions options;
  options.pool = pool;
  // The embedding is taken for equal and what follows the layers for different until the last run
  // looks at both.
  int64_t equal = -1, differs = layers;
  while (differs - equal > 1) {
    const int64_t middle = equal + (differs - equal) / 2;
    ProbeStep step;
    step.name = fmt::format("layers.{}.out", middle);
    ++report.runs;
    TARE_ASSIGN_OR_RETURN(const Replayed dumps, run({step.name}));
    options.only = {step.name};
    TARE_ASSIGN_OR_RETURN(const Report diff, DiffDumps(*dumps.a, *dumps.b, options));
    if (diff.totals.compared == 0) {
      report.reason = diff.reason.empty() ? reason::kMissingCapture : diff.reason;
      report.why = fmt::format("{} was not compared: {}", step.name, diff.why);
      return report;
    }
    step.compared = diff.totals.compared;
    step.mismatches = diff.totals.mismatches;
    step.differs = diff.verdict != Verdict::kPass;
    (step.differs ? differs : equal) = middle;
    report.steps.push_back(std::move(step));
  }
  std::vector<std::string> names = {"embed.out"};
  if (equal >= 0) names.push_back(fmt::format("layers.{}.out", equal));
  if (differs < layers) {
    names.push_back(fmt::format("layers.{}.*", differs));
  } else {
    names.insert(names.end(), {"norm.out", "logits", "logprob", "entropy"});
  }
  ++report.runs;
  TARE_ASSIGN_OR_RETURN(report.last, run(names));
  options.only.clear();
  TARE_ASSIGN_OR_RETURN(report.located, Locate(*report.last.a, *report.last.b, options, nullptr));
  report.verdict = report.located.verdict;
  report.reason = report.located.reason;
  report.why = report.located.why;
  return report;
}

std::string ProbeTable(const ProbeReport& r) {
  std::string out = fmt::format("{} layers, {} runs of both sides\n", r.layers, r.runs);
  for (const ProbeStep& s : r.steps) {
    out += fmt::format("  {:<18} {}\n", s.name,
                       s.differs ? fmt::format("differs: {} of {}", s.mismatches, s.compared)
                                 : fmt::format("equal: {}", s.compared));
  }
  if (r.last.a != nullptr) return out + LocateTable(r.located);
  return out + fmt::format("INCONCLUSIVE: {} ({})\n", r.why, r.reason);
}

Json ProbeJson(const ProbeReport& r) {
  Json steps = Json::array();
  for (const ProbeStep& s : r.steps) {
    steps.push_back({{"name", s.name},
                     {"differs", s.differs},
                     {"mismatches", s.mismatches},
                     {"compared", s.compared}});
  }
  Json j = {{"schema", "tare.probe/1"},
            {"layers", r.layers},
            {"runs", r.runs},
            {"steps", std::move(steps)},
            {"verdict", VerdictName(r.verdict)},
            {"why", r.why}};
  j["reason"] = r.reason.empty() ? Json(nullptr) : Json(r.reason);
  if (r.last.a != nullptr && r.located.found) j["site"] = LocateJson(r.located)["site"];
  return j;
}

}  // namespace tare::compare
