// linear: bits against the plain definition, gradients against float64, planted faults.

#include "ops/linear/linear.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "ops/linear/contraction_testing.h"
#include "ops/linear/gemm.h"
#include "ops/linear/linear_plain.h"
#include "ops/trace.h"

namespace tare::ops::linear {
namespace {

using testing_support::Buffer;
using testing_support::Fill;
using testing_support::ForEachTarget;

struct Case {
  int64_t m, n, k;
  DType x = DType::kBF16, w = DType::kBF16, y = DType::kBF16;
  int32_t segments = 1;
  bool bias = false;
};

Params ParamsOf(const Case& c) {
  Params p;
  p.n = c.n;
  p.k = c.k;
  p.x_dtype = c.x;
  p.w_dtype = c.w;
  p.y_dtype = c.y;
  p.segments = c.segments;
  p.bias = c.bias;
  return p;
}

std::string Name(const Case& c) {
  return fmt::format("m={} n={} k={} {} {} {} S={} bias={}", c.m, c.n, c.k, DTypeName(c.x),
                     DTypeName(c.w), DTypeName(c.y), c.segments, c.bias);
}

struct Inputs {
  Buffer x, w, bias;
  Inputs(const Case& c, uint32_t seed)
      : x(c.x, c.m * c.k), w(c.w, c.n * c.k), bias(DType::kBF16, c.n) {
    std::mt19937 rng(seed);
    Fill(x, rng);
    Fill(w, rng, 0.1f);
    Fill(bias, rng);
  }
};

Buffer RunForward(const Case& c, Inputs& in, ThreadPool& pool, Profile profile, bool packed,
                  bool plain, fault::Side side = fault::Side::kNone) {
  const Params p = ParamsOf(c);
  Buffer y(c.y, c.m * c.n);
  Ctx ctx{.pool = &pool, .profile = profile, .side = side};
  PackedWeight pack;
  Args a{.m = c.m,
         .x = in.x.data(),
         .w = in.w.data(),
         .bias = c.bias ? in.bias.data() : nullptr,
         .y = y.data()};
  if (packed) {
    // Faults run in the plain loops, which read the panels of ieee-f32.
    const bool ieee = AnyFault(side) || !ForwardUsesSm90(profile, p);
    auto r =
        PackedWeight::Pack(&pool, in.w.data(), c.w, c.n, c.k, ieee ? Profile::kIeeeF32 : profile);
    EXPECT_TRUE(r.ok()) << r.status().ToString();
    pack = *std::move(r);
    a.packed = &pack;
    a.w = nullptr;
  }
  const Status s = plain ? PlainForward(ctx, p, a) : Forward(ctx, p, a);
  EXPECT_TRUE(s.ok()) << s.ToString();
  EXPECT_TRUE(y.GuardsIntact()) << Name(c);
  return y;
}

std::vector<Case> Cases() {
  const DType b = DType::kBF16, f = DType::kF32, h = DType::kF16;
  std::vector<Case> cases = {
      {1, 1, 1},
      {1, 33, 17},
      {3, 31, 16},
      {8, 64, 255},
      {9, 65, 257},
      {13, 96, 512, b, b, f},
      {25, 40, 300, b, b, b, 1, true},
      {193, 70, 260},
      {7, 257, 48, f, f, f},
      {16, 33, 64, f, b, f},
      {5, 48, 64, b, f, f},
      {6, 50, 70, h, h, h, 1, true},
      {4, 36, 128, b, b, b, 2, true},
      {12, 36, 128, b, b, b, 8},
      {2, 64, 256, b, b, f, 4},
      {30, 64, 256, f, f, f, 4},
      {24, 290, 33},
  };
  std::mt19937 rng(7);
  for (int i = 0; i < 24; ++i) {
    Case c{static_cast<int64_t>(rng() % 40 + 1), static_cast<int64_t>(rng() % 130 + 1),
           static_cast<int64_t>(rng() % 600 + 1)};
    c.bias = rng() % 2;
    if (rng() % 3 == 0) c.y = f;
    cases.push_back(c);
  }
  return cases;
}

class LinearProfile : public testing::TestWithParam<Profile> {};
INSTANTIATE_TEST_SUITE_P(All, LinearProfile, testing::Values(Profile::kIeeeF32, Profile::kSm90Mma),
                         [](const auto& i) {
                           return i.param == Profile::kIeeeF32 ? "ieee" : "sm90";
                         });

TEST_P(LinearProfile, ForwardBitsAreThePlainDefinition) {
  ThreadPool pool(2);
  for (const Case& c : Cases()) {
    Inputs in(c, 11);
    const Buffer plain = RunForward(c, in, pool, GetParam(), false, true);
    ForEachTarget([&] {
      EXPECT_TRUE(RunForward(c, in, pool, GetParam(), false, false) == plain) << Name(c);
      EXPECT_TRUE(RunForward(c, in, pool, GetParam(), true, false) == plain)
          << Name(c) << " packed";
      // A weight packed for the other profile serves this one too.
      Buffer y(c.y, c.m * c.n);
      auto packed = PackedWeight::Pack(&pool, in.w.data(), c.w, c.n, c.k);
      ASSERT_TRUE(packed.ok());
      const Ctx ctx{.pool = &pool, .profile = GetParam()};
      const Args a{.m = c.m,
                   .x = in.x.data(),
                   .packed = &*packed,
                   .bias = c.bias ? in.bias.data() : nullptr,
                   .y = y.data()};
      ASSERT_TRUE(Forward(ctx, ParamsOf(c), a).ok());
      EXPECT_TRUE(y == plain) << Name(c) << " packed for ieee-f32";
    });
  }
}

// C3-02: a row alone, among others, at another place, through another thread count: the same bits.
TEST_P(LinearProfile, ARowDoesNotSeeTheBatch) {
  ThreadPool one(1), pool(2);
  for (const Case& c :
       {Case{41, 70, 200}, Case{41, 64, 128, DType::kBF16, DType::kBF16, DType::kF32, 4}}) {
    Inputs in(c, 5);
    const Buffer all = RunForward(c, in, pool, GetParam(), true, false);
    for (int threads = 1; threads <= 8; ++threads) {
      ThreadPool other(threads);
      EXPECT_TRUE(RunForward(c, in, other, GetParam(), true, false) == all)
          << threads << " threads";
    }
    for (int64_t rows : {1, 2, 3, 7, 8, 9, 17, 40}) {
      for (int64_t first : {int64_t{0}, int64_t{1}, c.m - rows}) {
        Case part = c;
        part.m = rows;
        Inputs some(part, 5);
        std::memcpy(some.w.data(), in.w.data(), static_cast<size_t>(c.n * c.k * 2));
        std::memcpy(some.x.data(), static_cast<const uint16_t*>(in.x.data()) + first * c.k,
                    static_cast<size_t>(rows * c.k * 2));
        const Buffer y = RunForward(part, some, one, GetParam(), true, false);
        const int64_t width = c.n * SizeOf(c.y);
        EXPECT_EQ(0, std::memcmp(y.data(), static_cast<const uint8_t*>(all.data()) + first * width,
                                 static_cast<size_t>(rows * width)))
            << rows << " rows from " << first;
      }
    }
  }
}

struct Gradients {
  Buffer dx, dw, dbias;
  bool operator==(const Gradients& o) const { return dx == o.dx && dw == o.dw && dbias == o.dbias; }
};

struct BackwardCase {
  Params p;
  int64_t m = 0;
  std::vector<TokenUnit> units;
};

Gradients RunBackward(const BackwardCase& c, Buffer& x, Buffer& w, Buffer& dy, ThreadPool& pool,
                      Profile profile, bool plain, fault::Side side = fault::Side::kNone) {
  Gradients g{Buffer(c.p.dx_dtype, c.m * c.p.k), Buffer(DType::kF32, c.p.n * c.p.k),
              Buffer(DType::kF32, c.p.n)};
  for (int64_t i = 0; i < g.dw.count(); ++i) g.dw.f32()[i] = static_cast<float>(i % 7);
  for (int64_t i = 0; i < g.dbias.count(); ++i) g.dbias.f32()[i] = 1.0f;
  Ctx ctx{.pool = &pool, .profile = profile, .side = side};
  BackwardArgs a{.m = c.m,
                 .dy = dy.data(),
                 .x = x.data(),
                 .w = w.data(),
                 .units = c.units,
                 .dx = g.dx.data(),
                 .dw = g.dw.f32(),
                 .dbias = c.p.bias ? g.dbias.f32() : nullptr};
  const Status s = plain ? PlainBackward(ctx, c.p, a) : Backward(ctx, c.p, a);
  EXPECT_TRUE(s.ok()) << s.ToString();
  EXPECT_TRUE(g.dx.GuardsIntact() && g.dw.GuardsIntact() && g.dbias.GuardsIntact());
  return g;
}

BackwardCase MakeBackward(int64_t m, int64_t n, int64_t k, std::vector<TokenSequence> sequences,
                          int64_t unit_rows) {
  BackwardCase c;
  c.m = m;
  c.p.n = n;
  c.p.k = k;
  c.p.bias = true;
  auto units = CutUnits(sequences, m, unit_rows);
  EXPECT_TRUE(units.ok()) << units.status().ToString();
  c.units = *units;
  return c;
}

std::vector<BackwardCase> BackwardCases() {
  std::vector<BackwardCase> cases;
  cases.push_back(MakeBackward(1, 3, 5, {{0, 1}}, 4096));
  cases.push_back(MakeBackward(70, 48, 33, {{0, 17}, {32, 5}, {40, 30}}, 16));
  cases.push_back(MakeBackward(300, 200, 270, {{0, 300}}, 4096));
  cases.push_back(MakeBackward(64, 192, 40, {{0, 31}, {32, 32}}, 32));
  cases.back().p.parts = {96, 32, 64};
  cases.back().p.dx_segments = 4;
  cases.push_back(MakeBackward(20, 149, 24, {{0, 20}}, 4096));
  cases.back().p.dx_segments = 8;
  cases.back().p.dx_vocabulary_leaves = true;
  cases.back().p.dy_dtype = DType::kF32;  // f32 dlogits are rounded to bf16 first
  cases.push_back(MakeBackward(40, 32, 48, {{0, 40}}, 4096));
  cases.back().p.x_dtype = cases.back().p.w_dtype = cases.back().p.dy_dtype = DType::kF32;
  cases.back().p.dx_dtype = cases.back().p.backward_operand = DType::kF32;
  cases.push_back(MakeBackward(33, 20, 30, {{0, 33}}, 4096));
  cases.back().p.x_dtype = cases.back().p.w_dtype = DType::kF32;  // an f32 router in a bf16 model
  return cases;
}

TEST_P(LinearProfile, BackwardBitsAreThePlainDefinition) {
  ThreadPool pool(2), other(5);
  for (const BackwardCase& c : BackwardCases()) {
    std::mt19937 rng(3);
    Buffer x(c.p.x_dtype, c.m * c.p.k), w(c.p.w_dtype, c.p.n * c.p.k),
        dy(c.p.dy_dtype, c.m * c.p.n);
    Fill(x, rng), Fill(w, rng, 0.1f), Fill(dy, rng);
    const Gradients plain = RunBackward(c, x, w, dy, pool, GetParam(), true);
    ForEachTarget([&] {
      EXPECT_TRUE(RunBackward(c, x, w, dy, pool, GetParam(), false) == plain) << "n=" << c.p.n;
      EXPECT_TRUE(RunBackward(c, x, w, dy, other, GetParam(), false) == plain) << "n=" << c.p.n;
    });
  }
}

// C7-05: the gradient against float64 from the formula, sharing no code with the operator. A sum of
// K rounded products of typical size s errs by about sqrt(K) roundings; the contract's tolerance is
// fixed against the largest magnitude of the tensor.
TEST_P(LinearProfile, GradientsMatchFloat64) {
  ThreadPool pool(2);
  for (const BackwardCase& c : BackwardCases()) {
    std::mt19937 rng(9);
    std::normal_distribution<float> normal;
    Buffer x(c.p.x_dtype, c.m * c.p.k), w(c.p.w_dtype, c.p.n * c.p.k),
        dy(c.p.dy_dtype, c.m * c.p.n);
    for (Buffer* b : {&x, &w, &dy}) {
      for (int64_t i = 0; i < b->count(); ++i)
        b->set(i, gemm::RoundOperand(normal(rng), DType::kBF16));
    }
    const Gradients g = RunBackward(c, x, w, dy, pool, GetParam(), false);
    const Tolerance tolerance = ContractOf(c.p, GetParam()).gradient_tolerance;
    const double relative = std::ldexp(1.0, tolerance.relative_log2);
    const auto check = [&](const Buffer& got, const std::vector<double>& want, const char* name) {
      double scale = 0;
      for (double v : want) scale = std::max(scale, std::abs(v));
      for (size_t i = 0; i < want.size(); ++i) {
        ASSERT_LE(std::abs(static_cast<double>(got.at(static_cast<int64_t>(i))) - want[i]),
                  relative * scale)
            << name << "[" << i << "] n=" << c.p.n;
      }
    };
    std::vector<double> dx(static_cast<size_t>(c.m * c.p.k)),
        dw(static_cast<size_t>(c.p.n * c.p.k)), dbias(static_cast<size_t>(c.p.n), 1.0);
    for (size_t i = 0; i < dw.size(); ++i) dw[i] = static_cast<double>(i % 7);
    for (int64_t t = 0; t < c.m; ++t) {
      bool real = false;
      for (const TokenUnit& u : c.units) real |= t >= u.begin && t < u.begin + u.rows;
      for (int64_t n = 0; n < c.p.n; ++n) {
        const double g_tn = dy.at(t * c.p.n + n);
        if (real) dbias[static_cast<size_t>(n)] += g_tn;
        for (int64_t k = 0; k < c.p.k; ++k) {
          dx[static_cast<size_t>(t * c.p.k + k)] += g_tn * static_cast<double>(w.at(n * c.p.k + k));
          if (real)
            dw[static_cast<size_t>(n * c.p.k + k)] +=
                g_tn * static_cast<double>(x.at(t * c.p.k + k));
        }
      }
    }
    check(g.dx, dx, "dx");
    check(g.dw, dw, "dw");
    check(g.dbias, dbias, "dbias");
  }
}

// Packing, padding and micro-batch cuts move no bit of dW (arithmetic of token units).
TEST_P(LinearProfile, PackingDoesNotMoveTheWeightGradient) {
  ThreadPool pool(2);
  BackwardCase whole = MakeBackward(96, 32, 32, {{0, 21}, {32, 40}, {80, 16}}, 4096);
  std::mt19937 rng(4);
  Buffer x(DType::kBF16, 96 * 32), w(DType::kBF16, 32 * 32), dy(DType::kBF16, 96 * 32);
  Fill(x, rng), Fill(w, rng), Fill(dy, rng);
  const Gradients packed = RunBackward(whole, x, w, dy, pool, GetParam(), false);
  // One sequence a call, dense, without padding.
  Buffer dw(DType::kF32, 32 * 32);
  for (int64_t i = 0; i < dw.count(); ++i) dw.f32()[i] = static_cast<float>(i % 7);
  for (const TokenUnit& u : whole.units) {
    const TokenUnit alone{0, u.rows};
    Ctx ctx{.pool = &pool, .profile = GetParam()};
    BackwardArgs a{.m = u.rows,
                   .dy = static_cast<uint16_t*>(dy.data()) + u.begin * 32,
                   .x = static_cast<uint16_t*>(x.data()) + u.begin * 32,
                   .w = w.data(),
                   .units = {&alone, 1},
                   .dw = dw.f32()};
    ASSERT_TRUE(Backward(ctx, whole.p, a).ok());
  }
  EXPECT_TRUE(dw == packed.dw);
}

// Each planted fault: equal without it, other bits with it, and only on the side it is planted on.
TEST_P(LinearProfile, FaultsFlipBits) {
  ThreadPool pool(2);
  // An f32 output shows the last bit of the accumulator.
  const DType b = DType::kBF16, f = DType::kF32;
  const Case few{3, 40, 256, b, b, f}, many{20, 40, 256, b, b, f};
  const auto forward = [&](const Case& c, const char* name) {
    Inputs in(c, 21);
    const Buffer healthy = RunForward(c, in, pool, GetParam(), true, false, fault::Side::kRollout);
    EXPECT_TRUE(healthy == RunForward(c, in, pool, GetParam(), true, false, fault::Side::kTrainer));
    fault::Scoped planted(fmt::format("{}@trainer", name));
    EXPECT_TRUE(healthy == RunForward(c, in, pool, GetParam(), true, false, fault::Side::kRollout))
        << name;
    EXPECT_FALSE(healthy == RunForward(c, in, pool, GetParam(), true, false, fault::Side::kTrainer))
        << name;
  };
  for (const char* name : {"linear.accumulate_bf16", "linear.reversed_k", "linear.split_by_rows"}) {
    // The order inside a step of the tensor core is free: reversal shows only across groups.
    forward(few, name);
  }
  forward({3, 40, 256, b, b, b, 1, true}, "linear.bias_after_cast");
  // The product of two bf16 is exact in f32: only f32 operands show a split FMA.
  forward({3, 40, 256, f, f, f}, "linear.split_fma");
  forward(many, "linear.segments_by_rows");

  BackwardCase c = MakeBackward(37, 24, 24, {{0, 37}}, 4096);
  std::mt19937 rng(6);
  Buffer x(DType::kBF16, 37 * 24), w(DType::kBF16, 24 * 24), dy(DType::kBF16, 37 * 24);
  Fill(x, rng), Fill(w, rng), Fill(dy, rng);
  const Gradients healthy =
      RunBackward(c, x, w, dy, pool, GetParam(), false, fault::Side::kTrainer);
  fault::Scoped planted("linear.dw_without_partial_group@trainer");
  const Gradients other = RunBackward(c, x, w, dy, pool, GetParam(), false, fault::Side::kRollout);
  EXPECT_TRUE(other.dw == healthy.dw) << "active on the wrong side";
  const Gradients faulty = RunBackward(c, x, w, dy, pool, GetParam(), false, fault::Side::kTrainer);
  EXPECT_FALSE(faulty.dw == healthy.dw);
  EXPECT_TRUE(faulty.dx == healthy.dx);
}

// "split size taken from the batch" is caught at the exact M where the split changes (C3-02).
TEST(Linear, SplitByRowsShowsAtItsThreshold) {
  ThreadPool pool(1);
  fault::Scoped planted("linear.split_by_rows@both");
  std::vector<bool> equal;
  for (int64_t m = 2; m <= 6; ++m) {
    const Case c{m, 32, 256, DType::kBF16, DType::kBF16, DType::kF32};
    Case alone = c;
    alone.m = m - 1;
    Inputs in(c, 8);
    const Buffer a = RunForward(c, in, pool, Profile::kIeeeF32, false, false);
    const Buffer b = RunForward(alone, in, pool, Profile::kIeeeF32, false, false);
    equal.push_back(std::memcmp(a.data(), b.data(), static_cast<size_t>((m - 1) * 32 * 4)) == 0);
  }
  EXPECT_THAT(equal, testing::ElementsAre(true, true, true, false, true));
}

// The native arm does vary: otherwise the switch would prove nothing.
TEST(Linear, NativeArmBitsDependOnTheRowCount) {
  ThreadPool pool(2);
  const int64_t n = 64, k = 512;
  std::mt19937 rng(2);
  Buffer x(DType::kF32, 16 * k), w(DType::kBF16, n * k);
  Fill(x, rng), Fill(w, rng);
  auto packed = PackedWeight::Pack(&pool, w.data(), DType::kBF16, n, k);
  ASSERT_TRUE(packed.ok());
  Params p;
  p.n = n, p.k = k, p.x_dtype = p.y_dtype = DType::kF32;
  std::vector<std::vector<float>> row;
  for (auto arm : {BatchInvariance::kOn, BatchInvariance::kOff}) {
    for (int64_t m : {1, 4, 16}) {
      LaunchTrace trace;
      Ctx ctx{.pool = &pool, .batch_invariance = arm, .trace = &trace};
      std::vector<float> y(static_cast<size_t>(m * n));
      ASSERT_TRUE(Forward(ctx, p, {.m = m, .x = x.data(), .packed = &*packed, .y = y.data()}).ok());
      y.resize(static_cast<size_t>(n));
      row.push_back(y);
      const auto launches = trace.Take();
      ASSERT_EQ(launches.size(), 1u);
      EXPECT_EQ(launches[0].kernel.find("native") != std::string::npos,
                arm == BatchInvariance::kOff)
          << launches[0].kernel;
    }
  }
  EXPECT_EQ(row[0], row[1]);
  EXPECT_EQ(row[0], row[2]);
  EXPECT_NE(row[3], row[4]);
  EXPECT_NE(row[4], row[5]);
}

TEST(Linear, NonFiniteRowsStayInTheirRowAndNanIsCanonical) {
  ThreadPool pool(2);
  Case c{5, 40, 64};
  for (Profile profile : {Profile::kIeeeF32, Profile::kSm90Mma}) {
    Inputs in(c, 3);
    const Buffer clean = RunForward(c, in, pool, profile, true, false);
    static_cast<uint16_t*>(in.x.data())[2 * 64 + 5] = 0xffc1;  // a NaN with a payload and a sign
    const Buffer dirty = RunForward(c, in, pool, profile, true, false);
    for (int64_t i = 0; i < c.m * c.n; ++i) {
      const uint16_t got = static_cast<const uint16_t*>(dirty.data())[i];
      const uint16_t was = static_cast<const uint16_t*>(clean.data())[i];
      EXPECT_EQ(got, i / c.n == 2 ? 0x7fff : was) << i;
    }
  }
}

TEST(Linear, RefusesWhatTheContractDoesNotCover) {
  ThreadPool pool(1);
  Ctx ctx{.pool = &pool};
  float x[64] = {}, y[64] = {};
  uint16_t w[64] = {};
  const auto message = [&](auto change, auto change_args) {
    Params p;
    p.n = 4, p.k = 16, p.x_dtype = p.y_dtype = DType::kF32;
    Args a{.m = 2, .x = x, .w = w, .y = y};
    change(p);
    change_args(a);
    const Status s = Forward(ctx, p, a);
    EXPECT_EQ(s.code(), Code::kInvalidArgument) << s.ToString();
    return s.message();
  };
  const auto keep = [](auto&) {};
  EXPECT_THAT(message([](Params& p) { p.segments = 3; }, keep), testing::HasSubstr("segments 3"));
  EXPECT_THAT(message([](Params& p) { p.segments = 2; }, keep),
              testing::HasSubstr("multiple of 32"));
  EXPECT_THAT(message([](Params& p) { p.w_dtype = DType::kE4M3; }, keep),
              testing::HasSubstr("w_dtype is e4m3"));
  EXPECT_THAT(message([](Params& p) { p.n = 0; }, keep), testing::HasSubstr("[0, 16]"));
  EXPECT_THAT(message(
                  [](Params& p) {
                    p.parts = {1, 2};
                  },
                  keep),
              testing::HasSubstr("add up to 3"));
  EXPECT_THAT(message([](Params& p) { p.dx_vocabulary_leaves = true; }, keep),
              testing::HasSubstr("dx_segments 8"));
  EXPECT_THAT(message(keep, [](Args& a) { a.m = -1; }), testing::HasSubstr("m -1"));
  EXPECT_THAT(message(keep, [](Args& a) { a.x = nullptr; }), testing::HasSubstr("x is null"));
  EXPECT_THAT(message(keep, [](Args& a) { a.x_stride = 15; }), testing::HasSubstr("x_stride 15"));
  EXPECT_THAT(message(keep, [](Args& a) { a.bias = a.x; }), testing::HasSubstr("bias"));
  EXPECT_THAT(message(keep, [](Args& a) { a.w = nullptr; }), testing::HasSubstr("w is null"));
  // m = 0 is legal and touches nothing.
  Params p;
  p.n = 4, p.k = 16;
  EXPECT_TRUE(Forward(ctx, p, {.m = 0}).ok());
}

TEST(TokenUnits, AreCutFromEachSequenceStart) {
  const TokenSequence s[] = {{0, 9000}, {9008, 0}, {9008, 4096}, {13104, 1}};
  const auto units = CutUnits(s, 13105);
  ASSERT_TRUE(units.ok());
  std::vector<std::pair<int64_t, int64_t>> got;
  for (const TokenUnit& u : *units) got.emplace_back(u.begin, u.rows);
  using P = std::pair<int64_t, int64_t>;
  EXPECT_THAT(got, testing::ElementsAre(P(0, 4096), P(4096, 4096), P(8192, 808), P(9008, 4096),
                                        P(13104, 1)));
  const TokenSequence overlap[] = {{0, 10}, {9, 3}};
  EXPECT_THAT(CutUnits(overlap, 20).status().message(), testing::HasSubstr("share row 9"));
  const TokenSequence outside[] = {{5, 10}};
  EXPECT_FALSE(CutUnits(outside, 14).ok());
}

TEST(TokenUnits, BatchSegmentsAddAsATree) {
  ThreadPool pool(2);
  Ctx ctx{.pool = &pool};
  // 2^24 + 1 + 1 + ... tells every order apart.
  std::vector<float> g = {0x1p24f, 1.0f, 1.0f, 1.0f};
  ASSERT_TRUE(SumBatchSegments(ctx, g.data(), 4, 1).ok());
  EXPECT_EQ(g[0], 0x1p24f + 2.0f);
  EXPECT_FALSE(SumBatchSegments(ctx, g.data(), 3, 1).ok());
}

}  // namespace
}  // namespace tare::ops::linear
