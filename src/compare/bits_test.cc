#include "compare/bits.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace tare::compare {
namespace {

constexpr DType kAll[] = {DType::kF64,  DType::kF32,  DType::kF16, DType::kBF16,
                          DType::kE4M3, DType::kE5M2, DType::kI64, DType::kI32,
                          DType::kI16,  DType::kI8,   DType::kU8,  DType::kBool};

std::vector<float> Floats(int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(n);
  for (float& v : values) v = static_cast<float>(random()) / 4e9f - 0.5f;
  return values;
}

TEST(Bits, EqualFiniteRunsPassWithTheirCount) {
  const std::vector<float> a = Floats(100003, 1);
  const BitCounts c = CompareRange(DType::kF32, a.data(), a.data(), 0, 100003);
  EXPECT_EQ(c.compared, 100003);
  EXPECT_EQ(c.mismatches, 0);
  EXPECT_EQ(c.non_finite, 0);
  EXPECT_EQ(c.first.index, -1);
}

// Planted fault: one flipped bit, anywhere, in any dtype, at any block border, is found at its
// place.
TEST(Bits, OneFlippedBitIsFoundWhereItIs) {
  std::mt19937 random(7);
  for (const DType dtype : kAll) {
    const int64_t n = 5000;
    std::vector<uint8_t> a(n * SizeOf(dtype));
    for (uint8_t& byte : a) byte = static_cast<uint8_t>(random() & 0x3b);  // finite in every format
    for (int trial = 0; trial < 40; ++trial) {
      const int64_t at = trial == 0 ? 0 : trial == 1 ? n - 1 : static_cast<int64_t>(random() % n);
      std::vector<uint8_t> b = a;
      b[at * SizeOf(dtype) + random() % SizeOf(dtype)] ^= 1 << (random() % 2);
      const BitCounts c = CompareRange(dtype, a.data(), b.data(), 0, n);
      ASSERT_EQ(c.mismatches, 1) << DTypeName(dtype);
      ASSERT_EQ(c.first.index, at);
      ASSERT_EQ(c.first.word_a, LoadWord(dtype, a.data(), at));
      ASSERT_EQ(c.first.word_b, LoadWord(dtype, b.data(), at));
      ASSERT_EQ(c.compared, n);
      ASSERT_EQ(c.max_ulp, UlpDistance(dtype, c.first.word_a, c.first.word_b).value());
    }
  }
}

TEST(Bits, MisalignedDataIsReadAsItIs) {
  std::vector<char> raw(4001 * 4 + 1);
  const std::vector<float> a = Floats(4000, 3);
  std::memcpy(raw.data() + 1, a.data(), 16000);
  EXPECT_EQ(CompareRange(DType::kF32, a.data(), raw.data() + 1, 0, 4000).mismatches, 0);
  raw[1 + 4 * 3999] ^= 1;
  EXPECT_EQ(CompareRange(DType::kF32, a.data(), raw.data() + 1, 0, 4000).first.index, 3999);
}

TEST(Bits, ZerosOfBothSignsAreAMismatchOfTheirOwnKind) {
  const std::vector<float> a = {0.0f, -0.0f, 1.0f}, b = {-0.0f, -0.0f, 1.0f};
  const BitCounts c = CompareRange(DType::kF32, a.data(), b.data(), 0, 3);
  EXPECT_EQ(c.mismatches, 1);
  EXPECT_EQ(c.sign_of_zero, 1);
  EXPECT_EQ(c.max_ulp, 0u);
  EXPECT_EQ(c.max_ulp_index, 0);
}

// H05: valid [1,1,1,1,0]; the same NaN and -inf on both sides do not pass, the masked -100 does not
// count.
TEST(Bits, H05NonFiniteOnValidElementsIsCountedEvenWhenBitsAgree) {
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              inf = std::numeric_limits<float>::infinity();
  const std::vector<float> rollout = {-0.5f, nan, -inf, -1, -100},
                           trainer = {-0.5f, nan, -inf, -1, -1};
  const std::vector<uint8_t> valid = {1, 1, 1, 1, 0};
  const BitCounts c =
      CompareRange(DType::kF32, rollout.data(), trainer.data(), 0, 5, {valid.data(), 1});
  EXPECT_EQ(c.compared, 4);
  EXPECT_EQ(c.masked, 1);
  EXPECT_EQ(c.non_finite, 2);
  EXPECT_EQ(c.non_finite_equal, 2);
  EXPECT_EQ(c.finite_compared(), 2);
  EXPECT_EQ(c.mismatches, 0);
  EXPECT_EQ(c.first_non_finite.index, 1);
}

TEST(Bits, OneNonFiniteValueInALongRunIsFound) {
  for (const DType dtype :
       {DType::kF64, DType::kF32, DType::kF16, DType::kBF16, DType::kE4M3, DType::kE5M2}) {
    for (const int64_t at : {int64_t{0}, int64_t{4097}, int64_t{20000}}) {
      std::vector<uint8_t> a(20001 * SizeOf(dtype), 0x11);
      for (int64_t k = 0; k < SizeOf(dtype); ++k)
        a[at * SizeOf(dtype) + k] = 0xff;  // a NaN in each
      const BitCounts c = CompareRange(dtype, a.data(), a.data(), 0, 20001);
      EXPECT_EQ(c.non_finite, 1) << DTypeName(dtype);
      EXPECT_EQ(c.first_non_finite.index, at);
    }
  }
}

TEST(Bits, MaskedRowsSpreadOverTheirElements) {
  const int64_t rows = 37, width = 53;
  std::vector<float> a = Floats(rows * width, 5), b = a;
  std::vector<uint8_t> mask(rows);
  for (int64_t r = 0; r < rows; ++r) mask[r] = r % 3 != 0;
  for (int64_t r = 0; r < rows; r += 3) b[r * width + 7] += 1;  // differences only where masked
  BitCounts whole =
      CompareRange(DType::kF32, a.data(), b.data(), 0, rows * width, {mask.data(), width});
  EXPECT_EQ(whole.mismatches, 0);
  EXPECT_EQ(whole.masked, 13 * width);
  EXPECT_EQ(whole.compared, 24 * width);
  b[4 * width + 3] += 1;
  // Any cut into ranges gives the same counts.
  for (const int64_t cut : {int64_t{1}, width * 4 + 3, width * 4 + 4, int64_t{1000}}) {
    BitCounts parts = CompareRange(DType::kF32, a.data(), b.data(), 0, cut, {mask.data(), width});
    parts.Merge(
        CompareRange(DType::kF32, a.data(), b.data(), cut, rows * width, {mask.data(), width}));
    EXPECT_EQ(parts.mismatches, 1);
    EXPECT_EQ(parts.first.index, 4 * width + 3);
    EXPECT_EQ(parts.compared, 24 * width);
    EXPECT_EQ(parts.masked, 13 * width);
  }
}

TEST(Bits, UlpDistanceCountsRepresentableValues) {
  const auto f32 = [](float v) { return static_cast<uint64_t>(std::bit_cast<uint32_t>(v)); };
  EXPECT_EQ(UlpDistance(DType::kF32, f32(1.0f), f32(std::nextafter(1.0f, 2.0f))), 1u);
  EXPECT_EQ(UlpDistance(DType::kF32, f32(-0.0f), f32(0.0f)), 0u);
  EXPECT_EQ(UlpDistance(DType::kF32, f32(std::numeric_limits<float>::denorm_min()),
                        f32(-std::numeric_limits<float>::denorm_min())),
            2u);
  EXPECT_EQ(UlpDistance(DType::kF32, 0x7f7fffff, 0xff7fffff), 2u * 0x7f7fffff);
  EXPECT_EQ(UlpDistance(DType::kF32, 0x7f800000, 0), std::nullopt);
  EXPECT_EQ(UlpDistance(DType::kBF16, 0x3f80, 0x3f82), 2u);
  EXPECT_EQ(UlpDistance(DType::kE4M3, 0x7e, 0x7f), std::nullopt);  // 448 against NaN
  EXPECT_EQ(UlpDistance(DType::kE4M3, 0x7e, 0xfe), 2u * 0x7e);     // 448 against -448
  EXPECT_EQ(UlpDistance(DType::kI64, static_cast<uint64_t>(std::numeric_limits<int64_t>::min()),
                        static_cast<uint64_t>(std::numeric_limits<int64_t>::max())),
            std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(UlpDistance(DType::kI8, 0xff, 0x01), 2u);
  EXPECT_EQ(UlpDistance(DType::kU8, 0xff, 0x01), 254u);
}

// Every 8-bit and 16-bit pattern against an independent reading of the format.
TEST(Bits, EverySmallPatternHasItsValue) {
  for (uint32_t w = 0; w < 65536; ++w) {
    const float bf16 = std::bit_cast<float>(w << 16);
    const double got = WordToDouble(DType::kBF16, w);
    if (std::isnan(bf16)) {
      EXPECT_TRUE(std::isnan(got));
    } else {
      EXPECT_EQ(got, static_cast<double>(bf16)) << w;
    }
    EXPECT_EQ(IsFinite(DType::kBF16, w), std::isfinite(bf16));
    const int e = (w >> 10) & 31, m = w & 1023;
    const double sign = w & 0x8000 ? -1 : 1;
    const double f16 =
        e == 0 ? sign * m * std::pow(2.0, -24) : sign * (1024 + m) * std::pow(2.0, e - 25);
    if (e < 31) {
      EXPECT_EQ(WordToDouble(DType::kF16, w), f16) << w;
    }
    EXPECT_EQ(IsFinite(DType::kF16, w), e < 31);
  }
  EXPECT_EQ(WordToDouble(DType::kE4M3, 0x7e), 448.0);
  EXPECT_EQ(WordToDouble(DType::kE4M3, 0x01), std::pow(2.0, -9));
  EXPECT_EQ(WordToDouble(DType::kE5M2, 0x7b), 57344.0);
  EXPECT_TRUE(std::isinf(WordToDouble(DType::kE5M2, 0x7c)));
  EXPECT_TRUE(std::isnan(WordToDouble(DType::kE4M3, 0xff)));
}

TEST(Bits, WordsPrintWithTheirWidth) {
  EXPECT_EQ(WordHex(DType::kF32, 0x3f800000), "0x3f800000");
  EXPECT_EQ(WordHex(DType::kBF16, 0x1), "0x0001");
  EXPECT_EQ(WordHex(DType::kU8, 0xa), "0x0a");
}

}  // namespace
}  // namespace tare::compare
