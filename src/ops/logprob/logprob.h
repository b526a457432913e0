#pragma once

// The logprob of one token a row: log-softmax with gather, temperature and entropy.
//   z = f32(logit) / T                       IEEE division; T = 1 divides by nothing
//   eight leaves of the vocabulary, blocks of 128 ids, quad-lane sums, the tree of leaves
//   logprob = (z[target] - m) - log(l);  entropy = log(l) - u / l,  u = sum of e * (z - m)
// The logits' dtype is part of the contract: bf16 logits and f32 logits are two contracts.
// T must be finite and above 0: greedy scoring (T = 0) is the caller's declared rule, not a
// division. A NaN logit gives the canonical NaN in every output of its row. A target of -1 marks a
// row without a target: its logprob is +0, its gradient +0 everywhere.

#include <cstdint>

#include "ops/contract.h"
#include "ops/op.h"

namespace tare::ops::logprob {

TARE_FAULT(kLogitsBf16, "logprob.logits_bf16", "logprob", "C2,C5",
           "logits are rounded to bf16 before the log-softmax");
TARE_FAULT(kTemperatureLate, "logprob.temperature_after_cast", "logprob", "C5",
           "logits are divided by the temperature and rounded to bf16 before the log-softmax");
TARE_FAULT(kTemperatureMissing, "logprob.temperature_missing", "logprob", "C5",
           "the temperature is not applied");
TARE_FAULT(kApproximateExp, "logprob.approximate_exp", "logprob", "C3,C5",
           "the sum uses a short polynomial for exp2");
TARE_FAULT(kOneLeaf, "logprob.one_leaf", "logprob", "C5",
           "the vocabulary is one leaf instead of eight");
TARE_FAULT(kPaddedVocab, "logprob.padded_vocabulary", "logprob", "C5",
           "columns beyond the vocabulary count in the denominator as logit 0");

inline constexpr int64_t kLeaves = 8;
inline constexpr int64_t kBlock = 128;

struct Params {
  int64_t vocab = 0;                 // V
  DType logits_dtype = DType::kF32;  // bf16 or f32
  DType grad_dtype = DType::kBF16;   // of dlogits
};

struct Args {
  int64_t rows = 0;                    // T
  const void* logits = nullptr;        // [T, V], row t at logits + t * stride
  int64_t stride = 0;                  // elements; 0 means V
  const int32_t* targets = nullptr;    // [T], each in [-1, V)
  const float* temperature = nullptr;  // [T]; null means 1 everywhere
  float* logprob = nullptr;            // [T]
  float* entropy = nullptr;            // [T]; may be null
  float* max = nullptr;                // [T], m for backward; may be null
  float* log_sum = nullptr;            // [T], log(l) for backward; may be null
};

struct BackwardArgs {
  int64_t rows = 0;
  const void* logits = nullptr;  // as in forward
  int64_t stride = 0;
  // A part of the vocabulary: logits and dlogits are [T, ids], the columns of IDs
  // [id_begin, id_begin + ids). ids 0 means all of it.
  int64_t id_begin = 0;
  int64_t ids = 0;
  const int32_t* targets = nullptr;
  const float* temperature = nullptr;
  const float* max = nullptr;       // [T], saved
  const float* log_sum = nullptr;   // [T], saved
  const float* entropy = nullptr;   // [T], saved; needed with dentropy
  const float* dlogprob = nullptr;  // [T]
  const float* dentropy = nullptr;  // [T]; may be null
  void* dlogits = nullptr;          // [T, V] or [T, ids], grad_dtype
  int64_t dstride = 0;              // 0 means dense
};

Contract ContractOf(const Params& params);
Status Forward(const Ctx& ctx, const Params& params, const Args& args);
Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::logprob
