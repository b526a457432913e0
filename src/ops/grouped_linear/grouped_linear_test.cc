// grouped_linear: every routed row has the bits of linear with its expert's weight (DISC-08),
// whatever the other experts got; gradients likewise; routes are checked.

#include "ops/grouped_linear/grouped_linear.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "ops/dispatch/dispatch.h"
#include "ops/linear/contraction_testing.h"
#include "ops/linear/linear_plain.h"

namespace tare::ops::grouped_linear {
namespace {

using testing_support::Buffer;
using testing_support::Fill;

constexpr int64_t kE = 6, kN = 40, kK = 72, kTop = 2;

struct Routed {
  dispatch::Plan plan;
  Params p;
  Buffer x, w;
  int64_t tokens;
  Routed(int64_t t, uint32_t seed, DType y = DType::kF32)
      : x(DType::kBF16, t * kK), w(DType::kBF16, kE * kN * kK), tokens(t) {
    std::mt19937 rng(99);
    Fill(w, rng, 0.1f);
    std::mt19937 tokens_rng(seed);
    Fill(x, tokens_rng);
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < t; ++i) {
      const auto first = static_cast<int32_t>(tokens_rng() % kE);
      ids.push_back(first);
      // Expert 5 never comes second; some slots are padding.
      const auto second =
          static_cast<int32_t>((static_cast<uint32_t>(first) + 1 + tokens_rng() % 4) % 5);
      ids.push_back(tokens_rng() % 8 == 0 || second == first ? -1 : second);
    }
    auto built = dispatch::BuildPlan(t, kTop, kE, ids.data());
    EXPECT_TRUE(built.ok()) << built.status().ToString();
    plan = *std::move(built);
    p.experts = kE;
    p.linear.n = kN, p.linear.k = kK, p.linear.y_dtype = y;
  }
  int64_t rows() const { return plan.offsets.back(); }
};

Buffer RunForward(Routed& r, ThreadPool& pool, Profile profile, bool packed,
                  fault::Side side = fault::Side::kNone) {
  Buffer y(DType::kF32, r.rows() * kN);
  std::vector<linear::PackedWeight> weights;
  Args a;
  a.rows = r.rows(), a.offsets = r.plan.offsets, a.token_of = r.plan.row_token.data(),
  a.x_rows = r.tokens;
  a.x = r.x.data(), a.w = r.w.data(), a.y = y.data();
  for (int64_t e = 0; packed && e < kE; ++e) {
    auto w = linear::PackedWeight::Pack(&pool, static_cast<uint16_t*>(r.w.data()) + e * kN * kK,
                                        DType::kBF16, kN, kK, profile);
    EXPECT_TRUE(w.ok());
    weights.push_back(*std::move(w));
  }
  if (packed) a.packed = weights, a.w = nullptr;
  const Status s = Forward({.pool = &pool, .profile = profile, .side = side}, r.p, a);
  EXPECT_TRUE(s.ok()) << s.ToString();
  EXPECT_TRUE(y.GuardsIntact());
  return y;
}

class GroupedLinear : public testing::TestWithParam<Profile> {};
INSTANTIATE_TEST_SUITE_P(All, GroupedLinear, testing::Values(Profile::kIeeeF32, Profile::kSm90Mma),
                         [](const auto& i) {
                           return i.param == Profile::kIeeeF32 ? "ieee" : "sm90";
                         });

TEST_P(GroupedLinear, EveryRowIsLinearWithItsExpertsWeight) {
  ThreadPool pool(2), other(5);
  for (int64_t tokens : {1, 3, 40, 90}) {
    Routed r(tokens, 7);
    const Buffer y = RunForward(r, pool, GetParam(), false);
    EXPECT_TRUE(y == RunForward(r, other, GetParam(), true)) << tokens;
    for (int64_t e = 0; e < kE; ++e) {
      for (int64_t i = r.plan.offsets[static_cast<size_t>(e)];
           i < r.plan.offsets[static_cast<size_t>(e + 1)]; ++i) {
        std::vector<float> alone(kN);
        linear::Args a{
            .m = 1,
            .x = static_cast<uint16_t*>(r.x.data()) + r.plan.row_token[static_cast<size_t>(i)] * kK,
            .w = static_cast<uint16_t*>(r.w.data()) + e * kN * kK,
            .y = alone.data()};
        ASSERT_TRUE(
            linear::PlainForward({.pool = &pool, .profile = GetParam()}, r.p.linear, a).ok());
        // Bits are meant. NOLINTNEXTLINE(bugprone-suspicious-memory-comparison)
        ASSERT_EQ(0,
                  std::memcmp(alone.data(), static_cast<const float*>(y.data()) + i * kN, kN * 4))
            << "row " << i;
      }
    }
  }
}

// dW of an expert: its tokens of each unit form one chain; routed order, gather and packing move
// nothing.
TEST_P(GroupedLinear, GradientsAreLinearsOverTheExpertsTokens) {
  ThreadPool pool(2);
  Routed r(70, 3);
  const TokenUnit units[] = {{0, 31}, {32, 16}, {48, 22}};  // row 31 is padding
  Buffer dy(DType::kBF16, r.rows() * kN), dx(DType::kBF16, r.rows() * kK),
      dw(DType::kF32, kE * kN * kK);
  std::mt19937 rng(4);
  Fill(dy, rng);
  for (int64_t i = 0; i < dw.count(); ++i) dw.f32()[i] = 0.5f;
  BackwardArgs a;
  a.rows = r.rows(), a.offsets = r.plan.offsets, a.token_of = r.plan.row_token.data(),
  a.x_rows = r.tokens;
  a.dy = dy.data(), a.x = r.x.data(), a.w = r.w.data(), a.units = units, a.dx = dx.data(),
  a.dw = dw.f32();
  const Ctx ctx{.pool = &pool, .profile = GetParam()};
  ASSERT_TRUE(Backward(ctx, r.p, a).ok());
  EXPECT_TRUE(dx.GuardsIntact() && dw.GuardsIntact());

  // The same with x gathered beforehand.
  std::vector<uint16_t> gathered(static_cast<size_t>(r.rows() * kK));
  for (int64_t i = 0; i < r.rows(); ++i) {
    std::memcpy(&gathered[static_cast<size_t>(i * kK)],
                static_cast<uint16_t*>(r.x.data()) + r.plan.row_token[static_cast<size_t>(i)] * kK,
                kK * 2);
  }
  Buffer dw2(DType::kF32, kE * kN * kK);
  for (int64_t i = 0; i < dw2.count(); ++i) dw2.f32()[i] = 0.5f;
  BackwardArgs b = a;
  b.x = gathered.data(), b.x_by_row = true, b.dx = nullptr, b.dw = dw2.f32();
  ASSERT_TRUE(Backward(ctx, r.p, b).ok());
  EXPECT_TRUE(dw == dw2);

  // Expert by expert through the plain loops of linear, its rows compacted.
  for (int64_t e = 0; e < kE; ++e) {
    const int64_t begin = r.plan.offsets[static_cast<size_t>(e)],
                  end = r.plan.offsets[static_cast<size_t>(e + 1)];
    std::vector<TokenUnit> compact;
    for (const TokenUnit& u : units) {
      int64_t first = -1, count = 0;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t t = r.plan.row_token[static_cast<size_t>(i)];
        if (t < u.begin || t >= u.begin + u.rows) continue;
        if (first < 0) first = i - begin;
        ++count;
      }
      if (count > 0) compact.push_back({first, count});
    }
    std::vector<float> want(kN * kK, 0.5f);
    std::vector<uint16_t> want_dx(static_cast<size_t>((end - begin) * kK));
    linear::BackwardArgs l{.m = end - begin,
                           .dy = static_cast<uint16_t*>(dy.data()) + begin * kN,
                           .x = gathered.data() + begin * kK,
                           .w = static_cast<uint16_t*>(r.w.data()) + e * kN * kK,
                           .units = compact,
                           .dx = want_dx.data(),
                           .dw = want.data()};
    if (end > begin) {
      ASSERT_TRUE(linear::PlainBackward(ctx, r.p.linear, l).ok());
    }
    ASSERT_EQ(0, std::memcmp(want.data(), dw.f32() + e * kN * kK, want.size() * 4))
        << "expert " << e;
    ASSERT_EQ(0, std::memcmp(want_dx.data(), static_cast<uint16_t*>(dx.data()) + begin * kK,
                             want_dx.size() * 2));
  }
}

TEST_P(GroupedLinear, FaultSplitByTotalIsSeen) {
  ThreadPool pool(1);
  Routed r(40, 5);
  const Buffer healthy = RunForward(r, pool, GetParam(), false, fault::Side::kRollout);
  fault::Scoped planted("grouped_linear.split_by_total@rollout");
  EXPECT_TRUE(healthy == RunForward(r, pool, GetParam(), false, fault::Side::kTrainer));
  EXPECT_FALSE(healthy == RunForward(r, pool, GetParam(), false, fault::Side::kRollout));
}

TEST(GroupedLinearChecks, RefusesBrokenRoutes) {
  ThreadPool pool(1);
  Routed r(10, 2);
  Buffer y(DType::kF32, r.rows() * kN);
  const auto message = [&](auto change) {
    Args a;
    std::vector<int64_t> offsets = r.plan.offsets;
    std::vector<int32_t> tokens = r.plan.row_token;
    a.rows = r.rows(), a.x_rows = r.tokens, a.x = r.x.data(), a.w = r.w.data(), a.y = y.data();
    change(a, offsets, tokens);
    a.offsets = offsets, a.token_of = tokens.data();
    const Status s = Forward({.pool = &pool}, r.p, a);
    EXPECT_EQ(s.code(), Code::kInvalidArgument) << s.ToString();
    return s.message();
  };
  using testing::HasSubstr;
  using O = std::vector<int64_t>;
  using T = std::vector<int32_t>;
  EXPECT_THAT(message([](Args&, O& o, T&) { o.pop_back(); }),
              HasSubstr("offsets must be 7 values"));
  EXPECT_THAT(message([](Args&, O& o, T&) { o[2] = 1000; }), HasSubstr("must not descend"));
  EXPECT_THAT(message([](Args&, O&, T& t) { t[1] = 10; }), HasSubstr("token_of[1] is 10"));
  EXPECT_THAT(message([](Args& a, O&, T&) { a.w = nullptr; }), HasSubstr("w is null"));
}

}  // namespace
}  // namespace tare::ops::grouped_linear
