#pragma once

// Sampling through the engine: what was asked, what came back with its bits, and its reward.

#include <cstdint>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "engine/client/client.h"
#include "rl/config.h"
#include "rl/task.h"

namespace tare::rl {

struct Sampled {
  Question question;
  engine::client::Sample sample;
  uint64_t seed = 0;
  int64_t index = 0;  // in its group
  float reward = 0;
  float advantage = 0;
};

// The seed of one sample: of (run, purpose and version, question, sample), so reproducible and
// distinct (H16).
uint64_t SampleSeed(uint64_t run, int64_t version, int64_t question, int64_t sample, bool held_out);

// `samples` answers to each question, in the order of the questions. `first_question` numbers them
// for the seeds. A choice without tokens or without a logprob for each is kDataLoss.
Result<std::vector<Sampled>> SampleAll(const engine::client::Endpoint& endpoint,
                                       const LoopConfig& config, const Task& task,
                                       const std::vector<Question>& questions, int64_t version,
                                       int64_t first_question, int64_t samples, bool held_out);

// {"mean", "questions", "samples", "tokens", "started_ns", "ended_ns"} over the held-out questions,
// with the same seeds at every version.
Result<Json> AskHeldOut(const engine::client::Endpoint& endpoint, const LoopConfig& config,
                        const Task& task);

}  // namespace tare::rl
