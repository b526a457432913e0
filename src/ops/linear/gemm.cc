#include "ops/linear/gemm.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"
#include "ops/linear/gemm_kernels.h"
#include "tensor/convert.h"

namespace tare::ops::gemm {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One thread takes the widest tiles. Several take, of those widths, the one after which the last of
// them is done first: a tile converts its rows of A again, which is worth about kConvert columns.
Schedule PickTiles(int64_t m, int64_t n, int threads) {
  constexpr int64_t kWidest = 256, kConvert = 8;
  Schedule s;
  s.tile_m = m <= 192 ? m : CeilDiv(CeilDiv(m, CeilDiv(m, 192)), 12) * 12;
  s.tile_n = kWidest;
  const int64_t rows = CeilDiv(m, s.tile_m);
  if (threads == 1 || rows * CeilDiv(n, kWidest) >= int64_t{6} * threads) return s;
  int64_t least = INT64_MAX;
  for (int64_t width = kWidest; width >= 2 * kPanel; width -= kPanel) {
    const int64_t last = CeilDiv(rows * CeilDiv(n, width), threads) * (width + kConvert);
    if (last < least) least = last, s.tile_n = width;
  }
  return s;
}

Schedule RunTiles(ThreadPool& pool, const Problem& p) {
  Schedule s = PickTiles(p.m, p.n, pool.threads());
  s.kernel = "tile";
  const int64_t tiles_m = CeilDiv(p.m, s.tile_m);
  const int64_t tiles_n = CeilDiv(p.n, s.tile_n);
  pool.ParallelFor(tiles_m * tiles_n, [&](int64_t i) {
    const int64_t m0 = i % tiles_m * s.tile_m;
    const int64_t n0 = i / tiles_m * s.tile_n;
    IeeeTile(p, m0, std::min(p.m, m0 + s.tile_m), n0, std::min(p.n, n0 + s.tile_n));
  });
  return s;
}

bool Streamable(const Problem& p) {
  if (p.sink != Problem::Sink::kTree || p.b_layout != BLayout::kPacked || p.m > kStreamRows ||
      p.a_rows_are_k || p.b.dtype == DType::kF16) {
    return false;
  }
  for (const Group& g : p.groups) {
    if (g.size() != 1) return false;
  }
  return true;
}

Schedule RunStream(ThreadPool& pool, const Problem& p, int splits) {
  static thread_local std::vector<float> x;
  const int64_t k = p.packed_k;
  x.resize(static_cast<size_t>(p.m * k));
  for (int64_t r = 0; r < p.m; ++r) ConvertRow(p.a, r, 0, k, x.data() + r * k);
  const float* rows = x.data();
  const int64_t panels = CeilDiv(p.n, kPanel);
  // Pieces of whole 4-panel strips: about four a thread, none below 32 KiB of weights.
  const int64_t strip_bytes = 4 * kPanel * k * SizeOf(p.b.dtype);
  const int64_t strips = CeilDiv(panels, 4);
  int64_t grain =
      std::max(CeilDiv(strips, int64_t{4} * pool.threads()), CeilDiv(32768, strip_bytes));
  if (pool.threads() == 1) grain = strips;
  pool.ParallelRanges(strips, grain, [&](int64_t begin, int64_t end) {
    IeeeStream(p, rows, k, begin * 4, std::min(panels, end * 4), splits);
  });
  Schedule s;
  s.tile_m = p.m;
  s.tile_n = grain * 4 * kPanel;
  s.kernel = "stream";
  return s;
}

constexpr int64_t kPairBlock = 16;

// Sixteen columns of k for a whole pair panel: rows c and c + 16 lie side by side as one word, and
// the words are transposed in the first cache, in loops that the compiler turns into vectors.
// Against storing each element where it goes 1.5 to 2.4 times as fast.
void PackPairBlock(const uint16_t* src, int64_t k, uint16_t* dst) {
  uint32_t words[kPairBlock][kPairBlock];
  for (int64_t c = 0; c < kPairBlock; ++c) {
    const uint16_t *low = src + c * k, *high = src + (c + kPanel / 2) * k;
    for (int64_t i = 0; i < kPairBlock; ++i)
      words[c][i] = uint32_t{low[i]} | uint32_t{high[i]} << 16;
  }
  for (int64_t i = 0; i < kPairBlock; ++i) {
    uint32_t row[kPairBlock];
    for (int64_t c = 0; c < kPairBlock; ++c) row[c] = words[c][i];
    std::memcpy(dst + i * kPanel, row, sizeof row);
  }
}

}  // namespace

float LoadAsF32(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(data)[index];
    case DType::kBF16:
      return Bf16ToF32(static_cast<const uint16_t*>(data)[index]);
    case DType::kF16:
      return F16ToF32(static_cast<const uint16_t*>(data)[index]);
    default:
      TARE_CHECK(false) << "no contraction operand of dtype " << DTypeName(dtype);
  }
  return 0.0f;
}

void StoreRounded(void* data, DType dtype, int64_t index, float value) {
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(data)[index] = value == value ? value : std::bit_cast<float>(0x7fffffffu);
      return;
    case DType::kBF16:
      static_cast<uint16_t*>(data)[index] = F32ToBf16(value);
      return;
    case DType::kF16:
      static_cast<uint16_t*>(data)[index] = F32ToF16(value);
      return;
    default:
      TARE_CHECK(false) << "no contraction output of dtype " << DTypeName(dtype);
  }
}

float RoundOperand(float value, DType to) {
  if (to == DType::kBF16) return Bf16ToF32(F32ToBf16(value));
  if (to == DType::kF16) return F16ToF32(F32ToF16(value));
  return value;
}

void PackPanels(ThreadPool& pool, const void* w, DType dtype, int64_t n, int64_t k, void* out) {
  const int64_t panels = CeilDiv(n, kPanel);
  pool.ParallelFor(panels, [&](int64_t j) {
    const int64_t n0 = j * kPanel;
    if (SizeOf(dtype) == 2) {
      uint16_t* dst = static_cast<uint16_t*>(out) + j * k * kPanel;
      const uint16_t* src = static_cast<const uint16_t*>(w) + n0 * k;
      const int64_t whole = n0 + kPanel <= n ? k / kPairBlock * kPairBlock : 0;
      for (int64_t i0 = 0; i0 < whole; i0 += kPairBlock)
        PackPairBlock(src + i0, k, dst + i0 * kPanel);
      for (int64_t c = 0; c < kPanel / 2; ++c) {
        const uint16_t* low = n0 + c < n ? src + c * k : nullptr;
        const uint16_t* high = n0 + c + 16 < n ? src + (c + 16) * k : nullptr;
        for (int64_t i = whole; i < k; ++i) {
          uint16_t* pair = dst + i * kPanel + c * 2;
          pair[0] = low != nullptr ? low[i] : uint16_t{0};
          pair[1] = high != nullptr ? high[i] : uint16_t{0};
        }
      }
      return;
    }
    float* dst = static_cast<float*>(out) + j * k * kPanel;
    const float* src = static_cast<const float*>(w);
    for (int64_t c = 0; c < kPanel; ++c) {
      for (int64_t i = 0; i < k; ++i)
        dst[i * kPanel + c] = n0 + c < n ? src[(n0 + c) * k + i] : 0.0f;
    }
  });
}

Schedule RunIeee(ThreadPool& pool, const Problem& problem) {
  if (Streamable(problem)) return RunStream(pool, problem, 1);
  return RunTiles(pool, problem);
}

Schedule RunNative(ThreadPool& pool, const Problem& problem) {
  if (!Streamable(problem)) {
    Schedule s = RunTiles(pool, problem);
    s.kernel = "native_tile";
    return s;
  }
  // Split K by the number of rows, as split-K and stream-K heuristics do.
  Schedule s = RunStream(pool, problem, problem.m <= 2 ? 4 : problem.m <= 4 ? 2 : 1);
  s.kernel = "native_split";
  return s;
}

}  // namespace tare::ops::gemm
