#pragma once

// Gated activation of the MLP: y = dtype(act(g) * u), all in f32, one rounding. g and u are the two
// halves of one fused projection, or two buffers.

#include <cstdint>
#include <string_view>

#include "ops/contract.h"
#include "ops/op.h"

namespace tare::ops::gate {

TARE_FAULT(kApproximateExp, "gate.approximate_exp", "gate", "C3,C5",
           "the activation uses a short polynomial for exp");
TARE_FAULT(kEarlyCast, "gate.cast_before_multiply", "gate", "C3,C5",
           "the activation is rounded to bf16 before the multiply by up");
TARE_FAULT(kDetached, "gate.detached_forward", "gate", "C7",
           "the gradient treats the activation as a constant");

enum class Activation : uint8_t { kSilu, kGeluTanh, kGeluErf };
std::string_view ActivationName(Activation activation);  // "silu", "gelu-tanh", "gelu-erf"

struct Params {
  int64_t width = 0;  // I
  Activation activation = Activation::kSilu;
  DType dtype = DType::kBF16;  // of g, u and y
  DType grad_dtype = DType::kBF16;
};

struct Args {
  int64_t rows = 0;            // T
  const void* gate = nullptr;  // [T, I], row t at gate + t * stride
  const void* up = nullptr;    // [T, I], row t at up + t * stride; gate + I in a fused buffer
  int64_t stride = 0;          // elements; 0 means I, a fused buffer has 2 * I
  void* y = nullptr;           // [T, I], dense
};

struct BackwardArgs {
  int64_t rows = 0;
  const void* gate = nullptr;  // as in forward
  const void* up = nullptr;
  int64_t stride = 0;
  const void* dy = nullptr;  // [T, I], grad_dtype, dense
  void* dgate = nullptr;     // [T, I], grad_dtype, row t at dgate + t * dstride
  void* dup = nullptr;
  int64_t dstride = 0;  // 0 means I
};

Contract ContractOf(const Params& params);
Status Forward(const Ctx& ctx, const Params& params, const Args& args);
Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::gate
