#pragma once

// Elementary functions on f32: the same instruction sequence on every host and device, so the same
// bits. No libm, no table, no hardware approximation, no branch on a value.
//
// Errors are in units in the last place of the exact result. A NaN argument, and one outside the
// domain, gives the canonical NaN 0x7fffffff. Subnormal arguments and results are kept. The vector
// form with the same bits is numerics/elementary_simd.h; float64 is numerics/elementary64.h.

#include "numerics/elementary64.h"
#include "numerics/scalar_backend.h"

namespace tare::numerics {

// 2^x. Exp2(0) = 1 and Exp2(-inf) = +0 exactly; every integer x gives the exact power.
TARE_HD float Exp2(float x) { return internal::Exp2Of<internal::ScalarF32>(x); }

// The bits of Exp2 for x in [-125, 0], where the result is a normal number, in half the
// instructions. REQUIRES: that range.
TARE_HD float Exp2Near(float x) { return internal::Exp2NearOf<internal::ScalarF32>(x); }

// 2^x by a cubic, for the probabilities P of attention, which a rounding to bf16 follows: relative
// error at most 2^-13 for x in [-126, 127], +0 below -126.5, and Exp2P(0) = 1 exactly.
// REQUIRES: x <= 127 or NaN; a NaN gives some NaN, +inf gives NaN.
TARE_HD float Exp2P(float x) { return internal::Exp2POf<internal::ScalarF32>(x); }

TARE_HD float Exp(float x) { return internal::ExpOf<internal::ScalarF32>(x); }

// 1 / (1 + e^-x)
TARE_HD float Sigmoid(float x) { return internal::SigmoidOrSilu<internal::ScalarF32, false>(x); }

// x / (1 + e^-x); Silu(-inf) = -0, the sign is always that of x.
TARE_HD float Silu(float x) { return internal::SigmoidOrSilu<internal::ScalarF32, true>(x); }

// The rest widens to f64, computes there, and rounds once: a little above half an ulp.
TARE_HD float Log2(float x) { return internal::ViaF64<internal::ScalarF32, internal::ViaLog2>(x); }
TARE_HD float Log(float x) { return internal::ViaF64<internal::ScalarF32, internal::ViaLog>(x); }
TARE_HD float Log1p(float x) {
  return internal::ViaF64<internal::ScalarF32, internal::ViaLog1p>(x);
}
// The f64 path stops at e^700, far above the f32 range, so f32 overflow to inf is right.
TARE_HD float Expm1(float x) {
  return internal::ViaF64<internal::ScalarF32, internal::ViaExpm1>(x);
}
// |x| <= 2^30; beyond that the canonical NaN.
TARE_HD float Sin(float x) { return internal::ViaF64<internal::ScalarF32, internal::ViaSin>(x); }
TARE_HD float Cos(float x) { return internal::ViaF64<internal::ScalarF32, internal::ViaCos>(x); }
TARE_HD float Tanh(float x) { return internal::ViaF64<internal::ScalarF32, internal::ViaTanh>(x); }
TARE_HD float Erf(float x) { return internal::ViaF64<internal::ScalarF32, internal::ViaErf>(x); }
// log(1 + e^x)
TARE_HD float Softplus(float x) {
  return internal::ViaF64<internal::ScalarF32, internal::ViaSoftplus>(x);
}
// x * Phi(x), the exact form
TARE_HD float Gelu(float x) { return internal::ViaF64<internal::ScalarF32, internal::ViaGelu>(x); }
// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
TARE_HD float GeluTanh(float x) {
  return internal::ViaF64<internal::ScalarF32, internal::ViaGeluTanh>(x);
}

// x^y with the special cases of IEEE 754 pow. Scalar only.
TARE_HD float Pow(float x, float y) {
  return Canonical(static_cast<float>(PowF64(static_cast<double>(x), static_cast<double>(y))));
}

}  // namespace tare::numerics
