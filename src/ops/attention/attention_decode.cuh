#pragma once

// What the decode kernels share: how the rows and splits of runs are counted as items.

#include "ops/attention/attention_gpu.cuh"
#include "ops/cuda/mma_sync.cuh"

namespace tare::ops::attention::gpu {

inline constexpr int kDecodeTile = 128;

// What precedes the first copy of K is all latency, and what the loaders of attention_decode.cu
// execute is time: so divisions go by f's dividers, and counts have 32 bits. Units of a call stay
// below 2^31: those of one split are no more than its rows, the others have parts in memory.
__device__ __forceinline__ int Divide(int n, const Divider& by) {
  const auto x = static_cast<uint32_t>(n);
  return static_cast<int>(by.divisor == 1 ? x : __umulhi(x, by.multiplier) >> by.shift);
}

__device__ __forceinline__ int FirstSplit(const Forward& f, const Run& run) {
  const int first = static_cast<int>(run.position) - f.window + 1;
  return f.window == 0 || first <= 0 ? 0 : Divide(first, f.by_kv_split);
}
// Splits that some row of the run sees. REQUIRES: it has rows.
__device__ __forceinline__ int SplitsOf(const Forward& f, const Run& run) {
  const int last = static_cast<int>(run.position + run.q_rows) - 1;
  return Divide(last, f.by_kv_split) - FirstSplit(f, run) + 1;
}

// Blocks of rows of a run that decode takes.
__device__ __forceinline__ int BlocksOf(const Forward& f, const Run& run) {
  const int64_t flat = FlatRows(run, f.group);
  return flat > f.decode_rows ? 0 : static_cast<int>(flat + kDecodeRows - 1) / kDecodeRows;
}
// Its items for one KV head: the blocks' splits. An item's index times kDecodeRows is where its
// rows' parts stand in part_o and part_rl.
__device__ __forceinline__ int UnitsOf(const Forward& f, const Run& run) {
  const int blocks = BlocksOf(f, run);
  return blocks == 0 ? 0 : SplitsOf(f, run) * blocks;
}

// Where a key lies: its page, and what to add to the page's first row; packed keys have page 0. The
// page may still be on its way when RowOf is not asked yet.
struct KeyPlace {
  int page, offset;
};
__device__ __forceinline__ KeyPlace FindKey(const Forward& f, const Run& run, int key) {
  if (f.block_table == nullptr) return {0, static_cast<int>(run.kv_begin) + key};
  const int page = Divide(key, f.by_page_size);
  return {f.block_table[run.block_row * f.max_pages + page], key - page * f.page_size};
}
__device__ __forceinline__ int RowOf(const Forward& f, const KeyPlace& place) {
  return place.page * f.page_size + place.offset;
}

// from + row * stride in bytes, as one instruction: nvcc makes six of it.
__device__ __forceinline__ const char* AtRow(const char* from, int row, int stride) {
  uint64_t at;
  asm("mad.wide.s32 %0, %1, %2, %3;"
      : "=l"(at)
      : "r"(row), "r"(stride), "l"(reinterpret_cast<uint64_t>(from)));
  return reinterpret_cast<const char*>(at);
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
    return Divide(flat0 + min(row, count - 1), f.by_group);
  }
  __device__ __forceinline__ int Head(int row) const {
    return kv_head * f.group + flat0 + min(row, count - 1) - Token(row) * f.group;
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

// Block `block` of `run` against the split `index` of those it sees. It may hold no key that the
// block's rows see (a window's edge, a block's low rows).
__device__ __forceinline__ DecodeItem MakeDecodeItem(const Forward& f, const Run& run, int kv_head,
                                                     int splits, int block, int index) {
  DecodeItem item{f, run, kv_head, splits, block * kDecodeRows, 0, 0, 0};
  item.count = min(kDecodeRows, static_cast<int>(FlatRows(run, f.group)) - item.flat0);
  const int split = FirstSplit(f, run) + index;
  item.from = max(split * f.kv_split, item.Low(0) / kDecodeTile * kDecodeTile);
  item.to = min((split + 1) * f.kv_split - 1, item.High(item.count - 1));
  return item;
}
// The unit `index` of `run`.
__device__ __forceinline__ DecodeItem MakeDecodeItem(const Forward& f, const Run& run, int kv_head,
                                                     int index) {
  const int splits = SplitsOf(f, run), block = index < splits ? 0 : index / splits;
  return MakeDecodeItem(f, run, kv_head, splits, block, index - block * splits);
}

// The item's rows of q into shared memory, kD + 8 elements apart; asynchronous.
template <int kD>
__device__ __forceinline__ void CopyQueryRows(const DecodeItem& item, int thread, uint32_t to) {
  if (thread >= kDecodeRows * kD / 8) return;
  const int row = thread / (kD / 8), piece = thread % (kD / 8);
  sm90::CopyAsync16(to + row * (kD + 8) * 2 + piece * 16,
                    static_cast<const __nv_bfloat16*>(item.f.q) +
                        (item.run.q_begin + item.Token(row)) * item.f.q_stride +
                        static_cast<int64_t>(item.Head(row)) * kD + piece * 8,
                    16);
}

// Address of 16 bytes `chunk` of a row of kRowBytes; the xor spreads eight rows over all banks.
template <int kRowBytes>
__device__ __forceinline__ uint32_t ChunkAt(uint32_t base, int row, int chunk) {
  constexpr int kChunks = kRowBytes / 16 < 8 ? kRowBytes / 16 : 8, kPerLine = 8 / kChunks;
  return base +
         static_cast<uint32_t>(row * kRowBytes + ((chunk ^ (row / kPerLine % kChunks)) * 16));
}

// B fragments of the item's rows of q: column lane / 4, k pairs of lane % 4.
template <int kD>
__device__ __forceinline__ void QueryFragments(const __nv_bfloat16* q_rows,
                                               uint32_t (&fragments)[kD / 16][2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int step = 0; step < kD / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      fragments[step][i] = *reinterpret_cast<const uint32_t*>(q_rows + lane / 4 * (kD + 8) +
                                                              step * 16 + 8 * i + 2 * (lane % 4));
  }
}

// The scores of 16 keys: element e of a lane is key lane / 4 + 8 (e / 2), row 2 (lane % 4) + e % 2.
template <int kD>
__device__ __forceinline__ void Scores(uint32_t keys, int first,
                                       const uint32_t (&fragments)[kD / 16][2], float (&acc)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int e = 0; e < 4; ++e) acc[e] = 0.0f;
#pragma unroll
  for (int step = 0; step < kD / 16; ++step) {
    uint32_t a[4];
    sm90::LoadMatrix4(a, ChunkAt<kD * 2>(keys, first + lane % 16, step * 2 + lane / 16));
    sm90::MmaBf16(acc, a, fragments[step][0], fragments[step][1]);
  }
}

inline constexpr int kBlockTiles = 4;  // whose P is made at once
inline constexpr int kBlockKeys = kBlockTiles * kDecodeTile;
inline constexpr int kScorePitch = kBlockKeys + 4;  // f32
inline constexpr int kProbPitch = kBlockKeys + 8;   // bf16

// P of one row by a warp, four neighbouring keys of each tile a lane: `scores` and `prob` are the
// row's, `alpha` its column of [kBlockTiles][kDecodeRows]; r goes on. With a `share` of 0 or 1 two
// warps have the row: each makes its two tiles of P; -1 makes all.
template <bool kMasked>
__device__ __forceinline__ void RowProbabilities(float c, int low, int high, int first_key,
                                                 int tiles, int share, const float* scores,
                                                 __nv_bfloat16* prob, float* alpha, float& r) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto sees = [&](int t, int i) {
    const int key = first_key + t * kDecodeTile + lane * 4 + i;
    return !kMasked || (key >= low && key <= high);
  };
  float x[kBlockTiles][4], top[kBlockTiles];
#pragma unroll
  for (int t = 0; t < kBlockTiles; ++t) {
    top[t] = -kInfinity;
    if (t >= tiles) continue;
    const float4 four = *reinterpret_cast<const float4*>(scores + t * kDecodeTile + lane * 4);
    x[t][0] = four.x, x[t][1] = four.y, x[t][2] = four.z, x[t][3] = four.w;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (sees(t, i)) top[t] = fmaxf(top[t], x[t][i]);
    }
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int t = 0; t < kBlockTiles; ++t)
      top[t] = fmaxf(top[t], __shfl_xor_sync(0xffffffff, top[t], step));
  }
  float ref[kBlockTiles], from = -kInfinity, to = -kInfinity;
#pragma unroll
  for (int t = 0; t < kBlockTiles; ++t) {
    const int tile0 = first_key + t * kDecodeTile;
    if (t < tiles && (!kMasked || max(low, tile0) <= min(high, tile0 + kDecodeTile - 1))) {
      if (lane == t) from = r;
      r = NextReference(r, __fmul_rn(top[t], c));
      if (lane == t) to = r;
    }
    ref[t] = r;
  }
  // Lane t has tile t's.
  const float scale = from != -kInfinity && to != from ? RescaleReference(from, to) : 1.0f;
  if (lane < tiles && share != 1) alpha[lane * kDecodeRows] = scale;
  const float c7 = __fmul_rn(c, 0x1p-7f);
#pragma unroll
  for (int t = 0; t < kBlockTiles; ++t) {
    if (t >= tiles) break;
    if (share == 1 - t / 2) continue;
    const float offset = ScoreOffset(ref[t]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float p = Probability(x[t][i], c7, offset);
      x[t][i] = sees(t, i) ? p : 0.0f;
    }
    *reinterpret_cast<uint2*>(prob + t * kDecodeTile + lane * 4) =
        make_uint2(PackBf16(x[t][0], x[t][1]), PackBf16(x[t][2], x[t][3]));
  }
}

// P of an item's tiles from `first_key` on, by eight warps; warp `warp` has row warp % 4 where the
// item has no more than four, else row `warp`, with reference r, which it leaves in `ref` too.
__device__ __forceinline__ void Probabilities(const DecodeItem& d, int first_key, int tiles,
                                              int warp, const float* scores, __nv_bfloat16* prob,
                                              float* alpha, float* ref, float& r) {
  static_assert(kDecodeRows == 8);
  const bool both = d.count <= 4;
  const int row = both ? warp % 4 : warp, share = both ? warp / 4 : -1;
  if (row >= d.count) return;
  scores += row * kScorePitch, prob += row * kProbPitch, alpha += row;
  const int low = d.Low(row), high = d.High(row);
  if (low <= first_key && first_key + tiles * kDecodeTile - 1 <= high) {
    RowProbabilities<false>(d.f.c, low, high, first_key, tiles, share, scores, prob, alpha, r);
  } else {
    RowProbabilities<true>(d.f.c, low, high, first_key, tiles, share, scores, prob, alpha, r);
  }
  if (threadIdx.x % 32 == 0 && share != 1) ref[row] = r;
}

// O of 16 head elements goes on over the keys of a tile: element e of a lane is head element
// lane / 4 + 8 (e / 2), row 2 (lane % 4) + e % 2. `prob` and `alpha` are the tile's.
template <int kRowBytes>
__device__ __forceinline__ void AddValues(uint32_t values, int first_key, int chunk,
                                          const __nv_bfloat16* prob, const float* alpha,
                                          float (&o)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, quad = lane % 4;
  const float2 scale = *reinterpret_cast<const float2*>(alpha + 2 * quad);
  o[0] = __fmul_rn(o[0], scale.x), o[1] = __fmul_rn(o[1], scale.y);
  o[2] = __fmul_rn(o[2], scale.x), o[3] = __fmul_rn(o[3], scale.y);
#pragma unroll
  for (int step = 0; step < kDecodeTile / 16; ++step) {
    const auto* at = prob + g * kProbPitch + step * 16 + 2 * quad;
    const uint32_t b0 = *reinterpret_cast<const uint32_t*>(at);
    const uint32_t b1 = *reinterpret_cast<const uint32_t*>(at + 8);
    uint32_t a[4];
    const int key = first_key + step * 16 + lane % 8 + lane / 16 * 8;
    sm90::LoadMatrix4Transposed(a, ChunkAt<kRowBytes>(values, key, chunk + lane / 8 % 2));
    sm90::MmaBf16(o, a, b0, b1);
  }
}

// The row sums go on over the tiles of a block, lane (row, quad lane).
__device__ __forceinline__ void AddRowSums(const __nv_bfloat16* prob, const float* alpha, int tiles,
                                           float& l) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, quad = lane % 4;
#pragma unroll 1
  for (int t = 0; t < tiles; ++t) {
    l = __fmul_rn(l, alpha[t * kDecodeRows + g]);
#pragma unroll
    for (int i = 0; i < kDecodeTile / 8; ++i) {
      const uint32_t pair = *reinterpret_cast<const uint32_t*>(prob + g * kProbPitch +
                                                               t * kDecodeTile + 8 * i + 2 * quad);
      l = __fadd_rn(l, __uint_as_float(pair << 16));
      l = __fadd_rn(l, __uint_as_float(pair & 0xffff0000u));
    }
  }
}
// Their end, the same in all four lanes of a row.
__device__ __forceinline__ float EndRowSum(float l) {
  l = __fadd_rn(l, __shfl_xor_sync(0xffffffff, l, 1));
  return __fadd_rn(l, __shfl_xor_sync(0xffffffff, l, 2));
}

// Few items, each by a cluster: for calls that would leave most of the device idle. With them the
// splits of a run are joined too where no run can have more than two, and `joined` says so.
bool CanDecodeByCluster(const Forward& f, int64_t items, int sms);
Status LaunchDecodeByCluster(const Forward& f, int64_t items, int sms, bool* joined,
                             StreamHandle stream);

// The joining of splits: `rows` rows times heads of runs that may have more than one.
Status LaunchDecodeCombine(const Forward& f, int64_t rows, StreamHandle stream);

}  // namespace tare::ops::attention::gpu
