#include "rl/loop.h"

#include <malloc.h>
#include <signal.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <set>
#include <utility>

#include "base/sha256.h"
#include "engine/client/client.h"
#include "models/model.h"
#include "numerics/fp_environment.h"
#include "rl/advantage.h"
#include "rl/faults.h"
#include "rl/rollout.h"
#include "rl/task.h"
#include "tensor/checkpoint.h"
#include "tensor/dump.h"
#include "tensor/logprobs.h"
#include "tensor/safetensors.h"
#include "tensor/weight_hash.h"
#include "trainer/checkpoint.h"
#include "trainer/schedule.h"
#include "trainer/trainer.h"

namespace tare::rl {
namespace {

namespace client = engine::client;
using fault::Side;

bool Faulty(const fault::Fault& f) { return fault::Active(f, Side::kTrainer); }

// Which path a file of logprobs came from.
const char* const kPaths[] = {"rollout", "score", "train"};

// The whole loop's state, one step a call.
class Loop {
 public:
  Loop(const LoopConfig& config, uint16_t port, const std::string& out)
      : config_(config), out_(out), pool_(config.threads, numerics::RequireFpEnvironment) {
    endpoint_.port = port;
  }
  ~Loop() {
    std::error_code ignored;
    if (!published_.empty()) std::filesystem::remove_all(published_, ignored);
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
  Status WriteLines(const std::string& name, const std::vector<LogprobSequence>& lines,
                    Json* entry);
  Status HeldOut(int64_t version, Json* round);
  Status PutOldTensor(const std::string& dir, int64_t version);
  Status PutMasters(const std::vector<Tensor>& from);
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
    if (static_cast<int64_t>(events_.size()) == config_.stop_at_event + 1) ::raise(SIGSTOP);
  }

  LoopConfig config_;
  std::string out_;
  ThreadPool pool_;
  client::Endpoint endpoint_;
  std::unique_ptr<Task> task_;
  std::unique_ptr<trainer::Trainer> trainer_;
  trainer::Schedule schedule_;
  std::vector<Tensor> theta0_, current_;      // masters, for the planted snapshot
  std::vector<trainer::Sequence> sequences_;  // of the round, as the trainer fed them
  std::vector<std::vector<float>> score_;     // of the round, its no-grad path
  Json events_ = Json::array(), rounds_ = Json::array(), updates_ = Json::array(), identity_,
       rollout_identity_;
  int64_t question_ = 0;
  std::string published_;  // directory of the last version, unless all are kept
};

ops::policy_loss::Params PolicyOf(const LoopConfig& c) {
  ops::policy_loss::Params p;
  p.clip_low = static_cast<float>(c.clip_ratio_low);
  p.clip_high = static_cast<float>(c.clip_ratio_high);
  p.dual_clip = static_cast<float>(c.clip_ratio_c);
  p.normalise = c.loss_agg_mode == "seq-mean-token-mean" ? ops::policy_loss::Normalise::kSequence
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
  // Who asks for less memory does without packed copies: the kernels then turn the weights as they
  // go, with equal bits and up to twice the time of a forward. Codes of the Hopper step stay, they
  // take too long to make.
  model_options.pack = !config_.recompute || config_.profile == "sm90-mma";
  TARE_ASSIGN_OR_RETURN(models::Model model,
                        models::Model::Load(&pool_, checkpoint, model_options));
  TARE_ASSIGN_OR_RETURN(task_, MakeTask(config_.task, env, checkpoint, model.config(), config_.seed,
                                        config_.prompt_tokens));
  trainer::Options options;
  const std::optional<Profile> profile = ParseProfile(config_.profile);
  if (!profile) return InvalidArgument("profile {}: ieee-f32 or sm90-mma", config_.profile);
  options.profile = *profile;
  const char* raw = std::getenv("VLLM_BATCH_INVARIANT");
  const std::string text = raw == nullptr ? "" : raw;
  if (text != "" && text != "0" && text != "1")
    return InvalidArgument("VLLM_BATCH_INVARIANT={}: 0 or 1", text);
  // The native arm has no alignment, whatever the switch says.
  options.batch_invariance = text == "1" && config_.arm != "native" ? ops::BatchInvariance::kOn
                                                                    : ops::BatchInvariance::kOff;
  options.surrogate = config_.arm == "surrogate";
  options.recompute = config_.recompute;
  options.micro_batch_tokens = config_.micro_batch_tokens;
  TARE_ASSIGN_OR_RETURN(schedule_, trainer::MakeSchedule(config_.lr_schedule, config_.warmup_steps,
                                                         config_.steps, config_.min_lr_ratio));
  TARE_ASSIGN_OR_RETURN(trainer_, trainer::Trainer::Create(&pool_, std::move(model), options));
  TARE_ASSIGN_OR_RETURN(const std::string executable, ExecutableDigest());
  identity_ = Json{{"pid", ::getpid()},
                   {"binary_sha256", executable},
                   {"batch_invariant", options.batch_invariance == ops::BatchInvariance::kOn},
                   {"arm", config_.arm},
                   {"VLLM_BATCH_INVARIANT", raw == nullptr ? Json(nullptr) : Json(text)},
                   {"profile", config_.profile},
                   {"threads", pool_.threads()},
                   {"faults", fault::Selected()}};
  return Ok();
}

Result<std::vector<Sampled>> Loop::Rollout(int64_t version, Json* round) {
  Event("rollout", version);
  const int64_t start = Env::Real()->MonotonicNs();
  std::vector<Sampled> kept;
  std::set<int64_t> seen;
  int64_t groups = 0, generated = 0, asked = 0, batches = 0;
  // DAPO's dynamic sampling: groups without differing rewards are asked again with other questions
  // (or other seeds), up to max_num_gen_batches times; then they are taken as they are.
  const bool filter = config_.filter_groups;
  while (groups < config_.prompts) {
    const bool last_chance = !filter || ++batches >= config_.max_num_gen_batches;
    const int64_t wanted = last_chance ? config_.prompts - groups : config_.prompts;
    std::vector<Question> questions;
    for (int64_t p = 0; p < wanted; ++p) {
      const int64_t index = config_.same_questions ? asked + p : question_ + p;
      TARE_ASSIGN_OR_RETURN(Question q, task_->Ask(index, /*held_out=*/false));
      questions.push_back(std::move(q));
    }
    TARE_ASSIGN_OR_RETURN(
        std::vector<Sampled> samples,
        SampleAll(endpoint_, config_, *task_, questions, version, asked, config_.group, false));
    asked += wanted;
    question_ += wanted;
    for (int64_t p = 0; p < wanted && groups < config_.prompts; ++p) {
      const auto begin = samples.begin() + p * config_.group;
      std::vector<float> rewards;
      for (auto s = begin; s != begin + config_.group; ++s) {
        if (Faulty(kFlatReward)) s->reward = 0.5f;
        rewards.push_back(s->reward);
        seen.insert(s->sample.weight_version.begin(), s->sample.weight_version.end());
      }
      ++generated;
      if (!last_chance && !HasSignal(rewards)) continue;
      ++groups;
      std::move(begin, begin + config_.group, std::back_inserter(kept));
    }
  }
  int64_t tokens = 0;
  for (const Sampled& s : kept) tokens += static_cast<int64_t>(s.sample.tokens.size());
  Json versions = Json::array();
  for (const int64_t v : seen) versions.push_back(v);
  (*round)["rollout"] = Json{{"sequences", kept.size()},  {"tokens", tokens},
                             {"groups_asked", generated}, {"weight_versions", versions},
                             {"started_ns", start},       {"ended_ns", Env::Real()->MonotonicNs()}};
  return kept;
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
      const client::Sample& sample = samples[i].sample;
      const std::vector<uint32_t>& words = Faulty(kRawLogprobs)         ? sample.raw_logprob
                                           : Faulty(kProcessedLogprobs) ? sample.processed_logprob
                                                                        : sample.tempered_logprob;
      line.words.assign(words.begin(), words.end());
    } else {
      const trainer::Sequence& s = sequences[i];
      line.prompt.assign(s.tokens.begin(), s.tokens.begin() + s.prompt_tokens);
      line.tokens.assign(s.tokens.begin() + s.prompt_tokens, s.tokens.end());
      line.mask = s.mask;
      for (const float v : values[i]) line.words.push_back(std::bit_cast<uint32_t>(v));
    }
    if (Faulty(kCutShort) && line.tokens.size() > 1) {
      line.tokens.pop_back();
      line.words.pop_back();
      line.mask.pop_back();
    }
    if (Faulty(kDefaultFill)) line.words.assign(line.words.size(), 0);
    tokens += static_cast<int64_t>(line.tokens.size());
    for (const uint8_t m : line.mask) valid += m;
    lines.push_back(std::move(line));
  }
  const std::string name = fmt::format("theta{}.{}.jsonl", version, path);
  Json& entry = (*round)["paths"][path];
  TARE_RETURN_IF_ERROR(WriteLines(name, lines, &entry));
  entry["sequences"] = lines.size();
  entry["tokens"] = tokens;
  entry["valid_tokens"] = valid;
  entry["dtype"] = "f32";
  if (!rollout || (config_.temperature == 1.0 && config_.top_p == 1.0)) return Ok();
  // The engine's other kinds of the same logprobs: with them a contract that differs (temperature,
  // truncation) is told from arithmetic that differs.
  for (const char* kind : {"raw", "tempered", "processed"}) {
    for (size_t i = 0; i < samples.size(); ++i) {
      const client::Sample& sample = samples[i].sample;
      const auto& words = kind[0] == 'r'   ? sample.raw_logprob
                          : kind[0] == 't' ? sample.tempered_logprob
                                           : sample.processed_logprob;
      lines[i].words.assign(words.begin(),
                            words.begin() + static_cast<ptrdiff_t>(lines[i].tokens.size()));
      lines[i].kind = kind[0] == 'r' ? "raw" : "processed";
    }
    TARE_RETURN_IF_ERROR(WriteLines(fmt::format("theta{}.rollout.{}.jsonl", version, kind), lines,
                                    &(*round)["rollout_kinds"][kind]));
  }
  return Ok();
}

Status Loop::WriteLines(const std::string& name, const std::vector<LogprobSequence>& lines,
                        Json* entry) {
  TARE_RETURN_IF_ERROR(WriteLogprobs(Env::Real(), out_ + "/" + name, lines));
  TARE_ASSIGN_OR_RETURN(const std::string bytes, Env::Real()->ReadFile(out_ + "/" + name));
  (*entry)["file"] = name;
  (*entry)["sha256"] = Hex(Sha256Of(bytes));
  return Ok();
}

Status Loop::PutMasters(const std::vector<Tensor>& from) {
  for (size_t i = 0; i < from.size(); ++i) {
    std::memcpy(trainer_->masters()[i].mutable_data(), from[i].data(),
                static_cast<size_t>(from[i].size_bytes()));
  }
  return trainer_->DeployMasters();
}

Json Executed(const trainer::Logprobs& p, int64_t start) {
  return Json{{"forwards", p.forwards}, {"launches", p.launches},
              {"rows", p.rows},         {"recorded", p.recorded},
              {"started_ns", start},    {"ended_ns", Env::Real()->MonotonicNs()}};
}

Status Loop::Compare(int64_t version, std::vector<Sampled>* samples, bool update_follows,
                     Json* round) {
  Event("compare", version);
  if (Faulty(kSnapshot)) {
    current_.clear();
    for (Tensor& master : trainer_->masters()) {
      TARE_ASSIGN_OR_RETURN(Tensor copy, master.Clone());
      (version == 0 ? theta0_ : current_).push_back(std::move(copy));
    }
    if (version > 0) TARE_RETURN_IF_ERROR(PutMasters(theta0_));
  }
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
  if (Faulty(kLastBit)) {
    for (auto& sequence : score.values) {
      for (float& v : sequence) {
        if (v > -0.125f) v = std::bit_cast<float>(std::bit_cast<uint32_t>(v) ^ 1u);
      }
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
  Json groups = Json::array();
  double total = 0;
  for (int64_t p = 0; p < config_.prompts; ++p) {
    std::vector<float> rewards;
    rewards.reserve(static_cast<size_t>(config_.group));
    for (int64_t n = 0; n < config_.group; ++n)
      rewards.push_back((*samples)[static_cast<size_t>(p * config_.group + n)].reward);
    const std::vector<float> advantages = GroupAdvantages(rewards, config_.norm_adv_by_std);
    std::set<std::vector<int32_t>> unique;
    Json words = Json::array();
    for (int64_t n = 0; n < config_.group; ++n) {
      const size_t i = static_cast<size_t>(p * config_.group + n);
      Sampled& s = (*samples)[i];
      s.advantage = advantages[static_cast<size_t>(n)];
      sequences_[i].advantage = s.advantage;
      words.push_back(fmt::format("0x{:08x}", std::bit_cast<uint32_t>(s.advantage)));
      unique.insert(s.sample.tokens);
      total += s.reward;
    }
    groups.push_back(
        Json{{"question", (*samples)[static_cast<size_t>(p * config_.group)].question.name},
             {"rewards", rewards},
             {"advantages", words},
             {"unique", unique.size()}});
  }
  (*round)["reward"] =
      Json{{"mean", total / static_cast<double>(samples->size())}, {"groups", groups}};

  Event("update", version);
  if (Faulty(kDieInUpdate)) ::raise(SIGKILL);
  const int64_t start = Env::Real()->MonotonicNs();
  // What the compare hashed: nothing has written to the weights since.
  const auto before_master = (*round).at("weights").at("trainer_master").get<std::string>();
  const auto before = (*round).at("weights").at("trainer_deployed").get<std::string>();
  int64_t valid = 0;
  for (const trainer::Sequence& s : sequences_)
    valid += std::count(s.mask.begin(), s.mask.end(), uint8_t{1});
  trainer::LossReport loss;
  if (valid > 0) {
    TARE_ASSIGN_OR_RETURN(
        loss, trainer_->Accumulate(sequences_, trainer::Loss::kPolicy, PolicyOf(config_),
                                   fmt::format("theta{}", version)));
  } else {
    // No loss, so no step; the forward is compared all the same, and the judge says what it was.
    TARE_ASSIGN_OR_RETURN(loss.logprobs,
                          trainer_->RecordedForward(sequences_, fmt::format("theta{}", version)));
  }
  if (!current_.empty()) TARE_RETURN_IF_ERROR(PutMasters(current_));
  double ratio_low = 1, ratio_high = 1;
  for (size_t i = 0; i < sequences_.size(); ++i) {
    for (size_t t = 0; t < sequences_[i].mask.size(); ++t) {
      if (sequences_[i].mask[t] == 0) continue;
      const double ratio = std::exp(static_cast<double>(loss.logprobs.values[i][t]) -
                                    static_cast<double>(sequences_[i].old_logprob[t]));
      ratio_low = std::min(ratio_low, ratio);
      ratio_high = std::max(ratio_high, ratio);
    }
  }
  if (!Faulty(kSkipRecorded)) {
    (*round)["paths"]["train"] = Executed(loss.logprobs, start);
    TARE_RETURN_IF_ERROR(
        WritePath(version, kPaths[2], *samples, sequences_, loss.logprobs.values, round));
  }
  const int64_t backward_end = Env::Real()->MonotonicNs();
  trainer::StepReport step;
  if (Faulty(kSkipStep) || valid == 0) {
    step.skipped = true;
    step.skipped_why = valid == 0 ? "no valid token" : "planted";
  } else {
    const float lr =
        Faulty(kZeroLr) ? 0.0f : trainer::LearningRate(schedule_, config_.lr, version + 1);
    TARE_ASSIGN_OR_RETURN(step, trainer_->Apply(lr, !Faulty(kMasterOnly)));
  }
  const int64_t stepped = Env::Real()->MonotonicNs();
  TARE_ASSIGN_OR_RETURN(const std::string after_master, trainer_->MasterHash());
  TARE_ASSIGN_OR_RETURN(const std::string after, trainer_->DeployedHash());
  const int64_t hashed = Env::Real()->MonotonicNs();
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
                          {"ratio_min", ratio_low},
                          {"ratio_max", ratio_high},
                          {"backward_kernels", loss.backward_launches},
                          {"arm", config_.arm},
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
                          {"optimizer_ns", stepped - backward_end},
                          {"hash_ns", hashed - stepped}});
  return Publish(version + 1, &updates_.back());
}

Status Loop::Publish(int64_t version, Json* update) {
  Event("publish", version);
  const int64_t start = Env::Real()->MonotonicNs();
  const std::string dir = fmt::format("{}/weights-theta{}", out_, version);
  TARE_RETURN_IF_ERROR(trainer::PublishWeights(Env::Real(), *trainer_, config_.model, dir,
                                               std::exchange(published_, "")));
  if (Faulty(kStaleTensor)) TARE_RETURN_IF_ERROR(PutOldTensor(dir, version));
  const int64_t written = Env::Real()->MonotonicNs();
  const auto sha256 = update->at("deployed_after").get<std::string>();
  Json answer;
  if (!Faulty(kNoPublish) && !Faulty(kSnapshot)) {
    // The engine resolves the path by itself: it must not depend on its working directory.
    char* absolute = ::realpath(dir.c_str(), nullptr);
    const std::string path = absolute == nullptr ? dir : absolute;
    std::free(absolute);
    std::string asked = sha256;
    if (Faulty(kStaleTensor)) {
      // Whoever forgets a tensor has hashed what was sent: only what the engine holds tells.
      TARE_ASSIGN_OR_RETURN(const Checkpoint sent, Checkpoint::Open(dir));
      TARE_ASSIGN_OR_RETURN(const WeightHash hash, HashWeights(sent, &pool_));
      asked = Hex(hash.digest);
    }
    TARE_ASSIGN_OR_RETURN(
        answer, client::SendJson(endpoint_, "POST", "/update_weights",
                                 Json{{"version", version}, {"path", path}, {"sha256", asked}}));
  }
  // The engine holds its own copy now; the next version is written over this one.
  if (!config_.keep_weights) published_ = dir;
  (*update)["publish"] = Json{{"version", version},
                              {"sha256", sha256},
                              {"engine", answer},
                              {"write_ns", written - start},
                              {"update_ns", Env::Real()->MonotonicNs() - written}};
  return Ok();
}

// Puts the first norm's old bytes into published weights, as a trainer does that forgets to send
// one.
Status Loop::PutOldTensor(const std::string& dir, int64_t version) {
  const std::string before =
      version == 1 ? config_.model : fmt::format("{}/weights-theta{}", out_, version - 1);
  const std::string file = dir + "/model.safetensors";
  TARE_ASSIGN_OR_RETURN(const SafetensorsFile old,
                        SafetensorsFile::Open(Env::Real(), before + "/model.safetensors"));
  std::vector<std::pair<std::string, Tensor>> tensors;
  {
    TARE_ASSIGN_OR_RETURN(const SafetensorsFile fresh, SafetensorsFile::Open(Env::Real(), file));
    for (const auto& entry : fresh.entries()) {
      const bool stale = entry.name.ends_with("layers.0.input_layernorm.weight");
      TARE_ASSIGN_OR_RETURN(const Tensor view, (stale ? old : fresh).Get(entry.name));
      TARE_ASSIGN_OR_RETURN(Tensor copy, view.Clone());
      tensors.emplace_back(entry.name, std::move(copy));
    }
  }
  TARE_RETURN_IF_ERROR(Env::Real()->Remove(file));
  return WriteSafetensors(Env::Real(), file, tensors, {{"format", "pt"}});
}

Status Loop::HeldOut(int64_t version, Json* round) {
  const bool due = version == 0 || version == config_.steps ||
                   (config_.eval_every > 0 && version % config_.eval_every == 0);
  if (config_.held_out == 0 || !due) return Ok();
  TARE_ASSIGN_OR_RETURN((*round)["held_out"], AskHeldOut(endpoint_, config_, *task_));
  std::fprintf(stderr, "held-out reward at theta%lld: %.4f\n", static_cast<long long>(version),
               (*round)["held_out"]["mean"].get<double>());
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
    TARE_RETURN_IF_ERROR(HeldOut(version, &round));
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

Result<std::string> ExecutableDigest() {
  TARE_ASSIGN_OR_RETURN(const auto file, Env::Real()->OpenReadable("/proc/self/exe"));
  return Hex(Sha256Of(file->bytes()));
}

Status RunWorker(const LoopConfig& config, uint16_t port, const std::string& out) {
  TARE_RETURN_IF_ERROR(CheckConfig(config));
  // What is freed goes back to the system: parameters and buffers are much larger than this, and
  // the C library would keep them where nothing of another size fits.
  ::mallopt(M_MMAP_THRESHOLD, 256 << 10);
  Loop loop(config, port, out);
  TARE_RETURN_IF_ERROR(loop.Run());
  if (Faulty(kDieAtExit)) ::raise(SIGKILL);
  if (Faulty(kHangAtExit)) ::pause();
  return Ok();
}

}  // namespace tare::rl
