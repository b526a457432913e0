// attention: bits against the plain definition over packed and paged K and V, invariance over runs,
// chunks and pages, an independent float64 oracle with gradients, planted faults.

#include "ops/attention/attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/attention/attention_plain.h"
#include "ops/linear/contraction_testing.h"
#include "ops/trace.h"

namespace tare::ops::attention {
namespace {

using testing_support::Buffer;
using testing_support::Fill;
using testing_support::ForEachTarget;

struct Shape {
  int64_t q_heads = 2, kv_heads = 1, d = 16;
  DType dtype = DType::kBF16;
  int64_t window = 0;
  bool sink = false;
  float softcap = 0.0f;
  int64_t tile = 64, split = 256;
};

Params ParamsOf(const Shape& s) {
  Params p;
  p.q_heads = s.q_heads, p.kv_heads = s.kv_heads, p.head_dim = s.d, p.dtype = s.dtype;
  p.scale = 1.0f / std::sqrt(static_cast<float>(s.d));
  p.window = s.window, p.sink = s.sink, p.softcap = s.softcap, p.kv_tile = s.tile,
  p.kv_split = s.split;
  p.unit_rows = 96;
  return p;
}

// One sequence of n tokens.
struct Sequence {
  Buffer q, k, v;
  int64_t n;
  Sequence(const Shape& s, int64_t tokens, uint32_t seed)
      : q(s.dtype, tokens * s.q_heads * s.d),
        k(s.dtype, tokens * s.kv_heads * s.d),
        v(s.dtype, tokens * s.kv_heads * s.d),
        n(tokens) {
    std::mt19937 rng(seed);
    Fill(q, rng), Fill(k, rng), Fill(v, rng);
    for (Buffer* b : {&q, &k}) {  // sharp, but not one-hot: many keys carry weight
      for (int64_t i = 0; i < b->count(); ++i) b->set(i, std::min(std::max(b->at(i), -3.0f), 3.0f));
    }
  }
};

std::vector<float> Sinks(const Shape& s) {
  std::vector<float> sinks;
  for (int64_t h = 0; h < s.q_heads; ++h) sinks.push_back(0.5f * static_cast<float>(h) - 0.25f);
  return sinks;
}

struct Output {
  Buffer out, lse2;
  bool operator==(const Output& o) const { return out == o.out && lse2 == o.lse2; }
};

enum class How { kFast, kPlain };

// Rows [from, n) of the sequence as one run over packed K and V.
Output RunPacked(const Shape& s, Sequence& seq, int64_t from, ThreadPool& pool, Profile profile,
                 How how = How::kFast, fault::Side side = fault::Side::kNone) {
  const Params p = ParamsOf(s);
  const int64_t rows = seq.n - from;
  Output o{Buffer(s.dtype, rows * s.q_heads * s.d), Buffer(DType::kF32, rows * s.q_heads)};
  const auto sinks = Sinks(s);
  const attention::Run run{.q_begin = 0, .q_rows = rows, .position = from};
  Args a;
  a.tokens = rows;
  a.q = static_cast<uint8_t*>(seq.q.data()) + from * s.q_heads * s.d * SizeOf(s.dtype);
  a.kv = {.k = seq.k.data(), .v = seq.v.data(), .rows = seq.n};
  a.sink = s.sink ? sinks.data() : nullptr;
  a.runs = {&run, 1};
  a.out = o.out.data();
  a.lse2 = o.lse2.f32();
  Ctx ctx{.pool = &pool, .profile = profile, .side = side};
  const Status status = how == How::kPlain ? PlainForward(ctx, p, a) : Forward(ctx, p, a);
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_TRUE(o.out.GuardsIntact() && o.lse2.GuardsIntact());
  return o;
}

std::vector<std::pair<Shape, int64_t>> Cases(bool small) {
  std::vector<std::pair<Shape, int64_t>> cases;
  // Lengths at every edge of tile and split; windows at theirs.
  for (int64_t n : {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257})
    cases.push_back({{}, n});
  cases.push_back({{.q_heads = 4, .kv_heads = 2, .d = 32, .window = 1}, 70});
  cases.push_back({{.q_heads = 3, .kv_heads = 1, .d = 16, .window = 63, .sink = true}, 200});
  cases.push_back({{.q_heads = 3, .kv_heads = 3, .d = 48, .window = 65, .softcap = 5.0f}, 140});
  cases.push_back(
      {{.q_heads = 2, .kv_heads = 1, .d = 16, .dtype = DType::kF32, .sink = true}, 300});
  // In f32 the order in which a KV head's query heads are added shows.
  cases.push_back({{.q_heads = 10, .kv_heads = 2, .d = 16, .dtype = DType::kF32}, 100});
  cases.push_back(
      {{.q_heads = 2, .kv_heads = 2, .d = 64, .dtype = DType::kF16, .softcap = 2.0f, .tile = 128},
       150});
  cases.push_back(
      {{.q_heads = 6, .kv_heads = 2, .d = 16, .window = 300, .sink = true, .split = 256}, 700});
  if (!small) {
    std::mt19937 rng(12);
    for (int i = 0; i < 16; ++i) {
      Shape s;
      s.kv_heads = 1 + rng() % 2;
      s.q_heads = s.kv_heads * (1 + rng() % 4);
      s.d = 16 * (1 + rng() % 4);
      s.window = rng() % 2 ? 1 + rng() % 200 : 0;
      s.sink = rng() % 2;
      s.tile = rng() % 2 ? 64 : 128;
      cases.push_back({s, 1 + static_cast<int64_t>(rng() % 330)});
    }
  }
  return cases;
}

class AttentionProfile : public testing::TestWithParam<Profile> {};
INSTANTIATE_TEST_SUITE_P(All, AttentionProfile,
                         testing::Values(Profile::kIeeeF32, Profile::kSm90Mma), [](const auto& i) {
                           return i.param == Profile::kIeeeF32 ? "ieee" : "sm90";
                         });

TEST_P(AttentionProfile, ForwardBitsAreThePlainDefinition) {
  ThreadPool pool(2);
  for (const auto& c : Cases(GetParam() == Profile::kSm90Mma)) {
    const Shape shape = c.first;
    const int64_t n = c.second;
    if (n > 330 && GetParam() == Profile::kSm90Mma) continue;  // the plain loops are slow
    Sequence seq(shape, n, 31);
    const Output plain = RunPacked(shape, seq, 0, pool, GetParam(), How::kPlain);
    ForEachTarget([&] {
      EXPECT_TRUE(RunPacked(shape, seq, 0, pool, GetParam()) == plain)
          << "n=" << n << " d=" << shape.d << " window=" << shape.window;
    });
  }
}

// Decode takes another kernel (lanes are keys): the last rows alone have the bits of the whole
// prefill, for every group size, window, cap, head size and SIMD target.
TEST(Attention, DecodeKernelHasTheBitsOfThePrefill) {
  ThreadPool pool(2);
  auto cases = Cases(false);
  for (int64_t group : {1, 2, 3, 4, 5, 7, 8, 9, 16}) {
    cases.push_back({{.q_heads = 2 * group,
                      .kv_heads = 2,
                      .d = 64,
                      .window = group == 3 ? 40 : 0,
                      .sink = group == 4},
                     150});
    cases.push_back({{.q_heads = group, .kv_heads = 1, .d = 80, .dtype = DType::kF32}, 90});
  }
  cases.push_back({{.q_heads = 3, .kv_heads = 1, .d = 256, .tile = 128}, 530});
  for (const auto& c : cases) {
    const Shape shape = c.first;
    const int64_t n = c.second;
    Sequence seq(shape, n, 71);
    const Output whole = RunPacked(shape, seq, 0, pool, Profile::kIeeeF32);
    const int64_t width = shape.q_heads * shape.d;
    ForEachTarget([&] {
      const Output one = RunPacked(shape, seq, n - 1, pool, Profile::kIeeeF32);
      EXPECT_EQ(0, std::memcmp(one.out.data(),
                               static_cast<const uint8_t*>(whole.out.data()) +
                                   (n - 1) * width * SizeOf(shape.dtype),
                               static_cast<size_t>(width * SizeOf(shape.dtype))))
          << "n=" << n << " d=" << shape.d << " heads " << shape.q_heads << "/" << shape.kv_heads;
      EXPECT_EQ(0,
                std::memcmp(one.lse2.data(),
                            static_cast<const float*>(whole.lse2.data()) + (n - 1) * shape.q_heads,
                            static_cast<size_t>(shape.q_heads) * 4));
    });
  }
}

// C3-03: a row of a prefill equals the same row decoded later, in any chunk, from packed K and V or
// from pages of any size in any order, alone or among other runs, on any number of threads.
TEST_P(AttentionProfile, ChunksPagesAndNeighboursMoveNoBit) {
  ThreadPool pool(2), one(1), many(7);
  const std::vector<int64_t> page_sizes = {1, 3, 16, 64};
  Shape shape{.q_heads = 4, .kv_heads = 2, .d = 32, .window = 150, .sink = true};
  const int64_t n = 270;
  Sequence seq(shape, n, 8), neighbour(shape, 90, 9);
  const Output whole = RunPacked(shape, seq, 0, pool, GetParam());
  const int64_t width = shape.q_heads * shape.d, kv_width = shape.kv_heads * shape.d;
  const auto sinks = Sinks(shape);
  std::mt19937 rng(5);
  for (int64_t page_size : page_sizes) {
    // Both sequences scattered over one pool of pages.
    const int64_t pages_a = (n + page_size - 1) / page_size,
                  pages_b = (90 + page_size - 1) / page_size;
    const int64_t total = pages_a + pages_b + 3;
    std::vector<int32_t> order(static_cast<size_t>(total));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::shuffle(order.begin(), order.end(), rng);
    std::vector<int32_t> table(static_cast<size_t>(2 * pages_a), 0);
    for (int64_t i = 0; i < pages_b; ++i)
      table[static_cast<size_t>(i)] = order[static_cast<size_t>(i)];
    for (int64_t i = 0; i < pages_a; ++i)
      table[static_cast<size_t>(pages_a + i)] = order[static_cast<size_t>(pages_b + i)];
    std::vector<uint16_t> k(static_cast<size_t>(total * page_size * kv_width), 0x7f80), v = k;
    const auto put = [&](Sequence& s, int64_t row) {
      for (int64_t j = 0; j < s.n; ++j) {
        const int64_t page = table[static_cast<size_t>(row * pages_a + j / page_size)];
        const int64_t at = (page * page_size + j % page_size) * kv_width;
        std::memcpy(&k[static_cast<size_t>(at)], static_cast<uint16_t*>(s.k.data()) + j * kv_width,
                    static_cast<size_t>(kv_width) * 2);
        std::memcpy(&v[static_cast<size_t>(at)], static_cast<uint16_t*>(s.v.data()) + j * kv_width,
                    static_cast<size_t>(kv_width) * 2);
      }
    };
    put(neighbour, 0), put(seq, 1);
    for (int64_t chunk : {int64_t{1}, int64_t{37}, int64_t{64}, n}) {
      if (chunk == 1 && page_size != 16) continue;
      // One call per step: a chunk of our sequence between two runs of the neighbour.
      for (int64_t from = 0; from < n; from += chunk) {
        const int64_t rows = std::min(chunk, n - from);
        Buffer q(shape.dtype, (rows + 6) * width), out(shape.dtype, (rows + 6) * width),
            lse(DType::kF32, (rows + 6) * shape.q_heads);
        auto* qd = static_cast<uint16_t*>(q.data());
        std::memcpy(qd, neighbour.q.data(), static_cast<size_t>(3 * width) * 2);
        std::memcpy(qd + 3 * width, static_cast<uint16_t*>(seq.q.data()) + from * width,
                    static_cast<size_t>(rows * width) * 2);
        std::memcpy(qd + (3 + rows) * width,
                    static_cast<uint16_t*>(neighbour.q.data()) + 50 * width,
                    static_cast<size_t>(3 * width) * 2);
        const attention::Run runs[] = {
            {0, 3, 0, 0, 0}, {3 + rows, 3, 50, 0, 0}, {3, rows, from, 0, 1}};
        Args a;
        a.tokens = rows + 6;
        a.q = q.data();
        a.kv = {.k = k.data(),
                .v = v.data(),
                .block_table = table.data(),
                .table_rows = 2,
                .max_pages = pages_a,
                .num_pages = total,
                .page_size = page_size};
        a.sink = sinks.data();
        a.runs = runs;
        a.out = out.data();
        a.lse2 = lse.f32();
        Ctx ctx{.pool = chunk == 37 ? &many : chunk == 64 ? &one : &pool, .profile = GetParam()};
        const Status status = Forward(ctx, ParamsOf(shape), a);
        ASSERT_TRUE(status.ok()) << status.ToString();
        ASSERT_EQ(0, std::memcmp(static_cast<uint16_t*>(out.data()) + 3 * width,
                                 static_cast<const uint16_t*>(whole.out.data()) + from * width,
                                 static_cast<size_t>(rows * width) * 2))
            << "page " << page_size << " chunk " << chunk << " from " << from;
        ASSERT_EQ(0,
                  std::memcmp(lse.f32() + 3 * shape.q_heads,
                              static_cast<const float*>(whole.lse2.data()) + from * shape.q_heads,
                              static_cast<size_t>(rows * shape.q_heads) * 4));
        if (GetParam() == Profile::kSm90Mma && from == 0 && chunk == 1) from = n - 20;
      }
    }
  }
}

// The formula in float64, written from the definition alone: no tiles, no splits, no exp2.
struct Oracle {
  std::vector<double> out, dq, dk, dv, dsink;
};

Oracle Reference(const Shape& s, const Sequence& seq, const Buffer* dout) {
  const int64_t n = seq.n, d = s.d, group = s.q_heads / s.kv_heads;
  Oracle o;
  o.out.assign(static_cast<size_t>(n * s.q_heads * d), 0.0), o.dq = o.out;
  o.dk.assign(static_cast<size_t>(n * s.kv_heads * d), 0.0), o.dv = o.dk;
  o.dsink.assign(static_cast<size_t>(s.q_heads), 0.0);
  const auto sinks = Sinks(s);
  const double scale = 1.0 / std::sqrt(static_cast<double>(d));
  for (int64_t h = 0; h < s.q_heads; ++h) {
    const int64_t kh = h / group;
    const auto q = [&](int64_t i, int64_t x) {
      return static_cast<double>(seq.q.at((i * s.q_heads + h) * d + x));
    };
    const auto k = [&](int64_t j, int64_t x) {
      return static_cast<double>(seq.k.at((j * s.kv_heads + kh) * d + x));
    };
    const auto v = [&](int64_t j, int64_t x) {
      return static_cast<double>(seq.v.at((j * s.kv_heads + kh) * d + x));
    };
    for (int64_t i = 0; i < n; ++i) {
      const int64_t low = s.window == 0 ? 0 : std::max<int64_t>(0, i - s.window + 1);
      std::vector<double> z, dz;
      for (int64_t j = low; j <= i; ++j) {
        double dot = 0;
        for (int64_t x = 0; x < d; ++x) dot += q(i, x) * k(j, x);
        dot *= scale;
        dz.push_back(1.0);
        if (s.softcap != 0.0f) {
          const double t = std::tanh(dot / s.softcap);
          dz.back() = 1 - t * t;
          dot = s.softcap * t;
        }
        z.push_back(dot);
      }
      double top = s.sink ? sinks[static_cast<size_t>(h)] : -1e300;
      for (double x : z) top = std::max(top, x);
      double sum = s.sink ? std::exp(sinks[static_cast<size_t>(h)] - top) : 0.0;
      const double sink_mass = sum;
      for (double x : z) sum += std::exp(x - top);
      std::vector<double> p;
      for (double x : z) p.push_back(std::exp(x - top) / sum);
      for (int64_t x = 0; x < d; ++x) {
        double y = 0;
        for (int64_t j = low; j <= i; ++j) y += p[static_cast<size_t>(j - low)] * v(j, x);
        o.out[static_cast<size_t>((i * s.q_heads + h) * d + x)] = y;
      }
      if (dout == nullptr) continue;
      const auto g = [&](int64_t x) {
        return static_cast<double>(dout->at((i * s.q_heads + h) * d + x));
      };
      double mean = 0;
      std::vector<double> dp;
      for (int64_t j = low; j <= i; ++j) {
        double dot = 0;
        for (int64_t x = 0; x < d; ++x) dot += g(x) * v(j, x);
        dp.push_back(dot);
        mean += p[static_cast<size_t>(j - low)] * dot;
      }
      o.dsink[static_cast<size_t>(h)] += -(sink_mass / sum) * mean;
      for (int64_t j = low; j <= i; ++j) {
        const auto at = static_cast<size_t>(j - low);
        const double ds = p[at] * (dp[at] - mean) * dz[at] * scale;
        for (int64_t x = 0; x < d; ++x) {
          o.dq[static_cast<size_t>((i * s.q_heads + h) * d + x)] += ds * k(j, x);
          o.dk[static_cast<size_t>((j * s.kv_heads + kh) * d + x)] += ds * q(i, x);
          o.dv[static_cast<size_t>((j * s.kv_heads + kh) * d + x)] += p[at] * g(x);
        }
      }
    }
  }
  return o;
}

struct Gradients {
  Buffer dq, dk, dv, dsink;
  bool operator==(const Gradients& o) const {
    return dq == o.dq && dk == o.dk && dv == o.dv && dsink == o.dsink;
  }
};

Gradients RunBackward(const Shape& s, Sequence& seq, Output& saved, Buffer& dout, ThreadPool& pool,
                      Profile profile, How how, fault::Side side = fault::Side::kNone) {
  Gradients g{Buffer(s.dtype, seq.q.count()), Buffer(s.dtype, seq.k.count()),
              Buffer(s.dtype, seq.v.count()), Buffer(DType::kF32, s.q_heads)};
  for (int64_t h = 0; h < s.q_heads; ++h) g.dsink.f32()[h] = 0.0f;
  const auto sinks = Sinks(s);
  const attention::Run run{.q_rows = seq.n};
  BackwardArgs a;
  a.tokens = seq.n, a.q = seq.q.data(), a.k = seq.k.data(), a.v = seq.v.data(), a.kv_rows = seq.n;
  a.sink = s.sink ? sinks.data() : nullptr;
  a.out = saved.out.data(), a.lse2 = saved.lse2.f32(), a.dout = dout.data();
  a.runs = {&run, 1};
  a.dq = g.dq.data(), a.dk = g.dk.data(), a.dv = g.dv.data();
  a.dsink = s.sink ? g.dsink.f32() : nullptr;
  Ctx ctx{.pool = &pool, .profile = profile, .side = side};
  const Status status =
      how == How::kPlain ? PlainBackward(ctx, ParamsOf(s), a) : Backward(ctx, ParamsOf(s), a);
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_TRUE(g.dq.GuardsIntact() && g.dk.GuardsIntact() && g.dv.GuardsIntact() &&
              g.dsink.GuardsIntact());
  return g;
}

TEST_P(AttentionProfile, BackwardBitsAreThePlainDefinition) {
  ThreadPool pool(2), one(1), other(5);  // one takes whole KV heads, the others query heads
  for (const auto& c : Cases(true)) {
    const Shape shape = c.first;
    const int64_t n = c.second;
    if (n > (GetParam() == Profile::kSm90Mma ? 150 : 300)) continue;
    Sequence seq(shape, n, 17);
    Buffer dout(shape.dtype, seq.q.count());
    std::mt19937 rng(1);
    Fill(dout, rng);
    Output saved = RunPacked(shape, seq, 0, pool, GetParam());
    const Gradients plain = RunBackward(shape, seq, saved, dout, pool, GetParam(), How::kPlain);
    ForEachTarget([&] {
      EXPECT_TRUE(RunBackward(shape, seq, saved, dout, pool, GetParam(), How::kFast) == plain)
          << "n=" << n << " d=" << shape.d << " window=" << shape.window;
      EXPECT_TRUE(RunBackward(shape, seq, saved, dout, one, GetParam(), How::kFast) == plain);
      EXPECT_TRUE(RunBackward(shape, seq, saved, dout, other, GetParam(), How::kFast) == plain);
    });
  }
}

// The tolerances are the contract's, fixed from the roundings of P, dS and the output: the scale of
// an error is the largest magnitude of the tensor.
TEST_P(AttentionProfile, ForwardAndGradientsMatchFloat64) {
  ThreadPool pool(2);
  for (const auto& c : Cases(true)) {
    const Shape shape = c.first;
    const int64_t n = c.second;
    if (n > 210 && GetParam() == Profile::kSm90Mma) continue;
    if (n > 300) continue;
    Sequence seq(shape, n, 3);
    std::mt19937 rng(2);
    std::normal_distribution<float> normal;
    for (Buffer* b : {&seq.q, &seq.k, &seq.v}) {
      for (int64_t i = 0; i < b->count(); ++i) b->set(i, normal(rng));
    }
    Buffer dout(shape.dtype, seq.q.count());
    for (int64_t i = 0; i < dout.count(); ++i) dout.set(i, normal(rng));
    Output saved = RunPacked(shape, seq, 0, pool, GetParam());
    const Gradients g = RunBackward(shape, seq, saved, dout, pool, GetParam(), How::kFast);
    const Oracle want = Reference(shape, seq, &dout);
    const Contract contract = ContractOf(ParamsOf(shape), GetParam());
    const auto check = [&](const Buffer& got, const std::vector<double>& w, const Tolerance& t,
                           const char* name) {
      double scale = 0;
      for (double v : w) scale = std::max(scale, std::abs(v));
      const double bound = std::ldexp(scale, t.relative_log2) + std::ldexp(1.0, t.absolute_log2);
      for (size_t i = 0; i < w.size(); ++i) {
        ASSERT_LE(std::abs(static_cast<double>(got.at(static_cast<int64_t>(i))) - w[i]), bound)
            << name << "[" << i << "] n=" << n << " d=" << shape.d << " " << DTypeName(shape.dtype);
      }
    };
    check(saved.out, want.out, contract.forward_tolerance, "out");
    check(g.dq, want.dq, contract.gradient_tolerance, "dq");
    check(g.dk, want.dk, contract.gradient_tolerance, "dk");
    check(g.dv, want.dv, contract.gradient_tolerance, "dv");
    if (shape.sink) check(g.dsink, want.dsink, contract.gradient_tolerance, "dsink");
  }
}

// NUM-18..21: with the sink on both sides 0 mismatches, on one side some; window +-1 likewise.
TEST_P(AttentionProfile, FaultsFlipBits) {
  ThreadPool pool(2);
  const auto flips = [&](const char* name, const Shape& shape, int64_t n, int64_t from) {
    Sequence seq(shape, n, 44);
    const Output healthy =
        RunPacked(shape, seq, from, pool, GetParam(), How::kFast, fault::Side::kTrainer);
    fault::Scoped planted(fmt::format("{}@trainer", name));
    EXPECT_TRUE(healthy ==
                RunPacked(shape, seq, from, pool, GetParam(), How::kFast, fault::Side::kRollout))
        << name;
    EXPECT_FALSE(healthy ==
                 RunPacked(shape, seq, from, pool, GetParam(), How::kFast, fault::Side::kTrainer))
        << name;
  };
  flips("attention.window_off_by_one", {.window = 9}, 24, 0);
  flips("attention.sink_missing", {.sink = true}, 24, 0);
  flips("attention.softcap_missing", {.softcap = 3.0f}, 24, 0);
  flips("attention.kv_fp8", {}, 24, 0);
  flips("attention.decode_other_split", {.dtype = DType::kF32, .split = 512}, 520, 519);
  flips("attention.tile_by_rows", {.dtype = DType::kF32}, 250, 0);
  flips("attention.scale_q_first", {.d = 32}, 40, 0);

  // Faults that need a neighbour: two sequences packed into one buffer.
  Shape shape{.dtype = DType::kF32, .split = 512};
  Sequence a(shape, 20, 1), b(shape, 530, 2);
  const int64_t w = shape.q_heads * shape.d, kw = shape.kv_heads * shape.d;
  Buffer q(shape.dtype, 550 * w), k(shape.dtype, 550 * kw), v(shape.dtype, 550 * kw);
  const auto join = [](Buffer& to, Buffer& x, Buffer& y) {
    std::memcpy(to.f32(), x.f32(), static_cast<size_t>(x.count()) * 4);
    std::memcpy(to.f32() + x.count(), y.f32(), static_cast<size_t>(y.count()) * 4);
  };
  join(q, a.q, b.q), join(k, a.k, b.k), join(v, a.v, b.v);
  const attention::Run runs[] = {{0, 20, 0, 0, 0}, {20, 530, 0, 20, 0}};
  const auto packed = [&] {
    Buffer out(shape.dtype, 550 * w);
    Args args;
    args.tokens = 550, args.q = q.data(), args.out = out.data(), args.runs = runs;
    args.kv = {.k = k.data(), .v = v.data(), .rows = 550};
    Ctx ctx{.pool = &pool, .profile = GetParam(), .side = fault::Side::kTrainer};
    EXPECT_TRUE(Forward(ctx, ParamsOf(shape), args).ok());
    return out;
  };
  const Buffer healthy = packed();
  const Output alone = RunPacked(shape, b, 0, pool, GetParam());
  EXPECT_EQ(0, std::memcmp(alone.out.data(), static_cast<const float*>(healthy.data()) + 20 * w,
                           static_cast<size_t>(530 * w) * 4));
  for (const char* name : {"attention.packed_leak", "attention.split_by_batch"}) {
    fault::Scoped planted(fmt::format("{}@trainer", name));
    EXPECT_FALSE(packed() == healthy) << name;
  }

  Shape with_sink{.sink = true};
  Sequence seq(with_sink, 20, 1);
  Buffer dout(with_sink.dtype, seq.q.count());
  std::mt19937 rng(1);
  Fill(dout, rng);
  Output saved = RunPacked(with_sink, seq, 0, pool, GetParam());
  const Gradients good =
      RunBackward(with_sink, seq, saved, dout, pool, GetParam(), How::kFast, fault::Side::kTrainer);
  fault::Scoped planted("attention.sink_gradient_missing@trainer");
  const Gradients bad =
      RunBackward(with_sink, seq, saved, dout, pool, GetParam(), How::kFast, fault::Side::kTrainer);
  EXPECT_FALSE(good.dsink == bad.dsink);
  EXPECT_TRUE(good.dq == bad.dq);
}

// The native arm takes its split count from the batch: the same row, other bits.
TEST(Attention, NativeArmBitsDependOnTheBatch) {
  ThreadPool pool(2);
  Shape shape{.dtype = DType::kF32, .split = 512};
  Sequence seq(shape, 600, 6);
  const Params p = ParamsOf(shape);
  const int64_t w = shape.q_heads * shape.d;
  for (auto arm : {BatchInvariance::kOn, BatchInvariance::kOff}) {
    std::vector<std::vector<float>> last;
    for (int64_t rows : {1, 4, 32}) {
      Buffer out(shape.dtype, rows * w);
      const attention::Run run{.q_rows = rows, .position = 600 - rows};
      Args a;
      a.tokens = rows, a.q = seq.q.f32() + (600 - rows) * w, a.out = out.data(), a.runs = {&run, 1};
      a.kv = {.k = seq.k.data(), .v = seq.v.data(), .rows = 600};
      LaunchTrace trace;
      Ctx ctx{.pool = &pool, .batch_invariance = arm, .trace = &trace};
      ASSERT_TRUE(Forward(ctx, p, a).ok());
      EXPECT_EQ(trace.Take().size(), 1u);
      last.emplace_back(out.f32() + (rows - 1) * w, out.f32() + rows * w);
    }
    EXPECT_EQ(last[0] == last[1] && last[1] == last[2], arm == BatchInvariance::kOn);
  }
}

TEST(Attention, RefusesWhatTheContractDoesNotCover) {
  ThreadPool pool(1);
  Shape shape;
  Sequence seq(shape, 8, 1);
  Buffer out(shape.dtype, seq.q.count());
  const auto message = [&](auto change) {
    Params p = ParamsOf(shape);
    attention::Run run{.q_rows = 8};
    Args a;
    a.tokens = 8, a.q = seq.q.data(), a.out = out.data(), a.runs = {&run, 1};
    a.kv = {.k = seq.k.data(), .v = seq.v.data(), .rows = 8};
    change(p, a, run);
    const Status s = Forward({.pool = &pool}, p, a);
    EXPECT_EQ(s.code(), Code::kInvalidArgument) << s.ToString();
    return s.message();
  };
  using testing::HasSubstr;
  const int32_t table[] = {0, 7};
  EXPECT_THAT(message([](Params& p, Args&, attention::Run&) { p.kv_heads = 3; }),
              HasSubstr("must divide"));
  EXPECT_THAT(message([](Params& p, Args&, attention::Run&) { p.head_dim = 24; }),
              HasSubstr("head_dim 24"));
  EXPECT_THAT(message([](Params& p, Args&, attention::Run&) { p.kv_tile = 96; }),
              HasSubstr("kv_tile 96"));
  EXPECT_THAT(message([](Params& p, Args&, attention::Run&) { p.kv_split = 320 + 32; }),
              HasSubstr("kv_split 352"));
  EXPECT_THAT(message([](Params& p, Args&, attention::Run&) { p.scale = std::nanf(""); }),
              HasSubstr("scale"));
  EXPECT_THAT(message([](Params& p, Args&, attention::Run&) { p.sink = true; }),
              HasSubstr("sink pointer is null"));
  EXPECT_THAT(message([](Params&, Args&, attention::Run& r) { r.q_rows = 9; }),
              HasSubstr("[0, 0 + 9)"));
  EXPECT_THAT(message([](Params&, Args&, attention::Run& r) { r.position = 1; }),
              HasSubstr("packed buffer has 8"));
  EXPECT_THAT(message([](Params&, Args& a, attention::Run&) { a.kv.v = nullptr; }),
              HasSubstr("v is null"));
  EXPECT_THAT(message([&](Params&, Args& a, attention::Run&) {
                a.kv.block_table = table, a.kv.table_rows = 1, a.kv.max_pages = 2,
                a.kv.num_pages = 2, a.kv.page_size = 4;
              }),
              HasSubstr("block_table[0][1] is 7"));
  EXPECT_THAT(message([&](Params&, Args& a, attention::Run&) {
                a.kv.block_table = table, a.kv.table_rows = 1, a.kv.max_pages = 2,
                a.kv.num_pages = 9, a.kv.page_size = 2;
              }),
              HasSubstr("needs 4 pages"));
}

}  // namespace
}  // namespace tare::ops::attention
