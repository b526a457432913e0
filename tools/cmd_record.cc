// `tare record -- COMMAND`: runs a command as a run of the task. With --observe and no command it
// only notes what inputs are now, so that evidence made from others turns stale.

#include <cstdio>
#include <memory>

#include "base/json.h"
#include "tools/command.h"
#include "workflow/process.h"
#include "workflow/record.h"
#include "workflow/uuid.h"

namespace tare {
namespace {

struct Options {
  std::string dir = ".";
  std::string kind;
  std::string scope;
  std::vector<std::string> observe;
  std::string exclude, reason;
  workflow::RecordOptions record;
  bool json = false;
};

int Observe(const Options& options) {
  Env* env = Env::Real();
  std::vector<workflow::Dependency> found;
  std::vector<std::string> unknown;
  for (const std::string& text : options.observe) {
    const size_t colon = text.find(':');
    const auto type = workflow::ParseDependencyType(text.substr(0, colon));
    if (colon == std::string::npos || !type) {
      return ReportError(
          InvalidArgument("--observe {}: TYPE:PATH or TYPE:NAME=PATH", Printable(text)));
    }
    std::string name = text.substr(colon + 1), path = name;
    if (const size_t equals = name.find('='); equals != std::string::npos) {
      path = name.substr(equals + 1);
      name = name.substr(0, equals);
    }
    auto digest = workflow::HashPath(env, path);
    if (digest.ok()) {
      found.push_back({*type, name, *digest});
    } else {
      unknown.push_back(workflow::DependencyId(*type, name));
    }
  }
  auto task = workflow::OpenWaiting(env, options.dir, workflow::CurrentActor());
  if (!task.ok()) return ReportError(task.status());
  workflow::EventDraft draft{workflow::NewRunId(env),
                             "observed",
                             {{"candidate", options.record.candidate},
                              {"dependencies", workflow::DependenciesToJson(found)},
                              {"unknown", unknown}}};
  auto event = (*task)->Append(draft);
  if (!event.ok()) return ReportError(event.status());
  Status pages = (*task)->WriteIndexes();
  if (!pages.ok()) return ReportError(pages);
  fmt::print("event {}: {} observed, {} unknown\n", event->seq, found.size(), unknown.size());
  return 0;
}

int Exclude(const Options& options) {
  Env* env = Env::Real();
  if (options.reason.empty()) return ReportError(InvalidArgument("--exclude needs --reason"));
  auto task = workflow::OpenWaiting(env, options.dir, workflow::CurrentActor());
  if (!task.ok()) return ReportError(task.status());
  workflow::EventDraft draft{workflow::NewRunId(env),
                             "candidate",
                             {{"name", options.exclude},
                              {"step", options.record.step},
                              {"state", "excluded"},
                              {"reason", options.reason},
                              {"previous", ""},
                              {"identity", Json::array()},
                              {"ledger", Json::object()}}};
  auto event = (*task)->Append(draft);
  if (!event.ok()) return ReportError(event.status());
  Status pages = (*task)->WriteIndexes();
  return pages.ok() ? 0 : ReportError(pages);
}

int Run(Options options) {
  if (!options.observe.empty()) return Observe(options);
  if (!options.exclude.empty()) return Exclude(options);
  const auto kind = workflow::ParseEvidenceKind(options.kind);
  if (!kind) {
    return ReportError(InvalidArgument("--kind {}: E1 to E10 is needed (docs/formats/run.md)",
                                       Printable(options.kind)));
  }
  options.record.kind = *kind;
  if (Status s = TakeTyped(&options.record.command); !s.ok()) return ReportError(s);
  if (!options.scope.empty()) {
    auto scope = workflow::Scope::FromText(options.scope);
    if (!scope.ok()) return ReportError(scope.status());
    options.record.scope = *scope;
  }
  options.record.quiet = options.record.quiet || options.json;
  auto report =
      workflow::RecordCommand(Env::Real(), options.dir, workflow::CurrentActor(), options.record);
  if (!report.ok()) return ReportError(report.status());
  for (const std::string& what : report->refused)
    fmt::print(stderr, "tare: not kept: {}\n", Printable(what));
  if (options.json) {
    fmt::print("{}\n", Json{{"run", report->run_id},
                            {"exit", report->exit_code ? Json(*report->exit_code) : Json()},
                            {"signal", report->signal},
                            {"verdict", VerdictName(report->status.verdict)},
                            {"reason", report->status.reason},
                            {"detail", report->status.detail},
                            {"artifacts", report->artifacts},
                            {"refused", report->refused}}
                           .dump(1, ' ', false, Json::error_handler_t::replace));
  } else {
    fmt::print(stderr, "run {}: {}{}{}{}{}\n", report->run_id, VerdictName(report->status.verdict),
               report->status.detail.empty() ? "" : ", ", Printable(report->status.detail),
               report->status.reason.empty() ? "" : " ", report->status.reason);
  }
  return ExitCode(report->status.verdict);
}

}  // namespace
}  // namespace tare

TARE_COMMAND(record, [](CLI::App& root) {
  CLI::App* app =
      root.add_subcommand("record", "run a command as a run of the task and keep all of it");
  auto options = std::make_shared<tare::Options>();
  auto& r = options->record;
  app->add_option("--task", options->dir, "the task directory (default: here)");
  app->add_option("--step", r.step, "C0 to C10");
  app->add_option("--kind", options->kind, "kind of evidence, E1 to E10");
  app->add_option("--parent", r.parent, "run that this one retries");
  app->add_option("--candidate", r.candidate, "candidate that it is about");
  app->add_option("--input", r.inputs, "input by file or folder: TYPE:PATH or TYPE:NAME=PATH");
  app->add_option("--depends", r.depends,
                  "input by digest: TYPE:NAME=SHA256, or artifact:STEP/NAME");
  app->add_option("--config-key", r.config_keys,
                  "configuration it depends on (default: all; none)");
  app->add_option("--material", r.materials, "file of TARE_OUT that is no raw result");
  app->add_option("--conclude", r.conclude, "`exit-status`, or a conclusion.json");
  app->add_option("--scope", options->scope, "shape=..;topology=..;dtype=..;model=..;path=..");
  app->add_option("--heartbeat", r.heartbeat_s, "seconds between heartbeats")
      ->capture_default_str();
  app->add_option("--observe", options->observe, "only note what an input is now: TYPE:PATH");
  app->add_option("--skip-levels", r.skip_levels,
                  "why cheaper levels of the candidate's ladder never ran (`tare ladder`)");
  app->add_option("--exclude", options->exclude, "exclude a candidate of --step, for --reason");
  app->add_option("--reason", options->reason, "why it is excluded");
  app->add_flag("--quiet", r.quiet, "do not pass the command's output on");
  app->add_flag("--json", options->json, "for machines");
  app->add_option("command", r.command, "the command, after --");
  app->callback([options] { tare::SetExit(tare::Run(*options)); });
});
