#pragma once

// The Hopper tensor-core step, d = c + sum_i a_i * b_i, in plain integer arithmetic: the definition
// that every fast version must equal bit for bit (docs/numerics.md). Host and device.
//
// One step takes a group of 16 products (bf16, f16) or 32 (e4m3, e5m2). A longer contraction chains
// steps: d of one is c of the next, k ascending, from c = +0; a short last group is padded with
// zeros.

#include <cstdint>

#include "numerics/fp.h"

namespace tare::numerics {

enum class MmaType : uint8_t { kBF16, kF16, kE4M3, kE5M2 };

// How a type is decoded and how its step rounds.
struct MmaFormat {
  int significand_bits;  // explicit bits below the hidden one
  int exponent_bits;
  int bias;
  int group;       // products a step
  int f;           // terms are cut to a multiple of 2^(emax - f)
  int result_cut;  // low bits of the f32 result that are cleared
  bool has_infinity;
  int bytes;
};

TARE_HD constexpr MmaFormat FormatOf(MmaType type) {
  switch (type) {
    case MmaType::kBF16:
      return {7, 8, 127, 16, 25, 0, true, 2};
    case MmaType::kF16:
      return {10, 5, 15, 16, 25, 0, true, 2};
    case MmaType::kE4M3:
      return {3, 4, 7, 32, 13, 10, false, 1};
    case MmaType::kE5M2:
      return {2, 5, 15, 32, 13, 10, true, 1};
  }
  return {};
}

template <MmaType kType>
struct MmaStorage {
  using Type = uint16_t;
};
template <>
struct MmaStorage<MmaType::kE4M3> {
  using Type = uint8_t;
};
template <>
struct MmaStorage<MmaType::kE5M2> {
  using Type = uint8_t;
};

namespace internal {

// A decoded operand: value = (-1)^negative * significand * 2^(exponent - significand_bits).
struct MmaOperand {
  uint32_t significand;  // with the hidden bit; a subnormal has none and is not renormalised
  int exponent;
  bool negative;
  bool nan;
  bool inf;
};

template <MmaType kType>
TARE_HD MmaOperand DecodeMma(uint32_t bits) {
  constexpr MmaFormat kFormat = FormatOf(kType);
  constexpr uint32_t kExponentMask = (1u << kFormat.exponent_bits) - 1;
  constexpr uint32_t kFractionMask = (1u << kFormat.significand_bits) - 1;
  const uint32_t fraction = bits & kFractionMask;
  const uint32_t e = (bits >> kFormat.significand_bits) & kExponentMask;
  MmaOperand o;
  o.negative = ((bits >> (kFormat.significand_bits + kFormat.exponent_bits)) & 1) != 0;
  const bool top = e == kExponentMask;
  o.nan = top && (kFormat.has_infinity ? fraction != 0 : fraction == kFractionMask);
  o.inf = top && kFormat.has_infinity && fraction == 0;
  o.significand = e == 0 ? fraction : fraction | (1u << kFormat.significand_bits);
  o.exponent = (e == 0 ? 1 : static_cast<int>(e)) - kFormat.bias;
  return o;
}

// significand * 2^(exponent - point), cut toward zero to a multiple of 2^unit, in units of it.
TARE_HD uint64_t CutTerm(uint64_t significand, int exponent, int point, int unit) {
  const int shift = exponent - point - unit;
  if (shift >= 0) return significand << shift;  // at most 11: the unit lies F below the largest
  return shift <= -64 ? 0 : significand >> -shift;
}

// sign * magnitude * 2^unit as f32, cut toward zero; 2^128 and more is infinite; zero is +0.
TARE_HD float CutToFloat(bool negative, uint64_t magnitude, int unit) {
  if (magnitude == 0) return 0.0f;
  int top = 0;  // position of the leading bit
  for (uint64_t m = magnitude; m > 1; m >>= 1) ++top;
  const int exponent = top + unit;
  const uint32_t sign = negative ? 0x80000000u : 0u;
  if (exponent >= 128) return FloatOf(sign | 0x7f800000u);
  // The unit of the result: 23 bits below the leading one, or the subnormal unit 2^-149.
  const int result_unit = exponent >= -126 ? exponent - 23 : -149;
  const int shift = unit - result_unit;
  const uint64_t fraction =
      shift >= 0 ? magnitude << shift : (shift <= -64 ? 0 : magnitude >> -shift);
  const uint32_t biased = exponent >= -126 ? static_cast<uint32_t>(exponent + 126) : 0u;
  // A normal fraction carries its hidden bit, which the addition turns into one more exponent.
  return FloatOf(sign | ((biased << 23) + static_cast<uint32_t>(fraction)));
}

}  // namespace internal

// One step over a whole group: a[i * a_stride] and b[i * b_stride], i in [0,
// FormatOf(kType).group).
template <MmaType kType>
TARE_HD float Sm90Step(const typename MmaStorage<kType>::Type* a,
                       const typename MmaStorage<kType>::Type* b, float c, int64_t a_stride = 1,
                       int64_t b_stride = 1) {
  constexpr MmaFormat kFormat = FormatOf(kType);
  constexpr int kGroup = kFormat.group;
  constexpr int kPoint = 2 * kFormat.significand_bits;
  uint32_t significand[kGroup];
  int exponent[kGroup];
  bool negative[kGroup];
  bool nan = false, plus_inf = false, minus_inf = false;
  int emax = -100000;
  for (int i = 0; i < kGroup; ++i) {
    const internal::MmaOperand x = internal::DecodeMma<kType>(a[i * a_stride]);
    const internal::MmaOperand y = internal::DecodeMma<kType>(b[i * b_stride]);
    negative[i] = x.negative != y.negative;
    significand[i] = 0;
    exponent[i] = 0;
    if (x.nan || y.nan || (x.inf && y.significand == 0) || (y.inf && x.significand == 0)) {
      nan = true;
    } else if (x.inf || y.inf) {
      (negative[i] ? minus_inf : plus_inf) = true;
    } else {
      significand[i] = x.significand * y.significand;
      exponent[i] = x.exponent + y.exponent;  // not renormalised when the significand reaches 2
      if (significand[i] != 0 && exponent[i] > emax) emax = exponent[i];
    }
  }
  const uint32_t cb = BitsOf(c);
  const uint32_t c_fraction = cb & 0x7fffffu;
  const int c_e = static_cast<int>((cb >> 23) & 0xff);
  const bool c_negative = (cb >> 31) != 0;
  const uint32_t c_significand = c_e == 0 ? c_fraction : c_fraction | 0x800000u;
  const int c_exponent = (c_e == 0 ? 1 : c_e) - 127;
  if (c_e == 255) {
    if (c_fraction != 0) nan = true;
    (c_negative ? minus_inf : plus_inf) = true;
  } else if (c_significand != 0 && c_exponent > emax) {
    emax = c_exponent;
  }
  if (nan || (plus_inf && minus_inf)) return CanonicalNan();
  if (plus_inf) return FloatOf(0x7f800000u);
  if (minus_inf) return FloatOf(0xff800000u);

  const int unit = emax - kFormat.f;
  int64_t sum = 0;
  for (int i = 0; i < kGroup; ++i) {
    if (significand[i] == 0) continue;
    const int64_t t =
        static_cast<int64_t>(internal::CutTerm(significand[i], exponent[i], kPoint, unit));
    sum += negative[i] ? -t : t;
  }
  if (c_significand != 0) {
    const int64_t t = static_cast<int64_t>(internal::CutTerm(c_significand, c_exponent, 23, unit));
    sum += c_negative ? -t : t;
  }
  const bool sum_negative = sum < 0;
  const float d =
      internal::CutToFloat(sum_negative, static_cast<uint64_t>(sum_negative ? -sum : sum), unit);
  return FloatOf(BitsOf(d) & ~((1u << kFormat.result_cut) - 1));
}

// A chain of steps over k ascending: n values of each operand, the last group padded with zeros.
template <MmaType kType>
TARE_HD float Sm90Chain(const typename MmaStorage<kType>::Type* a,
                        const typename MmaStorage<kType>::Type* b, int64_t n, float c,
                        int64_t a_stride = 1, int64_t b_stride = 1) {
  constexpr int kGroup = FormatOf(kType).group;
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    c = Sm90Step<kType>(a + i * a_stride, b + i * b_stride, c, a_stride, b_stride);
  }
  if (i < n) {
    typename MmaStorage<kType>::Type pa[kGroup] = {}, pb[kGroup] = {};
    for (int64_t j = i; j < n; ++j) {
      pa[j - i] = a[j * a_stride];
      pb[j - i] = b[j * b_stride];
    }
    c = Sm90Step<kType>(pa, pb, c);
  }
  return c;
}

}  // namespace tare::numerics
