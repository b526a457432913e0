#pragma once

// Device code that the attention kernels share: which run a CTA works on, where a key lies, loads
// and stores in any dtype.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ops/attention/attention_gpu.h"
#include "ops/attention/attention_step.h"

namespace tare::ops::attention::gpu {

constexpr float kInfinity = __builtin_huge_valf();

// The run that item `item` belongs to when run r has units(r) items, and the item's index inside
// it. Items are counted by a grid, so that all of them fit 32 bits. Every lane of the warp gets the
// same answer; run < 0 when there are fewer items.
struct Place {
  int run, index;
};
template <class Units>
__device__ __forceinline__ Place Locate(int num_runs, int item, const Units& units) {
  if (num_runs == 1) return {item < static_cast<int>(units(0)) ? 0 : -1, item};
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int base = 0; base < num_runs; base += 32) {
    const int own = base + lane < num_runs ? static_cast<int>(units(base + lane)) : 0;
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int left = __shfl_up_sync(0xffffffff, sum, step);
      if (lane >= step) sum += left;
    }
    const unsigned past = __ballot_sync(0xffffffff, item < sum);
    if (past != 0) {
      const int at = __ffs(static_cast<int>(past)) - 1;
      return {base + at, item - __shfl_sync(0xffffffff, sum - own, at)};
    }
    item -= __shfl_sync(0xffffffff, sum, 31);
  }
  return {-1, 0};
}

__device__ __forceinline__ int64_t FlatRows(const Run& run, int group) {
  return run.q_rows * group;
}

// Row of the packed buffer, or of all pages' slots, that holds a key.
__device__ __forceinline__ int64_t KeyRow(const Forward& f, const Run& run, int key) {
  if (f.block_table == nullptr) return run.kv_begin + key;
  const int page = key / f.page_size;
  return static_cast<int64_t>(f.block_table[run.block_row * f.max_pages + page]) * f.page_size +
         (key - page * f.page_size);
}

template <DType kDType>
__device__ __forceinline__ float LoadElement(const void* data, int64_t at) {
  if constexpr (kDType == DType::kBF16)
    return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]);
  if constexpr (kDType == DType::kF16) return __half2float(static_cast<const __half*>(data)[at]);
  return static_cast<const float*>(data)[at];
}
template <DType kDType>
__device__ __forceinline__ float RoundElement(float v) {
  if constexpr (kDType == DType::kBF16) return __bfloat162float(__float2bfloat16_rn(v));
  if constexpr (kDType == DType::kF16) return __half2float(__float2half_rn(v));
  return v;
}
template <DType kDType>
__device__ __forceinline__ void StoreElement(void* data, int64_t at, float v) {
  if constexpr (kDType == DType::kBF16) {
    static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16_rn(v);
  } else if constexpr (kDType == DType::kF16) {
    // A NaN of one's own: the canonical one of this format.
    static_cast<uint16_t*>(data)[at] =
        v != v ? uint16_t{0x7fff} : __half_as_ushort(__float2half_rn(v));
  } else {
    static_cast<float*>(data)[at] = numerics::Canonical(v);
  }
}

__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 packed = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(packed);
}

// Rescale of two references, which are integers: the exact power of two without exp2's polynomial.
__device__ __forceinline__ float RescaleReference(float from, float to) {
  const float x = __fsub_rn(from, to);
  if (x <= 0.0f && x >= -126.0f) return __int_as_float((__float2int_rn(x) + 127) << 23);
  return numerics::Exp2(x);
}

// The end of a row: the sink logit joins (r, l), then the factors of O.
struct RowFactors {
  float f;        // O is multiplied by this first, where there is a sink
  float inverse;  // then by this, + 0
};
__device__ __forceinline__ RowFactors EndFactors(float& r, float& l, const float* sink, int head) {
  RowFactors end;
  end.f = 1.0f;
  const bool no_number = r != r;
  if (sink != nullptr) {
    const float t2 = __fmul_rn(sink[head], kLog2e);
    const float top = numerics::MaxOf(r, t2);
    end.f = Rescale(r, top);
    l = __fmaf_rn(l, end.f, Rescale(t2, top));
    r = top;
  }
  // A NaN reference is a row with a NaN score: the kernels that add exponents as integers lose it
  // elsewhere.
  end.inverse = no_number ? numerics::CanonicalNan() : __fdiv_rn(1.0f, l);
  return end;
}
// lse2 of what EndFactors leaves.
__device__ __forceinline__ float EndLse2(float r, float l) {
  return numerics::Canonical(__fadd_rn(r, numerics::Log2(l)));
}
struct RowEnd : RowFactors {
  float lse2;
};
__device__ __forceinline__ RowEnd EndRow(float r, float l, const float* sink, int head) {
  RowEnd end;
  static_cast<RowFactors&>(end) = EndFactors(r, l, sink, head);
  end.lse2 = EndLse2(r, l);
  return end;
}

// How two neighbouring splits meet: (r, l) takes in (rs, ls); O = fma(Os, b, O * a). A side that
// saw nothing has reference -inf, l = O = +0.
struct Meeting {
  float a, b;
};
__device__ __forceinline__ Meeting Meet(float& r, float& l, float rs, float ls) {
  const float top = numerics::MaxOf(r, rs);
  Meeting m;
  if (top == -kInfinity) {
    m.a = m.b = 1.0f;
  } else {
    m.a = RescaleReference(r, top);
    m.b = RescaleReference(rs, top);
  }
  l = __fmaf_rn(ls, m.b, __fmul_rn(l, m.a));
  r = top;
  return m;
}

// The same for the two rows of each lane of a warp, without a branch for each: references that are
// no further than 126 apart, nearly always, meet by exact powers of two.
__device__ __forceinline__ void MeetRows(float (&r)[2], float (&l)[2], const float (&rs)[2],
                                         const float (&ls)[2], float (&a)[2], float (&b)[2]) {
  float top[2], from[2], from_s[2];
  bool near = true;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    top[half] = fmaxf(r[half], rs[half]);
    from[half] = __fsub_rn(r[half], top[half]);
    from_s[half] = __fsub_rn(rs[half], top[half]);
    near = near && from[half] >= -126.0f && from_s[half] >= -126.0f;  // not for inf - inf
  }
  if (__all_sync(0xffffffff, near)) {
    constexpr float kMagic = 12582912.0f + 127.0f;  // adding leaves the exponent in the last bits
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      a[half] = __int_as_float(__float_as_int(__fadd_rn(from[half], kMagic)) << 23);
      b[half] = __int_as_float(__float_as_int(__fadd_rn(from_s[half], kMagic)) << 23);
      l[half] = __fmaf_rn(ls[half], b[half], __fmul_rn(l[half], a[half]));
      r[half] = top[half];
    }
    return;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Meeting m = Meet(r[half], l[half], rs[half], ls[half]);
    a[half] = m.a;
    b[half] = m.b;
  }
}

// 16 bytes as one store: a uint4 assigned through a cast pointer becomes four.
__device__ __forceinline__ void StoreGlobal16(void* to, const uint32_t (&x)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

}  // namespace tare::ops::attention::gpu
