// Conversions against an oracle that shares no code with them: formats decoded by ldexp, and
// rounding found by neighbours and midpoints in float64.

#include "tensor/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace tare {
namespace {

using ::testing::HasSubstr;

struct Spec {
  DType dtype;
  int exponent_bits, mantissa_bits;
  bool infinity;
  uint32_t nan;
};
const Spec kSpecs[] = {
    {DType::kF16, 5, 10, true, 0x7fff},
    {DType::kBF16, 8, 7, true, 0x7fff},
    {DType::kE4M3, 4, 3, false, 0x7f},
    {DType::kE5M2, 5, 2, true, 0x7f},
};

// The value of a bit pattern from the definition of the format.
double Decode(const Spec& s, uint32_t bits) {
  const int total = s.exponent_bits + s.mantissa_bits;
  const double sign = bits >> total & 1 ? -1.0 : 1.0;
  const int e = static_cast<int>(bits >> s.mantissa_bits) & ((1 << s.exponent_bits) - 1);
  const int m = static_cast<int>(bits) & ((1 << s.mantissa_bits) - 1);
  const int bias = (1 << (s.exponent_bits - 1)) - 1;
  const int last = (1 << s.exponent_bits) - 1;
  if (s.infinity && e == last) return m == 0 ? sign * INFINITY : NAN;
  if (!s.infinity && e == last && m == (1 << s.mantissa_bits) - 1) return NAN;
  if (e == 0) return sign * std::ldexp(m, 1 - bias - s.mantissa_bits);
  return sign * std::ldexp((1 << s.mantissa_bits) + m, e - bias - s.mantissa_bits);
}

uint32_t NarrowF32(DType to, uint32_t bits, Fp8Overflow overflow = Fp8Overflow::kSaturate) {
  switch (to) {
    case DType::kF16:
      return ConvertFloatBits<DType::kF32, DType::kF16>(bits, overflow);
    case DType::kBF16:
      return ConvertFloatBits<DType::kF32, DType::kBF16>(bits, overflow);
    case DType::kE4M3:
      return ConvertFloatBits<DType::kF32, DType::kE4M3>(bits, overflow);
    default:
      return ConvertFloatBits<DType::kF32, DType::kE5M2>(bits, overflow);
  }
}
uint32_t WidenToF32(DType from, uint32_t bits) {
  switch (from) {
    case DType::kF16:
      return ConvertFloatBits<DType::kF16, DType::kF32>(static_cast<uint16_t>(bits));
    case DType::kBF16:
      return ConvertFloatBits<DType::kBF16, DType::kF32>(static_cast<uint16_t>(bits));
    case DType::kE4M3:
      return ConvertFloatBits<DType::kE4M3, DType::kF32>(static_cast<uint8_t>(bits));
    default:
      return ConvertFloatBits<DType::kE5M2, DType::kF32>(static_cast<uint8_t>(bits));
  }
}
uint32_t Patterns(const Spec& s) { return 2u << (s.exponent_bits + s.mantissa_bits); }
uint32_t MaxFinite(const Spec& s) {
  const uint32_t magnitudes = Patterns(s) / 2;
  return s.infinity ? magnitudes - (1u << s.mantissa_bits) - 1 : magnitudes - 2;
}

// Every 8-bit and 16-bit pattern widens to its exact value and comes back to itself; NaN is
// canonical.
TEST(Convert, EveryNarrowPattern) {
  for (const Spec& s : kSpecs) {
    for (uint32_t bits = 0; bits < Patterns(s); ++bits) {
      const double value = Decode(s, bits);
      const uint32_t wide = WidenToF32(s.dtype, bits);
      if (std::isnan(value)) {
        ASSERT_EQ(wide, 0x7fffffffu) << DTypeName(s.dtype) << " " << bits;
        ASSERT_EQ(NarrowF32(s.dtype, wide), s.nan);
      } else {
        ASSERT_EQ(wide, F32Bits(static_cast<float>(value))) << DTypeName(s.dtype) << " " << bits;
        ASSERT_EQ(NarrowF32(s.dtype, wide, Fp8Overflow::kNonFinite), bits) << DTypeName(s.dtype);
      }
    }
  }
}

// Around every midpoint of neighbours: the tie goes to the even one, one f32 step away does not.
// The last midpoint is where overflow begins.
TEST(Convert, EveryHalfwayCase) {
  for (const Spec& s : kSpecs) {
    const uint32_t max = MaxFinite(s);
    const uint32_t sign = Patterns(s) / 2;
    for (uint32_t low = 0; low <= max; ++low) {
      const double a = Decode(s, low);
      const double b = low == max ? a + (a - Decode(s, low - 1)) : Decode(s, low + 1);
      const double middle = a + (b - a) / 2;
      const float m = static_cast<float>(middle);
      // Half of the smallest bf16 subnormal is an f32 subnormal: every midpoint is an f32 exactly.
      ASSERT_EQ(static_cast<double>(m), middle);
      for (const Fp8Overflow overflow : {Fp8Overflow::kSaturate, Fp8Overflow::kNonFinite}) {
        uint32_t up = low + 1;
        if (low == max && sign == 0x80 && overflow == Fp8Overflow::kSaturate) up = max;
        const uint32_t even = low % 2 == 0 ? low : up;
        const bool up_is_nan = up > max && !s.infinity;
        for (const uint32_t neg : {0u, sign}) {
          const uint32_t f = F32Bits(m) | (neg != 0 ? 0x80000000u : 0);
          ASSERT_EQ(NarrowF32(s.dtype, f - 1, overflow), low | neg) << DTypeName(s.dtype) << low;
          ASSERT_EQ(NarrowF32(s.dtype, f, overflow), even == up && up_is_nan ? s.nan : even | neg)
              << DTypeName(s.dtype) << low;
          ASSERT_EQ(NarrowF32(s.dtype, f + 1, overflow), up_is_nan ? s.nan : up | neg)
              << DTypeName(s.dtype) << low;
        }
      }
    }
  }
}

// The rules of the header, as literal bits.
TEST(Convert, SpecialValues) {
  const auto bf16 = [](uint32_t b) { return F32ToBf16(F32FromBits(b)); };
  EXPECT_EQ(bf16(0x7f800001), 0x7fff);  // signalling NaN
  EXPECT_EQ(bf16(0xffc12345), 0x7fff);  // negative NaN with a payload
  EXPECT_EQ(bf16(0x80000000), 0x8000);  // -0
  EXPECT_EQ(bf16(0x7f7fffff), 0x7f80);  // the largest f32 rounds to infinity
  EXPECT_EQ(bf16(0xff800000), 0xff80);
  EXPECT_EQ(bf16(0x00000001), 0x0000);
  EXPECT_EQ(bf16(0x00008001), 0x0001);
  EXPECT_EQ(F32Bits(Bf16ToF32(0xffc1)), 0x7fffffffu);
  EXPECT_EQ(F32Bits(F16ToF32(0xfe01)), 0x7fffffffu);
  EXPECT_EQ(F32ToF16(65519.0f), 0x7bff);
  EXPECT_EQ(F32ToF16(65520.0f), 0x7c00);
  EXPECT_EQ(F32ToE4m3(448.0f), 0x7e);
  EXPECT_EQ(F32ToE4m3(464.0f, Fp8Overflow::kNonFinite), 0x7e);  // a tie, to even
  EXPECT_EQ(F32ToE4m3(464.1f, Fp8Overflow::kNonFinite), 0x7f);
  EXPECT_EQ(F32ToE4m3(-1e30f), 0xfe);
  EXPECT_EQ(F32ToE4m3(-INFINITY), 0xfe);
  EXPECT_EQ(F32ToE4m3(-INFINITY, Fp8Overflow::kNonFinite), 0x7f);
  EXPECT_EQ(F32ToE5m2(INFINITY), 0x7b);
  EXPECT_EQ(F32ToE5m2(INFINITY, Fp8Overflow::kNonFinite), 0x7c);
  EXPECT_EQ(F32ToE5m2(-NAN), 0x7f);
  EXPECT_EQ(F32ToE4m3(NAN), 0x7f);
  EXPECT_EQ(F32ToE4m3(-0.0f), 0x80);
}

// f64 is rounded once: by way of f32 this value would tie, and go the other way.
TEST(Convert, F64RoundsOnce) {
  const double x = 1.0 + 0x1p-8 + 0x1p-40;  // just above the tie between two bf16 values
  uint64_t bits;
  std::memcpy(&bits, &x, 8);
  EXPECT_EQ((ConvertFloatBits<DType::kF64, DType::kBF16>(bits)), 0x3f81);
  EXPECT_EQ(F32ToBf16(static_cast<float>(x)), 0x3f80);
  for (const double v : {1.0, -1e-45, 3.4028235677973366e38, 1e300, 0x1p-1074, 0.1, -0.0, 1e-40}) {
    std::memcpy(&bits, &v, 8);
    EXPECT_EQ((ConvertFloatBits<DType::kF64, DType::kF32>(bits)), F32Bits(static_cast<float>(v)))
        << v;
  }
}

// Bulk conversion gives the bits of the one-element functions, at any length, with and without
// pool.
TEST(Convert, BulkEqualsScalar) {
  std::vector<uint32_t> f32;
  for (uint32_t i = 0; i < 200003; ++i) f32.push_back(i * 2654435761u);
  for (const uint32_t special :
       {0x7f800001u, 0xffc00000u, 0x7f800000u, 0x80000000u, 1u, 0x80000001u}) {
    f32.push_back(special);
  }
  ThreadPool pool(3);
  for (const Spec& s : kSpecs) {
    const Tensor in =
        Tensor::Wrap(f32.data(), DType::kF32, {static_cast<int64_t>(f32.size())}, nullptr).value();
    for (const Fp8Overflow overflow : {Fp8Overflow::kSaturate, Fp8Overflow::kNonFinite}) {
      const Tensor narrow = Convert(in, s.dtype, overflow, &pool).value();
      const Tensor wide = Convert(narrow, DType::kF32).value();
      for (size_t i = 0; i < f32.size(); ++i) {
        const uint32_t got =
            SizeOf(s.dtype) == 2 ? narrow.as<uint16_t>()[i] : narrow.as<uint8_t>()[i];
        ASSERT_EQ(got, NarrowF32(s.dtype, f32[i], overflow)) << DTypeName(s.dtype) << " " << i;
        ASSERT_EQ(wide.as<uint32_t>()[i], WidenToF32(s.dtype, got));
      }
    }
  }
  // All f16 patterns through the wide path.
  std::vector<uint16_t> all(65536);
  for (uint32_t i = 0; i < 65536; ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<uint32_t> out(65536);
  ASSERT_TRUE(ConvertElements(all.data(), DType::kF16, out.data(), DType::kF32, 65536).ok());
  for (uint32_t i = 0; i < 65536; ++i) ASSERT_EQ(out[i], WidenToF32(DType::kF16, i));
}

// Every pair of dtypes has an answer, and small integers survive the round trip through all of
// them.
TEST(Convert, EveryPairHoldsSmallIntegers) {
  const std::vector<int32_t> values = {0, 1, 0, 1, 1, 0, 0, 1, 1};
  const Tensor start = Tensor::Wrap(values.data(), DType::kI32, {9}, nullptr).value();
  for (int a = 0; a < kDTypeCount; ++a) {
    const Tensor ta = Convert(start, static_cast<DType>(a)).value();
    for (int b = 0; b < kDTypeCount; ++b) {
      const Tensor tb = Convert(ta, static_cast<DType>(b)).value();
      const Tensor back = Convert(tb, DType::kI32).value();
      for (int i = 0; i < 9; ++i) ASSERT_EQ(back.as<int32_t>()[i], values[static_cast<size_t>(i)]);
    }
  }
}

template <typename T>
std::string ErrorOf(std::vector<T> values, DType from, DType to) {
  const Tensor t =
      Tensor::Wrap(values.data(), from, {static_cast<int64_t>(values.size())}, nullptr).value();
  const auto r = Convert(t, to);
  return r.ok() ? "ok" : r.status().ToString();
}

// An integer destination never rounds, clamps or wraps: the element is named.
TEST(Convert, IntegersAreExactOrRefused) {
  EXPECT_EQ(ErrorOf<float>({1, -128, 127}, DType::kF32, DType::kI8), "ok");
  EXPECT_THAT(ErrorOf<float>({1, 128}, DType::kF32, DType::kI8),
              HasSubstr("element 1 (f32 0x43000000)"));
  EXPECT_THAT(ErrorOf<float>({0.5f}, DType::kF32, DType::kI32), HasSubstr("not a value of i32"));
  EXPECT_THAT(ErrorOf<float>({NAN}, DType::kF32, DType::kI64), HasSubstr("not a value of i64"));
  EXPECT_THAT(ErrorOf<double>({0x1p63}, DType::kF64, DType::kI64), HasSubstr("not a value of i64"));
  EXPECT_EQ(ErrorOf<double>({-0x1p63}, DType::kF64, DType::kI64), "ok");
  EXPECT_THAT(ErrorOf<int64_t>({int64_t{1} << 31}, DType::kI64, DType::kI32),
              HasSubstr("element 0"));
  EXPECT_THAT(ErrorOf<int32_t>({-1}, DType::kI32, DType::kU8), HasSubstr("element 0"));
  EXPECT_THAT(ErrorOf<int32_t>({2}, DType::kI32, DType::kBool), HasSubstr("not a value of bool"));
  EXPECT_THAT(ErrorOf<uint8_t>({1, 7}, DType::kBool, DType::kF32),
              HasSubstr("data-loss: element 1"));
}

TEST(Convert, IntegersToFloatRoundOnce) {
  const std::vector<int64_t> values = {INT64_MIN,
                                       INT64_MAX,
                                       (int64_t{1} << 24) + 1,
                                       (int64_t{1} << 53) + 1,
                                       -((int64_t{1} << 25) + 3),
                                       257};
  const Tensor in = Tensor::Wrap(values.data(), DType::kI64, {6}, nullptr).value();
  const Tensor f64 = Convert(in, DType::kF64).value();
  const Tensor f32 = Convert(in, DType::kF32).value();
  for (int i = 0; i < 6; ++i) {
    const int64_t v = values[static_cast<size_t>(i)];
    EXPECT_EQ(f64.as<double>()[i], static_cast<double>(v));
    EXPECT_EQ(f32.as<float>()[i], static_cast<float>(v));
  }
  EXPECT_EQ(Convert(in, DType::kBF16)->as<uint16_t>()[5], 0x4380);  // 257 ties to 256
}

// All 2^32 f32 patterns to f16, bf16, e4m3, e5m2: the neighbours of the destination walk along.
TEST(Convert, SlowEveryF32) {
  for (const Spec& s : kSpecs) {
    const uint32_t max = MaxFinite(s);
    std::vector<double> upper;  // patterns below upper[i] (or at it, i even) round to i or less
    for (uint32_t i = 0; i <= max; ++i) {
      const double a = Decode(s, i);
      upper.push_back(i == max ? a + (a - Decode(s, i - 1)) / 2 : a + (Decode(s, i + 1) - a) / 2);
    }
    uint32_t at = 0;
    for (uint32_t f = 0; f < 0x80000000u; ++f) {
      uint32_t want = s.nan;
      bool over = false;
      if (f <= 0x7f800000u) {
        const double v = F32FromBits(f);
        while (at <= max && (v > upper[at] || (v == upper[at] && at % 2 == 1))) ++at;
        over = at > max;
        want = at;
      }
      for (const uint32_t neg : {0u, 1u}) {
        const uint32_t sign = neg * (Patterns(s) / 2);
        const uint32_t got = NarrowF32(s.dtype, f | neg << 31, Fp8Overflow::kNonFinite);
        uint32_t expected = want == s.nan && f > 0x7f800000u ? s.nan : want | sign;
        if (over && !s.infinity) expected = s.nan;
        ASSERT_EQ(got, expected) << DTypeName(s.dtype) << " " << f << " " << neg;
      }
    }
  }
}

// The wide f16 path over all 2^32 patterns.
TEST(Convert, SlowWideF16) {
  std::vector<uint32_t> in(1 << 20);
  std::vector<uint16_t> out(1 << 20);
  for (uint64_t base = 0; base < (uint64_t{1} << 32); base += in.size()) {
    for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint32_t>(base + i);
    ASSERT_TRUE(ConvertElements(in.data(), DType::kF32, out.data(), DType::kF16,
                                static_cast<int64_t>(in.size()))
                    .ok());
    for (size_t i = 0; i < in.size(); ++i) {
      ASSERT_EQ(out[i], (ConvertFloatBits<DType::kF32, DType::kF16>(in[i]))) << in[i];
    }
  }
}

}  // namespace
}  // namespace tare
