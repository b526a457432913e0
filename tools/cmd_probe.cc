// `tare probe BUNDLE`: the first operator that differs, by bisection over the layers with runs that
// record one layer each. For models whose whole dump is too large to keep.

#include <fmt/format.h>

#include <memory>
#include <string>

#include "base/reasons.h"
#include "compare/bundle.h"
#include "compare/probe.h"
#include "tensor/checkpoint.h"
#include "tools/command.h"
#include "tools/replay_run.h"

namespace tare {
namespace {

struct Options {
  std::string bundle, out;
  int64_t layers = 0;
  int threads = 0;
  bool json = false;
};

// The number of layers of the checkpoint that side A's command names.
Result<int64_t> LayersOf(const compare::Bundle& bundle) {
  const std::vector<std::string> command = compare::ReplayCommand(bundle, "a");
  if (command.size() < 2) return int64_t{1};  // Probe says what is missing
  TARE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(command[1]));
  const Json& raw = checkpoint.config().raw;
  const auto at = raw.find("num_hidden_layers");
  if (at == raw.end() || !at->is_number_unsigned() || *at < 1 || *at > 100'000) {
    return InvalidArgument("{}: config.json does not say num_hidden_layers; give --layers",
                           command[1]);
  }
  return at->get<int64_t>();
}

int Run(const Options& o) {
  Env* env = Env::Real();
  const Result<compare::Bundle> bundle = compare::OpenBundle(env, o.bundle);
  if (!bundle.ok()) return ReportBundleError(bundle.status());
  const Result<int64_t> layers = o.layers > 0 ? Result<int64_t>(o.layers) : LayersOf(*bundle);
  if (!layers.ok()) return ReportError(layers.status());
  compare::ReplayBatch inputs[2];
  for (const bool first : {true, false}) {
    Result<compare::ReplayBatch> batch = compare::ReplayInput(env, *bundle, first ? "a" : "b");
    if (!batch.ok()) return ReportError(batch.status());
    inputs[first ? 0 : 1] = *std::move(batch);
  }
  ThreadPool pool(o.threads);
  const Result<compare::ProbeReport> report =
      compare::Probe(*bundle, *layers, &pool,
                     [&](const std::vector<std::string>& names) -> Result<compare::Replayed> {
                       std::vector<std::string> extra;
                       for (const std::string& name : names)
                         extra.insert(extra.end(), {"--dump-only", name});
                       TARE_ASSIGN_OR_RETURN(std::shared_ptr<ScratchDir> dir, ScratchDir::Create());
                       compare::Replayed out;
                       TARE_ASSIGN_OR_RETURN(
                           Dump a, RunRecorded(*bundle, "a", inputs[0], dir->path(), false, extra));
                       TARE_ASSIGN_OR_RETURN(
                           Dump b, RunRecorded(*bundle, "b", inputs[1], dir->path(), false, extra));
                       out.a = std::make_unique<Dump>(std::move(a));
                       out.b = std::make_unique<Dump>(std::move(b));
                       out.keep = std::move(dir);
                       return out;
                     });
  if (!report.ok()) return ReportError(report.status());
  if (!o.out.empty() && report->located.found) {
    const Status written =
        compare::WriteBundle(env, o.out, *report->last.a, *report->last.b, report->located);
    if (!written.ok()) return ReportError(written);
  }
  if (o.json) {
    fmt::print("{}\n",
               compare::ProbeJson(*report).dump(1, ' ', false, Json::error_handler_t::replace));
  } else {
    fmt::print("{}", compare::ProbeTable(*report));
  }
  if (!report->reason.empty()) PrintReason(report->verdict, report->reason);
  return ExitCode(report->verdict);
}

}  // namespace
}  // namespace tare

TARE_COMMAND(probe, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand(
      "probe",
      "the first operator that differs, by bisection over the layers of a bundle's replay");
  auto o = std::make_shared<tare::Options>();
  app->add_option("bundle", o->bundle, "directory written by tare locate --bundle")->required();
  app->add_option("--bundle", o->out, "write a bundle of what is found to this new directory");
  app->add_option("--layers", o->layers, "of the model (default: as its config.json says)")
      ->check(CLI::Range(1, 100'000));
  app->add_option("--threads", o->threads, "of the comparison; 0: all CPUs of the affinity mask")
      ->check(CLI::NonNegativeNumber);
  app->add_flag("--json", o->json, "for machines");
  app->callback([o] { tare::SetExit(tare::Run(*o)); });
});
