// The report as Markdown, and the lint that knows its shape.

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "base/json.h"
#include "base/verdict.h"
#include "workflow/claims/claim.h"
#include "workflow/report/render.h"

namespace tare::workflow {
namespace {

std::string Cell(std::string_view text) {
  std::string out;
  for (const char c : Printable(text)) {
    if (c == '|' || c == '<' || c == '`' || c == '[' || c == ']' || c == '*' || c == '_')
      out += '\\';
    out += c;
  }
  return out;
}

std::string Link(const Source& source, std::string_view base) {
  if (source.run_id.empty()) return "-";
  if (source.artifact.empty()) return "run " + source.run_id;
  std::string href;
  for (const char c : fmt::format("{}{}", base, source.artifact)) {
    if (c == ' ' || c == '(' || c == ')' || c == '<' || c == '>' || c == '%') {
      href += fmt::format("%{:02X}", static_cast<unsigned char>(c));
    } else {
      href += c;
    }
  }
  return fmt::format("run {} [{}]({})", source.run_id, Cell(source.artifact), href);
}

std::string Links(const std::vector<Source>& sources, std::string_view base) {
  std::string out;
  for (const Source& s : sources) out += (out.empty() ? "" : ", ") + Link(s, base);
  return out.empty() ? "-" : out;
}

// Sections in order. A section of claims needs a run on every line that says something.
struct Section {
  std::string_view title;
  bool claims;
};
constexpr std::array<Section, 11> kSections = {{{"Acceptances", true},
                                                {"Gates", false},
                                                {"Judgements", true},
                                                {"Evidence by kind", true},
                                                {"Scope", true},
                                                {"Not covered", false},
                                                {"Failed, stale and excluded", true},
                                                {"Comparisons", true},
                                                {"Curves", true},
                                                {"Human stops", false},
                                                {"Limits", false}}};

constexpr std::string_view kAcceptanceHead =
    "| acceptance | asks | state | reason | detail | from |";
constexpr std::string_view kEvidenceHead =
    "| kind | what | step | verdict | reason | detail | finished | from |";
constexpr std::string_view kComparisonHead =
    "| what | compared | differ | first | verdict | from |";

// A table's head and the rule below it.
std::string Head(std::string_view head) {
  std::string rule;
  for (int64_t i = std::count(head.begin(), head.end(), '|'); i > 1; --i) rule += "|---";
  return fmt::format("{}\n{}|\n", head, rule);
}
bool IsRule(std::string_view line) {
  return line.find_first_not_of("|-") == std::string_view::npos && line.starts_with("|---");
}

std::string_view Word(Verdict verdict) { return VerdictName(verdict); }

}  // namespace

std::string ReportMarkdown(const TaskReport& r, std::string_view base) {
  std::string out = fmt::format(
      "# Report: {}\n\nTask {}, created {}, log of {} events up to {}, head {}. Generated from the "
      "log and its artifacts; do not edit.\n",
      r.name.empty() ? "Tare task" : Cell(r.name), r.task_id, r.created, r.events, r.latest_time,
      r.head);
  size_t next = 0;
  const auto section = [&] { out += fmt::format("\n## {}\n\n", kSections[next++].title); };
  const auto none = [&](bool empty) {
    if (empty) out += "none\n";
  };

  section();
  out += Head(kAcceptanceHead);
  for (const Acceptance& a : r.acceptances) {
    out += fmt::format("| {} | {} | {} | {} | {} | {} |\n", a.name, a.asks, Word(a.verdict),
                       Cell(a.reason), Cell(a.detail), Links(a.sources, base));
  }
  section();
  out += Head("| gate | state | reason | detail | runs |");
  for (const BoardLine& b : r.board) {
    out += fmt::format("| {} | {} | {} | {} | {} |\n", b.step,
                       b.verdict == Verdict::kPass ? "open" : Word(b.verdict), Cell(b.reason),
                       Cell(b.detail), b.runs);
  }
  section();
  none(r.judgements.empty());
  for (const GateFindings& g : r.judgements) {
    out += fmt::format("- {}: {} {}, {} obligations held, {} did not; {}\n", Cell(g.gate),
                       Cell(g.verdict), Cell(g.reason), g.passed, g.findings.size(),
                       Link(g.source, base));
    for (const auto& [row, text] : g.findings) {
      out += fmt::format("  - {} {} (run {})\n", Cell(row), Cell(text), g.source.run_id);
    }
  }
  section();
  none(r.evidence.empty());
  if (!r.evidence.empty()) out += Head(kEvidenceHead);
  for (const EvidenceLine& e : r.evidence) {
    out += fmt::format("| {} | {} | {} | {} | {} | {} | {} | {} |\n", EvidenceKindName(e.kind),
                       EvidenceKindText(e.kind), e.step, Word(e.verdict), Cell(e.reason),
                       Cell(e.detail), e.finished, Link(e.source, base));
  }
  section();
  none(r.scope.empty());
  for (const ScopeLine& s : r.scope) {
    out += fmt::format("- {} at {}: {}; {}\n", EvidenceKindName(s.kind), s.step,
                       Cell(BoxText(s.box)), Link(s.source, base));
  }
  section();
  for (const std::string& line : r.not_covered) out += "- " + Cell(line) + "\n";
  section();
  none(r.failed.empty());
  for (const auto& [text, source] : r.failed) {
    out += fmt::format("- {}; {}\n", Cell(text), Link(source, base));
  }
  section();
  none(r.mismatches.empty());
  if (!r.mismatches.empty()) out += Head(kComparisonHead);
  for (const MismatchLine& m : r.mismatches) {
    out +=
        fmt::format("| {} | {} | {} | {} | {} {} | {} |\n", Cell(m.what), m.compared, m.mismatches,
                    Cell(m.first), Cell(m.verdict), Cell(m.reason), Link(m.source, base));
  }
  section();
  none(r.plots.empty());
  for (const Plot& p : r.plots) {
    out += fmt::format("- {} ({} over {}); {}\n", Cell(p.title), Cell(p.y_label), Cell(p.x_label),
                       Links(p.sources, base));
    for (const PlotSeries& s : p.series) {
      out += fmt::format("  - {} (run {}):", Cell(s.name), p.sources.front().run_id);
      for (const auto& [x, y] : s.points)
        out += fmt::format(" {}: {};", NumberText(x), NumberText(y));
      out += "\n";
    }
  }
  section();
  for (const HumanStop& s : r.stops) {
    out +=
        fmt::format("- {} {}: {} {} {}. {} Materials: {}\n", s.step, Cell(s.title), Word(s.verdict),
                    Cell(s.reason), Cell(s.detail), Cell(s.text), Links(s.materials, base));
  }
  section();
  for (const std::string_view line : ReportLimits()) out += fmt::format("- {}\n", line);
  for (const std::string& line : r.skipped) out += fmt::format("- Not read: {}\n", Cell(line));
  return WithFooter(out, {r.events, r.head});
}

std::vector<std::string> LintReport(std::string_view markdown, const State& state) {
  std::vector<std::string> wrong;
  const auto split = SplitFooter(markdown);
  if (!split.ok()) wrong.push_back(std::string(split.status().message()));
  const std::string body = split.ok() ? split->first : std::string(markdown);

  const auto runs_of = [&](std::string_view line) {
    std::vector<const RunRecord*> runs;
    for (size_t at = line.find("run "); at != std::string_view::npos;
         at = line.find("run ", at + 4)) {
      const std::string_view id = line.substr(at + 4, 36);
      const RunRecord* run = id.size() == 36 ? state.FindRun(std::string(id)) : nullptr;
      if (run != nullptr) runs.push_back(run);
    }
    return runs;
  };
  const auto names_a_run = [&](std::string_view line) {
    if (!runs_of(line).empty()) return true;
    return line.find("excluded: ") != std::string_view::npos &&
           line.find("(event ") != std::string_view::npos;
  };
  // Said of everything, hence never shown by runs.
  constexpr std::string_view kTooWide[] = {"requires bitwise equality",
                                           "all RL systems",
                                           "every RL system",
                                           "is batch-invariant",
                                           "always bitwise",
                                           "guaranteed",
                                           "proves that",
                                           "in all cases"};
  std::map<std::string, int> lines_of;
  const Section* section = nullptr;
  size_t at = 0;
  int number = 0;
  bool head = true;
  while (at < body.size()) {
    const size_t end = std::min(body.find('\n', at), body.size());
    const std::string_view line = std::string_view(body).substr(at, end - at);
    at = end + 1;
    ++number;
    if (line.empty()) continue;
    const auto say = [&](std::string_view what) {
      wrong.push_back(fmt::format("line {}: {}: {}", number, what, Printable(line.substr(0, 120))));
    };
    for (const std::string_view words : kTooWide) {
      if (line.find(words) != std::string_view::npos) say("claims more than runs can show");
    }
    if (line.starts_with("## ")) {
      head = false;
      section = nullptr;
      for (const Section& s : kSections) {
        if (line.substr(3) == s.title) section = &s;
      }
      if (section == nullptr) {
        say("no section of a report");
      } else if (++lines_of[std::string(section->title)] > 1) {
        say("a section twice");
      }
      continue;
    }
    if (head) {
      // The title and one paragraph.
      if (!line.starts_with("# Report: ") && !line.starts_with("Task " + state.task_id)) {
        say("text before the first section");
      }
      continue;
    }
    if (section == nullptr) continue;
    lines_of[std::string(section->title)] += 2;
    const bool row = line.starts_with("|"),
               item = line.starts_with("- ") || line.starts_with("  - ");
    if (!row && !item) {
      if (line != "none") say("neither a list item nor a table row");
      continue;
    }
    const bool table_head =
        IsRule(line) || line == kAcceptanceHead || line == kEvidenceHead || line == kComparisonHead;
    if (!section->claims || table_head) continue;
    // An acceptance that is not covered rests on nothing, and says so.
    if (section->title == "Acceptances" && line.find("| not-covered |") != std::string_view::npos) {
      continue;
    }
    if (!names_a_run(line)) say("a claim without a run of this log");
    // Of an earlier arithmetic only what says that it does not hold any more.
    if (section->title == "Failed, stale and excluded" ||
        line.find("stale") != std::string_view::npos) {
      continue;
    }
    for (const RunRecord* run : runs_of(line)) {
      if (OfEarlierArithmetic(state, *run)) say("a number or pass of an earlier arithmetic");
    }
  }
  for (const Section& s : kSections) {
    const auto found = lines_of.find(std::string(s.title));
    if (found == lines_of.end()) {
      wrong.push_back(fmt::format("the section \"{}\" is missing", s.title));
    } else if (found->second < 2) {
      wrong.push_back(fmt::format("the section \"{}\" is empty", s.title));
    }
  }
  return wrong;
}

}  // namespace tare::workflow
