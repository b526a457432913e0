// The stated errors of the elementary functions, against the C library in float64 (whose own error
// is below 2^-28 of an f32 ulp), and their special values. Sampled here; every f32 under `Slow`.

#include "numerics/elementary.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "numerics/elementary64.h"

namespace tare::numerics {
namespace {

struct Function {  // printed by name
  friend void PrintTo(const Function& f, std::ostream* out) { *out << f.name; }
  const char* name;
  float (*f)(float);
  double (*reference)(double);
  double max_ulp;   // as stated in elementary.h
  float low, high;  // the domain that is checked; outside, see Specials
};

double RefSigmoid(double x) {
  const double e = std::exp(-std::fabs(x));
  return x < 0 ? e / (1 + e) : 1 / (1 + e);
}
double RefSilu(double x) { return std::isinf(x) ? (x > 0 ? x : -0.0) : x * RefSigmoid(x); }
double RefSoftplus(double x) { return std::fmax(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }
double RefGelu(double x) {
  if (std::isinf(x)) return x > 0 ? x : -0.0;  // the limit; the product is NaN
  return x == 0 ? x : 0.5 * x * std::erfc(-x * M_SQRT1_2);
}
double RefGeluTanh(double x) {
  const double u = -2 * 0.79788456080286535588 * (x + 0.044715 * x * x * x);
  return x < -100 ? -0.0 : x / (1 + std::exp(u));
}

const float kInf = FloatOf(0x7f800000u);

const Function kFunctions[] = {
    {"Exp2", Exp2, [](double x) { return std::exp2(x); }, 0.95, -kInf, kInf},
    {"Exp", Exp, [](double x) { return std::exp(x); }, 1.0, -kInf, kInf},
    {"Sigmoid", Sigmoid, RefSigmoid, 1.0, -kInf, kInf},
    {"Silu", Silu, RefSilu, 1.0, -kInf, kInf},
    {"Log2", Log2, [](double x) { return std::log2(x); }, 0.501, 0.0f, kInf},
    {"Log", Log, [](double x) { return std::log(x); }, 0.501, 0.0f, kInf},
    {"Log1p", Log1p, [](double x) { return std::log1p(x); }, 0.501, -1.0f, kInf},
    {"Expm1", Expm1, [](double x) { return std::expm1(x); }, 0.501, -kInf, kInf},
    {"Sin", Sin, [](double x) { return std::sin(x); }, 0.501, -0x1p30f, 0x1p30f},
    {"Cos", Cos, [](double x) { return std::cos(x); }, 0.501, -0x1p30f, 0x1p30f},
    {"Tanh", Tanh, [](double x) { return std::tanh(x); }, 0.501, -kInf, kInf},
    {"Erf", Erf, [](double x) { return std::erf(x); }, 0.501, -kInf, kInf},
    {"Softplus", Softplus, RefSoftplus, 0.501, -kInf, kInf},
    {"Gelu", Gelu, RefGelu, 0.501, -kInf, kInf},
    {"GeluTanh", GeluTanh, RefGeluTanh, 0.501, -kInf, kInf},
};

struct Worst {
  double ulp = 0;
  float at = 0;
  int64_t checked = 0;
};

// |y - exact| in units of the last place of the exact value; f32 subnormals have 2^-149.
double UlpError(float y, double exact) {
  if (std::isnan(exact)) return std::isnan(y) ? 0 : 1e30;
  const double limit = 0x1p128;
  if (std::fabs(exact) >= limit) {
    return std::isinf(y) && std::signbit(y) == std::signbit(exact) ? 0 : 1e30;
  }
  // An overflow of a value just below 2^128 counts as 2^128.
  const double value = std::isinf(y) ? std::copysign(limit, y) : static_cast<double>(y);
  const int exponent = std::max(static_cast<int>(BitsOf(exact) >> 52 & 0x7ff) - 1023, -126);
  return std::fabs(value - exact) * DoubleOf(static_cast<uint64_t>(1023 + 23 - exponent) << 52);
}

Worst Scan(const Function& f, uint64_t start, uint64_t stride) {
  Worst worst;
  for (uint64_t bits = start; bits < (uint64_t{1} << 32); bits += stride) {
    const float x = FloatOf(static_cast<uint32_t>(bits));
    if (!(x >= f.low && x <= f.high)) continue;
    const double exact = f.reference(static_cast<double>(x));
    const double ulp = UlpError(f.f(x), exact);
    ++worst.checked;
    if (ulp > worst.ulp) {
      worst.ulp = ulp;
      worst.at = x;
    }
  }
  return worst;
}

class ElementaryTest : public testing::TestWithParam<Function> {};

TEST_P(ElementaryTest, StatedErrorHoldsOnASample) {
  const Worst w = Scan(GetParam(), 5, 8191);
  EXPECT_GT(w.checked, 100000);
  EXPECT_LE(w.ulp, GetParam().max_ulp) << "at " << w.at << " bits " << BitsOf(w.at);
}

TEST_P(ElementaryTest, SlowStatedErrorHoldsForEveryFloat) {
  const Worst w = Scan(GetParam(), 0, 1);
  RecordProperty("max_ulp", std::to_string(w.ulp));
  RecordProperty("checked", std::to_string(w.checked));
  printf("%s: max %.6f ulp at %a over %lld floats\n", GetParam().name, w.ulp,
         static_cast<double>(w.at), static_cast<long long>(w.checked));
  EXPECT_LE(w.ulp, GetParam().max_ulp) << "at " << w.at << " bits " << BitsOf(w.at);
}

// Every NaN, and everything outside the domain, gives the one NaN.
TEST_P(ElementaryTest, NanAndDomainGiveTheCanonicalNan) {
  for (const uint32_t bits : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xffffffffu, 0x7fc0beefu}) {
    EXPECT_EQ(BitsOf(GetParam().f(FloatOf(bits))), kCanonicalNanBits) << std::hex << bits;
  }
  if (GetParam().low > -kInf) {
    EXPECT_EQ(BitsOf(GetParam().f(std::nextafter(GetParam().low, -kInf))), kCanonicalNanBits);
    EXPECT_EQ(BitsOf(GetParam().f(-kInf)), kCanonicalNanBits);
  }
  if (GetParam().high < kInf) {
    EXPECT_EQ(BitsOf(GetParam().f(std::nextafter(GetParam().high, kInf))), kCanonicalNanBits);
    EXPECT_EQ(BitsOf(GetParam().f(kInf)), kCanonicalNanBits);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ElementaryTest, testing::ValuesIn(kFunctions),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(ElementarySpecialsTest, ExactPoints) {
  for (int n = -149; n <= 127; ++n) {
    EXPECT_EQ(Exp2(static_cast<float>(n)), std::ldexp(1.0f, n)) << n;
  }
  EXPECT_EQ(BitsOf(Exp2(-kInf)), 0u);
  EXPECT_EQ(BitsOf(Exp2(-150.0f)), 0u);
  EXPECT_EQ(Exp2(128.0f), kInf);
  EXPECT_EQ(Exp2(kInf), kInf);
  EXPECT_EQ(Exp2(-0.0f), 1.0f);
  EXPECT_EQ(Exp(0.0f), 1.0f);
  EXPECT_EQ(BitsOf(Exp(-kInf)), 0u);
  EXPECT_EQ(Exp(kInf), kInf);
  for (int n = -149; n <= 127; ++n) {
    EXPECT_EQ(Log2(std::ldexp(1.0f, n)), static_cast<float>(n)) << n;
  }
  EXPECT_EQ(BitsOf(Log(1.0f)), 0u);
  EXPECT_EQ(Log(0.0f), -kInf);
  EXPECT_EQ(Log(-0.0f), -kInf);
  EXPECT_EQ(Log(kInf), kInf);
  EXPECT_EQ(Log1p(-1.0f), -kInf);
  EXPECT_EQ(Sigmoid(0.0f), 0.5f);
  EXPECT_EQ(Sigmoid(kInf), 1.0f);
  EXPECT_EQ(BitsOf(Sigmoid(-kInf)), 0u);
  EXPECT_EQ(Silu(kInf), kInf);
  // Odd functions and those that are x times something keep the sign of zero.
  for (float (*f)(float) : {Silu, Log1p, Expm1, Sin, Tanh, Erf, Gelu, GeluTanh}) {
    EXPECT_EQ(BitsOf(f(-0.0f)), 0x80000000u);
    EXPECT_EQ(BitsOf(f(0.0f)), 0u);
  }
  EXPECT_EQ(BitsOf(Silu(-kInf)), 0x80000000u);
  EXPECT_EQ(BitsOf(Gelu(-kInf)), 0x80000000u);
  EXPECT_EQ(BitsOf(GeluTanh(-kInf)), 0x80000000u);
  EXPECT_EQ(Gelu(kInf), kInf);
  EXPECT_EQ(Tanh(kInf), 1.0f);
  EXPECT_EQ(Cos(0.0f), 1.0f);
}

// Attention's short exponential: relative error at most 2^-13, exact at zero and at -inf.
Worst ScanExp2P(uint64_t stride) {
  Worst worst;
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += stride) {
    const float x = FloatOf(static_cast<uint32_t>(bits));
    if (!(x >= -126.0f && x <= 127.0f)) continue;
    const double exact = std::exp2(static_cast<double>(x));
    const double relative = std::fabs(static_cast<double>(Exp2P(x)) - exact) / exact;
    ++worst.checked;
    if (relative > worst.ulp) {
      worst.ulp = relative;
      worst.at = x;
    }
  }
  return worst;
}

TEST(Exp2PTest, RelativeErrorOnASample) {
  EXPECT_LE(ScanExp2P(4093).ulp, 0x1p-13);
  EXPECT_EQ(Exp2P(0.0f), 1.0f);
  EXPECT_EQ(Exp2P(-0.0f), 1.0f);
  EXPECT_EQ(BitsOf(Exp2P(-kInf)), 0u);
  EXPECT_EQ(BitsOf(Exp2P(-1e30f)), 0u);
  EXPECT_EQ(BitsOf(Exp2P(-127.0f)), 0u);
  EXPECT_TRUE(std::isnan(Exp2P(CanonicalNan())));
}

TEST(Exp2PTest, SlowRelativeErrorForEveryFloat) {
  const Worst w = ScanExp2P(1);
  printf("Exp2P: max relative error 2^%.3f at %a over %lld floats\n", std::log2(w.ulp),
         static_cast<double>(w.at), static_cast<long long>(w.checked));
  EXPECT_LE(w.ulp, 0x1p-13);
}

// NUM-03: the approximation is another function. A mix-up of the two would be seen.
TEST(Exp2PTest, DiffersFromExp2) {
  int differ = 0;
  for (int i = 0; i < 1000; ++i) {
    const float x = -20.0f * static_cast<float>(i) / 1000.0f;
    differ += BitsOf(Exp2P(x)) != BitsOf(Exp2(x));
  }
  EXPECT_GT(differ, 900);
}

TEST(PowTest, AgreesWithTheCLibraryOnAGridAndInItsSpecialCases) {
  double worst = 0;
  for (int i = 1; i < 400; ++i) {
    for (int j = -200; j <= 200; ++j) {
      const float x = std::ldexp(1.0f + static_cast<float>(i * 37 % 400) / 400.0f, i % 25 - 12);
      const float y = static_cast<float>(j) * 0.173f;
      worst = std::max(
          worst, UlpError(Pow(x, y), std::pow(static_cast<double>(x), static_cast<double>(y))));
    }
  }
  EXPECT_LE(worst, 0.501);
  const float values[] = {0.0f,  -0.0f, 1.0f,   -1.0f, 0.5f,  -0.5f,  2.0f,    -2.0f,       3.0f,
                          -3.0f, 1e30f, -1e30f, kInf,  -kInf, 1e-40f, -1e-40f, 16777216.0f, 2.5f};
  for (const float x : values) {
    for (const float y : values) {
      const float want =
          static_cast<float>(std::pow(static_cast<double>(x), static_cast<double>(y)));
      const float got = Pow(x, y);
      if (std::isnan(want)) {
        EXPECT_EQ(BitsOf(got), kCanonicalNanBits) << x << " ^ " << y;
      } else {
        EXPECT_EQ(BitsOf(got), BitsOf(want)) << x << " ^ " << y;
      }
    }
  }
  EXPECT_EQ(Pow(CanonicalNan(), 0.0f), 1.0f);
  EXPECT_EQ(Pow(1.0f, CanonicalNan()), 1.0f);
  EXPECT_EQ(BitsOf(Pow(CanonicalNan(), 2.0f)), kCanonicalNanBits);
}

// float64: in units of its last place, against 80-bit long double.
TEST(Elementary64Test, StatedErrorsAgainstLongDouble) {
  struct Wide {
    const char* name;
    double (*f)(double);
    long double (*reference)(long double);
    double low, high, max_ulp;
  };
  const Wide functions[] = {
      {"exp2", Exp2F64, [](long double x) { return std::exp2(x); }, -1020, 1020, 1.0},
      {"exp", ExpF64, [](long double x) { return std::exp(x); }, -700, 700, 1.0},
      {"expm1", Expm1F64, [](long double x) { return std::expm1(x); }, -40, 600, 2.0},
      {"log2", Log2F64, [](long double x) { return std::log2(x); }, 1e-300, 4, 2.0},
      {"log", LogF64, [](long double x) { return std::log(x); }, 1e-300, 4, 2.0},
      {"log1p", Log1pF64, [](long double x) { return std::log1p(x); }, -0.999, 3, 2.0},
      {"sin", SinF64, [](long double x) { return std::sin(x); }, -0x1p20, 0x1p20, 1.0},
      {"cos", CosF64, [](long double x) { return std::cos(x); }, -0x1p20, 0x1p20, 1.0},
      {"tanh", TanhF64, [](long double x) { return std::tanh(x); }, -20, 20, 3.5},
  };
  uint64_t state = 1;
  for (const Wide& f : functions) {
    double worst = 0, at = 0;
    for (int i = 0; i < 200000; ++i) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      const double u = static_cast<double>(state >> 11) * 0x1p-53;
      // A third each: even, near zero, near one.
      double x = f.low + (f.high - f.low) * u;
      if (i % 3 == 1) x = std::ldexp(u - 0.5, -static_cast<int>(state & 31));
      if (i % 3 == 2) x = 1.0 + std::ldexp(u - 0.5, -static_cast<int>(state & 31));
      if (!(x >= f.low && x <= f.high) || x == 0.0) continue;
      const long double exact = f.reference(x);
      int exponent;
      std::frexp(static_cast<double>(exact), &exponent);
      const double ulp = static_cast<double>(std::fabs(static_cast<long double>(f.f(x)) - exact) *
                                             std::ldexp(1.0L, 53 - exponent));
      if (ulp > worst) {
        worst = ulp;
        at = x;
      }
    }
    EXPECT_LE(worst, f.max_ulp) << f.name << " at " << at;
    EXPECT_GT(worst, 0.4) << f.name << ": the check sees nothing";
  }
}

// What beta^t and rope's inverse frequencies need.
TEST(Elementary64Test, PowKeepsItsDigitsForLargeExponents) {
  for (int t = 1; t < 100000; t += 997) {
    const long double exact =
        std::pow(static_cast<long double>(0.999), static_cast<long double>(t));
    EXPECT_NEAR(static_cast<double>(PowF64(0.999, t) / exact - 1), 0.0, 4e-16) << t;
  }
  for (int i = 0; i < 64; ++i) {
    const long double exact = std::pow(1e6L, -static_cast<long double>(i) / 64.0L);
    EXPECT_NEAR(static_cast<double>(PowF64(1e6, -i / 64.0) / exact - 1), 0.0, 4e-16) << i;
  }
}

}  // namespace
}  // namespace tare::numerics
