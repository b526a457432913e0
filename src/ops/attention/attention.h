#pragma once

// attention: causal softmax attention over a ragged batch of token runs, forward and backward.
//
// One operator serves prefill, decode, scoring and training: a run is some consecutive tokens of
// one sequence, its keys are all tokens of that sequence up to each row, read from a packed buffer
// or from pages. No bit depends on which, nor on the runs beside it, the chunk a row came in, or
// the page size.
//
// Contract (forward), per row and query head; key j belongs to tile j / kv_tile and split
// j / kv_split by its absolute position. "chain" is the profile's step, k ascending from +0; dtype
// f32 uses the ieee-f32 step in both profiles.
//   s_j   = chain(d) of q_d k_jd;  with soft cap: s_j = tanh(s_j * (scale / cap)) * cap
//   c     = scale * log2e, rounded once (soft cap: c = log2e)
//   visible: j <= i, and i - window < j when there is a window; masked p is +0
//   split : r = -inf, l_0..3 = O = +0; a tile without a visible key is skipped; else ascending
//     mc = max(s_j of the tile) * c; r' = mc <= r + 14 ? r : ceil(mc); NaN where infinite
//     alpha = exp2(r - r'), 1 in the first visible tile (always an exact power of two)
//     p_j = round_dtype(exp2_p(128 * clamp01(fma(s_j, c / 128, (100 - r') / 128)) - 100))
//     l_q = l_q * alpha, then + p of columns 8b+2q, 8b+2q+1 of the tile, b ascending (q = 0..3)
//     O = O * alpha, then chain(j ascending) of p_j v_j continues O
//   split end: l = (l0 + l1) + (l2 + l3). Splits combine ascending from the first visible one:
//     r' = max(r, r_s); a = exp2(r - r'); b = exp2(r_s - r')
//     l = fma(l_s, b, l * a); O = fma(O_s, b, O * a)
//   sink logit t: t2 = t * log2e; M = max(r, t2); f = exp2(r - M);
//     l = fma(l, f, exp2(t2 - M)); O = O * f; lse2 = M + log2(l).  Without: lse2 = r + log2(l)
//   out = round_dtype(O * (1 / l + (r - r)) + 0.0f); a NaN s_j counts as -inf
//
// Contract (backward), from the saved lse2; do is rounded to dtype first:
//   p = exp2_p(max(fma(s, c, -lse2), -125)); delta = lanes(32) of fma(do_d, out_d, .); dP_j =
//   chain(d) of do_d v_jd dS = round_dtype(p * (dP - delta)); soft cap, u = tanh(.): dS =
//   round_dtype((p * (dP - delta)) *
//     fma(-u, u, 1))
//   dq = round(scale * chain(j ascending) of dS_j k_j + 0.0f)
//   dk, dv: per query head, chains over rows ascending cut at every 4,096 rows of the sequence;
//   cuts,
//     then the heads of the group, added in f32 ascending; dk = round(scale * sum + 0.0f),
//     dv = round(sum + 0.0f), dv with round_dtype(p)
//   dsink[h] += per unit (4,096 rows of a sequence), in order: lanes(32) over rows of
//     -(exp2(t2 - lse2) * delta)
// The closing + 0.0f turns -0 into +0, so a skipped and a masked key are the same in every profile.

#include <cstdint>
#include <span>

#include "base/status.h"
#include "ops/contract.h"
#include "ops/op.h"
#include "ops/units.h"
#include "tensor/dtype.h"

namespace tare::ops::attention {

TARE_FAULT(kWindowOffByOne, "attention.window_off_by_one", "attention", "C3,C5",
           "the sliding window admits key i - window");
TARE_FAULT(kSinkMissing, "attention.sink_missing", "attention", "C2,C5",
           "the sink logit is left out of the denominator");
TARE_FAULT(kSoftcapMissing, "attention.softcap_missing", "attention", "C2,C5",
           "the soft cap is not applied");
TARE_FAULT(kKvFp8, "attention.kv_fp8", "attention", "C5",
           "K and V are rounded to e4m3 as they are read");
TARE_FAULT(kSplitByBatch, "attention.split_by_batch", "attention", "C3",
           "the split size follows the number of runs in the call");
TARE_FAULT(kSplitByDecode, "attention.decode_other_split", "attention", "C3",
           "a run of one row uses half the split size");
TARE_FAULT(kTileByRows, "attention.tile_by_rows", "attention", "C3",
           "a run of at least 64 rows uses the other tile size");
TARE_FAULT(kScaleQFirst, "attention.scale_q_first", "attention", "C5",
           "q is scaled and rounded before the product");
TARE_FAULT(kPackedLeak, "attention.packed_leak", "attention", "C5",
           "key 0 of a packed sequence is read from the sequence before it");
TARE_FAULT(kSinkGradientMissing, "attention.sink_gradient_missing", "attention", "C7",
           "the sink logit gets no gradient");

struct Params {
  int64_t q_heads = 0;
  int64_t kv_heads = 0;  // divides q_heads; query head h reads KV head h / (q_heads / kv_heads)
  int64_t head_dim = 0;  // a multiple of 16, at most 256
  DType dtype = DType::kBF16;  // q, k, v, out and their gradients: bf16, f16 or f32
  float scale = 0.0f;          // usually 1 / sqrt(head_dim), rounded once
  int64_t window = 0;          // 0: none; else key j is visible when i - window < j <= i
  bool sink = false;
  float softcap = 0.0f;  // 0: none
  // Contract values, by absolute position in the sequence.
  int64_t kv_tile = 128;          // 64 or 128
  int64_t kv_split = 512;         // a multiple of kv_tile in [256, 2048]
  int64_t unit_rows = kUnitRows;  // cut of dk, dv and dsink over rows of a sequence
};

// Consecutive tokens of one sequence: rows [q_begin, q_begin + q_rows) of q and out, at absolute
// positions position, position + 1, ... Its keys are positions 0 .. position + q_rows - 1.
struct Run {
  int64_t q_begin = 0;
  int64_t q_rows = 0;
  int64_t position = 0;
  int64_t kv_begin = 0;   // packed K, V: row of the sequence's key 0
  int32_t block_row = 0;  // paged K, V: row of the block table
};

// K and V: packed when `block_table` is null, else pages.
struct KvSource {
  const void* k = nullptr;  // packed [rows, kv_heads, head_dim], rows k_stride elements apart; or
  const void* v = nullptr;  //   pages [num_pages, page_size, kv_heads, head_dim], dense
  int64_t k_stride = 0;     // packed only; 0: kv_heads * head_dim
  int64_t v_stride = 0;
  int64_t rows = 0;                      // packed: rows of the buffer (checked against the runs)
  const int32_t* block_table = nullptr;  // [table_rows, max_pages] on ctx.device; page of key j is
  int64_t table_rows = 0;                //   block_table[block_row][j / page_size]
  int64_t max_pages = 0;
  int64_t num_pages = 0;
  int64_t page_size = 0;  // >= 1
};

struct Args {
  int64_t tokens = 0;       // T, rows of q and out
  const void* q = nullptr;  // [T, q_heads, head_dim], rows q_stride elements apart
  int64_t q_stride = 0;     // 0: q_heads * head_dim
  KvSource kv;
  const float* sink = nullptr;  // [q_heads], iff params.sink
  std::span<const Run> runs;    // host memory; rows outside every run are not written
  // CUDA Graph capture: the same runs on the device, or null (the call then copies them through
  // ctx.workspace). A replay may find other positions there, as sequences grow; how many rows each
  // run has stays. The CPU ignores it.
  const Run* device_runs = nullptr;
  void* out = nullptr;     // [T, q_heads, head_dim], rows out_stride elements apart
  int64_t out_stride = 0;  // 0: q_heads * head_dim
  float* lse2 = nullptr;   // [T, q_heads]; may be null when no backward follows
};

// Every run is a whole sequence: position 0, packed K and V.
struct BackwardArgs {
  int64_t tokens = 0;
  const void* q = nullptr;
  int64_t q_stride = 0;
  const void* k = nullptr;  // packed [rows, kv_heads, head_dim], kv_begin as in the forward
  int64_t k_stride = 0;
  const void* v = nullptr;
  int64_t v_stride = 0;
  int64_t kv_rows = 0;
  const float* sink = nullptr;
  const void* out = nullptr;  // saved forward output
  int64_t out_stride = 0;
  const float* lse2 = nullptr;  // saved, [T, q_heads]
  const void* dout = nullptr;   // [T, q_heads, head_dim] in dtype
  int64_t dout_stride = 0;
  std::span<const Run> runs;
  const Run* device_runs = nullptr;  // as in Args
  void* dq = nullptr;                // [T, q_heads, head_dim], overwritten for the rows of runs
  int64_t dq_stride = 0;
  void* dk = nullptr;  // [rows, kv_heads, head_dim], overwritten
  int64_t dk_stride = 0;
  void* dv = nullptr;
  int64_t dv_stride = 0;
  float* dsink = nullptr;  // [q_heads] main gradient, added to; iff params.sink
};

Contract ContractOf(const Params& params, Profile profile);
Status Check(const Params& params);

size_t WorkspaceBytes(const Ctx& ctx, const Params& params, int64_t tokens, int64_t runs,
                      int64_t max_keys);
size_t BackwardWorkspaceBytes(const Ctx& ctx, const Params& params, int64_t tokens, int64_t runs,
                              int64_t max_keys);

Status Forward(const Ctx& ctx, const Params& params, const Args& args);
Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args);

#ifdef TARE_WITH_CUDA
size_t WorkspaceBytesCuda(const Ctx& ctx, const Params& params, int64_t tokens, int64_t runs,
                          int64_t max_keys);
size_t BackwardWorkspaceBytesCuda(const Ctx& ctx, const Params& params, int64_t tokens,
                                  int64_t runs, int64_t max_keys);
Status ForwardCuda(const Ctx& ctx, const Params& params, const Args& args);
Status BackwardCuda(const Ctx& ctx, const Params& params, const BackwardArgs& args);
#endif

}  // namespace tare::ops::attention
