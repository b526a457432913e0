#pragma once

// fp8_linear: y = (x * x_scale) (W * w_scale)^T (+ bias) with e4m3 operands and block scales.
// Forward only: the gradient of a quantised layer goes straight through to `linear` with its bf16
// weight.
//
// Contract: K in blocks of 128 (the last one may be short: the rest reads as zero).
//   partial_b = chain from +0 over the block by the profile's step (sm90-mma: four fp8 steps of 32)
//   acc = fma(partial_b, x_scale[m, b] * w_scale[n / 128, b], acc), blocks ascending, from +0 per
//   segment; segments S of whole blocks, balanced tree; bias by one f32 add; one rounding.

#include <cstdint>

#include "base/status.h"
#include "ops/contract.h"
#include "ops/op.h"
#include "tensor/dtype.h"

namespace tare::ops::fp8_linear {

TARE_FAULT(kOneChain, "fp8_linear.one_chain", "fp8_linear", "C3,C5",
           "one chain over all of K that is scaled once: no promotion to f32 after 128 products");
TARE_FAULT(kScalesInTurn, "fp8_linear.scales_in_turn", "fp8_linear", "C3,C5",
           "a block's sum is multiplied by one scale after the other, with two roundings");

inline constexpr int64_t kBlock = 128;

struct Params {
  int64_t n = 0;
  int64_t k = 0;
  DType x_dtype = DType::kE4M3;
  DType w_dtype = DType::kE4M3;
  DType y_dtype = DType::kBF16;  // bf16, f16 or f32
  bool bias = false;
  DType bias_dtype = DType::kBF16;
  int32_t segments = 1;  // 1, 2, 4, 8; S > 1 needs k a multiple of S * 128
};

struct Args {
  int64_t m = 0;
  const void* x = nullptr;         // [m, k] e4m3, dense
  const float* x_scale = nullptr;  // [m, ceil(k / 128)]
  const void* w = nullptr;         // [n, k] e4m3, dense
  const float* w_scale = nullptr;  // [ceil(n / 128), ceil(k / 128)]
  const void* bias = nullptr;      // [n]
  void* y = nullptr;               // [m, n], dense
};

// Every choice of these params that can move a bit.
Contract ContractOf(const Params& params, Profile profile);
Status Check(const Params& params);
size_t WorkspaceBytes(const Ctx& ctx, const Params& params, int64_t m);
Status Forward(const Ctx& ctx, const Params& params, const Args& args);

#ifdef TARE_WITH_CUDA
size_t WorkspaceBytesCuda(const Ctx& ctx, const Params& params, int64_t m);
Status ForwardCuda(const Ctx& ctx, const Params& params, const Args& args);
#endif

}  // namespace tare::ops::fp8_linear
