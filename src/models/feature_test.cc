// One feature at a time on two layers: present on both sides no bit differs; missing or wrong on
// one side it shows, from the position where it must, and no precision setting cures it.

#include <gtest/gtest.h>

#include <cmath>

#include "base/fault.h"
#include "models/op_params.h"
#include "models/score.h"
#include "models/testing_batch.h"
#include "tensor/convert.h"

namespace tare::models {
namespace {

using testing::Bits;
using testing::Context;

constexpr int64_t kWindow = 16;

// Two dense layers without any feature.
ModelConfig Plain(DType dtype = DType::kBF16) {
  ModelConfig c = MiniConfig();
  c.layers.assign(2, LayerConfig{});
  c.qk_norm = false;
  c.dtype = c.residual_dtype = c.rope.dtype = dtype;
  return c;
}

// The same weights for every configuration: a tensor's values follow from its name.
Model Make(const ModelConfig& c) {
  auto tensors = MiniTensorsFor(c);
  TARE_CHECK(tensors.ok()) << tensors.status().ToString();
  ThreadPool pool(1);
  auto model = Model::FromTensors(&pool, c, *tensors);
  TARE_CHECK(model.ok()) << model.status().ToString();
  return *std::move(model);
}

std::vector<float> Score(const ModelConfig& c, int64_t length,
                         fault::Side side = fault::Side::kNone) {
  const Model model = Make(c);
  Context context(1);
  context.ctx.side = side;
  ScoreSequence s;
  for (int64_t i = 0; i < length; ++i)
    s.tokens.push_back(static_cast<int32_t>((i * 89 + 17) % c.vocab));
  auto result = ScoreSequences(context.ctx, model, {s}, {}, &context.scratch);
  TARE_CHECK(result.ok()) << result.status().ToString();
  return result->logprob[0];
}

// First position (of the input row) whose logprob differs, or -1; and the largest difference.
struct Difference {
  int64_t first = -1, count = 0;
  double largest = 0;
};
Difference Between(const std::vector<float>& a, const std::vector<float>& b) {
  Difference d;
  TARE_CHECK(a.size() == b.size());
  const auto x = Bits(a), y = Bits(b);
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] == y[i]) continue;
    if (d.first < 0) d.first = static_cast<int64_t>(i);
    ++d.count;
    d.largest = std::max(d.largest, std::abs(static_cast<double>(a[i]) - b[i]));
  }
  return d;
}

ModelConfig With(ModelConfig c, bool window, bool sink) {
  for (LayerConfig& l : c.layers) {
    l.window = window ? kWindow : 0;
    l.sink = sink;
  }
  return c;
}

// NUM-18, NUM-20: each feature alone changes values, so a side that lacks it is seen; and it is the
// same on both sides when both have it.
TEST(FeatureTest, EachFeatureAloneIsSeenAndAgreesWithItself) {
  const std::vector<std::pair<const char*, ModelConfig>> features = [] {
    std::vector<std::pair<const char*, ModelConfig>> out;
    out.emplace_back("window", With(Plain(), true, false));
    out.emplace_back("sink", With(Plain(), false, true));
    ModelConfig c = Plain();
    c.qk_norm = true;
    out.emplace_back("qk_norm", c);
    c = Plain();
    for (LayerConfig& l : c.layers) l.moe = true;
    out.emplace_back("moe", c);
    c = Plain();
    c.qkv_bias = true;
    out.emplace_back("qkv_bias", c);
    c = Plain();
    c.rope.scaling = ops::rope::Scaling::kLinear;
    c.rope.factor = 2.0;
    out.emplace_back("rope scaling", c);
    c = Plain();
    c.norm_eps = 1e-2f;
    out.emplace_back("norm epsilon", c);
    return out;
  }();
  const std::vector<float> plain = Score(Plain(), 48);
  for (const auto& [name, config] : features) {
    const std::vector<float> with = Score(config, 48);
    EXPECT_EQ(Between(with, Score(config, 48)).count, 0) << name;
    EXPECT_GT(Between(with, plain).count, 0) << name;
  }
}

// NUM-21: the pattern of the external case. A window alone agrees; with the sink on one side only
// the values part; with the sink on both sides they agree again.
TEST(FeatureTest, OneSidedSinkPartsAndTwoSidedAgrees) {
  const std::vector<float> window = Score(With(Plain(), true, false), 48);
  const std::vector<float> sink = Score(With(Plain(), true, true), 48);
  EXPECT_EQ(Between(window, Score(With(Plain(), true, false), 48)).count, 0);
  EXPECT_EQ(Between(sink, Score(With(Plain(), true, true), 48)).count, 0);
  const Difference d = Between(window, sink);
  EXPECT_EQ(d.first, 0) << "a sink acts from the first position";
  EXPECT_GT(d.largest, 0x1p-8);
}

// NUM-19: a missing term is semantic; more precision does not take the difference away.
TEST(FeatureTest, PrecisionDoesNotCureAMissingSink) {
  const auto gap = [](DType dtype) {
    return Between(Score(With(Plain(dtype), true, false), 48),
                   Score(With(Plain(dtype), true, true), 48))
        .largest;
  };
  const double bf16 = gap(DType::kBF16), f32 = gap(DType::kF32);
  EXPECT_GT(f32, 0.5 * bf16);
  // What precision does cure: two sides with the same features.
  const double rounding = Between(Score(With(Plain(DType::kBF16), true, true), 48),
                                  Score(With(Plain(DType::kF32), true, true), 48))
                              .largest;
  EXPECT_GT(f32, 2 * rounding);
}

// H17: a window off by one shows at position `window` and nowhere before; a sequence no longer than
// the window cannot show it, so it proves nothing about the window.
TEST(FeatureTest, H17WindowShowsOnlyBeyondTheWindow) {
  const ModelConfig c = With(Plain(), true, false);
  const std::vector<float> right = Score(c, 48, fault::Side::kTrainer);
  fault::Scoped fault("attention.window_off_by_one@rollout");
  EXPECT_EQ(Between(right, Score(c, 48, fault::Side::kTrainer)).count, 0)
      << "the fault is on the other side";
  const Difference d = Between(right, Score(c, 48, fault::Side::kRollout));
  EXPECT_EQ(d.first, kWindow);
  EXPECT_EQ(
      Between(Score(c, kWindow, fault::Side::kTrainer), Score(c, kWindow, fault::Side::kRollout))
          .count,
      0);
}

TEST(FeatureTest, H17MissingSinkShowsFromTheStart) {
  const ModelConfig c = With(Plain(), true, true);
  const std::vector<float> right = Score(c, 24);
  fault::Scoped fault("attention.sink_missing@rollout");
  EXPECT_EQ(Between(right, Score(c, 24, fault::Side::kRollout)).first, 0);
}

// H17, the numbers: length 8, all scores 0, V_j = j + 1.
TEST(FeatureTest, H17Numbers) {
  ThreadPool pool(1);
  ops::Ctx ctx;
  ctx.pool = &pool;
  const auto at6 = [&](int64_t window, bool sink) {
    ops::attention::Params p;
    p.q_heads = p.kv_heads = 1;
    p.head_dim = 16;
    p.dtype = DType::kF32;
    p.scale = 0.25f;
    p.window = window;
    p.sink = sink;
    std::vector<float> q(8 * 16, 0.0f), v(8 * 16), out(8 * 16);
    for (int j = 0; j < 8; ++j) std::fill_n(v.begin() + j * 16, 16, static_cast<float>(j + 1));
    const float zero = 0.0f;
    const std::vector<ops::attention::Run> runs = {{.q_begin = 0, .q_rows = 8}};
    ops::attention::Args a;
    a.tokens = 8;
    a.q = q.data();
    a.kv.k = q.data();
    a.kv.v = v.data();
    a.kv.rows = 8;
    a.sink = sink ? &zero : nullptr;
    a.runs = runs;
    a.out = out.data();
    const Status s = ops::attention::Forward(ctx, p, a);
    TARE_CHECK(s.ok()) << s.ToString();
    return out[6 * 16];
  };
  EXPECT_FLOAT_EQ(at6(4, false), 5.5f);
  EXPECT_FLOAT_EQ(at6(5, false), 5.0f);
  EXPECT_FLOAT_EQ(at6(4, true), 4.4f);

  const auto logprob = [&](std::vector<float> logits) {
    const int32_t target = 0;
    float value = 0;
    ops::logprob::Args a;
    a.rows = 1;
    a.logits = logits.data();
    a.targets = &target;
    a.logprob = &value;
    const Status s = ops::logprob::Forward(ctx, {.vocab = 2, .logits_dtype = DType::kF32}, a);
    TARE_CHECK(s.ok()) << s.ToString();
    return value;
  };
  const float rounded = Bf16ToF32(F32ToBf16(10.03f));
  EXPECT_EQ(rounded, 10.0f);
  EXPECT_NEAR(logprob({10.03f, 9.0f}), -0.305282, 1e-6);
  EXPECT_NEAR(logprob({rounded, 9.0f}), -0.313262, 1e-6);
}

// Forward faults of one side are seen in a whole model's logprobs; without them both sides agree.
TEST(FeatureTest, PlantedFaultsOfOneSideAreSeen) {
  ModelConfig c = MiniConfig();
  const std::vector<float> right = Score(c, 300, fault::Side::kTrainer);
  EXPECT_EQ(Between(right, Score(c, 300, fault::Side::kRollout)).count, 0);
  for (const char* name :
       {"rmsnorm.epsilon", "rmsnorm.late_cast", "rope.positions_bf16", "rope.cast_before_rotate",
        "gate.cast_before_multiply", "logprob.logits_bf16", "router.ties_highest_index",
        "combine.last_slot_dropped", "attention.window_off_by_one", "attention.sink_missing"}) {
    fault::Scoped fault(std::string(name) + "@rollout");
    EXPECT_GT(Between(right, Score(c, 300, fault::Side::kRollout)).count, 0) << name;
    EXPECT_EQ(Between(right, Score(c, 300, fault::Side::kTrainer)).count, 0) << name;
  }
}

}  // namespace
}  // namespace tare::models
