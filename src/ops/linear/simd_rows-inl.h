// Rows of bf16, f16 or f32 to f32 and back, over Highway vectors: the conversions around every
// contraction kernel. Included once per SIMD target, between nothing: it opens its own namespace.

#if defined(TARE_OPS_LINEAR_SIMD_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TARE_OPS_LINEAR_SIMD_ROWS_INL_H_
#undef TARE_OPS_LINEAR_SIMD_ROWS_INL_H_
#else
#define TARE_OPS_LINEAR_SIMD_ROWS_INL_H_
#endif

#include <cstring>

#include "hwy/highway.h"
#include "ops/linear/gemm.h"

HWY_BEFORE_NAMESPACE();
namespace tare::ops::gemm {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DU = hn::ScalableTag<uint32_t>;
using VF = hn::Vec<DF>;
constexpr int64_t kL = static_cast<int64_t>(hn::MaxLanes(DF()));
static_assert(kL == 8 || kL == 16);

// f32 to bf16 bits in the low half of each 32-bit lane: nearest even, NaN becomes 0x7fff.
HWY_INLINE hn::Vec<DU> ToBf16Bits(VF v) {
  const DU du;
  const auto u = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(du, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(u, hn::Add(odd, hn::Set(du, 0x7fffu))));
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), hn::Set(du, 0x7fffu), rounded);
}

HWY_INLINE VF RoundToBf16(VF v) { return hn::BitCast(DF(), hn::ShiftLeft<16>(ToBf16Bits(v))); }

HWY_INLINE VF RoundToF16(VF v) {
  const hn::Rebind<hwy::float16_t, DF> d16;
  return hn::PromoteTo(DF(), hn::DemoteTo(d16, v));
}

// y[index ..] = round(src), NaN canonical. `kPast` stores past the caches: then y + index is
// aligned to 64 bytes, `count` fills whole lines, and the caller ends with hwy::FlushStream().
template <bool kPast = false>
HWY_INLINE void StoreRow(void* y, DType dtype, int64_t index, const float* src, int64_t count) {
  const DF df;
  const DU du;
  int64_t i = 0;
  if (dtype == DType::kF32) {
    float* out = static_cast<float*>(y) + index;
    const auto nan = hn::BitCast(df, hn::Set(du, 0x7fffffffu));
    for (; i + kL <= count; i += kL) {
      const auto loaded = hn::LoadU(df, src + i);
      const auto v = hn::IfThenElse(hn::IsNaN(loaded), nan, loaded);
      if constexpr (kPast) {
        hn::Stream(v, df, out + i);
      } else {
        hn::StoreU(v, df, out + i);
      }
    }
  } else if (dtype == DType::kBF16) {
    const hn::Rebind<uint16_t, DU> d16;
    uint16_t* out = static_cast<uint16_t*>(y) + index;
    const hn::Rebind<int32_t, DU> di;
    for (; i + kL <= count; i += kL) {
      const auto bits = ToBf16Bits(hn::LoadU(df, src + i));
      const auto v = hn::DemoteTo(d16, hn::BitCast(di, bits));
      if constexpr (kPast) {
        hn::Stream(v, d16, out + i);
      } else {
        hn::StoreU(v, d16, out + i);
      }
    }
  }
  for (; i < count; ++i) StoreRounded(y, dtype, index + i, src[i]);
}

// dst = f32 of `count` elements from data[at].
HWY_INLINE void LoadRow(const void* data, DType dtype, int64_t at, int64_t count, float* dst) {
  const DF df;
  const DU du;
  int64_t i = 0;
  if (dtype == DType::kBF16) {
    const uint16_t* src = static_cast<const uint16_t*>(data) + at;
    const hn::Rebind<uint16_t, DU> d16;
    for (; i + kL <= count; i += kL) {
      hn::StoreU(hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, src + i)))), df,
                 dst + i);
    }
  } else if (dtype == DType::kF32) {
    std::memcpy(dst, static_cast<const float*>(data) + at,
                static_cast<size_t>(count) * sizeof(float));
    return;
  } else if (dtype == DType::kF16) {
    const hwy::float16_t* src = static_cast<const hwy::float16_t*>(data) + at;
    const hn::Rebind<hwy::float16_t, DF> d16;
    for (; i + kL <= count; i += kL)
      hn::StoreU(hn::PromoteTo(df, hn::LoadU(d16, src + i)), df, dst + i);
  }
  for (; i < count; ++i) dst[i] = LoadAsF32(data, dtype, at + i);
}

}  // namespace HWY_NAMESPACE
}  // namespace tare::ops::gemm
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
