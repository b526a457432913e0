#pragma once

// Activations to e4m3 with one scale for each row and block of 128 along K, as fp8_linear reads
// them:
//   amax = max |x| over the block;  scale = amax / 448 (IEEE), 1 for a block of zeros
//   q = e4m3(x / scale), nearest even, saturating at 448
// A scale belongs to one row alone: no neighbour moves it. A NaN or infinity is kInvalidArgument
// that names row and column. Backward is straight-through: dx = round(dq), the gradient of q *
// scale.

#include <cstdint>

#include "ops/contract.h"
#include "ops/op.h"

namespace tare::ops::quantize {

TARE_FAULT(kPerTensor, "quantize.per_tensor_scale", "quantize", "C3",
           "one scale for the whole batch, the maximum over all rows");
TARE_FAULT(kHalfAway, "quantize.round_half_away", "quantize", "C3,C5",
           "halfway cases round away from zero instead of to even");

inline constexpr int64_t kBlock = 128;

struct Params {
  int64_t width = 0;           // K
  DType dtype = DType::kBF16;  // of x: bf16 or f32
  DType grad_dtype = DType::kBF16;
};

struct Args {
  int64_t rows = 0;         // T
  const void* x = nullptr;  // [T, K]
  uint8_t* q = nullptr;     // [T, K], e4m3
  float* scale = nullptr;   // [T, ceil(K / 128)]
};

struct BackwardArgs {
  int64_t rows = 0;
  const void* dy = nullptr;  // [T, K], grad_dtype: the gradient of q * scale
  void* dx = nullptr;        // [T, K], grad_dtype
};

Contract ContractOf(const Params& params);
Status Forward(const Ctx& ctx, const Params& params, const Args& args);
Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::quantize
