#include "workflow/index.h"

#include <algorithm>
#include <charconv>

#include "base/reasons.h"
#include "base/sha256.h"
#include "workflow/layout.h"
#include "workflow/ledger.h"
#include "workflow/signoff.h"

namespace tare::workflow {
namespace {

// Text inside a table cell or list item: no line or column may be made up by it.
std::string Cell(std::string_view text) {
  std::string out;
  for (const char c : Printable(text)) {
    if (c == '|' || c == '<' || c == '`' || c == '[' || c == '*' || c == '_') out += '\\';
    out += c;
  }
  return out;
}

void List(std::string* out, std::string_view title, const std::vector<std::string>& items) {
  *out += fmt::format("\n### {}\n\n", title);
  if (items.empty()) *out += "- none\n";
  for (const std::string& item : items) *out += "- " + Cell(item) + "\n";
}

void Lists(std::string* out, const State& state, Staleness* staleness, const std::string& step) {
  const StepLists lists = ListsOf(state, staleness, step);
  List(out, "Candidate", lists.candidates);
  List(out, "Failed or excluded", lists.failed);
  List(out, "Unverified", lists.unverified);
  List(out, "Human-confirmed", lists.human_confirmed);
}

// What opens a step on the board: the kinds of evidence that it takes, any of them, and the steps
// that must be open before the whole model is entered. A test holds both against the gate table,
// which lies above this room.
struct StepRule {
  std::string_view step;
  std::vector<EvidenceKind> kinds;
  std::vector<std::string_view> needs;  // of C9 alone: all others are asked for by their judges
};
const std::vector<StepRule>& Rules() {
  using enum EvidenceKind;
  static const std::vector<StepRule> rules = {
      {"C0", {kE1}, {}},        {"C1", {kE10}, {}},
      {"C2", {kE1, kE4}, {}},   {"C3", {kE5}, {}},
      {"C4", {kE10}, {}},       {"C5", {kE6}, {}},
      {"C6", {kE1, kE7}, {}},   {"C7", {kE7}, {}},
      {"C8", {kE8}, {}},        {"C9", {kE8}, {"C1", "C3", "C4", "C5", "C6", "C7", "C8"}},
      {"C10", {kE8, kE10}, {}},
  };
  return rules;
}

}  // namespace

bool IsHumanStop(std::string_view step) { return step == "C1" || step == "C9"; }

std::span<const EvidenceKind> KindsThatOpen(std::string_view step) {
  for (const StepRule& rule : Rules()) {
    if (rule.step == step) return rule.kinds;
  }
  return {};
}

std::span<const std::string_view> StepsBefore(std::string_view step) {
  for (const StepRule& rule : Rules()) {
    if (rule.step == step) return rule.needs;
  }
  return {};
}

std::vector<BoardLine> Board(const State& state, Staleness* staleness) {
  std::vector<BoardLine> board;
  for (const std::string_view name : AllSteps()) {
    if (name == "task") continue;
    const std::string step(name);
    BoardLine line;
    line.step = step;
    line.reason = reason::kNoEvidence;
    const std::span<const EvidenceKind> kinds = KindsThatOpen(step);
    for (const RunRecord& run : state.runs) {
      if (run.step != step || !run.kind) continue;
      ++line.runs;
      if (std::find(kinds.begin(), kinds.end(), *run.kind) == kinds.end()) {
        if (line.reason == reason::kNoEvidence) {
          line.verdict = Verdict::kRefused;
          line.reason = reason::kWrongEvidenceKind;
          line.detail = fmt::format("run {} is {}", run.id, EvidenceKindName(*run.kind));
        }
        continue;
      }
      const EvidenceStatus status = AssessRun(state, staleness, run);
      // The latest word counts; a run that never came to one does not undo a pass before it.
      const bool says_something =
          status.verdict == Verdict::kPass || (run.conclusion && run.superseded_by.empty());
      if (says_something || line.verdict != Verdict::kPass) {
        line.verdict = status.verdict;
        line.reason = status.reason;
        line.detail = status.detail.empty() ? "run " + run.id
                                            : fmt::format("run {}: {}", run.id, status.detail);
      }
    }
    const auto close = [&](Verdict verdict, std::string_view code, std::string detail) {
      line.verdict = verdict;
      line.reason = code;
      line.detail = std::move(detail);
    };
    if (state.config() != nullptr) {
      for (const Question& q : OpenQuestions(state.config()->config)) {
        if (q.blocks == step) {
          close(Verdict::kInconclusive, reason::kOpenQuestion, q.text);
          break;
        }
      }
    }
    const auto gate = state.gates.find(step);
    if (line.verdict == Verdict::kPass && gate != state.gates.end() &&
        gate->second.verdict != Verdict::kPass) {
      close(gate->second.verdict, gate->second.reason, gate->second.detail);
    }
    if (line.verdict == Verdict::kPass && IsHumanStop(step)) {
      const SignOffStatus signoff = StatusOfSignOff(state, staleness, step);
      if (signoff.verdict != Verdict::kPass) {
        close(signoff.verdict, signoff.reason, signoff.detail);
      } else {
        line.detail += ", approved by " + signoff.person;
      }
    }
    for (const std::string_view need : StepsBefore(step)) {
      const auto at = std::find_if(board.begin(), board.end(),
                                   [&](const BoardLine& before) { return before.step == need; });
      if (line.verdict == Verdict::kPass && at->verdict != Verdict::kPass) {
        close(Verdict::kRefused, reason::kPrerequisiteOpen,
              fmt::format("{} is {}", need, VerdictName(at->verdict)));
      }
    }
    if (line.verdict == Verdict::kPass) line.reason.clear();
    board.push_back(std::move(line));
  }
  return board;
}

std::string RenderTaskIndex(const State& state, Staleness* staleness) {
  std::string name;
  if (state.config() != nullptr) name = state.config()->config.String("task.name");
  std::string out = fmt::format("# {}\n\nTask {}. Generated from the event log; do not edit.\n\n",
                                name.empty() ? "Tare task" : Cell(name), state.task_id);
  if (state.config() != nullptr &&
      state.config()->config.String("task.scope") == "inference-only") {
    out += "Inference only: the training loop is not accepted.\n\n";
  }
  out += "| step | state | reason | runs |\n|---|---|---|---|\n";
  for (const BoardLine& line : Board(state, staleness)) {
    out += fmt::format("| {} | {} | {} | {} |\n", line.step,
                       line.verdict == Verdict::kPass ? "open" : VerdictName(line.verdict),
                       Cell(line.reason), line.runs);
  }
  for (const std::string_view step : AllSteps()) {
    bool any = false;
    for (const RunRecord& run : state.runs) any = any || (run.step == step && run.kind);
    for (const CandidateRecord& c : state.candidates) any = any || c.step == step;
    if (!any) continue;
    out += fmt::format("\n## {}\n", step);
    Lists(&out, state, staleness, std::string(step));
  }
  out += "\n## Open questions\n\n";
  if (state.questions.empty()) out += "- none\n";
  for (const auto& [key, text] : state.questions) out += "- " + Cell(text) + "\n";
  return out;
}

std::string RenderStepIndex(const State& state, Staleness* staleness, const std::string& step) {
  std::string out = fmt::format("# {}\n\nGenerated from the event log; do not edit.\n", step);
  Lists(&out, state, staleness, step);
  out +=
      "\n### Runs\n\n| run | kind | candidate | verdict | reason | exit | artifacts |\n"
      "|---|---|---|---|---|---|---|\n";
  for (const RunRecord& run : state.runs) {
    if (run.step != step) continue;
    std::string exit = run.signal != 0 ? fmt::format("signal {}", run.signal)
                       : run.exit_code ? fmt::format("{}", *run.exit_code)
                                       : "-";
    if (!run.kind) {
      out +=
          fmt::format("| {} | review |  |  |  | {} | {} |\n", run.id, exit, run.artifacts.size());
      continue;
    }
    const EvidenceStatus status = AssessRun(state, staleness, run);
    out +=
        fmt::format("| {} | {} | {} | {} | {} | {} | {} |\n", run.id, EvidenceKindName(*run.kind),
                    Cell(run.candidate), VerdictName(status.verdict), Cell(status.reason), exit,
                    run.artifacts.size());
  }
  return out;
}

std::string WithFooter(const std::string& body, const IndexFooter& footer) {
  return fmt::format("{}\n<!-- generated events={} head={} sha256={} -->\n", body, footer.events,
                     footer.head, Hex(Sha256Of(body)));
}

Result<std::pair<std::string, IndexFooter>> SplitFooter(std::string_view page) {
  constexpr std::string_view kBegin = "\n<!-- generated events=";
  const size_t at = page.rfind(kBegin);
  if (at == std::string_view::npos) return DataLoss("no footer of a generated page");
  const std::string body(page.substr(0, at));
  std::string_view rest = page.substr(at + kBegin.size());
  IndexFooter footer;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), footer.events);
  if (error != std::errc()) return DataLoss("the footer of the generated page is malformed");
  rest.remove_prefix(static_cast<size_t>(end - rest.data()));
  constexpr std::string_view kHead = " head=";
  if (rest.starts_with(kHead) && rest.size() > kHead.size() + 64) {
    footer.head = rest.substr(kHead.size(), 64);
  }
  if (WithFooter(body, footer) != page) {
    return DataLoss("the page does not match the SHA-256 in its footer");
  }
  return std::make_pair(body, footer);
}

}  // namespace tare::workflow
