#pragma once

// The few IEEE operations everything else is made of, written so that no compiler can change them:
// on a device they are the `_rn` intrinsics (never fused, never flushed), on the host plain
// operators under -ffp-contract=off and one explicit fused multiply-add. Host and device give the
// same bits for every operand except the payload of a NaN; whoever stores a result writes
// CanonicalNan.

#include <cstdint>
#include <cstring>

#include "tensor/hd.h"

namespace tare::numerics {

TARE_HD uint32_t BitsOf(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  return __builtin_bit_cast(uint32_t, x);
#endif
}
TARE_HD float FloatOf(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}
TARE_HD uint64_t BitsOf(double x) {
#ifdef __CUDA_ARCH__
  return static_cast<uint64_t>(__double_as_longlong(x));
#else
  return __builtin_bit_cast(uint64_t, x);
#endif
}
TARE_HD double DoubleOf(uint64_t bits) {
#ifdef __CUDA_ARCH__
  return __longlong_as_double(static_cast<long long>(bits));
#else
  return __builtin_bit_cast(double, bits);
#endif
}

// The one NaN an operator stores: f32 0x7fffffff (what CUDA produces), bf16 0x7fff.
inline constexpr uint32_t kCanonicalNanBits = 0x7fffffffu;
TARE_HD float CanonicalNan() { return FloatOf(kCanonicalNanBits); }
TARE_HD float Canonical(float x) { return x != x ? CanonicalNan() : x; }

// a * b + c, rounded once.
TARE_HD float Fma(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}
TARE_HD double Fma(double a, double b, double c) {
#ifdef __CUDA_ARCH__
  return __fma_rn(a, b, c);
#else
  return __builtin_fma(a, b, c);
#endif
}

#ifdef __CUDA_ARCH__
TARE_HD float Add(float a, float b) { return __fadd_rn(a, b); }
TARE_HD float Sub(float a, float b) { return __fsub_rn(a, b); }
TARE_HD float Mul(float a, float b) { return __fmul_rn(a, b); }
TARE_HD float Div(float a, float b) { return __fdiv_rn(a, b); }
TARE_HD float Sqrt(float a) { return __fsqrt_rn(a); }
TARE_HD double Add(double a, double b) { return __dadd_rn(a, b); }
TARE_HD double Sub(double a, double b) { return __dsub_rn(a, b); }
TARE_HD double Mul(double a, double b) { return __dmul_rn(a, b); }
TARE_HD double Div(double a, double b) { return __ddiv_rn(a, b); }
TARE_HD double Sqrt(double a) { return __dsqrt_rn(a); }
#else
TARE_HD float Add(float a, float b) { return a + b; }
TARE_HD float Sub(float a, float b) { return a - b; }
TARE_HD float Mul(float a, float b) { return a * b; }
TARE_HD float Div(float a, float b) { return a / b; }
TARE_HD float Sqrt(float a) { return __builtin_sqrtf(a); }
TARE_HD double Add(double a, double b) { return a + b; }
TARE_HD double Sub(double a, double b) { return a - b; }
TARE_HD double Mul(double a, double b) { return a * b; }
TARE_HD double Div(double a, double b) { return a / b; }
TARE_HD double Sqrt(double a) { return __builtin_sqrt(a); }
#endif

// The larger of two; NaN propagates (canonical), +0 and -0 tie to +0. Associative and commutative,
// so a maximum needs no order.
TARE_HD float MaxOf(float a, float b) {
  if (a > b) return a;
  if (b > a) return b;
  if (a == b) return FloatOf(BitsOf(a) & BitsOf(b));
  return CanonicalNan();
}

}  // namespace tare::numerics
