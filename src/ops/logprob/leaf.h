#pragma once

// The pieces of the vocabulary log-softmax that logprob, its fused form and sampling share.

#include <cstdint>

#include "tensor/dtype.h"

namespace tare::ops::logprob {

// What a run of ids contributes: its maximum, the sum of e = exp2((z - m) * log2e) and, when asked
// for, the sum of e * (z - m). An empty run has m = -inf and sums of +0.
struct Partial {
  float m;
  float l;
  float u;
};

// Both by the contract: blocks of 128 ids from `begin`, quad-lane sums, blocks ascending. `logits`
// points at id 0 of a row of `dtype` (f32 or bf16). `temperature` 1 divides by nothing.
Partial LeafOf(const void* logits, DType dtype, float temperature, int64_t begin, int64_t end,
               bool entropy);

// The tree of neighbours over eight leaves; a maximum of -0 becomes +0.
Partial TreeOfLeaves(const Partial leaves[8]);

// Ids of leaf i of eight: [begin, end), empty behind the vocabulary.
inline int64_t LeafSize(int64_t vocab) { return (vocab + 7) / 8; }
inline int64_t LeafBegin(int64_t vocab, int64_t leaf) {
  const int64_t at = leaf * LeafSize(vocab);
  return at < vocab ? at : vocab;
}

}  // namespace tare::ops::logprob
