#pragma once

// The scalar backend of elementary.inc, for host and device. Use numerics/elementary.h instead.

#include "numerics/fp.h"

namespace tare::numerics::internal {

struct ScalarF64 {
  using F = double;
  using I = int64_t;
  static constexpr int64_t kCanonicalNan = 0x7fffffffffffffff;
  static TARE_HD double Set(double v) { return v; }
  static TARE_HD int64_t SetI(int64_t v) { return v; }
  static TARE_HD double Fma(double a, double b, double c) { return numerics::Fma(a, b, c); }
  static TARE_HD double NegFma(double a, double b, double c) { return numerics::Fma(-a, b, c); }
  static TARE_HD double Add(double a, double b) { return numerics::Add(a, b); }
  static TARE_HD double Sub(double a, double b) { return numerics::Sub(a, b); }
  static TARE_HD double Mul(double a, double b) { return numerics::Mul(a, b); }
  static TARE_HD double Div(double a, double b) { return numerics::Div(a, b); }
  static TARE_HD int64_t Bits(double x) { return static_cast<int64_t>(BitsOf(x)); }
  static TARE_HD double FromBits(int64_t x) { return DoubleOf(static_cast<uint64_t>(x)); }
  static TARE_HD int64_t AddI(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
  static TARE_HD int64_t SubI(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
  }
  template <int kBits>
  static TARE_HD int64_t Shl(int64_t a) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) << kBits);
  }
  template <int kBits>
  static TARE_HD int64_t Sar(int64_t a) {
    return a >> kBits;
  }
  static TARE_HD double PowerOfTwo(int64_t n) { return FromBits(Shl<52>(AddI(n, 1023))); }
  static TARE_HD bool Lt(double a, double b) { return a < b; }
  static TARE_HD bool Eq(double a, double b) { return a == b; }
  static TARE_HD bool TestBit(int64_t a, int bit) { return ((a >> bit) & 1) != 0; }
  static TARE_HD double If(bool m, double a, double b) { return m ? a : b; }
  static TARE_HD double Abs(double a) { return FromBits(Bits(a) & INT64_MAX); }
  static TARE_HD double CopySign(double magnitude, double sign) {
    return FromBits((Bits(magnitude) & INT64_MAX) | (Bits(sign) & INT64_MIN));
  }
};

struct ScalarF32 {
  using F = float;
  using I = int32_t;
  static constexpr int32_t kCanonicalNan = 0x7fffffff;
  static TARE_HD float Set(float v) { return v; }
  static TARE_HD int32_t SetI(int32_t v) { return v; }
  static TARE_HD float Fma(float a, float b, float c) { return numerics::Fma(a, b, c); }
  static TARE_HD float NegFma(float a, float b, float c) { return numerics::Fma(-a, b, c); }
  static TARE_HD float Add(float a, float b) { return numerics::Add(a, b); }
  static TARE_HD float Sub(float a, float b) { return numerics::Sub(a, b); }
  static TARE_HD float Mul(float a, float b) { return numerics::Mul(a, b); }
  static TARE_HD float Div(float a, float b) { return numerics::Div(a, b); }
  static TARE_HD int32_t Bits(float x) { return static_cast<int32_t>(BitsOf(x)); }
  static TARE_HD float FromBits(int32_t x) { return FloatOf(static_cast<uint32_t>(x)); }
  static TARE_HD int32_t AddI(int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
  }
  static TARE_HD int32_t SubI(int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
  }
  template <int kBits>
  static TARE_HD int32_t Shl(int32_t a) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) << kBits);
  }
  template <int kBits>
  static TARE_HD int32_t Sar(int32_t a) {
    return a >> kBits;
  }
  static TARE_HD float PowerOfTwo(int32_t n) { return FromBits(Shl<23>(AddI(n, 127))); }
  static TARE_HD int32_t AndMask(bool m, int32_t a) { return m ? a : 0; }
  static TARE_HD bool Lt(float a, float b) { return a < b; }
  static TARE_HD bool Eq(float a, float b) { return a == b; }
  static TARE_HD float If(bool m, float a, float b) { return m ? a : b; }
  static TARE_HD float Abs(float a) { return FromBits(Bits(a) & INT32_MAX); }
  static TARE_HD float CopySign(float magnitude, float sign) {
    return FromBits((Bits(magnitude) & INT32_MAX) | (Bits(sign) & INT32_MIN));
  }
  template <class Op>
  static TARE_HD float Widened(float x) {
    return static_cast<float>(Op::template Call<ScalarF64>(static_cast<double>(x)));
  }
};

#define TARE_FN TARE_HD
#include "numerics/elementary.inc"
#undef TARE_FN

}  // namespace tare::numerics::internal
