// `tare workflow [GATE]` prints the gates, ladder, stops and problem index; `tare find SYMPTOM`
// leads from what a user sees to what to read and to run first. Both from one table.

#include <algorithm>
#include <cstdio>
#include <memory>

#include "base/json.h"
#include "tools/command.h"
#include "workflow/gates/find.h"
#include "workflow/gates/table.h"

namespace tare {
namespace {

struct WorkflowOptions {
  std::string gate;
  bool markdown = false;
  bool json = false;
};

int RunWorkflow(const WorkflowOptions& options) {
  const workflow::WorkflowTable& table = workflow::TheWorkflow();
  if (options.gate.empty()) {
    const std::string text = options.markdown ? workflow::WorkflowMarkdown(table)
                             : options.json   ? workflow::WorkflowJson(table).dump(1) + "\n"
                                              : workflow::WorkflowText(table);
    std::fputs(text.c_str(), stdout);
    return 0;
  }
  if (options.markdown) {
    return ReportError(InvalidArgument("--markdown is the whole page; leave out {}", options.gate));
  }
  const workflow::GateSpec* gate = table.Find(options.gate);
  if (gate == nullptr) {
    return ReportError(
        InvalidArgument("no gate `{}`; the gates are C0 to C10", Printable(options.gate)));
  }
  if (options.json) {
    for (const Json& item : workflow::WorkflowJson(table)["gates"]) {
      if (item["id"] == gate->id) fmt::print("{}\n", item.dump(1));
    }
  } else {
    std::fputs(workflow::GateText(*gate).c_str(), stdout);
  }
  return 0;
}

struct FindOptions {
  std::vector<std::string> words;
  size_t limit = 3;
  bool json = false;
};

int RunFind(const FindOptions& options) {
  std::string symptom;
  for (const std::string& word : options.words) symptom += word + " ";
  const auto matches =
      workflow::FindProblems(workflow::TheWorkflow(), symptom, std::max<size_t>(1, options.limit));
  if (options.json) {
    Json rows = Json::array();
    for (const workflow::Match& m : matches) {
      rows.push_back({{"id", m.problem->id},
                      {"problem", m.problem->problem},
                      {"section", m.problem->section},
                      {"gates", m.problem->gates},
                      {"first", m.problem->first},
                      {"commands", m.problem->commands},
                      {"matched", m.matched}});
    }
    fmt::print("{}\n", Json({{"schema", "tare.find/1"}, {"rows", rows}}).dump(1));
  } else if (matches.empty()) {
    fmt::print("no row of the problem index has a word of this; `tare workflow` lists all rows\n");
  }
  for (const workflow::Match& m : matches) {
    if (options.json) break;
    const workflow::Problem& p = *m.problem;
    fmt::print("{} {}\n  read      {}\n  gates    ", p.id, p.problem, p.section);
    for (const std::string& gate : p.gates) fmt::print(" {}", gate);
    fmt::print("\n  first     {}\n", p.first);
    for (const std::string& command : p.commands) fmt::print("  command   {} --help\n", command);
  }
  // A ranking is no verdict; only an answer without rows is told apart.
  return matches.empty() ? ExitCode(Verdict::kNotCovered) : 0;
}

}  // namespace
}  // namespace tare

TARE_COMMAND(workflow, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand("workflow", "gates C0 to C10, human stops, problem index");
  auto options = std::make_shared<tare::WorkflowOptions>();
  app->add_option("gate", options->gate, "one gate, C0 to C10");
  app->add_flag("--markdown", options->markdown, "as the page docs/gates.md");
  app->add_flag("--json", options->json, "for machines");
  app->callback([options] { tare::SetExit(tare::RunWorkflow(*options)); });
});

TARE_COMMAND(find, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand("find", "what to read and run first for a symptom");
  auto options = std::make_shared<tare::FindOptions>();
  app->add_option("symptom", options->words, "what you see, in your own words")->required();
  app->add_option("--limit", options->limit, "rows to print (3)");
  app->add_flag("--json", options->json, "for machines");
  app->callback([options] { tare::SetExit(tare::RunFind(*options)); });
});
