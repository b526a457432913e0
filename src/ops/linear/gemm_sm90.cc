// The chain GEMM in the sm90-mma step: operands become 16-bit codes, zero-padded to whole groups, and
// every output element walks its groups in order.

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "numerics/sm90.h"
#include "numerics/fp.h"
#include "ops/linear/gemm.h"
#include "tensor/convert.h"

namespace tare::ops::gemm {
namespace {

constexpr int64_t kGroup = 16;

int64_t RoundUp(int64_t v, int64_t to) { return (v + to - 1) / to * to; }

// The code of one element in the step's operand type.
uint16_t Code(const Matrix& m, DType type, int64_t at) {
  if (m.dtype == type) return static_cast<const uint16_t*>(m.data)[at];
  const float v = LoadAsF32(m.data, m.dtype, at);
  return type == DType::kBF16 ? F32ToBf16(v) : F32ToF16(v);
}

DType StepType(const Matrix& m) {
  return m.round_to_bf16 ? DType::kBF16 : m.round_to_f16 ? DType::kF16 : m.dtype;
}

float Chain(DType type, const uint16_t* a, const uint16_t* b, int64_t count) {
  return type == DType::kBF16 ? numerics::Sm90Chain<numerics::MmaType::kBF16>(a, b, count, 0.0f)
                              : numerics::Sm90Chain<numerics::MmaType::kF16>(a, b, count, 0.0f);
}

}  // namespace

Schedule RunSm90(ThreadPool& pool, const Problem& p) {
  const DType type = StepType(p.a);
  TARE_CHECK(type == StepType(p.b) && SizeOf(type) == 2)
      << "sm90-mma operands " << DTypeName(type) << " and " << DTypeName(StepType(p.b));
  const bool tree = p.sink == Problem::Sink::kTree;
  const int64_t groups = static_cast<int64_t>(p.groups.size());
  // Groups of K, each padded to whole steps, one after another.
  std::vector<int64_t> start(static_cast<size_t>(groups + 1));
  for (int64_t g = 0; g < groups; ++g) {
    int64_t length = 0;
    for (const Range& r : p.groups[static_cast<size_t>(g)]) length += r.end - r.begin;
    start[static_cast<size_t>(g + 1)] = start[static_cast<size_t>(g)] + RoundUp(length, kGroup);
  }
  const int64_t k = start.back();
  const auto pack = [&](const Matrix& m, int64_t row, auto element) {
    std::vector<uint16_t> codes(static_cast<size_t>(k));
    for (int64_t g = 0; g < groups; ++g) {
      int64_t at = start[static_cast<size_t>(g)];
      for (const Range& r : p.groups[static_cast<size_t>(g)]) {
        for (int64_t i = r.begin; i < r.end; ++i) {
          codes[static_cast<size_t>(at++)] = Code(m, type, element(m, row, i));
        }
      }
    }
    return codes;
  };
  const auto across = [](const Matrix& m, int64_t row, int64_t i) {
    return (m.rows ? m.rows[row] : row) * m.stride + i;
  };
  const auto down = [](const Matrix& m, int64_t column, int64_t i) {
    return (m.rows ? m.rows[i] : i) * m.stride + column;
  };
  const auto panel = [&](const Matrix&, int64_t n, int64_t i) {
    const int64_t c = n % kPanel;
    return (n / kPanel * p.packed_k + i) * kPanel + c % 16 * 2 + c / 16;
  };
  std::vector<std::vector<uint16_t>> a(static_cast<size_t>(p.m));
  pool.ParallelFor(p.m, [&](int64_t m) {
    a[static_cast<size_t>(m)] = p.a_rows_are_k ? pack(p.a, m, down) : pack(p.a, m, across);
  });
  pool.ParallelFor(p.n, [&](int64_t n) {
    const std::vector<uint16_t> b = p.b_layout == BLayout::kPacked     ? pack(p.b, n, panel)
                                    : p.b_layout == BLayout::kRowsAreN ? pack(p.b, n, across)
                                                                       : pack(p.b, n, down);
    const float bias = p.bias == nullptr ? 0.0f : LoadAsF32(p.bias, p.bias_dtype, n);
    for (int64_t m = 0; m < p.m; ++m) {
      float partial[8] = {};
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = start[static_cast<size_t>(g)];
        const float d = Chain(type, a[static_cast<size_t>(m)].data() + begin, b.data() + begin,
                              start[static_cast<size_t>(g + 1)] - begin);
        if (tree) {
          partial[g] = d;
        } else {
          float& sum = static_cast<float*>(p.y)[m * p.y_stride + n];
          sum = numerics::Canonical(sum + d);
        }
      }
      if (!tree) continue;
      for (int64_t step = 1; step < groups; step *= 2) {
        for (int64_t g = 0; g + step < groups; g += 2 * step) partial[g] += partial[g + step];
      }
      StoreRounded(p.y, p.y_dtype, m * p.y_stride + n,
                   p.bias == nullptr ? partial[0] : partial[0] + bias);
    }
  });
  Schedule s;
  s.tile_m = p.m;
  s.tile_n = 1;
  s.kernel = "plain";
  return s;
}

}  // namespace tare::ops::gemm
