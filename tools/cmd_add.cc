// `tare add FILE...`: artifacts made elsewhere, as one run of the task.

#include <cstdio>
#include <memory>

#include "base/json.h"
#include "tools/command.h"
#include "workflow/process.h"
#include "workflow/record.h"

namespace tare {
namespace {

struct Options {
  std::string dir = ".";
  std::string kind;
  int64_t exit_status = 0;
  CLI::Option* exit_option = nullptr;
  workflow::AddOptions add;
  bool json = false;
};

int Run(Options options) {
  const auto kind = workflow::ParseEvidenceKind(options.kind);
  if (!kind) {
    return ReportError(InvalidArgument("--kind {}: E1 to E10 is needed (docs/formats/run.md)",
                                       Printable(options.kind)));
  }
  options.add.kind = *kind;
  if (options.exit_option->count() > 0) options.add.exit_code = options.exit_status;
  auto report =
      workflow::AddArtifacts(Env::Real(), options.dir, workflow::CurrentActor(), options.add);
  if (!report.ok()) return ReportError(report.status());
  if (options.json) {
    fmt::print("{}\n", Json{{"run", report->run_id},
                            {"verdict", VerdictName(report->status.verdict)},
                            {"reason", report->status.reason},
                            {"detail", report->status.detail},
                            {"artifacts", report->artifacts}}
                           .dump(1, ' ', false, Json::error_handler_t::replace));
  } else {
    for (const std::string& path : report->artifacts) fmt::print("{}\n", path);
    fmt::print(stderr, "run {}: {}{}{} {}\n", report->run_id, VerdictName(report->status.verdict),
               report->status.detail.empty() ? "" : ", ", Printable(report->status.detail),
               report->status.reason);
  }
  return ExitCode(report->status.verdict);
}

}  // namespace
}  // namespace tare

TARE_COMMAND(add, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand("add", "record artifacts that were made elsewhere");
  auto options = std::make_shared<tare::Options>();
  auto& a = options->add;
  app->add_option("files", a.raw, "raw results")->required();
  app->add_option("--task", options->dir, "the task directory (default: here)");
  app->add_option("--step", a.step, "C0 to C10")->required();
  app->add_option("--kind", options->kind, "kind of evidence, E1 to E10")->required();
  app->add_option("--config", a.config, "resolved configuration of what made them");
  app->add_option("--identity", a.identity, "execution identity of what made them");
  app->add_option("--conclusion", a.conclusion, "a conclusion.json (docs/formats/run.md)");
  app->add_option("--material", a.materials, "a file that is no raw result");
  options->exit_option =
      app->add_option("--exit-status", options->exit_status, "exit status of what made them");
  app->add_option("--parent", a.parent, "run that this one retries");
  app->add_option("--candidate", a.candidate, "candidate that it is about");
  app->add_option("--input", a.inputs, "input by file or folder: TYPE:PATH or TYPE:NAME=PATH");
  app->add_option("--depends", a.depends,
                  "input by digest: TYPE:NAME=SHA256, or artifact:STEP/NAME");
  app->add_option("--config-key", a.config_keys,
                  "configuration it depends on (default: all; none)");
  app->add_flag("--json", options->json, "for machines");
  app->callback([options] { tare::SetExit(tare::Run(*options)); });
});
