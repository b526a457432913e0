// Pick is a pure function of shape and SM count: tried without a device.

#include <gtest/gtest.h>

#include "ops/linear/linear_cuda.h"

namespace tare::ops::linear::gpu {
namespace {

TEST(LinearPick, EveryShapeHasAScheduleThatHoldsItsChains) {
  for (Pass pass : {Pass::kForward, Pass::kDx, Pass::kDw}) {
    for (int64_t m : {1, 7, 64, 65, 128, 256, 300, 1024, 4096, 8192}) {
      for (int64_t n : {1, 8, 48, 576, 4096, 6144, 151936}) {
        for (int chains : {1, 2, 4, 8}) {
          for (int sms : {1, 78, 114, 132}) {
            const Schedule s = Pick(pass, m, n, 4096, chains, Arch{.sms = sms});
            ASSERT_GE(s.config, 0) << "m=" << m << " n=" << n << " chains=" << chains;
            if (pass != Pass::kDw) {
              EXPECT_GE(1 << s.gemm().levels, chains) << s.ToString();
            }
            EXPECT_FALSE(s.ToString().empty());
          }
        }
      }
    }
  }
}

// The shapes of a Qwen3-8B layer on a whole H200: one wave of the SMs, and the tiles that were
// measured best (docs/results).
TEST(LinearPick, LayerShapesFillTheDevice) {
  const auto tile = [](Pass pass, int64_t m, int64_t n, int64_t k) {
    const Schedule s = Pick(pass, m, n, k, 1, Arch{.sms = 132});
    return fmt::format("{}x{}", s.gemm().bm, s.gemm().bn);
  };
  EXPECT_EQ(tile(Pass::kForward, 1, 4096, 4096), "64x32");
  EXPECT_EQ(tile(Pass::kForward, 64, 6144, 4096), "64x48");
  EXPECT_EQ(tile(Pass::kForward, 8, 24576, 4096), "64x96");
  EXPECT_EQ(tile(Pass::kForward, 256, 4096, 4096), "128x64");
  EXPECT_EQ(tile(Pass::kForward, 256, 6144, 4096), "128x96");
  EXPECT_EQ(tile(Pass::kForward, 1024, 6144, 4096), "128x192");
  EXPECT_EQ(tile(Pass::kForward, 4096, 6144, 4096), "128x256");
  EXPECT_EQ(tile(Pass::kDx, 4096, 4096, 6144), "128x256");
}

// dW: long units go through memory for each, whatever their number; the gradient of short ones
// stays in registers, in the tile that wastes least of its last wave.
TEST(LinearPick, GradientTilesFollowWavesAndUnits) {
  const auto tile = [](int64_t m, int64_t n, int64_t tokens, int units) {
    const Schedule s = Pick(Pass::kDw, m, n, tokens, units, Arch{.sms = 132});
    return fmt::format("{}x{}", s.gemm().bm, s.gemm().bn);
  };
  EXPECT_EQ(tile(4096, 4096, 4096, 1), "128x256");
  EXPECT_EQ(tile(24576, 4096, 4096, 1), "128x256");
  EXPECT_EQ(tile(4096, 4096, 8192, 2), "128x256");
  EXPECT_EQ(tile(6144, 4096, 8192, 2), "128x256");
  EXPECT_EQ(tile(24576, 4096, 16384, 4), "128x256");
  EXPECT_EQ(tile(6144, 4096, 8192, 40), "128x192");
  EXPECT_EQ(tile(24576, 4096, 8192, 40), "128x192");
  EXPECT_EQ(tile(4096, 12288, 8192, 40), "128x192");
  EXPECT_EQ(tile(4096, 4096, 8192, 40), "128x176");
}

}  // namespace
}  // namespace tare::ops::linear::gpu
