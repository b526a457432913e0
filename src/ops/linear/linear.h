#pragma once

// linear: y = x W^T (+ bias), and its two gradients dx = dy W, dw += dy^T x.
//
// Contract (forward). Per output element one f32 accumulator from +0 walks K in order by the
// profile's step; `segments` S cuts K into S equal runs, each from +0, added as a balanced tree of
// neighbours in f32; then bias by one f32 add; then one nearest-even rounding to y's dtype.
//   acc_s = chain(k in run s, ascending) of step(x[m,k], w[n,k])
//   y[m,n] = round(tree(acc_0 .. acc_{S-1}) + bias[n])
// An f32 operand (x or w) uses the ieee-f32 step in both profiles. The ieee-f32 step never pads: K
// that is not a multiple of 16 is walked as it is. A NaN is written as the canonical one.
//
// Contract (backward). Operands are rounded to `backward_operand` first (bf16 in a bf16 model, f32
// in an f32 model); the profile's step as in the forward.
//   dx[m,k] = round(tree over dx_segments of chain(n) step(dy[m,n], w[n,k]))
//     n is segment-major over `parts`: run r holds rows [r n_i/S, (r+1) n_i/S) of part 0, then of
//     part 1, ..., as a tensor-parallel shard of a fused weight would. With `dx_vocabulary_leaves`
//     the S = 8 runs are the vocabulary leaves instead: ceil(n / 8) ids each, the last ones short.
//   dw[n,k] += per unit, in order: chain(tokens of the unit, ascending) step(dy[t,n], x[t,k])
//   dbias[n] += per unit, in order: lanes(32) over the unit's tokens of dy[t,n], as given (not
//   rounded)
//
// What it does not promise: speed without a PackedWeight on the CPU.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "numerics/mma.h"
#include "ops/contract.h"
#include "ops/op.h"
#include "ops/token_units.h"
#include "tensor/dtype.h"

namespace tare::ops::linear {

TARE_FAULT(kAccumulateBf16, "linear.accumulate_bf16", "linear", "C3,C5,C7",
           "the accumulator is rounded to bf16 after every group of 16 products");
TARE_FAULT(kSplitFma, "linear.split_fma", "linear", "C3,C5,C7",
           "a product is rounded before it is added");
TARE_FAULT(kReversedK, "linear.reversed_k", "linear", "C3,C5,C7",
           "k is walked in descending order");
TARE_FAULT(kSplitByRows, "linear.split_by_rows", "linear", "C3",
           "K is split in four when a call has at most four rows");
TARE_FAULT(kSegmentsByRows, "linear.segments_by_rows", "linear", "C3",
           "a call of more than 16 rows walks K in tiles of 64 that each start from zero");
TARE_FAULT(kBiasAfterCast, "linear.bias_after_cast", "linear", "C5",
           "the bias is added after the output was rounded");
TARE_FAULT(kDwPartialGroup, "linear.dw_without_partial_group", "linear.dw", "C7",
           "dW leaves out the last group of a unit when it has fewer than 16 tokens");

struct Params {
  int64_t n = 0;                 // output features, rows of W
  int64_t k = 0;                 // input features
  DType x_dtype = DType::kBF16;  // bf16, f16 or f32
  DType w_dtype = DType::kBF16;  // bf16, f16 or f32; x and w equal unless one of them is f32
  DType y_dtype = DType::kBF16;  // bf16, f16 or f32
  bool bias = false;
  DType bias_dtype = DType::kBF16;  // bf16, f16 or f32

  // S in {1, 2, 4, 8} for the forward. S > 1 needs k a multiple of S * segment_unit.
  int32_t segments = 1;
  int64_t segment_unit = 16;  // 16, or head_dim where K holds whole heads (attention output)

  // Backward.
  DType dy_dtype = DType::kBF16;          // bf16, f16 or f32
  DType dx_dtype = DType::kBF16;          // bf16, f16 or f32
  DType backward_operand = DType::kBF16;  // bf16, f16 or f32
  int32_t dx_segments = 1;                // S over n
  std::vector<int64_t> parts;  // features of the fused parts, e.g. {q, k, v}; empty: one part {n}
  bool dx_vocabulary_leaves = false;  // the head: dx_segments must be 8
};

// The weight in the layout that the CPU kernels of one profile stream. ieee-f32: panels of 32
// output features, element [panel][k][32], as bf16 pairs (feature i and 16 + i of the panel share a
// 32-bit word) or as f32. sm90-mma: the codes of numerics/mma.h (an f32 weight stays in ieee-f32
// panels). Packed once at load, shared by every call; a weight update packs again. A copy of the
// weight in memory, no more: bits are the same with and without.
class PackedWeight {
 public:
  PackedWeight() = default;
  // w [n, k] row-major on the CPU, bf16, f16 or f32. kExhausted when memory is short.
  static Result<PackedWeight> Pack(ThreadPool* pool, const void* w, DType dtype, int64_t n,
                                   int64_t k, Profile profile = Profile::kIeeeF32);

  // Packs other values of the same weight into the memory that this one has; a copy of this object
  // must not be in use. Where there is no such memory it packs anew.
  Status Refill(ThreadPool* pool, const void* w);

  bool defined() const { return n_ > 0; }
  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  DType dtype() const { return dtype_; }
  int64_t size_bytes() const { return size_bytes_; }
  const void* panels() const { return data_.get(); }  // null when packed for sm90-mma
  // The codes for sm90-mma. A weight packed for ieee-f32 makes them at the first call that asks,
  // once, from any thread, and keeps both; null for an f32 weight.
  const numerics::MmaB* mma() const;

 private:
  struct Mma;
  std::shared_ptr<const void> data_;  // aligned to 64 bytes
  std::shared_ptr<Mma> mma_;
  int64_t n_ = 0;
  int64_t k_ = 0;
  DType dtype_ = DType::kBF16;
  int64_t size_bytes_ = 0;
};

struct Args {
  int64_t m = 0;            // rows (tokens); 0 is allowed and writes nothing
  const void* x = nullptr;  // [m, k], rows x_stride elements apart
  int64_t x_stride = 0;     // 0: k
  const void* w = nullptr;  // [n, k] row-major. CPU: may be null when `packed` is given
  const PackedWeight* packed = nullptr;  // CPU: optional, of the same weight; CUDA ignores it
  const void* bias = nullptr;            // [n], iff params.bias
  void* y = nullptr;                     // [m, n], rows y_stride elements apart
  int64_t y_stride = 0;                  // 0: n
};

struct BackwardArgs {
  int64_t m = 0;
  const void* dy = nullptr;          // [m, n], rows dy_stride elements apart
  int64_t dy_stride = 0;             // 0: n
  const void* x = nullptr;           // [m, k] as in the forward; needed for dw
  int64_t x_stride = 0;              // 0: k
  const void* w = nullptr;           // [n, k] row-major; needed for dx
  std::span<const TokenUnit> units;  // host memory, ascending (CutUnits); for dw, dbias
  // Outputs; a null one is not computed.
  void* dx = nullptr;      // [m, k] dx_dtype, rows dx_stride elements apart, overwritten
  int64_t dx_stride = 0;   // 0: k
  float* dw = nullptr;     // [n, k] main gradient (the slot of this batch segment), added to
  float* dbias = nullptr;  // [n] main gradient, added to
};

// Every choice of these params that can move a bit.
Contract ContractOf(const Params& params, Profile profile);

// kInvalidArgument names the field and what would be right.
Status Check(const Params& params);

// Device scratch that a call with these rows needs in ctx.workspace (0 on the CPU).
size_t WorkspaceBytes(const Ctx& ctx, const Params& params, int64_t m);
size_t BackwardWorkspaceBytes(const Ctx& ctx, const Params& params, int64_t m, int64_t units);

Status Forward(const Ctx& ctx, const Params& params, const Args& args);
Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args);

#ifdef TARE_WITH_CUDA
// linear_cuda.cc and linear*.cu; called by the entries above after their checks.
size_t WorkspaceBytesCuda(const Ctx& ctx, const Params& params, int64_t m);
size_t BackwardWorkspaceBytesCuda(const Ctx& ctx, const Params& params, int64_t m, int64_t units);
Status ForwardCuda(const Ctx& ctx, const Params& params, const Args& args);
Status BackwardCuda(const Ctx& ctx, const Params& params, const BackwardArgs& args);
#endif

}  // namespace tare::ops::linear
