// `tare shrink BUNDLE --out DIR`: the smallest input over which the bundle's operator still differs
// first, as a bundle of its own.

#include <fmt/format.h>

#include <memory>
#include <string>

#include "base/reasons.h"
#include "compare/bundle.h"
#include "compare/shrink.h"
#include "tools/command.h"
#include "tools/replay_run.h"

namespace tare {
namespace {

struct Options {
  std::string bundle, out;
  int max_runs = 200;
  int threads = 0;
  bool json = false;
};

int Run(const Options& o) {
  Env* env = Env::Real();
  if (env->Exists(o.out))
    return ReportError(
        Error(Code::kAlreadyExists, "{} is there; --out names a new directory", o.out));
  const Result<compare::Bundle> bundle = compare::OpenBundle(env, o.bundle);
  if (!bundle.ok()) return ReportBundleError(bundle.status());
  ThreadPool pool(o.threads);
  compare::ShrinkOptions options;
  options.max_runs = o.max_runs;
  options.pool = &pool;
  int number = 0;
  const Result<compare::ShrinkReport> report = compare::Shrink(
      env, *bundle, options,
      [&](const compare::ReplayBatch& a,
          const compare::ReplayBatch& b) -> Result<compare::Replayed> {
        TARE_ASSIGN_OR_RETURN(std::shared_ptr<ScratchDir> dir, ScratchDir::Create());
        if (!o.json) fmt::print(stderr, "\rrun {}", ++number);
        compare::Replayed out;
        TARE_ASSIGN_OR_RETURN(Dump da, RunRecorded(*bundle, "a", a, dir->path(), false));
        TARE_ASSIGN_OR_RETURN(Dump db, RunRecorded(*bundle, "b", b, dir->path(), false));
        out.a = std::make_unique<Dump>(std::move(da));
        out.b = std::make_unique<Dump>(std::move(db));
        out.keep = std::move(dir);
        return out;
      });
  if (!o.json) fmt::print(stderr, "\n");
  if (!report.ok()) return ReportError(report.status());
  if (report->verdict == Verdict::kPass) {
    const Status written =
        compare::WriteBundle(env, o.out, *report->last.a, *report->last.b, report->located);
    if (!written.ok()) return ReportError(written);
  }
  if (o.json) {
    fmt::print("{}\n",
               compare::ShrinkJson(*report).dump(1, ' ', false, Json::error_handler_t::replace));
  } else {
    fmt::print("{}", compare::ShrinkTable(*report));
    if (report->verdict == Verdict::kPass) fmt::print("bundle: {}\n", o.out);
  }
  if (!report->reason.empty()) PrintReason(report->verdict, report->reason);
  return ExitCode(report->verdict);
}

}  // namespace
}  // namespace tare

TARE_COMMAND(shrink, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand(
      "shrink", "the smallest input over which a bundle's operator still differs first");
  auto o = std::make_shared<tare::Options>();
  app->add_option("bundle", o->bundle, "directory written by tare locate --bundle")->required();
  app->add_option("--out", o->out, "new directory for the small bundle")->required();
  app->add_option("--max-runs", o->max_runs, "runs of both sides' commands, at most")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  app->add_option("--threads", o->threads, "of the comparison; 0: all CPUs of the affinity mask")
      ->check(CLI::NonNegativeNumber);
  app->add_flag("--json", o->json, "for machines");
  app->callback([o] { tare::SetExit(tare::Run(*o)); });
});
