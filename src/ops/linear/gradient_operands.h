#pragma once

// What the backwards of linear and grouped_linear check and read alike.

#include <string_view>

#include "base/status.h"
#include "ops/linear/gemm.h"
#include "ops/linear/linear.h"

namespace tare::ops::linear {

// Each gradient that is asked for needs its operand: dx the weight, dw the input, both dy.
// kInvalidArgument names the one that is missing.
inline Status CheckGradientOperands(std::string_view op, const void* dy, const void* x,
                                    const void* w, bool dx, bool dw) {
  if (dy == nullptr) return InvalidArgument("{}: dy is null", op);
  if (dx && w == nullptr) return InvalidArgument("{}: w (needed for dx) is null", op);
  if (dw && x == nullptr) return InvalidArgument("{}: x (needed for dw) is null", op);
  return Ok();
}

// An operand of a gradient's contraction: rounded to params.backward_operand as it is read.
inline gemm::Matrix GradientOperand(const Params& params, const void* data, DType dtype,
                                    int64_t stride) {
  gemm::Matrix m{.data = data, .dtype = dtype, .stride = stride};
  m.round_to_bf16 = params.backward_operand == DType::kBF16 && dtype != DType::kBF16;
  m.round_to_f16 = params.backward_operand == DType::kF16 && dtype != DType::kF16;
  return m;
}

}  // namespace tare::ops::linear
