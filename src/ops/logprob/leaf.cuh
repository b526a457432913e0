#pragma once

// The vocabulary log-softmax on the device: the pieces of ops/logprob/leaf.h for one warp a leaf.

#include <type_traits>

#include "numerics/elementary.h"
#include "ops/cuda/rows.cuh"
#include "ops/logprob/leaf.h"

namespace tare::ops::logprob {

inline constexpr float kLog2eCuda = 0x1.715476p0f;
inline constexpr int kVocabBlock = 128;

__device__ __forceinline__ float MinusInfinity() { return __uint_as_float(0xff800000u); }
__device__ __forceinline__ bool Empty(const Partial& p) {
  return p.m == MinusInfinity() && p.l == 0.0f;
}

// Both by the contract, one the past.
__device__ inline Partial MergeCuda(const Partial& a, const Partial& b) {
  using namespace numerics;  // NOLINT(google-build-using-namespace)
  if (Empty(b)) return a;
  if (Empty(a)) return b;
  const Partial& one = b.m > a.m ? b : a;
  const Partial& two = b.m > a.m ? a : b;
  const float shift = one.m == two.m ? 0.0f : Sub(two.m, one.m);
  const float factor = Exp2(Mul(shift, kLog2eCuda));
  return {one.m, Fma(two.l, factor, one.l), Fma(Fma(two.l, shift, two.u), factor, one.u)};
}

__device__ inline Partial TreeOfLeavesCuda(const Partial* leaves) {
  Partial p[8];
  for (int i = 0; i < 8; ++i) p[i] = leaves[i];
  for (int step = 1; step < 8; step *= 2) {
    for (int i = 0; i + step < 8; i += 2 * step) p[i] = MergeCuda(p[i], p[i + step]);
  }
  return p[0];
}

// Ids [begin, end) of a row, by one warp; the result in every thread. Eight blocks of 128 at a
// time: quad g of the warp has block g, and thread q of it the columns 8b + 2q and 8b + 2q + 1, as
// the quad-lane sum asks. `at(id)` gives f32(logit); kPairs: at2(id) gives two of them at once.
template <bool kEntropy, bool kPairs, class At, class At2>
__device__ Partial LeafOfWarp(const At& at, const At2& at2, float temperature, int64_t begin,
                              int64_t end) {
  using namespace numerics;  // NOLINT(google-build-using-namespace)
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  Partial past = {MinusInfinity(), 0.0f, 0.0f};
  for (int64_t first = begin; first < end; first += 8 * kVocabBlock) {
    const int64_t block = first + g * kVocabBlock;
    float z[32];
    const auto load = [&](auto whole) {
      const int count = decltype(whole)::value
                            ? kVocabBlock
                            : static_cast<int>(min(end - block, int64_t{kVocabBlock}));
#pragma unroll
      for (int b = 0; b < 16; ++b) {
        const int i = 8 * b + 2 * q;
        if constexpr (!decltype(whole)::value) z[2 * b] = z[2 * b + 1] = MinusInfinity();
        if constexpr (kPairs) {
          if (decltype(whole)::value || i < count) {  // an even count: both or none
            const float2 v = at2(block + i);
            z[2 * b] = v.x, z[2 * b + 1] = v.y;
          }
        } else {
          if (decltype(whole)::value || i < count) z[2 * b] = at(block + i);
          if (decltype(whole)::value || i + 1 < count) z[2 * b + 1] = at(block + i + 1);
        }
      }
    };
    if (first + 8 * kVocabBlock <= end) {
      load(std::true_type());
    } else {
      load(std::false_type());
    }
    if (temperature != 1.0f) {
#pragma unroll
      for (float& v : z) v = Div(v, temperature);
    }
    float m = z[0];
#pragma unroll
    for (int i = 1; i < 32; ++i) m = fmaxf(m, z[i]);  // a NaN comes back through the sum
    m = fmaxf(m, __shfl_xor_sync(cuda::kAllLanes, m, 1));
    m = fmaxf(m, __shfl_xor_sync(cuda::kAllLanes, m, 2));
    m = Add(m, 0.0f);  // -0 becomes +0
    // A block of -inf alone: differences from 0 give e = 0.
    const float base = m == MinusInfinity() ? 0.0f : m;
    float l = 0.0f, u = 0.0f;
    const auto fold = [&](auto near) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const float difference = Sub(z[i], base);
        const float x = Mul(difference, kLog2eCuda);
        float e;
        if constexpr (decltype(near)::value) {
          e = Exp2Near(x);
        } else {
          e = Exp2(x);
        }
        l = Add(l, e);
        // Near differences have no e of 0, and so no product of 0 and infinity.
        if constexpr (kEntropy) {
          const bool nothing = !decltype(near)::value && e == 0.0f;
          u = Add(u, nothing ? 0.0f : Mul(e, difference));
        }
      }
    };
    // Differences of at least -80 need no care for subnormal results. A NaN or -inf among the
    // logits fails the comparison, and so does an infinite maximum.
    bool close = base <= 0x1p127f;
#pragma unroll
    for (int i = 0; i < 32; ++i) close = close && z[i] >= base - 80.0f;
    if (close) {
      fold(std::true_type());
    } else {
      fold(std::false_type());
    }
    l = Add(l, __shfl_xor_sync(cuda::kAllLanes, l, 1));
    l = Add(l, __shfl_xor_sync(cuda::kAllLanes, l, 2));
    if constexpr (kEntropy) {
      u = Add(u, __shfl_xor_sync(cuda::kAllLanes, u, 1));
      u = Add(u, __shfl_xor_sync(cuda::kAllLanes, u, 2));
    }
    // Blocks ascending. Most groups of eight have no maximum above the past's: each is then scaled
    // and added, and nothing of the past is.
    if (__all_sync(cuda::kAllLanes, close && m <= past.m)) {
      const float shift = Sub(m, past.m);
      const float factor = Exp2(Mul(shift, kLog2eCuda));
      if constexpr (kEntropy) u = Fma(l, shift, u);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float f = __shfl_sync(cuda::kAllLanes, factor, 4 * k);
        past.l = Fma(__shfl_sync(cuda::kAllLanes, l, 4 * k), f, past.l);
        if constexpr (kEntropy) past.u = Fma(__shfl_sync(cuda::kAllLanes, u, 4 * k), f, past.u);
      }
      continue;
    }
    // What scales each merge is known from the maxima: one exponential a quad.
    float before = past.m, shift = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float mk = __shfl_sync(cuda::kAllLanes, m, 4 * k);
      const bool higher = mk > before;
      const float s = before == mk ? 0.0f : higher ? Sub(before, mk) : Sub(mk, before);
      if (k == g) shift = s;
      if (higher) before = mk;
    }
    const float factor = Exp2(Mul(shift, kLog2eCuda));
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const Partial next = {__shfl_sync(cuda::kAllLanes, m, 4 * k),
                            __shfl_sync(cuda::kAllLanes, l, 4 * k),
                            kEntropy ? __shfl_sync(cuda::kAllLanes, u, 4 * k) : 0.0f};
      const float f = __shfl_sync(cuda::kAllLanes, factor, 4 * k);
      const float s = kEntropy ? __shfl_sync(cuda::kAllLanes, shift, 4 * k) : 0.0f;
      if (Empty(next)) continue;
      if (Empty(past)) {
        past = next;
        continue;
      }
      const bool higher = next.m > past.m;
      const Partial one = higher ? next : past;
      const Partial two = higher ? past : next;
      past.m = one.m;
      past.l = Fma(two.l, f, one.l);
      if constexpr (kEntropy) past.u = Fma(Fma(two.l, s, two.u), f, one.u);
    }
  }
  return past;
}

}  // namespace tare::ops::logprob
