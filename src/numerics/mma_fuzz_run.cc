#include "numerics/mma_fuzz_run.h"

#include <vector>

namespace tare::numerics {
namespace {

template <MmaType kType>
void Round(MmaKernel kernel, uint64_t seed, MmaFuzzReport& report) {
  using T = typename MmaStorage<kType>::Type;
  constexpr int kGroup = FormatOf(kType).group;
  PatternSource source(seed);
  const int64_t m = 1 + source.Below(12);
  const int64_t n = source.Below(3) == 0 ? 1 + source.Below(2 * kMmaPanel) : kMmaPanel;
  const int64_t k = 1 + source.Below(12 * kGroup);
  std::vector<T> a(static_cast<size_t>(m * k)), b(static_cast<size_t>(n * k));
  std::vector<float> c(static_cast<size_t>(m * n));
  const Pattern pattern = source.FillOperands<kType>(a.data(), m, b.data(), n, k);
  source.FillAccumulators<kType>(pattern, c.data(), m * n);
  std::vector<float> got = c;
  MmaTile(MmaA::Pack(kType, a.data(), m, k, k, 1), 0, m, MmaB::Pack(kType, b.data(), n, k, k, 1), 0,
          n, 0, k, got.data(), n, kernel);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      const float want =
          Sm90Chain<kType>(&a[static_cast<size_t>(i * k)], &b[static_cast<size_t>(j * k)], k,
                           c[static_cast<size_t>(i * n + j)]);
      const uint32_t g = BitsOf(got[static_cast<size_t>(i * n + j)]);
      if (g != BitsOf(want) && !report.difference) {
        report.difference = MmaFuzzDifference{seed, pattern, i, j, k, g, BitsOf(want)};
      }
    }
  }
  report.products += m * n * k;
  report.elements += m * n;
  report.products_by_pattern[static_cast<int>(pattern)] += m * n * k;
}

}  // namespace

MmaFuzzReport MmaFuzz(MmaType type, MmaKernel kernel, int64_t products, uint64_t seed,
                      const std::function<void(int64_t)>& progress) {
  MmaFuzzReport report;
  for (uint64_t round = 0; report.products < products && !report.difference; ++round) {
    const uint64_t s = seed + round;
    switch (type) {
      case MmaType::kBF16:
        Round<MmaType::kBF16>(kernel, s, report);
        break;
      case MmaType::kF16:
        Round<MmaType::kF16>(kernel, s, report);
        break;
      case MmaType::kE4M3:
        Round<MmaType::kE4M3>(kernel, s, report);
        break;
      case MmaType::kE5M2:
        Round<MmaType::kE5M2>(kernel, s, report);
        break;
    }
    if (progress && round % 256 == 0) progress(report.products);
  }
  return report;
}

}  // namespace tare::numerics
