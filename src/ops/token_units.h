#pragma once

// How a batch of sequences becomes the units (ops/units.h) that every sum over tokens is cut into,
// and the closing sum when the global batch is cut into D contiguous runs.
//
// `batch_segments` D (contract value, default 1): the global batch is D contiguous runs of
// sequences, each summed in order into its own slot of the main gradient [D, ...], then the slots
// are added as a balanced tree of neighbours. A micro-batch never straddles two runs (packing moves
// no bit, so the caller cuts there) and passes the pointer of its run's slot to the operators.

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "ops/op.h"
#include "ops/units.h"

namespace tare::ops {

// One whole sequence of a packed batch: rows [begin, begin + rows) of every [T, ...] buffer. For
// the sm90-mma kernels of a GPU `begin` is a multiple of 16 and the rows up to the next multiple of
// 16 hold zeros; the CPU needs neither.
struct TokenSequence {
  int64_t begin = 0;
  int64_t rows = 0;
};

// Sequences in the given order (ascending index in the global batch), each cut at multiples of
// unit_rows from its own start; one without rows gives no unit. kInvalidArgument for a negative
// number, rows outside [0, total_rows) or sequences that overlap.
Result<std::vector<TokenUnit>> CutUnits(std::span<const TokenSequence> sequences,
                                        int64_t total_rows, int64_t unit_rows = kUnitRows);

// grad f32 [D, count]: slot 0 becomes the balanced tree of neighbours over the D slots; the others
// are left with partial sums. D is 1, 2, 4 or 8. CPU only; the CUDA form is tensor-wise the same
// adds.
Status SumBatchSegments(const Ctx& ctx, float* grad, int32_t batch_segments, int64_t count);

}  // namespace tare::ops
