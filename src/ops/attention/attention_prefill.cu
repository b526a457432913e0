// The Hopper kernel of attention for runs of many rows: bf16, sm90-mma, heads of 64 or 128, key
// tiles of 128. A CTA takes 128 flat rows of one KV head: one thread loads (tensor copies), two
// warpgroups of 64 rows each multiply.
//
// A warpgroup's turn for tile j: issue S_j = Q K_j, then O += P_{j-1} V_{j-1}, and make P_j. The
// two warpgroups take turns at issuing their products (hardware barriers 3 and 4), so that one's
// softmax hides under the other's products. The largest scores are searched for in a split's first
// tile; in the others P is made with the references as they are, and only a warp whose row sums
// tell that a score passed the slack makes its scores again (by mma.sync, from the K still there)
// and moves its references. The sum over finished splits waits in shared memory, in a layout where
// each thread meets only its own elements.

#include "ops/attention/attention_gpu.cuh"
#include "ops/cuda/descriptors.cuh"
#include "ops/cuda/mma_sync.cuh"
#include "ops/cuda/sm90.cuh"
#include "ops/cuda/tensor_map.h"
#include "ops/cuda/wgmma.cuh"
#include "tensor/cuda_status.h"

namespace tare::ops::attention::gpu {
namespace {

constexpr int kTile = 128;
constexpr int kStages = 2;
constexpr int kThreads = 3 * 128;
// Below what a lane's row sum is when one of its scores passes the slack, for references up to
// kReferenceLimit: farther ones are rounded too coarsely to tell.
constexpr float kSumLimit = 0x1.fp+13f;
constexpr float kReferenceLimit = 0x1p+15f;
static_assert(kSlack == 14.0f);

template <int kD>
struct Layout {
  static constexpr int kChunks = kD / 64;
  static constexpr int kQ = kChunks * 64 * 128;      // bytes, one warpgroup
  static constexpr int kKv = kChunks * kTile * 128;  // bytes, one stage of K or V
  static constexpr int kTotal = 64 * kD * 4;         // bytes, one warpgroup
  static constexpr int kTotalAt = 2 * kQ + 2 * kStages * kKv;
  static constexpr int kBarriersAt = kTotalAt + 2 * kTotal;
  static constexpr int kBytes = 1024 + kBarriersAt + (1 + 4 * kStages) * 8;
  static_assert(kBytes <= 232448);
};

struct PrefillArgs {
  Forward f;
  int tokens_per_group;  // tokens of one warpgroup
  int box_rows;          // keys of one tensor copy: kTile, or the page size
  int group_inverse;     // 2^16 / group, rounded up
  // row / group of a warpgroup's row.
  __device__ __forceinline__ int Token(int row) const { return row * group_inverse >> 16; }
};

struct Stage {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void Next() {
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// What a warpgroup knows of its two rows (g and g + 8 of its warp) and carries through a split.
struct Rows {
  int high[2], low[2];  // visible keys
  float r[2], l[2];
};

// The largest visible scores of this lane's two rows.
template <bool kMasked>
__device__ __forceinline__ void LargestScores(const float (&s)[kTile / 2], const Rows& rows,
                                              int tile0, int lane, float (&top)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int from = rows.low[half] - tile0, to = rows.high[half] - tile0;
    float part[2] = {-kInfinity, -kInfinity};
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = 8 * j + 2 * (lane % 4) + e;
        if (!kMasked || (column >= from && column <= to))
          part[e] = fmaxf(part[e], s[4 * j + 2 * half + e]);
      }
    }
    top[half] = fmaxf(part[0], part[1]);
  }
}

// Of the rows' four lanes. A row that sees nothing of this tile keeps its reference.
template <bool kMasked>
__device__ __forceinline__ void NextReferences(float (&top)[2], Rows& rows, int tile0, float c) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int from = rows.low[half] - tile0, to = rows.high[half] - tile0;
    top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffff, top[half], 1));
    top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffff, top[half], 2));
    if (!kMasked || max(from, 0) <= min(to, kTile - 1))
      rows.r[half] = NextReference(rows.r[half], __fmul_rn(top[half], c));
  }
}

// The references after a split's first tile.
template <bool kMasked>
__device__ __forceinline__ void FirstReference(const float (&s)[kTile / 2], Rows& rows, int tile0,
                                               int lane, float c) {
  float top[2];
  LargestScores<kMasked>(s, rows, tile0, lane, top);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows.r[half] = -kInfinity;
    rows.l[half] = 0.0f;
  }
  NextReferences<kMasked>(top, rows, tile0, c);
}

// The references after another tile, by its largest scores; rows.l is rescaled. True when some row
// of the warp moved: then O is to be multiplied by scale (of the two rows).
template <bool kMasked>
__device__ __forceinline__ bool MoveReference(const float (&s)[kTile / 2], Rows& rows, int tile0,
                                              int lane, float c, float (&scale)[2]) {
  float top[2];
  LargestScores<kMasked>(s, rows, tile0, lane, top);
  // After the first tile of a split no score passes the slack, almost always, and a finite
  // reference stays what it is: one vote instead of the quads' maxima. (Both factors are positive,
  // so a row's largest product is that of its largest score.)
  const bool stays = __fmul_rn(top[0], c) <= rows.r[0] + kSlack &&
                     __fmul_rn(top[1], c) <= rows.r[1] + kSlack && rows.r[0] > -kInfinity &&
                     rows.r[1] > -kInfinity && rows.r[0] < kInfinity && rows.r[1] < kInfinity;
  if (__all_sync(0xffffffff, stays)) return false;
  const float old[2] = {rows.r[0], rows.r[1]};
  NextReferences<kMasked>(top, rows, tile0, c);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    scale[half] = old[half] == -kInfinity ? 1.0f : RescaleReference(old[half], rows.r[half]);
    rows.l[half] = __fmul_rn(rows.l[half], scale[half]);
  }
  return __any_sync(0xffffffff, rows.r[0] != old[0] || rows.r[1] != old[1]) != 0;
}

// P of a tile, rounded, as the A operand of the next product, and the row sums after it. Not before
// the product that reads the last P is done: ptxas serialises all of them when its registers are
// written meanwhile.
template <bool kMasked>
__device__ __forceinline__ void MakeProbabilities(const float (&s)[kTile / 2],
                                                  uint32_t (&p)[kTile / 16][4], Rows& rows,
                                                  int tile0, int lane, float c7) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int from = rows.low[half] - tile0, to = rows.high[half] - tile0;
    const float offset = ScoreOffset(rows.r[half]);
    float l = rows.l[half];
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        x[e] = Probability(s[4 * j + 2 * half + e], c7, offset);
        if constexpr (kMasked) {
          const int column = 8 * j + 2 * (lane % 4) + e;
          if (column < from || column > to) x[e] = 0.0f;
        }
      }
      // The row sum takes P as it meets V.
      const uint32_t pair = PackBf16(x[0], x[1]);
      p[j / 2][j % 2 * 2 + half] = pair;
      l = __fadd_rn(l, __uint_as_float(pair << 16));
      l = __fadd_rn(l, __uint_as_float(pair & 0xffff0000u));
    }
    rows.l[half] = l;
  }
}

// The sum over the splits so far: r and l in registers, O in shared memory.
struct Total {
  float r[2], l[2];
  bool started = false;
};

// Takes the finished split (o, rows) into the total. The last one stays in o.
template <int kD, bool kLast>
__device__ __forceinline__ void EndSplit(float (&o)[kD / 2], const float (&r)[2],
                                         const float (&l)[2], Total& total, uint32_t total_at,
                                         int thread) {
  float a[2], b[2], sum[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    sum[half] = __fadd_rn(l[half], __shfl_xor_sync(0xffffffff, l[half], 1));
#pragma unroll
  for (int half = 0; half < 2; ++half)
    sum[half] = __fadd_rn(sum[half], __shfl_xor_sync(0xffffffff, sum[half], 2));
  if (!total.started) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total.r[half] = r[half];
      total.l[half] = sum[half];
    }
  } else {
    MeetRows(total.r, total.l, r, sum, a, b);
  }
  const uint32_t at = total_at + static_cast<uint32_t>(thread) * 16;
  constexpr int kBlock = 8;  // loads under way at once
  if (total.started) {
#pragma unroll
    for (int i0 = 0; i0 < kD / 8; i0 += kBlock) {
      float t[kBlock][4];
#pragma unroll
      for (int i = 0; i < kBlock; ++i)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(t[i][0]), "=f"(t[i][1]), "=f"(t[i][2]), "=f"(t[i][3])
                     : "r"(at + (i0 + i) * 2048)
                     : "memory");
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        float* x = o + 4 * (i0 + i);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = __fmaf_rn(x[e], b[e / 2], __fmul_rn(t[i][e], a[e / 2]));
      }
    }
  }
  if constexpr (!kLast) {
#pragma unroll
    for (int i = 0; i < kD / 8; ++i) {
      const float* x = o + 4 * i;
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at + i * 2048), "f"(x[0]),
                   "f"(x[1]), "f"(x[2]), "f"(x[3])
                   : "memory");
    }
  }
  total.started = true;
}

// +0 over the rows of V from `first` on: keys that are not there may hold anything, and 0 * NaN is
// not 0.
template <int kD>
__device__ __forceinline__ void ZeroRows(uint32_t v, int first, int thread, uint32_t barrier) {
  for (int i = first * 8 + thread; i < kTile * 8; i += 128) {
#pragma unroll
    for (int chunk = 0; chunk < kD / 64; ++chunk) {
      asm volatile(
          "st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(v + chunk * (kTile * 128) + i * 16),
          "r"(0)
          : "memory");
    }
  }
  sm90::FenceProxyAsync();
  sm90::NamedBarrier(barrier, 128);
}

template <int kD>
__device__ __forceinline__ void IssueScores(float (&s)[kTile / 2], uint32_t q, uint32_t k) {
  const uint32_t q_low = sm90::DescriptorLow(q), k_low = sm90::DescriptorLow(k);
  sm90::WgmmaFence();
#pragma unroll
  for (int step = 0; step < kD / 16; ++step) {
    const uint64_t a = sm90::Descriptor(q_low, (step / 4) * 8192 + (step % 4) * 32);
    const uint64_t b = sm90::Descriptor(k_low, (step / 4) * (kTile * 128) + (step % 4) * 32);
    if (step == 0) {
      sm90::Wgmma<kTile>::StepClear<0, 0>(s, a, b);
    } else {
      sm90::Wgmma<kTile>::Step<0, 0>(s, a, b);
    }
  }
  sm90::WgmmaCommit();
}

// The scores of this warp's 16 rows again, without the other warps; the bits are the same.
template <int kD>
__device__ __forceinline__ void RemakeScores(float (&s)[kTile / 2], uint32_t q, uint32_t k,
                                             int warp, int lane) {
  const auto at = [&](uint32_t tile, int rows, int row, int chunk) {
    return tile + (chunk / 8) * (rows * 128) + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
  };
#pragma unroll
  for (int i = 0; i < kTile / 2; ++i) s[i] = 0.0f;
#pragma unroll 1
  for (int step = 0; step < kD / 16; ++step) {
    uint32_t a[4];
    sm90::LoadMatrix4(a, at(q, 64, 16 * warp + lane % 16, 2 * step + lane / 16));
#pragma unroll
    for (int j = 0; j < kTile / 8; j += 2) {
      uint32_t b[4];
      sm90::LoadMatrix4(b, at(k, kTile, 8 * j + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
      sm90::MmaBf16(s + 4 * j, a, b[0], b[1]);
      sm90::MmaBf16(s + 4 * j + 4, a, b[2], b[3]);
    }
  }
}

// O += P V, or O = P V where `onto` is 0.
template <int kD>
__device__ __forceinline__ void IssueValues(float (&o)[kD / 2], const uint32_t (&p)[kTile / 16][4],
                                            uint32_t v, int onto) {
  const uint32_t v_low = sm90::DescriptorLow(v, kTile * 128);
  sm90::WgmmaFence();
#pragma unroll
  for (int step = 0; step < kTile / 16; ++step) {
    const uint64_t b = sm90::Descriptor(v_low, step * 2048);
    if (step == 0) {
      sm90::Wgmma<kD>::StepOnto(o, p[step], b, onto);
    } else {
      sm90::Wgmma<kD>::StepRegisters<1>(o, p[step], b);
    }
  }
  sm90::WgmmaCommit();
}

// What a CTA works on.
struct Work {
  Run run;
  int kv_head;
  int token0;       // of the CTA, in the run
  int first, last;  // tiles
  int last_key;
};

template <int kD>
__device__ __forceinline__ void Load(const CUtensorMap* map_q, const CUtensorMap* map_k,
                                     const CUtensorMap* map_v, const PrefillArgs& args,
                                     const Work& w, uint32_t base, uint32_t barriers) {
  using L = Layout<kD>;
  const Forward& f = args.f;
  const uint32_t q_full = barriers;
  const auto full = [&](int value, int slot) {
    return barriers + 8 + static_cast<uint32_t>((value * 2) * kStages + slot) * 8;
  };
  const auto empty = [&](int value, int slot) {
    return barriers + 8 + static_cast<uint32_t>((value * 2 + 1) * kStages + slot) * 8;
  };
  const int rows = f.group * args.tokens_per_group;
  sm90::BarrierArriveExpect(q_full, 2 * L::kChunks * rows * 128);
  for (int group = 0; group < 2; ++group) {
    for (int chunk = 0; chunk < L::kChunks; ++chunk) {
      sm90::TensorLoad3d(
          base + group * L::kQ + chunk * 8192, map_q, q_full, 64 * chunk, w.kv_head * f.group,
          static_cast<int>(w.run.q_begin) + w.token0 + group * args.tokens_per_group);
    }
  }
  Stage stage[2];
  stage[0].parity = stage[1].parity = 1;  // every slot starts empty
  const auto load = [&](int value, int tile) {
    Stage& at = stage[value];
    const uint32_t barrier = full(value, at.slot);
    const uint32_t to = base + 2 * L::kQ + (value * kStages + at.slot) * L::kKv;
    const CUtensorMap* map = value == 0 ? map_k : map_v;
    sm90::BarrierWait(empty(value, at.slot), at.parity);
    if (f.block_table == nullptr) {
      sm90::BarrierArriveExpect(barrier, L::kKv);
      for (int chunk = 0; chunk < L::kChunks; ++chunk) {
        sm90::TensorLoad(to + chunk * (kTile * 128), map, barrier, w.kv_head * kD + 64 * chunk,
                         static_cast<int>(w.run.kv_begin) + tile * kTile);
      }
    } else {
      const int keys = min(kTile, w.last_key + 1 - tile * kTile);
      const int boxes = (keys + args.box_rows - 1) / args.box_rows;
      sm90::BarrierArriveExpect(barrier, boxes * args.box_rows * 128 * L::kChunks);
      const int32_t* table = f.block_table + w.run.block_row * f.max_pages;
      for (int box = 0; box < boxes; ++box) {
        const int key = tile * kTile + box * args.box_rows;
        const int page = key / f.page_size;
        const int row = table[page] * f.page_size + (key - page * f.page_size);
        for (int chunk = 0; chunk < L::kChunks; ++chunk) {
          sm90::TensorLoad(to + chunk * (kTile * 128) + box * args.box_rows * 128, map, barrier,
                           w.kv_head * kD + 64 * chunk, row);
        }
      }
    }
    at.Next();
  };
  load(0, w.first);
  for (int tile = w.first; tile <= w.last; ++tile) {
    if (tile < w.last) load(0, tile + 1);
    load(1, tile);
  }
}

template <int kD>
__device__ __forceinline__ void Multiply(const PrefillArgs& args, const Work& w, uint32_t base,
                                         uint32_t barriers, int group) {
  using L = Layout<kD>;
  const Forward& f = args.f;
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32, warp = thread / 32;
  const uint32_t own_barrier = 1 + group, own_turn = 3 + group, other_turn = 4 - group;
  const uint32_t q = base + group * L::kQ;
  const uint32_t total_at = base + L::kTotalAt + group * L::kTotal;
  const int token0 = w.token0 + group * args.tokens_per_group;
  const int rows_end = static_cast<int>(w.run.q_rows);
  Rows rows;
  int wg_low, wg_high;  // the largest low and the smallest high of the warpgroup
  {
    const auto position = [&](int row) {
      return static_cast<int>(w.run.position) + min(token0 + args.Token(row), rows_end - 1);
    };
    const auto low = [&](int high) { return f.window == 0 ? 0 : max(0, high - f.window + 1); };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.high[half] = position(16 * warp + lane / 4 + 8 * half);
      rows.low[half] = low(rows.high[half]);
    }
    wg_high = sm90::Uniform(position(0));
    wg_low = sm90::Uniform(low(position(63)));
  }
  const auto k_full = [&](const Stage& s) { return barriers + 8 + s.slot * 8; };
  const auto k_empty = [&](const Stage& s) { return barriers + 8 + (kStages + s.slot) * 8; };
  const auto v_full = [&](const Stage& s) { return barriers + 8 + (2 * kStages + s.slot) * 8; };
  const auto v_empty = [&](const Stage& s) { return barriers + 8 + (3 * kStages + s.slot) * 8; };
  const auto k_at = [&](const Stage& s) { return base + 2 * L::kQ + s.slot * L::kKv; };
  const auto v_at = [&](const Stage& s) { return base + 2 * L::kQ + (kStages + s.slot) * L::kKv; };
  float o[kD / 2], s[kTile / 2], scale[2];
  uint32_t p[kTile / 16][4];
  Total total;
  Stage k, v;
#pragma unroll
  for (int i = 0; i < kD / 2; ++i) o[i] = 0.0f;

  sm90::BarrierWait(barriers, 0);
  sm90::BarrierWait(k_full(k), k.parity);
  IssueScores<kD>(s, q, k_at(k));
  sm90::WgmmaWait<0>();
  sm90::PinRegisters(s);
  // Warp by warp: one may make its scores again, from K.
  const auto free_k = [&] {
    if (lane == 0) sm90::BarrierArrive(k_empty(k));
    k.Next();
  };
  free_k();
  const float c7 = __fmul_rn(f.c, 0x1p-7f);
  const auto masked = [&](int tile) {
    return tile * kTile + kTile - 1 > wg_high || tile * kTile < wg_low;
  };
  const auto first_reference = [&](int tile) {
    if (masked(tile)) {
      FirstReference<true>(s, rows, tile * kTile, lane, f.c);
    } else {
      FirstReference<false>(s, rows, tile * kTile, lane, f.c);
    }
  };
  // True when O is to be multiplied by scale.
  const auto move_reference = [&](int tile) {
    return masked(tile) ? MoveReference<true>(s, rows, tile * kTile, lane, f.c, scale)
                        : MoveReference<false>(s, rows, tile * kTile, lane, f.c, scale);
  };
  const auto make_probabilities = [&](int tile) {
    int tile0 = tile * kTile;
    asm volatile("" : "+r"(tile0));  // masks are made where they are used
    if (masked(tile)) {
      MakeProbabilities<true>(s, p, rows, tile0, lane, c7);
    } else {
      MakeProbabilities<false>(s, p, rows, tile0, lane, c7);
    }
  };
  first_reference(w.first);
  make_probabilities(w.first);
  if (group == 1 && w.first < w.last) sm90::NamedBarrierArrive(other_turn, 256);
  const int split_tiles = f.kv_split / kTile;
  int until_split = split_tiles - 1 - w.first % split_tiles;  // tiles before the next split begins
  int onto = 0;  // 0: O holds nothing of the split of P yet
  for (int tile = w.first + 1; tile <= w.last; ++tile) {
    sm90::BarrierWait(k_full(k), k.parity);
    sm90::NamedBarrier(own_turn, 256);
    IssueScores<kD>(s, q, k_at(k));
    sm90::BarrierWait(v_full(v), v.parity);
    IssueValues<kD>(o, p, v_at(v), onto);
    onto = 1;
    if (tile < w.last || group == 0) sm90::NamedBarrierArrive(other_turn, 256);
    sm90::WgmmaWait<1>();
    sm90::PinRegisters(s);
    const bool new_split = until_split == 0;
    until_split = new_split ? split_tiles - 1 : until_split - 1;
    const float r_split[2] = {rows.r[0], rows.r[1]}, l_split[2] = {rows.l[0], rows.l[1]};
    if (new_split) first_reference(tile);
    sm90::WgmmaWait<0>();
    sm90::PinRegisters(o);
    if (thread == 0) sm90::BarrierArrive(v_empty(v));
    v.Next();
    if (new_split) {
      EndSplit<kD, false>(o, r_split, l_split, total, total_at, thread);
      onto = 0;
    }
    // P with the references as they are, then a look at the row sums: a score that passes the slack
    // takes its lane's sum to 2^kSlack, almost. Only then are the scores made again and the largest
    // ones searched for.
    const float l[2] = {rows.l[0], rows.l[1]};
    make_probabilities(tile);
    const bool stays = rows.l[0] < kSumLimit && rows.l[1] < kSumLimit &&
                       fabsf(rows.r[0]) < kReferenceLimit && fabsf(rows.r[1]) < kReferenceLimit;
    if (!new_split && __any_sync(0xffffffff, !stays)) {
      RemakeScores<kD>(s, q, k_at(k), warp, lane);
      rows.l[0] = l[0], rows.l[1] = l[1];
      if (move_reference(tile)) {
#pragma unroll
        for (int i = 0; i < kD / 2; ++i) o[i] = __fmul_rn(o[i], scale[i / 2 % 2]);
      }
      make_probabilities(tile);
    }
    free_k();
  }
  sm90::BarrierWait(v_full(v), v.parity);
  const int keys = w.last_key + 1 - w.last * kTile;
  if (keys < kTile) ZeroRows<kD>(v_at(v), keys, thread, own_barrier);
  IssueValues<kD>(o, p, v_at(v), onto);
  sm90::WgmmaWait<0>();
  sm90::PinRegisters(o);
  EndSplit<kD, true>(o, rows.r, rows.l, total, total_at, thread);

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 16 * warp + lane / 4 + 8 * half;
    const int own = args.Token(row), token = token0 + own;
    const int head = w.kv_head * f.group + row - own * f.group;
    const RowEnd end = EndRow(total.r[half], total.l[half], f.sink, head);
#pragma unroll
    for (int i = 0; i < kD / 4; ++i) {
      float& x = o[i / 2 * 4 + 2 * half + i % 2];
      if (f.sink != nullptr) x = __fmul_rn(x, end.f);
      x = __fadd_rn(__fmul_rn(x, end.inverse), 0.0f);
    }
    if (f.lse2 != nullptr && lane % 4 == 0 && row < f.group * args.tokens_per_group &&
        token < rows_end)
      f.lse2[(w.run.q_begin + token) * f.q_heads + head] = end.lse2;
  }
  // Through shared memory (this warpgroup's Q is used up), so that rows leave in whole lines.
  const int matrix_row = warp * 16 + lane % 8 + 8 * ((lane / 8) % 2);
#pragma unroll
  for (int j = 0; j < kD / 8; j += 2) {
    const float* x = o + 4 * j;
    const uint32_t at =
        q + (j / 8) * 8192 + matrix_row * 128 + (((j % 8 + lane / 16) ^ (lane % 8)) * 16);
    sm90::StoreMatrix4(at, PackBf16(x[0], x[1]), PackBf16(x[2], x[3]), PackBf16(x[4], x[5]),
                       PackBf16(x[6], x[7]));
  }
  sm90::NamedBarrier(own_barrier, 128);
#pragma unroll
  for (int i = thread; i < 64 * kD / 8; i += 128) {
    const int row = i / (kD / 8), column = i % (kD / 8);
    const int own = args.Token(row), token = token0 + own;
    if (row >= f.group * args.tokens_per_group || token >= rows_end) continue;
    uint32_t x[4];
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(q + (column / 8) * 8192 + row * 128 + ((column % 8) ^ (row % 8)) * 16)
                 : "memory");
    auto* to = static_cast<__nv_bfloat16*>(f.out) + (w.run.q_begin + token) * f.out_stride +
               static_cast<int64_t>(w.kv_head * f.group + row - own * f.group) * kD + column * 8;
    StoreGlobal16(to, x);
  }
}

template <int kD>
__global__ void __launch_bounds__(kThreads, 1)
    attention_prefill_kernel(const __grid_constant__ CUtensorMap map_q,
                             const __grid_constant__ CUtensorMap map_k,
                             const __grid_constant__ CUtensorMap map_v,
                             const __grid_constant__ PrefillArgs args) {
  using L = Layout<kD>;
  extern __shared__ uint8_t shared[];
  const uint32_t base = (sm90::SharedAddress(shared) + 1023) / 1024 * 1024;
  const uint32_t barriers = base + L::kBarriersAt;
  const Forward& f = args.f;
  // The longest first: the last rows of a run see the most keys.
  const int x = static_cast<int>(gridDim.x) - 1 - static_cast<int>(blockIdx.x);
  const int cta_tokens = 2 * args.tokens_per_group;
  const Place place = Locate(f.num_runs, x / f.kv_heads, [&](int r) -> int64_t {
    const Run& run = f.runs[r];
    if (FlatRows(run, f.group) <= f.decode_rows) return 0;
    return (run.q_rows + cta_tokens - 1) / cta_tokens;
  });
  if (place.run < 0) return;
  Work w;
  w.run = f.runs[place.run];
  w.kv_head = x % f.kv_heads;
  w.token0 = place.index * cta_tokens;
  const int first_position = static_cast<int>(w.run.position) + w.token0;
  w.last_key =
      min(first_position + cta_tokens, static_cast<int>(w.run.position + w.run.q_rows)) - 1;
  w.first = sm90::Uniform(f.window == 0 ? 0 : max(0, first_position - f.window + 1) / kTile);
  w.last = sm90::Uniform(w.last_key / kTile);
  if (threadIdx.x == 0) {
    sm90::BarrierInit(barriers, 1);
    for (int i = 0; i < 2 * kStages; ++i) {
      sm90::BarrierInit(barriers + 8 + (i / kStages * 2 * kStages + i % kStages) * 8, 1);
      // K is freed by each warp, V by each warpgroup.
      sm90::BarrierInit(barriers + 8 + ((i / kStages * 2 + 1) * kStages + i % kStages) * 8,
                        i < kStages ? 8 : 2);
    }
    sm90::BarrierInitFence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    sm90::RegistersDecrease<24>();
    if (__shfl_sync(0xffffffff, threadIdx.x / 32, 0) == 0 && sm90::ElectOne())
      Load<kD>(&map_q, &map_k, &map_v, args, w, base, barriers);
    __syncwarp();
  } else {
    sm90::RegistersIncrease<240>();
    Multiply<kD>(args, w, base, barriers, sm90::Uniform(static_cast<int>(threadIdx.x) / 128 - 1));
  }
}

template <int kD>
Status Launch(const Forward& f, int64_t kv_rows, int64_t blocks, StreamHandle stream) {
  using L = Layout<kD>;
  PrefillArgs args{.f = f,
                   .tokens_per_group = 64 / f.group,
                   .box_rows = kTile,
                   .group_inverse = (65536 + f.group - 1) / f.group};
  if (f.block_table != nullptr) args.box_rows = f.page_size < kTile ? f.page_size : kTile;
  CUtensorMap map_q, map_k, map_v;
  TARE_RETURN_IF_ERROR(cuda::MapHeads16(f.q, f.tokens, f.q_heads, kD, f.q_stride,
                                        args.tokens_per_group, f.group, &map_q));
  const int64_t width = static_cast<int64_t>(f.kv_heads) * kD;
  TARE_RETURN_IF_ERROR(cuda::MapMatrix16(f.k, kv_rows, width, f.k_stride, args.box_rows, &map_k));
  TARE_RETURN_IF_ERROR(cuda::MapMatrix16(f.v, kv_rows, width, f.v_stride, args.box_rows, &map_v));
  static const cudaError_t prepared = cudaFuncSetAttribute(
      attention_prefill_kernel<kD>, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kBytes);
  TARE_CUDA_RETURN_IF_ERROR(prepared);
  attention_prefill_kernel<kD><<<static_cast<unsigned>(blocks * f.kv_heads), kThreads, L::kBytes,
                                 static_cast<cudaStream_t>(stream)>>>(map_q, map_k, map_v, args);
  TARE_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  return Ok();
}

}  // namespace

bool CanPrefill(const Params& p, Profile profile, const Forward& f) {
  if (profile != Profile::kSm90Mma || p.dtype != DType::kBF16 || p.softcap != 0.0f) return false;
  if ((p.head_dim != 64 && p.head_dim != 128) || p.kv_tile != kTile || f.group > 64) return false;
  const int64_t width = int64_t{f.kv_heads} * f.head_dim;
  if (!cuda::CanMap(f.q, f.tokens, int64_t{f.q_heads} * f.head_dim, f.q_stride)) return false;
  if (!cuda::CanMap(f.k, 1, width, f.k_stride) || !cuda::CanMap(f.v, 1, width, f.v_stride))
    return false;
  if (reinterpret_cast<uintptr_t>(f.out) % 16 != 0 || f.out_stride % 8 != 0) return false;
  // A page is a box of the copy engine, whole swizzle atoms, and boxes fill a tile.
  return f.block_table == nullptr || (f.page_size % 8 == 0 && kTile % f.page_size == 0) ||
         f.page_size % kTile == 0;
}

Status LaunchPrefill(const Forward& f, int64_t kv_rows, int64_t blocks, StreamHandle stream) {
  return f.head_dim == 64 ? Launch<64>(f, kv_rows, blocks, stream)
                          : Launch<128>(f, kv_rows, blocks, stream);
}

}  // namespace tare::ops::attention::gpu
