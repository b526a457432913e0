#pragma once

// The Hopper matrix step for bf16 in plain integers, for tests: written from docs/numerics.md and
// sharing no code with src/numerics or with any kernel.

#include <bit>
#include <cstdint>

namespace tare::ops::cuda {

struct Bf16Parts {
  bool negative, nan, infinite;
  int exponent;  // of the value: significand * 2^(exponent - 7)
  int64_t significand;
};

inline Bf16Parts DecodeBf16(uint16_t bits) {
  const int e = bits >> 7 & 0xFF;
  const int m = bits & 0x7F;
  return {(bits >> 15) != 0, e == 255 && m != 0, e == 255 && m == 0, e == 0 ? -126 : e - 127,
          e == 0 ? m : m + 128};
}

// d = c + sum of a[i * a_stride] * b[i * b_stride] over 16 products; f32 bits.
inline uint32_t OracleStepBf16(uint32_t c, const uint16_t* a, const uint16_t* b, int count = 16) {
  constexpr uint32_t kNan = 0x7FFFFFFF;
  const int c_raw = static_cast<int>(c >> 23 & 0xFF);
  const int64_t c_mantissa = c & 0x7FFFFF;
  const bool c_negative = (c >> 31) != 0;
  if (c_raw == 255 && c_mantissa != 0) return kNan;
  bool plus_infinity = c_raw == 255 && !c_negative;
  bool minus_infinity = c_raw == 255 && c_negative;
  const int64_t c_significand = c_raw == 0 ? c_mantissa : c_mantissa + (1 << 23);
  const int c_exponent = c_raw == 0 ? -126 : c_raw - 127;
  int64_t product[16] = {};
  int exponent[16] = {};
  int top = -100000;
  if (c_raw != 255 && c_significand != 0) top = c_exponent;
  for (int i = 0; i < count; ++i) {
    const Bf16Parts x = DecodeBf16(a[i]);
    const Bf16Parts y = DecodeBf16(b[i]);
    if (x.nan || y.nan) return kNan;
    if (x.infinite || y.infinite) {
      if ((!x.infinite && x.significand == 0) || (!y.infinite && y.significand == 0)) return kNan;
      (x.negative != y.negative ? minus_infinity : plus_infinity) = true;
      continue;
    }
    product[i] = x.significand * y.significand * (x.negative != y.negative ? -1 : 1);
    exponent[i] = x.exponent + y.exponent;
    if (product[i] != 0 && exponent[i] > top) top = exponent[i];
  }
  if (plus_infinity && minus_infinity) return kNan;
  if (plus_infinity) return 0x7F800000;
  if (minus_infinity) return 0xFF800000;
  if (top == -100000) return 0;
  // Units of 2^(top - 25), each term truncated toward zero by magnitude.
  const auto scaled = [top](int64_t magnitude, int fraction_bits, int e) -> int64_t {
    const int shift = 25 - fraction_bits - (top - e);
    if (shift >= 0) return magnitude << shift;
    return shift < -62 ? 0 : magnitude >> -shift;
  };
  int64_t sum = scaled(c_raw == 255 ? 0 : c_significand, 23, c_exponent) * (c_negative ? -1 : 1);
  for (int i = 0; i < count; ++i) {
    const int64_t magnitude = product[i] < 0 ? -product[i] : product[i];
    if (magnitude != 0) sum += scaled(magnitude, 14, exponent[i]) * (product[i] < 0 ? -1 : 1);
  }
  if (sum == 0) return 0;
  const uint32_t sign = sum < 0 ? 0x80000000u : 0;
  uint64_t magnitude = static_cast<uint64_t>(sum < 0 ? -sum : sum);
  int e = top - 25 + 63 - std::countl_zero(magnitude);  // exponent of the leading bit
  if (e > 127) return sign | 0x7F800000;
  const int lowest = e < -126 ? -149 : e - 23;  // exponent of the last bit kept
  const int drop = lowest - (top - 25);
  magnitude = drop >= 0 ? (drop > 63 ? 0 : magnitude >> drop) : magnitude << -drop;
  if (e < -126) return sign | static_cast<uint32_t>(magnitude);
  return sign | static_cast<uint32_t>(e + 127) << 23 |
         (static_cast<uint32_t>(magnitude) & 0x7FFFFF);
}

// f32 bits to bf16, nearest even; NaN becomes 0x7fff.
inline uint16_t OracleRoundBf16(uint32_t bits) {
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

}  // namespace tare::ops::cuda
