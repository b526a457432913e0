// The generic CUDA kernels of the attention backward: every dtype, head size, stride and option, in
// both profiles. dK and dV: a CTA owns 16 keys of one KV head and walks the rows that see them,
// head by head. dQ: a CTA owns 16 rows of one query head and walks their keys. Both compute P and
// dS anew; nothing is added by arrival.
//
// Also here, for the fast kernels too: delta and the sink's gradient.

#include "ops/attention/attention_generic.cuh"
#include "numerics/lanes.h"
#include "tensor/convert.h"
#include "tensor/cuda_status.h"

namespace tare::ops::attention::gpu {
namespace {

constexpr int kThreads = 128;
constexpr int kMaxBlocks = 256 / 8 / 4;
constexpr int kPitch = 17;

struct Pair {
  float p, ds;  // P unrounded, dS before its rounding
};
__device__ __forceinline__ Pair Gradient(const Backward& b, float s, float dp, float lse2,
                                         float delta) {
  float u = 0.0f;
  if (b.cap != 0.0f) {
    u = numerics::Tanh(__fmul_rn(s, b.ratio));
    s = __fmul_rn(u, b.cap);
  }
  Pair pair;
  pair.p = BackwardProbability(s, b.c, lse2);
  pair.ds = __fmul_rn(pair.p, __fsub_rn(dp, delta));
  if (b.cap != 0.0f) pair.ds = __fmul_rn(pair.ds, __fmaf_rn(-u, u, 1.0f));
  return pair;
}

__device__ __forceinline__ bool Visible(const Backward& b, int row, int key, int rows) {
  return row < rows && key <= row && (b.window == 0 || key > row - b.window);
}

// Scores of 16 rows from row0 against 16 keys from key0, by one warp for each half of the keys:
// p_tile and ds_tile [row][key] in shared memory, rounded, +0 where the pair is not visible.
template <DType kDType, bool kSm90>
__device__ void PairTile(const Backward& b, const Run& run, int head, int kv_head, int row0,
                         int key0, float* p_tile, float* ds_tile) {
  const int warp = static_cast<int>(threadIdx.x) / 32, d = b.head_dim;
  const int rows = static_cast<int>(run.q_rows);
  if (warp >= 2) return;
  const auto element = [&](const void* data, int64_t begin, int64_t stride, int at, int h, int x) {
    if (at >= rows) return 0.0f;
    return LoadElement<kDType>(data, (begin + at) * stride + static_cast<int64_t>(h) * d + x);
  };
  const auto key_element = [&](const void* data, int64_t stride, int at, int x) {
    const float v = element(data, run.kv_begin, stride, at, kv_head, x);
    return b.kv_fp8 ? E4m3ToF32(F32ToE4m3(v)) : v;
  };
  float s[4] = {}, dp[4] = {};
  const int k0 = key0 + 8 * warp;
  for (int x = 0; x < d; x += 16) {
    GroupStep<kDType, kSm90>(
        s, 16,
        [&](int i, int k) { return element(b.q, run.q_begin, b.q_stride, row0 + i, head, x + k); },
        [&](int k, int j) { return key_element(b.k, b.k_stride, k0 + j, x + k); });
    GroupStep<kDType, kSm90>(
        dp, 16,
        [&](int i, int k) {
          return element(b.dout, run.q_begin, b.dout_stride, row0 + i, head, x + k);
        },
        [&](int k, int j) { return key_element(b.v, b.v_stride, k0 + j, x + k); });
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int i = BlockRow(e), j = 8 * warp + BlockColumn(e);
    float p = 0.0f, ds = 0.0f;
    if (Visible(b, row0 + i, key0 + j, rows)) {
      const int64_t at = static_cast<int64_t>(head) * b.tokens + run.q_begin + row0 + i;
      const Pair pair = Gradient(b, s[e], dp[e], b.lse_t[at], b.delta[at]);
      p = RoundElement<kDType>(pair.p);
      ds = RoundElement<kDType>(pair.ds);
    }
    p_tile[i * kPitch + j] = p;
    ds_tile[i * kPitch + j] = ds;
  }
}

template <DType kDType, bool kSm90>
__global__ void __launch_bounds__(kThreads)
    attention_dkdv_generic_kernel(const __grid_constant__ Backward b) {
  __shared__ float p_tile[16 * kPitch], ds_tile[16 * kPitch];
  const int kv_head = static_cast<int>(blockIdx.y), d = b.head_dim;
  const Place place =
      Locate(b.num_runs, blockIdx.x, [&](int r) { return (b.runs[r].q_rows + 15) / 16; });
  if (place.run < 0) return;
  const Run run = b.runs[place.run];
  const int rows = static_cast<int>(run.q_rows);
  const int key0 = place.index * 16;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int row_end = b.window == 0 ? rows : min(rows, key0 + 15 + b.window);
  float total[2][kMaxBlocks][4], sum[2][kMaxBlocks][4], acc[2][kMaxBlocks][4];
  const auto clear = [](float(&x)[2][kMaxBlocks][4]) {
    for (int o = 0; o < 2; ++o) {
      for (int i = 0; i < kMaxBlocks; ++i) {
        for (int e = 0; e < 4; ++e) x[o][i][e] = 0.0f;
      }
    }
  };
  const auto add = [](float(&to)[2][kMaxBlocks][4], const float(&from)[2][kMaxBlocks][4]) {
    for (int o = 0; o < 2; ++o) {
      for (int i = 0; i < kMaxBlocks; ++i) {
        for (int e = 0; e < 4; ++e) to[o][i][e] = __fadd_rn(to[o][i][e], from[o][i][e]);
      }
    }
  };
  clear(total);
  for (int h = 0; h < b.group; ++h) {
    const int head = kv_head * b.group + h;
    clear(sum);
    clear(acc);
    for (int row0 = key0; row0 < row_end; row0 += 16) {
      if (row0 % b.unit_rows == 0 && row0 != key0) {
        add(sum, acc);
        clear(acc);
      }
      __syncthreads();
      PairTile<kDType, kSm90>(b, run, head, kv_head, row0, key0, p_tile, ds_tile);
      __syncthreads();
      const int count = min(16, rows - row0);
      for (int i = 0; i < kMaxBlocks; ++i) {
        const int block = warp + 4 * i;
        if (block * 8 >= d) break;
        const auto value = [&](const void* data, int64_t stride, int k, int j) {
          return LoadElement<kDType>(data, (run.q_begin + row0 + k) * stride +
                                               static_cast<int64_t>(head) * d + block * 8 + j);
        };
        GroupStep<kDType, kSm90>(
            acc[0][i], count, [&](int j, int k) { return ds_tile[k * kPitch + j]; },
            [&](int k, int j) { return value(b.q, b.q_stride, k, j); });
        GroupStep<kDType, kSm90>(
            acc[1][i], count, [&](int j, int k) { return p_tile[k * kPitch + j]; },
            [&](int k, int j) { return value(b.dout, b.dout_stride, k, j); });
      }
    }
    add(sum, acc);
    add(total, sum);
  }
  for (int i = 0; i < kMaxBlocks; ++i) {
    const int block = warp + 4 * i;
    if (block * 8 >= d) break;
    for (int e = 0; e < 4; ++e) {
      const int key = key0 + BlockRow(e);
      if (key >= rows) continue;
      const int64_t x = static_cast<int64_t>(kv_head) * d + block * 8 + BlockColumn(e);
      StoreElement<kDType>(b.dk, (run.kv_begin + key) * b.dk_stride + x,
                           __fadd_rn(__fmul_rn(total[0][i][e], b.scale), 0.0f));
      StoreElement<kDType>(b.dv, (run.kv_begin + key) * b.dv_stride + x,
                           __fadd_rn(total[1][i][e], 0.0f));
    }
  }
}

template <DType kDType, bool kSm90>
__global__ void __launch_bounds__(kThreads)
    attention_dq_generic_kernel(const __grid_constant__ Backward b) {
  __shared__ float p_tile[16 * kPitch], ds_tile[16 * kPitch];
  const int head = static_cast<int>(blockIdx.y), d = b.head_dim, kv_head = head / b.group;
  const Place place =
      Locate(b.num_runs, blockIdx.x, [&](int r) { return (b.runs[r].q_rows + 15) / 16; });
  if (place.run < 0) return;
  const Run run = b.runs[place.run];
  const int rows = static_cast<int>(run.q_rows);
  const int row0 = place.index * 16;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int last = min(rows, row0 + 16) - 1;
  const int first = b.window == 0 ? 0 : max(0, row0 - b.window + 1) / 16 * 16;
  float acc[kMaxBlocks][4] = {};
  for (int key0 = first; key0 <= last; key0 += 16) {
    __syncthreads();
    PairTile<kDType, kSm90>(b, run, head, kv_head, row0, key0, p_tile, ds_tile);
    __syncthreads();
    for (int i = 0; i < kMaxBlocks; ++i) {
      const int block = warp + 4 * i;
      if (block * 8 >= d) break;
      GroupStep<kDType, kSm90>(
          acc[i], min(16, last + 1 - key0), [&](int r, int k) { return ds_tile[r * kPitch + k]; },
          [&](int k, int j) {
            return LoadElement<kDType>(b.k, (run.kv_begin + key0 + k) * b.k_stride +
                                                static_cast<int64_t>(kv_head) * d + block * 8 + j);
          });
    }
  }
  for (int i = 0; i < kMaxBlocks; ++i) {
    const int block = warp + 4 * i;
    if (block * 8 >= d) break;
    for (int e = 0; e < 4; ++e) {
      const int row = row0 + BlockRow(e);
      if (row >= rows) continue;
      StoreElement<kDType>(b.dq,
                           (run.q_begin + row) * b.dq_stride + static_cast<int64_t>(head) * d +
                               block * 8 + BlockColumn(e),
                           __fadd_rn(__fmul_rn(acc[i][e], b.scale), 0.0f));
    }
  }
}

constexpr int kDeltaRows = 8;  // of one head, a warp

// One warp kDeltaRows rows of one head: their loads are under way together.
template <DType kDType>
__global__ void __launch_bounds__(kThreads)
    attention_delta_kernel(const __grid_constant__ Backward b) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, d = b.head_dim;
  const int64_t row0 = item / b.q_heads * kDeltaRows, head = item % b.q_heads;
  if (row0 >= b.tokens) return;
  float sum[kDeltaRows] = {};
  for (int x = lane; x < d; x += 32) {
#pragma unroll
    for (int i = 0; i < kDeltaRows; ++i) {
      const int64_t row = min(row0 + i, static_cast<int64_t>(b.tokens) - 1);
      sum[i] = __fmaf_rn(LoadElement<kDType>(b.dout, row * b.dout_stride + head * d + x),
                         LoadElement<kDType>(b.out, row * b.out_stride + head * d + x), sum[i]);
    }
  }
  float own = 0.0f;  // of row `lane`
#pragma unroll
  for (int i = 0; i < kDeltaRows; ++i) {
#pragma unroll
    for (int half = 16; half > 0; half /= 2)
      sum[i] = __fadd_rn(sum[i], __shfl_down_sync(0xffffffff, sum[i], half));
    const float total = __shfl_sync(0xffffffff, sum[i], 0);
    if (lane == i) own = total;
  }
  if (lane < kDeltaRows && row0 + lane < b.tokens) {
    b.delta[head * b.tokens + row0 + lane] = own;
    b.lse_t[head * b.tokens + row0 + lane] = b.lse2[(row0 + lane) * b.q_heads + head];
  }
}

// One warp a head.
__global__ void __launch_bounds__(32) attention_dsink_kernel(const __grid_constant__ Backward b) {
  const int head = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x);
  const float t2 = __fmul_rn(b.sink[head], kLog2e);
  float total = b.dsink[head];
  for (int r = 0; r < b.num_runs; ++r) {
    const Run run = b.runs[r];
    for (int64_t cut = 0; cut < run.q_rows; cut += b.unit_rows) {
      const int64_t end = min(run.q_rows, cut + b.unit_rows);
      float sum = 0.0f;
      for (int64_t i = cut + lane; i < end; i += 32) {
        const int64_t at = static_cast<int64_t>(head) * b.tokens + run.q_begin + i;
        sum = __fadd_rn(sum, -__fmul_rn(numerics::Exp2(__fsub_rn(t2, b.lse_t[at])), b.delta[at]));
      }
#pragma unroll
      for (int half = 16; half > 0; half /= 2)
        sum = __fadd_rn(sum, __shfl_down_sync(0xffffffff, sum, half));
      total = numerics::Canonical(__fadd_rn(total, sum));
    }
  }
  if (lane == 0) b.dsink[head] = total;
}

}  // namespace

Status LaunchBackwardGeneric(const Backward& b, DType dtype, bool sm90, int64_t key_blocks,
                             int64_t row_blocks, StreamHandle stream) {
  return ForStep(dtype, sm90, [&]<DType kDType, bool kSm90>() -> Status {
    const auto s = static_cast<cudaStream_t>(stream);
    attention_dkdv_generic_kernel<kDType, kSm90>
        <<<dim3(static_cast<unsigned>(key_blocks), static_cast<unsigned>(b.kv_heads)), kThreads, 0,
           s>>>(b);
    attention_dq_generic_kernel<kDType, kSm90>
        <<<dim3(static_cast<unsigned>(row_blocks), static_cast<unsigned>(b.q_heads)), kThreads, 0,
           s>>>(b);
    TARE_CUDA_RETURN_IF_ERROR(cudaGetLastError());
    return Ok();
  });
}

Status LaunchDelta(const Backward& b, DType dtype, StreamHandle stream) {
  const int64_t items = (static_cast<int64_t>(b.tokens) + kDeltaRows - 1) / kDeltaRows * b.q_heads;
  const auto blocks = static_cast<unsigned>((items + kThreads / 32 - 1) / (kThreads / 32));
  return ForStep(dtype, false, [&]<DType kDType, bool kSm90>() -> Status {
    attention_delta_kernel<kDType><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(b);
    TARE_CUDA_RETURN_IF_ERROR(cudaGetLastError());
    return Ok();
  });
}

Status LaunchSinkGradient(const Backward& b, StreamHandle stream) {
  attention_dsink_kernel<<<static_cast<unsigned>(b.q_heads), 32, 0,
                           static_cast<cudaStream_t>(stream)>>>(b);
  TARE_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  return Ok();
}

}  // namespace tare::ops::attention::gpu
