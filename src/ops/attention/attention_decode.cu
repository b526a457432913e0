// The Hopper kernel of attention for runs of few rows: bf16, sm90-mma, heads of 64 or 128, key
// tiles of 128. An item is 8 flat rows of one KV head against one split of the keys, so that a long
// sequence fills the device without moving a bit: the splits are the contract's.
// attention_decode_combine.cu joins them in order.
//
// One CTA a multiprocessor takes item after item. Four warps load: tiles of K, then of V, into a
// ring of stages, over the ends of items, so that the memory never waits for the arithmetic. Eight
// warps make the scores of up to four tiles (keys are the 16-row side of mma.sync, the 8 rows the
// other; a warp owns 16 keys of a tile), then P of all of them, a warp or two a row, then the
// output (head elements are the 16-row side, V transposed as it is loaded; a warp owns 16). One
// warp adds the row sums.

#include "ops/attention/attention_decode.cuh"
#include "ops/cuda/cluster.cuh"
#include "ops/cuda/mma_sync.cuh"
#include "ops/cuda/sm90.cuh"
#include "tensor/cuda_status.h"

namespace tare::ops::attention::gpu {
namespace {

constexpr int kTile = kDecodeTile;
constexpr int kRows = kDecodeRows;
constexpr int kMathWarps = 8, kLoadWarps = 4;
constexpr int kLoaders = kLoadWarps * 32;
constexpr int kMeeting = (kMathWarps + 1) * 32;  // who meets at the barrier: all but the loaders
constexpr int kThreads = kMeeting + kLoaders;
constexpr int kStages = 4;  // three and five are as fast
constexpr int kSlots = 4;   // of blocks: one takes two stages at least
static_assert(kMathWarps == kRows && kMathWarps * 16 == kTile && kSlots * 2 > kStages + 2);

// Up to four tiles of an item, as the loaders hand them over. Empty items (a window's edge, a
// block's low rows) are blocks without tiles: their parts are written like any others.
struct Block {
  int64_t q_begin;
  int item, position, kv_head, splits, flat0, count;
  int key, to;  // its first key; the item's last
  int tiles;    // -1: there are no more
  bool first, last;
};

template <int kD>
struct Layout {
  static constexpr int kStage = kTile * kD * 2;
  static constexpr int kScores = kStages * kStage;
  static constexpr int kProb = kScores + kRows * kScorePitch * 4;
  static constexpr int kQ = kProb + kRows * kProbPitch * 2;
  static constexpr int kQSlot = kRows * (kD + 8) * 2;
  static constexpr int kBlocks = kQ + kSlots * kQSlot;
  static constexpr int kBarriers = kBlocks + kSlots * static_cast<int>(sizeof(Block));
  static constexpr int kSmall =
      kBarriers + 2 * kStages * 8;  // f32: alpha [4][8], r, f, inverse [8]
  static constexpr int kBytes = kSmall + (kBlockTiles + 3) * kRows * 4;
  static_assert(kBlocks % 16 == 0 && sizeof(Block) % 8 == 0);
  static_assert(kBytes <= 227 * 1024);
};

// Which stage of the ring is next, and the parity of its phase.
struct Turn {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void Next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// Where a loader stands: a block of an item.
struct Cursor {
  Run run;
  Block block;
};

// The next block. Kept small, as all of the loaders' code is: from a cold cache, instructions come
// no faster than the keys.
__device__ __forceinline__ void Advance(const Forward& f, Cursor& c) {
  Block& b = c.block;
  b.first = b.last;
  int left;
  if (!b.last) {
    b.key += kBlockKeys;
    left = b.to / kTile - b.key / kTile + 1;
  } else {
    b.item += static_cast<int>(gridDim.x);
    const int unit = Divide(b.item, f.by_kv_heads);
    b.kv_head = b.item - unit * f.kv_heads;
    const Place place = Locate(f.num_runs, unit, [&](int r) { return UnitsOf(f, f.runs[r]); });
    b.tiles = -1;
    if (place.run < 0) return;
    c.run = f.runs[place.run];
    const DecodeItem d = MakeDecodeItem(f, c.run, b.kv_head, place.index);
    b.q_begin = c.run.q_begin;
    b.position = static_cast<int>(c.run.position);
    b.splits = d.splits, b.flat0 = d.flat0, b.count = d.count;
    b.key = d.FirstKey(), b.to = d.to;
    left = d.Tiles();
  }
  b.tiles = min(kBlockTiles, left);
  b.last = left <= kBlockTiles;
}

__device__ __forceinline__ DecodeItem ItemOf(const Forward& f, const Block& b) {
  Run run = {};
  run.q_begin = b.q_begin, run.position = b.position;
  return {f, run, b.kv_head, b.splits, b.flat0, b.count, b.key, b.to};
}

// Makes the barrier see that all copies this thread has begun are done; counts as one arrival.
__device__ __forceinline__ void CopyArrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// The loading warps. A lane looks up the row of one key of each tile, a block ahead.
template <int kD>
__device__ __forceinline__ void Load(const Forward& f, uint8_t* shared, uint32_t base) {
  using L = Layout<kD>;
  constexpr int kPieces = kD / 8, kAtOnce = 32 / kPieces;  // keys of a warp's copy
  const int loader = static_cast<int>(threadIdx.x) - kMeeting;
  const int lane = loader % 32, own = loader / 32 * 32;  // keys of a tile: own .. own + 31
  const int piece = lane % kPieces, key0 = lane / kPieces;
  auto* blocks = reinterpret_cast<Block*>(shared + L::kBlocks);
  const uint32_t full = base + L::kBarriers, empty = full + kStages * 8;
  Cursor next;
  next.block = {};
  next.block.item = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x);
  next.block.last = true;
  Block b = {};
  KeyPlace places[kBlockTiles] = {}, next_places[kBlockTiles] = {};
  // Where a lane's copies go in a stage: the xor of ChunkAt repeats after eight keys.
  uint32_t into[8 / kAtOnce];
#pragma unroll
  for (int i = 0; i < 8 / kAtOnce; ++i)
    into[i] = ChunkAt<kD * 2>(base, own + i * kAtOnce + key0, piece);
  Turn turn;
  const auto load = [&](bool value, int n) {
    const auto* from =
        static_cast<const char*>(value ? f.v : f.k) + b.kv_head * (kD * 2) + piece * 16;
    const auto stride = static_cast<int>(value ? f.v_stride : f.k_stride) * 2;
#pragma unroll 1
    for (int t = 0; t < max(b.tiles, 1); ++t) {
      sm90::BarrierWait(empty + turn.stage * 8, turn.parity ^ 1);
      if (!value && t == 0) {
        if (loader == 0) blocks[n % kSlots] = b;
        if (b.first && b.tiles >= 0)
          CopyQueryRows<kD>(ItemOf(f, b), loader, base + L::kQ + n % kSlots * L::kQSlot);
      }
      if (b.tiles > 0) {
        const uint32_t stage = turn.stage * L::kStage;
        const int keys = b.to + 1 - (b.key + t * kTile + own);
        KeyPlace place = places[0];
#pragma unroll
        for (int other = 1; other < kBlockTiles; ++other) {
          if (t == other) place = places[other];
        }
        const int row = RowOf(f, place);
        const auto copy = [&](int i, int bytes) {
          const int at = __shfl_sync(0xffffffff, row, i * kAtOnce + key0);
          sm90::CopyAsync16(into[i % (8 / kAtOnce)] + stage + i / (8 / kAtOnce) * (8 * kD * 2),
                            AtRow(from, at, stride), bytes);
        };
        if (keys >= 32) {
#pragma unroll
          for (int i = 0; i < 32 / kAtOnce; ++i) copy(i, 16);
        } else {
#pragma unroll
          for (int i = 0; i < 32 / kAtOnce; ++i) copy(i, i * kAtOnce + key0 < keys ? 16 : 0);
        }
      }
      CopyArrive(full + turn.stage * 8);
      if (loader == 0) sm90::BarrierArrive(full + turn.stage * 8);  // releases the block
      turn.Next();
    }
  };
  for (int n = -1;; ++n) {
    if (n >= 0) load(false, n);
    if (b.tiles < 0) break;
    Advance(f, next);
#pragma unroll
    for (int t = 0; t < kBlockTiles; ++t) {
      if (t >= next.block.tiles) break;
      next_places[t] =
          FindKey(f, next.run, min(next.block.key + t * kTile + own + lane, next.block.to));
    }
    if (n >= 0) load(true, n);
    b = next.block;
#pragma unroll
    for (int t = 0; t < kBlockTiles; ++t) places[t] = next_places[t];
  }
  sm90::CopyWait<0>();
}

// The warp of the row sums: lane (row, quad lane).
template <int kD>
__device__ __forceinline__ void Sum(const Forward& f, uint8_t* shared) {
  using L = Layout<kD>;
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, quad = lane % 4;
  const auto* prob = reinterpret_cast<const __nv_bfloat16*>(shared + L::kProb);
  const auto* blocks = reinterpret_cast<const Block*>(shared + L::kBlocks);
  float* alpha = reinterpret_cast<float*>(shared + L::kSmall);
  float* ref = alpha + kBlockTiles * kRows;
  float* end_f = ref + kRows;
  float* end_inverse = end_f + kRows;
  float l = 0.0f;
  for (int n = 0;; ++n) {
    sm90::NamedBarrier(1, kMeeting);  // scores are there, so the block is too
    const Block b = blocks[n % kSlots];
    if (b.tiles < 0) return;
    sm90::NamedBarrier(1, kMeeting);  // P is there
    if (b.first) l = 0.0f;
    AddRowSums(prob, alpha, b.tiles, l);
    if (!b.last) continue;
    l = EndRowSum(l);
    const bool writes = quad == 0 && g < b.count;
    if (b.splits > 1) {
      if (writes)
        *reinterpret_cast<float2*>(f.part_rl + 2 * (static_cast<int64_t>(b.item) * kRows + g)) =
            make_float2(ref[g], l);
      continue;
    }
    float r = ref[g];
    const DecodeItem d = ItemOf(f, b);
    if (writes) {
      const RowFactors end = EndFactors(r, l, f.sink, d.Head(g));
      end_f[g] = end.f;
      end_inverse[g] = end.inverse;
    }
    sm90::NamedBarrier(1, kMeeting);
    if (writes && f.lse2 != nullptr)
      f.lse2[(b.q_begin + d.Token(g)) * f.q_heads + d.Head(g)] = EndLse2(r, l);
  }
}

// The warps of the products and of P.
template <int kD>
__device__ __forceinline__ void Multiply(const Forward& f, uint8_t* shared, uint32_t base) {
  using L = Layout<kD>;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int g = lane / 4, quad = lane % 4;
  float* scores = reinterpret_cast<float*>(shared + L::kScores);
  auto* prob = reinterpret_cast<__nv_bfloat16*>(shared + L::kProb);
  const auto* blocks = reinterpret_cast<const Block*>(shared + L::kBlocks);
  float* alpha = reinterpret_cast<float*>(shared + L::kSmall);
  float* ref = alpha + kBlockTiles * kRows;
  const float* end_f = ref + kRows;
  const float* end_inverse = end_f + kRows;
  const uint32_t full = base + L::kBarriers, empty = full + kStages * 8;
  Turn turn;
  const auto wait = [&] { sm90::BarrierWait(full + turn.stage * 8, turn.parity); };
  const auto release = [&] {
    sm90::BarrierArrive(empty + turn.stage * 8);
    turn.Next();
  };
  const bool has_columns = warp * 16 < kD;
  uint32_t q[kD / 16][2];
  float r = -kInfinity;  // of its row
  float o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int n = 0;; ++n) {
    wait();
    const Block b = blocks[n % kSlots];
    if (b.tiles < 0) {
      sm90::NamedBarrier(1, kMeeting);
      return;
    }
    if (b.first) {
      QueryFragments<kD>(
          reinterpret_cast<const __nv_bfloat16*>(shared + L::kQ + n % kSlots * L::kQSlot), q);
      r = -kInfinity;
#pragma unroll
      for (int e = 0; e < 4; ++e) o[e] = 0.0f;
    }
    const int tiles = max(b.tiles, 1);
#pragma unroll 1
    for (int t = 0; t < tiles; ++t) {
      if (t > 0) wait();
      float acc[4];
      Scores<kD>(base + turn.stage * L::kStage, warp * 16, q, acc);
      release();
#pragma unroll
      for (int e = 0; e < 4; ++e)
        scores[(2 * quad + e % 2) * kScorePitch + t * kTile + warp * 16 + g + 8 * (e / 2)] = acc[e];
    }
    sm90::NamedBarrier(1, kMeeting);
    const DecodeItem d = ItemOf(f, b);
    Probabilities(d, b.key, b.tiles, warp, scores, prob, alpha, ref, r);
    sm90::NamedBarrier(1, kMeeting);
#pragma unroll 1
    for (int t = 0; t < tiles; ++t) {
      wait();
      if (has_columns && b.tiles > 0)
        AddValues<kD * 2>(base + turn.stage * L::kStage, 0, warp * 2, prob + t * kTile,
                          alpha + t * kRows, o);
      release();
    }
    if (!b.last) continue;
    if (b.splits > 1) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 2 * quad + e % 2;
        if (has_columns && row < b.count)
          f.part_o[(static_cast<int64_t>(b.item) * kRows + row) * kD + warp * 16 + g +
                   8 * (e / 2)] = o[e];
      }
      continue;
    }
    sm90::NamedBarrier(1, kMeeting);  // the rows' ends are there
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = 2 * quad + e % 2;
      if (!has_columns || row >= b.count) continue;
      float x = o[e];
      if (f.sink != nullptr) x = __fmul_rn(x, end_f[row]);
      x = __fadd_rn(__fmul_rn(x, end_inverse[row]), 0.0f);
      static_cast<__nv_bfloat16*>(
          f.out)[(b.q_begin + d.Token(row)) * f.out_stride +
                 static_cast<int64_t>(d.Head(row)) * kD + warp * 16 + g + 8 * (e / 2)] =
          __float2bfloat16_rn(x);
    }
  }
}

template <int kD>
__global__ void __launch_bounds__(kThreads, 1)
    attention_decode_kernel(const __grid_constant__ Forward f) {
  using L = Layout<kD>;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t base = sm90::SharedAddress(shared);
  sm90::LetDependentsStart();
  if (threadIdx.x == 0) {
    const uint32_t full = base + L::kBarriers, empty = full + kStages * 8;
    for (int s = 0; s < kStages; ++s) {
      sm90::BarrierInit(full + s * 8, kLoaders + 1);
      sm90::BarrierInit(empty + s * 8, kMathWarps * 32);
    }
    sm90::BarrierInitFence();
  }
  __syncthreads();
  if (threadIdx.x >= kMeeting) {
    Load<kD>(f, shared, base);
  } else if (threadIdx.x >= kMathWarps * 32) {
    Sum<kD>(f, shared);
  } else {
    Multiply<kD>(f, shared, base);
  }
}

template <int kD>
Status LaunchItems(const Forward& f, int64_t ctas, cudaStream_t stream) {
  using L = Layout<kD>;
  static const cudaError_t prepared = cudaFuncSetAttribute(
      attention_decode_kernel<kD>, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kBytes);
  TARE_CUDA_RETURN_IF_ERROR(prepared);
  attention_decode_kernel<kD><<<static_cast<unsigned>(ctas), kThreads, L::kBytes, stream>>>(f);
  TARE_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  return Ok();
}

}  // namespace

bool CanDecode(const Params& p, Profile profile, const Forward& f) {
  if (profile != Profile::kSm90Mma || p.dtype != DType::kBF16 || p.softcap != 0.0f) return false;
  if ((p.head_dim != 64 && p.head_dim != 128) || p.kv_tile != kTile) return false;
  const auto aligned = [](const void* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
  };
  // Strides take part in 32-bit products.
  return aligned(f.q, f.q_stride) && aligned(f.k, f.k_stride) && aligned(f.v, f.v_stride) &&
         f.k_stride < int64_t{1} << 30 && f.v_stride < int64_t{1} << 30;
}

Status LaunchDecode(const Forward& f, int64_t items, int64_t rows, StreamHandle stream) {
  int device = 0, sms = 0;
  TARE_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  TARE_CUDA_RETURN_IF_ERROR(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  const auto s = static_cast<cudaStream_t>(stream);
  const int64_t ctas = items < sms ? items : sms;
  bool joined = false;
  if (CanDecodeByCluster(f, items, sms)) {
    TARE_RETURN_IF_ERROR(LaunchDecodeByCluster(f, items, sms, &joined, stream));
  } else {
    TARE_RETURN_IF_ERROR(f.head_dim == 64 ? LaunchItems<64>(f, ctas, s)
                                          : LaunchItems<128>(f, ctas, s));
  }
  return rows == 0 || joined ? Ok() : LaunchDecodeCombine(f, rows, stream);
}

}  // namespace tare::ops::attention::gpu
