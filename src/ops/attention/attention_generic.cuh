#pragma once

// The matrix step of the generic kernels: a warp adds one group of 16 k to a 16 x 8 block, in the
// profile's step. Operands are callables a(row, k), b(k, column) of f32 values that the dtype holds
// exactly; speed is not promised.

#include "ops/attention/attention_gpu.cuh"
#include "ops/cuda/mma_sync.cuh"

namespace tare::ops::attention::gpu {

template <DType kDType>
__device__ __forceinline__ uint32_t Pack16(float low, float high) {
  if constexpr (kDType == DType::kF16) {
    const __half2 packed = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(packed);
  } else {
    return PackBf16(low, high);
  }
}

// Element e (0..3) of a lane's block: its row and column, the same in both profiles.
__device__ __forceinline__ int BlockRow(int e) {
  return static_cast<int>(threadIdx.x) % 32 / 4 + 8 * (e / 2);
}
__device__ __forceinline__ int BlockColumn(int e) {
  return static_cast<int>(threadIdx.x) % 4 * 2 + e % 2;
}

// d += the products of k = 0 .. count - 1 (at most 16), ascending.
template <DType kDType, bool kSm90, class A, class B>
__device__ __forceinline__ void GroupStep(float (&d)[4], int count, const A& a, const B& b) {
  if constexpr (kSm90) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4, q = static_cast<int>(threadIdx.x) % 4 * 2;
    const auto left = [&](int row, int k) { return k < count ? a(row, k) : 0.0f; };
    const auto right = [&](int k) { return k < count ? b(k, g) : 0.0f; };
    uint32_t fragment[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = g + 8 * (i % 2), k = q + 8 * (i / 2);
      fragment[i] = Pack16<kDType>(left(row, k), left(row, k + 1));
    }
    const uint32_t b0 = Pack16<kDType>(right(q), right(q + 1));
    const uint32_t b1 = Pack16<kDType>(right(q + 8), right(q + 9));
    if constexpr (kDType == DType::kF16) {
      sm90::MmaF16(d, fragment, b0, b1);
    } else {
      sm90::MmaBf16(d, fragment, b0, b1);
    }
  } else {
    // Never padded: a product of zeros would turn an accumulator of -0 into +0.
    for (int k = 0; k < count; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e) d[e] = __fmaf_rn(a(BlockRow(e), k), b(k, BlockColumn(e)), d[e]);
    }
  }
}

template <class F>
Status ForStep(DType dtype, bool sm90, const F& f) {
  switch (dtype) {
    case DType::kBF16:
      return sm90 ? f.template operator()<DType::kBF16, true>()
                  : f.template operator()<DType::kBF16, false>();
    case DType::kF16:
      return sm90 ? f.template operator()<DType::kF16, true>()
                  : f.template operator()<DType::kF16, false>();
    default:
      return f.template operator()<DType::kF32, false>();
  }
}

}  // namespace tare::ops::attention::gpu
