#include "rl/rollout.h"

#include "base/env.h"
#include "rl/faults.h"

namespace tare::rl {

namespace client = engine::client;

uint64_t SampleSeed(uint64_t run, int64_t version, int64_t question, int64_t sample,
                    bool held_out) {
  return (run << 44) ^ (static_cast<uint64_t>(version) << 28) ^
         (static_cast<uint64_t>(question) << 12) ^ static_cast<uint64_t>(sample) ^
         (held_out ? uint64_t{1} << 63 : 0);
}

Result<std::vector<Sampled>> SampleAll(const client::Endpoint& endpoint, const LoopConfig& config,
                                       const Task& task, const std::vector<Question>& questions,
                                       int64_t version, int64_t first_question, int64_t count,
                                       bool held_out) {
  const bool same_seed = fault::Active(kSameSeed, fault::Side::kTrainer);
  std::vector<client::CompletionRequest> requests;
  std::vector<Sampled> samples;
  for (size_t p = 0; p < questions.size(); ++p) {
    for (int64_t n = 0; n < count; ++n) {
      client::CompletionRequest r;
      r.prompt = questions[p].prompt;
      r.max_tokens = static_cast<int32_t>(config.max_tokens);
      r.temperature = static_cast<float>(config.temperature);
      r.top_p = static_cast<float>(config.top_p);
      r.seed = SampleSeed(config.seed, version, first_question + static_cast<int64_t>(p),
                          same_seed ? 0 : n, held_out);
      Sampled s;
      s.question = questions[p];
      s.seed = *r.seed;
      s.index = n;
      samples.push_back(std::move(s));
      requests.push_back(std::move(r));
    }
  }
  auto answers = client::Complete(endpoint, requests);
  for (size_t i = 0; i < answers.size(); ++i) {
    if (!answers[i].ok())
      return answers[i].status().Annotate(fmt::format("sample {} of theta{}", i, version));
    if (answers[i]->size() != 1) {
      return DataLoss("sample {} of theta{}: {} choices came back; 1", i, version,
                      answers[i]->size());
    }
    samples[i].sample = std::move(answers[i]->front());
    const client::Sample& s = samples[i].sample;
    for (const auto* words : {&s.raw_logprob, &s.tempered_logprob, &s.processed_logprob}) {
      if (s.tokens.empty() || words->size() != s.tokens.size()) {
        return DataLoss("sample {} of theta{}: {} tokens with {} logprobs", i, version,
                        s.tokens.size(), words->size());
      }
    }
    samples[i].reward = task.Reward(samples[i].question, s.tokens);
  }
  return samples;
}

Result<Json> AskHeldOut(const client::Endpoint& endpoint, const LoopConfig& config,
                        const Task& task) {
  const int64_t start = Env::Real()->MonotonicNs();
  std::vector<Question> questions;
  for (int64_t i = 0; i < config.held_out; ++i) {
    TARE_ASSIGN_OR_RETURN(Question q, task.Ask(i, /*held_out=*/true));
    questions.push_back(std::move(q));
  }
  // In parts: each request is a connection.
  constexpr int64_t kAtOnce = 64;
  double sum = 0;
  int64_t samples = 0, tokens = 0;
  const int64_t part = std::max<int64_t>(1, kAtOnce / config.held_out_samples);
  for (int64_t from = 0; from < config.held_out; from += part) {
    const int64_t end = std::min(config.held_out, from + part);
    const std::vector<Question> some(questions.begin() + from, questions.begin() + end);
    // Version 0 in the seeds: what changes between two versions is the weights alone.
    TARE_ASSIGN_OR_RETURN(
        const std::vector<Sampled> answers,
        SampleAll(endpoint, config, task, some, 0, from, config.held_out_samples, true));
    for (const Sampled& s : answers) {
      sum += s.reward;
      ++samples;
      tokens += static_cast<int64_t>(s.sample.tokens.size());
    }
  }
  return Json{{"mean", sum / static_cast<double>(samples)},
              {"questions", config.held_out},
              {"samples", samples},
              {"tokens", tokens},
              {"started_ns", start},
              {"ended_ns", Env::Real()->MonotonicNs()}};
}

}  // namespace tare::rl
