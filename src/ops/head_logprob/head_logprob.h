#pragma once

// The language-model head fused with its logprob: the same bits as `linear` followed by `logprob`,
// but never more logits in memory than one tile of rows (forward) or one sequence unit by one
// vocabulary leaf (backward). dlogits are recomputed logits' gradients, rounded to `dtype` (the
// backward operand) before both contractions.

#include <cstdint>
#include <span>

#include "ops/contract.h"
#include "ops/linear/linear.h"
#include "ops/logprob/logprob.h"
#include "ops/op.h"
#include "ops/units.h"

namespace tare::ops::head_logprob {

struct Params {
  int64_t hidden = 0;                // H
  int64_t vocab = 0;                 // V
  DType dtype = DType::kBF16;        // of x and w
  DType logits_dtype = DType::kF32;  // the head's output rounding: bf16 or f32
  DType grad_dtype = DType::kBF16;   // of dx
};

struct Args {
  int64_t rows = 0;                              // T
  const void* x = nullptr;                       // [T, H]
  const void* w = nullptr;                       // [V, H]; may be null when `packed` is given
  const linear::PackedWeight* packed = nullptr;  // CPU: optional
  const int32_t* targets = nullptr;              // [T], -1: none
  const float* temperature = nullptr;            // [T]; null means 1
  float* logprob = nullptr;                      // [T]
  float* entropy = nullptr;                      // [T]; may be null
  float* max = nullptr;                          // [T], saved; may be null
  float* log_sum = nullptr;                      // [T], saved; may be null
};

struct BackwardArgs {
  int64_t rows = 0;
  const void* x = nullptr;  // [T, H]
  const void* w = nullptr;  // [V, H]; needed even when forward had it packed
  const int32_t* targets = nullptr;
  const float* temperature = nullptr;
  const float* max = nullptr;  // saved
  const float* log_sum = nullptr;
  const float* entropy = nullptr;   // saved; needed with dentropy
  const float* dlogprob = nullptr;  // [T]
  const float* dentropy = nullptr;  // [T]; may be null
  void* dx = nullptr;               // [T, H], grad_dtype: S = 8 over the vocabulary leaves
  float* dw = nullptr;              // [V, H], main gradient, added to; may be null
  std::span<const TokenUnit> units;
};

Contract ContractOf(const Params& params, Profile profile);
// What a call on a device needs in ctx.workspace: one tile of rows by the vocabulary (forward), one
// sequence unit by one vocabulary leaf and four partial sums of dx (backward). 0 on the CPU.
size_t WorkspaceBytes(const Ctx& ctx, const Params& params, int64_t rows);
size_t BackwardWorkspaceBytes(const Ctx& ctx, const Params& params, int64_t rows);
Status Forward(const Ctx& ctx, const Params& params, const Args& args);
Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::head_logprob
