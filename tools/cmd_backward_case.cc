// `tare backward-case DIR`: runs a kept backward alone (trainer/backward_case.h): the same
// checkpoint, batch, random numbers and optimizer state, with the planted faults that were on.
// With --shrink the smallest batch that still fails is written as a case of its own.

#include <cstdio>
#include <memory>

#include "base/env.h"
#include "base/fault.h"
#include "base/reasons.h"
#include "numerics/fp_environment.h"
#include "tensor/checkpoint.h"
#include "tools/command.h"
#include "trainer/backward_case.h"

namespace tare {
namespace {

struct Options {
  std::string dir, shrink, parameter;
  int threads = 0, max_tries = 200;
  bool clean = false, json = false;
};

Result<Verdict> Run(const Options& o) {
  Env* env = Env::Real();
  TARE_ASSIGN_OR_RETURN(const trainer::BackwardCase kept, trainer::ReadBackwardCase(env, o.dir));
  TARE_RETURN_IF_ERROR(fault::Select(o.clean ? "" : kept.faults));
  ThreadPool pool(o.threads, numerics::RequireFpEnvironment);
  TARE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(o.dir + "/weights"));
  models::ModelOptions model_options;
  model_options.side = fault::Side::kTrainer;
  TARE_ASSIGN_OR_RETURN(models::Model model, models::Model::Load(&pool, checkpoint, model_options));
  TARE_ASSIGN_OR_RETURN(const auto trainer, trainer::Trainer::Create(&pool, std::move(model), {}));
  TARE_RETURN_IF_ERROR(trainer::OpenBackwardCase(env, o.dir, trainer.get()).status());
  TARE_ASSIGN_OR_RETURN(const trainer::BackwardFinding found,
                        trainer::TryBackward(&pool, trainer.get(), kept.batch));
  const bool same = found.gradient_sha256 == kept.found.gradient_sha256;
  Json out = {{"schema", "tare.backward-case-run/1"},
              {"found", found.ToJson()},
              {"kept", kept.found.ToJson()},
              {"repeats", same}};
  if (!o.json) {
    fmt::print("{} tokens: forward paths {}; gradient of {} off by {:.3g}, allowed {}; {}\n",
               found.tokens, found.forward_equal ? "agree" : "differ", found.parameter, found.error,
               found.tolerance, same ? "the kept gradient in every bit" : "not the kept gradient");
  }
  if (!o.shrink.empty()) {
    TARE_ASSIGN_OR_RETURN(
        const trainer::Shrunk small,
        trainer::ShrinkBackwardCase(&pool, trainer.get(), kept.batch, o.parameter, o.max_tries));
    TARE_RETURN_IF_ERROR(trainer::SaveBackwardCase(env, trainer.get(), o.dir + "/weights",
                                                   small.batch, kept.progress, small.finding,
                                                   o.shrink));
    out["shrunk"] = small.finding.ToJson();
    out["shrunk_parameter"] = small.parameter;
    out["tries"] = small.tries;
    if (!o.json) {
      fmt::print("smallest: {} sequences, {} tokens after {} tries, {} still outside: {}\n",
                 small.batch.size(), small.finding.tokens, small.tries, small.parameter, o.shrink);
    }
  }
  if (o.json) fmt::print("{}\n", out.dump(1));
  return found.within ? Verdict::kPass : Verdict::kFail;
}

}  // namespace

TARE_COMMAND(backward_case, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand(
      "backward-case", "run a backward that failed again, alone (tare train --check-backward)");
  auto o = std::make_shared<Options>();
  app->add_option("dir", o->dir, "the case")->required();
  CLI::Option* shrink =
      app->add_option("--shrink", o->shrink, "write the smallest failing batch as a case here");
  app->add_option("--parameter", o->parameter,
                  "of --shrink: the gradient that must stay wrong (default: the one furthest off)")
      ->needs(shrink);
  app->add_option("--max-tries", o->max_tries, "backwards, at most, while shrinking")
      ->check(CLI::Range(1, 100'000))
      ->capture_default_str();
  app->add_flag("--without-faults", o->clean, "leave out the planted faults of the case");
  app->add_option("--threads", o->threads, "0: the CPUs of the affinity mask")
      ->capture_default_str();
  app->add_flag("--json", o->json, "for machines");
  app->callback([o] {
    const Result<Verdict> v = Run(*o);
    if (!v.ok()) return SetExit(ReportError(v.status()));
    std::fflush(stdout);
    if (*v == Verdict::kFail) PrintReason(*v, reason::kGradientOff);
    SetExit(ExitCode(*v));
  });
});

}  // namespace tare
