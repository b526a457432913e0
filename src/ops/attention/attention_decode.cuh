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

// The items by clusters of four CTAs: for calls that leave most of the device idle otherwise.
bool CanDecodeByCluster(const Forward& f);
Status LaunchDecodeByCluster(const Forward& f, int64_t items, StreamHandle stream);

}  // namespace tare::ops::attention::gpu
