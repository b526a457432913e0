// Decode for few sequences: a cluster takes what one CTA of attention_decode.cu does one tile after
// the other, 8 flat rows of one KV head against one split of at most four key tiles. Each of its
// kC CTAs makes the scores of a part of the tiles and gives them to the others; all do the same
// softmax; each then multiplies P with a part of V's columns over all tiles. Where no run has more
// than two splits, a cluster takes both, and joins them in their order. Every chain is the
// contract's, so no bit depends on which kernel ran; but everything a split needs is under way at
// once.

#include "ops/attention/attention_decode.cuh"
#include "ops/cuda/cluster.cuh"
#include "ops/cuda/mma_sync.cuh"
#include "ops/cuda/sm90.cuh"
#include "tensor/cuda_status.h"

namespace tare::ops::attention::gpu {
namespace {

constexpr int kTile = kDecodeTile;
constexpr int kRows = kDecodeRows;
constexpr int kMathWarps = 8;
constexpr int kThreads = (kMathWarps + 1) * 32;  // and the warp of the row sums
static_assert(kMathWarps == kRows && kMathWarps * 16 == kTile);

template <int kD, int kC>
struct Layout {
  static constexpr int kTiles = kBlockTiles / kC;  // whose scores a CTA makes
  static constexpr int kOwn = kD / kC;             // V's columns of a CTA
  static constexpr int kV = kTiles * kTile * kD * 2;
  static constexpr int kScores = kV + kBlockKeys * kOwn * 2;
  static constexpr int kProb = kScores + kRows * kScorePitch * 4;
  static constexpr int kQ = kProb + kRows * kProbPitch * 2;
  static constexpr int kJoinO = kQ + kRows * (kD + 8) * 2;  // float4 a thread of the other split
  static constexpr int kJoinRl = kJoinO + kOwn / 16 * 32 * 16;  // float2 [8]
  static constexpr int kJoinBytes = kJoinRl + kRows * 8 - kJoinO;
  static constexpr int kBarriers = kJoinRl + kRows * 8;  // scores, join
  static constexpr int kSmall = kBarriers + 16;  // f32: alpha [4][8], r, f, inverse, a, b [8]
  static constexpr int kBytes = kSmall + (kBlockTiles + 5) * kRows * 4;
};

// Stores to a CTA of the cluster; `barrier` there is told of their bytes.
__device__ __forceinline__ void StoreAsync4(uint32_t address, const float (&x)[4],
                                            uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void StoreAsync2(uint32_t address, float x, float y, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          address),
      "f"(x), "f"(y), "r"(barrier)
      : "memory");
}

// A cluster: kJ splits by kC CTAs each. With kJ = 2 no run has more than two.
template <int kD, int kC, int kJ>
__global__ void __launch_bounds__(kThreads, 1)
    attention_decode_cluster_kernel(const __grid_constant__ Forward f) {
  using L = Layout<kD, kC>;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t base = sm90::SharedAddress(shared);
  float* scores = reinterpret_cast<float*>(shared + L::kScores);
  auto* prob = reinterpret_cast<__nv_bfloat16*>(shared + L::kProb);
  float* alpha = reinterpret_cast<float*>(shared + L::kSmall);
  float* ref = alpha + kBlockTiles * kRows;
  float* end_f = ref + kRows;
  float* end_inverse = end_f + kRows;
  float* join_a = end_inverse + kRows;
  float* join_b = join_a + kRows;
  const uint32_t scores_here = base + L::kBarriers, join_here = scores_here + 8;

  sm90::LetDependentsStart();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int g = lane / 4, quad = lane % 4;
  const int rank = static_cast<int>(sm90::ClusterRank()), part = rank % kC, half = rank / kC;
  if (thread == 0) {
    sm90::BarrierInit(scores_here, 1);
    sm90::BarrierInit(join_here, 1);
    sm90::BarrierInitFence();
  }
  sm90::ClusterArriveRelaxed();  // begun: others may write here from now on
  uint32_t parity = 0, join_parity = 0;
  // Items one after the other: a replayed graph may meet longer sequences than it was captured
  // with.
#pragma unroll 1
  for (int item = static_cast<int>(blockIdx.x) / (kC * kJ);;
       item += static_cast<int>(gridDim.x) / (kC * kJ)) {
    const int unit = Divide(item, f.by_kv_heads), kv_head = item - unit * f.kv_heads;
    const Place place = Locate(f.num_runs, unit, [&](int r) {
      return kJ == 1 ? UnitsOf(f, f.runs[r]) : BlocksOf(f, f.runs[r]);
    });
    if (place.run < 0) break;  // the whole cluster
    const Run run = f.runs[place.run];
    const int splits = SplitsOf(f, run);
    const bool idle = half >= splits;  // there is no second split
    const DecodeItem d =
        kJ == 1 ? MakeDecodeItem(f, run, kv_head, place.index)
                : MakeDecodeItem(f, run, kv_head, splits, place.index, min(half, splits - 1));
    const int count = d.count, first_key = d.FirstKey(), tiles = idle ? 0 : d.Tiles();
    const int keys = tiles == 0 ? 0 : d.to + 1 - first_key;
    const int own_first = part * L::kTiles, own_last = min(own_first + L::kTiles, tiles);
    const int own_tiles = max(own_last - own_first, 0);
    const auto load = [&]<int kColumns, int kCount>(const void* data, int64_t row_stride,
                                                    int column, int row, int first, int to_row,
                                                    uint32_t to) {
      // kCount keys of the warp, the first of them `first`; their rows are the lanes' `row`.
      constexpr int kRowBytes = kColumns * 2, kPieces = kRowBytes / 16, kAtOnce = 32 / kPieces;
      const auto* from =
          static_cast<const char*>(data) + (kv_head * kD + column) * 2 + lane % kPieces * 16;
      const auto stride = static_cast<int>(row_stride) * 2;
#pragma unroll
      for (int i = 0; i < kCount; i += kAtOnce) {
        const int key = i + lane / kPieces;
        sm90::CopyAsync16(ChunkAt<kRowBytes>(to, to_row + key, lane % kPieces),
                          AtRow(from, __shfl_sync(0xffffffff, row, key), stride),
                          first + key < keys ? 16 : 0);
      }
    };
    if (warp < kMathWarps) {
      // A warp brings 16 keys of each own tile of K, and 64 keys of V.
      KeyPlace at_k[L::kTiles], at_v[2];
#pragma unroll
      for (int t = 0; t < L::kTiles; ++t)
        at_k[t] =
            FindKey(f, run, min(first_key + (own_first + t) * kTile + warp * 16 + lane % 16, d.to));
#pragma unroll
      for (int i = 0; i < 2; ++i)
        at_v[i] = FindKey(f, run, min(first_key + warp * 64 + i * 32 + lane, d.to));
      CopyQueryRows<kD>(d, thread, base + L::kQ);
#pragma unroll
      for (int t = 0; t < L::kTiles; ++t) {
        if (t < own_tiles)
          load.template operator()<kD, 16>(f.k, f.k_stride, 0, RowOf(f, at_k[t]),
                                           (own_first + t) * kTile + warp * 16,
                                           t * kTile + warp * 16, base);
      }
      sm90::CopyCommit();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (warp * 64 < tiles * kTile)
          load.template operator()<L::kOwn, 32>(f.v, f.v_stride, part * L::kOwn, RowOf(f, at_v[i]),
                                                warp * 64 + i * 32, warp * 64 + i * 32,
                                                base + L::kV);
      }
      sm90::CopyCommit();
    }
    sm90::CopyWait<1>();  // K is there
    sm90::ClusterWait();  // and the others are done with the item before
    __syncthreads();
    if (thread == 0) {
      sm90::BarrierArriveExpect(scores_here,
                                static_cast<uint32_t>((tiles - own_tiles) * kTile * kRows * 4));
      if (kJ == 2 && half == 0 && splits > 1)
        sm90::BarrierArriveExpect(join_here, static_cast<uint32_t>(L::kJoinBytes));
    }
    if (warp < kMathWarps) {
      uint32_t q[kD / 16][2];
      QueryFragments<kD>(reinterpret_cast<const __nv_bfloat16*>(shared + L::kQ), q);
#pragma unroll
      for (int t = 0; t < L::kTiles; ++t) {
        float acc[4];
        if (t >= own_tiles) break;
        Scores<kD>(base + t * kTile * kD * 2, warp * 16, q, acc);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          scores[(2 * quad + e % 2) * kScorePitch + (own_first + t) * kTile + warp * 16 + g +
                 8 * (e / 2)] = acc[e];
      }
    }
    __syncthreads();
    if (warp < kMathWarps) {
      for (int t = own_first; t < own_last; ++t) {
        const int at = warp * kScorePitch + t * kTile + lane * 4;
        const float4 four = *reinterpret_cast<const float4*>(scores + at);
        const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int other = 1; other < kC; ++other) {
          const auto to = static_cast<uint32_t>(half * kC + (part + other) % kC);
          StoreAsync4(sm90::MapToRank(base + L::kScores + static_cast<uint32_t>(at) * 4, to), x,
                      sm90::MapToRank(scores_here, to));
        }
      }
    }
    // Softmax, the same in all CTAs of the split.
    sm90::BarrierWait(scores_here, parity);
    if (warp < kMathWarps) {
      float r = -kInfinity;
      Probabilities(d, first_key, tiles, warp, scores, prob, alpha, ref, r);
      sm90::CopyWait<0>();  // V is there
    }
    parity ^= 1;
    __syncthreads();

    const bool has_columns = warp * 16 < L::kOwn;
    float o[4] = {0.0f, 0.0f, 0.0f, 0.0f}, l = 0.0f;
    if (has_columns) {
#pragma unroll 1
      for (int t = 0; t < tiles; ++t)
        AddValues<L::kOwn * 2>(base + L::kV, t * kTile, warp * 2, prob + t * kTile,
                               alpha + t * kRows, o);
    } else if (warp == kMathWarps) {
      AddRowSums(prob, alpha, tiles, l);
      l = EndRowSum(l);
    }
    const int column = part * L::kOwn + warp * 16 + g;  // and that + 8
    if (kJ == 1 && splits > 1) {
      const int64_t slot = static_cast<int64_t>(item) * kRows;
      if (warp == kMathWarps && part == 0 && quad == 0 && g < count)
        *reinterpret_cast<float2*>(f.part_rl + 2 * (slot + g)) = make_float2(ref[g], l);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 2 * quad + e % 2;
        if (has_columns && row < count) f.part_o[(slot + row) * kD + column + 8 * (e / 2)] = o[e];
      }
    } else if (kJ == 2 && half == 1) {  // the second split goes to the CTAs of the first
      if (!idle) {
        const auto to = static_cast<uint32_t>(part);
        const uint32_t barrier = sm90::MapToRank(join_here, to);
        if (has_columns)
          StoreAsync4(sm90::MapToRank(base + L::kJoinO + static_cast<uint32_t>(thread) * 16, to), o,
                      barrier);
        if (warp == kMathWarps && quad == 0)
          StoreAsync2(sm90::MapToRank(base + L::kJoinRl + static_cast<uint32_t>(g) * 8, to), ref[g],
                      l, barrier);
      }
    } else {
      const bool join = kJ == 2 && splits > 1;
      float r = ref[g];
      if (join && (has_columns || warp == kMathWarps)) sm90::BarrierWait(join_here, join_parity);
      if (join) join_parity ^= 1;
      if (warp == kMathWarps && quad == 0 && g < count) {
        if (join) {
          // The first split joins the row that saw nothing, then the second that.
          const float2 second = *reinterpret_cast<const float2*>(shared + L::kJoinRl + g * 8);
          float row_r = -kInfinity, row_l = 0.0f, a = 1.0f;
          Meeting m;
#pragma unroll 1
          for (int s = 0; s < 2; ++s) {
            m = Meet(row_r, row_l, s == 0 ? r : second.x, s == 0 ? l : second.y);
            a = s == 0 ? m.b : __fmul_rn(a, m.a);
          }
          join_a[g] = a, join_b[g] = m.b;
          r = row_r, l = row_l;
        }
        const RowFactors end = EndFactors(r, l, f.sink, d.Head(g));
        end_f[g] = end.f;
        end_inverse[g] = end.inverse;
      }
      __syncthreads();
      const auto* other = reinterpret_cast<const float*>(shared + L::kJoinO) + thread * 4;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 2 * quad + e % 2;
        if (!has_columns || row >= count) continue;
        float x = o[e];
        if (join) x = __fmaf_rn(other[e], join_b[row], __fmul_rn(x, join_a[row]));
        if (f.sink != nullptr) x = __fmul_rn(x, end_f[row]);
        x = __fadd_rn(__fmul_rn(x, end_inverse[row]), 0.0f);
        static_cast<__nv_bfloat16*>(
            f.out)[(run.q_begin + d.Token(row)) * f.out_stride +
                   static_cast<int64_t>(d.Head(row)) * kD + column + 8 * (e / 2)] =
            __float2bfloat16_rn(x);
      }
      if (warp == kMathWarps && quad == 0 && g < count && part == 0 && f.lse2 != nullptr)
        f.lse2[(run.q_begin + d.Token(g)) * f.q_heads + d.Head(g)] = EndLse2(r, l);
    }
    __syncthreads();  // the next item finds shared memory free
    sm90::ClusterArriveRelaxed();
  }
  sm90::ClusterWait();
}

template <int kD, int kC, int kJ>
Status Launch(const Forward& f, int64_t clusters, cudaStream_t stream) {
  constexpr int kBytes = Layout<kD, kC>::kBytes;
  static const cudaError_t prepared =
      cudaFuncSetAttribute(attention_decode_cluster_kernel<kD, kC, kJ>,
                           cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  TARE_CUDA_RETURN_IF_ERROR(prepared);
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kC * kJ, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(clusters * kC * kJ));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  TARE_CUDA_RETURN_IF_ERROR(
      cudaLaunchKernelEx(&config, attention_decode_cluster_kernel<kD, kC, kJ>, f));
  return Ok();
}

template <int kD>
Status LaunchOf(const Forward& f, int64_t items, int sms, bool* joined, cudaStream_t stream) {
  *joined = f.most_splits == 2 && 8 * f.decode_blocks <= sms;
  if (*joined) return Launch<kD, 4, 2>(f, f.decode_blocks, stream);
  if (4 * items <= sms) return Launch<kD, 4, 1>(f, items, stream);
  return Launch<kD, 2, 1>(f, items, stream);
}

}  // namespace

bool CanDecodeByCluster(const Forward& f, int64_t items, int sms) {
  return f.kv_split <= kBlockKeys && f.kv_split % kTile == 0 && 2 * items <= sms;
}

Status LaunchDecodeByCluster(const Forward& f, int64_t items, int sms, bool* joined,
                             StreamHandle stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return f.head_dim == 64 ? LaunchOf<64>(f, items, sms, joined, s)
                          : LaunchOf<128>(f, items, sms, joined, s);
}

}  // namespace tare::ops::attention::gpu
