#pragma once

// Elementwise cast, one nearest-even rounding (tensor/convert.h states NaN, saturation and infinity
// rules). Backward is straight-through: the gradient is cast to the source's gradient dtype.

#include <cstdint>

#include "ops/contract.h"
#include "ops/op.h"

namespace tare::ops::cast {

struct Params {
  DType from = DType::kF32;  // f32, bf16 or f16
  DType to = DType::kBF16;   // f32, bf16 or f16
};

struct Args {
  int64_t count = 0;
  const void* x = nullptr;  // [count], from
  void* y = nullptr;        // [count], to
};

Contract ContractOf(const Params& params);
Status Forward(const Ctx& ctx, const Params& params, const Args& args);
// x is dy in `to`, y is dx in `from`.
Status Backward(const Ctx& ctx, const Params& params, const Args& args);

}  // namespace tare::ops::cast
