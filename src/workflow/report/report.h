#pragma once

// The report of a task: what is shown, for what, by which run, and what is not. Made from the event
// log and the artifacts that it names, and from nothing else (DOC-10); every number carries the run
// and the artifact it was read from. The four acceptances stand apart and are never joined to one
// verdict (GEN-07).

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "base/verdict.h"
#include "workflow/index.h"
#include "workflow/task.h"

namespace tare::workflow {

// Where a statement comes from. `artifact` is a path inside the task, empty when the run has none.
struct Source {
  std::string run_id;
  std::string artifact;
};

// One of the four: forward consistency, backward conformance, training quality, performance.
struct Acceptance {
  std::string name;
  std::string asks;  // which evidence at which steps
  Verdict verdict = Verdict::kNotCovered;
  std::string reason = {}, detail = {};
  std::vector<Source> sources = {};  // runs that it rests on; empty when there is none
};

struct EvidenceLine {
  EvidenceKind kind = EvidenceKind::kE1;
  std::string step;
  Verdict verdict = Verdict::kInconclusive;
  std::string reason, detail, finished;
  Source source;
};

struct ScopeLine {
  EvidenceKind kind = EvidenceKind::kE1;
  std::string step;
  ScopeBox box;
  Source source;
};

// One comparison: a tensor of a `tare diff`, or two paths of a receipt.
struct MismatchLine {
  std::string what;
  int64_t compared = 0, mismatches = 0;
  std::string first;  // where, and both hex words where they are known
  std::string verdict, reason;
  Source source;
};

struct PlotSeries {
  std::string name;
  std::vector<std::pair<double, double>> points;  // finite, in the order of x
};
struct Plot {
  std::string title, x_label, y_label;
  std::vector<PlotSeries> series;
  std::vector<Source> sources;
};

struct HumanStop {
  std::string step, title, text;
  Verdict verdict = Verdict::kWaitingHuman;
  std::string reason, detail;
  std::vector<Source> materials;  // review bundles, statements, signatures
};

// What the judge of a gate found, of the latest judgement among the run's artifacts.
struct GateFindings {
  std::string gate, verdict, reason;
  std::vector<std::pair<std::string, std::string>> findings;  // row and sentence; passes left out
  int64_t passed = 0;                                         // obligations that held
  Source source;
};

struct TaskReport {
  std::string name, task_id, created, latest_time, head;
  uint64_t events = 0;
  bool inference_only = false;
  std::vector<Acceptance> acceptances;  // always four, in the order above
  std::vector<BoardLine> board;         // C0 to C10
  std::vector<GateFindings> judgements;
  std::vector<EvidenceLine> evidence;  // by kind, then in the order of the log
  std::vector<ScopeLine> scope;        // of fresh passes only
  std::vector<std::string> not_covered;
  std::vector<std::pair<std::string, Source>> failed;  // failed, stale and excluded
  std::vector<MismatchLine> mismatches;
  std::vector<Plot> plots;
  std::vector<HumanStop> stops;
  std::vector<std::string> skipped;  // artifacts that were not read, and why
};

// Reads the artifacts of the task. An artifact whose bytes are not those of the log, or that cannot
// be read, is named in `skipped` and contributes nothing.
Result<TaskReport> CollectReport(Env* env, const TaskView& view);

// `base` is put before every artifact path in a link: the way from the report to the task
// directory,
// "" when it lies there.
std::string ReportMarkdown(const TaskReport& report, std::string_view base);
// One page with its own style and drawings: no script and nothing from outside.
std::string ReportHtml(const TaskReport& report, std::string_view base);

// What is wrong with a Markdown report as the statement of this task: a section missing or empty, a
// claim (list item or table row of a section of claims) without a run of the log, a sentence that
// claims more than was tested, text outside the sections, a footer that does not fit the text.
// Empty: nothing.
std::vector<std::string> LintReport(std::string_view markdown, const State& state);

}  // namespace tare::workflow
