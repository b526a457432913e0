// `tare report`: what a task shows and what it does not, made from its log and artifacts.

#include <cstdio>
#include <filesystem>
#include <memory>

#include "base/json.h"
#include "base/reasons.h"
#include "tools/command.h"
#include "workflow/layout.h"
#include "workflow/report/report.h"
#include "workflow/task.h"

namespace tare {
namespace {

struct Options {
  std::string dir = ".";
  std::string out;
  std::string check;
  bool json = false;
};

Json AcceptancesJson(const workflow::TaskReport& report) {
  Json list = Json::array();
  for (const workflow::Acceptance& a : report.acceptances) {
    Json sources = Json::array();
    for (const workflow::Source& s : a.sources)
      sources.push_back({{"run", s.run_id}, {"artifact", s.artifact}});
    list.push_back({{"acceptance", a.name},
                    {"verdict", VerdictName(a.verdict)},
                    {"reason", a.reason},
                    {"detail", a.detail},
                    {"from", std::move(sources)}});
  }
  return list;
}

int Check(Env* env, const Options& options, const workflow::State& state) {
  auto text = env->ReadFile(options.check);
  if (!text.ok()) return ReportError(text.status());
  const std::vector<std::string> wrong = workflow::LintReport(*text, state);
  if (options.json) {
    fmt::print("{}\n", Json{{"schema", "tare.report_check/1"}, {"wrong", wrong}}.dump(1));
  } else {
    for (const std::string& line : wrong) fmt::print("{}\n", Printable(line));
    if (wrong.empty()) fmt::print("{}: every claim names a run of this log\n", options.check);
  }
  if (wrong.empty()) return 0;
  PrintReason(Verdict::kRefused, reason::kReportUnsupported);
  return ExitCode(Verdict::kRefused);
}

int Run(const Options& options) {
  Env* env = Env::Real();
  auto view = workflow::ReadTask(env, options.dir);
  if (!view.ok()) return ReportError(view.status());
  if (!options.check.empty()) return Check(env, options, view->state);
  auto report = workflow::CollectReport(env, *view);
  if (!report.ok()) return ReportError(report.status());
  if (options.out.empty()) {
    if (options.json) {
      fmt::print("{}\n", Json{{"schema", "tare.report/1"},
                              {"task", report->task_id},
                              {"acceptances", AcceptancesJson(*report)},
                              {"not_covered", report->not_covered}}
                             .dump(1));
    } else {
      fmt::print("{}", workflow::ReportMarkdown(*report, ""));
    }
    return 0;
  }
  std::error_code error;
  const auto task = std::filesystem::weakly_canonical(options.dir, error);
  const auto out = std::filesystem::weakly_canonical(options.out, error);
  const std::string way = task.lexically_relative(out).generic_string();
  if (const auto inside = out.lexically_relative(task);
      error || (!inside.empty() && *inside.begin() != "..")) {
    return ReportError(InvalidArgument(
        "--out {}: a report lies outside the task directory, which holds only what the log names",
        options.out));
  }
  std::filesystem::create_directories(out, error);
  const std::string base = way.empty() ? "" : way + "/";
  for (const auto& [name, text] : {std::pair("report.md", workflow::ReportMarkdown(*report, base)),
                                   std::pair("report.html", workflow::ReportHtml(*report, base))}) {
    const std::string path = workflow::JoinPath(options.out, name);
    if (const Status s = env->WriteFileAtomic(path, text); !s.ok()) return ReportError(s);
    if (!options.json) fmt::print("{}\n", path);
  }
  if (options.json) fmt::print("{}\n", Json{{"acceptances", AcceptancesJson(*report)}}.dump(1));
  return 0;
}

}  // namespace
}  // namespace tare

TARE_COMMAND(report, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand(
      "report", "what the task shows and what it does not: Markdown and one HTML page");
  auto options = std::make_shared<tare::Options>();
  app->add_option("dir", options->dir, "the task directory (default: here)");
  app->add_option(
      "--out", options->out,
      "folder for report.md and report.html, outside the task (default: Markdown here)");
  app->add_option("--check", options->check,
                  "a Markdown report: is every claim in it backed by a run of this log?");
  app->add_flag("--json", options->json, "for machines");
  app->footer(
      "Exit status 0: the report was made, whatever it says; `tare status` has the verdicts.");
  app->callback([options] { tare::SetExit(tare::Run(*options)); });
});
