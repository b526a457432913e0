#pragma once

// Verifiable tasks: prompts as token IDs and a reward that a program computes.
//   pattern     for a model without skills (MINI): prompts of random tokens; the reward is the
//   share of
//               response tokens whose id has the parity of the question. Differs between samples.
//   arithmetic  for a chat model: "What is 3 + 4?" through the chat template; reward 1 when the
//   first
//               number of the answer is right.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "models/chat_template.h"
#include "models/config.h"
#include "models/tokenizer.h"
#include "tensor/checkpoint.h"

namespace tare::rl {

struct Question {
  std::string name;
  std::string text;  // for people
  std::vector<int32_t> prompt;
  int64_t answer = 0;  // pattern: the parity; arithmetic: the number
};

class Task {
 public:
  virtual ~Task() = default;
  virtual const char* name() const = 0;
  // Question `index` of the training stream, or of the held-out one: the two are disjoint.
  virtual Result<Question> Ask(int64_t index, bool held_out) const = 0;
  // In [0, 1].
  virtual float Reward(const Question& question, std::span<const int32_t> response) const = 0;
  virtual std::string Show(std::span<const int32_t> response) const = 0;
};

Result<std::unique_ptr<Task>> MakeTask(const std::string& name, Env* env,
                                       const Checkpoint& checkpoint,
                                       const models::ModelConfig& config, uint64_t seed);

}  // namespace tare::rl
