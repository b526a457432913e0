// The workflow table for people: terminal text, the page docs/gates.md, and JSON.

#include <fmt/ranges.h>

#include "workflow/gates/table.h"

namespace tare::workflow {
namespace {

std::string Cell(std::string text) {
  size_t at = 0;
  while ((at = text.find('|', at)) != std::string::npos) {
    text.insert(at, "\\");
    at += 2;
  }
  return text;
}

std::string Joined(const std::vector<std::string>& list) {
  return list.empty() ? "none" : fmt::format("{}", fmt::join(list, "; "));
}

std::string Code(const std::vector<std::string>& list) {
  return fmt::format("`{}`", fmt::join(list, "`, `"));
}

std::string StopLine(const GateSpec& gate) {
  return gate.stop.empty() ? "none" : fmt::format("a person signs {} {}", gate.stop, gate.id);
}

}  // namespace

std::string GateText(const GateSpec& gate) {
  return fmt::format(
      "{} {}\n  inputs      {}\n  action      {}\n  pass        {}\n  artifacts   {}\n"
      "  references  {}\n  needs       {}\n  evidence    {}\n  human stop  {}\n"
      "  commands    {}\n  not done    {}\n",
      gate.id, gate.title, Joined(gate.inputs), gate.action, gate.pass, Joined(gate.artifacts),
      Joined(gate.references), Joined(gate.needs), Joined(gate.evidence), StopLine(gate),
      Joined(gate.commands), gate.open);
}

std::string WorkflowText(const WorkflowTable& table) {
  std::string out;
  for (const GateSpec& gate : table.gates) out += GateText(gate) + "\n";
  out += "Cheapest failure first\n";
  for (const Rung& r : table.ladder) out += fmt::format("  {}. {}: {}\n", r.rung, r.level, r.probe);
  const auto list = [&out](const char* head, const std::vector<std::string>& lines) {
    out += fmt::format("\n{}\n", head);
    for (const std::string& line : lines) out += fmt::format("  - {}\n", line);
  };
  list("Rules", table.rules);
  list("RL delivery gates", table.delivery);
  list("Two tracks", table.tracks);
  out += "\nHuman stops\n";
  for (const Stop& s : table.stops) out += fmt::format("  {}: {}. {}\n", s.when, s.title, s.text);
  out += "\nFind by problem\n";
  for (const Problem& p : table.problems) {
    out += fmt::format("  {} {}\n    read {}; first: {}\n", p.id, p.problem, p.section, p.first);
  }
  return out;
}

std::string WorkflowMarkdown(const WorkflowTable& table) {
  std::string out =
      "# Gates\n\n"
      "Generated from `src/workflow/gates/workflow.json` by `tare workflow --markdown`; a test "
      "keeps\n"
      "the two equal. `tare workflow C5` prints one gate, `tare find \"what you see\"` searches "
      "the\n"
      "problem index.\n\n"
      "| gate | inputs | action | pass condition | artifacts | references "
      "|\n|---|---|---|---|---|---|\n";
  for (const GateSpec& g : table.gates) {
    out += fmt::format("| {} {} | {} | {} | {} | {} | {} |\n", g.id, Cell(g.title),
                       Cell(Joined(g.inputs)), Cell(g.action), Cell(g.pass),
                       Cell(Joined(g.artifacts)), Cell(Joined(g.references)));
  }
  out +=
      "\n## What Tare does for each today\n\n"
      "| gate | needs | evidence | human stop | commands | not done |\n|---|---|---|---|---|---|\n";
  for (const GateSpec& g : table.gates) {
    out += fmt::format("| {} | {} | {} | {} | {} | {} |\n", g.id, Joined(g.needs),
                       Joined(g.evidence), StopLine(g), Code(g.commands), Cell(g.open));
  }
  out += "\n## Cheapest failure first\n\n";
  for (const Rung& r : table.ladder) {
    out += fmt::format("{}. {}: {}\n", r.rung, r.level, r.probe);
  }
  const auto list = [&out](const char* head, const std::vector<std::string>& lines) {
    out += fmt::format("\n## {}\n\n", head);
    for (const std::string& line : lines) out += fmt::format("- {}\n", line);
  };
  list("Rules", table.rules);
  list("RL delivery gates", table.delivery);
  list("Two tracks", table.tracks);
  out += "\n## Human stops\n";
  for (const Stop& s : table.stops) {
    out += fmt::format("\n**{}: {}.** {}\n", s.when, s.title, s.text);
  }
  out +=
      "\n## Find by problem\n\n"
      "| row | problem | read first | gates | first probe | commands "
      "|\n|---|---|---|---|---|---|\n";
  for (const Problem& p : table.problems) {
    out += fmt::format("| {} | {} | {} | {} | {} | {} |\n", p.id, Cell(p.problem), Cell(p.section),
                       Joined(p.gates), Cell(p.first), Code(p.commands));
  }
  return out;
}

Json WorkflowJson(const WorkflowTable& table) {
  Json root = {{"schema", "tare.workflow/1"}};
  for (const GateSpec& g : table.gates) {
    root["gates"].push_back({{"id", g.id},
                             {"title", g.title},
                             {"inputs", g.inputs},
                             {"action", g.action},
                             {"pass", g.pass},
                             {"artifacts", g.artifacts},
                             {"references", g.references},
                             {"needs", g.needs},
                             {"evidence", g.evidence},
                             {"stop", g.stop},
                             {"commands", g.commands},
                             {"open", g.open}});
  }
  for (const Rung& r : table.ladder) {
    root["ladder"].push_back({{"rung", r.rung}, {"level", r.level}, {"probe", r.probe}});
  }
  root["rules"] = table.rules;
  root["delivery"] = table.delivery;
  root["tracks"] = table.tracks;
  for (const Stop& s : table.stops) {
    root["stops"].push_back({{"id", s.id}, {"when", s.when}, {"title", s.title}, {"text", s.text}});
  }
  for (const Problem& p : table.problems) {
    root["problems"].push_back({{"id", p.id},
                                {"problem", p.problem},
                                {"section", p.section},
                                {"gates", p.gates},
                                {"first", p.first},
                                {"commands", p.commands},
                                {"words", p.words}});
  }
  return root;
}

}  // namespace tare::workflow
