#pragma once

// Calls into the SIMD translation unit of attention, chosen by target at run time.

#include "ops/attention/attention.h"

namespace tare::ops::attention {

// Flattened rows [flat0, flat0 + lanes) of a run for one KV head, where flat = token * group + head
// in group: those rows share K and V and sit in the lanes of the kernel. lanes <= kMaxLanes.
inline constexpr int64_t kMaxLanes = 64;
void ForwardBlock(const Params& params, const Args& args, const Run& run, int64_t kv_head,
                  int64_t flat0, int64_t lanes, bool sm90);

// Decode: a run of one row in ieee-f32, bf16 or f32, split by split of the contract. One split, a
// multiple of kv_split with a visible key, for all heads of one KV head; `sums` gets
// DecodeSplitFloats values and is aligned to 64 bytes. Then the sums of all its splits, one after
// the other and ascending, become the rows of out and lse2; they are overwritten.
inline int64_t DecodeSplitFloats(const Params& params) {
  return params.q_heads / params.kv_heads * (params.head_dim + 16);
}
void DecodeSplit(const Params& params, const Args& args, const Run& run, int64_t kv_head,
                 int64_t split, float* sums);
void DecodeJoin(const Params& params, const Args& args, const Run& run, int64_t kv_head,
                int64_t splits, float* sums);

// One whole sequence and query heads [h_begin, h_end) of one KV head: writes their dq, and to dk
// and dv [q_rows, head_dim] the sums over these heads, added in their order, neither scaled nor
// rounded. dsink_units [units of the run, q_heads] (may be null) gets the heads' sums, one a unit,
// for the caller to add in order. StoreKv scales, rounds and stores the sums over all heads of a KV
// head.
void BackwardHeads(const Params& params, const BackwardArgs& args, const Run& run, int64_t h_begin,
                   int64_t h_end, float* dk, float* dv, float* dsink_units, bool sm90);
void StoreKv(const Params& params, const BackwardArgs& args, const Run& run, int64_t kv_head,
             const float* dk, const float* dv);

}  // namespace tare::ops::attention
