// `tare dual-path MODEL --rollout FILE.jsonl`: the trainer's two forwards over given rollouts, as
// C5 asks for them: the no-grad recomputation of old logprobs and the grad-enabled forward of the
// actor, each twice in one packing and once in another, on the parameters that the optimizer
// updates. It compares nothing; the judge of C5 does.

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "base/fault.h"
#include "base/sha256.h"
#include "models/model.h"
#include "models/score.h"
#include "numerics/fp_environment.h"
#include "rl/loop.h"
#include "tensor/checkpoint.h"
#include "tensor/logprobs.h"
#include "tools/command.h"
#include "trainer/trainer.h"

namespace tare {
namespace {

struct Options {
  std::string model, rollout, faults, profile = "ieee-f32";
  double temperature = 1.0;
  int threads = 0;
  bool native = false;
};

// As the trainer cuts: sequences up to `limit` rows, at least one.
std::vector<std::vector<std::string>> Cut(const std::vector<trainer::Sequence>& sequences,
                                          int64_t limit) {
  std::vector<std::vector<std::string>> batches(1);
  int64_t rows = 0;
  for (const trainer::Sequence& s : sequences) {
    const int64_t n = static_cast<int64_t>(s.tokens.size()) - 1;
    if (rows > 0 && rows + n > limit) {
      batches.emplace_back();
      rows = 0;
    }
    rows += n;
    batches.back().push_back(s.name);
  }
  return batches;
}

// The values in the order of `lines`, whatever order they were computed in.
Json PathJson(const std::vector<LogprobSequence>& lines,
              const std::vector<trainer::Sequence>& order, const trainer::Logprobs& values) {
  std::map<std::string, const std::vector<float>*> by_name;
  for (size_t i = 0; i < order.size(); ++i) by_name[order[i].name] = &values.values[i];
  Json sequences = Json::array();
  for (const LogprobSequence& line : lines) {
    Json bits = Json::array();
    for (const float v : *by_name.at(line.sequence))
      bits.push_back(fmt::format("0x{:08x}", std::bit_cast<uint32_t>(v)));
    std::vector<int> mask(line.tokens.size(), 1);
    for (size_t t = 0; t < line.mask.size(); ++t) mask[t] = line.mask[t];
    sequences.push_back({{"sequence", line.sequence},
                         {"prompt", line.prompt},
                         {"tokens", line.tokens},
                         {"mask", mask},
                         {"bits", bits}});
  }
  return {{"rows", values.rows}, {"recorded", values.recorded}, {"sequences", sequences}};
}

Status Run(const Options& o) {
  TARE_RETURN_IF_ERROR(fault::Select(o.faults));
  const std::optional<Profile> profile = ParseProfile(o.profile);
  if (!profile) return InvalidArgument("--profile {}: ieee-f32 or sm90-mma", o.profile);
  TARE_ASSIGN_OR_RETURN(const std::string text, Env::Real()->ReadFile(o.rollout));
  Result<std::vector<LogprobSequence>> parsed = ParseLogprobs(text);
  if (!parsed.ok()) return parsed.status().Annotate(o.rollout);
  const std::vector<LogprobSequence> lines = *std::move(parsed);
  if (lines.size() < 2) {
    return InvalidArgument("{}: {} sequences; two or more, as one has no neighbours to change",
                           o.rollout, lines.size());
  }
  std::vector<trainer::Sequence> given;
  int64_t rows = 0;
  for (const LogprobSequence& line : lines) {
    trainer::Sequence s;
    s.name = line.sequence;
    s.tokens = line.prompt;
    s.tokens.insert(s.tokens.end(), line.tokens.begin(), line.tokens.end());
    s.prompt_tokens = static_cast<int64_t>(line.prompt.size());
    s.mask = line.mask;
    s.temperature = static_cast<float>(o.temperature);
    rows += static_cast<int64_t>(s.tokens.size()) - 1;
    given.push_back(std::move(s));
  }
  ThreadPool pool(o.threads, numerics::RequireFpEnvironment);
  TARE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(o.model));
  models::ModelOptions model_options;
  model_options.side = fault::Side::kTrainer;
  TARE_ASSIGN_OR_RETURN(models::Model model, models::Model::Load(&pool, checkpoint, model_options));
  trainer::Options options;
  options.profile = *profile;
  options.batch_invariance = o.native ? ops::BatchInvariance::kOff : ops::BatchInvariance::kOn;
  // About three micro-batches, so that another order gives other neighbours.
  options.micro_batch_tokens = rows / 3 + 1;
  TARE_ASSIGN_OR_RETURN(const auto trainer,
                        trainer::Trainer::Create(&pool, std::move(model), options));
  TARE_ASSIGN_OR_RETURN(const std::string forward, trainer->DeployedHash());
  TARE_ASSIGN_OR_RETURN(const std::string master, trainer->MasterHash());

  std::vector<trainer::Sequence> shuffled;  // odd ones first, backwards: other order and neighbours
  for (size_t i = given.size(); i-- > 0;)
    if (i % 2 == 1) shuffled.push_back(given[i]);
  for (size_t i = given.size(); i-- > 0;)
    if (i % 2 == 0) shuffled.push_back(given[i]);

  Json packings = Json::object(), runs = Json::array();
  const auto pass = [&](const char* name, const std::vector<trainer::Sequence>& order,
                        bool recorded) -> Status {
    const auto batches = Cut(order, options.micro_batch_tokens);
    packings[name] = {{"micro_batches", batches}, {"padding_rows", 0}};
    TARE_ASSIGN_OR_RETURN(
        const trainer::Logprobs values,
        recorded ? trainer->RecordedForward(order, "theta0") : trainer->Score(order, "theta0"));
    if (values.forwards != static_cast<int64_t>(batches.size())) {
      return Error(Code::kInternal, "packing {}: {} forwards for {} micro-batches", name,
                   values.forwards, batches.size());
    }
    Json run = PathJson(lines, order, values);
    run["packing"] = name;
    run["path"] = recorded ? "actor" : "old_logprob";
    runs.push_back(std::move(run));
    return Ok();
  };
  for (int i = 0; i < 2; ++i)
    for (const bool recorded : {false, true}) TARE_RETURN_IF_ERROR(pass("base", given, recorded));
  for (const bool recorded : {false, true})
    TARE_RETURN_IF_ERROR(pass("shuffled", shuffled, recorded));

  // The kernels of the same forward, with a tape, traced once more.
  ops::LaunchTrace trace;
  ops::Ctx ctx;
  ctx.pool = &pool;
  ctx.profile = *profile;
  ctx.batch_invariance = options.batch_invariance;
  ctx.side = fault::Side::kTrainer;
  ctx.trace = &trace;
  std::vector<models::ScoreSequence> sequences;
  sequences.reserve(given.size());
  for (const trainer::Sequence& s : given) {
    sequences.push_back({s.name, s.tokens, s.prompt_tokens, s.temperature});
  }
  models::ScoreOptions how;
  how.tape = true;
  how.phase = TapPhase::kTrain;
  how.batch_tokens = options.micro_batch_tokens;
  models::Scratch scratch;
  TARE_RETURN_IF_ERROR(
      models::ScoreSequences(ctx, trainer->model(), sequences, how, &scratch).status());
  Json kernels = Json::object();
  for (const ops::Launch& l : trace.Take()) kernels[l.kernel] = l.op;

  // The copy that the forward reads, made anew from the masters that the optimizer updates.
  TARE_RETURN_IF_ERROR(trainer->DeployMasters());
  TARE_ASSIGN_OR_RETURN(const std::string from_masters, trainer->DeployedHash());
  TARE_ASSIGN_OR_RETURN(const std::string executable, rl::ExecutableDigest());
  const char* at_start = std::getenv("VLLM_BATCH_INVARIANT");
  const Json out{
      {"schema", "tare.dual_path/1"},
      {"executable", executable},
      {"at_start", at_start == nullptr ? "" : at_start},
      {"batch_invariant", !o.native},
      {"profile", o.profile},
      {"faults", fault::Selected()},
      {"vocabulary", trainer->model().config().vocab},
      {"temperature",
       fmt::format("0x{:08x}", std::bit_cast<uint32_t>(static_cast<float>(o.temperature)))},
      {"weights", forward},
      {"master", master},
      {"forward_parameters", forward},
      {"optimizer_parameters", from_masters},
      {"kernels", kernels},
      {"packings", packings},
      {"runs", runs}};
  fmt::print("{}\n", out.dump());
  return Ok();
}

}  // namespace

TARE_COMMAND(dual_path, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand(
      "dual-path", "the trainer's no-grad and grad-enabled logprobs of given rollouts, as bits");
  auto o = std::make_shared<Options>();
  app->add_option("model", o->model, "a Hugging Face directory")->required();
  app->add_option("--rollout", o->rollout, "tare.logprobs/1 of the rollout, .jsonl")->required();
  app->add_option("--temperature", o->temperature, "of the logprobs")->capture_default_str();
  app->add_option("--profile", o->profile, "ieee-f32 or sm90-mma")->capture_default_str();
  app->add_option("--threads", o->threads, "0: all CPUs of this process")->capture_default_str();
  app->add_flag("--native", o->native, "the batch-dependent arm: bits may depend on the packing");
  app->add_option("--fault", o->faults, "planted faults, NAME@trainer");
  app->callback([o] {
    const Status s = Run(*o);
    SetExit(s.ok() ? 0 : ReportError(s));
  });
});

}  // namespace tare
