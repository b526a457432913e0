#pragma once

// Verifiable tasks: prompts as token IDs and a reward that a program computes.
//   pattern     for a model without skills (MINI): prompts of random tokens; the reward is the
//   share
//               of response tokens whose id is even. Differs between samples, and can be learnt.
//   arithmetic  for a chat model: sums of 1 to 29 through the chat template, after one worked
//               example; reward 1 when the last number of the answer is exactly the sum.

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
  int64_t answer = 0;  // pattern: the wanted parity; arithmetic: the sum
};

class Task {
 public:
  virtual ~Task() = default;
  virtual const char* name() const = 0;
  // Question `index` of the training stream, or of the held-out one: the two are disjoint. The
  // held-out ones do not depend on the seed.
  virtual Result<Question> Ask(int64_t index, bool held_out) const = 0;
  // In [0, 1].
  virtual float Reward(const Question& question, std::span<const int32_t> response) const = 0;
  virtual std::string Show(std::span<const int32_t> response) const = 0;
};

// `prompt_tokens`: of the pattern task.
Result<std::unique_ptr<Task>> MakeTask(const std::string& name, Env* env,
                                       const Checkpoint& checkpoint,
                                       const models::ModelConfig& config, uint64_t seed,
                                       int64_t prompt_tokens);

}  // namespace tare::rl
