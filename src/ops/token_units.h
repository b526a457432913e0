#pragma once

// Token units: how every sum over tokens of a backward pass is cut (docs/numerics.md).
//
// The unit is the sequence, cut at every `unit_tokens` (4,096) tokens from the sequence's own start.
// Inside a unit an operator fixes its own order; units are then added to the f32 main gradient with
// one nearest-even add each, in the order of the list. So packing, padding, micro-batch cuts and
// data-parallel placement move no bit, as long as the caller lists sequences in ascending index of
// the global batch.
//
// `batch_segments` D: the global batch is D contiguous runs of sequences. A main gradient then has D
// slots [D, ...]; a unit adds to the slot of its run, and SumBatchSegments folds the slots at the end.

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "ops/op.h"

namespace tare::ops {

inline constexpr int64_t kUnitTokens = 4096;

// One whole sequence of a packed batch: rows [row_begin, row_begin + rows) of every [T, ...] buffer.
// For the sm90-mma kernels of a GPU row_begin is a multiple of 16 and the rows up to the next
// multiple of 16 hold zeros; the CPU needs neither.
struct TokenSequence {
  int64_t row_begin = 0;
  int64_t rows = 0;
  int32_t batch_segment = 0;  // d in [0, batch_segments)
};

struct TokenUnit {
  int64_t row_begin = 0;
  int64_t rows = 0;
  int32_t batch_segment = 0;
};

// Sequences in the given order, each cut at multiples of unit_tokens from its own start. Sequences
// without rows give no unit. kInvalidArgument for a negative number, rows outside [0, total_rows),
// overlapping or descending batch segments (the sum of a run is in order).
Result<std::vector<TokenUnit>> CutUnits(std::span<const TokenSequence> sequences, int64_t total_rows,
                                        int32_t batch_segments, int64_t unit_tokens = kUnitTokens);

// grad f32 [D, count]: slot 0 becomes the balanced tree of neighbours over the D slots, slots 1..D-1
// are left with partial sums. D is 1, 2, 4 or 8. CPU and CUDA.
Status SumBatchSegments(const Ctx& ctx, float* grad, int32_t batch_segments, int64_t count);

}  // namespace tare::ops
