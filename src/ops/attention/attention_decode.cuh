#pragma once

// What the decode kernels share: how the rows and splits of runs are counted as items.

#include "ops/attention/attention_gpu.cuh"

namespace tare::ops::attention::gpu {

inline constexpr int kDecodeTile = 128;

// Splits that some row of the run sees.
__device__ __forceinline__ int SplitsOf(const Forward& f, const Run& run) {
  const int64_t last = run.position + run.q_rows - 1;
  const int64_t first = f.window == 0 ? 0 : max(int64_t{0}, run.position - f.window + 1);
  return static_cast<int>(last / f.kv_split - first / f.kv_split + 1);
}

// Items of a run for one KV head: blocks of rows, and their splits. An item's index times
// kDecodeRows is
// where its rows' parts stand in part_o and part_rl.
__device__ __forceinline__ int64_t UnitsOf(const Forward& f, const Run& run) {
  const int64_t flat = FlatRows(run, f.group);
  if (flat == 0 || flat > f.decode_rows) return 0;
  return SplitsOf(f, run) * ((flat + kDecodeRows - 1) / kDecodeRows);
}

// One item: up to kDecodeRows flat rows of one KV head against one split of the keys.
struct DecodeItem {
  const Forward& f;
  Run run;
  int kv_head, splits;
  int flat0, count;  // its rows
  int from, to;      // keys of its split that some row sees; none if to < from

  // Rows past the last are the last.
  __device__ __forceinline__ int Token(int row) const {
    return (flat0 + min(row, count - 1)) / f.group;
  }
  __device__ __forceinline__ int Head(int row) const {
    return kv_head * f.group + (flat0 + min(row, count - 1)) % f.group;
  }
  // First and last key that a row sees.
  __device__ __forceinline__ int High(int row) const {
    return static_cast<int>(run.position) + Token(row);
  }
  __device__ __forceinline__ int Low(int row) const {
    return f.window == 0 ? 0 : max(0, High(row) - f.window + 1);
  }
  __device__ __forceinline__ int FirstKey() const { return from / kDecodeTile * kDecodeTile; }
  __device__ __forceinline__ int Tiles() const {
    return to < from ? 0 : to / kDecodeTile - from / kDecodeTile + 1;
  }
};

// The unit `index` of `run`. A split may hold no key that its rows see (a window's edge, a block's
// low rows).
__device__ __forceinline__ DecodeItem MakeDecodeItem(const Forward& f, const Run& run, int kv_head,
                                                     int index) {
  DecodeItem item{f, run, kv_head, SplitsOf(f, run), 0, 0, 0, 0};
  item.flat0 = index / item.splits * kDecodeRows;
  item.count = min(kDecodeRows, static_cast<int>(FlatRows(run, f.group)) - item.flat0);
  const int first_split =
      f.window == 0 ? 0 : max(0, static_cast<int>(run.position) - f.window + 1) / f.kv_split;
  const int split = first_split + index % item.splits;
  item.from = max(split * f.kv_split, item.Low(0) / kDecodeTile * kDecodeTile);
  item.to = min((split + 1) * f.kv_split - 1, item.High(item.count - 1));
  return item;
}

// The item's rows of q into shared memory, kD + 8 elements apart; all threads of the CTA.
template <int kD, int kThreads>
__device__ __forceinline__ void CopyQueryRows(const DecodeItem& item, __nv_bfloat16* q_rows) {
  for (int i = static_cast<int>(threadIdx.x); i < kDecodeRows * kD / 8; i += kThreads) {
    const int row = i / (kD / 8), piece = i % (kD / 8);
    const auto* at = static_cast<const __nv_bfloat16*>(item.f.q) +
                     (item.run.q_begin + item.Token(row)) * item.f.q_stride +
                     static_cast<int64_t>(item.Head(row)) * kD + piece * 8;
    *reinterpret_cast<uint4*>(q_rows + row * (kD + 8) + piece * 8) =
        *reinterpret_cast<const uint4*>(at);
  }
}

// The items by clusters of four CTAs: for calls that leave most of the device idle otherwise.
bool CanDecodeByCluster(const Forward& f);
Status LaunchDecodeByCluster(const Forward& f, int64_t items, StreamHandle stream);

}  // namespace tare::ops::attention::gpu
