// Public failures of train-inference consistency, as far as they are an operator's matter: H01,
// H02, H05 (loss part), H09, H11, H12, H15, H17 (head), H19.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "ops/adamw/adamw.h"
#include "ops/logprob/logprob.h"
#include "ops/policy_loss/policy_loss.h"
#include "ops/quantize/quantize.h"
#include "ops/router/router.h"
#include "ops/rows.h"
#include "ops/sampling/sampling.h"
#include "tensor/convert.h"

namespace tare::ops {
namespace {

class CasesTest : public testing::Test {
 protected:
  CasesTest() { ctx_.pool = &pool_; }
  float Logprob(const std::vector<float>& logits, int32_t target, float temperature,
                DType dtype = DType::kF32) {
    std::vector<uint16_t> low;
    for (float v : logits) low.push_back(F32ToBf16(v));
    logprob::Args a;
    a.rows = 1;
    a.logits = dtype == DType::kF32 ? static_cast<const void*>(logits.data()) : low.data();
    a.targets = &target;
    a.temperature = &temperature;
    float out = 0;
    a.logprob = &out;
    const Status status = logprob::Forward(
        ctx_, {.vocab = static_cast<int64_t>(logits.size()), .logits_dtype = dtype}, a);
    EXPECT_TRUE(status.ok()) << status.ToString();
    return out;
  }
  ThreadPool pool_{2};
  Ctx ctx_;
};

// H01: temperature is part of the contract; T = 0 is refused, never a division by zero.
TEST_F(CasesTest, H01TemperatureIsAppliedOnceAndZeroIsRefused) {
  const std::vector<float> logits = {2, 1, 0, -1};
  EXPECT_NEAR(Logprob(logits, 1, 1.0f), -1.440190, 1e-6);
  EXPECT_NEAR(Logprob(logits, 1, 0.5f), -2.145078, 1e-6);
  EXPECT_EQ(Logprob({4, 2, 0, -2}, 1, 1.0f), Logprob(logits, 1, 0.5f))
      << "restated under the other contract: 0 diff";
  const int32_t target = 1;
  const float zero = 0.0f;
  float out = 0;
  logprob::Args a;
  a.rows = 1;
  a.logits = logits.data();
  a.targets = &target;
  a.temperature = &zero;
  a.logprob = &out;
  const Status status = logprob::Forward(ctx_, {.vocab = 4}, a);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("greedy"), std::string::npos) << status.message();
}

// H02: the processed logprob is over the kept set; replaying that set on the other side gives 0
// diff.
TEST_F(CasesTest, H02ProcessedLogprobIsOverTheKeptSetAndReplays) {
  const std::vector<float> logits = {2, 1, 0, -1};
  const float top_p = 0.9f;
  const int32_t position = 0;
  int32_t token = 0, kept = 0;
  float raw = 0, processed = 0;
  uint8_t set = 0;
  sampling::Args a;
  a.rows = 1;
  a.logits = logits.data();
  a.top_p = &top_p;
  a.position = &position;
  a.token = &token;
  a.logprob = &raw;
  a.processed_logprob = &processed;
  a.kept = &kept;
  a.candidates = &set;
  bool seen = false;
  for (uint64_t seed = 0; seed < 64; ++seed) {
    a.seed = &seed;
    ASSERT_TRUE(sampling::Forward(ctx_, {.vocab = 4}, a).ok());
    EXPECT_EQ(kept, 3);
    EXPECT_EQ(set, 0b0111);
    EXPECT_LT(token, 3);
    EXPECT_NEAR(processed - raw, 0.032584, 1e-6);  // -ln S
    float replayed = 0;
    ASSERT_TRUE(sampling::Replay(ctx_, {.vocab = 4},
                                 {.rows = 1,
                                  .logits = logits.data(),
                                  .candidates = &set,
                                  .targets = &token,
                                  .logprob = &replayed})
                    .ok());
    EXPECT_EQ(std::bit_cast<uint32_t>(replayed), std::bit_cast<uint32_t>(processed));
    if (token == 1) {
      seen = true;
      EXPECT_NEAR(processed, -1.407606, 1e-6);
      EXPECT_NEAR(raw, -1.440190, 1e-6);
    }
  }
  EXPECT_TRUE(seen);
  // Variant: a padded vocabulary on one side.
  const fault::Scoped padded("logprob.padded_vocabulary@none");
  EXPECT_LT(Logprob(logits, 1, 1.0f), -1.440190 - 0.1);
}

// H05, loss: masked slots hold what would be inf in a ratio; loss and gradient equal those of a
// batch that holds -1 there.
TEST_F(CasesTest, H05MaskedSlotsReachNeitherLossNorGradient) {
  const uint8_t mask[] = {1, 0, 0, 1, 0};
  const float advantage[] = {1.0f, 0.5f, -1.0f, -0.5f, 2.0f};
  const auto run = [&](std::vector<float> rollout, std::vector<float> trainer, bool fault_on) {
    const fault::Scoped scoped(fault_on ? "policy_loss.mask_by_multiply@none" : "");
    const TokenUnit unit = {0, 5};
    double loss = 0;
    std::vector<float> gradient(5), tokens(5);
    policy_loss::Args a;
    a.rows = 5;
    a.logprob = trainer.data();
    a.old_logprob = rollout.data();
    a.advantage = advantage;
    a.mask = mask;
    a.global_count = 2;
    a.units = {&unit, 1};
    a.token_loss = tokens.data();
    a.loss = &loss;
    EXPECT_TRUE(policy_loss::Forward(ctx_, {}, a).ok());
    policy_loss::BackwardArgs b;
    b.rows = 5;
    b.logprob = trainer.data();
    b.old_logprob = rollout.data();
    b.advantage = advantage;
    b.mask = mask;
    b.global_count = 2;
    b.dlogprob = gradient.data();
    EXPECT_TRUE(policy_loss::Backward(ctx_, {}, b).ok());
    return std::pair(loss, gradient);
  };
  const float nan = std::nanf(""), inf = INFINITY;
  const auto clean = run({-0.5f, -1, -1, -1, -1}, {-0.5f, -1, -1, -1, -1}, false);
  const auto dirty = run({-0.5f, nan, -inf, -1, -100}, {-0.5f, nan, -inf, -1, -1}, false);
  EXPECT_TRUE(std::isfinite(dirty.first));
  EXPECT_EQ(clean.first, dirty.first);
  for (int t = 0; t < 5; ++t)
    EXPECT_EQ(std::bit_cast<uint32_t>(clean.second[t]), std::bit_cast<uint32_t>(dirty.second[t]));
  // Negative control: masking by multiplication lets the NaN through.
  EXPECT_FALSE(
      std::isfinite(run({-0.5f, nan, -inf, -1, -100}, {-0.5f, nan, -inf, -1, -1}, true).first));
}

// H09: value down, index up, distinct; -inf may be chosen, but never twice.
TEST_F(CasesTest, H09TiesInExpertChoice) {
  const float inf = INFINITY;
  const auto choose = [&](std::vector<float> logits, int64_t k) {
    std::vector<uint16_t> x;
    for (float v : logits) x.push_back(F32ToBf16(v));
    std::vector<int32_t> ids(static_cast<size_t>(k));
    std::vector<float> weights(static_cast<size_t>(k));
    router::Args a;
    a.rows = 1;
    a.logits = x.data();
    a.ids = ids.data();
    a.weights = weights.data();
    const Status status =
        router::Forward(ctx_, {.experts = 4, .top_k = k, .logits_dtype = DType::kBF16}, a);
    EXPECT_TRUE(status.ok()) << status.ToString();
    return ids;
  };
  EXPECT_EQ(choose({.5f, .25f, .25f, .25f}, 2), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(choose({.25f, .5f, .125f, .125f}, 2), (std::vector<int32_t>{1, 0}));
  EXPECT_EQ(choose({-inf, -inf, 0, -inf}, 3), (std::vector<int32_t>{2, 0, 1}));
  EXPECT_EQ(choose({-0.0f, 0.0f, -1, -1}, 2), (std::vector<int32_t>{0, 1})) << "+0 and -0 tie";
  {
    const fault::Scoped ties("router.ties_highest_index@none");
    EXPECT_EQ(choose({.5f, .25f, .25f, .25f}, 2), (std::vector<int32_t>{0, 3}));
  }
  {
    const fault::Scoped sorted("router.order_sorted@none");
    EXPECT_EQ(choose({.25f, .5f, .125f, .125f}, 2), (std::vector<int32_t>{0, 1}));
  }
}

TEST_F(CasesTest, RouterNamesANan) {
  const float logits[] = {0, 1, 2, 3, 0, std::nanf(""), 2, 3};
  int32_t ids[4] = {7, 7, 7, 7};
  float weights[4];
  router::Args a;
  a.rows = 2;
  a.logits = logits;
  a.ids = ids;
  a.weights = weights;
  const Status status = router::Forward(ctx_, {.experts = 4, .top_k = 2}, a);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("row 1 expert 1"), std::string::npos) << status.message();
  EXPECT_EQ(ids[0], 7) << "nothing is written before every row was looked at";
}

// H11: backward takes the saved decision; a recomputed one that differs is an error, not a
// gradient.
TEST_F(CasesTest, H11RecomputedDecisionDiffersFromSaved) {
  const int32_t saved[] = {0}, recomputed[] = {1};
  EXPECT_TRUE(router::CheckDecision(1, 1, saved, saved).ok());
  const Status status = router::CheckDecision(1, 1, saved, recomputed);
  EXPECT_EQ(status.code(), Code::kPrecondition);
  EXPECT_NE(status.message().find("recomputed decision differs from saved"), std::string::npos)
      << status.message();
  // The gradient of the weight reaches the logits of the saved expert, whatever a recompute would
  // say: logits 1.0 and 0.99609375 are equal once they lose three mantissa bits.
  const float logits[] = {0.99609375f, 1.0f};
  int32_t ids[1];
  float weights[1], probs[2], gradient[2];
  const float one = 1.0f;
  const router::Params p = {.experts = 2, .top_k = 1, .renormalise = false};
  router::Args a;
  a.rows = 1;
  a.logits = logits;
  a.ids = ids;
  a.weights = weights;
  a.probs = probs;
  ASSERT_TRUE(router::Forward(ctx_, p, a).ok());
  EXPECT_EQ(ids[0], 1);
  router::BackwardArgs b;
  b.rows = 1;
  b.ids = ids;
  b.probs = probs;
  b.dweights = &one;
  b.dlogits = gradient;
  ASSERT_TRUE(router::Backward(ctx_, p, b).ok());
  EXPECT_GT(gradient[1], 0.0f);
  EXPECT_LT(gradient[0], 0.0f);
}

// H12: a scale belongs to one row; one scale for the batch moves a victim's codes with its
// neighbour.
TEST_F(CasesTest, H12OneActivationScaleForTheWholeBatch) {
  const auto dequantised = [&](std::vector<float> x) {
    const int64_t rows = static_cast<int64_t>(x.size()) / 2;
    std::vector<uint8_t> q(x.size());
    std::vector<float> scale(static_cast<size_t>(rows));
    const Status status = quantize::Forward(ctx_, {.width = 2, .dtype = DType::kF32},
                                            {rows, x.data(), q.data(), scale.data()});
    EXPECT_TRUE(status.ok()) << status.ToString();
    return std::pair(E4m3ToF32(q[1]) * scale[0], scale[0]);
  };
  const auto alone = dequantised({1.0f, 0.3f});
  EXPECT_NEAR(alone.first, 0.285714, 1e-6);
  EXPECT_EQ(alone.second, 1.0f / 448.0f);
  EXPECT_EQ(dequantised({1.0f, 0.3f, 448.0f, 1.0f}), alone);
  const fault::Scoped shared("quantize.per_tensor_scale@none");
  EXPECT_EQ(dequantised({1.0f, 0.3f}), alone);
  const auto mixed = dequantised({1.0f, 0.3f, 448.0f, 1.0f});
  EXPECT_EQ(mixed.second, 1.0f);
  EXPECT_NEAR(mixed.first, 0.3125, 1e-6);
}

// Every code and every halfway case of e4m3 against the exact conversion of tensor/convert.h.
TEST_F(CasesTest, QuantizerRoundsToNearestEvenEverywhere) {
  std::vector<float> values;
  for (int code = 0; code < 0x7f; ++code) {
    const float v = E4m3ToF32(static_cast<uint8_t>(code));
    const float next = code < 0x7e ? E4m3ToF32(static_cast<uint8_t>(code + 1)) : 464.0f;
    const float half = (v + next) * 0.5f;
    for (float x : {v, half, std::nextafter(half, 0.0f), std::nextafter(half, 1000.0f),
                    std::nextafter(v, 1000.0f)}) {
      if (x <= 448.0f) values.insert(values.end(), {x, -x});
    }
  }
  for (float v : values) {
    const float x[] = {448.0f, v};
    uint8_t q[2];
    float scale;
    ASSERT_TRUE(
        quantize::Forward(ctx_, {.width = 2, .dtype = DType::kF32}, {1, x, q, &scale}).ok());
    EXPECT_EQ(scale, 1.0f);
    EXPECT_EQ(q[1], F32ToE4m3(v)) << v;
  }
  const float bad[] = {1.0f, INFINITY};
  uint8_t q[2];
  float scale;
  EXPECT_EQ(quantize::Forward(ctx_, {.width = 2, .dtype = DType::kF32}, {1, bad, q, &scale}).code(),
            Code::kInvalidArgument);
}

// H15: steps below half a bf16 spacing move the f32 master at once and the served bytes at step 21.
TEST_F(CasesTest, H15UpdateTooSmallForBf16) {
  std::vector<float> master(4096, 0.02001953125f), m(4096), v(4096), grad(4096, 1.0f);
  std::vector<uint16_t> copy(4096, F32ToBf16(0.02001953125f));
  const uint16_t before = copy[0];
  int first_master = 0, first_copy = 0;
  for (int step = 1; step <= 30; ++step) {
    // With beta 0 and eps 0 each step is exactly -lr.
    const adamw::Params p = {.beta1 = 0.0f, .beta2 = 0.0f, .eps = 0.0f};
    ASSERT_TRUE(adamw::Step(ctx_, p,
                            {.count = 4096,
                             .master = master.data(),
                             .m = m.data(),
                             .v = v.data(),
                             .grad = grad.data(),
                             .copy = copy.data(),
                             .lr = 3e-6f,
                             .step = step})
                    .ok());
    if (first_master == 0 && master[17] != 0.02001953125f) first_master = step;
    if (first_copy == 0 && copy[17] != before) first_copy = step;
  }
  EXPECT_EQ(first_master, 1);
  EXPECT_EQ(first_copy, 21);
}

// H17, head: a one-sided cast of the logits to bf16.
TEST_F(CasesTest, H17HeadCastOnOneSide) {
  const std::vector<float> logits = {10.03f, 9.0f};
  const float full = Logprob(logits, 0, 1.0f);
  const float rounded = Logprob(logits, 0, 1.0f, DType::kBF16);
  EXPECT_NEAR(full, -0.305282, 1e-6);
  EXPECT_NEAR(rounded, -0.313262, 1e-6);
  const fault::Scoped cast("logprob.logits_bf16@rollout");
  ctx_.side = fault::Side::kTrainer;
  EXPECT_EQ(Logprob(logits, 0, 1.0f), full);
  ctx_.side = fault::Side::kRollout;
  EXPECT_EQ(Logprob(logits, 0, 1.0f), rounded) << "rounded on both sides: 0 diff";
}

// H19: lost moments show at the third step, not at the first forward.
TEST_F(CasesTest, H19MomentsLostAtRestore) {
  const adamw::Params p = {};
  const auto step = [&](float& w, float& m, float& v, float g, int64_t t) {
    ASSERT_TRUE(
        adamw::Step(ctx_, p,
                    {.count = 1, .master = &w, .m = &m, .v = &v, .grad = &g, .lr = 0.1f, .step = t})
            .ok());
  };
  float w = 1, m = 0, v = 0;
  step(w, m, v, 1, 1);
  EXPECT_NEAR(w, 0.9f, 1e-6);
  step(w, m, v, 1, 2);
  EXPECT_NEAR(w, 0.8f, 1e-6);
  float restored = w, m0 = 0, v0 = 0;
  step(w, m, v, 0, 3);
  step(restored, m0, v0, 0, 3);
  EXPECT_NEAR(w, 0.72270f, 1e-5);
  EXPECT_NEAR(restored, 0.8f, 1e-6);
}

}  // namespace
}  // namespace tare::ops
