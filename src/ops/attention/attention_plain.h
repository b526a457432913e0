#pragma once

// The attention contract as plain scalar loops, one row and head at a time: what the fast kernels
// are held to, and the place where the planted faults of the operator live.

#include "ops/attention/attention.h"
#include "ops/attention/attention_step.h"

namespace tare::ops::attention {

// The native arm's parameters: the number of splits follows the batch, as flash-decoding heuristics
// choose it.
Params NativeParams(Params params, std::span<const Run> runs);

// True when a fault of this operator is planted on the side.
bool AnyFault(fault::Side side);

// The whole call. Arguments are checked by the caller.
Status PlainForward(const Ctx& ctx, const Params& params, const Args& args);
Status PlainBackward(const Ctx& ctx, const Params& params, const BackwardArgs& args);

// c of the contract: scale * log2e rounded once, or log2e under a soft cap.
float ScoreScale(const Params& params);

// Element offset of key `key` of a run in K (its first head, first element).
inline int64_t KeyOffset(const KvSource& kv, const Run& run, int64_t key, int64_t stride,
                         int64_t row) {
  if (kv.block_table == nullptr) return (run.kv_begin + key) * stride;
  const int64_t page = kv.block_table[run.block_row * kv.max_pages + key / kv.page_size];
  return (page * kv.page_size + key % kv.page_size) * row;
}

}  // namespace tare::ops::attention
