// `tare run C<N>`: acts for a gate, judges what came out and records it. `tare judge FILE`: the
// verdict on a given evidence document.

#include <unistd.h>

#include <cstdio>
#include <memory>

#include "tools/command.h"
#include "workflow/gates/collect.h"
#include "workflow/process.h"

namespace tare {
namespace {

struct Options {
  workflow::RunGateOptions run;
  std::string file, task;
  int64_t exit_status = 0;
  CLI::Option* exit_option = nullptr;
  bool json = false, verbose = false;
};

std::string SelfPath() {
  char buffer[4096];
  const ssize_t n = ::readlink("/proc/self/exe", buffer, sizeof buffer);
  return n > 0 ? std::string(buffer, static_cast<size_t>(n)) : std::string("tare");
}

int Show(const workflow::RunGateReport& report, bool json) {
  const workflow::GateJudgement& j = report.judgement;
  if (json) {
    Json out = j.ToJson();
    out["run"] = report.run_id;
    out["step"] = {{"verdict", VerdictName(report.verdict)},
                   {"reason", report.reason},
                   {"detail", report.detail},
                   {"next", report.next}};
    fmt::print("{}\n", out.dump(1));
  } else {
    for (const workflow::GateFinding& f : j.findings) {
      fmt::print("{:<9} {:<14} {}{}{}\n", f.row, VerdictName(f.verdict), f.reason,
                 f.reason.empty() ? "" : ": ", Printable(f.detail));
    }
    if (j.scope.is_object()) {
      for (const Json& item : j.scope.value("not_covered", Json::array())) {
        fmt::print("{:<9} not-covered    {}\n", item.value("row", ""),
                   Printable(item.value("what", "")));
      }
      if (j.scope.contains("provisional")) {
        fmt::print("provisional: {}\n", j.scope["provisional"].get<std::string>());
      }
    }
    fmt::print("{} {}{}{}\n", j.gate, VerdictName(report.verdict),
               report.reason.empty() ? "" : " " + report.reason,
               report.detail.empty() ? "" : ": " + Printable(report.detail));
    if (!report.next.empty()) fmt::print("next: {}\n", Printable(report.next));
    if (!report.run_id.empty()) fmt::print("run {}\n", report.run_id);
  }
  std::fflush(stdout);
  if (!report.reason.empty()) PrintReason(report.verdict, report.reason);
  return ExitCode(report.verdict);
}

int Run(Options o) {
  o.run.program = SelfPath();
  o.run.quiet = !o.verbose || o.json;
  const auto report = workflow::RunGate(Env::Real(), workflow::CurrentActor(), o.run);
  return report.ok() ? Show(*report, o.json) : ReportError(report.status());
}

int Judge(const Options& o) {
  std::optional<int64_t> exit_code;
  if (o.exit_option->count() > 0) exit_code = o.exit_status;
  const auto report =
      workflow::JudgeDocument(Env::Real(), workflow::CurrentActor(), o.task, o.file, exit_code);
  return report.ok() ? Show(*report, o.json) : ReportError(report.status());
}

}  // namespace

TARE_COMMAND(run, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand("run", "act for a gate: collect its evidence, judge, record");
  auto o = std::make_shared<Options>();
  o->run.task = ".";
  app->add_option("gate", o->run.gate, "C0 to C10")->required();
  app->add_option("--task", o->run.task, "the task directory (default: here)");
  app->add_option("--model", o->run.model,
                  "checkpoint folder (default: weights.path of task.toml)");
  app->add_option("--workload", o->run.workload, "of C1: short, or formal (8192 in, 1024 out)")
      ->check(CLI::IsMember({"short", "formal"}));
  app->add_option("--text", o->run.text,
                  "of C7: lines of text; with it the three finetuning arms run");
  app->add_option("--reference", o->run.reference,
                  "of C9: a recipe to compare with, JSON; default: `tare rl defaults`");
  app->add_option("--formal-steps", o->run.formal_steps, "of C9: updates of the formal recipe")
      ->check(CLI::Range(int64_t{3}, int64_t{1} << 30))
      ->capture_default_str();
  app->add_option("--fault", o->run.faults,
                  "planted faults, name@side,...: shows that the gate can fail");
  app->add_flag("--verbose", o->verbose, "pass on what the commands print");
  app->add_flag("--json", o->json, "for machines");
  app->callback([o] { SetExit(Run(*o)); });

  CLI::App* judge =
      root.add_subcommand("judge", "the verdict on a gate's evidence document, or on a claim");
  auto j = std::make_shared<Options>();
  judge->add_option("evidence", j->file, "docs/formats/gate_evidence.md, docs/formats/claims.md")
      ->required();
  judge->add_option("--task", j->task, "record it in this task, as evidence made elsewhere");
  j->exit_option =
      judge->add_option("--exit-status", j->exit_status, "of what made it; E8 and E10 need one");
  judge->add_flag("--json", j->json, "for machines");
  judge->callback([j] { SetExit(Judge(*j)); });
});

}  // namespace tare
