// NUM-05 and NUM-16: all codes, all halfway cases, saturation, zero blocks, subnormals, both scale
// rules, and grids that differ.

#include "numerics/quant.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tensor/convert.h"

namespace tare::numerics {
namespace {

using testing::HasSubstr;

// The magnitudes of a format, ascending, by its own definition written out here.
std::vector<double> Magnitudes(QuantFormat format) {
  std::vector<double> v;
  if (format == QuantFormat::kE4M3) {
    for (int e = 0; e < 16; ++e) {
      for (int m = 0; m < 8; ++m) {
        if (e == 15 && m == 7) continue;  // NaN
        v.push_back(e == 0 ? std::ldexp(m, -9) : std::ldexp(8 + m, e - 10));
      }
    }
  } else if (format == QuantFormat::kInt8) {
    for (int i = 0; i < 128; ++i) v.push_back(i);
  } else {
    v = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  }
  return v;
}

class QuantTest : public testing::TestWithParam<QuantFormat> {};

TEST_P(QuantTest, EveryCodeRoundTripsUnderEveryScale) {
  const QuantFormat format = GetParam();
  const std::vector<double> values = Magnitudes(format);
  for (const float scale : {1.0f, 0.25f, 0x1p-120f, 0x1p100f}) {
    for (size_t i = 0; i < values.size(); ++i) {
      for (const float sign : {1.0f, -1.0f}) {
        const float x = static_cast<float>(values[i]) * sign * scale;
        const uint8_t code = QuantEncode(format, x, scale);
        const float back = QuantDecode(format, code, scale);
        EXPECT_EQ(back, x) << "code " << int{code};
        if (format != QuantFormat::kInt8) {
          EXPECT_EQ(BitsOf(back), BitsOf(x));  // the sign of zero too
          EXPECT_EQ(code & (format == QuantFormat::kE4M3 ? 0x7f : 7), static_cast<int>(i));
        }
      }
    }
  }
}

TEST_P(QuantTest, EveryHalfwayCaseGoesToTheEvenCodeAndItsNeighboursToTheNearer) {
  const QuantFormat format = GetParam();
  const std::vector<double> values = Magnitudes(format);
  int flipped = 0;
  for (size_t i = 0; i + 1 < values.size(); ++i) {
    const float middle = static_cast<float>((values[i] + values[i + 1]) / 2);
    for (const float sign : {1.0f, -1.0f}) {
      const auto value = [&](float x, QuantRounding r) {
        return std::fabs(QuantDecode(format, QuantEncode(format, sign * x, 1.0f, r), 1.0f));
      };
      const double even = values[i % 2 == 0 ? i : i + 1];
      EXPECT_EQ(value(middle, QuantRounding::kNearestEven), even) << middle;
      EXPECT_EQ(value(std::nextafter(middle, 0.0f), QuantRounding::kNearestEven), values[i]);
      EXPECT_EQ(value(std::nextafter(middle, 1e9f), QuantRounding::kNearestEven), values[i + 1]);
      // The planted defect is visible on exactly the even-downward ties.
      EXPECT_EQ(value(middle, QuantRounding::kHalfAway), values[i + 1]) << middle;
      EXPECT_EQ(value(std::nextafter(middle, 0.0f), QuantRounding::kHalfAway), values[i]);
      flipped += even != values[i + 1];
    }
  }
  EXPECT_GT(flipped, 0);
}

TEST_P(QuantTest, SaturatesAtTheLargestValue) {
  const QuantFormat format = GetParam();
  const float top = static_cast<float>(Magnitudes(format).back());
  for (const float x : {top, top * 1.01f, top * 4, 3e38f}) {
    EXPECT_EQ(QuantDecode(format, QuantEncode(format, x, 1.0f), 1.0f), top);
    EXPECT_EQ(QuantDecode(format, QuantEncode(format, -x, 1.0f), 1.0f), -top);
  }
}

TEST_P(QuantTest, ZeroBlocksAndSubnormalBlocks) {
  QuantGrid grid{GetParam(), ScaleRule::kFree, QuantRounding::kNearestEven, 1, 4};
  for (const ScaleRule rule : {ScaleRule::kFree, ScaleRule::kPowerOfTwo}) {
    grid.scale_rule = rule;
    const float x[8] = {0.0f, -0.0f, 0.0f, 0.0f, 1e-45f, -3e-42f, 0.0f, 1e-39f};
    uint8_t codes[8];
    float scales[2], back[8];
    ASSERT_TRUE(Quantize(grid, x, 1, 8, codes, scales).ok());
    EXPECT_EQ(scales[0], 1.0f);
    EXPECT_GT(scales[1], 0.0f);
    ASSERT_TRUE(Dequantize(grid, codes, scales, 1, 8, back).ok());
    for (int i = 0; i < 8; ++i) {
      EXPECT_TRUE(std::isfinite(back[i]));
      if (i < 4) {
        EXPECT_EQ(back[i], 0.0f);
      }
      EXPECT_LE(std::fabs(back[i]), 2e-39f);
    }
  }
}

TEST_P(QuantTest, NonFiniteIsAnErrorWithItsPlace) {
  const QuantGrid grid{GetParam(), ScaleRule::kFree, QuantRounding::kNearestEven, 2, 2};
  for (const uint32_t bits : {0x7f800000u, 0xff800000u, 0x7fc00000u}) {
    std::vector<float> x(12, 1.0f);
    x[7] = FloatOf(bits);
    uint8_t codes[12];
    float scales[6];
    const Status s = Quantize(grid, x.data(), 3, 4, codes, scales);
    EXPECT_EQ(s.code(), Code::kInvalidArgument);
    EXPECT_THAT(s.message(), HasSubstr("[1, 3]"));
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, QuantTest,
                         testing::Values(QuantFormat::kE4M3, QuantFormat::kInt8,
                                         QuantFormat::kMxFp4),
                         [](const auto& info) { return std::string(QuantFormatName(info.param)); });

TEST(QuantScaleTest, FreeAndPowerOfTwo) {
  EXPECT_EQ(QuantScale(QuantFormat::kE4M3, ScaleRule::kFree, 448.0f), 1.0f);
  EXPECT_EQ(QuantScale(QuantFormat::kE4M3, ScaleRule::kFree, 1.0f), 1.0f / 448.0f);
  EXPECT_EQ(QuantScale(QuantFormat::kE4M3, ScaleRule::kPowerOfTwo, 448.0f), 1.0f);
  EXPECT_EQ(QuantScale(QuantFormat::kE4M3, ScaleRule::kPowerOfTwo, std::nextafter(448.0f, 1e9f)),
            2.0f);
  EXPECT_EQ(QuantScale(QuantFormat::kE4M3, ScaleRule::kPowerOfTwo, 224.0f), 0.5f);
  EXPECT_EQ(QuantScale(QuantFormat::kE4M3, ScaleRule::kPowerOfTwo, 1e-45f), 0x1p-126f);
  EXPECT_EQ(QuantScale(QuantFormat::kInt8, ScaleRule::kFree, 254.0f), 2.0f);
  EXPECT_EQ(QuantScale(QuantFormat::kMxFp4, ScaleRule::kFree, 6.0f), 1.0f);
  EXPECT_EQ(QuantScale(QuantFormat::kMxFp4, ScaleRule::kFree, 7.9f), 1.0f);  // saturates to 6
  EXPECT_EQ(QuantScale(QuantFormat::kMxFp4, ScaleRule::kFree, 8.0f), 2.0f);
  EXPECT_EQ(QuantScale(QuantFormat::kMxFp4, ScaleRule::kFree, 1e-45f), std::ldexp(1.0f, -127));
  // Every amax: a power of two that covers it, and half of it does not.
  for (uint32_t bits = 0x00000001; bits < 0x7f800000; bits += 99991) {
    const float amax = FloatOf(bits);
    const double s = QuantScale(QuantFormat::kE4M3, ScaleRule::kPowerOfTwo, amax);
    EXPECT_EQ(std::exp2(std::round(std::log2(s))), s);
    EXPECT_GE(s * 448, amax);
    if (s > 0x1p-126) {
      EXPECT_LT(s / 2 * 448, amax);
    }
  }
}

// H12: the victim's bits under its own scale and under a batch-wide one.
TEST(QuantScaleTest, H12OneScaleForTheWholeBatchMovesTheVictim) {
  const float x[4] = {1.0f, 0.3f, 448.0f, 2.0f};
  uint8_t codes[4];
  float scales[2], back[4];
  QuantGrid own{QuantFormat::kE4M3, ScaleRule::kFree, QuantRounding::kNearestEven, 1, 2};
  ASSERT_TRUE(Quantize(own, x, 2, 2, codes, scales).ok());
  ASSERT_TRUE(Dequantize(own, codes, scales, 2, 2, back).ok());
  EXPECT_EQ(scales[0], 1.0f / 448.0f);
  EXPECT_NEAR(back[1], 0.285714, 1e-6);
  QuantGrid batch = own;
  batch.block_rows = 2;
  ASSERT_TRUE(Quantize(batch, x, 2, 2, codes, scales).ok());
  ASSERT_TRUE(Dequantize(batch, codes, scales, 2, 2, back).ok());
  EXPECT_EQ(scales[0], 1.0f);
  EXPECT_EQ(back[1], 0.3125f);
}

TEST(GridDifferenceTest, OneGridHasNoneAndEveryOtherIsNamed) {
  const QuantGrid grid{QuantFormat::kE4M3, ScaleRule::kFree, QuantRounding::kNearestEven, 128, 128};
  EXPECT_EQ(GridDifference(grid, grid, 300, 500), "");
  QuantGrid other = grid;
  other.format = QuantFormat::kInt8;
  EXPECT_THAT(GridDifference(grid, other, 300, 500), HasSubstr("format"));
  other = grid;
  other.scale_rule = ScaleRule::kPowerOfTwo;
  EXPECT_THAT(GridDifference(grid, other, 300, 500), HasSubstr("power-of-two"));
  other = grid;
  other.rounding = QuantRounding::kHalfAway;
  EXPECT_THAT(GridDifference(grid, other, 300, 500), HasSubstr("half away"));
  other = grid;
  other.block_cols = 64;
  EXPECT_THAT(GridDifference(grid, other, 300, 500), HasSubstr("column 64"));
  other = grid;
  other.block_rows = 1;
  EXPECT_THAT(GridDifference(grid, other, 300, 500), HasSubstr("row 1:"));
  // Beyond the matrix no cut differs.
  other = grid;
  other.block_cols = 256;
  EXPECT_EQ(GridDifference(grid, other, 300, 100), "");
  // A shard of a tensor-parallel layout: whole blocks agree, a start inside a block does not.
  EXPECT_EQ(GridDifference(grid, grid, 128, 500, 128, 0), "");
  EXPECT_THAT(GridDifference(grid, grid, 100, 500, 64, 0), HasSubstr("starts inside a block"));
}

// The shard case in codes: a shard that starts inside a block gets another scale and other codes.
TEST(GridDifferenceTest, AShardThatStartsInsideABlockHasOtherCodes) {
  const QuantGrid grid{QuantFormat::kE4M3, ScaleRule::kFree, QuantRounding::kNearestEven, 1, 4};
  const float x[8] = {100.0f, 1.0f, 1.3f, 0.7f, 0.9f, 1.1f, 0.2f, 0.3f};
  uint8_t whole[8], shard[8];
  float scales[2];
  ASSERT_TRUE(Quantize(grid, x, 1, 8, whole, scales).ok());
  ASSERT_TRUE(Quantize(grid, x + 4, 1, 4, shard, scales).ok());
  for (int i = 0; i < 4; ++i) EXPECT_EQ(whole[4 + i], shard[i]);
  ASSERT_TRUE(Quantize(grid, x + 2, 1, 6, shard, scales).ok());
  int differ = 0;
  for (int i = 0; i < 6; ++i) differ += whole[2 + i] != shard[i];
  EXPECT_GT(differ, 0);
}

}  // namespace
}  // namespace tare::numerics
