// `tare rl MODEL`: the loop of rollout, compare, update and publish in two processes, and its
// receipt. `tare rl verify RECEIPT`: the verdict again, from the receipt and the files beside it.
// `tare rl-worker`: the trainer's process, started by the loop.

#include <cstdio>
#include <memory>

#include "base/env.h"
#include "base/fault.h"
#include "rl/judge.h"
#include "rl/launch.h"
#include "rl/loop.h"
#include "tools/command.h"

namespace tare {
namespace {

void Print(const rl::Judgement& j) {
  for (const auto& c : j.comparisons) {
    fmt::print("theta{}  {:<8} = {:<6} {:>6} tokens  {:>6} differ{}{}\n", c.version, c.a, c.b,
               c.compared, c.mismatches, c.first.empty() ? "" : "  first: ", c.first);
  }
  for (const auto& f : j.findings)
    fmt::print("{}: {}: {}\n", VerdictName(f.verdict), f.reason, f.text);
  fmt::print("verdict: {}\n", VerdictName(j.verdict));
}

int Finish(const rl::Judgement& j, bool json) {
  if (json) {
    fmt::print("{}\n", j.ToJson().dump(1));
  } else {
    Print(j);
  }
  std::fflush(stdout);
  if (!j.reason.empty()) PrintReason(j.verdict, j.reason);
  return ExitCode(j.verdict);
}

int Verify(const std::string& path, bool json) {
  const Result<std::string> text = Env::Real()->ReadFile(path);
  if (!text.ok()) return ReportError(text.status());
  const Result<Json> receipt = ParseJson(*text);
  if (!receipt.ok()) return ReportError(DataLoss("{}: {}", path, receipt.status().message()));
  const size_t slash = path.rfind('/');
  return Finish(
      rl::Judge(Env::Real(), *receipt, slash == std::string::npos ? "." : path.substr(0, slash)),
      json);
}

int Worker(const std::string& config_path, const std::string& out, int port, bool probe) {
  const Result<std::string> text = Env::Real()->ReadFile(config_path);
  if (!text.ok()) return ReportError(text.status());
  const Result<Json> json = ParseJson(*text);
  if (!json.ok()) return ReportError(json.status());
  Result<rl::LoopConfig> config = rl::LoopConfig::FromJson(*json);
  if (!config.ok()) return ReportError(config.status());
  config->probe = probe;
  if (const Status s = fault::Select(config->faults); !s.ok()) return ReportError(s);
  const Status done = rl::RunWorker(*config, static_cast<uint16_t>(port), out);
  return done.ok() ? 0 : ReportError(done);
}

}  // namespace

TARE_COMMAND(rl, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand(
      "rl", "train with policy gradients against a serving engine, and prove that both agree");
  struct Options {
    rl::LoopConfig config;
    rl::LaunchOptions launch;
    std::string receipt;
    bool json = false;
  };
  auto o = std::make_shared<Options>();
  CLI::App* verify =
      app->add_subcommand("verify", "judge a receipt again, from the files beside it");
  verify->add_option("receipt", o->receipt, "receipt.json")->required();
  verify->add_flag("--json", o->json, "for machines");
  verify->callback([o] { SetExit(Verify(o->receipt, o->json)); });

  CLI::App* run = app->add_subcommand("run", "run the loop");
  rl::LoopConfig& c = o->config;
  run->add_option("model", c.model, "a Hugging Face directory")->required();
  run->add_option("--out", o->launch.out, "new directory for receipt, dumps and weights")
      ->required();
  run->add_option("--task", c.task, "pattern or arithmetic")->capture_default_str();
  run->add_option("--steps", c.steps, "updates")->capture_default_str();
  run->add_option("--prompts", c.prompts, "questions a step")->capture_default_str();
  run->add_option("--group", c.group, "samples a question")->capture_default_str();
  run->add_option("--max-tokens", c.max_tokens, "tokens a sample")->capture_default_str();
  run->add_option("--temperature", c.temperature, "of sampling and of the logprobs")
      ->capture_default_str();
  run->add_option("--lr", c.lr, "learning rate")->capture_default_str();
  run->add_option("--loss", c.loss, "grpo, dapo or ppo-clip")->capture_default_str();
  run->add_option("--clip-ratio-low", c.clip_low, "lower clip")->capture_default_str();
  run->add_option("--clip-ratio-high", c.clip_high, "upper clip")->capture_default_str();
  run->add_option("--seed", c.seed, "of questions and samples")->capture_default_str();
  run->add_option("--profile", c.profile, "ieee-f32 or sm90-mma")->capture_default_str();
  run->add_option("--threads", c.threads, "of each process; 0: the CPUs of the affinity mask")
      ->capture_default_str();
  run->add_flag("--recompute", c.recompute,
                "backward computes each layer again: less memory, equal bits");
  run->add_flag("--same-questions,!--new-questions", c.same_questions,
                "every step asks the same ones, so that a stale prefix cache is met")
      ->capture_default_str();
  run->add_flag("--prefix-caching,!--no-prefix-caching", c.prefix_caching, "of the engine")
      ->capture_default_str();
  run->add_option("--fault", c.faults, "planted faults, name@side,...");
  run->add_flag("--probe", c.probe, "dump one request on both sides, for `tare locate`");
  run->add_option("--limit-seconds", o->launch.limit_seconds,
                  "the trainer's process is killed then")
      ->capture_default_str();
  run->add_flag("--json", o->json, "for machines");
  run->callback([o] {
    const Result<rl::LaunchResult> r = rl::RunLoop(o->config, o->launch);
    if (!r.ok()) return SetExit(ReportError(r.status()));
    SetExit(Finish(r->judgement, o->json));
  });
  app->require_subcommand(1);
});

TARE_COMMAND(rl_worker, [](CLI::App& root) {
  CLI::App* app =
      root.add_subcommand("rl-worker", "the trainer's process of `tare rl` (started by it)");
  struct Options {
    std::string config, out;
    int port = 0;
    bool probe = false;
  };
  auto o = std::make_shared<Options>();
  app->add_option("--config", o->config)->required();
  app->add_option("--out", o->out)->required();
  app->add_option("--port", o->port)->required()->check(CLI::Range(1, 65535));
  app->add_flag("--probe", o->probe);
  app->group("");
  app->callback([o] { SetExit(Worker(o->config, o->out, o->port, o->probe)); });
});

}  // namespace tare
