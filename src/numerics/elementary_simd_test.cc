// The vector form has the bits of the scalar form on every target this CPU can run.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "numerics/elementary_simd_test.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "numerics/elementary_simd.h"

#include "numerics/elementary.h"

HWY_BEFORE_NAMESPACE();
namespace tare::numerics::HWY_NAMESPACE {

// out[i] = f(x[i]) by whole vectors. REQUIRES: n a multiple of 64.
void ApplyAll(int which, const float* x, float* out, size_t n) {
  const hn::ScalableTag<float> d;
  for (size_t i = 0; i < n; i += hn::Lanes(d)) {
    const auto v = hn::LoadU(d, x + i);
    auto y = v;
    switch (which) {
      case 0:
        y = Exp2(d, v);
        break;
      case 1:
        y = Exp2P(d, v);
        break;
      case 2:
        y = Exp(d, v);
        break;
      case 3:
        y = Sigmoid(d, v);
        break;
      case 4:
        y = Silu(d, v);
        break;
      case 5:
        y = Log2(d, v);
        break;
      case 6:
        y = Log(d, v);
        break;
      case 7:
        y = Log1p(d, v);
        break;
      case 8:
        y = Expm1(d, v);
        break;
      case 9:
        y = Sin(d, v);
        break;
      case 10:
        y = Cos(d, v);
        break;
      case 11:
        y = Tanh(d, v);
        break;
      case 12:
        y = Erf(d, v);
        break;
      case 13:
        y = Gelu(d, v);
        break;
      case 14:
        y = GeluTanh(d, v);
        break;
      case 15:
        y = Softplus(d, v);
        break;
    }
    hn::StoreU(y, d, out + i);
  }
}

}  // namespace tare::numerics::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>

#include <vector>

namespace tare::numerics {
HWY_EXPORT(ApplyAll);

namespace {

struct Named {
  const char* name;
  float (*f)(float);
};

const Named kFunctions[] = {
    {"exp2", Exp2},         {"exp2_p", Exp2P}, {"exp", Exp},
    {"sigmoid", Sigmoid},   {"silu", Silu},    {"log2", Log2},
    {"log", Log},           {"log1p", Log1p},  {"expm1", Expm1},
    {"sin", Sin},           {"cos", Cos},      {"tanh", Tanh},
    {"erf", Erf},           {"gelu", Gelu},    {"gelu_tanh", GeluTanh},
    {"softplus", Softplus},
};

// Every float whose bits are a multiple of `stride` plus `start`, on the target now chosen.
void CheckTarget(uint32_t start, uint64_t stride) {
  constexpr size_t kBatch = 4096;
  std::vector<float> x(kBatch), y(kBatch);
  for (int which = 0; which < 16; ++which) {
    SCOPED_TRACE(kFunctions[which].name);
    uint64_t bits = start;
    while (bits < (uint64_t{1} << 32)) {
      size_t n = 0;
      for (; n < kBatch && bits < (uint64_t{1} << 32); ++n, bits += stride) {
        x[n] = FloatOf(static_cast<uint32_t>(bits));
        // Exp2P has a domain, and a NaN of no particular payload.
        if (which == 1 && !(x[n] <= 127.0f)) x[n] = 0.0f;
      }
      for (size_t i = n; i < kBatch; ++i) x[i] = 1.0f;
      HWY_DYNAMIC_DISPATCH(ApplyAll)(which, x.data(), y.data(), kBatch);
      for (size_t i = 0; i < n; ++i) {
        const float want = kFunctions[which].f(x[i]);
        ASSERT_EQ(BitsOf(y[i]), BitsOf(want)) << "x = " << x[i] << " bits " << BitsOf(x[i]);
      }
    }
  }
}

void CheckEveryTarget(uint32_t start, uint64_t stride) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    CheckTarget(start, stride);
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().DeInit();
}

TEST(ElementarySimdTest, EveryTargetHasTheScalarBits) { CheckEveryTarget(7, 65521); }

TEST(ElementarySimdTest, SlowEveryTargetHasTheScalarBitsDensely) { CheckEveryTarget(3, 251); }

}  // namespace
}  // namespace tare::numerics
#endif  // HWY_ONCE
