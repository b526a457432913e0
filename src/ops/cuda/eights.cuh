#pragma once

// Row operators by eights: 16 bytes of bf16 a thread at a time.

#include <initializer_list>

#include "ops/cuda/rows.cuh"

namespace tare::ops::cuda {

// Eight consecutive elements, 16 or twice 16 bytes.
__device__ __forceinline__ void Widen8(const uint4& raw, float (&v)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    v[2 * e] = __uint_as_float(words[e] << 16);
    v[2 * e + 1] = __uint_as_float(words[e] & 0xffff0000u);
  }
}
__device__ __forceinline__ void Store8(const float (&v)[8], uint16_t* p) {
  *reinterpret_cast<uint4*>(p) = make_uint4(Bf16Pair(v[0], v[1]), Bf16Pair(v[2], v[3]),
                                            Bf16Pair(v[4], v[5]), Bf16Pair(v[6], v[7]));
}
__device__ __forceinline__ void Store8(const float (&v)[8], float* p) {
  Store4({v[0], v[1], v[2], v[3]}, p);
  Store4({v[4], v[5], v[6], v[7]}, p + 4);
}
__device__ __forceinline__ void Load8(const uint16_t* p, float (&v)[8]) {
  Widen8(*reinterpret_cast<const uint4*>(p), v);
}
__device__ __forceinline__ void Load8(const float* p, float (&v)[8]) {
  float low[4], high[4];
  Widen4(LoadRaw4(p), low);
  Widen4(LoadRaw4(p + 4), high);
#pragma unroll
  for (int e = 0; e < 4; ++e) v[e] = low[e], v[4 + e] = high[e];
}

// Host side --------------------------------------------------------------------------------------

inline bool Aligned16(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(),
                     [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; });
}

// For grids of one CTA a multiprocessor, or a few.
inline Result<unsigned> Multiprocessors() {
  int device = 0, count = 0;
  TARE_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  TARE_CUDA_RETURN_IF_ERROR(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return static_cast<unsigned>(count);
}

}  // namespace tare::ops::cuda
