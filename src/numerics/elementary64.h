#pragma once

// Elementary functions on float64, for what is computed once on the host and rounded once: rope
// tables, beta^t, schedules. Same bits on every host and device. The stated errors are far below
// what a rounding to f32 can see.

#include "numerics/scalar_backend.h"

namespace tare::numerics {

TARE_HD double Exp2F64(double x) { return internal::WideExp2<internal::ScalarF64>(x); }
TARE_HD double ExpF64(double x) { return internal::WideExp<internal::ScalarF64>(x); }
TARE_HD double Expm1F64(double x) {
  return x > 600.0 ? ExpF64(x) : internal::WideExpm1<internal::ScalarF64>(x);
}
TARE_HD double Log2F64(double x) { return internal::WideLog2<internal::ScalarF64>(x); }
TARE_HD double LogF64(double x) { return internal::WideLog<internal::ScalarF64>(x); }
TARE_HD double Log1pF64(double x) { return internal::WideLog1p<internal::ScalarF64>(x); }
// |x| <= 2^30, beyond NaN.
TARE_HD double SinF64(double x) { return internal::WideSinCos<internal::ScalarF64, 0>(x); }
TARE_HD double CosF64(double x) { return internal::WideSinCos<internal::ScalarF64, 1>(x); }
TARE_HD double TanhF64(double x) { return internal::WideTanh<internal::ScalarF64>(x); }

// x^y with the special cases of IEEE 754 pow. The exponent y * log2(x) is carried as a pair, so
// that a large one costs no digits.
TARE_HD double PowF64(double x, double y) {
  using W = internal::ScalarF64;
  const double inf = DoubleOf(0x7ff0000000000000ull);
  const double nan = DoubleOf(0x7fffffffffffffffull);
  if (y == 0.0 || x == 1.0) return 1.0;
  if (x != x || y != y) return nan;
  // y is an integer, and odd: doubles from 2^53 on are even integers.
  const double ay = W::Abs(y);
  bool integer = true, odd = false;
  if (ay < 9007199254740992.0) {
    const int64_t i = static_cast<int64_t>(ay);
    integer = static_cast<double>(i) == ay;
    odd = integer && (i & 1) != 0;
  }
  const bool negative = (BitsOf(x) >> 63) != 0;
  const double sign = negative && odd ? -1.0 : 1.0;
  const double ax = W::Abs(x);
  if (ax == 0.0) return y < 0.0 ? sign * inf : sign * 0.0;
  if (ay == inf) {
    if (ax == 1.0) return 1.0;
    return (ax > 1.0) == (y > 0.0) ? inf : 0.0;
  }
  if (ax == inf) return y < 0.0 ? sign * 0.0 : sign * inf;
  if (negative && !integer) return nan;
  double hi, lo;
  internal::WideLog2Parts<W>(ax, hi, lo);
  // lo is not small beside hi yet: what it holds beyond an ulp of hi belongs into hi.
  const double sum = Add(hi, lo);
  lo = Sub(lo, Sub(sum, hi));
  hi = sum;
  const double p = Mul(y, hi);
  if (p > 1025.0) return sign * inf;
  if (p < -1080.0) return sign * 0.0;
  const double rest = Fma(y, lo, Fma(y, hi, -p));
  // 2^rest = 1 + rest * ln 2 within 2^-80.
  const double e = Exp2F64(p);
  return sign * Fma(e, Mul(rest, 0x1.62e42fefa39efp-1), e);
}

}  // namespace tare::numerics
