// attention_step.h's functions over Highway vectors, once per SIMD target. Include it after
// hwy/highway.h, outside HWY_BEFORE_NAMESPACE.

#include "numerics/elementary_simd.h"
#include "ops/attention/attention_step.h"

#if defined(TARE_OPS_ATTENTION_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TARE_OPS_ATTENTION_SIMD_INL_H_
#undef TARE_OPS_ATTENTION_SIMD_INL_H_
#else
#define TARE_OPS_ATTENTION_SIMD_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace tare::ops::attention::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D, class V = hn::Vec<D>>
HWY_INLINE V ScoreOffset(D d, V r) {
  return hn::Mul(hn::Sub(hn::Set(d, 100.0f), r), hn::Set(d, 0x1p-7f));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V Probability(D d, V s, V c7, V offset) {
  const V zero = hn::Zero(d), one = hn::Set(d, 1.0f), scale = hn::Set(d, 128.0f);
  V y = hn::MulAdd(s, c7, offset);
  y = hn::IfThenElse(hn::Lt(zero, y), y, zero);
  y = hn::IfThenElse(hn::Lt(y, one), y, one);
  const V magic = hn::Set(d, 12582912.0f - 100.0f);
  const V t = hn::MulAdd(y, scale, magic);
  const V f = hn::MulAdd(y, scale, hn::Neg(hn::Sub(t, magic)));
  V p = hn::Set(d, 0x1.c2a254p-5f);
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.f00c4cp-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.62f5fap-1f));
  p = hn::MulAdd(p, f, one);
  const hn::RebindToSigned<D> di;
  return hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::BitCast(di, t))));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V BackwardProbability(D d, V s, V c, V minus_lse2) {
  const V x = hn::MulAdd(s, c, minus_lse2), least = hn::Set(d, -125.0f);
  return numerics::HWY_NAMESPACE::Exp2P(d, hn::IfThenElse(hn::Lt(x, least), least, x));
}

// The larger; a NaN in x counts as -inf.
template <class V>
HWY_INLINE V Larger(V top, V x) {
  return hn::IfThenElse(hn::Lt(top, x), x, top);
}

}  // namespace tare::ops::attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
