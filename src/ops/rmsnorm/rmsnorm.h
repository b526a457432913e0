#pragma once

// RMSNorm over the hidden size, alone or with the residual add in front of it:
//   h = residual_dtype(f32(x) + f32(residual))       one f32 add, one rounding; h is what is stored
//   s = lanes(128) of fma(h, h, .);  r = 1 / sqrt(fma(s, 1/H, eps))
//   y = dtype((h * r) * w)                           w + 1 in f32 in Gemma's form
// The norm reads the *stored* (rounded) sum, so what follows depends on residual_out alone. Without
// `add_residual`, h is x.

#include <cstdint>
#include <span>

#include "ops/contract.h"
#include "ops/op.h"
#include "ops/units.h"

namespace tare::ops::rmsnorm {

TARE_FAULT(kUnroundedSum, "rmsnorm.unrounded_sum", "rmsnorm", "C3,C5",
           "the norm reads the f32 residual sum before it is rounded");
TARE_FAULT(kCastBeforeAdd, "rmsnorm.cast_before_residual_add", "rmsnorm", "C3,C5",
           "operands of the residual add are rounded to bf16 before the add instead of after it");
TARE_FAULT(kEpsilon, "rmsnorm.epsilon", "rmsnorm", "C3,C5", "the epsilon is ten times too large");
TARE_FAULT(kLateCast, "rmsnorm.late_cast", "rmsnorm", "C3,C5",
           "x * r is rounded to the output dtype before the multiply by the weight");
TARE_FAULT(kReversed, "rmsnorm.order_reversed", "rmsnorm", "C3,C5",
           "the sum of squares runs over the row from its end");
TARE_FAULT(kSplitFma, "rmsnorm.fma_split", "rmsnorm", "C3,C5",
           "the square is rounded before it is added to the sum");
TARE_FAULT(kPaddedRows, "rmsnorm.sum_over_padded_rows", "rmsnorm", "C7",
           "the weight's gradient also sums the rows between the units");

struct Params {
  int64_t hidden = 0;          // H
  DType dtype = DType::kBF16;  // of x and y
  DType weight_dtype = DType::kBF16;
  DType residual_dtype = DType::kBF16;  // of residual and residual_out
  DType grad_dtype = DType::kBF16;      // of dy, dresidual_out and dx
  float eps = 1e-5f;
  bool add_residual = false;
  bool unit_offset = false;  // Gemma: multiply by 1 + w
};

struct Args {
  int64_t rows = 0;                // T
  const void* x = nullptr;         // [T, H], dtype
  const void* residual = nullptr;  // [T, H], residual_dtype; null unless add_residual
  const void* w = nullptr;         // [H], weight_dtype
  void* y = nullptr;               // [T, H], dtype; may be x
  void* residual_out =
      nullptr;            // [T, H], residual_dtype; may be residual; null unless add_residual
  float* rstd = nullptr;  // [T], r for backward; may be null
};

struct BackwardArgs {
  int64_t rows = 0;
  const void* h = nullptr;      // [T, H]: residual_out (residual_dtype) with add_residual, else x
  const void* w = nullptr;      // [H], weight_dtype
  const float* rstd = nullptr;  // [T]
  const void* dy = nullptr;     // [T, H], grad_dtype
  const void* dresidual_out =
      nullptr;          // [T, H], grad_dtype: what else flows into residual_out; may be null
  void* dx = nullptr;   // [T, H], grad_dtype: the gradient of x, and of residual; may be
                        // dy or dresidual_out
  float* dw = nullptr;  // [H], main gradient, added to
  std::span<const TokenUnit> units;  // for dw
};

Contract ContractOf(const Params& params);
Status Forward(const Ctx& ctx, const Params& params, const Args& args);
Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::rmsnorm
