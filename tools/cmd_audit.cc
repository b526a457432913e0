// `tare audit MODEL`: the model runs on the GPU and again on the CPU, and every output bit of every
// operator, forward and backward, is compared.

#include <fmt/format.h>

#include <memory>
#include <string>

#include "base/fault.h"
#include "base/json.h"
#include "models/audit.h"
#include "numerics/philox.h"
#include "tensor/checkpoint.h"
#include "tools/command.h"

namespace tare {
namespace {

struct Options {
  std::string model, profile = "sm90-mma", faults;
  int64_t tokens = 256, sequences = 1, vocab = 4096;
  uint64_t seed = 1;
  int threads = 0;
  bool forward_only = false, json = false;
};

constexpr const char* kQwen3Layer = "qwen3-8b-layer";

Json ToJson(const models::AuditCount& c) {
  return {{"tensors", c.tensors}, {"elements", c.elements}, {"differing", c.differing}};
}

Result<models::AuditReport> RunAudit(const Options& o, Profile profile) {
  ThreadPool pool(o.threads);
  std::function<Result<models::Model>(const models::ModelOptions&)> make;
  int64_t vocab = 0;
  if (o.model == kQwen3Layer) {
    const models::ModelConfig config = models::Qwen3LayerConfig(o.vocab);
    vocab = config.vocab;
    TARE_ASSIGN_OR_RETURN(auto tensors, models::RandomTensors(config, o.seed));
    auto shared = std::make_shared<decltype(tensors)>(std::move(tensors));
    make = [config, shared, &pool](const models::ModelOptions& options) {
      return models::Model::FromTensors(&pool, config, *shared, options);
    };
  } else {
    TARE_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(o.model));
    TARE_ASSIGN_OR_RETURN(const models::ModelConfig config,
                          models::ParseConfig(checkpoint.config().raw));
    vocab = config.vocab;
    auto shared = std::make_shared<Checkpoint>(std::move(checkpoint));
    make = [shared, &pool](const models::ModelOptions& options) {
      return models::Model::Load(&pool, *shared, options);
    };
  }
  std::vector<std::vector<int32_t>> sequences;
  for (int64_t s = 0; s < o.sequences; ++s) {
    sequences.emplace_back();
    for (int64_t i = 0; i < o.tokens; ++i) {
      const auto word =
          numerics::RandomAt(o.seed, static_cast<uint32_t>(i), numerics::RandomPurpose::kTest,
                             static_cast<uint32_t>(s));
      sequences.back().push_back(static_cast<int32_t>(word.Low64() % static_cast<uint64_t>(vocab)));
    }
  }
  models::AuditOptions options;
  options.profile = profile;
  options.backward = !o.forward_only;
  return models::Audit(&pool, make, sequences, options);
}

int Run(const Options& o) {
  if (const Status s = fault::Select(o.faults); !s.ok()) return ReportError(s);
  const std::optional<Profile> profile = ParseProfile(o.profile);
  if (!profile)
    return ReportError(InvalidArgument("--profile {}: ieee-f32 or sm90-mma", o.profile));
  if (o.tokens < 2 || o.sequences < 1)
    return ReportError(
        InvalidArgument("--tokens {} --sequences {}: at least 2 and 1", o.tokens, o.sequences));
  const Result<models::AuditReport> report = RunAudit(o, *profile);
  if (!report.ok()) return ReportError(report.status());
  const Verdict verdict = report->agrees() ? Verdict::kPass : Verdict::kFail;
  if (o.json) {
    Json out = {{"model", o.model},
                {"profile", o.profile},
                {"tokens", o.tokens},
                {"sequences", o.sequences},
                {"seed", o.seed},
                {"verdict", std::string(VerdictName(verdict))},
                {"forward", ToJson(report->forward)},
                {"backward", ToJson(report->backward)},
                {"gradients", ToJson(report->gradients)},
                {"cpu_seconds", report->cpu_seconds},
                {"device_seconds", report->device_seconds}};
    for (const auto& [op, count] : report->by_op) out["by_op"][op] = ToJson(count);
    for (const models::AuditDifference& d : report->differences) {
      out["differences"].push_back({{"name", d.name},
                                    {"op", d.op},
                                    {"shape", d.shape},
                                    {"element", d.element},
                                    {"cpu", fmt::format("{:#x}", d.cpu_bits)},
                                    {"device", fmt::format("{:#x}", d.device_bits)},
                                    {"differing", d.differing}});
    }
    fmt::print("{}\n", out.dump(1));
  } else {
    const auto line = [](const char* what, const models::AuditCount& c) {
      fmt::print("{:10} {:5} tensors {:12} elements {:10} differ\n", what, c.tensors, c.elements,
                 c.differing);
    };
    line("forward", report->forward);
    if (!o.forward_only) {
      line("backward", report->backward);
      line("gradients", report->gradients);
    }
    for (const auto& [op, count] : report->by_op) line(op.c_str(), count);
    fmt::print("{}, {}, {} x {} tokens: CPU {:.1f} s, device {:.1f} s: {}\n", o.model, o.profile,
               o.sequences, o.tokens, report->cpu_seconds, report->device_seconds,
               VerdictName(verdict));
  }
  if (!report->agrees()) {
    const models::AuditDifference& d = report->differences.front();
    PrintReason(verdict,
                fmt::format("{} tensors differ, first {} out of {}: {} of its elements {}, at {} "
                            "CPU {:#x}, device {:#x}",
                            report->differences.size(), d.name, d.op, d.differing,
                            ShapeToString(d.shape), d.element, d.cpu_bits, d.device_bits));
  }
  return ExitCode(verdict);
}

}  // namespace

TARE_COMMAND(audit, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand(
      "audit", "run a model on the GPU and on the CPU and compare every output bit");
  auto o = std::make_shared<Options>();
  app->add_option("model", o->model,
                  "checkpoint (a Hugging Face directory or a GGUF file), or qwen3-8b-layer: one "
                  "layer of that shape with random weights")
      ->required();
  app->add_option("--profile", o->profile, "contraction profile: sm90-mma or ieee-f32")
      ->capture_default_str();
  app->add_option("--tokens", o->tokens, "tokens of a sequence")->capture_default_str();
  app->add_option("--sequences", o->sequences, "sequences in the batch")->capture_default_str();
  app->add_option("--vocab", o->vocab, "vocabulary of qwen3-8b-layer")->capture_default_str();
  app->add_option("--seed", o->seed, "of tokens and random weights")->capture_default_str();
  app->add_option("--threads", o->threads, "CPU threads (0: the CPUs of this process)")
      ->capture_default_str();
  app->add_flag("--forward-only", o->forward_only, "leave the backward out");
  app->add_option("--fault", o->faults, "planted faults, NAME@rollout (device) or NAME@trainer");
  app->add_flag("--json", o->json, "the report as JSON on stdout");
  app->callback([o] { SetExit(Run(*o)); });
});

}  // namespace tare
