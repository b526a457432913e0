#pragma once

// Generated pages: index.md of the task and of each step (GEN-17), and the board of steps that
// `tare status` shows. Pure functions of the state, so that a page can be made again from the log
// and compared: a hand edit shows. docs/formats/task.md.

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "workflow/staleness.h"

namespace tare::workflow {

// The body without footer.
std::string RenderTaskIndex(const State& state, Staleness* staleness);
std::string RenderStepIndex(const State& state, Staleness* staleness, const std::string& step);

// The footer binds a page to the log as it was: number of events, head hash, and the SHA-256 of the
// body, so that a reader without a generator sees an edit too.
struct IndexFooter {
  uint64_t events = 0;
  std::string head;
};
std::string WithFooter(const std::string& body, const IndexFooter& footer);
// Splits a page; kDataLoss when there is no footer or its SHA-256 does not fit the body.
Result<std::pair<std::string, IndexFooter>> SplitFooter(std::string_view page);

// One line of the board: a step and the one reason why it is closed.
struct BoardLine {
  std::string step;
  Verdict verdict = Verdict::kInconclusive;
  std::string reason;  // empty when open
  std::string detail;
  size_t runs = 0;
};
// C0 to C10. A step is open when a fresh, complete run of a kind that it takes passed and nothing
// later at the step failed, no question blocks it, at C1 and C9 a valid sign-off stands, and at C9
// the steps before are open. A recorded `gate` event that is not a pass closes it as well;
// one that is a pass opens nothing by itself.
std::vector<BoardLine> Board(const State& state, Staleness* staleness);
// True for the two steps that end in a human stop.
bool IsHumanStop(std::string_view step);
// The kinds of evidence of which any opens the step; other kinds are kept and open nothing.
std::span<const EvidenceKind> KindsThatOpen(std::string_view step);
// The steps that C9 rests on; empty for all others, whose judges ask for theirs.
std::span<const std::string_view> StepsBefore(std::string_view step);

}  // namespace tare::workflow
