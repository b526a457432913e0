// The chain GEMM in the sm90-mma step: operands become codes of the step's type, every group of K
// is padded with zeros to whole steps, and numerics/mma.h walks them. One task is a panel of 64
// columns against some rows.

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "numerics/fp.h"
#include "numerics/mma.h"
#include "ops/linear/gemm.h"
#include "tensor/convert.h"

namespace tare::ops::gemm {
namespace {

using numerics::kMmaPanel;
using numerics::MmaA;
using numerics::MmaB;
using numerics::MmaType;

constexpr int64_t kGroup = 16;
constexpr int64_t kRowBlock = 64;
constexpr int64_t kLeastRows = 16;
constexpr int64_t kBytesOfA = 12;  // of an element of A as the step multiplies it
constexpr int64_t kLargeA = int64_t{8} << 20;

int64_t RoundUp(int64_t v, int64_t to) { return (v + to - 1) / to * to; }

uint16_t Code(const Matrix& m, DType type, int64_t at) {
  if (m.dtype == type) return static_cast<const uint16_t*>(m.data)[at];
  const float v = LoadAsF32(m.data, m.dtype, at);
  return type == DType::kBF16 ? F32ToBf16(v) : F32ToF16(v);
}

DType StepType(const Matrix& m) {
  return m.round_to_bf16 ? DType::kBF16 : m.round_to_f16 ? DType::kF16 : m.dtype;
}

// count codes of row `row` from element `begin` on.
void CopyCodes(const Matrix& m, DType type, int64_t row, int64_t begin, int64_t count,
               uint16_t* out) {
  const int64_t at = (m.rows ? m.rows[row] : row) * m.stride + begin;
  if (m.dtype == type) {
    std::memcpy(out, static_cast<const uint16_t*>(m.data) + at, static_cast<size_t>(count) * 2);
    return;
  }
  for (int64_t i = 0; i < count; ++i) out[i] = Code(m, type, at + i);
}

// K of the problem laid out with each group padded to whole steps.
struct Layout {
  std::vector<int64_t> start;  // of every group, and the end
  explicit Layout(const std::vector<Group>& groups) : start{0} {
    for (const Group& g : groups) {
      int64_t length = 0;
      for (const Range& r : g) length += r.end - r.begin;
      start.push_back(start.back() + RoundUp(length, kGroup));
    }
  }
  int64_t k() const { return start.back(); }
};

// Rows [r0, r1) of an operand whose rows run along K, as [r1 - r0, k] codes.
std::vector<uint16_t> Along(const Matrix& m, DType type, const Problem& p, const Layout& layout,
                            int64_t r0, int64_t r1) {
  std::vector<uint16_t> codes(static_cast<size_t>((r1 - r0) * layout.k()));
  for (int64_t r = r0; r < r1; ++r) {
    for (size_t g = 0; g < p.groups.size(); ++g) {
      uint16_t* out = codes.data() + (r - r0) * layout.k() + layout.start[g];
      for (const Range& range : p.groups[g]) {
        CopyCodes(m, type, r, range.begin, range.end - range.begin, out);
        out += range.end - range.begin;
      }
    }
  }
  return codes;
}

// Columns [c0, c0 + 64) of an operand whose rows are K, as [k, 64] codes; columns past `end` are
// zero.
std::vector<uint16_t> Across(const Matrix& m, DType type, const Problem& p, const Layout& layout,
                             int64_t c0, int64_t end) {
  std::vector<uint16_t> codes(static_cast<size_t>(layout.k() * kMmaPanel));
  const int64_t count = std::min(kMmaPanel, end - c0);
  for (size_t g = 0; g < p.groups.size(); ++g) {
    uint16_t* out = codes.data() + layout.start[g] * kMmaPanel;
    for (const Range& range : p.groups[g]) {
      for (int64_t i = range.begin; i < range.end; ++i, out += kMmaPanel)
        CopyCodes(m, type, i, c0, count, out);
    }
  }
  return codes;
}

// The same of a weight packed for the ieee-f32 kernels: its elements are the codes, in pairs.
std::vector<uint16_t> AcrossPanels(const Problem& p, const Layout& layout, int64_t c0) {
  std::vector<uint16_t> codes(static_cast<size_t>(layout.k() * kMmaPanel));
  const uint16_t* data = static_cast<const uint16_t*>(p.b.data);
  const int64_t end = RoundUp(p.n, kPanel);
  for (size_t g = 0; g < p.groups.size(); ++g) {
    uint16_t* out = codes.data() + layout.start[g] * kMmaPanel;
    for (const Range& range : p.groups[g]) {
      for (int64_t i = range.begin; i < range.end; ++i, out += kMmaPanel) {
        for (int64_t c = 0; c < kMmaPanel && c0 + c < end; ++c) {
          const int64_t n = c0 + c, slot = n % kPanel;
          out[c] = data[(n / kPanel * p.packed_k + i) * kPanel + slot % 16 * 2 + slot / 16];
        }
      }
    }
  }
  return codes;
}

// Rows [m0, m1) and columns [n0, n1) from C of every group (rows kMmaPanel apart) into y.
void Finish(const Problem& p, int64_t m0, int64_t m1, int64_t n0, int64_t n1, std::vector<float>& c,
            const std::vector<float>& bias) {
  const int64_t groups = static_cast<int64_t>(p.groups.size());
  const int64_t tile = (m1 - m0) * kMmaPanel;
  for (int64_t step = 1; step < groups; step *= 2) {
    for (int64_t g = 0; g + step < groups; g += 2 * step) {
      for (int64_t i = 0; i < tile; ++i)
        c[static_cast<size_t>(g * tile + i)] += c[static_cast<size_t>((g + step) * tile + i)];
    }
  }
  for (int64_t m = m0; m < m1; ++m) {
    for (int64_t n = n0; n < n1; ++n) {
      float v = c[static_cast<size_t>((m - m0) * kMmaPanel + n - n0)];
      if (!bias.empty()) v += bias[static_cast<size_t>(n - n0)];
      StoreRounded(p.y, p.y_dtype, m * p.y_stride + n, v);
    }
  }
}

}  // namespace

Schedule RunSm90(ThreadPool& pool, const Problem& p) {
  const DType type = StepType(p.a);
  TARE_CHECK(SizeOf(type) == 2 && type == (p.mma_b != nullptr ? type : StepType(p.b)))
      << "sm90-mma operands " << DTypeName(type) << " and " << DTypeName(StepType(p.b));
  const MmaType mma_type = type == DType::kBF16 ? MmaType::kBF16 : MmaType::kF16;
  const bool tree = p.sink == Problem::Sink::kTree;
  const Layout layout(p.groups);
  const int64_t k = layout.k();
  // A weight packed beforehand keeps its own K; only its last group is padded.
  const int64_t given_k = p.mma_b != nullptr ? p.mma_b->k() : k;
  const int64_t panels = (p.n + kMmaPanel - 1) / kMmaPanel;
  // Enough tasks for the threads to end together: smaller blocks of rows, then a split by rows. A
  // split packs a panel of B again that is not packed, so there as few as keep the threads busy.
  const int64_t threads = pool.threads();
  const bool packed = p.mma_b != nullptr;
  int64_t block = kRowBlock;
  const auto blocks = [&] { return (p.m + block - 1) / block; };
  while (threads > 1 && packed && block > kLeastRows && panels * blocks() < 8 * threads) block /= 2;
  const int64_t row_blocks = blocks();
  const int64_t some = std::max<int64_t>(1, panels);
  const int64_t enough = packed ? (8 * threads + some - 1) / some : 4 * threads / some;
  // A large A goes through the caches once: block of rows by block, each with all panels.
  const bool by_rows = packed && p.m * given_k * kBytesOfA > kLargeA;
  const int64_t row_tasks = by_rows        ? row_blocks
                            : threads == 1 ? 1
                                           : std::clamp<int64_t>(enough, 1, row_blocks);
  std::vector<MmaA> a(static_cast<size_t>(row_blocks));
  pool.ParallelFor(row_blocks, [&](int64_t i) {
    const int64_t m0 = i * block, m1 = std::min(p.m, m0 + block);
    if (p.a_rows_are_k) {
      const auto codes = Across(p.a, type, p, layout, m0, p.m);
      a[static_cast<size_t>(i)] =
          MmaA::Pack(mma_type, codes.data(), m1 - m0, given_k, 1, kMmaPanel);
    } else {
      const auto codes = Along(p.a, type, p, layout, m0, m1);
      a[static_cast<size_t>(i)] = MmaA::Pack(mma_type, codes.data(), m1 - m0, given_k, k, 1);
    }
  });
  pool.ParallelFor(panels * row_tasks, [&](int64_t task) {
    const int64_t panel = by_rows ? task % panels : task / row_tasks;
    const int64_t first = by_rows ? task / panels : task % row_tasks;
    const int64_t n0 = panel * kMmaPanel, n1 = std::min(p.n, n0 + kMmaPanel);
    MmaB local;
    if (p.mma_b == nullptr) {
      if (p.b_layout == BLayout::kRowsAreN) {
        const auto codes = Along(p.b, type, p, layout, n0, n1);
        local = MmaB::Pack(mma_type, codes.data(), n1 - n0, k, k, 1);
      } else {
        const auto codes = p.b_layout == BLayout::kPacked ? AcrossPanels(p, layout, n0)
                                                          : Across(p.b, type, p, layout, n0, p.n);
        local = MmaB::Pack(mma_type, codes.data(), n1 - n0, k, 1, kMmaPanel);
      }
    }
    const MmaB& b = p.mma_b != nullptr ? *p.mma_b : local;
    const int64_t at = p.mma_b != nullptr ? n0 : 0;
    std::vector<float> bias;
    for (int64_t n = n0; p.bias != nullptr && n < n1; ++n)
      bias.push_back(LoadAsF32(p.bias, p.bias_dtype, n));
    std::vector<float> c;
    for (int64_t i = first; i < row_blocks; i += row_tasks) {
      const int64_t m0 = i * block, m1 = std::min(p.m, m0 + block), tile = (m1 - m0) * kMmaPanel;
      c.assign(static_cast<size_t>(tree ? tile * static_cast<int64_t>(p.groups.size()) : tile),
               0.0f);
      for (size_t g = 0; g < p.groups.size(); ++g) {
        float* acc = c.data() + (tree ? static_cast<int64_t>(g) * tile : 0);
        if (!tree) std::fill(c.begin(), c.end(), 0.0f);
        numerics::MmaTile(a[static_cast<size_t>(i)], 0, m1 - m0, b, at, at + n1 - n0,
                          layout.start[g], std::min(layout.start[g + 1], given_k), acc, kMmaPanel);
        if (tree) continue;
        for (int64_t m = m0; m < m1; ++m) {
          float* sum = static_cast<float*>(p.y) + m * p.y_stride;
          for (int64_t n = n0; n < n1; ++n) {
            sum[n] = numerics::Canonical(sum[n] + acc[(m - m0) * kMmaPanel + n - n0]);
          }
        }
      }
      if (tree) Finish(p, m0, m1, n0, n1, c, bias);
    }
  });
  Schedule s;
  s.tile_m = std::min(p.m, block);
  s.tile_n = kMmaPanel;
  s.kernel = MmaKernelName(numerics::MmaBestKernel(mma_type)).data();
  return s;
}

}  // namespace tare::ops::gemm
