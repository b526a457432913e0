// `tare invariance MODEL`: the matrix of everything that must not move a bit of inference.

#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/fault.h"
#include "engine/invariance.h"
#include "tools/command.h"

namespace tare {
namespace {

struct Options {
  engine::InvarianceOptions run;
  std::string arm = "invariant";
  std::string profile = "ieee-f32";
  std::string faults;
  std::vector<std::string> only;
  bool json = false;
  bool no_boundaries = false;
};

int Run(Options& o) {
  if (const Status s = fault::Select(o.faults); !s.ok()) return ReportError(s);
  if (o.arm != "invariant" && o.arm != "native")
    return ReportError(InvalidArgument("--arm {}: invariant or native", o.arm));
  const std::optional<Profile> profile = ParseProfile(o.profile);
  if (!profile)
    return ReportError(InvalidArgument("--profile {}: ieee-f32 or sm90-mma", o.profile));
  o.run.profile = *profile;
  o.run.arm = o.arm == "native" ? ops::BatchInvariance::kOff : ops::BatchInvariance::kOn;
  o.run.boundaries = !o.no_boundaries;
  o.run.only = {o.only.begin(), o.only.end()};
  std::error_code error;
  o.run.program = std::filesystem::read_symlink("/proc/self/exe", error).string();
  const auto line = [](const engine::InvarianceCell& c) {
    fmt::print(stderr, "{:24} {:32} {:13} {:5} tokens, {} mismatches {}\n", c.axis, c.condition,
               VerdictName(c.verdict), c.compared, c.mismatches, c.first);
  };
  const Result<engine::InvarianceReport> report = engine::RunInvariance(o.run, line);
  if (!report.ok()) return ReportError(report.status());
  if (o.json) {
    fmt::print("{}\n", engine::ToJson(o.run, *report).dump(1));
  } else {
    int64_t compared = 0, mismatches = 0;
    for (const engine::InvarianceCell& c : report->cells) {
      compared += c.compared;
      mismatches += c.mismatches;
    }
    fmt::print("{}: {} cells, {} tokens compared, {} mismatches, {} arm: {}\n", report->model,
               report->cells.size(), compared, mismatches, o.arm, VerdictName(report->verdict));
  }
  if (!report->reason.empty()) PrintReason(report->verdict, report->reason);
  return ExitCode(report->verdict);
}

}  // namespace

TARE_COMMAND(invariance, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand(
      "invariance", "try everything that must not move a bit of the engine's answers");
  auto o = std::make_shared<Options>();
  app->add_option("model", o->run.model_path, "checkpoint: a Hugging Face directory or a GGUF file")
      ->required();
  app->add_option("--arm", o->arm, "invariant, or native to see its bits move")
      ->capture_default_str();
  app->add_option("--profile", o->profile, "contraction profile: ieee-f32 or sm90-mma")
      ->capture_default_str();
  app->add_option("--max-batch", o->run.max_batch, "largest batch, 2 to 64")->capture_default_str();
  app->add_option("--generated", o->run.generated, "tokens that a victim samples")
      ->capture_default_str();
  app->add_option("--threads", o->run.threads, "compute threads (0: the CPUs of this process)")
      ->capture_default_str();
  app->add_option("--only", o->only, "these axes alone (the rest counts as not covered)")
      ->delimiter(',');
  app->add_flag("--no-boundaries", o->no_boundaries,
                "leave out the prompts around the contract's constants");
  app->add_option("--fault", o->faults, "planted faults, name@rollout,...");
  app->add_flag("--json", o->json, "the report as JSON on stdout");
  app->callback([o] { SetExit(Run(*o)); });
});

}  // namespace tare
