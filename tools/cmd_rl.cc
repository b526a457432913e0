// `tare rl MODEL`: the loop of rollout, compare, update and publish in two processes, and its
// receipt. `tare rl verify RECEIPT`: the verdict again, from the receipt and the files beside it.
// `tare rl-worker`: the trainer's process, started by the loop.

#include <unistd.h>

#include <cstdio>
#include <memory>
#include <vector>

#include "base/env.h"
#include "base/fault.h"
#include "base/reasons.h"
#include "rl/curves.h"
#include "rl/judge.h"
#include "rl/launch.h"
#include "rl/loop.h"
#include "tools/command.h"

namespace tare {
namespace {

struct Options {
  rl::LoopConfig config;
  rl::LoopConfig given;  // values of the options that --loss sets as well
  CLI::Option* loss = nullptr;
  std::vector<CLI::Option*> of_loss;
  rl::LaunchOptions launch;
  std::string receipt;
  int seeds = 3;
  bool json = false;
};

void Print(const rl::Judgement& j) {
  for (const auto& c : j.comparisons) {
    fmt::print("theta{}  {:<8} = {:<6} {:>6} tokens  {:>6} differ{}{}\n", c.version, c.a, c.b,
               c.compared, c.mismatches, c.first.empty() ? "" : "  first: ", c.first);
  }
  for (const auto& f : j.findings)
    fmt::print("{}: {}: {}\n", VerdictName(f.verdict), f.reason, f.text);
  fmt::print("verdict: {}\n", VerdictName(j.verdict));
}

// On a terminal one line that is written over; else a line for each phase.
void ShowProgress(const rl::Progress& p) {
  const bool terminal = ::isatty(2) == 1;
  std::string left = p.left < 0 ? "" : fmt::format(", about {:.0f} s left", p.left);
  fmt::print(stderr, "{}[{}/{}] {} ({:.0f} s{}){}", terminal ? "\r\x1b[K" : "", p.done, p.all,
             p.what, p.seconds, left, terminal && p.what != "stop" ? "" : "\n");
  std::fflush(stderr);
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

// The algorithm's values, and over them what the command line names.
Status Resolve(Options* o) {
  rl::LoopConfig& c = o->config;
  TARE_RETURN_IF_ERROR(rl::ApplyLoss(c.loss, &c));
  if (o->of_loss[0]->count() > 0) c.loss_agg_mode = o->given.loss_agg_mode;
  if (o->of_loss[1]->count() > 0) c.clip_ratio_low = o->given.clip_ratio_low;
  if (o->of_loss[2]->count() > 0) c.clip_ratio_high = o->given.clip_ratio_high;
  if (o->of_loss[3]->count() > 0) c.clip_ratio_c = o->given.clip_ratio_c;
  if (o->of_loss[4]->count() > 0) c.norm_adv_by_std = o->given.norm_adv_by_std;
  if (o->of_loss[5]->count() > 0) c.filter_groups = o->given.filter_groups;
  o->launch.progress = ShowProgress;
  return rl::CheckConfig(c);
}

// curves.json and curves.svg beside the receipts.
Status WriteCurves(const std::string& dir, const std::vector<rl::Curves>& runs,
                   const std::string& title, const Json& more) {
  Json json = more;
  json["schema"] = "tare.rl-curves/1";
  json["runs"] = Json::array();
  for (const rl::Curves& c : runs) json["runs"].push_back(rl::ToJson(c));
  TARE_RETURN_IF_ERROR(Env::Real()->WriteFileAtomic(dir + "/curves.json", json.dump(1) + "\n"));
  return Env::Real()->WriteFileAtomic(dir + "/curves.svg", rl::CurvesSvg(runs, title));
}

int Run(Options o) {
  if (const Status s = Resolve(&o); !s.ok()) return ReportError(s);
  if (const Status s = rl::CheckTwoStepsFirst(o.config, o.launch); !s.ok()) {
    if (s.code() != Code::kPrecondition) return ReportError(s);
    fmt::print(stderr, "{}\n", s.message());
    PrintReason(Verdict::kRefused, reason::kLoopIncomplete);
    return ExitCode(Verdict::kRefused);
  }
  const Result<rl::LaunchResult> r = rl::RunLoop(o.config, o.launch);
  if (!r.ok()) return ReportError(r.status());
  const Result<rl::Curves> curves = rl::CurvesOf(fmt::format("seed {}", o.config.seed), r->receipt);
  if (curves.ok()) {
    if (const Status s = WriteCurves(o.launch.out, {*curves}, o.config.model + ", " + o.config.loss,
                                     Json::object());
        !s.ok())
      return ReportError(s);
  }
  return Finish(r->judgement, o.json);
}

// First the two-step receipt that a longer run wants, then one run a seed; the gain of each is its
// last held-out mean minus its first.
int Study(Options o) {
  if (o.config.held_out == 0) o.config.held_out = 32;
  o.config.keep_weights = false;
  if (const Status s = Resolve(&o); !s.ok()) return ReportError(s);
  const std::string root = o.launch.out;
  rl::LoopConfig first = o.config;
  first.steps = 2;
  first.warmup_steps = 0;
  first.held_out = 0;
  rl::LaunchOptions launch = o.launch;
  launch.out = root + "/two-steps";
  fmt::print(stderr, "two steps first\n");
  const Result<rl::LaunchResult> two = rl::RunLoop(first, launch);
  if (!two.ok()) return ReportError(two.status());
  if (two->judgement.verdict != Verdict::kPass) return Finish(two->judgement, o.json);
  std::vector<rl::Curves> curves;
  std::vector<double> gains;
  for (int i = 0; i < o.seeds; ++i) {
    rl::LoopConfig config = o.config;
    config.seed = o.config.seed + static_cast<uint64_t>(i);
    launch.out = fmt::format("{}/seed-{}", root, config.seed);
    launch.after = root + "/two-steps/receipt.json";
    fmt::print(stderr, "seed {} ({} of {})\n", config.seed, i + 1, o.seeds);
    const Result<rl::LaunchResult> r = rl::RunLoop(config, launch);
    if (!r.ok()) return ReportError(r.status());
    if (r->judgement.verdict != Verdict::kPass) return Finish(r->judgement, o.json);
    Result<rl::Curves> c = rl::CurvesOf(fmt::format("seed {}", config.seed), r->receipt);
    if (!c.ok()) return ReportError(c.status());
    gains.push_back(c->held_out.back().second - c->held_out.front().second);
    fmt::print("seed {}: held-out reward {:.4f} -> {:.4f}\n", config.seed,
               c->held_out.front().second, c->held_out.back().second);
    std::fflush(stdout);
    curves.push_back(*std::move(c));
    // What there is so far: a study takes long.
    const Json more{{"config", o.config.ToJson()}, {"gains", gains}};
    if (const Status s =
            WriteCurves(root, curves, fmt::format("{} on {}", o.config.loss, o.config.task), more);
        !s.ok())
      return ReportError(s);
  }
  const double bound = rl::LowerBound95(gains);
  const Json more{{"config", o.config.ToJson()}, {"gains", gains}, {"gain_lower_bound_95", bound}};
  if (const Status s =
          WriteCurves(root, curves, fmt::format("{} on {}", o.config.loss, o.config.task), more);
      !s.ok())
    return ReportError(s);
  fmt::print("gain over {} seeds: lower 95 % bound {:.4f}\n", gains.size(), bound);
  const bool pass = bound > 0;
  if (!pass) fmt::print(stderr, "the bound is not above zero: no gain is shown\n");
  return ExitCode(pass ? Verdict::kPass : Verdict::kFail);
}

}  // namespace

TARE_COMMAND(rl, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand(
      "rl", "train with policy gradients against a serving engine, and prove that both agree");
  auto o = std::make_shared<Options>();
  CLI::App* verify =
      app->add_subcommand("verify", "judge a receipt again, from the files beside it");
  verify->add_option("receipt", o->receipt, "receipt.json")->required();
  verify->add_flag("--json", o->json, "for machines");
  verify->callback([o] { SetExit(Verify(o->receipt, o->json)); });

  const auto add_options = [](CLI::App* run, const std::shared_ptr<Options>& o) {
    rl::LoopConfig& c = o->config;
    run->add_option("model", c.model, "a Hugging Face directory")->required();
    run->add_option("--out", o->launch.out, "new directory for receipt, dumps and weights")
        ->required();
    run->add_option("--task", c.task, "pattern or arithmetic")->capture_default_str();
    run->add_option("--prompt-tokens", c.prompt_tokens, "of a question of `pattern`")
        ->capture_default_str();
    run->add_option("--steps", c.steps, "updates; more than two want --after")
        ->capture_default_str();
    run->add_option("--after", o->launch.after,
                    "receipt of two steps of the same recipe that passes");
    run->add_option("--prompts", c.prompts, "questions a step")->capture_default_str();
    run->add_option("--group", c.group, "samples a question")->capture_default_str();
    run->add_option("--max-tokens", c.max_tokens, "tokens a sample")->capture_default_str();
    run->add_option("--temperature", c.temperature, "of sampling and of the logprobs")
        ->capture_default_str();
    run->add_option("--top-p", c.top_p, "of sampling; logprobs stay over the whole vocabulary")
        ->capture_default_str();
    run->add_option("--lr", c.lr, "learning rate")->capture_default_str();
    run->add_option("--lr-schedule", c.lr_schedule, "constant, linear or cosine")
        ->capture_default_str();
    run->add_option("--warmup-steps", c.warmup_steps,
                    "the rate rises to its full value at this one")
        ->capture_default_str();
    run->add_option("--min-lr-ratio", c.min_lr_ratio, "the last rate against --lr")
        ->capture_default_str();
    // The named algorithm sets the options below it; one that is given wins.
    o->loss = run->add_option("--loss", c.loss, "grpo, dapo or ppo-clip")->capture_default_str();
    const auto of_loss = [&](CLI::Option* option) { o->of_loss.push_back(option); };
    of_loss(run->add_option("--loss-agg-mode", o->given.loss_agg_mode,
                            "token-mean or seq-mean-token-mean"));
    of_loss(run->add_option("--clip-ratio-low", o->given.clip_ratio_low, "lower clip"));
    of_loss(run->add_option("--clip-ratio-high", o->given.clip_ratio_high, "upper clip"));
    of_loss(run->add_option("--clip-ratio-c", o->given.clip_ratio_c, "dual clip, 0: off"));
    of_loss(run->add_flag("--norm-adv-by-std,!--no-norm-adv-by-std", o->given.norm_adv_by_std,
                          "divide an advantage by its group's spread"));
    of_loss(run->add_flag("--filter-groups,!--no-filter-groups", o->given.filter_groups,
                          "ask again for groups whose rewards are all equal"));
    run->add_option("--max-num-gen-batches", c.max_num_gen_batches, "of --filter-groups")
        ->capture_default_str();
    run->add_option("--seed", c.seed, "of questions and samples")->capture_default_str();
    run->add_option("--profile", c.profile, "ieee-f32 or sm90-mma")->capture_default_str();
    run->add_option("--arm", c.arm, "of the trainer: production, surrogate or native")
        ->capture_default_str();
    run->add_option("--threads", c.threads, "of each process; 0: the CPUs of the affinity mask")
        ->capture_default_str();
    run->add_flag("--recompute", c.recompute,
                  "less memory, equal bits: layers computed again, no packed weights");
    run->add_option("--micro-batch-tokens", c.micro_batch_tokens, "moves no bit")
        ->capture_default_str();
    run->add_flag("--same-questions,!--new-questions", c.same_questions,
                  "every step asks the same ones, so that a stale prefix cache is met")
        ->capture_default_str();
    run->add_flag("--prefix-caching,!--no-prefix-caching", c.prefix_caching, "of the engine")
        ->capture_default_str();
    run->add_option("--held-out", c.held_out, "held-out questions asked before and after")
        ->capture_default_str();
    run->add_option("--held-out-samples", c.held_out_samples, "answers to each")
        ->capture_default_str();
    run->add_option("--eval-every", c.eval_every, "updates between two such times; 0: ends alone")
        ->capture_default_str();
    run->add_flag("--keep-weights,!--no-keep-weights", c.keep_weights,
                  "keep every published version")
        ->capture_default_str();
    run->add_option("--fault", c.faults, "planted faults, name@side,...");
    run->add_flag("--probe", c.probe, "dump one request on both sides, for `tare locate`");
    run->add_option("--limit-seconds", o->launch.limit_seconds,
                    "the trainer's process is killed then")
        ->capture_default_str();
    run->add_flag("--json", o->json, "for machines");
  };

  CLI::App* run = app->add_subcommand("run", "run the loop");
  add_options(run, o);
  run->callback([o] { SetExit(Run(*o)); });

  CLI::App* defaults =
      app->add_subcommand("defaults", "the recipe that `tare rl run` has when nothing is given");
  defaults->callback([] {
    fmt::print("{}\n", rl::LoopConfig().ToJson().dump(1));
    SetExit(0);
  });

  auto s = std::make_shared<Options>();
  CLI::App* study = app->add_subcommand(
      "study", "run the loop once for each of several seeds: curves and held-out gain");
  add_options(study, s);
  study->add_option("--seeds", s->seeds, "how many, from --seed on")
      ->capture_default_str()
      ->check(CLI::Range(2, 31));
  study->callback([s] { SetExit(Study(*s)); });
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
