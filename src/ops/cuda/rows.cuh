#pragma once

// What the row operators' kernels share: loads and rounding stores of f32 and bf16 with the bits of
// ops/simd-inl.h, lane reductions in the order of numerics/lanes.h, and launch helpers.
//
// Element types are float and uint16_t (the bits of a bf16); what is computed on is always f32.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <span>

#include "numerics/fp.h"
#include "ops/cuda/refusal.h"
#include "ops/rows.h"
#include "ops/units.h"
#include "tensor/cuda_status.h"

namespace tare::ops::cuda {

using numerics::Add;
using numerics::Div;
using numerics::Fma;
using numerics::Mul;
using numerics::Sub;

inline constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ float Widen(float x) { return x; }
__device__ __forceinline__ float Widen(uint16_t x) {
  return __uint_as_float(static_cast<uint32_t>(x) << 16);
}
// Nearest even; a NaN becomes 0x7fff, which is what the conversion instruction gives.
__device__ __forceinline__ uint16_t Bf16Bits(float x) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}
__device__ __forceinline__ uint32_t Bf16Pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, 4);
  return bits;
}
__device__ __forceinline__ void Put(float x, float* p) { *p = numerics::Canonical(x); }
__device__ __forceinline__ void Put(float x, uint16_t* p) { *p = Bf16Bits(x); }
// The value that a store as T followed by a load gives.
__device__ __forceinline__ float RoundAs(float x, const float*) { return numerics::Canonical(x); }
__device__ __forceinline__ float RoundAs(float x, const uint16_t*) { return Widen(Bf16Bits(x)); }
__device__ __forceinline__ float ThroughBf16(float x) { return Widen(Bf16Bits(x)); }

// An element of a buffer whose dtype is known at run time alone: weights, which are read often and
// come from a cache.
__device__ __forceinline__ float LoadAny(const void* p, bool f32, int64_t i) {
  return f32 ? static_cast<const float*>(p)[i] : Widen(static_cast<const uint16_t*>(p)[i]);
}

// Four consecutive elements as they lie in memory.
template <typename T>
struct Raw4;
template <>
struct Raw4<float> {
  float4 v;
};
template <>
struct Raw4<uint16_t> {
  uint2 v;
};
template <typename T>
__device__ __forceinline__ Raw4<T> LoadRaw4(const T* p) {  // p aligned to four elements
  Raw4<T> raw;
  raw.v = *reinterpret_cast<const decltype(raw.v)*>(p);
  return raw;
}
__device__ __forceinline__ void Widen4(const Raw4<float>& raw, float (&v)[4]) {
  v[0] = raw.v.x, v[1] = raw.v.y, v[2] = raw.v.z, v[3] = raw.v.w;
}
__device__ __forceinline__ void Widen4(const Raw4<uint16_t>& raw, float (&v)[4]) {
  v[0] = __uint_as_float(raw.v.x << 16), v[1] = __uint_as_float(raw.v.x & 0xffff0000u);
  v[2] = __uint_as_float(raw.v.y << 16), v[3] = __uint_as_float(raw.v.y & 0xffff0000u);
}
__device__ __forceinline__ Raw4<float> Round4(const float (&v)[4], const float*) {
  Raw4<float> raw;
  raw.v = make_float4(numerics::Canonical(v[0]), numerics::Canonical(v[1]),
                      numerics::Canonical(v[2]), numerics::Canonical(v[3]));
  return raw;
}
__device__ __forceinline__ Raw4<uint16_t> Round4(const float (&v)[4], const uint16_t*) {
  Raw4<uint16_t> raw;
  raw.v = make_uint2(Bf16Pair(v[0], v[1]), Bf16Pair(v[2], v[3]));
  return raw;
}
template <typename T>
__device__ __forceinline__ void StoreRaw4(const Raw4<T>& raw, T* p) {
  *reinterpret_cast<decltype(raw.v)*>(p) = raw.v;
}
template <typename T>
__device__ __forceinline__ void Store4(const float (&v)[4], T* p) {
  StoreRaw4(Round4(v, p), p);
}

// How a warp holds a chunk of 128 elements of a row, four to a thread. In a chunk, element j
// belongs to lane j of lanes(128). kVec: thread t has elements 4t .. 4t + 3 (addresses aligned to
// four, a width that is a multiple of four); else t, t + 32, t + 64, t + 96.
template <bool kVec>
struct Chunk {
  static __device__ __forceinline__ int Index(int lane, int e) {
    return kVec ? 4 * lane + e : lane + 32 * e;
  }
  // Elements behind `count` (of this chunk) read as `pad`.
  template <typename T>
  static __device__ __forceinline__ void Load(const T* chunk, int64_t count, int lane,
                                              float (&v)[4], float pad = 0.0f) {
    if constexpr (kVec) {
      if (4 * lane < count) {
        Widen4(LoadRaw4(chunk + 4 * lane), v);
      } else {
        v[0] = v[1] = v[2] = v[3] = pad;
      }
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = lane + 32 * e;
        v[e] = i < count ? Widen(chunk[i]) : pad;
      }
    }
  }
  template <typename T>
  static __device__ __forceinline__ void Store(const float (&v)[4], T* chunk, int64_t count,
                                               int lane) {
    if constexpr (kVec) {
      if (4 * lane < count) Store4(v, chunk + 4 * lane);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = lane + 32 * e;
        if (i < count) Put(v[e], chunk + i);
      }
    }
  }
  static __device__ __forceinline__ void LoadWeight(const void* w, bool f32, int64_t first,
                                                    int64_t count, int lane, float (&v)[4]) {
    if constexpr (kVec) {
      v[0] = v[1] = v[2] = v[3] = 0.0f;
      if (4 * lane >= count) return;
      if (f32) {
        Widen4(LoadRaw4(static_cast<const float*>(w) + first + 4 * lane), v);
      } else {
        Widen4(LoadRaw4(static_cast<const uint16_t*>(w) + first + 4 * lane), v);
      }
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = lane + 32 * e;
        v[e] = i < count ? LoadAny(w, f32, first + i) : 0.0f;
      }
    }
  }
  // The tree over the 128 lanes, each folded in `acc`; the sum in every thread.
  static __device__ __forceinline__ float Tree(float (&acc)[4]) {
    if constexpr (kVec) {
#pragma unroll
      for (int half = 16; half >= 1; half /= 2) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[e] = Add(acc[e], __shfl_xor_sync(kAllLanes, acc[e], half));
      }
      return Add(Add(acc[0], acc[2]), Add(acc[1], acc[3]));
    } else {
      float s = Add(Add(acc[0], acc[2]), Add(acc[1], acc[3]));
#pragma unroll
      for (int half = 16; half >= 1; half /= 2) s = Add(s, __shfl_xor_sync(kAllLanes, s, half));
      return s;
    }
  }
};

// The tree over lanes(32), one lane a thread.
__device__ __forceinline__ float TreeOf32(float lane) {
#pragma unroll
  for (int half = 16; half >= 1; half /= 2)
    lane = Add(lane, __shfl_xor_sync(kAllLanes, lane, half));
  return lane;
}

// Row and place in the row of item `at` of rows of `per_row` items. 32-bit division where it fits,
// which is a fraction of a 64-bit one.
struct RowPlace {
  int64_t row, in_row;
};
__device__ __forceinline__ RowPlace PlaceOf(int64_t at, int64_t per_row) {
  if (at <= 0xffffffffll && per_row <= 0xffffffffll) {
    const uint32_t a = static_cast<uint32_t>(at), p = static_cast<uint32_t>(per_row);
    const uint32_t row = a / p;
    return {row, a - row * p};
  }
  const int64_t row = at / per_row;
  return {row, at - row * per_row};
}

__device__ __forceinline__ void Refuse(unsigned long long* word, Refusal what, int64_t row,
                                       int64_t column = 0) {
  const auto r = static_cast<unsigned long long>(row > 0xffffffffll ? 0xffffffffll : row);
  const auto c = static_cast<unsigned long long>(column > 0xffffff ? 0xffffff : column);
  atomicMin(word, r << 32 | c << 8 | static_cast<unsigned long long>(what));
}

// Host side --------------------------------------------------------------------------------------

inline cudaStream_t Stream(const Ctx& ctx) { return static_cast<cudaStream_t>(ctx.stream); }

inline Status Launched() {
  TARE_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  return Ok();
}

// Blocks for `items` of which a block takes `per_block` at a time; kernels walk the rest in a loop.
inline unsigned GridFor(int64_t items, int64_t per_block, int64_t most = 132 * 64) {
  return static_cast<unsigned>(
      std::max<int64_t>(1, std::min<int64_t>((items + per_block - 1) / per_block, most)));
}

// True when four elements at a time may be read there.
inline bool Aligned4(const void* p, DType dtype) {
  return p == nullptr ||
         reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(4 * SizeOf(dtype)) == 0;
}

// Dynamic shared memory beyond 48 KiB must be asked for once for each kernel.
template <class Kernel>
Status AllowShared(Kernel* kernel, size_t bytes) {
  if (bytes <= size_t{48} << 10) return Ok();
  TARE_CUDA_RETURN_IF_ERROR(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  return Ok();
}
inline constexpr size_t kMostShared = size_t{224} << 10;

// Token units as a kernel's parameter. More of them go in several launches, in order.
struct UnitList {
  static constexpr int kMost = 240;
  int count;
  struct {
    int32_t begin, rows;
  } unit[kMost];
};
template <class Launch>
Status ForUnits(std::span<const TokenUnit> units, const Launch& launch) {
  for (size_t first = 0; first < units.size(); first += UnitList::kMost) {
    UnitList list;
    list.count = static_cast<int>(std::min<size_t>(UnitList::kMost, units.size() - first));
    for (int i = 0; i < list.count; ++i) {
      const TokenUnit& u = units[first + static_cast<size_t>(i)];
      list.unit[i] = {static_cast<int32_t>(u.begin), static_cast<int32_t>(u.rows)};
    }
    TARE_RETURN_IF_ERROR(launch(list));
  }
  return Ok();
}
// UnitList holds 32-bit rows.
inline Status CheckDeviceRows(const char* op, int64_t rows) {
  if (rows <= int64_t{0x7fffffff}) return Ok();
  return Unsupported("{}: {} rows on CUDA; at most 2^31 - 1", op, rows);
}

}  // namespace tare::ops::cuda
