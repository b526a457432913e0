#pragma once

// grouped_linear: the experts' linear layers of a mixture of experts, y_r = x_{row(r)} W_e^T for
// every routed row r of expert e, and their gradients. ops/dispatch orders the rows.
//
// Contract: per output element exactly the linear operator's chain (segments included) with the
// expert's weight; no bit depends on how many rows an expert got or which. dx likewise. dw of
// expert e: per token unit the tokens that chose e, ascending, form one chain (step groups counted
// from the first such token of the unit, the last group padded with zeros in sm90-mma); units are
// added in order. Routed rows are sorted by (expert, token), as dispatch::BuildPlan gives them.

#include <cstdint>
#include <span>

#include "base/status.h"
#include "ops/contract.h"
#include "ops/linear/linear.h"
#include "ops/op.h"
#include "ops/token_units.h"

namespace tare::ops::grouped_linear {

TARE_FAULT(kSplitByTotal, "grouped_linear.split_by_total", "grouped_linear", "C3",
           "K is split in two when a call has more than 16 routed rows over all experts");

struct Params {
  int64_t experts = 0;    // E
  linear::Params linear;  // n, k, dtypes, segments, ...; no bias
};

struct Args {
  int64_t rows = 0;                         // R = offsets[E]
  std::span<const int64_t> offsets;         // [E + 1] host
  const int64_t* device_offsets = nullptr;  // CUDA: [E + 1] on the device
  const int32_t* token_of =
      nullptr;              // [R] on ctx.device: row of x that routed row r reads; null: r
  int64_t x_rows = 0;       // rows of x
  const void* x = nullptr;  // [x_rows, k], rows x_stride elements apart
  int64_t x_stride = 0;     // 0: k
  const void* w = nullptr;  // [E, n, k]; CPU: may be null when `packed` is given
  std::span<const linear::PackedWeight> packed;  // CPU: [E] or empty
  void* y = nullptr;                             // [R, n], dense
};

struct BackwardArgs {
  int64_t rows = 0;
  std::span<const int64_t> offsets;
  const int64_t* device_offsets = nullptr;
  const int32_t* token_of = nullptr;  // [R] on ctx.device; null: routed row r is its own token
  const int32_t* host_token_of =
      nullptr;  // CUDA: the same on the host, to cut units (CPU: token_of)
  int64_t x_rows = 0;
  const void* dy = nullptr;  // [R, n], dense
  const void* x = nullptr;   // [x_rows, k]; with x_by_row: [R, k], already in routed order
  int64_t x_stride = 0;
  bool x_by_row = false;
  const void* w = nullptr;           // [E, n, k]
  std::span<const TokenUnit> units;  // over tokens, host memory
  void* dx = nullptr;                // [R, k] per routed row, dense, overwritten
  float* dw = nullptr;               // [E, n, k] main gradient, added to
};

Contract ContractOf(const Params& params, Profile profile);
size_t WorkspaceBytes(const Ctx& ctx, const Params& params, int64_t rows);
size_t BackwardWorkspaceBytes(const Ctx& ctx, const Params& params, int64_t rows, int64_t units);

Status Forward(const Ctx& ctx, const Params& params, const Args& args);
Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args);

#ifdef TARE_WITH_CUDA
size_t WorkspaceBytesCuda(const Ctx& ctx, const Params& params, int64_t rows);
size_t BackwardWorkspaceBytesCuda(const Ctx& ctx, const Params& params, int64_t rows,
                                  int64_t units);
Status ForwardCuda(const Ctx& ctx, const Params& params, const Args& args);
Status BackwardCuda(const Ctx& ctx, const Params& params, const BackwardArgs& args);
#endif

}  // namespace tare::ops::grouped_linear
