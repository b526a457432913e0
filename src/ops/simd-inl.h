// Vector loads, rounding stores and lane reductions shared by the row operators. Included once for
// each SIMD target, after hwy/highway.h. Elements of a row are f32 (float) or bf16 (uint16_t); what
// is computed on is always f32.

#if defined(TARE_OPS_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TARE_OPS_SIMD_INL_H_
#undef TARE_OPS_SIMD_INL_H_
#else
#define TARE_OPS_SIMD_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"

#if !HWY_NATIVE_FMA
#error "this Highway target has no fused multiply-add: two roundings have other bits"
#endif

HWY_BEFORE_NAMESPACE();
namespace tare::ops {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;
using DU = hn::RebindToUnsigned<DF>;
using DH = hn::Rebind<uint16_t, DF>;

HWY_INLINE HWY_MAYBE_UNUSED VF Load(const float* p) { return hn::LoadU(DF(), p); }
HWY_INLINE HWY_MAYBE_UNUSED VF Load(const uint16_t* p) {
  return hn::BitCast(DF(), hn::ShiftLeft<16>(hn::PromoteTo(DU(), hn::LoadU(DH(), p))));
}

// The first `n` elements, zeros after; reads no byte behind them.
template <typename T>
HWY_INLINE VF LoadN(const T* p, size_t n) {
  HWY_ALIGN T buffer[hn::MaxLanes(DF())] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return Load(buffer);
}

HWY_INLINE HWY_MAYBE_UNUSED VF CanonicalF32(VF v) {
  return hn::IfThenElse(hn::IsNaN(v), hn::BitCast(DF(), hn::Set(DU(), 0x7fffffffu)), v);
}
// Nearest even; a NaN becomes 0x7fff. The 16 bits lie in the low half of each lane.
HWY_INLINE HWY_MAYBE_UNUSED hn::Vec<DU> Bf16Bits(VF v) {
  const DU du;
  const auto bits = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), odd));
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), hn::Set(du, 0x7fffu), rounded);
}

HWY_INLINE HWY_MAYBE_UNUSED void Store(VF v, float* p) { hn::StoreU(CanonicalF32(v), DF(), p); }
HWY_INLINE HWY_MAYBE_UNUSED void Store(VF v, uint16_t* p) {
  hn::StoreU(hn::TruncateTo(DH(), Bf16Bits(v)), DH(), p);
}
template <typename T>
HWY_INLINE void StoreN(VF v, T* p, size_t n) {
  HWY_ALIGN T buffer[hn::MaxLanes(DF())];
  Store(v, buffer);
  std::memcpy(p, buffer, n * sizeof(T));
}

// The value that a store as T followed by a load gives.
HWY_INLINE HWY_MAYBE_UNUSED VF RoundAs(VF v, const float*) { return CanonicalF32(v); }
HWY_INLINE HWY_MAYBE_UNUSED VF RoundAs(VF v, const uint16_t*) {
  return hn::BitCast(DF(), hn::ShiftLeft<16>(Bf16Bits(v)));
}

// Calls body(i, n) for consecutive vectors of [0, count): n is the vector length except at the end.
// `load`/`store` in the body go through LoadPart/StorePart, which take the fast way for a whole
// one.
template <class Body>
HWY_INLINE void ForEachVector(int64_t count, const Body& body) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(DF()));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) body(i, lanes);
  if (i < count) body(i, count - i);
}
template <typename T>
HWY_INLINE VF LoadPart(const T* p, int64_t n) {
  return n == static_cast<int64_t>(hn::Lanes(DF())) ? Load(p) : LoadN(p, static_cast<size_t>(n));
}
template <typename T>
HWY_INLINE void StorePart(VF v, T* p, int64_t n) {
  if (n == static_cast<int64_t>(hn::Lanes(DF()))) {
    Store(v, p);
  } else {
    StoreN(v, p, static_cast<size_t>(n));
  }
}

// lane[j] + lane[j + L/2], then halves, down to one. `lane` is overwritten.
template <int L>
HWY_INLINE float LaneTree(float* lane) {
  for (int half = L / 2; half >= 1; half /= 2) {
    for (int j = 0; j < half; ++j) lane[j] += lane[j + half];
  }
  return lane[0];
}

// lanes(L) of fma(a, b, .) over f32 scratch rows whose length was padded to a multiple of L. Pads
// that change nothing: a = -0, b = +0, whose product -0 is neutral in every sum.
template <int L>
HWY_INLINE float LanesDot(const float* a, const float* b, int64_t padded) {
  const DF d;
  constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(d));
  constexpr int kVectors = L / kLanes < 8 ? static_cast<int>(L / kLanes) : 8;
  HWY_ALIGN float lane[L];
  // At most eight accumulators at once, so that they stay in registers on AVX2 as well.
  for (int64_t chunk = 0; chunk < L; chunk += kVectors * kLanes) {
    VF s[kVectors];
    for (int v = 0; v < kVectors; ++v) s[v] = hn::Zero(d);
    for (int64_t i = chunk; i < padded; i += L) {
      for (int v = 0; v < kVectors; ++v) {
        s[v] = hn::MulAdd(hn::LoadU(d, a + i + v * kLanes), hn::LoadU(d, b + i + v * kLanes), s[v]);
      }
    }
    for (int v = 0; v < kVectors; ++v) hn::Store(s[v], d, lane + chunk + v * kLanes);
  }
  return LaneTree<L>(lane);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace tare::ops
HWY_AFTER_NAMESPACE();

#endif  // TARE_OPS_SIMD_INL_H_
