#include "rl/loop.h"

#include <signal.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <set>

#include "base/sha256.h"
#include "engine/client/client.h"
#include "models/model.h"
#include "numerics/fp_environment.h"
#include "rl/faults.h"
#include "rl/task.h"
#include "tensor/checkpoint.h"
#include "tensor/dump.h"
#include "tensor/logprobs.h"
#include "trainer/checkpoint.h"
#include "trainer/trainer.h"

namespace tare::rl {
namespace {

namespace client = engine::client;
using fault::Side;

bool Faulty(const fault::Fault& f) { return fault::Active(f, Side::kTrainer); }

struct Sampled {
  Question question;
  client::Sample sample;
  uint64_t seed = 0;
  int64_t index = 0;  // in its group
  float reward = 0;
  float advantage = 0;
};

// Which path a file of logprobs came from.
const char* const kPaths[] = {"rollout", "score", "train"};

// The whole loop's state, one step a call.
class Loop {
 public:
  Loop(const LoopConfig& config, uint16_t port, const std::string& out)
      : config_(config), out_(out), pool_(config.threads, numerics::RequireFpEnvironment) {
    endpoint_.port = port;
  }
  Status Run();

 private:
  Status Load();
  Status Probe();
  Result<std::vector<Sampled>> Rollout(int64_t version, Json* round);
  Status Compare(int64_t version, std::vector<Sampled>* samples, bool update_follows, Json* round);
  Status Update(int64_t version, std::vector<Sampled>* samples, Json* round);
  Status Publish(int64_t version, Json* update);
  Status Write();
  std::vector<trainer::Sequence> Sequences(const std::vector<Sampled>& samples,
                                           int64_t version) const;
  Status WritePath(int64_t version, const char* path, const std::vector<Sampled>& samples,
                   const std::vector<trainer::Sequence>& sequences,
                   const std::vector<std::vector<float>>& values, Json* round);
  void Event(const std::string& what, int64_t version) {
    events_.push_back(Json{{"seq", events_.size()},
                           {"event", what},
                           {"version", version},
                           {"monotonic_ns", Env::Real()->MonotonicNs()}});
    std::fprintf(stderr, "%s theta%lld\n", what.c_str(), static_cast<long long>(version));
  }

  LoopConfig config_;
  std::string out_;
  ThreadPool pool_;
  client::Endpoint endpoint_;
  std::unique_ptr<Task> task_;
  std::unique_ptr<trainer::Trainer> trainer_;
  std::vector<trainer::Sequence> sequences_;  // of the round, as the trainer fed them
  std::vector<std::vector<float>> score_;     // of the round, its no-grad path
  Json events_ = Json::array(), rounds_ = Json::array(), updates_ = Json::array(), identity_,
       rollout_identity_;
  int64_t question_ = 0;
};

ops::policy_loss::Params PolicyOf(const LoopConfig& c) {
  ops::policy_loss::Params p;
  p.clip_low = static_cast<float>(c.clip_low);
  p.clip_high = static_cast<float>(c.clip_high);
  // GRPO and PPO-clip: a mean over each sequence, then over sequences; DAPO: over all tokens.
  p.normalise = c.loss == "grpo" ? ops::policy_loss::Normalise::kSequence
                                 : ops::policy_loss::Normalise::kToken;
  return p;
}

Status Loop::Load() {
  Env* env = Env::Real();
  TARE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(config_.model));
  if (checkpoint.format() != Checkpoint::Format::kHuggingFace) {
    return Unsupported(
        "{}: the loop publishes Hugging Face directories; `tare model import` makes one",
        config_.model);
  }
  models::ModelOptions model_options;
  model_options.side = Side::kTrainer;
  TARE_ASSIGN_OR_RETURN(models::Model model,
                        models::Model::Load(&pool_, checkpoint, model_options));
  TARE_ASSIGN_OR_RETURN(task_,
                        MakeTask(config_.task, env, checkpoint, model.config(), config_.seed));
  trainer::Options options;
  const std::optional<Profile> profile = ParseProfile(config_.profile);
  if (!profile) return InvalidArgument("profile {}: ieee-f32 or sm90-mma", config_.profile);
  options.profile = *profile;
  const char* raw = std::getenv("VLLM_BATCH_INVARIANT");
  const std::string text = raw == nullptr ? "" : raw;
  if (text != "" && text != "0" && text != "1")
    return InvalidArgument("VLLM_BATCH_INVARIANT={}: 0 or 1", text);
  options.batch_invariance = text == "1" ? ops::BatchInvariance::kOn : ops::BatchInvariance::kOff;
  options.recompute = config_.recompute;
  options.micro_batch_tokens = 1024;
  TARE_ASSIGN_OR_RETURN(trainer_, trainer::Trainer::Create(&pool_, std::move(model), options));
  TARE_ASSIGN_OR_RETURN(const std::string executable, ExecutableDigest());
  identity_ = Json{{"pid", ::getpid()},
                   {"binary_sha256", executable},
                   {"batch_invariant", text == "1"},
                   {"VLLM_BATCH_INVARIANT", raw == nullptr ? Json(nullptr) : Json(text)},
                   {"profile", config_.profile},
                   {"threads", pool_.threads()},
                   {"faults", fault::Selected()}};
  return Ok();
}

Result<std::vector<Sampled>> Loop::Rollout(int64_t version, Json* round) {
  Event("rollout", version);
  const int64_t start = Env::Real()->MonotonicNs();
  std::vector<Question> questions;
  for (int64_t p = 0; p < config_.prompts; ++p) {
    const int64_t index = config_.same_questions ? p : question_ + p;
    TARE_ASSIGN_OR_RETURN(Question q, task_->Ask(index, /*held_out=*/false));
    questions.push_back(std::move(q));
  }
  question_ += config_.prompts;
  // One request a sample, its seed from (run, step, question, sample): reproducible and distinct
  // (H16).
  std::vector<client::CompletionRequest> requests;
  std::vector<Sampled> samples;
  for (size_t p = 0; p < questions.size(); ++p) {
    for (int64_t n = 0; n < config_.group; ++n) {
      client::CompletionRequest r;
      r.prompt = questions[p].prompt;
      r.max_tokens = static_cast<int32_t>(config_.max_tokens);
      r.temperature = static_cast<float>(config_.temperature);
      const uint64_t sample = Faulty(kSameSeed) ? 0 : static_cast<uint64_t>(n);
      r.seed = (config_.seed << 40) ^ (static_cast<uint64_t>(version) << 28) ^
               (static_cast<uint64_t>(p) << 12) ^ sample;
      Sampled s;
      s.question = questions[p];
      s.seed = *r.seed;
      s.index = n;
      samples.push_back(std::move(s));
      requests.push_back(std::move(r));
    }
  }
  auto answers = client::Complete(endpoint_, requests);
  Json versions = Json::array();
  std::set<int64_t> seen;
  int64_t tokens = 0;
  for (size_t i = 0; i < answers.size(); ++i) {
    if (!answers[i].ok())
      return answers[i].status().Annotate(fmt::format("sample {} of theta{}", i, version));
    if (answers[i]->size() != 1)
      return DataLoss("sample {} of theta{}: {} choices came back; 1", i, version,
                      answers[i]->size());
    samples[i].sample = std::move(answers[i]->front());
    const client::Sample& s = samples[i].sample;
    if (s.tokens.empty() || s.tempered_logprob.size() != s.tokens.size()) {
      return DataLoss("sample {} of theta{}: {} tokens with {} logprobs", i, version,
                      s.tokens.size(), s.tempered_logprob.size());
    }
    seen.insert(s.weight_version.begin(), s.weight_version.end());
    tokens += static_cast<int64_t>(s.tokens.size());
    samples[i].reward = Faulty(kFlatReward) ? 0.5f : task_->Reward(samples[i].question, s.tokens);
  }
  for (const int64_t v : seen) versions.push_back(v);
  (*round)["rollout"] = Json{{"sequences", samples.size()},
                             {"tokens", tokens},
                             {"weight_versions", versions},
                             {"started_ns", start},
                             {"ended_ns", Env::Real()->MonotonicNs()}};
  return samples;
}

std::vector<trainer::Sequence> Loop::Sequences(const std::vector<Sampled>& samples,
                                               int64_t version) const {
  std::vector<trainer::Sequence> sequences;
  for (const Sampled& s : samples) {
    trainer::Sequence q;
    q.name = fmt::format("theta{}/{}/{}", version, s.question.name, s.index);
    q.tokens = s.question.prompt;
    if (Faulty(kRetokenise)) q.tokens[q.tokens.size() / 2] ^= 1;
    q.prompt_tokens = static_cast<int64_t>(q.tokens.size());
    q.tokens.insert(q.tokens.end(), s.sample.tokens.begin(), s.sample.tokens.end());
    q.mask.assign(s.sample.tokens.size(), 1);
    q.temperature = static_cast<float>(config_.temperature);
    q.advantage = s.advantage;
    if (Faulty(kEmptyMask)) q.mask.assign(q.mask.size(), 0);
    if (Faulty(kWrongMask)) q.mask.front() = 0;
    sequences.push_back(std::move(q));
  }
  return sequences;
}

Status Loop::WritePath(int64_t version, const char* path, const std::vector<Sampled>& samples,
                       const std::vector<trainer::Sequence>& sequences,
                       const std::vector<std::vector<float>>& values, Json* round) {
  const bool rollout = std::string(path) == "rollout";
  std::vector<LogprobSequence> lines;
  int64_t tokens = 0, valid = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    LogprobSequence line;
    line.sequence = fmt::format("{}/{}", samples[i].question.name, samples[i].index);
    const int64_t labelled = !rollout && version > 0 && Faulty(kStaleLabel) ? version - 1 : version;
    line.weights = fmt::format("theta{}", labelled);
    line.kind = config_.temperature == 1.0 ? "raw" : "processed";
    // Each side states the tokens and the mask that it holds itself.
    if (rollout) {
      line.prompt = samples[i].question.prompt;
      line.tokens = samples[i].sample.tokens;
      line.mask.assign(line.tokens.size(), Faulty(kEmptyMask) ? 0 : 1);
      line.words.assign(samples[i].sample.tempered_logprob.begin(),
                        samples[i].sample.tempered_logprob.end());
    } else {
      const trainer::Sequence& s = sequences[i];
      line.prompt.assign(s.tokens.begin(), s.tokens.begin() + s.prompt_tokens);
      line.tokens.assign(s.tokens.begin() + s.prompt_tokens, s.tokens.end());
      line.mask = s.mask;
      for (const float v : values[i]) line.words.push_back(std::bit_cast<uint32_t>(v));
    }
    if (Faulty(kDefaultFill)) line.words.assign(line.words.size(), 0);
    tokens += static_cast<int64_t>(line.tokens.size());
    for (const uint8_t m : line.mask) valid += m;
    lines.push_back(std::move(line));
  }
  const std::string name = fmt::format("theta{}.{}.jsonl", version, path);
  TARE_RETURN_IF_ERROR(WriteLogprobs(Env::Real(), out_ + "/" + name, lines));
  TARE_ASSIGN_OR_RETURN(const std::string bytes, Env::Real()->ReadFile(out_ + "/" + name));
  Json& entry = (*round)["paths"][path];
  entry["file"] = name;
  entry["sha256"] = Hex(Sha256Of(bytes));
  entry["sequences"] = lines.size();
  entry["tokens"] = tokens;
  entry["valid_tokens"] = valid;
  entry["dtype"] = "f32";
  return Ok();
}

Json Executed(const trainer::Logprobs& p, int64_t start) {
  return Json{{"forwards", p.forwards}, {"launches", p.launches},
              {"rows", p.rows},         {"recorded", p.recorded},
              {"started_ns", start},    {"ended_ns", Env::Real()->MonotonicNs()}};
}

Status Loop::Compare(int64_t version, std::vector<Sampled>* samples, bool update_follows,
                     Json* round) {
  Event("compare", version);
  TARE_ASSIGN_OR_RETURN(const Json held, client::SendJson(endpoint_, "GET", "/weights"));
  TARE_ASSIGN_OR_RETURN(const std::string deployed, trainer_->DeployedHash());
  TARE_ASSIGN_OR_RETURN(const std::string master, trainer_->MasterHash());
  (*round)["weights"] = Json{{"trainer_deployed", deployed},
                             {"trainer_master", master},
                             {"engine_held", held.value("sha256", "")},
                             {"engine_version", held.value("version", -1)}};
  sequences_ = Sequences(*samples, version);
  TARE_RETURN_IF_ERROR(WritePath(version, kPaths[0], *samples, sequences_, {}, round));
  const std::string label = fmt::format("theta{}", version);
  int64_t start = Env::Real()->MonotonicNs();
  trainer::Logprobs score;
  if (Faulty(kBypass)) {
    for (const Sampled& s : *samples) {
      std::vector<float>& v = score.values.emplace_back();
      for (const uint32_t w : s.sample.tempered_logprob) v.push_back(std::bit_cast<float>(w));
    }
  } else {
    TARE_ASSIGN_OR_RETURN(score, trainer_->Score(sequences_, label));
  }
  if (Faulty(kDecimal)) {
    for (auto& sequence : score.values) {
      for (float& v : sequence) v = std::strtof(fmt::format("{:.4f}", v).c_str(), nullptr);
    }
  }
  (*round)["paths"]["score"] = Executed(score, start);
  TARE_RETURN_IF_ERROR(WritePath(version, kPaths[1], *samples, sequences_, score.values, round));
  score_ = std::move(score.values);
  for (size_t i = 0; i < sequences_.size(); ++i) sequences_[i].old_logprob = score_[i];
  if (update_follows || Faulty(kSkipRecorded))
    return Ok();  // the update's own forward is the second path
  start = Env::Real()->MonotonicNs();
  TARE_ASSIGN_OR_RETURN(const trainer::Logprobs train,
                        trainer_->RecordedForward(sequences_, label));
  (*round)["paths"]["train"] = Executed(train, start);
  return WritePath(version, kPaths[2], *samples, sequences_, train.values, round);
}

Status Loop::Update(int64_t version, std::vector<Sampled>* samples, Json* round) {
  // GRPO: the advantage of a sample is its reward against its group's mean, in units of the spread.
  Json groups = Json::array();
  double total = 0;
  for (int64_t p = 0; p < config_.prompts; ++p) {
    double sum = 0, squares = 0;
    Json rewards = Json::array(), advantages = Json::array();
    for (int64_t n = 0; n < config_.group; ++n)
      sum += (*samples)[static_cast<size_t>(p * config_.group + n)].reward;
    const double mean = sum / static_cast<double>(config_.group);
    for (int64_t n = 0; n < config_.group; ++n) {
      const double d = (*samples)[static_cast<size_t>(p * config_.group + n)].reward - mean;
      squares += d * d;
    }
    const double spread = std::sqrt(squares / static_cast<double>(config_.group));
    std::set<std::vector<int32_t>> unique;
    for (int64_t n = 0; n < config_.group; ++n) {
      const size_t i = static_cast<size_t>(p * config_.group + n);
      Sampled& s = (*samples)[i];
      s.advantage = static_cast<float>((s.reward - mean) / (spread + 1e-6));
      sequences_[i].advantage = s.advantage;
      rewards.push_back(s.reward);
      advantages.push_back(fmt::format("0x{:08x}", std::bit_cast<uint32_t>(s.advantage)));
      unique.insert(s.sample.tokens);
      total += s.reward;
    }
    groups.push_back(
        Json{{"question", (*samples)[static_cast<size_t>(p * config_.group)].question.name},
             {"rewards", rewards},
             {"advantages", advantages},
             {"unique", unique.size()}});
  }
  (*round)["reward"] =
      Json{{"mean", total / static_cast<double>(samples->size())}, {"groups", groups}};

  Event("update", version);
  if (Faulty(kDieInUpdate)) ::raise(SIGKILL);
  const int64_t start = Env::Real()->MonotonicNs();
  TARE_ASSIGN_OR_RETURN(const std::string before_master, trainer_->MasterHash());
  TARE_ASSIGN_OR_RETURN(const std::string before, trainer_->DeployedHash());
  TARE_ASSIGN_OR_RETURN(const trainer::LossReport loss,
                        trainer_->Accumulate(sequences_, trainer::Loss::kPolicy, PolicyOf(config_),
                                             fmt::format("theta{}", version)));
  if (!Faulty(kSkipRecorded)) {
    (*round)["paths"]["train"] = Executed(loss.logprobs, start);
    TARE_RETURN_IF_ERROR(
        WritePath(version, kPaths[2], *samples, sequences_, loss.logprobs.values, round));
  }
  const int64_t backward_end = Env::Real()->MonotonicNs();
  trainer::StepReport step;
  if (Faulty(kSkipStep)) {
    step.skipped = true;
    step.skipped_why = "planted";
  } else {
    const float lr = Faulty(kZeroLr) ? 0.0f : static_cast<float>(config_.lr);
    TARE_ASSIGN_OR_RETURN(step, trainer_->Apply(lr, !Faulty(kMasterOnly)));
  }
  TARE_ASSIGN_OR_RETURN(const std::string after_master, trainer_->MasterHash());
  TARE_ASSIGN_OR_RETURN(const std::string after, trainer_->DeployedHash());
  Json parameters = Json::array();
  for (const trainer::ParameterReport& p : step.parameters) {
    parameters.push_back(Json{{"name", p.name},
                              {"elements", p.elements},
                              {"gradient_nonzero", p.gradient_nonzero},
                              {"gradient_non_finite", p.gradient_non_finite},
                              {"gradient_max_abs", p.gradient_max_abs},
                              {"master_changed", p.master_changed},
                              {"deployed_changed", p.deployed_changed}});
  }
  updates_.push_back(Json{{"from", version},
                          {"loss_kind", config_.loss},
                          {"loss", loss.loss},
                          {"valid_tokens", loss.valid_tokens},
                          {"clipped_tokens", loss.clipped_tokens},
                          {"ratio_not_one", loss.ratio_not_one},
                          {"kl_coef", 0},
                          {"entropy_coef", 0},
                          {"lr", step.lr},
                          {"skipped", step.skipped},
                          {"skipped_why", step.skipped_why},
                          {"gradient_norm", step.gradient_norm},
                          {"clip_factor", step.clip_factor},
                          {"master_before", before_master},
                          {"master_after", after_master},
                          {"deployed_before", before},
                          {"deployed_after", after},
                          {"parameters", parameters},
                          {"forward_backward_ns", backward_end - start},
                          {"optimizer_ns", Env::Real()->MonotonicNs() - backward_end}});
  return Publish(version + 1, &updates_.back());
}

Status Loop::Publish(int64_t version, Json* update) {
  Event("publish", version);
  const int64_t start = Env::Real()->MonotonicNs();
  const std::string dir = fmt::format("{}/weights-theta{}", out_, version);
  TARE_RETURN_IF_ERROR(trainer::PublishWeights(Env::Real(), *trainer_, config_.model, dir));
  const int64_t written = Env::Real()->MonotonicNs();
  TARE_ASSIGN_OR_RETURN(const std::string sha256, trainer_->DeployedHash());
  Json answer;
  if (!Faulty(kNoPublish)) {
    // The engine resolves the path by itself: it must not depend on its working directory.
    char* absolute = ::realpath(dir.c_str(), nullptr);
    const std::string path = absolute == nullptr ? dir : absolute;
    std::free(absolute);
    TARE_ASSIGN_OR_RETURN(
        answer, client::SendJson(endpoint_, "POST", "/update_weights",
                                 Json{{"version", version}, {"path", path}, {"sha256", sha256}}));
  }
  (*update)["publish"] = Json{{"version", version},
                              {"sha256", sha256},
                              {"engine", answer},
                              {"write_ns", written - start},
                              {"update_ns", Env::Real()->MonotonicNs() - written}};
  return Ok();
}

Status Loop::Probe() {
  // One request alone on both sides, dumped: for locating a difference, not for the verdict.
  client::CompletionRequest r;
  TARE_ASSIGN_OR_RETURN(Question q, task_->Ask(0, /*held_out=*/true));
  r.prompt = q.prompt;
  r.max_tokens = static_cast<int32_t>(std::min<int64_t>(config_.max_tokens, 8));
  r.seed = config_.seed;
  r.ignore_eos = true;
  auto answers = client::Complete(endpoint_, {r});
  if (!answers[0].ok()) return answers[0].status().Annotate("probe");
  trainer::Sequence s;
  s.name = "probe";
  s.tokens = q.prompt;
  s.prompt_tokens = static_cast<int64_t>(q.prompt.size());
  const client::Sample& sample = answers[0]->front();
  s.tokens.insert(s.tokens.end(), sample.tokens.begin(), sample.tokens.end());
  DumpOptions options;
  options.manifest.side = "trainer";
  options.manifest.identity = identity_;
  options.manifest.identity["replay"] =
      ProbeReplay(config_, options.manifest.identity["batch_invariant"] == true);
  TARE_ASSIGN_OR_RETURN(const std::string weights, trainer_->DeployedHash());
  TARE_ASSIGN_OR_RETURN(const Sha256Digest digest, ParseSha256(weights));
  options.manifest.weights.push_back({"theta0", digest});
  // The engine's logprobs come out of its sampler, outside the forward.
  options.record = [](const TapPoint& point) { return point.op != "logprob"; };
  options.pool = &pool_;
  options.sync = false;
  TARE_ASSIGN_OR_RETURN(auto writer, DumpWriter::Create(Env::Real(), out_ + "/probe.trainer.dump",
                                                        std::move(options)));
  TARE_RETURN_IF_ERROR(trainer_->Score(std::span(&s, 1), "theta0", writer.get()).status());
  return writer->Finish();
}

Status Loop::Write() {
  const Json json{{"identity", identity_},
                  {"rollout_identity", rollout_identity_},
                  {"events", events_},
                  {"rounds", rounds_},
                  {"updates", updates_}};
  return Env::Real()->WriteFileAtomic(
      out_ + "/rounds.json", json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
}

Status Loop::Run() {
  TARE_RETURN_IF_ERROR(client::WaitHealthy(endpoint_, 120));
  TARE_RETURN_IF_ERROR(Load());
  if (config_.probe) TARE_RETURN_IF_ERROR(Probe());
  for (int64_t version = 0; version <= config_.steps; ++version) {
    const bool last = version == config_.steps;
    if (last && Faulty(kSkipLast)) break;
    Json round{{"version", version}};
    TARE_ASSIGN_OR_RETURN(std::vector<Sampled> samples, Rollout(version, &round));
    TARE_RETURN_IF_ERROR(Compare(version, &samples, !last, &round));
    // What was compared is on disk even when the update then fails.
    const Status updated = last ? Ok() : Update(version, &samples, &round);
    rounds_.push_back(std::move(round));
    TARE_RETURN_IF_ERROR(Write());
    TARE_RETURN_IF_ERROR(updated);
  }
  TARE_ASSIGN_OR_RETURN(rollout_identity_, client::SendJson(endpoint_, "GET", "/identity"));
  Event("end", config_.steps);
  return Write();
}

}  // namespace

Json LoopConfig::ToJson() const {
  return Json{{"model", model},
              {"task", task},
              {"steps", steps},
              {"prompts", prompts},
              {"group", group},
              {"max_tokens", max_tokens},
              {"temperature", temperature},
              {"lr", lr},
              {"loss", loss},
              {"clip_low", clip_low},
              {"clip_high", clip_high},
              {"seed", seed},
              {"profile", profile},
              {"threads", threads},
              {"recompute", recompute},
              {"prefix_caching", prefix_caching},
              {"same_questions", same_questions},
              {"faults", faults}};
}

Result<LoopConfig> LoopConfig::FromJson(const Json& json) {
  LoopConfig c;
  try {
    for (const auto& [key, value] : json.items()) {
      if (key == "model")
        value.get_to(c.model);
      else if (key == "task")
        value.get_to(c.task);
      else if (key == "steps")
        value.get_to(c.steps);
      else if (key == "prompts")
        value.get_to(c.prompts);
      else if (key == "group")
        value.get_to(c.group);
      else if (key == "max_tokens")
        value.get_to(c.max_tokens);
      else if (key == "temperature")
        value.get_to(c.temperature);
      else if (key == "lr")
        value.get_to(c.lr);
      else if (key == "loss")
        value.get_to(c.loss);
      else if (key == "clip_low")
        value.get_to(c.clip_low);
      else if (key == "clip_high")
        value.get_to(c.clip_high);
      else if (key == "seed")
        value.get_to(c.seed);
      else if (key == "profile")
        value.get_to(c.profile);
      else if (key == "threads")
        value.get_to(c.threads);
      else if (key == "recompute")
        value.get_to(c.recompute);
      else if (key == "prefix_caching")
        value.get_to(c.prefix_caching);
      else if (key == "same_questions")
        value.get_to(c.same_questions);
      else if (key == "faults")
        value.get_to(c.faults);
      else
        return InvalidArgument("configuration of the loop: unknown key {}", Printable(key));
    }
  } catch (const nlohmann::json::exception& e) {
    return InvalidArgument("configuration of the loop: {}", e.what());
  }
  return c;
}

Status CheckConfig(const LoopConfig& c) {
  if (c.steps < 1)
    return InvalidArgument("steps is {}; 1 or more (2 for a receipt that can pass)", c.steps);
  if (c.prompts < 1) return InvalidArgument("prompts is {}; 1 or more", c.prompts);
  if (c.group < 2)
    return InvalidArgument("group is {}; 2 or more, else every advantage is 0", c.group);
  if (c.max_tokens < 1) return InvalidArgument("max_tokens is {}; 1 or more", c.max_tokens);
  if (!(c.temperature > 0) || !std::isfinite(c.temperature)) {
    return InvalidArgument("temperature is {}; above 0 (greedy samples of a group are equal)",
                           c.temperature);
  }
  if (!(c.lr >= 0) || !std::isfinite(c.lr)) return InvalidArgument("lr is {}; 0 or above", c.lr);
  if (c.loss != "grpo" && c.loss != "dapo" && c.loss != "ppo-clip") {
    return InvalidArgument("loss is {}; grpo, dapo or ppo-clip", c.loss);
  }
  return Ok();
}

Result<std::string> ExecutableDigest() {
  TARE_ASSIGN_OR_RETURN(const auto file, Env::Real()->OpenReadable("/proc/self/exe"));
  return Hex(Sha256Of(file->bytes()));
}

Status RunWorker(const LoopConfig& config, uint16_t port, const std::string& out) {
  TARE_RETURN_IF_ERROR(CheckConfig(config));
  Loop loop(config, port, out);
  TARE_RETURN_IF_ERROR(loop.Run());
  if (Faulty(kDieAtExit)) ::raise(SIGKILL);
  return Ok();
}

}  // namespace tare::rl
