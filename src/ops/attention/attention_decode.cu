// The Hopper kernels of attention for runs of few rows: bf16, sm90-mma, heads of 64 or 128, key
// tiles of 128. A CTA of four warps takes 8 flat rows of one KV head against one split of the keys,
// so that a long sequence fills the device without moving a bit: the splits are the contract's. A
// second kernel combines them in order.
//
// Scores: keys are the 16-row side of mma.sync, the 8 rows the other; a warp owns 32 keys of a
// tile. Output: head elements are the 16-row side (V transposed as it is loaded), a warp owns a
// quarter of them. K of the next tile loads while V of this one is used, and the other way round;
// three CTAs share an SM.

#include "ops/attention/attention_decode.cuh"
#include "ops/cuda/cluster.cuh"
#include "ops/cuda/mma_sync.cuh"
#include "ops/cuda/sm90.cuh"
#include "tensor/cuda_status.h"

namespace tare::ops::attention::gpu {
namespace {

constexpr int kTile = kDecodeTile;
constexpr int kRows = kDecodeRows;
constexpr int kThreads = 128;
constexpr int kScorePitch = kTile + 4;  // f32
constexpr int kProbPitch = kTile + 8;   // bf16

// kStages tiles of K and V are under way at once: 1 and three CTAs an SM, or 3 and one CTA where
// there are not more CTAs than SMs anyway.
template <int kD, int kStages>
struct Layout {
  static constexpr int kKv = kTile * kD * 2;
  static constexpr int kScores = 2 * kStages * kKv;
  static constexpr int kProb = kScores + kRows * kScorePitch * 4;
  static constexpr int kQ = kProb + kRows * kProbPitch * 2;
  static constexpr int kKeyRows = kQ + kRows * (kD + 8) * 2;  // int32 [kStages + 1][128]
  static constexpr int kSmall =
      kKeyRows + (kStages + 1) * kTile * 4;  // f32: alpha, r, l, f, inverse [8] each
  static constexpr int kBytes = kSmall + 5 * kRows * 4;
  static_assert(kBytes <= (kStages == 1 ? 75 : 226) * 1024);
};

// Address of 16 bytes `chunk` of a key's row; the xor spreads eight rows over all banks.
template <int kD>
__device__ __forceinline__ uint32_t ChunkAt(uint32_t base, int key, int chunk) {
  return base + static_cast<uint32_t>(key * (kD * 2) + ((chunk ^ (key % 8)) * 16));
}

template <int kD>
__device__ __forceinline__ void LoadRows(const void* data, int64_t stride, int kv_head,
                                         const int* key_rows, int keys, uint32_t to) {
  constexpr int kPieces = kD / 8;
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
#pragma unroll
  for (int i = 0; i < kTile * kPieces / kThreads; ++i) {
    const int key = static_cast<int>(threadIdx.x) / kPieces + i * (kThreads / kPieces);
    const auto* from = static_cast<const __nv_bfloat16*>(data) + key_rows[key] * stride +
                       static_cast<int64_t>(kv_head) * kD + piece * 8;
    sm90::CopyAsync16(ChunkAt<kD>(to, key, piece), from, key < keys ? 16 : 0);
  }
  sm90::CopyCommit();
}

template <int kD, int kStages>
__global__ void __launch_bounds__(kThreads, kStages == 1 ? 3 : 1)
    attention_decode_kernel(const __grid_constant__ Forward f) {
  using L = Layout<kD, kStages>;
  extern __shared__ __align__(16) uint8_t shared[];
  const uint32_t base = sm90::SharedAddress(shared);
  float* scores = reinterpret_cast<float*>(shared + L::kScores);
  auto* prob = reinterpret_cast<__nv_bfloat16*>(shared + L::kProb);
  auto* q_rows = reinterpret_cast<__nv_bfloat16*>(shared + L::kQ);
  int* key_rows = reinterpret_cast<int*>(shared + L::kKeyRows);
  float* alpha = reinterpret_cast<float*>(shared + L::kSmall);
  float* ref = alpha + kRows;
  float* sum = ref + kRows;
  float* end_f = sum + kRows;
  float* end_inverse = end_f + kRows;

  sm90::LetDependentsStart();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int g = lane / 4, quad = lane % 4;
  for (int64_t item = blockIdx.x;; item += gridDim.x) {
    const int kv_head = static_cast<int>(item % f.kv_heads);
    const Place place =
        Locate(f.num_runs, item / f.kv_heads, [&](int r) { return UnitsOf(f, f.runs[r]); });
    if (place.run < 0) return;
    const DecodeItem d =
        MakeDecodeItem(f, f.runs[place.run], kv_head, static_cast<int>(place.index));
    const Run& run = d.run;
    const int splits = d.splits, count = d.count, to = d.to;
    const int tiles = d.Tiles();

    __syncthreads();  // the item before is done with shared memory
    CopyQueryRows<kD, kThreads>(d, q_rows);
    const auto find_rows = [&](int tile) {
      const int key = min(d.FirstKey() + tile * kTile + thread, to);
      key_rows[tile % (kStages + 1) * kTile + thread] = static_cast<int>(KeyRow(f, run, key));
    };
    const auto keys_of = [&](int tile) {
      return min(kTile, to + 1 - (d.FirstKey() + tile * kTile));
    };
    // One group of copies a tile for K, one for V, empty past the end, so that counts stay.
    const auto load = [&](int tile, bool value) {
      if (tile >= tiles) {
        sm90::CopyCommit();
        return;
      }
      const uint32_t to = base + (2 * (tile % kStages) + (value ? 1 : 0)) * L::kKv;
      LoadRows<kD>(value ? f.v : f.k, value ? f.v_stride : f.k_stride, kv_head,
                   key_rows + tile % (kStages + 1) * kTile, keys_of(tile), to);
    };
    for (int tile = 0; tile < min(kStages, tiles); ++tile) find_rows(tile);
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < kStages; ++tile) {
      load(tile, false);
      load(tile, true);
    }
    // B fragments of the rows: column g, k pairs of this quad.
    uint32_t qf[kD / 16][2];
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        qf[step][i] = *reinterpret_cast<const uint32_t*>(q_rows + g * (kD + 8) + step * 16 + 8 * i +
                                                         2 * quad);
    }
    // Softmax: 16 threads a row, 8 neighbouring keys each; they all hold r. The row sums belong to
    // warp 0, lane (row, quad lane).
    const int soft_row = thread / 16, soft_key = thread % 16 * 8;
    const int soft_low = d.Low(soft_row), soft_high = d.High(soft_row);
    float r = -kInfinity, l = 0.0f;
    constexpr int kBlocks = kD / 64;  // blocks of 16 head elements a warp owns
    float o[kBlocks][4];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][e] = 0.0f;
    }

    for (int tile = 0; tile < tiles; ++tile) {
      const int tile0 = d.FirstKey() + tile * kTile;
      const uint32_t k_at = base + 2 * (tile % kStages) * L::kKv, v_at = k_at + L::kKv;
      if (tile + kStages < tiles) find_rows(tile + kStages);
      sm90::CopyWait<2 * kStages - 1>();  // K is there
      __syncthreads();
      float acc[2][4] = {};
#pragma unroll
      for (int step = 0; step < kD / 16; ++step) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t a[4];
          const int key = warp * 32 + i * 16 + lane % 16;
          sm90::LoadMatrix4(a, ChunkAt<kD>(k_at, key, step * 2 + lane / 16));
          sm90::MmaBf16(acc[i], a, qf[step][0], qf[step][1]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          scores[(2 * quad + e % 2) * kScorePitch + warp * 32 + i * 16 + g + 8 * (e / 2)] =
              acc[i][e];
      }
      __syncthreads();
      load(tile + kStages, false);
      {
        float x[8];
        float* at = scores + soft_row * kScorePitch + soft_key;
        float top = -kInfinity;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          x[i] = at[i];
          const int key = tile0 + soft_key + i;
          if (key >= soft_low && key <= soft_high) top = fmaxf(top, x[i]);
        }
#pragma unroll
        for (int step = 1; step < 16; step *= 2)
          top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, step));
        float scale = 1.0f;
        if (max(soft_low, tile0) <= min(soft_high, tile0 + kTile - 1)) {
          const float next = NextReference(r, __fmul_rn(top, f.c));
          if (r != -kInfinity && next != r) scale = RescaleReference(r, next);
          r = next;
        }
        if (thread % 16 == 0) alpha[soft_row] = scale;
        const float c7 = __fmul_rn(f.c, 0x1p-7f), offset = ScoreOffset(r);
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int key = tile0 + soft_key + i;
          const float p = Probability(x[i], c7, offset);
          x[i] =
              key >= soft_low && key <= soft_high ? __bfloat162float(__float2bfloat16_rn(p)) : 0.0f;
          at[i] = x[i];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) packed[i] = PackBf16(x[2 * i], x[2 * i + 1]);
        *reinterpret_cast<uint4*>(prob + soft_row * kProbPitch + soft_key) =
            make_uint4(packed[0], packed[1], packed[2], packed[3]);
      }
      sm90::CopyWait<2 * kStages - 1>();  // V is there
      __syncthreads();
      const float scale[2] = {alpha[2 * quad], alpha[2 * quad + 1]};
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[i][e] = __fmul_rn(o[i][e], scale[e % 2]);
      }
#pragma unroll
      for (int step = 0; step < kTile / 16; ++step) {
        const auto* at = prob + g * kProbPitch + step * 16 + 2 * quad;
        const uint32_t b0 = *reinterpret_cast<const uint32_t*>(at);
        const uint32_t b1 = *reinterpret_cast<const uint32_t*>(at + 8);
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          uint32_t a[4];
          const int key = step * 16 + lane % 8 + lane / 16 * 8;
          const int chunk = (warp * kBlocks + i) * 2 + lane / 8 % 2;
          sm90::LoadMatrix4Transposed(a, ChunkAt<kD>(v_at, key, chunk));
          sm90::MmaBf16(o[i], a, b0, b1);
        }
      }
      if (warp == 0) {
        l = __fmul_rn(l, alpha[g]);
        const float* at = scores + g * kScorePitch + 2 * quad;
#pragma unroll
        for (int b = 0; b < kTile / 8; ++b) {
          const float2 pair = *reinterpret_cast<const float2*>(at + 8 * b);
          l = __fadd_rn(__fadd_rn(l, pair.x), pair.y);
        }
      }
      __syncthreads();
      load(tile + kStages, true);
    }

    if (thread % 16 == 0) ref[soft_row] = r;
    if (warp == 0) {
      l = __fadd_rn(l, __shfl_xor_sync(0xffffffff, l, 1));
      l = __fadd_rn(l, __shfl_xor_sync(0xffffffff, l, 2));
      if (quad == 0) sum[g] = l;
    }
    __syncthreads();
    if (splits > 1) {
      if (thread < count) {
        f.part_rl[2 * (item * kRows + thread)] = ref[thread];
        f.part_rl[2 * (item * kRows + thread) + 1] = sum[thread];
      }
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = 2 * quad + e % 2;
          if (row >= count) continue;
          f.part_o[(item * kRows + row) * kD + (warp * kBlocks + i) * 16 + g + 8 * (e / 2)] =
              o[i][e];
        }
      }
      continue;
    }
    if (thread < count) {
      const RowEnd end = EndRow(ref[thread], sum[thread], f.sink, d.Head(thread));
      end_f[thread] = end.f;
      end_inverse[thread] = end.inverse;
      if (f.lse2 != nullptr)
        f.lse2[(run.q_begin + d.Token(thread)) * f.q_heads + d.Head(thread)] = end.lse2;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 2 * quad + e % 2;
        if (row >= count) continue;
        float x = o[i][e];
        if (f.sink != nullptr) x = __fmul_rn(x, end_f[row]);
        x = __fadd_rn(__fmul_rn(x, end_inverse[row]), 0.0f);
        static_cast<__nv_bfloat16*>(f.out)[(run.q_begin + d.Token(row)) * f.out_stride +
                                           static_cast<int64_t>(d.Head(row)) * kD +
                                           (warp * kBlocks + i) * 16 + g + 8 * (e / 2)] =
            __float2bfloat16_rn(x);
      }
    }
  }
}

// One warp a row and head of a run with more than one split.
template <int kD>
__global__ void __launch_bounds__(kThreads)
    attention_combine_kernel(const __grid_constant__ Forward f) {
  constexpr int kOwn = kD / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const Place place = Locate(f.num_runs, item, [&](int r) -> int64_t {
    const int64_t flat = FlatRows(f.runs[r], f.group);
    return flat > f.decode_rows ? 0 : flat * f.kv_heads;
  });
  // Every thread, so that this kernel never ends before the one whose parts it reads.
  sm90::WaitForDependency();
  if (place.run < 0) return;
  const Run run = f.runs[place.run];
  const int token = static_cast<int>(place.index) / f.q_heads,
            head = static_cast<int>(place.index) % f.q_heads;
  const int splits = SplitsOf(f, run);
  if (splits <= 1) return;
  int64_t before = 0;  // units of the runs before
  for (int i = lane; i < place.run; i += 32) before += UnitsOf(f, f.runs[i]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) before += __shfl_xor_sync(0xffffffff, before, step);
  const int flat = token * f.group + head % f.group, kv_head = head / f.group;
  const int64_t unit = before + static_cast<int64_t>(flat / kRows) * splits;
  const auto slot = [&](int split) {
    return ((unit + split) * f.kv_heads + kv_head) * kRows + flat % kRows;
  };
  const int64_t row = run.q_begin + token;
  float r = -kInfinity, l = 0.0f, o[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) o[i] = 0.0f;
  // Blocks of splits: their loads go ahead of the arithmetic.
  constexpr int kBlock = 16;
  for (int s0 = 0; s0 < splits; s0 += kBlock) {
    float part[kBlock][kOwn], rs[kBlock], ls[kBlock];
#pragma unroll
    for (int s = 0; s < kBlock; ++s) {
      const bool in = s0 + s < splits;
      rs[s] = in ? f.part_rl[2 * slot(s0 + s)] : -kInfinity;
      ls[s] = in ? f.part_rl[2 * slot(s0 + s) + 1] : 0.0f;
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        part[s][i] = in ? f.part_o[slot(s0 + s) * kD + i * 32 + lane] : 0.0f;
    }
#pragma unroll
    for (int s = 0; s < kBlock; ++s) {
      if (s0 + s >= splits) break;
      const Meeting m = Meet(r, l, rs[s], ls[s]);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) o[i] = __fmaf_rn(part[s][i], m.b, __fmul_rn(o[i], m.a));
    }
  }
  const RowEnd end = EndRow(r, l, f.sink, head);
  if (f.lse2 != nullptr && lane == 0) f.lse2[row * f.q_heads + head] = end.lse2;
  auto* out =
      static_cast<__nv_bfloat16*>(f.out) + row * f.out_stride + static_cast<int64_t>(head) * kD;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    float x = o[i];
    if (f.sink != nullptr) x = __fmul_rn(x, end.f);
    out[i * 32 + lane] = __float2bfloat16_rn(__fadd_rn(__fmul_rn(x, end.inverse), 0.0f));
  }
}

template <int kD, int kStages>
Status LaunchItems(const Forward& f, int64_t ctas, cudaStream_t stream) {
  using L = Layout<kD, kStages>;
  static const cudaError_t prepared = cudaFuncSetAttribute(
      attention_decode_kernel<kD, kStages>, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kBytes);
  TARE_CUDA_RETURN_IF_ERROR(prepared);
  attention_decode_kernel<kD, kStages>
      <<<static_cast<unsigned>(ctas), kThreads, L::kBytes, stream>>>(f);
  TARE_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  return Ok();
}

template <int kD>
Status Launch(const Forward& f, int64_t items, int64_t rows, StreamHandle stream) {
  int device = 0, sms = 0;
  TARE_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  TARE_CUDA_RETURN_IF_ERROR(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  const auto s = static_cast<cudaStream_t>(stream);
  // Clusters are faster while all of them fit at once, two CTAs a multiprocessor.
  if (CanDecodeByCluster(f) && 2 * items <= sms) {
    TARE_RETURN_IF_ERROR(LaunchDecodeByCluster(f, items, stream));
  } else if (items <= sms) {
    const Status status = LaunchItems<kD, 3>(f, items, s);
    TARE_RETURN_IF_ERROR(status);
  } else {
    const Status status = LaunchItems<kD, 1>(f, items < 3 * sms ? items : 3 * sms, s);
    TARE_RETURN_IF_ERROR(status);
  }
  if (rows == 0) return Ok();
  // It may start beside the last splits: it waits for them itself.
  constexpr int kWarps = kThreads / 32;
  cudaLaunchAttribute serialization = {};
  serialization.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  serialization.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((rows + kWarps - 1) / kWarps));
  config.blockDim = dim3(kThreads);
  config.stream = s;
  config.attrs = &serialization;
  config.numAttrs = 1;
  TARE_CUDA_RETURN_IF_ERROR(cudaLaunchKernelEx(&config, attention_combine_kernel<kD>, f));
  return Ok();
}

}  // namespace

bool CanDecode(const Params& p, Profile profile, const Forward& f) {
  if (profile != Profile::kSm90Mma || p.dtype != DType::kBF16 || p.softcap != 0.0f) return false;
  if ((p.head_dim != 64 && p.head_dim != 128) || p.kv_tile != kTile) return false;
  const auto aligned = [](const void* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
  };
  return aligned(f.q, f.q_stride) && aligned(f.k, f.k_stride) && aligned(f.v, f.v_stride);
}

Status LaunchDecode(const Forward& f, int64_t items, int64_t rows, StreamHandle stream) {
  return f.head_dim == 64 ? Launch<64>(f, items, rows, stream)
                          : Launch<128>(f, items, rows, stream);
}

}  // namespace tare::ops::attention::gpu
