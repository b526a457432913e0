// linear: bits against the plain definition, gradients against float64, planted faults.

#include "ops/linear/linear.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hwy/targets.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "ops/linear/gemm.h"
#include "ops/linear/linear_plain.h"
#include "ops/trace.h"

namespace tare::ops::linear {
namespace {

using gemm::LoadAsF32;
using gemm::StoreRounded;

// A buffer of one dtype with guard elements on both sides.
class Buffer {
 public:
  Buffer(DType dtype, int64_t count) : dtype_(dtype), count_(count) {
    bytes_.assign(static_cast<size_t>((count + 2 * kGuard) * SizeOf(dtype)), 0x5a);
  }
  void* data() { return bytes_.data() + kGuard * SizeOf(dtype_); }
  const void* data() const { return bytes_.data() + kGuard * SizeOf(dtype_); }
  float* f32() { return static_cast<float*>(data()); }
  float at(int64_t i) const { return LoadAsF32(data(), dtype_, i); }
  void set(int64_t i, float v) { StoreRounded(data(), dtype_, i, v); }
  int64_t count() const { return count_; }
  bool GuardsIntact() const {
    const size_t g = static_cast<size_t>(kGuard * SizeOf(dtype_));
    for (size_t i = 0; i < g; ++i) {
      if (bytes_[i] != 0x5a || bytes_[bytes_.size() - 1 - i] != 0x5a) return false;
    }
    return true;
  }
  bool operator==(const Buffer& o) const { return bytes_ == o.bytes_; }

 private:
  static constexpr int64_t kGuard = 64;
  DType dtype_;
  int64_t count_;
  std::vector<uint8_t> bytes_;
};

// Normal values with zeros of both signs, subnormals and a wide exponent range mixed in.
void Fill(Buffer& b, std::mt19937& rng, float scale = 1.0f) {
  std::normal_distribution<float> normal(0.0f, scale);
  for (int64_t i = 0; i < b.count(); ++i) {
    float v = normal(rng);
    switch (rng() % 64) {
      case 0: v = 0.0f; break;
      case 1: v = -0.0f; break;
      case 2: v *= 1e-39f; break;
      case 3: v *= 4096.0f; break;
      default: break;
    }
    b.set(i, v);
  }
}

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
  Inputs(const Case& c, uint32_t seed) : x(c.x, c.m * c.k), w(c.w, c.n * c.k), bias(DType::kBF16, c.n) {
    std::mt19937 rng(seed);
    Fill(x, rng);
    Fill(w, rng, 0.1f);
    Fill(bias, rng);
  }
};

Buffer RunForward(const Case& c, Inputs& in, ThreadPool& pool, Profile profile, bool packed, bool plain,
                  fault::Side side = fault::Side::kNone) {
  const Params p = ParamsOf(c);
  Buffer y(c.y, c.m * c.n);
  Ctx ctx{.pool = &pool, .profile = profile, .side = side};
  PackedWeight pack;
  Args a{.m = c.m, .x = in.x.data(), .w = in.w.data(), .bias = c.bias ? in.bias.data() : nullptr,
         .y = y.data()};
  if (packed) {
    auto r = PackedWeight::Pack(&pool, in.w.data(), c.w, c.n, c.k);
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
      {1, 1, 1}, {1, 33, 17}, {3, 31, 16}, {8, 64, 255}, {9, 65, 257}, {13, 96, 512, b, b, f},
      {25, 40, 300, b, b, b, 1, true}, {193, 70, 260}, {7, 257, 48, f, f, f}, {16, 33, 64, f, b, f},
      {5, 48, 64, b, f, f}, {6, 50, 70, h, h, h, 1, true}, {4, 36, 128, b, b, b, 2, true},
      {12, 36, 128, b, b, b, 8}, {2, 64, 256, b, b, f, 4}, {30, 64, 256, f, f, f, 4}, {24, 290, 33},
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

// Every SIMD target that this machine has, one after another.
template <typename Body>
void ForEachTarget(const Body& body) {
  for (int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    body();
  }
  hwy::SetSupportedTargetsForTest(0);
}

class LinearProfile : public testing::TestWithParam<Profile> {};
INSTANTIATE_TEST_SUITE_P(All, LinearProfile, testing::Values(Profile::kIeeeF32),
                         [](const auto& i) { return i.param == Profile::kIeeeF32 ? "ieee" : "sm90"; });

TEST_P(LinearProfile, ForwardBitsAreThePlainDefinition) {
  ThreadPool pool(2);
  for (const Case& c : Cases()) {
    Inputs in(c, 11);
    const Buffer plain = RunForward(c, in, pool, GetParam(), false, true);
    ForEachTarget([&] {
      EXPECT_TRUE(RunForward(c, in, pool, GetParam(), false, false) == plain) << Name(c);
      EXPECT_TRUE(RunForward(c, in, pool, GetParam(), true, false) == plain) << Name(c) << " packed";
    });
  }
}

}  // namespace
}  // namespace tare::ops::linear
