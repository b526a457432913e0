#pragma once

// The global gradient norm and the clip factor.
//   blocks of 1,024 along the last axis, each lanes(128) of fma(g, g, .) in f32
//   block sums added in f64 by the balanced tree of neighbours over (name, row, block)
//   norm = f32(sqrt(sum));  factor = min(1, max_norm / (norm + 1e-6))
// Names are in byte order. A shard that holds whole rows computes its leaves alone; the tree is
// over all leaves, so the norm does not depend on who computed which leaf.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ops/contract.h"
#include "ops/op.h"

namespace tare::ops::grad_norm {

TARE_FAULT(kShardNorm, "grad_norm.clip_by_shard", "grad_norm", "C7",
           "the clip factor comes from the norm of the first half of the parameters alone");

inline constexpr int64_t kBlock = 1024;

// One gradient: f32 [rows, cols] (a vector has one row).
struct Entry {
  std::string name;
  const float* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
};

struct Norm {
  double sum_of_squares = 0;
  float norm = 0;
  float factor = 1;  // what every gradient is multiplied by; 1 without a limit
};

// Leaves of rows [begin, end) of one entry, row-major by block: leaves [(end - begin), blocks].
int64_t BlocksPerRow(int64_t cols);
Status Leaves(const Ctx& ctx, const Entry& entry, int64_t begin, int64_t end, float* leaves);
// The balanced tree of neighbours: level by level, an odd last one is carried up unchanged.
double Tree(std::span<const float> leaves);

Contract ContractOf();
// What Compute needs in ctx.workspace on a device (0 on the CPU). There it waits for the stream.
size_t WorkspaceBytes(const Ctx& ctx, std::span<const Entry> entries);
// max_norm <= 0 means no clip. Entries in byte order of their names, distinct, else
// kInvalidArgument. A non-finite gradient is kInvalidArgument that names entry, row and block.
Result<Norm> Compute(const Ctx& ctx, std::span<const Entry> entries, float max_norm);
// On a device alone, the same bits without waiting, so that the call can be captured: result[0] is
// the norm, result[1] the factor, in device memory. A leaf that is not finite is refused as kernels
// refuse (ops/cuda/refusal.h), by its place among all leaves; both results are then NaN.
Status ComputeOnDevice(const Ctx& ctx, std::span<const Entry> entries, float max_norm,
                       float* result);

}  // namespace tare::ops::grad_norm
