// `tare verify [DIR]`: offline, read-only, complete; says what it does not prove.

#include <cstdio>
#include <memory>

#include "base/json.h"
#include "base/reasons.h"
#include "tools/command.h"
#include "workflow/verify.h"

namespace tare {
namespace {

struct Options {
  std::string dir = ".";
  std::string checkpoint;
  int threads = 0;
  bool print_checkpoint = false;
  bool json = false;
};

int Run(const Options& options) {
  Env* env = Env::Real();
  workflow::VerifyOptions verify;
  verify.threads = options.threads;
  if (!options.checkpoint.empty()) {
    auto text = env->ReadFile(options.checkpoint);
    if (!text.ok()) return ReportError(text.status());
    auto checkpoint = workflow::ParseCheckpoint(*text);
    if (!checkpoint.ok()) return ReportError(checkpoint.status());
    verify.checkpoint = *checkpoint;
  }
  auto report = workflow::VerifyTask(env, options.dir, verify);
  if (!report.ok()) return ReportError(report.status());
  if (options.print_checkpoint) {
    if (report->verdict != Verdict::kPass) {
      return ReportError(Error(Code::kDataLoss,
                               "no checkpoint of a task that does not verify: {} {}",
                               report->findings[0].reason, report->findings[0].where));
    }
    std::fputs(workflow::EncodeCheckpoint(report->head).c_str(), stdout);
    return 0;
  }
  if (options.json) {
    Json findings = Json::array();
    for (const auto& f : report->findings) {
      findings.push_back({{"reason", f.reason}, {"where", f.where}, {"message", f.message}});
    }
    fmt::print("{}\n", Json{{"verdict", VerdictName(report->verdict)},
                            {"task", report->task_id},
                            {"events", report->events},
                            {"runs", report->runs},
                            {"artifacts", report->artifacts},
                            {"signoffs", report->signoffs},
                            {"stale_runs", report->stale_runs},
                            {"bytes", report->bytes_hashed},
                            {"head", report->head.head},
                            {"findings", std::move(findings)},
                            {"not_proven", report->not_proven}}
                           .dump(1));
  } else {
    for (const auto& f : report->findings) {
      const Reason* reason = FindReason(f.reason);
      fmt::print("{:<13} {:<19} {}: {}\n",
                 reason == nullptr ? "fail" : VerdictName(reason->verdict), f.reason, f.where,
                 f.message);
    }
    fmt::print("{}: {} events, {} runs ({} stale), {} artifacts, {} bytes, {} sign-offs\n",
               VerdictName(report->verdict), report->events, report->runs, report->stale_runs,
               report->artifacts, report->bytes_hashed, report->signoffs);
    fmt::print("not proven:\n");
    for (const std::string& text : report->not_proven) fmt::print("  {}\n", text);
  }
  if (report->verdict != Verdict::kPass) fmt::print(stderr, "{}\n", report->findings[0].reason);
  return ExitCode(report->verdict);
}

}  // namespace
}  // namespace tare

TARE_COMMAND(verify, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand("verify", "check a task offline: chain, files, signatures");
  auto options = std::make_shared<tare::Options>();
  app->add_option("dir", options->dir, "the task directory (default: here)");
  app->add_option("--checkpoint", options->checkpoint, "a checkpoint kept outside the task");
  app->add_option("--threads", options->threads, "0: one per CPU")->capture_default_str();
  app->add_flag("--print-checkpoint", options->print_checkpoint,
                "print the three lines to keep elsewhere, if the task verifies");
  app->add_flag("--json", options->json, "for machines");
  app->callback([options] { tare::SetExit(tare::Run(*options)); });
});
