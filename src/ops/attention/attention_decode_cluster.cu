// Decode for few sequences: a cluster of four CTAs takes what one CTA of attention_decode.cu does,
// 8 flat rows of one KV head against one split of at most four key tiles. Each CTA makes the scores
// of one tile; all four read all scores from each other's shared memory and do the same softmax;
// each then multiplies P with a quarter of V's columns over all tiles. Every chain is the
// contract's, so no bit depends on which kernel ran; but everything a split needs is under way at
// once, where one CTA would wait for tile after tile.

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
constexpr int kCluster = 4;
constexpr int kTiles = 4;
constexpr int kKeys = kTiles * kTile;
constexpr int kScorePitch = kTile + 4;  // f32
constexpr int kProbPitch = kKeys + 8;   // bf16

template <int kD>
struct Layout {
  static constexpr int kOwn = kD / kCluster;  // V's columns of a CTA
  static constexpr int kProb = 0;             // after the scores: in the place of K
  static constexpr int kV = kTile * kD * 2;
  static constexpr int kScores = kV + kKeys * kOwn * 2;
  static constexpr int kQ = kScores + kRows * kScorePitch * 4;
  static constexpr int kKeyRows = kQ + kRows * (kD + 8) * 2;  // int32 [512]
  static constexpr int kSmall = kKeyRows + kKeys * 4;  // f32: alpha [4][8], r, l, f, inverse [8]
  static constexpr int kBytes = kSmall + (kTiles + 4) * kRows * 4;
  static_assert(kRows * kProbPitch * 2 <= kV);
  static_assert(kBytes <= 75 * 1024);
};

// Addresses of 16 bytes: K as in attention_decode.cu; V in rows of kD / 4 elements, so that eight
// keys' chunks lie in eight different banks of 16 bytes.
template <int kD>
__device__ __forceinline__ uint32_t KChunk(uint32_t base, int key, int chunk) {
  return base + static_cast<uint32_t>(key * (kD * 2) + ((chunk ^ (key % 8)) * 16));
}
template <int kD>
__device__ __forceinline__ uint32_t VChunk(uint32_t base, int key, int chunk) {
  constexpr int kChunks = kD / kCluster / 8, kPerLine = 8 / kChunks;  // keys in 128 bytes
  return base +
         static_cast<uint32_t>(key * (kChunks * 16) + ((chunk ^ (key / kPerLine % kChunks)) * 16));
}

template <int kD>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 3)
    attention_decode_cluster_kernel(const __grid_constant__ Forward f) {
  using L = Layout<kD>;
  extern __shared__ __align__(16) uint8_t shared[];
  const uint32_t base = sm90::SharedAddress(shared);
  float* scores = reinterpret_cast<float*>(shared + L::kScores);
  auto* prob = reinterpret_cast<__nv_bfloat16*>(shared + L::kProb);
  auto* q_rows = reinterpret_cast<__nv_bfloat16*>(shared + L::kQ);
  int* key_rows = reinterpret_cast<int*>(shared + L::kKeyRows);
  float* alpha = reinterpret_cast<float*>(shared + L::kSmall);
  float* ref = alpha + kTiles * kRows;
  float* sum = ref + kRows;
  float* end_f = sum + kRows;
  float* end_inverse = end_f + kRows;

  sm90::LetDependentsStart();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int g = lane / 4, quad = lane % 4;
  const int rank = static_cast<int>(sm90::ClusterRank());
  // Items one after the other: a replayed graph may meet longer sequences than it was captured
  // with.
  for (int64_t item = blockIdx.x / kCluster;; item += gridDim.x / kCluster) {
    const int kv_head = static_cast<int>(item % f.kv_heads);
    const Place place =
        Locate(f.num_runs, item / f.kv_heads, [&](int r) { return UnitsOf(f, f.runs[r]); });
    if (place.run < 0) return;  // the whole cluster
    const DecodeItem d =
        MakeDecodeItem(f, f.runs[place.run], kv_head, static_cast<int>(place.index));
    const Run& run = d.run;
    const int splits = d.splits, count = d.count, to = d.to;
    const int first_key = d.FirstKey(), tiles = d.Tiles();
    const int keys = tiles == 0 ? 0 : to + 1 - first_key;

    for (int k = thread; k < tiles * kTile; k += kThreads)
      key_rows[k] = static_cast<int>(KeyRow(f, run, min(first_key + k, to)));
    __syncthreads();
    if (rank < tiles) {
      constexpr int kPieces = kD / 8;
#pragma unroll
      for (int i = 0; i < kTile * kPieces / kThreads; ++i) {
        const int key = thread / kPieces + i * (kThreads / kPieces), piece = thread % kPieces;
        const auto* at = static_cast<const __nv_bfloat16*>(f.k) +
                         key_rows[rank * kTile + key] * f.k_stride +
                         static_cast<int64_t>(kv_head) * kD + piece * 8;
        sm90::CopyAsync16(KChunk<kD>(base, key, piece), at, rank * kTile + key < keys ? 16 : 0);
      }
    }
    sm90::CopyCommit();
    {
      constexpr int kPieces = L::kOwn / 8;
      for (int i = thread; i < tiles * kTile * kPieces; i += kThreads) {
        const int key = i / kPieces, piece = i % kPieces;
        const auto* at = static_cast<const __nv_bfloat16*>(f.v) + key_rows[key] * f.v_stride +
                         static_cast<int64_t>(kv_head) * kD + rank * L::kOwn + piece * 8;
        sm90::CopyAsync16(VChunk<kD>(base + L::kV, key, piece), at, key < keys ? 16 : 0);
      }
    }
    sm90::CopyCommit();
    CopyQueryRows<kD, kThreads>(d, q_rows);
    sm90::CopyWait<1>();  // K is there
    __syncthreads();

    // Scores: keys are the 16-row side, a warp owns 32 of them.
    if (rank < tiles) {
      float acc[2][4] = {};
#pragma unroll
      for (int step = 0; step < kD / 16; ++step) {
        const auto* at = q_rows + g * (kD + 8) + step * 16 + 2 * quad;
        const uint32_t b0 = *reinterpret_cast<const uint32_t*>(at);
        const uint32_t b1 = *reinterpret_cast<const uint32_t*>(at + 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t a[4];
          sm90::LoadMatrix4(a,
                            KChunk<kD>(base, warp * 32 + i * 16 + lane % 16, step * 2 + lane / 16));
          sm90::MmaBf16(acc[i], a, b0, b1);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          scores[(2 * quad + e % 2) * kScorePitch + warp * 32 + i * 16 + g + 8 * (e / 2)] =
              acc[i][e];
      }
    }
    sm90::ClusterSync();

    // Softmax, the same in all four: 16 threads a row, 8 neighbouring keys of each tile each.
    {
      const int row = thread / 16, key0 = thread % 16 * 8;
      const int low = d.Low(row), high = d.High(row);
      const uint32_t mine = base + L::kScores + static_cast<uint32_t>(row * kScorePitch + key0) * 4;
      float x[kTiles][8];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        if (t >= tiles) break;
        const uint32_t at = sm90::MapToRank(mine, static_cast<uint32_t>(t));
        const float4 a = sm90::LoadRemote4(at), b = sm90::LoadRemote4(at + 16);
        x[t][0] = a.x, x[t][1] = a.y, x[t][2] = a.z, x[t][3] = a.w;
        x[t][4] = b.x, x[t][5] = b.y, x[t][6] = b.z, x[t][7] = b.w;
      }
      sm90::ClusterArrive();  // what others may read of this CTA: until their own arrival
      float r = -kInfinity;
      const float c7 = __fmul_rn(f.c, 0x1p-7f);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        if (t >= tiles) break;
        const int tile0 = first_key + t * kTile;
        float top = -kInfinity;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int key = tile0 + key0 + i;
          if (key >= low && key <= high) top = fmaxf(top, x[t][i]);
        }
#pragma unroll
        for (int step = 1; step < 16; step *= 2)
          top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, step));
        float scale = 1.0f;
        if (max(low, tile0) <= min(high, tile0 + kTile - 1)) {
          const float next = NextReference(r, __fmul_rn(top, f.c));
          if (r != -kInfinity && next != r) scale = RescaleReference(r, next);
          r = next;
        }
        if (thread % 16 == 0) alpha[t * kRows + row] = scale;
        const float offset = ScoreOffset(r);
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int key = tile0 + key0 + i;
          const float p = Probability(x[t][i], c7, offset);
          x[t][i] = key >= low && key <= high ? p : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) packed[i] = PackBf16(x[t][2 * i], x[t][2 * i + 1]);
        *reinterpret_cast<uint4*>(prob + row * kProbPitch + t * kTile + key0) =
            make_uint4(packed[0], packed[1], packed[2], packed[3]);
      }
      if (thread % 16 == 0) ref[row] = r;
    }
    sm90::CopyWait<0>();  // V is there
    __syncthreads();

    constexpr int kBlocks = L::kOwn / 16;  // of 16 columns, a warp each
    float o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (warp < kBlocks) {
      for (int t = 0; t < tiles; ++t) {
        const float scale[2] = {alpha[t * kRows + 2 * quad], alpha[t * kRows + 2 * quad + 1]};
#pragma unroll
        for (int e = 0; e < 4; ++e) o[e] = __fmul_rn(o[e], scale[e % 2]);
#pragma unroll
        for (int step = 0; step < kTile / 16; ++step) {
          const auto* at = prob + g * kProbPitch + t * kTile + step * 16 + 2 * quad;
          const uint32_t b0 = *reinterpret_cast<const uint32_t*>(at);
          const uint32_t b1 = *reinterpret_cast<const uint32_t*>(at + 8);
          uint32_t a[4];
          const int key = t * kTile + step * 16 + lane % 8 + lane / 16 * 8;
          sm90::LoadMatrix4Transposed(a, VChunk<kD>(base + L::kV, key, warp * 2 + lane / 8 % 2));
          sm90::MmaBf16(o, a, b0, b1);
        }
      }
    } else if (warp == kThreads / 32 - 1) {  // the row sums take P as it meets V
      float l = 0.0f;
      for (int t = 0; t < tiles; ++t) {
        l = __fmul_rn(l, alpha[t * kRows + g]);
#pragma unroll
        for (int b = 0; b < kTile / 8; ++b) {
          const uint32_t pair = *reinterpret_cast<const uint32_t*>(prob + g * kProbPitch +
                                                                   t * kTile + 8 * b + 2 * quad);
          l = __fadd_rn(l, __uint_as_float(pair << 16));
          l = __fadd_rn(l, __uint_as_float(pair & 0xffff0000u));
        }
      }
      l = __fadd_rn(l, __shfl_xor_sync(0xffffffff, l, 1));
      l = __fadd_rn(l, __shfl_xor_sync(0xffffffff, l, 2));
      if (quad == 0) sum[g] = l;
    }
    __syncthreads();
    const auto column = [&](int e) { return rank * L::kOwn + warp * 16 + g + 8 * (e / 2); };
    if (splits > 1) {
      if (rank == 0 && thread < count) {
        f.part_rl[2 * (item * kRows + thread)] = ref[thread];
        f.part_rl[2 * (item * kRows + thread) + 1] = sum[thread];
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 2 * quad + e % 2;
        if (warp < kBlocks && row < count) f.part_o[(item * kRows + row) * kD + column(e)] = o[e];
      }
    } else {
      if (thread < count) {
        const RowEnd end = EndRow(ref[thread], sum[thread], f.sink, d.Head(thread));
        end_f[thread] = end.f;
        end_inverse[thread] = end.inverse;
        if (rank == 0 && f.lse2 != nullptr)
          f.lse2[(run.q_begin + d.Token(thread)) * f.q_heads + d.Head(thread)] = end.lse2;
      }
      __syncthreads();
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 2 * quad + e % 2;
        if (warp >= kBlocks || row >= count) continue;
        float x = o[e];
        if (f.sink != nullptr) x = __fmul_rn(x, end_f[row]);
        x = __fadd_rn(__fmul_rn(x, end_inverse[row]), 0.0f);
        static_cast<__nv_bfloat16*>(f.out)[(run.q_begin + d.Token(row)) * f.out_stride +
                                           static_cast<int64_t>(d.Head(row)) * kD + column(e)] =
            __float2bfloat16_rn(x);
      }
    }
    // No CTA ends or goes on while another reads its scores.
    sm90::ClusterWait();
  }
}

template <int kD>
Status Launch(const Forward& f, int64_t items, cudaStream_t stream) {
  static const cudaError_t prepared =
      cudaFuncSetAttribute(attention_decode_cluster_kernel<kD>,
                           cudaFuncAttributeMaxDynamicSharedMemorySize, Layout<kD>::kBytes);
  TARE_CUDA_RETURN_IF_ERROR(prepared);
  attention_decode_cluster_kernel<kD>
      <<<static_cast<unsigned>(items * kCluster), kThreads, Layout<kD>::kBytes, stream>>>(f);
  TARE_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  return Ok();
}

}  // namespace

bool CanDecodeByCluster(const Forward& f) { return f.kv_split <= kKeys && f.kv_split % kTile == 0; }

Status LaunchDecodeByCluster(const Forward& f, int64_t items, StreamHandle stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return f.head_dim == 64 ? Launch<64>(f, items, s) : Launch<128>(f, items, s);
}

}  // namespace tare::ops::attention::gpu
