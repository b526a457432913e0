#include "ops/token_units.h"

#include "ops/token_units_cuda.h"

#include <algorithm>

namespace tare::ops {

Result<std::vector<TokenUnit>> CutUnits(std::span<const TokenSequence> sequences,
                                        int64_t total_rows, int64_t unit_rows) {
  if (unit_rows <= 0) return InvalidArgument("unit_rows {}: must be positive", unit_rows);
  std::vector<TokenUnit> units;
  std::vector<TokenSequence> sorted(sequences.begin(), sequences.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    const TokenSequence& s = sorted[i];
    if (s.begin < 0 || s.rows < 0 || s.begin > total_rows || s.rows > total_rows - s.begin) {
      return InvalidArgument("sequence {}: rows [{}, {} + {}) must lie inside [0, {})", i, s.begin,
                             s.begin, s.rows, total_rows);
    }
    for (int64_t at = 0; at < s.rows; at += unit_rows) {
      units.push_back({s.begin + at, std::min(unit_rows, s.rows - at)});
    }
  }
  std::erase_if(sorted, [](const TokenSequence& s) { return s.rows == 0; });
  std::sort(sorted.begin(), sorted.end(),
            [](const TokenSequence& a, const TokenSequence& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < sorted.size(); ++i) {
    if (sorted[i].begin < sorted[i - 1].begin + sorted[i - 1].rows) {
      return InvalidArgument("two sequences share row {}: every row belongs to one",
                             sorted[i].begin);
    }
  }
  return units;
}

Status SumBatchSegments(const Ctx& ctx, float* grad, int32_t batch_segments, int64_t count) {
  const int32_t d = batch_segments;
  if (d != 1 && d != 2 && d != 4 && d != 8) {
    return InvalidArgument("batch_segments {}: must be 1, 2, 4 or 8", d);
  }
  if (d == 1 || count == 0) return Ok();
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda) return SumBatchSegmentsCuda(ctx, grad, d, count);
#endif
  if (ctx.device != Device::kCpu)
    return Unsupported("SumBatchSegments: this build has no CUDA part");
  ctx.pool->ParallelRanges(count, int64_t{1} << 16, [&](int64_t begin, int64_t end) {
    for (int32_t step = 1; step < d; step *= 2) {
      for (int32_t slot = 0; slot + step < d; slot += 2 * step) {
        float* a = grad + slot * count;
        const float* b = grad + (slot + step) * count;
        for (int64_t i = begin; i < end; ++i) a[i] += b[i];
      }
    }
  });
  return Ok();
}

}  // namespace tare::ops
