// The generic CUDA kernel of the attention forward: every dtype, head size, stride, page size and
// option, in both profiles. One CTA of four warps takes 16 flat rows of one KV head and walks their
// keys; a warp owns every fourth block of 8 keys (scores) and of 8 head elements (output).

#include "ops/attention/attention_generic.cuh"
#include "tensor/convert.h"
#include "tensor/cuda_status.h"

namespace tare::ops::attention::gpu {
namespace {

constexpr int kRows = kGenericRows;
constexpr int kThreads = 128;
constexpr int kMostTile = 128;
constexpr int kMaxBlocks = 256 / 8 / 4;  // blocks of 8 head elements a warp owns at most

template <DType kDType, bool kSm90>
__global__ void __launch_bounds__(kThreads)
    attention_generic_kernel(const __grid_constant__ Forward f) {
  extern __shared__ float shared[];
  const int d = f.head_dim, pitch = kMostTile + 1;
  float* q = shared;                 // [16][d]
  float* s = q + kRows * d;          // [16][tile + 1]: scores, then P
  float* alpha = s + kRows * pitch;  // [16]
  float* fa = alpha + kRows;
  float* fb = fa + kRows;

  const int kv_head = static_cast<int>(blockIdx.y);
  const Place place = Locate(f.num_runs, blockIdx.x, [&](int r) {
    return (FlatRows(f.runs[r], f.group) + kRows - 1) / kRows;
  });
  if (place.run < 0) return;
  const Run run = f.runs[place.run];
  const bool tile_sums = f.faults.by_rows && run.q_rows >= 64;
  const int tile_keys = tile_sums ? 192 - f.kv_tile : f.kv_tile;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int flat0 = place.index * kRows;
  const int count = min(kRows, static_cast<int>(FlatRows(run, f.group)) - flat0);
  const auto token = [&](int row) { return (flat0 + min(row, count - 1)) / f.group; };
  const auto head = [&](int row) {
    return kv_head * f.group + (flat0 + min(row, count - 1)) % f.group;
  };
  const auto high = [&](int row) { return static_cast<int>(run.position) + token(row); };
  const auto low = [&](int row) { return f.window == 0 ? 0 : max(0, high(row) - f.window + 1); };
  for (int i = thread; i < kRows * d; i += kThreads) {
    const int row = i / d;
    q[i] = LoadElement<kDType>(
        f.q, (run.q_begin + token(row)) * f.q_stride + static_cast<int64_t>(head(row)) * d + i % d);
    if (f.faults.scale_q) q[i] = RoundElement<kDType>(__fmul_rn(q[i], f.scale));
  }
  const int first_key = low(0), last_key = high(count - 1);
  const int split_keys =
      f.faults.decode_split != 0 && run.q_rows == 1 ? f.faults.decode_split : f.kv_split;
  // An element of K or V, x counted from the key's row.
  const auto element = [&](const void* data, int64_t stride, int key, int64_t x) {
    int64_t at = KeyRow(f, run, key);
    if (f.faults.leak && key == 0 && f.block_table == nullptr && at > 0) --at;
    const float v = LoadElement<kDType>(data, at * stride + static_cast<int64_t>(kv_head) * d + x);
    return f.faults.kv_fp8 ? E4m3ToF32(F32ToE4m3(v)) : v;
  };

  // Threads 0..63: row thread / 4, quad lane thread % 4. Every one of the four holds r of the row.
  const int row = thread / 4, quad = thread % 4;
  float r = -kInfinity, l = 0.0f, r_total = -kInfinity, l_total = 0.0f;
  float o[kMaxBlocks][4], total[kMaxBlocks][4];
#pragma unroll
  for (int i = 0; i < kMaxBlocks; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) o[i][e] = total[i][e] = 0.0f;
  }

  for (int tile = first_key / tile_keys; tile * tile_keys <= last_key; ++tile) {
    const int tile0 = tile * tile_keys;
    const int keys = min(tile_keys, last_key + 1 - tile0);
    __syncthreads();  // q is there; the last tile's P and factors are used up
    for (int block = warp; block < tile_keys / 8; block += kThreads / 32) {
      float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (block * 8 < keys) {
        for (int k0 = 0; k0 < d; k0 += 16) {
          GroupStep<kDType, kSm90>(
              acc, 16, [&](int i, int k) { return q[i * d + k0 + k]; },
              [&](int k, int j) {
                const int key = block * 8 + j;
                if (key >= keys) return 0.0f;
                return element(f.k, f.k_stride, tile0 + key, k0 + k);
              });
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float x = acc[e];
        if (f.cap != 0.0f) x = __fmul_rn(numerics::Tanh(__fmul_rn(x, f.ratio)), f.cap);
        s[BlockRow(e) * pitch + block * 8 + BlockColumn(e)] = x;
      }
    }
    __syncthreads();
    if (thread < 4 * kRows) {
      const int from = max(low(row), tile0) - tile0,
                to = min(high(row), tile0 + tile_keys - 1) - tile0;
      float top = -kInfinity;
      for (int b = 0; b < tile_keys / 8; ++b) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int j = 8 * b + 2 * quad + e;
          if (j >= from && j <= to) top = fmaxf(top, s[row * pitch + j]);
        }
      }
      const unsigned mask = 0xffffffffu;
      top = fmaxf(top, __shfl_xor_sync(mask, top, 1));
      top = fmaxf(top, __shfl_xor_sync(mask, top, 2));
      float scale = 1.0f;
      if (from <= to) {
        const float next = NextReference(r, __fmul_rn(top, f.c));
        if (r != -kInfinity) scale = Rescale(r, next);
        r = next;
      }
      l = __fmul_rn(l, scale);
      const float c7 = __fmul_rn(f.c, 0x1p-7f), offset = ScoreOffset(r);
      const float before = l;
      if (tile_sums) l = 0.0f;
      for (int b = 0; b < tile_keys / 8; ++b) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int j = 8 * b + 2 * quad + e;
          float p = 0.0f;
          if (j >= from && j <= to) p = Probability(s[row * pitch + j], c7, offset);
          p = RoundElement<kDType>(p);
          l = __fadd_rn(l, p);
          s[row * pitch + j] = p;
        }
      }
      if (tile_sums) l = __fadd_rn(before, l);
      if (quad == 0) alpha[row] = scale;
    }
    __syncthreads();
    for (int i = 0; i < kMaxBlocks; ++i) {
      const int block = warp + 4 * i;
      if (block * 8 >= d) break;
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][e] = __fmul_rn(o[i][e], alpha[BlockRow(e)]);
      for (int k0 = 0; k0 < keys; k0 += 16) {
        GroupStep<kDType, kSm90>(
            o[i], min(16, keys - k0), [&](int j, int k) { return s[j * pitch + k0 + k]; },
            [&](int k, int j) { return element(f.v, f.v_stride, tile0 + k0 + k, block * 8 + j); });
      }
    }
    const bool ends = (tile0 + tile_keys) % split_keys == 0 || tile0 + tile_keys > last_key;
    if (!ends) continue;
    __syncthreads();
    if (thread < 4 * kRows) {
      l = __fadd_rn(l, __shfl_xor_sync(0xffffffffu, l, 1));
      l = __fadd_rn(l, __shfl_xor_sync(0xffffffffu, l, 2));
      const Meeting m = Meet(r_total, l_total, r, l);
      if (quad == 0) fa[row] = m.a, fb[row] = m.b;
      r = -kInfinity;
      l = 0.0f;
    }
    __syncthreads();
    for (int i = 0; i < kMaxBlocks; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at = BlockRow(e);
        total[i][e] = __fmaf_rn(o[i][e], fb[at], __fmul_rn(total[i][e], fa[at]));
        o[i][e] = 0.0f;
      }
    }
  }
  __syncthreads();
  if (thread < 4 * kRows && quad == 0) {
    const RowEnd end = EndRow(r_total, l_total, f.sink, head(row));
    fa[row] = end.f;
    fb[row] = end.inverse;
    if (f.lse2 != nullptr && row < count)
      f.lse2[(run.q_begin + token(row)) * f.q_heads + head(row)] = end.lse2;
  }
  __syncthreads();
  for (int i = 0; i < kMaxBlocks; ++i) {
    const int block = warp + 4 * i;
    if (block * 8 >= d) break;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int at = BlockRow(e);
      if (at >= count) continue;
      float v = total[i][e];
      if (f.sink != nullptr) v = __fmul_rn(v, fa[at]);
      StoreElement<kDType>(f.out,
                           (run.q_begin + token(at)) * f.out_stride +
                               static_cast<int64_t>(head(at)) * d + block * 8 + BlockColumn(e),
                           __fadd_rn(__fmul_rn(v, fb[at]), 0.0f));
    }
  }
}

}  // namespace

Status LaunchGeneric(const Forward& f, DType dtype, bool sm90, int64_t blocks,
                     StreamHandle stream) {
  const size_t shared =
      sizeof(float) * static_cast<size_t>(kRows * f.head_dim + kRows * (kMostTile + 1) + 3 * kRows);
  return ForStep(dtype, sm90, [&]<DType kDType, bool kSm90>() -> Status {
    attention_generic_kernel<kDType, kSm90>
        <<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(f.kv_heads)), kThreads, shared,
           static_cast<cudaStream_t>(stream)>>>(f);
    TARE_CUDA_RETURN_IF_ERROR(cudaGetLastError());
    return Ok();
  });
}

}  // namespace tare::ops::attention::gpu
