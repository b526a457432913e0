// Parts of operators that the generic suite cannot reach: the dispatch plan, the straight-through
// backward of quantize, and the bits of gate and adamw against their contract as plain loops.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

#include "numerics/elementary.h"
#include "ops/adamw/adamw.h"
#include "ops/dispatch/dispatch.h"
#include "ops/gate/gate.h"
#include "ops/quantize/quantize.h"
#include "ops/rows.h"
#include "tensor/convert.h"

namespace tare::ops {
namespace {

using testing::HasSubstr;

// A place follows from the routes alone: sorted by (expert, token, slot), padded slots left out.
TEST(DispatchPlan, EqualsAStableSortOfTheRoutes) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const int64_t rows = static_cast<int64_t>(random() % 40), top_k = 1 + random() % 4,
                  experts = 1 + random() % 9;
    std::vector<int32_t> ids(static_cast<size_t>(rows * top_k));
    for (int32_t& id : ids)
      id = static_cast<int32_t>(random() % static_cast<uint32_t>(experts + 1)) - 1;
    const auto plan = dispatch::BuildPlan(rows, top_k, experts, ids.data());
    ASSERT_TRUE(plan.ok()) << plan.status().ToString();
    std::vector<size_t> order;
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] >= 0) order.push_back(i);
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return ids[a] < ids[b]; });
    ASSERT_EQ(plan->row_token.size(), order.size());
    ASSERT_EQ(plan->slot_row.size(), ids.size());
    std::vector<int32_t> want_rows(ids.size(), -1);
    for (size_t r = 0; r < order.size(); ++r) {
      want_rows[order[r]] = static_cast<int32_t>(r);
      EXPECT_EQ(plan->row_token[r], static_cast<int32_t>(order[r] / static_cast<size_t>(top_k)));
    }
    EXPECT_EQ(plan->slot_row, want_rows);
    ASSERT_EQ(plan->offsets.size(), static_cast<size_t>(experts + 1));
    EXPECT_EQ(plan->offsets.front(), 0);
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t count = std::count(ids.begin(), ids.end(), static_cast<int32_t>(e));
      EXPECT_EQ(plan->offsets[static_cast<size_t>(e + 1)] - plan->offsets[static_cast<size_t>(e)],
                count);
    }
  }
}

TEST(DispatchPlan, NamesARouteOutsideTheExperts) {
  for (int32_t bad : {4, -2, INT32_MAX, INT32_MIN}) {
    const int32_t ids[] = {0, 3, -1, bad};
    const auto plan = dispatch::BuildPlan(2, 2, 4, ids);
    EXPECT_EQ(plan.status().code(), Code::kInvalidArgument);
    EXPECT_THAT(plan.status().message(), HasSubstr("row 1 slot 1"));
    EXPECT_THAT(plan.status().message(), HasSubstr(std::to_string(bad)));
  }
}

// Straight-through: the bits of the gradient as they came, a NaN as the canonical one.
TEST(QuantizeBackward, CopiesTheGradientWhateverTheWidthAndThreads) {
  std::mt19937 random(5);
  for (int64_t width : {1, 7, 127, 128, 129, 300}) {
    for (int threads : {1, 3, 8}) {
      ThreadPool pool(threads);
      Ctx ctx;
      ctx.pool = &pool;
      const int64_t rows = 131, count = rows * width;
      // One element more on each side that must stay.
      std::vector<uint16_t> dy(static_cast<size_t>(count)), dx(dy.size() + 2, 0x1234);
      std::vector<float> dyf(dy.size()), dxf(dy.size() + 2, 77.0f);
      for (size_t i = 0; i < dy.size(); ++i) {
        dy[i] = static_cast<uint16_t>(random());
        dyf[i] = std::bit_cast<float>(static_cast<uint32_t>(random()));
      }
      quantize::Params p = {.width = width, .dtype = DType::kBF16, .grad_dtype = DType::kBF16};
      ASSERT_TRUE(quantize::Backward(ctx, p, {rows, dy.data(), dx.data() + 1}).ok());
      p.grad_dtype = DType::kF32;
      ASSERT_TRUE(quantize::Backward(ctx, p, {rows, dyf.data(), dxf.data() + 1}).ok());
      for (size_t i = 0; i < dy.size(); ++i) {
        const bool nan16 = (dy[i] & 0x7fff) > 0x7f80;
        ASSERT_EQ(dx[i + 1], nan16 ? 0x7fff : dy[i]) << "width " << width << " at " << i;
        const uint32_t want = std::isnan(dyf[i]) ? 0x7fffffffu : std::bit_cast<uint32_t>(dyf[i]);
        ASSERT_EQ(std::bit_cast<uint32_t>(dxf[i + 1]), want) << "width " << width << " at " << i;
      }
      EXPECT_EQ(dx.front(), 0x1234);
      EXPECT_EQ(dx.back(), 0x1234);
      EXPECT_EQ(dxf.front(), 77.0f);
      EXPECT_EQ(dxf.back(), 77.0f);
    }
  }
  ThreadPool pool(1);
  Ctx ctx;
  ctx.pool = &pool;
  float dx = 0;
  EXPECT_THAT(quantize::Backward(ctx, {.width = 1}, {1, nullptr, &dx}).message(),
              HasSubstr("dy is null"));
  EXPECT_THAT(quantize::Backward(ctx, {.width = 1}, {-1, &dx, &dx}).message(),
              HasSubstr("-1 rows"));
}

// silu forward and backward as the contract writes them, value by value.
TEST(GatePlain, SiluBitsAreTheContracts) {
  std::mt19937 random(9);
  std::normal_distribution<float> normal(0.0f, 4.0f);
  ThreadPool pool(2);
  Ctx ctx;
  ctx.pool = &pool;
  for (int64_t width : {1, 15, 16, 17, 100}) {
    const int64_t rows = 9, count = rows * width;
    std::vector<float> g, u, dy;
    for (int64_t i = 0; i < count; ++i) {
      g.push_back(i % 11 == 0 ? std::ldexp(normal(random), 5) : normal(random));
      u.push_back(normal(random));
      dy.push_back(normal(random));
    }
    std::vector<float> y(g.size()), dg(g.size()), du(g.size());
    const gate::Params p = {.width = width, .dtype = DType::kF32, .grad_dtype = DType::kF32};
    ASSERT_TRUE(gate::Forward(ctx, p, {rows, g.data(), u.data(), 0, y.data()}).ok());
    gate::BackwardArgs b;
    b.rows = rows;
    b.gate = g.data();
    b.up = u.data();
    b.dy = dy.data();
    b.dgate = dg.data();
    b.dup = du.data();
    ASSERT_TRUE(gate::Backward(ctx, p, b).ok());
    for (size_t i = 0; i < g.size(); ++i) {
      const float act = numerics::Silu(g[i]), s = numerics::Sigmoid(g[i]);
      const float slope = s * std::fma(g[i], 1.0f - s, 1.0f);
      EXPECT_EQ(std::bit_cast<uint32_t>(y[i]), std::bit_cast<uint32_t>(act * u[i])) << g[i];
      EXPECT_EQ(std::bit_cast<uint32_t>(du[i]), std::bit_cast<uint32_t>(dy[i] * act)) << g[i];
      EXPECT_EQ(std::bit_cast<uint32_t>(dg[i]), std::bit_cast<uint32_t>((dy[i] * u[i]) * slope))
          << g[i];
    }
  }
}

// One step: bits against the contract's plain form, and every f32 output within 2^-20 of float64,
// the scale of an error being the largest magnitude that the step adds up for that element.
TEST(AdamwPlain, BitsAreTheContractsAndFloat64IsWithin2ToTheMinus20) {
  std::mt19937 random(21);
  std::normal_distribution<float> normal;
  ThreadPool pool(3);
  Ctx ctx;
  ctx.pool = &pool;
  double worst = 0;
  for (const int64_t step : {1, 2, 7, 1000, 100000}) {
    for (const bool corrected : {true, false}) {
      const int64_t n = 1000 + step % 37;
      adamw::Params p;
      p.weight_decay = 0.1f;
      p.bias_correction = corrected;
      std::vector<float> w, m, v, grad;
      for (int64_t i = 0; i < n; ++i) {
        w.push_back(normal(random));
        m.push_back(step == 1 ? 0.0f : std::ldexp(normal(random), -static_cast<int>(i % 20)));
        v.push_back(step == 1 ? 0.0f
                              : std::ldexp(std::fabs(normal(random)), -static_cast<int>(i % 40)));
        grad.push_back(std::ldexp(normal(random), -static_cast<int>(i % 15)));
      }
      const auto w0 = w, m0 = m, v0 = v;
      std::vector<uint16_t> copy(w.size());
      adamw::Args a;
      a.count = n;
      a.master = w.data();
      a.m = m.data();
      a.v = v.data();
      a.grad = grad.data();
      a.copy = copy.data();
      a.lr = 0.01f;
      a.step = step;
      a.grad_scale = 0.5f;
      ASSERT_TRUE(adamw::Step(ctx, p, a).ok());
      const long double b1 = static_cast<long double>(p.beta1),
                        b2 = static_cast<long double>(p.beta2);
      const long double power1 = powl(b1, static_cast<long double>(step)),
                        power2 = powl(b2, static_cast<long double>(step));
      const float c1 = corrected ? static_cast<float>(1.0L / (1.0L - power1)) : 1.0f;
      const float c2 = corrected ? static_cast<float>(1.0L / (1.0L - power2)) : 1.0f;
      const float decay =
          static_cast<float>(1.0 - static_cast<double>(a.lr) * static_cast<double>(p.weight_decay));
      for (size_t i = 0; i < w.size(); ++i) {
        const float g = grad[i] * a.grad_scale;
        const float fm = std::fma(p.beta1, m0[i], (1.0f - p.beta1) * g);
        const float fv = std::fma(p.beta2, v0[i], ((1.0f - p.beta2) * g) * g);
        const float d = (fm * c1) / (std::sqrt(fv * c2) + p.eps);
        const float fw = std::fma(-a.lr, d, w0[i] * decay);
        ASSERT_EQ(std::bit_cast<uint32_t>(m[i]), std::bit_cast<uint32_t>(fm)) << step << " " << i;
        ASSERT_EQ(std::bit_cast<uint32_t>(v[i]), std::bit_cast<uint32_t>(fv)) << step << " " << i;
        ASSERT_EQ(std::bit_cast<uint32_t>(w[i]), std::bit_cast<uint32_t>(fw)) << step << " " << i;
        ASSERT_EQ(copy[i], F32ToBf16(w[i]));
        const auto wide = [](float x) { return static_cast<double>(x); };
        const double dm = wide(p.beta1) * wide(m0[i]) + (1 - wide(p.beta1)) * wide(grad[i]) * 0.5;
        const double dv = wide(p.beta2) * wide(v0[i]) +
                          (1 - wide(p.beta2)) * 0.25 * wide(grad[i]) * wide(grad[i]);
        const double m_hat = corrected ? dm / static_cast<double>(1.0L - power1) : dm;
        const double v_hat = corrected ? dv / static_cast<double>(1.0L - power2) : dv;
        const double move = wide(a.lr) * m_hat / (std::sqrt(v_hat) + wide(p.eps));
        const double dw = wide(w0[i]) * (1 - wide(a.lr) * wide(p.weight_decay)) - move;
        // m may cancel: its terms' size is what an error is measured against, there and in w.
        const double m_size =
            std::fabs(wide(p.beta1) * wide(m0[i])) + std::fabs(0.05 * wide(grad[i]));
        const double move_size =
            dm == 0.0 ? 0.0 : std::fabs(move) * std::max(1.0, m_size / std::fabs(dm));
        const auto check = [&](float got, double want, double size, const char* what) {
          const double relative = std::fabs(wide(got) - want) / std::max(size, 1e-30);
          worst = std::max(worst, relative);
          ASSERT_LE(relative, 0x1p-20) << what << " step " << step << " element " << i;
        };
        check(m[i], dm, m_size, "m");
        check(v[i], dv, dv, "v");
        check(w[i], dw, std::fabs(wide(w0[i])) + move_size, "master");
      }
    }
  }
  EXPECT_GT(worst, 0x1p-26) << "the comparison sees nothing";
}

}  // namespace
}  // namespace tare::ops
