#pragma once

// What the two halves of `tare backward` (backward_facts.cc, gradient_layers.cc) walk over: the
// same model, the same sequences, the same context.

#include <cstdint>
#include <vector>

#include "models/forward.h"
#include "models/model.h"
#include "ops/op.h"
#include "tools/backward_facts.h"

namespace tare {

// Two sequences, the same on every machine; the gradient that arrives is a multiple of 1/64, which
// bf16 holds exactly.
struct BackwardQuestions {
  std::vector<std::vector<int32_t>> tokens, targets;  // tokens without the last, which is a target
  std::vector<float> upstream;

  BackwardQuestions(int64_t vocab, int32_t salt);
  models::Batch MakeBatch() const;  // spans into this object
};

// The subject with activations in `dtype` (bf16 as the checkpoint has it, or f32).
Result<models::Model> BackwardModel(ThreadPool* pool, const BackwardSubject& subject, DType dtype);

// On the trainer's side.
ops::Ctx BackwardCtx(ThreadPool* pool, ops::LaunchTrace* trace = nullptr);

}  // namespace tare
