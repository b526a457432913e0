// `tare train-audit [MODEL]`: gradients of every parameter and two optimizer steps against float64
// (trainer/audit.h). MINI without MODEL. Exit 0 when all lies inside the tolerances fixed there.

#include <cstdio>
#include <memory>

#include "base/env.h"
#include "base/fault.h"
#include "base/reasons.h"
#include "numerics/fp_environment.h"
#include "tools/command.h"
#include "trainer/audit.h"

namespace tare {
namespace {

struct Options {
  std::string model, faults;
  int64_t layers = 2;
  int threads = 0;
  bool json = false;
};

int Run(const Options& o) {
  if (const Status s = fault::Select(o.faults); !s.ok()) return ReportError(s);
  ThreadPool pool(o.threads, numerics::RequireFpEnvironment);
  const Result<trainer::AuditInput> input = o.model.empty()
                                                ? trainer::MiniAuditInput()
                                                : trainer::CheckpointAuditInput(o.model, o.layers);
  if (!input.ok()) return ReportError(input.status());
  const Result<std::vector<trainer::AuditReport>> reports = trainer::Audit(&pool, *input);
  if (!reports.ok()) return ReportError(reports.status());
  bool pass = !reports->empty();
  Json json = Json::array();
  for (const trainer::AuditReport& r : *reports) {
    pass = pass && r.pass();
    json.push_back(r.ToJson());
    if (o.json) continue;
    const auto worst = [](const std::vector<trainer::AuditRow>& rows) {
      const trainer::AuditRow* most = nullptr;
      for (const trainer::AuditRow& row : rows) {
        if (most == nullptr || row.error > most->error) most = &row;
      }
      return most == nullptr ? std::string("-")
                             : fmt::format("{:.3g} ({})", most->error, most->name);
    };
    fmt::print("{}: loss {:.6f}, float64 {:.6f}; {} parameters\n", r.loss, r.value, r.value64,
               r.gradient.size());
    fmt::print("  gradient, f32    largest error {}; allowed {}\n", worst(r.gradient),
               trainer::kGradientTolerance);
    if (!r.bf16.empty())
      fmt::print("  gradient, bf16   largest error {}; allowed {}\n", worst(r.bf16),
                 trainer::kBf16Tolerance);
    if (!r.step.empty())
      fmt::print("  two updates      largest error {} of its tolerance\n", worst(r.step));
    fmt::print("  micro-batch cuts {}\n", r.cuts_equal ? "equal bits" : "differ: " + r.cut_differs);
    if (!r.pass()) fmt::print("  finding: {}\n", r.first_finding());
  }
  const Verdict verdict = pass ? Verdict::kPass : Verdict::kFail;
  if (o.json) {
    fmt::print("{}\n", Json{{"schema", "tare.train-audit/1"},
                            {"verdict", VerdictName(verdict)},
                            {"faults", fault::Selected()},
                            {"reports", json}}
                           .dump(1));
  } else {
    fmt::print("verdict: {}\n", VerdictName(verdict));
  }
  std::fflush(stdout);
  if (!pass) PrintReason(verdict, reason::kGradientOff);
  return ExitCode(verdict);
}

}  // namespace

TARE_COMMAND(train_audit, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand(
      "train-audit", "gradients and two optimizer steps of the trainer against float64");
  auto o = std::make_shared<Options>();
  app->add_option("model", o->model, "a Hugging Face directory; none: MINI");
  app->add_option("--layers", o->layers, "the first layers of MODEL; 0: all")
      ->capture_default_str();
  app->add_option("--threads", o->threads, "0: the CPUs of the affinity mask")
      ->capture_default_str();
  app->add_option("--fault", o->faults, "planted faults, name@trainer,...");
  app->add_flag("--json", o->json, "for machines");
  app->callback([o] { SetExit(Run(*o)); });
});

}  // namespace tare
