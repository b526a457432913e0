// `tare accept TASK`: the judgement of a whole task, as an outsider comes to it: the ledger
// verified, every gate judged again from its recorded evidence, the documents held against each
// other and against the ledger. The four acceptances are printed apart; there is no total. The exit
// status is that of the gravest finding.

#include <cstdio>
#include <memory>

#include "base/env.h"
#include "tools/command.h"
#include "workflow/gates/table.h"
#include "workflow/gates/task_judge.h"

namespace tare {
namespace {

void Print(const workflow::TaskJudgement& j) {
  const workflow::Acceptances& a = j.acceptances;
  const auto line = [](const char* name, Verdict verdict, const std::string& text) {
    fmt::print("{:<12} {:<16} {}\n", name, VerdictName(verdict), text);
  };
  line("forward", a.forward, a.forward_text);
  line("backward", a.backward, a.backward_text);
  line("quality", a.quality, a.quality_text);
  line("performance", a.performance, a.performance_text);
  fmt::print("\n");
  for (const std::string_view id : workflow::kGateIds) {
    const auto it = j.gates.find(std::string(id));
    if (it == j.gates.end()) {
      fmt::print("{:<5}{:<16} no evidence is recorded\n", id, "not-covered");
      continue;
    }
    fmt::print("{:<5}{:<16} {}\n", id, VerdictName(it->second.verdict), it->second.reason);
    for (const workflow::GateFinding& f : it->second.findings) {
      if (f.verdict != Verdict::kPass)
        fmt::print("     {} {}: {}\n     next: {}\n", f.row, f.reason, f.detail, f.next);
    }
    for (const Json& open : it->second.scope.at("not_covered"))
      fmt::print("     not covered: {}\n", open.value("what", ""));
  }
  for (const workflow::GateFinding& f : j.findings)
    fmt::print("{} {}: {}\n     next: {}\n", f.row, f.reason, f.detail, f.next);
}

}  // namespace

TARE_COMMAND(accept, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand(
      "accept", "judge a whole task again from its ledger: four acceptances, never one");
  struct Options {
    std::string task = ".";
    bool json = false;
  };
  auto o = std::make_shared<Options>();
  app->add_option("task", o->task, "task directory")->capture_default_str();
  app->add_flag("--json", o->json, "for machines");
  app->callback([o] {
    const Result<workflow::TaskJudgement> judged = workflow::JudgeTask(Env::Real(), o->task);
    if (!judged.ok()) return SetExit(ReportError(judged.status()));
    if (o->json) {
      fmt::print("{}\n", judged->ToJson().dump(1));
    } else {
      Print(*judged);
    }
    std::fflush(stdout);
    if (!judged->reason.empty()) PrintReason(judged->verdict, judged->reason);
    SetExit(ExitCode(judged->verdict));
  });
});

}  // namespace tare
