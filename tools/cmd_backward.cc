// `tare backward MODEL`: the backward's inventory and its gradients against float64 references, as
// facts for gates C6 and C7 (tools/backward_facts.h). It judges nothing: `tare run C6` and C7 do.

#include <cstdio>
#include <memory>

#include "base/fault.h"
#include "numerics/fp_environment.h"
#include "tools/backward_facts.h"
#include "tools/command.h"

namespace tare {
namespace {

struct Options {
  std::string model, faults;
  int64_t layers = 0;
  int threads = 0;
  bool inventory = false, times = false, gradients = false, tolerances = false, json = false;
};

Status Run(const Options& o) {
  Json out = {{"schema", "tare.backward/1"}, {"faults", o.faults}};
  TARE_RETURN_IF_ERROR(fault::Select(o.faults));
  ThreadPool pool(o.threads, numerics::RequireFpEnvironment);
  TARE_ASSIGN_OR_RETURN(const BackwardSubject subject, LoadBackwardSubject(o.model, o.layers));
  if (o.tolerances) {
    TARE_ASSIGN_OR_RETURN(out["tolerances"], BackwardTolerances(&pool, subject));
  } else {
    if (o.inventory || !o.gradients) {
      TARE_ASSIGN_OR_RETURN(out["inventory"], BackwardInventory(&pool, subject, o.times));
    }
    if (o.gradients || !o.inventory) {
      TARE_ASSIGN_OR_RETURN(out["gradients"], GradientLayers(&pool, subject));
    }
  }
  fmt::print("{}\n", out.dump(1));
  return Ok();
}

}  // namespace

TARE_COMMAND(backward, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand(
      "backward", "the backward's inventory and its gradients against float64, as JSON");
  auto o = std::make_shared<Options>();
  app->add_option("model", o->model, "a Hugging Face directory")->required();
  app->add_option("--layers", o->layers, "the first layers alone; 0: all")->capture_default_str();
  app->add_flag("--inventory", o->inventory, "what C6 asks: backwards, reads, poisons, scan");
  app->add_flag("--times", o->times, "with --inventory: forward and step of both arms in turn");
  app->add_flag("--gradients", o->gradients, "what C7 asks: three layers and one step");
  app->add_flag("--tolerances", o->tolerances,
                "what the gradients will be held to, from the reference alone");
  app->add_option("--threads", o->threads, "0: the CPUs of the affinity mask");
  app->add_option("--fault", o->faults, "planted faults, name@trainer,...");
  app->add_flag("--json", o->json, "JSON, which is the only form");
  app->callback([o] {
    const Status s = Run(*o);
    SetExit(s.ok() ? 0 : ReportError(s));
  });
});

}  // namespace tare
