// The loop's small rules: advantages, algorithms by name, seeds, the bound of a gain.

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "rl/advantage.h"
#include "rl/config.h"
#include "rl/curves.h"
#include "rl/rollout.h"

namespace tare::rl {
namespace {

// SYS-36: rewards 1, 0, 0, 1: mean 1/2, spread 1/2.
TEST(Advantage, IsTheRewardAgainstItsGroup) {
  const std::vector<float> rewards = {1, 0, 0, 1};
  const auto by_std = GroupAdvantages(rewards, true), plain = GroupAdvantages(rewards, false);
  for (size_t i = 0; i < rewards.size(); ++i) {
    EXPECT_NEAR(by_std[i], rewards[i] == 1 ? 1.0 : -1.0, 1e-5);
    EXPECT_EQ(plain[i], rewards[i] == 1 ? 0.5f : -0.5f);
  }
}

// T-09: a group without differences has no advantage, whatever its mean rounds to.
TEST(Advantage, EqualRewardsAreExactlyZero) {
  const std::vector<float> rewards(7, 0.1f);
  EXPECT_FALSE(HasSignal(rewards));
  for (const bool by_std : {true, false}) {
    for (const float a : GroupAdvantages(rewards, by_std)) EXPECT_EQ(a, 0.0f);
  }
  EXPECT_TRUE(HasSignal(std::vector<float>{0.1f, 0.1f, 0.2f}));
}

TEST(Config, AlgorithmsSetTheirOptions) {
  LoopConfig c;
  ASSERT_TRUE(ApplyLoss("dapo", &c).ok());
  EXPECT_EQ(c.loss_agg_mode, "token-mean");
  EXPECT_EQ(c.clip_ratio_high, 0.28);
  EXPECT_TRUE(c.filter_groups);
  ASSERT_TRUE(ApplyLoss("ppo-clip", &c).ok());
  EXPECT_EQ(c.clip_ratio_c, 3.0);
  EXPECT_FALSE(c.filter_groups);
  ASSERT_TRUE(ApplyLoss("grpo", &c).ok());
  EXPECT_EQ(c.loss_agg_mode, "seq-mean-token-mean");
  EXPECT_EQ(c.clip_ratio_high, 0.2);
  EXPECT_FALSE(ApplyLoss("a2c", &c).ok());
}

// H16: no two samples of a run share a seed, and held-out ones never with the training ones.
TEST(Rollout, SeedsAreDistinct) {
  std::set<uint64_t> seeds;
  for (int64_t version = 0; version < 20; ++version) {
    for (int64_t question = 0; question < 20; ++question) {
      for (int64_t sample = 0; sample < 20; ++sample) {
        seeds.insert(SampleSeed(3, version, question, sample, false));
        seeds.insert(SampleSeed(3, version, question, sample, true));
      }
    }
  }
  EXPECT_EQ(seeds.size(), 16000u);
}

// Student's t by hand: gains 1, 2, 3 have mean 2, deviation 1; 2 - 2.920 / sqrt(3) = 0.3142.
TEST(Curves, LowerBound) {
  EXPECT_NEAR(LowerBound95(std::vector<double>{1, 2, 3}), 2 - 2.920 / std::sqrt(3.0), 1e-9);
  EXPECT_LT(LowerBound95(std::vector<double>{0.1, -0.1, 0.2}), 0);
}

TEST(Curves, AReceiptWithoutItsFieldsIsRefused) {
  EXPECT_EQ(CurvesOf("x", Json{{"rounds", Json::array()}}).status().code(), Code::kDataLoss);
}

}  // namespace
}  // namespace tare::rl
