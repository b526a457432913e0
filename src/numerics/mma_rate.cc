#include "numerics/mma_rate.h"

#include <immintrin.h>
#include <time.h>

#include <algorithm>
#include <vector>

#include "numerics/sm90_patterns.h"

namespace tare::numerics {
namespace {

double ThreadSeconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

constexpr int64_t kFmaSteps = 1'000'000;

// Ten chains cover the latency of two FMA units. The barrier keeps each in a register.
__attribute__((target("avx512f"), noinline)) double FmaRate512() {
  __m512 v[10];
  const __m512 a = _mm512_set1_ps(1.0001f), b = _mm512_set1_ps(1e-9f);
  for (__m512& x : v) x = _mm512_set1_ps(1.0f);
  __m512 v0 = v[0], v1 = v[1], v2 = v[2], v3 = v[3], v4 = v[4], v5 = v[5], v6 = v[6], v7 = v[7],
         v8 = v[8], v9 = v[9];
  const double t = ThreadSeconds();
  for (int64_t i = 0; i < kFmaSteps; ++i) {
#define TARE_STEP(x)            \
  x = _mm512_fmadd_ps(x, a, b); \
  asm volatile("" : "+v"(x))
    TARE_STEP(v0);
    TARE_STEP(v1);
    TARE_STEP(v2);
    TARE_STEP(v3);
    TARE_STEP(v4);
    TARE_STEP(v5);
    TARE_STEP(v6);
    TARE_STEP(v7);
    TARE_STEP(v8);
    TARE_STEP(v9);
#undef TARE_STEP
  }
  return static_cast<double>(kFmaSteps) * 160.0 / (ThreadSeconds() - t);
}

__attribute__((noinline)) double FmaRate256() {
  const __m256 a = _mm256_set1_ps(1.0001f), b = _mm256_set1_ps(1e-9f), one = _mm256_set1_ps(1.0f);
  __m256 v0 = one, v1 = one, v2 = one, v3 = one, v4 = one, v5 = one, v6 = one, v7 = one, v8 = one,
         v9 = one;
  const double t = ThreadSeconds();
  for (int64_t i = 0; i < kFmaSteps; ++i) {
#define TARE_STEP(x)            \
  x = _mm256_fmadd_ps(x, a, b); \
  asm volatile("" : "+x"(x))
    TARE_STEP(v0);
    TARE_STEP(v1);
    TARE_STEP(v2);
    TARE_STEP(v3);
    TARE_STEP(v4);
    TARE_STEP(v5);
    TARE_STEP(v6);
    TARE_STEP(v7);
    TARE_STEP(v8);
    TARE_STEP(v9);
#undef TARE_STEP
  }
  return static_cast<double>(kFmaSteps) * 80.0 / (ThreadSeconds() - t);
}

template <MmaType kType>
MmaRate Measure(MmaKernel kernel, int rounds) {
  using T = typename MmaStorage<kType>::Type;
  const int64_t m = 64, n = 512, k = 1024;
  PatternSource source(42);
  std::vector<T> a(static_cast<size_t>(m * k)), b(static_cast<size_t>(n * k));
  source.FillWith<kType>(Pattern::kNormal, a.data(), m, b.data(), n, k);
  const MmaA pa = MmaA::Pack(kType, a.data(), m, k, k, 1);
  const MmaB pb = MmaB::Pack(kType, b.data(), n, k, k, 1);
  std::vector<float> c(static_cast<size_t>(m * n));
  MmaRate rate;
  const bool wide = __builtin_cpu_supports("avx512f") && kernel != MmaKernel::kAvx2;
  for (int r = 0; r < rounds; ++r) {
    rate.fma_per_second = std::max(rate.fma_per_second, wide ? FmaRate512() : FmaRate256());
    std::fill(c.begin(), c.end(), 0.0f);
    const double t = ThreadSeconds();
    MmaTile(pa, 0, m, pb, 0, n, 0, k, c.data(), n, kernel);
    rate.products_per_second =
        std::max(rate.products_per_second, static_cast<double>(m * n * k) / (ThreadSeconds() - t));
  }
  return rate;
}

}  // namespace

MmaRate MeasureMmaRate(MmaType type, MmaKernel kernel, int rounds) {
  if (kernel == MmaKernel::kAuto) kernel = MmaBestKernel(type);
  switch (type) {
    case MmaType::kBF16:
      return Measure<MmaType::kBF16>(kernel, rounds);
    case MmaType::kF16:
      return Measure<MmaType::kF16>(kernel, rounds);
    case MmaType::kE4M3:
      return Measure<MmaType::kE4M3>(kernel, rounds);
    case MmaType::kE5M2:
      return Measure<MmaType::kE5M2>(kernel, rounds);
  }
  return {};
}

}  // namespace tare::numerics
