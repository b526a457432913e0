#pragma once

// What a serving engine does to one row of logits beside the draw: bias and bans before it, the
// list of the most likely tokens after it. Host memory, one row; order: value descending, id
// ascending, +0 and -0 tie, as everywhere.

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "ops/op.h"
#include "tensor/dtype.h"

namespace tare::ops::sampling {

// out[i] = f32(logits[i]); out[id] = out[id] + bias (one f32 add each); out[id] = -inf for banned
// ids. kInvalidArgument for an id outside [0, vocab) or a bias that is NaN or +inf.
Status EditRow(const void* logits, DType dtype, int64_t vocab,
               std::span<const std::pair<int32_t, float>> bias, std::span<const int32_t> banned,
               float* out);

struct TopEntry {
  int32_t token = -1;
  float logprob = 0.0f;
};

struct RowList {
  std::vector<TopEntry> top;    // the k most likely, best first
  float target_logprob = 0.0f;  // of `target`, when it is not -1
  int32_t target_rank = 0;      // 1 for the most likely
};

// Log-softmax (docs/ops/logprob.md, T = 1) of the k best ids and of `target` (-1: none): the same
// bits as ops::logprob gives for each. kInvalidArgument for a NaN logit or k outside [0, vocab].
Result<RowList> ListRow(const Ctx& ctx, const void* logits, DType dtype, int64_t vocab, int32_t k,
                        int32_t target);

}  // namespace tare::ops::sampling
