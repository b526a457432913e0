// Golden tiles, Philox, lanes and the floating-point environment.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <fmt/format.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <cfenv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/thread_pool.h"
#include "numerics/fp_environment.h"
#include "numerics/golden.h"
#include "numerics/lanes.h"
#include "numerics/mma_fuzz_run.h"
#include "numerics/philox.h"

namespace tare::numerics {
namespace {

using testing::HasSubstr;

std::string Golden(const std::string& type) {
  return std::string(TARE_SOURCE_DIR) + "/tests/data/golden/sm90_mma_" + type + ".safetensors";
}

class GoldenTest : public testing::TestWithParam<const char*> {};

TEST_P(GoldenTest, EveryKernelReproducesTheDeviceToTheBit) {
  for (const MmaKernel kernel : {MmaKernel::kPlain, MmaKernel::kAvx2, MmaKernel::kAvx512}) {
    if (!MmaKernelSupported(kernel, MmaType::kBF16)) continue;
    SCOPED_TRACE(MmaKernelName(kernel));
    const auto report = CheckGolden(Env::Real(), Golden(GetParam()), std::nullopt, kernel);
    ASSERT_TRUE(report.ok()) << report.status().ToString();
    EXPECT_EQ(report->families.size(), 9u);
    EXPECT_EQ(report->checked, 9 * 6144);
    EXPECT_EQ(report->wrong, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, GoldenTest,
                         testing::Values("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"));

class GoldenFileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::ifstream in(Golden("float8_e5m2"), std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(in), {});
    ASSERT_GT(bytes_.size(), 1000u);
    path_ = fmt::format("{}planted_{}_float8_e5m2.safetensors", testing::TempDir(), getpid());
  }
  void TearDown() override { std::filesystem::remove(path_); }
  Result<GoldenReport> CheckBytes() {
    std::ofstream(path_, std::ios::binary) << bytes_;
    return CheckGolden(Env::Real(), path_, std::nullopt, MmaKernel::kAuto);
  }
  std::string bytes_;
  std::string path_;
};

// The planted fault: one bit of one answer.
TEST_F(GoldenFileTest, OneWrongBitIsFoundAndPlaced) {
  uint64_t header = 0;
  std::memcpy(&header, bytes_.data(), 8);
  const std::string json = bytes_.substr(8, header);
  const size_t at = json.find("\"cancel.d_bits\"");
  ASSERT_NE(at, std::string::npos);
  const size_t offset = std::stoull(json.substr(json.find("\"data_offsets\":[", at) + 16));
  // tile 3, m 7, n 5 of [12, 64, 8]
  bytes_[8 + header + offset + ((3 * 64 + 7) * 8 + 5) * 4 + 1] ^= 0x40;
  const auto report = CheckBytes();
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_EQ(report->wrong, 1);
  for (const GoldenFamily& f : report->families) {
    if (f.name != "cancel") {
      EXPECT_EQ(f.wrong, 0) << f.name;
      continue;
    }
    ASSERT_TRUE(f.first.has_value());
    EXPECT_EQ(f.first->tile, 3);
    EXPECT_EQ(f.first->m, 7);
    EXPECT_EQ(f.first->n, 5);
    EXPECT_EQ(f.first->got ^ f.first->want, 0x4000u);
  }
}

TEST_F(GoldenFileTest, TruncatedFileIsAnError) {
  bytes_.resize(bytes_.size() - 4);
  EXPECT_EQ(CheckBytes().status().code(), Code::kDataLoss);
}

TEST_F(GoldenFileTest, MissingPartIsNamed) {
  const size_t at = bytes_.find("cancel.d_bits");
  bytes_.replace(at, 13, "cancel.e_bits");
  const auto report = CheckBytes();
  EXPECT_EQ(report.status().code(), Code::kDataLoss);
  EXPECT_THAT(report.status().message(), HasSubstr("cancel.e_bits"));
}

TEST_F(GoldenFileTest, AnotherTypesNameIsAShapeError) {
  std::ofstream(path_, std::ios::binary) << bytes_;
  const auto report = CheckGolden(Env::Real(), path_, MmaType::kBF16, MmaKernel::kAuto);
  EXPECT_EQ(report.status().code(), Code::kDataLoss);
  EXPECT_THAT(report.status().message(), HasSubstr("not"));
}

TEST_F(GoldenFileTest, MissingFileIsNotFound) {
  EXPECT_EQ(
      CheckGolden(Env::Real(), path_ + ".none", std::nullopt, MmaKernel::kAuto).status().code(),
      Code::kNotFound);
}

TEST(MmaFuzzTest, FastKernelsEqualPlainOverEveryPatternClass) {
  for (const MmaKernel kernel : {MmaKernel::kAvx2, MmaKernel::kAvx512}) {
    for (const MmaType type : {MmaType::kBF16, MmaType::kF16, MmaType::kE4M3, MmaType::kE5M2}) {
      if (!MmaKernelSupported(kernel, type)) continue;
      const MmaFuzzReport r = MmaFuzz(type, kernel, 4'000'000, 100);
      EXPECT_FALSE(r.difference.has_value()) << MmaTypeName(type) << " " << MmaKernelName(kernel);
      for (const int64_t products : r.products_by_pattern) EXPECT_GT(products, 0);
    }
  }
}

// Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds).
TEST(PhiloxTest, PublishedVectors) {
  const auto check = [](PhiloxBlock counter, uint32_t k0, uint32_t k1, PhiloxBlock want) {
    const PhiloxBlock got = Philox4x32(counter, k0, k1);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(got.v[i], want.v[i]) << i;
  };
  check({{0, 0, 0, 0}}, 0, 0, {{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}});
  check({{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u, {{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}});
  check({{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}}, 0xa4093822u, 0x299f31d0u,
        {{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}});
}

TEST(PhiloxTest, EveryFieldOfTheCounterMatters) {
  const PhiloxBlock base = RandomAt(7, 3, RandomPurpose::kToken, 0);
  for (const PhiloxBlock& other :
       {RandomAt(8, 3, RandomPurpose::kToken, 0), RandomAt(7, 4, RandomPurpose::kToken, 0),
        RandomAt(7, 3, RandomPurpose::kInit, 0), RandomAt(7, 3, RandomPurpose::kToken, 1),
        RandomAt(7 + (uint64_t{1} << 40), 3, RandomPurpose::kToken, 0)}) {
    EXPECT_NE(base.Low64(), other.Low64());
  }
}

TEST(PhiloxTest, MulHi64) {
  EXPECT_EQ(MulHi64(~0ull, ~0ull), ~0ull - 1);
  EXPECT_EQ(MulHi64(1ull << 63, 6), 3u);
}

// NUM-04: values that tell every order apart. The definition, written out without the template.
TEST(LanesTest, OrderIsTheContracts) {
  std::vector<float> x(300);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = (i % 3 == 0 ? 1e8f : i % 3 == 1 ? -1e8f : 1.0f) + static_cast<float>(i) * 0.37f;
  }
  for (const int64_t n : {0, 1, 31, 32, 33, 127, 128, 129, 300}) {
    std::vector<float> lane(128, 0.0f);
    for (int64_t i = 0; i < n; ++i) lane[i % 128] = lane[i % 128] + x[i];
    for (int half = 64; half >= 1; half /= 2) {
      for (int j = 0; j < half; ++j) lane[j] = lane[j] + lane[j + half];
    }
    EXPECT_EQ(BitsOf(LanesSum<128>(x.data(), n)), BitsOf(lane[0])) << n;
    // In two pieces at every cut.
    for (int64_t cut = 0; cut <= n; cut += 7) {
      LanesState<128> s;
      s.Reset();
      s.Run(cut, [&](float acc, int64_t i) { return acc + x[i]; });
      s.Run(n - cut, [&](float acc, int64_t i) { return acc + x[cut + i]; });
      EXPECT_EQ(BitsOf(s.Sum()), BitsOf(lane[0])) << n << " cut " << cut;
    }
  }
  // Another L and the plain left fold give other bits on these data.
  float left = 0.0f;
  for (const float v : x) left += v;
  EXPECT_NE(BitsOf(LanesSum<128>(x.data(), 300)), BitsOf(LanesSum<32>(x.data(), 300)));
  EXPECT_NE(BitsOf(LanesSum<128>(x.data(), 300)), BitsOf(left));
}

TEST(LanesTest, NeighbourTreeAndQuadLanes) {
  float p[8] = {1e8f, 1.0f, -1e8f, 1.0f, 3.0f, 1e-3f, 7.0f, 11.0f};
  const float want = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
  EXPECT_EQ(BitsOf(NeighbourTree(p, 8)), BitsOf(want));
  std::vector<float> x(37);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>((i * 7919) % 101) * 1.1e3f + 0.1f;
  float l[4] = {};
  for (int b = 0; b < 5; ++b) {
    for (int q = 0; q < 4; ++q) {
      for (int j = 8 * b + 2 * q; j < 8 * b + 2 * q + 2 && j < 37; ++j) l[q] += x[j];
    }
  }
  EXPECT_EQ(BitsOf(QuadLaneSum(x.data(), 37)), BitsOf((l[0] + l[1]) + (l[2] + l[3])));
}

TEST(LanesTest, MaximumPropagatesNanAndPrefersPlusZero) {
  const float inf = FloatOf(0x7f800000u);
  const float a[] = {-0.0f, 0.0f, -0.0f};
  EXPECT_EQ(BitsOf(RowMax(a, 3)), 0u);
  const float b[] = {1.0f, FloatOf(0xffc12345u), inf};
  EXPECT_EQ(BitsOf(RowMax(b, 3)), kCanonicalNanBits);
  EXPECT_EQ(RowMax(b, 0), -inf);
  EXPECT_EQ(BitsOf(MaxOf(-0.0f, -0.0f)), 0x80000000u);
}

// A thread that a library has changed is found by its own check; its neighbours are not blamed.
TEST(FpEnvironmentTest, FlushAndRoundingModesAreFoundPerThread) {
  EXPECT_TRUE(CheckFpEnvironment().ok());
  const auto in_thread = [](auto change) {
    Status status;
    std::thread([&] {
      change();
      status = CheckFpEnvironment();
    }).join();
    return status;
  };
  Status s = in_thread([] { _mm_setcsr(_mm_getcsr() | 0x8000); });
  EXPECT_EQ(s.code(), Code::kPrecondition);
  EXPECT_THAT(s.message(), HasSubstr("FTZ"));
  s = in_thread([] { _mm_setcsr(_mm_getcsr() | 0x0040); });
  EXPECT_THAT(s.message(), HasSubstr("DAZ"));
  s = in_thread([] { std::fesetround(FE_UPWARD); });
  EXPECT_THAT(s.message(), HasSubstr("upward"));
  s = in_thread([] { std::fesetround(FE_TOWARDZERO); });
  EXPECT_THAT(s.message(), HasSubstr("toward zero"));
  s = in_thread([] { _mm_setcsr(_mm_getcsr() | 0x2000); });  // SSE alone, x87 as it was
  EXPECT_THAT(s.message(), HasSubstr("SSE rounding"));
  EXPECT_TRUE(CheckFpEnvironment().ok());
}

TEST(FpEnvironmentTest, APoolOfSoundThreadsPassesItsCheck) {
  ThreadPool pool(3, RequireFpEnvironment);
  std::atomic<int> n{0};
  pool.ParallelFor(100, [&](int64_t) { ++n; });
  EXPECT_EQ(n.load(), 100);
}

// Threads inherit the mode of their maker: a pool made on a changed thread dies with the reason.
TEST(FpEnvironmentDeathTest, APoolOnAChangedThreadIsRefused) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        _mm_setcsr(_mm_getcsr() | 0x8000);
        ThreadPool pool(2, RequireFpEnvironment);
      },
      "FTZ");
}

}  // namespace
}  // namespace tare::numerics
