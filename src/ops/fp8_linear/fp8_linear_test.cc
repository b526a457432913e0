// fp8_linear: bits against the definition written out with the plain step, float64 oracle,
// refusals.

#include "ops/fp8_linear/fp8_linear.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "numerics/fp.h"
#include "numerics/lanes.h"
#include "numerics/sm90.h"
#include "ops/linear/contraction_testing.h"
#include "tensor/convert.h"

namespace tare::ops::fp8_linear {
namespace {

using testing_support::Buffer;

struct Problem {
  Params p;
  int64_t m;
  std::vector<uint8_t> x, w;
  std::vector<float> xs, ws;
  Buffer bias;
  Problem(int64_t m, int64_t n, int64_t k, int32_t segments, uint32_t seed)
      : m(m), bias(DType::kBF16, n) {
    p.n = n, p.k = k, p.segments = segments, p.y_dtype = DType::kF32, p.bias = true;
    const int64_t blocks = (k + 127) / 128;
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    const auto codes = [&](std::vector<uint8_t>& v, int64_t count) {
      for (int64_t i = 0; i < count; ++i) v.push_back(F32ToE4m3(40.0f * normal(rng)));
    };
    codes(x, m * k), codes(w, n * k);
    for (int64_t i = 0; i < m * blocks; ++i) xs.push_back(std::abs(normal(rng)) * 0.01f);
    for (int64_t i = 0; i < (n + 127) / 128 * blocks; ++i)
      ws.push_back(std::abs(normal(rng)) * 0.01f);
    for (int64_t i = 0; i < n; ++i) bias.set(i, normal(rng));
  }
  Buffer Run(ThreadPool& pool, Profile profile, int64_t rows, int64_t first = 0) {
    Buffer y(DType::kF32, rows * p.n);
    const int64_t blocks = (p.k + 127) / 128;
    Args a{.m = rows,
           .x = x.data() + first * p.k,
           .x_scale = xs.data() + first * blocks,
           .w = w.data(),
           .w_scale = ws.data(),
           .bias = bias.data(),
           .y = y.data()};
    const Status s = Forward({.pool = &pool, .profile = profile}, p, a);
    EXPECT_TRUE(s.ok()) << s.ToString();
    EXPECT_TRUE(y.GuardsIntact());
    return y;
  }
};

float Definition(const Problem& q, Profile profile, int64_t m, int64_t n) {
  const int64_t blocks = (q.p.k + 127) / 128;
  std::vector<float> runs(static_cast<size_t>(q.p.segments), 0.0f);
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t k0 = b * 128, count = std::min<int64_t>(128, q.p.k - k0);
    const uint8_t* x = &q.x[static_cast<size_t>(m * q.p.k + k0)];
    const uint8_t* w = &q.w[static_cast<size_t>(n * q.p.k + k0)];
    float partial = 0.0f;
    if (profile == Profile::kSm90Mma) {
      partial = numerics::Sm90Chain<numerics::MmaType::kE4M3>(x, w, count, 0.0f);
    } else {
      for (int64_t i = 0; i < count; ++i)
        partial = numerics::Fma(E4m3ToF32(x[i]), E4m3ToF32(w[i]), partial);
    }
    const float scale =
        q.xs[static_cast<size_t>(m * blocks + b)] * q.ws[static_cast<size_t>(n / 128 * blocks + b)];
    float& acc = runs[static_cast<size_t>(b / (blocks / q.p.segments))];
    acc = numerics::Fma(partial, scale, acc);
  }
  return numerics::NeighbourTree(runs.data(), q.p.segments) + q.bias.at(n);
}

TEST(Fp8Linear, BitsAreTheDefinitionInEveryBatch) {
  ThreadPool pool(2), other(5);
  for (Profile profile : {Profile::kIeeeF32, Profile::kSm90Mma}) {
    for (auto [m, n, k, s] :
         {std::tuple{3, 5, 128, 1}, {70, 130, 300, 1}, {2, 200, 512, 4}, {9, 64, 1, 1}}) {
      Problem q(m, n, k, s, 5);
      const Buffer y = q.Run(pool, profile, m);
      for (int64_t i = 0; i < m * n; ++i) {
        const float want = Definition(q, profile, i / n, i % n);
        ASSERT_EQ(numerics::BitsOf(y.at(i)), numerics::BitsOf(want))
            << m << "x" << n << "x" << k << " at " << i;
      }
      EXPECT_TRUE(q.Run(other, profile, m) == y);
      const Buffer last = q.Run(pool, profile, 1, m - 1);
      for (int64_t i = 0; i < n; ++i) ASSERT_EQ(last.at(i), y.at((m - 1) * n + i));
    }
  }
}

// sm90-mma keeps 13 bits a step (2^-13 of the running sum each), ieee-f32 rounds at 2^-24.
TEST(Fp8Linear, IsNearFloat64) {
  ThreadPool pool(2);
  Problem q(4, 70, 640, 1, 8);
  for (Profile profile : {Profile::kIeeeF32, Profile::kSm90Mma}) {
    const Buffer y = q.Run(pool, profile, 4);
    double worst = 0, scale = 0;
    for (int64_t i = 0; i < 4 * 70; ++i) {
      double want = static_cast<double>(q.bias.at(i % 70));
      for (int64_t k = 0; k < 640; ++k) {
        want += static_cast<double>(E4m3ToF32(q.x[static_cast<size_t>(i / 70 * 640 + k)])) *
                static_cast<double>(E4m3ToF32(q.w[static_cast<size_t>(i % 70 * 640 + k)])) *
                static_cast<double>(q.xs[static_cast<size_t>(i / 70 * 5 + k / 128)]) *
                static_cast<double>(q.ws[static_cast<size_t>(k / 128)]);
      }
      scale = std::max(scale, std::abs(want));
      worst = std::max(worst, std::abs(want - static_cast<double>(y.at(i))));
    }
    EXPECT_LE(worst, scale * (profile == Profile::kIeeeF32 ? 0x1p-19 : 0x1p-9));
    EXPECT_GT(worst, 0.0);
  }
}

TEST(Fp8Linear, RefusesByName) {
  ThreadPool pool(1);
  Problem q(2, 8, 128, 1, 1);
  q.p.segments = 2;
  EXPECT_THAT(Check(q.p).message(), testing::HasSubstr("multiple of 256"));
  q.p.segments = 1, q.p.w_dtype = DType::kE5M2;
  EXPECT_THAT(Check(q.p).message(), testing::HasSubstr("w is e5m2"));
  q.p.w_dtype = DType::kE4M3;
  Args a{.m = 2,
         .x = q.x.data(),
         .x_scale = q.xs.data(),
         .w = q.w.data(),
         .bias = q.bias.data(),
         .y = q.x.data()};
  EXPECT_THAT(Forward({.pool = &pool}, q.p, a).message(), testing::HasSubstr("w_scale is null"));
}

}  // namespace
}  // namespace tare::ops::fp8_linear
