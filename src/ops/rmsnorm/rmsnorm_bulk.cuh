#pragma once

// rmsnorm for prefill: rows come and go by the copy engine. Each warp has rows of
// its own and two stages of shared memory: while it works on one row the next arrives, and what it
// has written leaves. The bits are those of rmsnorm.cu's other kernels: the
// same lanes, the same order.

#include "ops/cuda/eights.cuh"
#include "ops/cuda/sm90.cuh"
#include "ops/rmsnorm/rmsnorm_cuda.h"

namespace tare::ops::rmsnorm {

struct ForwardArgs {
  int64_t rows, width;
  const void *x, *residual, *w;
  void *y, *residual_out;
  float* rstd;
  float inverse, eps;
  bool w_f32, unit_offset;
  bool staged;  // the row fits in shared memory; else it is read again
};

struct BackwardRowArgs {
  int64_t rows, width;
  const void *h, *w, *dy, *extra;
  void* dx;
  const float* rstd;
  float inverse;
  bool w_f32, unit_offset;
  bool staged;
};

constexpr int kBulkStages = 2;
constexpr int kBulkMostWarps = 8;

__device__ __forceinline__ void BulkLoad(uint32_t to, const void* from, uint32_t bytes,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void BulkStore(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

// Bytes of shared memory of one warp and of the weight.
template <typename R, bool kResidual>
size_t BulkBytesOfWarp(int64_t width) {
  return kBulkStages * static_cast<size_t>(width) * (2 + (kResidual ? sizeof(R) : 0));
}
inline size_t BulkBytesOfWeight(int64_t width) { return static_cast<size_t>(width) * 4; }

// REQUIRES: width a multiple of 128 and rows at addresses of 16 bytes. Shared memory: per warp and
// stage x (then y) and, with kResidual, the residual (then the sum); then the weight as f32.
template <typename R, bool kResidual>
__global__ void __launch_bounds__(32 * kBulkMostWarps)
    rmsnorm_bulk_kernel(const __grid_constant__ ForwardArgs a) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(8) uint64_t barriers[kBulkMostWarps][kBulkStages];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const auto width = static_cast<uint32_t>(a.width);
  const uint32_t x_bytes = width * 2, r_bytes = kResidual ? width * sizeof(R) : 0;
  uint8_t* mine = shared + static_cast<size_t>(warp) * kBulkStages * (x_bytes + r_bytes);
  auto* w = reinterpret_cast<float*>(shared + static_cast<size_t>(warps) * kBulkStages *
                                                  (x_bytes + r_bytes));
  for (int i = threadIdx.x; i < a.width; i += blockDim.x) {
    const float v = cuda::LoadAny(a.w, a.w_f32, i);
    w[i] = a.unit_offset ? cuda::Add(v, 1.0f) : v;
  }
  if (lane == 0) {
    for (int s = 0; s < kBulkStages; ++s)
      sm90::BarrierInit(sm90::SharedAddress(&barriers[warp][s]), 1);
    sm90::BarrierInitFence();
  }
  __syncthreads();
  const auto barrier = [&](int stage) { return sm90::SharedAddress(&barriers[warp][stage]); };
  const auto x_at = [&](int stage) { return mine + stage * (x_bytes + r_bytes); };
  const auto load = [&](int64_t row, int stage) {
    sm90::BarrierArriveExpect(barrier(stage), x_bytes + r_bytes);
    const uint32_t to = sm90::SharedAddress(x_at(stage));
    BulkLoad(to, static_cast<const uint16_t*>(a.x) + row * a.width, x_bytes, barrier(stage));
    if constexpr (kResidual)
      BulkLoad(to + x_bytes, static_cast<const R*>(a.residual) + row * a.width, r_bytes,
               barrier(stage));
  };
  const int64_t step = int64_t{gridDim.x} * warps;
  int64_t row = int64_t{blockIdx.x} + static_cast<int64_t>(warp) * gridDim.x;
  if (lane == 0 && row < a.rows) load(row, 0);
  uint32_t parity = 0;
  for (int stage = 0; row < a.rows; row += step) {
    if (lane == 0 && row + step < a.rows) {
      sm90::BulkWaitRead<0>();  // what the other stage sent out has been read
      load(row + step, stage ^ 1);
    }
    sm90::BarrierWait(barrier(stage), parity);
    auto* x = reinterpret_cast<uint16_t*>(x_at(stage));
    auto* r = reinterpret_cast<R*>(x_at(stage) + x_bytes);
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (uint32_t at = 4 * static_cast<uint32_t>(lane); at < width; at += 128) {
      float h[4];
      cuda::Widen4(cuda::LoadRaw4(x + at), h);
      if constexpr (kResidual) {
        float old[4];
        cuda::Widen4(cuda::LoadRaw4(r + at), old);
#pragma unroll
        for (int e = 0; e < 4; ++e) h[e] = cuda::Add(h[e], old[e]);
        const cuda::Raw4<R> rounded = cuda::Round4(h, r);
        cuda::StoreRaw4(rounded, r + at);
        cuda::Widen4(rounded, h);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[e] = cuda::Fma(h[e], h[e], acc[e]);
    }
    if constexpr (kResidual) {
      sm90::FenceProxyAsync();
      __syncwarp();
      if (lane == 0) {
        BulkStore(static_cast<R*>(a.residual_out) + row * a.width, sm90::SharedAddress(r), r_bytes);
        sm90::BulkCommit();
      }
    }
    const float sum = cuda::Chunk<true>::Tree(acc);
    const float rstd = cuda::Div(1.0f, numerics::Sqrt(cuda::Fma(sum, a.inverse, a.eps)));
    if (lane == 0 && a.rstd != nullptr) cuda::Put(rstd, a.rstd + row);
#pragma unroll 8
    for (uint32_t at = 4 * static_cast<uint32_t>(lane); at < width; at += 128) {
      float h[4];
      if constexpr (kResidual) {
        cuda::Widen4(cuda::LoadRaw4(r + at), h);
      } else {
        cuda::Widen4(cuda::LoadRaw4(x + at), h);
      }
      const float4 weight = *reinterpret_cast<const float4*>(w + at);
      h[0] = cuda::Mul(cuda::Mul(h[0], rstd), weight.x);
      h[1] = cuda::Mul(cuda::Mul(h[1], rstd), weight.y);
      h[2] = cuda::Mul(cuda::Mul(h[2], rstd), weight.z);
      h[3] = cuda::Mul(cuda::Mul(h[3], rstd), weight.w);
      cuda::Store4(h, x + at);
    }
    sm90::FenceProxyAsync();
    __syncwarp();
    if (lane == 0) {
      BulkStore(static_cast<uint16_t*>(a.y) + row * a.width, sm90::SharedAddress(x), x_bytes);
      sm90::BulkCommit();
    }
    stage ^= 1;
    if (stage == 0) parity ^= 1;
  }
  // Shared memory must live until the last row has left it.
  if (lane == 0) sm90::BulkWaitRead<0>();
}

template <typename H, typename G>
size_t BulkBackwardBytesOfWarp(int64_t width, bool extra) {
  return kBulkStages * static_cast<size_t>(width) * (sizeof(H) + (extra ? 2 : 1) * sizeof(G));
}

// dx. Shared memory: per warp and stage dy (then dx), the other gradient if there is one, h; then
// the weight as f32. REQUIRES: as rmsnorm_bulk_kernel.
template <typename H, typename G, bool kExtra>
__global__ void __launch_bounds__(32 * kBulkMostWarps)
    rmsnorm_bulk_backward_kernel(const __grid_constant__ BackwardRowArgs a) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(8) uint64_t barriers[kBulkMostWarps][kBulkStages];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const auto width = static_cast<uint32_t>(a.width);
  const uint32_t g_bytes = width * sizeof(G), h_bytes = width * sizeof(H);
  const uint32_t h_offset = (kExtra ? 2 : 1) * g_bytes, stage_bytes = h_offset + h_bytes;
  uint8_t* mine = shared + static_cast<size_t>(warp) * kBulkStages * stage_bytes;
  auto* w =
      reinterpret_cast<float*>(shared + static_cast<size_t>(warps) * kBulkStages * stage_bytes);
  for (int i = threadIdx.x; i < a.width; i += blockDim.x) {
    const float v = cuda::LoadAny(a.w, a.w_f32, i);
    w[i] = a.unit_offset ? cuda::Add(v, 1.0f) : v;
  }
  if (lane == 0) {
    for (int s = 0; s < kBulkStages; ++s)
      sm90::BarrierInit(sm90::SharedAddress(&barriers[warp][s]), 1);
    sm90::BarrierInitFence();
  }
  __syncthreads();
  const auto barrier = [&](int stage) { return sm90::SharedAddress(&barriers[warp][stage]); };
  const auto load = [&](int64_t row, int stage) {
    sm90::BarrierArriveExpect(barrier(stage), stage_bytes);
    const uint32_t to = sm90::SharedAddress(mine + stage * stage_bytes);
    BulkLoad(to, static_cast<const G*>(a.dy) + row * a.width, g_bytes, barrier(stage));
    if constexpr (kExtra)
      BulkLoad(to + g_bytes, static_cast<const G*>(a.extra) + row * a.width, g_bytes,
               barrier(stage));
    BulkLoad(to + h_offset, static_cast<const H*>(a.h) + row * a.width, h_bytes, barrier(stage));
  };
  const int64_t step = int64_t{gridDim.x} * warps;
  int64_t row = int64_t{blockIdx.x} + static_cast<int64_t>(warp) * gridDim.x;
  if (lane == 0 && row < a.rows) load(row, 0);
  float next_r = row < a.rows ? a.rstd[row] : 0.0f;
  uint32_t parity = 0;
  for (int stage = 0; row < a.rows; row += step) {
    if (lane == 0 && row + step < a.rows) {
      sm90::BulkWaitRead<0>();  // what the other stage sent out has been read
      load(row + step, stage ^ 1);
    }
    const float r = next_r;
    if (row + step < a.rows) next_r = a.rstd[row + step];
    sm90::BarrierWait(barrier(stage), parity);
    auto* dy = reinterpret_cast<G*>(mine + stage * stage_bytes);
    const auto* extra = reinterpret_cast<const G*>(mine + stage * stage_bytes + g_bytes);
    const auto* h = reinterpret_cast<const H*>(mine + stage * stage_bytes + h_offset);
    // g = dy * w and x^ = h * r of four elements.
    const auto prepare = [&](uint32_t at, float(&g)[4], float(&xhat)[4]) {
      cuda::Widen4(cuda::LoadRaw4(dy + at), g);
      cuda::Widen4(cuda::LoadRaw4(h + at), xhat);
      const float4 weight = *reinterpret_cast<const float4*>(w + at);
      g[0] = cuda::Mul(g[0], weight.x), g[1] = cuda::Mul(g[1], weight.y);
      g[2] = cuda::Mul(g[2], weight.z), g[3] = cuda::Mul(g[3], weight.w);
#pragma unroll
      for (int e = 0; e < 4; ++e) xhat[e] = cuda::Mul(xhat[e], r);
    };
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (uint32_t at = 4 * static_cast<uint32_t>(lane); at < width; at += 128) {
      float g[4], xhat[4];
      prepare(at, g, xhat);
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[e] = cuda::Fma(g[e], xhat[e], acc[e]);
    }
    const float c = cuda::Mul(cuda::Chunk<true>::Tree(acc), a.inverse);
#pragma unroll 8
    for (uint32_t at = 4 * static_cast<uint32_t>(lane); at < width; at += 128) {
      float g[4], xhat[4], add[4];
      prepare(at, g, xhat);
      if constexpr (kExtra) cuda::Widen4(cuda::LoadRaw4(extra + at), add);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float u = cuda::Fma(-c, xhat[e], g[e]);
        g[e] = kExtra ? cuda::Fma(u, r, add[e]) : cuda::Mul(u, r);
      }
      cuda::Store4(g, dy + at);
    }
    sm90::FenceProxyAsync();
    __syncwarp();
    if (lane == 0) {
      BulkStore(static_cast<G*>(a.dx) + row * a.width, sm90::SharedAddress(dy), g_bytes);
      sm90::BulkCommit();
    }
    stage ^= 1;
    if (stage == 0) parity ^= 1;
  }
  if (lane == 0) sm90::BulkWaitRead<0>();
}

}  // namespace tare::ops::rmsnorm
