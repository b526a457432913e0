// Tiles have the bits of the chained plain step, whatever the tile, the cut of K and the kernel.

#include "numerics/mma.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "numerics/sm90_patterns.h"

namespace tare::numerics {
namespace {

template <MmaType kType>
void CheckTiles(MmaKernel kernel, uint64_t seed, int rounds) {
  using T = typename MmaStorage<kType>::Type;
  if (!MmaKernelSupported(kernel, kType)) GTEST_SKIP() << "this CPU does not run the kernel";
  constexpr int kGroup = FormatOf(kType).group;
  PatternSource source(seed);
  for (int round = 0; round < rounds; ++round) {
    const int64_t m = 1 + source.Below(9), n = 1 + source.Below(150),
                  k = 1 + source.Below(5 * kGroup);
    std::vector<T> a(static_cast<size_t>(m * k)), b(static_cast<size_t>(n * k));
    std::vector<float> c(static_cast<size_t>(m * n)), want;
    const Pattern pattern = source.FillOperands<kType>(a.data(), m, b.data(), n, k);
    source.FillAccumulators<kType>(pattern, c.data(), m * n);
    want = c;
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        want[i * n + j] = Sm90Chain<kType>(&a[i * k], &b[j * k], k, c[i * n + j]);
      }
    }
    const MmaA pa = MmaA::Pack(kType, a.data(), m, k, k, 1);
    const MmaB pb = MmaB::Pack(kType, b.data(), n, k, k, 1);
    // Rows, columns and K cut at random.
    const int64_t mc = source.Below(m + 1);
    const int64_t nc = source.Below(n / kMmaPanel + 1) * kMmaPanel;
    const int64_t kc = source.Below(k / kGroup + 1) * kGroup;
    for (const auto& [m0, m1] : {std::pair{int64_t{0}, mc}, std::pair{mc, m}}) {
      for (const auto& [n0, n1] : {std::pair{int64_t{0}, nc}, std::pair{nc, n}}) {
        MmaTile(pa, m0, m1, pb, n0, n1, 0, kc, &c[m0 * n + n0], n, kernel);
        MmaTile(pa, m0, m1, pb, n0, n1, kc, k, &c[m0 * n + n0], n, kernel);
      }
    }
    for (int64_t i = 0; i < m * n; ++i) {
      ASSERT_EQ(BitsOf(c[i]), BitsOf(want[i]))
          << PatternName(pattern) << " round " << round << " m " << i / n << " of " << m << ", n "
          << i % n << " of " << n << ", K " << k;
    }
  }
}

TEST(MmaTest, PlainTilesHaveTheChainsBits) {
  CheckTiles<MmaType::kBF16>(MmaKernel::kPlain, 1, 20);
  CheckTiles<MmaType::kF16>(MmaKernel::kPlain, 2, 20);
  CheckTiles<MmaType::kE4M3>(MmaKernel::kPlain, 3, 20);
  CheckTiles<MmaType::kE5M2>(MmaKernel::kPlain, 4, 20);
}

class MmaKernelTest : public testing::TestWithParam<MmaKernel> {};

TEST_P(MmaKernelTest, BF16) { CheckTiles<MmaType::kBF16>(GetParam(), 5, 120); }
TEST_P(MmaKernelTest, F16) { CheckTiles<MmaType::kF16>(GetParam(), 6, 120); }
TEST_P(MmaKernelTest, E4M3) { CheckTiles<MmaType::kE4M3>(GetParam(), 7, 120); }
TEST_P(MmaKernelTest, E5M2) { CheckTiles<MmaType::kE5M2>(GetParam(), 8, 120); }

INSTANTIATE_TEST_SUITE_P(Fast, MmaKernelTest, testing::ValuesIn(kMmaFastKernels),
                         [](const auto& info) {
                           std::string name(MmaKernelName(info.param));
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace tare::numerics
