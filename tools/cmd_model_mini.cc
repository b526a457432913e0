// `tare model mini DIR`: writes the generated checkpoint MINI and prints its weight hash.

#include <cstdio>
#include <memory>
#include <string>

#include "base/env.h"
#include "base/json.h"
#include "models/mini.h"
#include "tensor/checkpoint.h"
#include "tensor/weight_hash.h"
#include "tools/command.h"

namespace tare {
namespace {

struct Options {
  std::string dir;
  bool json = false;
};

int Run(const Options& options) {
  if (Status s = models::WriteMini(Env::Real(), options.dir); !s.ok()) return ReportError(s);
  // The hash is of what a reader of the files sees, not of what was meant to be written.
  auto checkpoint = Checkpoint::Open(options.dir);
  if (!checkpoint.ok()) return ReportError(checkpoint.status());
  ThreadPool pool;
  auto hash = HashWeights(*checkpoint, &pool);
  if (!hash.ok()) return ReportError(hash.status());
  if (options.json) {
    const Json out{{"path", options.dir},
                   {"version", models::kMiniVersion},
                   {"weight_hash", Hex(hash->digest)},
                   {"tensors", hash->tensors.size()},
                   {"bytes", hash->total_bytes}};
    std::printf("%s\n", out.dump().c_str());
  } else {
    std::printf("%s  %s  %zu tensors, %lld bytes\n%s\n", models::kMiniVersion, options.dir.c_str(),
                hash->tensors.size(), static_cast<long long>(hash->total_bytes),
                Hex(hash->digest).c_str());
  }
  return 0;
}

}  // namespace

// Registered after `model`, whose subcommand it joins.
TARE_COMMAND(model_mini, [](CLI::App& root) {
  CLI::App* model = nullptr;
  try {
    model = root.get_subcommand("model");
  } catch (const CLI::OptionNotFound&) {
    model = root.add_subcommand("model", "checkpoints");
  }
  CLI::App* app =
      model->add_subcommand("mini", "write the generated checkpoint MINI into a directory");
  auto options = std::make_shared<Options>();
  app->add_option("dir", options->dir, "directory, made if need be")->required();
  app->add_flag("--json", options->json, "machine form");
  app->callback([options] { SetExit(Run(*options)); });
});

}  // namespace tare
