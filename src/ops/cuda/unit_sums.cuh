#pragma once

// Losses on the device: the lanes(32) sum of each unit, added to one f64 in the order of the units.

#include "ops/cuda/rows.cuh"

namespace tare::ops::cuda {

// *loss += f64(lanes(32) of value(t) over a unit's rows), units in order. One block of 1,024.
template <class Value>
__device__ __forceinline__ void AddUnitSums(const UnitList& units, double* loss,
                                            const Value& value) {
  __shared__ float sum[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int first = 0; first < units.count; first += 32) {
    const int u = first + warp;
    float acc = 0.0f;
    if (u < units.count) {
      for (int i = lane; i < units.unit[u].rows; i += 32)
        acc = Add(acc, value(int64_t{units.unit[u].begin} + i));
    }
    acc = TreeOf32(acc);
    if (lane == 0) sum[warp] = acc;
    __syncthreads();
    if (threadIdx.x == 0) {
      double total = *loss;
      for (int k = 0; k < 32 && first + k < units.count; ++k)
        total = numerics::Add(total, static_cast<double>(sum[k]));
      *loss = total;
    }
    __syncthreads();
  }
}

__device__ __forceinline__ bool Finite(float x) {
  return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

}  // namespace tare::ops::cuda
