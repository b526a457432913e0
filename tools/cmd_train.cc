// `tare train MODEL TEXT`: supervised finetuning on a text file, one example a line, every fifth
// line held out. Prints training and held-out loss; with --out it writes the weights for an engine,
// the state to go on from, and train.json (docs/formats/train.md). Three arms with the same data
// order:
//   production  what the loop trains with
//   surrogate   the same forward bit for bit, plain differentiable arithmetic behind it
//   native      the batch-dependent kernels of today: the training baseline, timed
// VLLM_BATCH_INVARIANT does not matter here: --arm decides.
// `tare train-control P S N`: the three-way control from three train.json (trainer/control.h).

#include <bit>
#include <cstdio>
#include <memory>

#include "base/fault.h"
#include "base/reasons.h"
#include "base/sha256.h"
#include "models/load_tokenizer.h"
#include "models/model.h"
#include "numerics/fp_environment.h"
#include "tools/command.h"
#include "trainer/backward_case.h"
#include "trainer/checkpoint.h"
#include "trainer/control.h"
#include "trainer/schedule.h"
#include "trainer/trainer.h"

namespace tare {
namespace {

struct Options {
  std::string model, text, out, resume, faults, check;
  std::string profile = "ieee-f32", arm = "production";
  int64_t steps = 10, batch = 8, max_tokens = 256;
  double lr = 1e-4, min_lr_ratio = 0;
  std::string lr_schedule = "constant";
  int64_t warmup_steps = 0, total_steps = 0;
  int threads = 0;
  bool recompute = false;
};

struct Data {
  std::vector<trainer::Sequence> train, held_out;
  std::string sha256;  // of the tokens and of which are held out
};

Result<Data> ReadData(const Options& o, const Checkpoint& checkpoint) {
  TARE_ASSIGN_OR_RETURN(const std::string text, Env::Real()->ReadFile(o.text));
  TARE_ASSIGN_OR_RETURN(const models::Tokenizer tokenizer,
                        models::LoadTokenizer(Env::Real(), checkpoint));
  Data data;
  Sha256 digest;
  int64_t line = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view words = std::string_view(text).substr(at, end - at);
    at = end + 1;
    ++line;
    if (words.empty()) continue;
    trainer::Sequence s;
    s.name = fmt::format("line {}", line);
    Result<std::vector<int32_t>> tokens = tokenizer.Encode(words);
    if (!tokens.ok()) return tokens.status().Annotate(fmt::format("{} line {}", o.text, line));
    s.tokens = *std::move(tokens);
    if (s.tokens.size() < 2) continue;  // nothing to predict
    if (static_cast<int64_t>(s.tokens.size()) > o.max_tokens)
      s.tokens.resize(static_cast<size_t>(o.max_tokens));
    const int64_t header[] = {line, static_cast<int64_t>(s.tokens.size())};
    digest.Update(header, sizeof header);
    digest.Update(s.tokens.data(), s.tokens.size() * sizeof(int32_t));
    (line % 5 == 0 ? data.held_out : data.train).push_back(std::move(s));
  }
  data.sha256 = Hex(digest.Finish());
  if (data.train.empty() || data.held_out.empty()) {
    return InvalidArgument(
        "{}: {} training and {} held-out lines; one example a line, at least five lines", o.text,
        data.train.size(), data.held_out.size());
  }
  return data;
}

// Mean negative logprob of a token.
Result<double> HeldOutLoss(trainer::Trainer* t, const Data& data) {
  TARE_ASSIGN_OR_RETURN(const trainer::Logprobs p, t->Score(data.held_out, "now"));
  double sum = 0;
  int64_t count = 0;
  for (const auto& s : p.values) {
    for (const float v : s) {
      sum -= v;
      ++count;
    }
  }
  return sum / static_cast<double>(count);
}

// kPass, or kFail when --check-backward kept a case.
Result<Verdict> Train(const Options& o) {
  TARE_RETURN_IF_ERROR(fault::Select(o.faults));
  const std::optional<Profile> profile = ParseProfile(o.profile);
  if (!profile) return InvalidArgument("--profile {}: ieee-f32 or sm90-mma", o.profile);
  if (o.arm != "production" && o.arm != "native" && o.arm != "surrogate")
    return InvalidArgument("--arm {}: production, surrogate or native", o.arm);
  if (o.steps < 0 || o.batch < 1)
    return InvalidArgument("--steps {} --batch {}: 0 or more, 1 or more", o.steps, o.batch);
  ThreadPool pool(o.threads, numerics::RequireFpEnvironment);
  TARE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(o.model));
  TARE_ASSIGN_OR_RETURN(const Data data, ReadData(o, checkpoint));
  models::ModelOptions model_options;
  model_options.side = fault::Side::kTrainer;
  TARE_ASSIGN_OR_RETURN(models::Model model, models::Model::Load(&pool, checkpoint, model_options));
  trainer::Options options;
  options.profile = *profile;
  options.recompute = o.recompute;
  options.surrogate = o.arm == "surrogate";
  options.batch_invariance =
      o.arm == "native" ? ops::BatchInvariance::kOff : ops::BatchInvariance::kOn;
  TARE_ASSIGN_OR_RETURN(const auto trainer,
                        trainer::Trainer::Create(&pool, std::move(model), options));
  trainer::Progress progress;
  if (!o.resume.empty()) {
    TARE_ASSIGN_OR_RETURN(progress, trainer::LoadState(Env::Real(), o.resume, trainer.get()));
  }
  const int64_t total = o.total_steps > 0 ? o.total_steps : trainer->step() + o.steps;
  TARE_ASSIGN_OR_RETURN(
      const trainer::Schedule schedule,
      trainer::MakeSchedule(o.lr_schedule, o.warmup_steps, total, o.min_lr_ratio));
  TARE_ASSIGN_OR_RETURN(const std::string initial, trainer->DeployedHash());
  TARE_ASSIGN_OR_RETURN(const double before, HeldOutLoss(trainer.get(), data));
  fmt::print("arm {}  {} training and {} held-out lines  held-out loss {:.6f}\n", o.arm,
             data.train.size(), data.held_out.size(), before);
  const int64_t start = Env::Real()->MonotonicNs();
  Json steps = Json::array();
  for (int64_t i = 0; i < o.steps; ++i) {
    // The data's order is the file's, again and again: equal for every arm and across a restart.
    std::vector<trainer::Sequence> batch;
    batch.reserve(static_cast<size_t>(o.batch));
    for (int64_t b = 0; b < o.batch; ++b) {
      batch.push_back(
          data.train[static_cast<size_t>(progress.data_position++) % data.train.size()]);
    }
    if (!o.check.empty()) {
      TARE_ASSIGN_OR_RETURN(const trainer::BackwardFinding found,
                            trainer::TryBackward(&pool, trainer.get(), batch));
      if (!found.within) {
        TARE_RETURN_IF_ERROR(trainer::SaveBackwardCase(Env::Real(), trainer.get(), o.model, batch,
                                                       progress, found, o.check));
        fmt::print("step {}: the gradient of {} is off by {:.3g}, allowed {}; kept in {}\n",
                   trainer->step() + 1, found.parameter, found.error, found.tolerance, o.check);
        return Verdict::kFail;
      }
    }
    TARE_ASSIGN_OR_RETURN(const trainer::LossReport loss,
                          trainer->Accumulate(batch, trainer::Loss::kCrossEntropy, {}, "now"));
    const int64_t optimizer_start = Env::Real()->MonotonicNs();
    const float lr = trainer::LearningRate(schedule, o.lr, trainer->step() + 1);
    TARE_ASSIGN_OR_RETURN(const trainer::StepReport step, trainer->Apply(lr));
    if (step.skipped) return Error(Code::kPrecondition, "step {}: {}", step.step, step.skipped_why);
    fmt::print("step {}  loss {:.6f}  gradient norm {:.6f}  lr {:.3g}\n", step.step, loss.loss,
               step.gradient_norm, step.lr);
    Sha256 visible;
    for (const auto& values : loss.logprobs.values)
      visible.Update(values.data(), values.size() * sizeof(float));
    steps.push_back(Json{{"step", step.step},
                         {"loss", loss.loss},
                         {"lr", step.lr},
                         {"gradient_norm", step.gradient_norm},
                         {"tokens", loss.logprobs.rows},
                         {"forward_sha256", Hex(visible.Finish())},
                         {"backward_kernels", loss.backward_launches},
                         {"forward_ns", trainer->times().forward_ns},
                         {"loss_ns", trainer->times().loss_ns},
                         {"backward_ns", trainer->times().backward_ns},
                         {"optimizer_ns", Env::Real()->MonotonicNs() - optimizer_start}});
    std::fflush(stdout);
  }
  const double seconds = static_cast<double>(Env::Real()->MonotonicNs() - start) * 1e-9;
  TARE_ASSIGN_OR_RETURN(const double after, HeldOutLoss(trainer.get(), data));
  TARE_ASSIGN_OR_RETURN(const std::string hash, trainer->DeployedHash());
  fmt::print("held-out loss {:.6f} -> {:.6f}  {:.2f} s  weights {}\n", before, after, seconds,
             hash);
  if (o.out.empty()) return Verdict::kPass;
  TARE_RETURN_IF_ERROR(Env::Real()->CreateDirs(o.out));
  // The training baseline is a record of another kind than the arms that are compared with it.
  const Json record{
      {"schema", o.arm == "native" ? trainer::kBaselineSchema : trainer::kTrainSchema},
      {"arm", o.arm},
      {"profile", o.profile},
      {"threads", pool.threads()},
      {"faults", fault::Selected()},
      {"initial_weights", initial},
      {"final_weights", hash},
      {"data_sha256", data.sha256},
      {"first_sequence", progress.data_position - o.steps * o.batch},
      {"batch", o.batch},
      {"lr", o.lr},
      {"lr_schedule", o.lr_schedule},
      {"warmup_steps", o.warmup_steps},
      {"total_steps", total},
      {"held_out_before", before},
      {"held_out_after", after},
      {"seconds", seconds},
      {"steps", steps}};
  TARE_RETURN_IF_ERROR(Env::Real()->WriteFileAtomic(o.out + "/train.json", record.dump(1) + "\n"));
  TARE_RETURN_IF_ERROR(trainer::SaveState(Env::Real(), trainer.get(), progress, o.out + "/state"));
  TARE_RETURN_IF_ERROR(trainer::PublishWeights(Env::Real(), *trainer, o.model, o.out + "/weights"));
  return Verdict::kPass;
}

}  // namespace

TARE_COMMAND(train, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand("train", "finetune a model on lines of text");
  auto o = std::make_shared<Options>();
  app->add_option("model", o->model, "a Hugging Face directory")->required();
  app->add_option("text", o->text, "UTF-8, one example a line; every fifth is held out")
      ->required();
  app->add_option("--out", o->out, "directory for state/ and weights/, which must not be there");
  app->add_option("--resume", o->resume, "a state/ to go on from");
  app->add_option("--steps", o->steps, "updates")->capture_default_str();
  app->add_option("--batch", o->batch, "lines a step")->capture_default_str();
  app->add_option("--max-tokens", o->max_tokens, "longer lines are cut")
      ->capture_default_str()
      ->check(CLI::Range(2, 1 << 20));
  app->add_option("--lr", o->lr, "learning rate")->capture_default_str();
  app->add_option("--lr-schedule", o->lr_schedule, "constant, linear or cosine")
      ->capture_default_str();
  app->add_option("--warmup-steps", o->warmup_steps, "the rate rises to --lr at this one")
      ->capture_default_str();
  app->add_option("--total-steps", o->total_steps,
                  "where a schedule ends, of all runs together; 0: with this run");
  app->add_option("--min-lr-ratio", o->min_lr_ratio, "the last rate against --lr")
      ->capture_default_str();
  app->add_option("--arm", o->arm, "production, surrogate or native")->capture_default_str();
  app->add_option("--profile", o->profile, "ieee-f32 or sm90-mma")->capture_default_str();
  app->add_option("--threads", o->threads, "0: the CPUs of the affinity mask")
      ->capture_default_str();
  app->add_flag("--recompute", o->recompute,
                "backward computes each layer again: less memory, equal bits");
  app->add_option("--check-backward", o->check,
                  "hold every step's gradient against float64; the first that is off is kept as a "
                  "case in this new directory (tare backward-case)");
  app->add_option("--fault", o->faults, "planted faults, name@trainer,...");
  app->callback([o] {
    const Result<Verdict> v = Train(*o);
    if (!v.ok()) return SetExit(ReportError(v.status()));
    std::fflush(stdout);
    if (*v == Verdict::kFail) PrintReason(*v, reason::kGradientOff);
    SetExit(ExitCode(*v));
  });
});

TARE_COMMAND(train_control, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand(
      "train-control", "judge three arms of finetuning: same start and data, same visible forward");
  struct Options {
    std::vector<std::string> records;
    bool json = false;
  };
  auto o = std::make_shared<Options>();
  app->add_option("records", o->records, "train.json of each arm")->required();
  app->add_flag("--json", o->json, "for machines");
  app->callback([o] {
    std::vector<Json> records;
    for (const std::string& path : o->records) {
      const Result<std::string> text = Env::Real()->ReadFile(path);
      if (!text.ok()) return SetExit(ReportError(text.status()));
      Result<Json> json = ParseJson(*text);
      if (!json.ok())
        return SetExit(ReportError(DataLoss("{}: {}", path, json.status().message())));
      records.push_back(*std::move(json));
    }
    const trainer::Control c = trainer::JudgeControl(records);
    if (o->json) {
      fmt::print("{}\n", c.ToJson().dump(1));
    } else {
      for (const std::string& line : c.lines) fmt::print("{}\n", line);
      fmt::print("verdict: {}\n", VerdictName(c.verdict));
    }
    std::fflush(stdout);
    if (!c.reason.empty()) PrintReason(c.verdict, c.reason);
    SetExit(ExitCode(c.verdict));
  });
});

}  // namespace tare
