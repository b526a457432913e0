// `tare archive DIR TARGET` copies a task that verifies; `tare archive DIR --check` checks its
// layout.

#include <cstdio>
#include <memory>

#include "base/json.h"
#include "tools/command.h"
#include "workflow/archive.h"
#include "workflow/process.h"

namespace tare {
namespace {

struct Options {
  std::string dir;
  std::string target;
  bool check = false;
  bool json = false;
};

int Run(const Options& options) {
  Env* env = Env::Real();
  if (options.check == !options.target.empty()) {
    return ReportError(InvalidArgument("either a target or --check is needed"));
  }
  if (options.check) {
    auto findings = workflow::CheckArchive(env, options.dir);
    if (!findings.ok()) return ReportError(findings.status());
    auto verified = workflow::VerifyTask(env, options.dir);
    if (!verified.ok()) return ReportError(verified.status());
    const bool clean = findings->empty() && verified->verdict == Verdict::kPass;
    Json list = Json::array();
    for (const auto& f : *findings) {
      list.push_back({{"reason", f.reason}, {"where", f.where}, {"message", f.message}});
      if (!options.json)
        fmt::print("fail {} {}: {}\n", f.reason, Printable(f.where), Printable(f.message));
    }
    if (options.json) {
      fmt::print("{}\n", Json{{"verdict", clean ? "pass" : "fail"},
                              {"layout", std::move(list)},
                              {"verify", VerdictName(verified->verdict)}}
                             .dump(1, ' ', false, Json::error_handler_t::replace));
    } else {
      fmt::print("{}: {} layout findings, verification: {}\n", clean ? "pass" : "fail",
                 findings->size(), VerdictName(verified->verdict));
    }
    return clean ? 0 : ExitCode(Verdict::kFail);
  }
  auto report = workflow::ArchiveTask(env, options.dir, options.target, workflow::CurrentActor());
  if (!report.ok()) return ReportError(report.status());
  fmt::print(stderr, "{} files, {} bytes; keep this checkpoint elsewhere:\n", report->files,
             report->bytes);
  std::fputs(workflow::EncodeCheckpoint(report->checkpoint).c_str(), stdout);
  return 0;
}

}  // namespace
}  // namespace tare

TARE_COMMAND(archive, [](CLI::App& root) {
  CLI::App* app =
      root.add_subcommand("archive", "copy a task with all links intact, or check its layout");
  auto options = std::make_shared<tare::Options>();
  app->add_option("dir", options->dir, "the task directory")->required();
  app->add_option("target", options->target, "a new directory for the archive");
  app->add_flag("--check", options->check, "orphans, misplaced and late files, and verification");
  app->add_flag("--json", options->json, "for machines");
  app->callback([options] { tare::SetExit(tare::Run(*options)); });
});
