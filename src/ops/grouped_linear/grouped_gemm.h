#pragma once

// Between the entries of grouped_linear on CUDA and its kernels.

#include <cstdint>
#include <span>
#include <string>

#include "base/status.h"
#include "ops/op.h"

namespace tare::ops::grouped_linear::gpu {

// y[r, :] = sum over k of a[r, k] * b_e(r)[:, k] for every routed row r of expert e.
//   forward  a = x [R, K], b = W [E * N, K]
//   dx       a = dy [R, K], b = W [E * K, N]     (K: output features of the layer, N: its inputs)
struct Problem {
  bool dx = false;
  std::span<const int64_t> offsets;  // [E + 1], host
  int64_t n = 0, k = 0;              // of the output rows, and of the contraction
  const void* a = nullptr;           // bf16, dense
  const void* w = nullptr;           // bf16, dense
  void* y = nullptr;                 // [R, N], bf16 or f32, dense
  bool y_f32 = false;
};

// True when one Hopper launch can take all experts: sizes and alignment that the copy engine
// accepts.
bool CanUse(const Problem& p);
// REQUIRES: CanUse. One launch; the expert of a tile is looked up on the device.
Status Launch(const Problem& p, StreamHandle stream, std::string* config);

// to[i, :] = from[rows[i], :], `row_bytes` bytes each, bit for bit.
Status LaunchGather(const void* from, int64_t from_stride_bytes, const int32_t* rows, int64_t count,
                    int64_t row_bytes, void* to, StreamHandle stream);

// to[i] = pointers[i], without a copy from host memory: a captured call can be replayed.
constexpr int kMostPointers = 768;
Status LaunchPointers(std::span<const void* const> pointers, const void** to, StreamHandle stream);

}  // namespace tare::ops::grouped_linear::gpu
