// The row operators' bits against the contract written as plain loops, one value at a time.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

#include "numerics/elementary.h"
#include "ops/combine/combine.h"
#include "ops/embedding/embedding.h"
#include "ops/grad_norm/grad_norm.h"
#include "ops/headnorm/headnorm.h"
#include "ops/logprob/logprob.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rope/rope.h"
#include "ops/rows.h"

namespace tare::ops {
namespace {

class PlainTest : public testing::Test {
 protected:
  PlainTest() { ctx_.pool = &pool_; }
  std::vector<float> Normals(int64_t n, float scale = 1.0f) {
    std::normal_distribution<float> normal(0.0f, scale);
    std::vector<float> v(static_cast<size_t>(n));
    for (float& x : v) x = normal(random_);
    return v;
  }
  static std::vector<uint16_t> Low(const std::vector<float>& v) {
    std::vector<uint16_t> low;
    for (float x : v) low.push_back(F32ToBf16(x));
    return low;
  }
  std::mt19937 random_{7};
  ThreadPool pool_{3};
  Ctx ctx_;
};

// lanes(L) of fma(a, b, .), as the contract says it.
float Lanes(int lanes, const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<float> lane(static_cast<size_t>(lanes), 0.0f);
  for (size_t i = 0; i < a.size(); ++i) {
    float& l = lane[i % static_cast<size_t>(lanes)];
    l = std::fma(a[i], b[i], l);
  }
  for (size_t half = lane.size() / 2; half >= 1; half /= 2) {
    for (size_t j = 0; j < half; ++j) lane[j] = lane[j] + lane[j + half];
  }
  return lane[0];
}

#define EXPECT_BITS(want, got) \
  EXPECT_EQ(std::bit_cast<uint32_t>(want), std::bit_cast<uint32_t>(got))

TEST_F(PlainTest, RmsnormForwardAndBackward) {
  for (int64_t width : {1, 31, 127, 128, 129, 576, 1000}) {
    const int64_t rows = 40;
    const auto x = Low(Normals(rows * width)), residual = Low(Normals(rows * width, 3.0f)),
               w = Low(Normals(width));
    const auto dy = Low(Normals(rows * width)), extra = Low(Normals(rows * width));
    std::vector<uint16_t> y(x.size()), sum(x.size()), dx(x.size());
    std::vector<float> rstd(rows), dw(static_cast<size_t>(width), 0.5f);
    rmsnorm::Params p;
    p.hidden = width;
    p.add_residual = true;
    rmsnorm::Args a;
    a.rows = rows;
    a.x = x.data();
    a.residual = residual.data();
    a.w = w.data();
    a.y = y.data();
    a.residual_out = sum.data();
    a.rstd = rstd.data();
    ASSERT_TRUE(rmsnorm::Forward(ctx_, p, a).ok());
    const TokenUnit units[] = {{0, 7}, {7, 33}};
    rmsnorm::BackwardArgs b;
    b.rows = rows;
    b.h = sum.data();
    b.w = w.data();
    b.rstd = rstd.data();
    b.dy = dy.data();
    b.dresidual_out = extra.data();
    b.dx = dx.data();
    b.dw = dw.data();
    b.units = units;
    ASSERT_TRUE(rmsnorm::Backward(ctx_, p, b).ok());
    const float inv = 1.0f / static_cast<float>(width);
    std::vector<std::vector<float>> hats;
    for (int64_t t = 0; t < rows; ++t) {
      std::vector<float> h, g, hat;
      for (int64_t i = 0; i < width; ++i) {
        const size_t at = static_cast<size_t>(t * width + i);
        h.push_back(ViaBf16(ToFloat(x[at]) + ToFloat(residual[at])));
        ASSERT_EQ(sum[at], F32ToBf16(h.back()));
      }
      const float r = 1.0f / std::sqrt(std::fma(Lanes(128, h, h), inv, p.eps));
      EXPECT_BITS(r, rstd[static_cast<size_t>(t)]);
      for (int64_t i = 0; i < width; ++i) {
        const size_t at = static_cast<size_t>(t * width + i);
        const float wi = ToFloat(w[static_cast<size_t>(i)]);
        ASSERT_EQ(y[at], F32ToBf16((h[static_cast<size_t>(i)] * r) * wi))
            << "width " << width << " row " << t << " column " << i;
        g.push_back(ToFloat(dy[at]) * wi);
        hat.push_back(h[static_cast<size_t>(i)] * r);
      }
      const float c = Lanes(128, g, hat) * inv;
      for (int64_t i = 0; i < width; ++i) {
        const size_t at = static_cast<size_t>(t * width + i);
        const float u = std::fma(-c, hat[static_cast<size_t>(i)], g[static_cast<size_t>(i)]);
        ASSERT_EQ(dx[at], F32ToBf16(std::fma(u, r, ToFloat(extra[at]))))
            << "width " << width << " row " << t << " column " << i;
      }
      hats.push_back(hat);
    }
    for (int64_t i = 0; i < width; ++i) {
      float want = 0.5f;
      for (const TokenUnit& unit : units) {
        std::vector<float> left, right;
        for (int64_t t = unit.begin; t < unit.begin + unit.rows; ++t) {
          left.push_back(ToFloat(dy[static_cast<size_t>(t * width + i)]));
          right.push_back(hats[static_cast<size_t>(t)][static_cast<size_t>(i)]);
        }
        want = want + Lanes(32, left, right);
      }
      EXPECT_BITS(want, dw[static_cast<size_t>(i)]);
    }
  }
}

TEST_F(PlainTest, HeadnormInsideAFusedBufferLeavesTheRestAlone) {
  const int64_t rows = 5, heads = 3, dim = 40, stride = 200;
  auto buffer = Normals(rows * stride);
  const auto before = buffer;
  const auto w = Normals(dim);
  headnorm::Params p;
  p.heads = heads;
  p.head_dim = dim;
  p.dtype = p.weight_dtype = p.grad_dtype = DType::kF32;
  headnorm::Args a;
  a.rows = rows;
  a.x = buffer.data() + 10;
  a.x_stride = a.y_stride = stride;
  a.w = w.data();
  a.y = buffer.data() + 10;
  ASSERT_TRUE(headnorm::Forward(ctx_, p, a).ok());
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t i = 0; i < stride; ++i) {
      const size_t at = static_cast<size_t>(t * stride + i);
      if (i < 10 || i >= 10 + heads * dim) {
        EXPECT_BITS(before[at], buffer[at]);
        continue;
      }
      const int64_t head = (i - 10) / dim;
      const auto begin = before.begin() + t * stride + 10 + head * dim;
      const std::vector<float> x(begin, begin + dim);
      const float r =
          1.0f / std::sqrt(std::fma(Lanes(32, x, x), 1.0f / static_cast<float>(dim), p.eps));
      const size_t column = static_cast<size_t>((i - 10) % dim);
      EXPECT_BITS((x[column] * r) * w[column], buffer[at]);
    }
  }
}

struct Piece {
  float m, l, u;
};
Piece MergeRuns(Piece a, Piece b) {
  if (b.l == 0) return a;
  if (a.l == 0) return b;
  if (b.m > a.m) std::swap(a, b);
  const float s = b.m - a.m;
  const float f = numerics::Exp2(s * 0x1.715476p0f);
  return {a.m, std::fma(b.l, f, a.l), std::fma(std::fma(b.l, s, b.u), f, a.u)};
}

TEST_F(PlainTest, LogprobOverVocabularyLeaves) {
  for (int64_t vocab : {1, 7, 9, 127, 1023, 1024, 1025, 5000, 49152}) {
    const float temperature = 0.7f;
    auto logits = Normals(vocab, 3.0f);
    if (vocab > 300) {
      for (int64_t i = 0; i < 260; ++i)
        logits[static_cast<size_t>(i)] = -INFINITY;  // whole blocks of nothing
    }
    const int32_t target = static_cast<int32_t>(vocab - 1);
    float got = 0, entropy = 0, m = 0, log_sum = 0;
    logprob::Args a;
    a.rows = 1;
    a.logits = logits.data();
    a.targets = &target;
    a.temperature = &temperature;
    a.logprob = &got;
    a.entropy = &entropy;
    a.max = &m;
    a.log_sum = &log_sum;
    ASSERT_TRUE(logprob::Forward(ctx_, {.vocab = vocab}, a).ok());
    std::vector<Piece> leaves;
    const int64_t leaf_size = (vocab + 7) / 8;
    for (int64_t leaf = 0; leaf < 8; ++leaf) {
      Piece run = {-INFINITY, 0, 0};
      const int64_t end = std::min(vocab, (leaf + 1) * leaf_size);
      for (int64_t at = leaf * leaf_size; at < end; at += 128) {
        Piece block = {-INFINITY, 0, 0};
        const int64_t stop = std::min(end, at + 128);
        for (int64_t i = at; i < stop; ++i)
          block.m = std::max(block.m, logits[static_cast<size_t>(i)] / temperature);
        float l[4] = {}, u[4] = {};
        for (int64_t i = at; i < stop && block.m > -INFINITY; ++i) {
          const float d = logits[static_cast<size_t>(i)] / temperature - block.m;
          const float e = numerics::Exp2(d * 0x1.715476p0f);
          l[(i - at) / 2 % 4] += e;
          u[(i - at) / 2 % 4] += e == 0 ? 0.0f : e * d;
        }
        block.l = (l[0] + l[1]) + (l[2] + l[3]);
        block.u = (u[0] + u[1]) + (u[2] + u[3]);
        run = MergeRuns(run, block);
      }
      leaves.push_back(run);
    }
    const Piece whole =
        MergeRuns(MergeRuns(MergeRuns(leaves[0], leaves[1]), MergeRuns(leaves[2], leaves[3])),
                  MergeRuns(MergeRuns(leaves[4], leaves[5]), MergeRuns(leaves[6], leaves[7])));
    const float log = numerics::Log(whole.l);
    SCOPED_TRACE("vocabulary " + std::to_string(vocab));
    EXPECT_BITS(whole.m, m);
    EXPECT_BITS(log, log_sum);
    EXPECT_BITS((logits[static_cast<size_t>(target)] / temperature - whole.m) - log, got);
    EXPECT_BITS(log - whole.u / whole.l, entropy);
  }
}

TEST_F(PlainTest, LogprobPropagatesNanAsTheCanonicalOneAndSkipsRowsWithoutATarget) {
  std::vector<float> logits(2000, 1.0f);
  logits[700] = std::bit_cast<float>(0xffc0beefu);
  const int32_t targets[] = {3, -1};
  float out[2], entropy[2];
  logprob::Args a;
  a.rows = 2;
  a.logits = logits.data();
  a.targets = targets;
  a.logprob = out;
  a.entropy = entropy;
  ASSERT_TRUE(logprob::Forward(ctx_, {.vocab = 1000}, a).ok());
  EXPECT_EQ(std::bit_cast<uint32_t>(out[0]), 0x7fffffffu);
  EXPECT_EQ(std::bit_cast<uint32_t>(entropy[0]), 0x7fffffffu);
  EXPECT_BITS(0.0f, out[1]);
  EXPECT_NEAR(entropy[1], std::log(1000.0), 1e-4);
}

TEST_F(PlainTest, CombineInSlotOrder) {
  const int64_t rows = 9, hidden = 70, k = 3;
  const auto y = Low(Normals(rows * k * hidden));
  const auto w = Normals(rows * k);
  std::vector<int32_t> slot_row;
  for (int64_t i = 0; i < rows * k; ++i)
    slot_row.push_back(static_cast<int32_t>((i * 11 + 5) % (rows * k)));
  slot_row[4] = -1;
  std::vector<uint16_t> out(static_cast<size_t>(rows * hidden));
  ASSERT_TRUE(combine::Forward(ctx_, {.hidden = hidden, .top_k = k},
                               {rows, rows * k, y.data(), slot_row.data(), w.data(), out.data()})
                  .ok());
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t i = 0; i < hidden; ++i) {
      float acc = 0;
      for (int64_t s = 0; s < k; ++s) {
        const int32_t row = slot_row[static_cast<size_t>(t * k + s)];
        if (row >= 0)
          acc = std::fma(w[static_cast<size_t>(t * k + s)],
                         ToFloat(y[static_cast<size_t>(row * hidden + i)]), acc);
      }
      ASSERT_EQ(out[static_cast<size_t>(t * hidden + i)], F32ToBf16(acc));
    }
  }
}

// A dense definition of the embedding's gradient: every token of the unit contributes, most of them
// +0.
TEST_F(PlainTest, EmbeddingGradientEqualsItsDenseDefinition) {
  const int64_t rows = 75, hidden = 300, vocab = 5;
  const auto dy = Low(Normals(rows * hidden));
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < rows; ++t) ids.push_back(static_cast<int32_t>(random_() % 4));
  std::vector<float> got(static_cast<size_t>(vocab * hidden), 0.0f), want = got;
  const TokenUnit units[] = {{0, 40}, {40, 35}};
  ASSERT_TRUE(embedding::Backward(ctx_, {.vocab = vocab, .hidden = hidden},
                                  {rows, ids.data(), dy.data(), got.data(), units})
                  .ok());
  for (int64_t v = 0; v < vocab; ++v) {
    for (int64_t i = 0; i < hidden; ++i) {
      for (const TokenUnit& unit : units) {
        std::vector<float> left, right;
        for (int64_t t = unit.begin; t < unit.begin + unit.rows; ++t) {
          const bool here = ids[static_cast<size_t>(t)] == v;
          left.push_back(here ? ToFloat(dy[static_cast<size_t>(t * hidden + i)]) : 0.0f);
          right.push_back(1.0f);
        }
        float& sum = want[static_cast<size_t>(v * hidden + i)];
        sum = sum + Lanes(32, left, right);
      }
      EXPECT_BITS(want[static_cast<size_t>(v * hidden + i)],
                  got[static_cast<size_t>(v * hidden + i)]);
    }
  }
  const int32_t bad[] = {0, 5};
  const Status status = embedding::Backward(ctx_, {.vocab = 5, .hidden = hidden},
                                            {2, bad, dy.data(), got.data(), {}});
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("row 1"), std::string::npos) << status.message();
}

// Leaves of shards that hold whole rows, then one tree: the norm of one process.
TEST_F(PlainTest, GradNormOfShardsEqualsTheWhole) {
  const auto a = Normals(7 * 2500), b = Normals(300);
  const std::vector<grad_norm::Entry> entries = {{"a", a.data(), 7, 2500}, {"b", b.data(), 1, 300}};
  const auto whole = grad_norm::Compute(ctx_, entries, 1.0f);
  ASSERT_TRUE(whole.ok()) << whole.status().ToString();
  std::vector<float> leaves(7 * 3 + 1);
  for (int64_t cut : {1, 3, 6}) {
    ASSERT_TRUE(grad_norm::Leaves(ctx_, entries[0], 0, cut, leaves.data()).ok());
    ASSERT_TRUE(grad_norm::Leaves(ctx_, entries[0], cut, 7, leaves.data() + cut * 3).ok());
    ASSERT_TRUE(grad_norm::Leaves(ctx_, entries[1], 0, 1, leaves.data() + 21).ok());
    EXPECT_EQ(grad_norm::Tree(leaves), whole->sum_of_squares);
  }
  const std::vector<float> row(a.begin(), a.begin() + 1024);
  EXPECT_BITS(Lanes(128, row, row), leaves[0]);
  EXPECT_NEAR(whole->factor, 1.0f / whole->norm, 1e-6);
  const std::vector<grad_norm::Entry> twice = {entries[1], entries[0]};
  EXPECT_EQ(grad_norm::Compute(ctx_, twice, 1.0f).status().code(), Code::kInvalidArgument);
  auto bad = b;
  bad[123] = INFINITY;
  const std::vector<grad_norm::Entry> infinite = {entries[0], {"b", bad.data(), 1, 300}};
  const auto refused = grad_norm::Compute(ctx_, infinite, 1.0f);
  EXPECT_NE(refused.status().message().find("'b' row 0 block 0"), std::string::npos)
      << refused.status().ToString();
}

// The tree adds in float64: in f32 the small leaves beside 2^24 would be lost.
TEST_F(PlainTest, GradNormTreeIsFloat64) {
  std::vector<float> leaves(4097, 1.0f);
  leaves[0] = 0x1p24f;
  EXPECT_EQ(grad_norm::Tree(leaves), 0x1p24 + 4096);
}

TEST_F(PlainTest, RopeTableIsRoundedOnceAndRefusesNonsense) {
  rope::Params p;
  p.head_dim = p.rotary_dim = 64;
  p.theta = 100000.0;
  const auto table = rope::BuildTable(p, 5000);
  ASSERT_TRUE(table.ok());
  for (int64_t position : {0, 1, 257, 4999}) {
    for (int64_t i = 0; i < 32; ++i) {
      const long double angle = static_cast<long double>(position) *
                                powl(100000.0L, -2.0L * static_cast<long double>(i) / 64.0L);
      EXPECT_NEAR(table->cos[static_cast<size_t>(position * 32 + i)],
                  static_cast<float>(cosl(angle)), 6.1e-8f);
      EXPECT_NEAR(table->sin[static_cast<size_t>(position * 32 + i)],
                  static_cast<float>(sinl(angle)), 6.1e-8f);
    }
  }
  p.rotary_dim = 63;
  EXPECT_EQ(rope::BuildTable(p, 10).status().code(), Code::kInvalidArgument);
  p.rotary_dim = 64;
  p.scaling = rope::Scaling::kLlama3;
  p.factor = 8;
  EXPECT_NE(rope::BuildTable(p, 10).status().message().find("original_max_position"),
            std::string::npos);
  EXPECT_EQ(rope::BuildTable({.head_dim = 64, .rotary_dim = 64}, 0).status().code(),
            Code::kInvalidArgument);
}

}  // namespace
}  // namespace tare::ops
