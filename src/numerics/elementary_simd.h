// The elementary functions over Highway vectors, with the bits of numerics/elementary.h on every
// target. Include it after hwy/highway.h (and after foreach_target.h in a file compiled for several
// targets), and call from between HWY_BEFORE_NAMESPACE and HWY_AFTER_NAMESPACE:
//
//   namespace num = tare::numerics::HWY_NAMESPACE;
//   const hn::ScalableTag<float> d;
//   y = num::Exp2(d, x);
//
// `d` is a tag of f32 with at least two lanes. No #pragma once: once per target.

#include "hwy/highway.h"

#if defined(TARE_NUMERICS_ELEMENTARY_SIMD_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TARE_NUMERICS_ELEMENTARY_SIMD_H_
#undef TARE_NUMERICS_ELEMENTARY_SIMD_H_
#else
#define TARE_NUMERICS_ELEMENTARY_SIMD_H_
#endif

#include <cstdint>

#if !HWY_NATIVE_FMA
#error "this Highway target has no fused multiply-add: two roundings have other bits"
#endif

HWY_BEFORE_NAMESPACE();
namespace tare::numerics::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace simd_internal {

template <class D, class T, class TI>
struct VectorOps {
  using DI = hn::RebindToSigned<D>;
  using F = hn::Vec<D>;
  using I = hn::Vec<DI>;
  using M = hn::Mask<D>;
  static HWY_INLINE F Set(T v) { return hn::Set(D(), v); }
  static HWY_INLINE I SetI(TI v) { return hn::Set(DI(), v); }
  static HWY_INLINE F Fma(F a, F b, F c) { return hn::MulAdd(a, b, c); }
  static HWY_INLINE F NegFma(F a, F b, F c) { return hn::NegMulAdd(a, b, c); }
  static HWY_INLINE F Add(F a, F b) { return hn::Add(a, b); }
  static HWY_INLINE F Sub(F a, F b) { return hn::Sub(a, b); }
  static HWY_INLINE F Mul(F a, F b) { return hn::Mul(a, b); }
  static HWY_INLINE F Div(F a, F b) { return hn::Div(a, b); }
  static HWY_INLINE I Bits(F x) { return hn::BitCast(DI(), x); }
  static HWY_INLINE F FromBits(I x) { return hn::BitCast(D(), x); }
  static HWY_INLINE I AddI(I a, I b) { return hn::Add(a, b); }
  static HWY_INLINE I SubI(I a, I b) { return hn::Sub(a, b); }
  template <int kBits>
  static HWY_INLINE I Shl(I a) {
    return hn::ShiftLeft<kBits>(a);
  }
  template <int kBits>
  static HWY_INLINE I Sar(I a) {
    return hn::ShiftRight<kBits>(a);
  }
  static HWY_INLINE M Lt(F a, F b) { return hn::Lt(a, b); }
  static HWY_INLINE M Eq(F a, F b) { return hn::Eq(a, b); }
  static HWY_INLINE F If(M m, F a, F b) { return hn::IfThenElse(m, a, b); }
  static HWY_INLINE F Abs(F a) { return hn::Abs(a); }
  static HWY_INLINE F CopySign(F magnitude, F sign) { return hn::CopySign(magnitude, sign); }
};

template <class D>
struct VectorF64 : VectorOps<D, double, int64_t> {
  using Base = VectorOps<D, double, int64_t>;
  using typename Base::DI;
  using typename Base::F;
  using typename Base::I;
  static constexpr int64_t kCanonicalNan = 0x7fffffffffffffff;
  static HWY_INLINE F PowerOfTwo(I n) {
    return Base::FromBits(hn::ShiftLeft<52>(hn::Add(n, hn::Set(DI(), 1023))));
  }
  static HWY_INLINE hn::Mask<D> TestBit(I a, int bit) {
    const I one = hn::Set(DI(), int64_t{1} << bit);
    return hn::RebindMask(D(), hn::TestBit(a, one));
  }
};

template <class D>
struct VectorF32 : VectorOps<D, float, int32_t> {
  using Base = VectorOps<D, float, int32_t>;
  using typename Base::DI;
  using typename Base::F;
  using typename Base::I;
  static constexpr int32_t kCanonicalNan = 0x7fffffff;
  static HWY_INLINE F PowerOfTwo(I n) {
    return Base::FromBits(hn::ShiftLeft<23>(hn::Add(n, hn::Set(DI(), 127))));
  }
  static HWY_INLINE I AndMask(hn::Mask<D> m, I a) {
    return hn::IfThenElseZero(hn::RebindMask(DI(), m), a);
  }
  template <class Op>
  static HWY_INLINE F Widened(F x) {
    const hn::Half<D> dh;
    const hn::RebindToFloat<hn::RepartitionToWide<DI>> dw;  // f64, half as many lanes
    using W = VectorF64<hn::RebindToFloat<hn::RepartitionToWide<DI>>>;
    const auto lo = Op::template Call<W>(hn::PromoteTo(dw, hn::LowerHalf(dh, x)));
    const auto hi = Op::template Call<W>(hn::PromoteTo(dw, hn::UpperHalf(dh, x)));
    return hn::Combine(D(), hn::DemoteTo(dh, hi), hn::DemoteTo(dh, lo));
  }
};

#define TARE_FN HWY_INLINE
#include "numerics/elementary.inc"
#undef TARE_FN

}  // namespace simd_internal

template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp2(D, V x) {
  return simd_internal::Exp2Of<simd_internal::VectorF32<D>>(x);
}
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp2P(D, V x) {
  return simd_internal::Exp2POf<simd_internal::VectorF32<D>>(x);
}
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp(D, V x) {
  return simd_internal::ExpOf<simd_internal::VectorF32<D>>(x);
}
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Sigmoid(D, V x) {
  return simd_internal::SigmoidOrSilu<simd_internal::VectorF32<D>, false>(x);
}
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Silu(D, V x) {
  return simd_internal::SigmoidOrSilu<simd_internal::VectorF32<D>, true>(x);
}

#define TARE_NUMERICS_VIA_F64(Name)                                                         \
  template <class D, class V = hn::Vec<D>>                                                  \
  HWY_INLINE V Name(D, V x) {                                                               \
    return simd_internal::ViaF64<simd_internal::VectorF32<D>, simd_internal::Via##Name>(x); \
  }
TARE_NUMERICS_VIA_F64(Log2)
TARE_NUMERICS_VIA_F64(Log)
TARE_NUMERICS_VIA_F64(Log1p)
TARE_NUMERICS_VIA_F64(Expm1)
TARE_NUMERICS_VIA_F64(Sin)
TARE_NUMERICS_VIA_F64(Cos)
TARE_NUMERICS_VIA_F64(Tanh)
TARE_NUMERICS_VIA_F64(Erf)
TARE_NUMERICS_VIA_F64(Gelu)
TARE_NUMERICS_VIA_F64(GeluTanh)
TARE_NUMERICS_VIA_F64(Softplus)
#undef TARE_NUMERICS_VIA_F64

}  // namespace tare::numerics::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
