#pragma once

// RMSNorm of each head of q or k, in f32 by lanes(32):
//   s = lanes(32) of fma(x, x, .);  r = 1 / sqrt(fma(s, 1/D, eps));  y = dtype((x * r) * w)
// Rows may be strided, so that q and k are normalised inside a fused qkv buffer.

#include <cstdint>
#include <span>

#include "ops/contract.h"
#include "ops/op.h"
#include "ops/units.h"

namespace tare::ops::headnorm {

struct Params {
  int64_t heads = 0;           // N
  int64_t head_dim = 0;        // D
  DType dtype = DType::kBF16;  // of x and y
  DType weight_dtype = DType::kBF16;
  DType grad_dtype = DType::kBF16;  // of dy and dx
  float eps = 1e-6f;
  bool unit_offset = false;  // multiply by 1 + w
};

struct Args {
  int64_t rows = 0;         // T
  const void* x = nullptr;  // [T, N, D], row t at x + t * x_stride
  int64_t x_stride = 0;     // elements; 0 means N * D
  const void* w = nullptr;  // [D], weight_dtype
  void* y = nullptr;        // [T, N, D]; may be x with the same stride
  int64_t y_stride = 0;
  float* rstd = nullptr;  // [T, N]; may be null
};

struct BackwardArgs {
  int64_t rows = 0;
  const void* x = nullptr;  // [T, N, D]: the input of forward
  int64_t x_stride = 0;
  const void* w = nullptr;      // [D]
  const float* rstd = nullptr;  // [T, N]
  const void* dy = nullptr;     // [T, N, D], grad_dtype
  int64_t dy_stride = 0;
  void* dx = nullptr;  // [T, N, D], grad_dtype; may be dy
  int64_t dx_stride = 0;
  float* dw = nullptr;               // [D], main gradient, added to
  std::span<const TokenUnit> units;  // for dw: lanes(32) over a unit's tokens for each head, then
                                     // the heads by the tree of halves (see contract)
};

Contract ContractOf(const Params& params);
// With this much in ctx.workspace the weight's gradient runs over heads side by side; without it
// more slowly. 0 on the CPU.
size_t BackwardWorkspaceBytes(const Ctx& ctx, const Params& params, int64_t units);
Status Forward(const Ctx& ctx, const Params& params, const Args& args);
Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::headnorm
