#pragma once

// Between the entry points of attention on CUDA and its kernels: the call as plain data, and which
// kernel serves which run. No bit depends on that choice.

#include <cstdint>

#include "base/status.h"
#include "ops/attention/attention.h"
#include "ops/op.h"

namespace tare::ops::attention::gpu {

// The kernels of the forward.
//   kGeneric  every dtype, head size and option, both profiles; 16 rows a CTA
//   kPrefill  bf16, sm90-mma, head 64 or 128, tiles of 128: wgmma, 128 rows a CTA
//   kDecode   the same for runs of few rows: one split a CTA, then the splits are combined
enum class Kernel : uint8_t { kGeneric, kPrefill, kDecode };

// Planted faults that the generic kernels carry out; all off but in a fault test. The others are
// other parameters of the launch.
struct Faults {
  bool kv_fp8 = false;   // K and V are rounded to e4m3 as they are read
  bool leak = false;     // key 0 of a packed run is read from the row before it
  bool scale_q = false;  // q is scaled and rounded before the product
  bool by_rows = false;  // runs of 64 rows and more sum tile by tile
  int decode_split = 0;  // the split of runs of one row; 0: as the others
};

// Division by a number that the host knows, in two instructions: n / divisor for 0 <= n < 2^31.
struct Divider {
  uint32_t divisor = 1, multiplier = 0, shift = 0;
  Divider() = default;
  explicit Divider(int64_t by) : divisor(static_cast<uint32_t>(by)) {
    if (by <= 1) return;
    uint32_t log2 = 0;
    while (int64_t{1} << log2 < by) ++log2;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + log2)) + divisor - 1) / divisor);
    shift = log2 - 1;
  }
};

// Rows of a run are flattened: row = token * group + head in group, so that all rows that read one
// KV head stand together.
struct Forward {
  int q_heads, kv_heads, head_dim, group;
  int tokens;
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse2;                                       // may be null
  const float* sink;                                 // may be null
  int64_t q_stride, k_stride, v_stride, out_stride;  // elements
  const int32_t* block_table;                        // null: packed
  int64_t max_pages;
  int page_size;
  const Run* runs;  // on the device
  int num_runs;
  int kv_tile, kv_split;
  int window;        // 0: none
  float c;           // ScoreScale
  float cap, ratio;  // soft cap and scale / cap; 0: none
  // Decode: the splits' parts, part_o [slots, head_dim] and part_rl [slots, 2], kDecodeRows slots
  // an item.
  float* part_o;
  float* part_rl;
  int most_splits;        // of a run of few rows, in this call or a replay of its graph
  int64_t decode_blocks;  // of kDecodeRows rows or fewer, times KV heads
  Divider by_group, by_kv_heads, by_q_heads, by_kv_split,
      by_page_size;  // read by the decode kernels
  int decode_rows;   // runs of at most this many flat rows go to kDecode, the others to kPrefill
  float scale;       // read by Faults::scale_q alone
  Faults faults;
};

struct Backward {
  int q_heads, kv_heads, head_dim, group;
  int tokens;
  const void* q;
  const void* k;
  const void* v;
  const void* out;
  const void* dout;
  const float* lse2;
  const float* sink;
  void* dq;
  void* dk;
  void* dv;
  float* dsink;
  int64_t q_stride, k_stride, v_stride, out_stride, dout_stride, dq_stride, dk_stride, dv_stride;
  const Run* runs;
  int num_runs;
  int window;
  int unit_rows;
  float c, scale;
  float cap, ratio;
  float* delta;   // [q_heads, tokens]
  float* lse_t;   // the same: lse2 transposed
  float* head_k;  // [tokens, q_heads, head_dim]: sums of one query head for the key of each token,
  float* head_v;  //   before the heads are added
  bool kv_fp8;    // the planted fault
};

// Rows that one CTA of each kernel takes.
inline constexpr int kGenericRows = 16;
inline constexpr int kDecodeRows = 8;
inline constexpr int kBackwardKeys = 128;

// generic
Status LaunchGeneric(const Forward& f, DType dtype, bool sm90, int64_t blocks, StreamHandle stream);
Status LaunchBackwardGeneric(const Backward& b, DType dtype, bool sm90, int64_t key_blocks,
                             int64_t row_blocks, StreamHandle stream);
// delta = lanes(32) of fma(dout, out, .) and lse_t, for every row.
Status LaunchDelta(const Backward& b, DType dtype, StreamHandle stream);
// dsink += per unit, in order. REQUIRES: delta.
Status LaunchSinkGradient(const Backward& b, StreamHandle stream);

// Hopper: `blocks` of 128 rows or keys over all runs, `keys` over all runs.
bool CanBackward(const Params& params, Profile profile, const Backward& b, int64_t kv_rows);
Status LaunchBackward(const Backward& b, int64_t kv_rows, int64_t blocks, int64_t keys,
                      StreamHandle stream);

// prefill
bool CanPrefill(const Params& params, Profile profile, const Forward& f);
Status LaunchPrefill(const Forward& f, int64_t kv_rows, int64_t blocks, StreamHandle stream);
// Tokens of a run in one CTA of the prefill kernel.
inline int PrefillTokens(int group) { return 2 * (64 / group); }

// decode
bool CanDecode(const Params& params, Profile profile, const Forward& f);
// `items`: blocks of rows times splits times KV heads. `combine_rows`: rows times heads of those
// runs when one of them may have more than one split, else 0.
Status LaunchDecode(const Forward& f, int64_t items, int64_t combine_rows, StreamHandle stream);
// Flat rows up to which a run goes to kDecode.
inline int MaxDecodeRows(int group) { return group > kDecodeRows ? group : kDecodeRows; }

}  // namespace tare::ops::attention::gpu
