#pragma once

// The Hopper kernel of linear's dW: dw[i, j] += per unit: sum over the unit's tokens of
// a[t, i] * b[t, j], with the ring and tiles of gpu_gemm.cuh.
//
// What fixes the bits: inside a unit one f32 accumulator takes the groups of 16 tokens in ascending
// order from +0, the last group padded with +0; units are added to dw with one nearest-even add
// each, in order. Where a unit is cut into stages, when sums are written and which warpgroup goes
// first is free.
//
// Nothing waits for memory that can be put off: a tile's sums are written, and what they are added
// to is read, while the next tile's products are under way.

#include "ops/cuda/descriptors.cuh"
#include "ops/linear/gpu_gemm.cuh"
#include "ops/linear/gpu_gradient.h"

namespace tare::ops::linear::gpu {

// A unit in stages: the first holds what the whole ones that follow it leave over, so that the last
// one, whose end every warpgroup waits for, is as long as can be. An empty unit is one group of
// padding.
struct Cut {
  int stages;
  int first;  // groups of 16 tokens in the first stage
  int rows;   // tokens in the last group; what is left of it is padded
};
template <GemmConfig kC>
__device__ __forceinline__ Cut CutOf(int length) {
  constexpr int kSteps = kC.bk / 16;
  const int groups = max(1, (length + 15) / 16);
  const int stages = (groups + kSteps - 1) / kSteps;
  return {stages, groups - kSteps * (stages - 1), length - 16 * (groups - 1)};
}

// One operand of a whole stage: chunks of 64 columns, dealt to the kParts CTAs that load for each
// other, or each cut among them by rows.
template <GemmConfig kC, int kChunks, int kParts>
__device__ __forceinline__ void LoadWhole(uint32_t stage, const CUtensorMap* map, uint32_t full,
                                          int column, int k, int part, uint16_t mask) {
  constexpr bool kDealt = kChunks % kParts == 0;
  constexpr int kCount = kDealt ? kChunks / kParts : kChunks;
  constexpr int kRows = kDealt ? kC.bk : kC.bk / kParts;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int chunk = kDealt ? part * kCount + i : i;
    const int row = kDealt ? 0 : part * kRows;
    const uint32_t at = stage + chunk * (kC.bk * 128) + row * 128;
    if constexpr (kParts > 1) {
      sm90::TensorLoadMulticast(at, map, full, column + 64 * chunk, k + row, mask);
    } else {
      sm90::TensorLoad(at, map, full, column + 64 * chunk, k);
    }
  }
}

// The same of a stage of `groups` groups.
template <GemmConfig kC, int kChunks, int kParts>
__device__ __forceinline__ void LoadShort(uint32_t stage, const CUtensorMap* map, uint32_t full,
                                          int column, int k, int groups, int part, uint16_t mask) {
  for (int g = 0; g < groups; ++g) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const uint32_t at = stage + chunk * (kC.bk * 128) + g * 2048;
      if constexpr (kParts > 1) {
        if ((chunk + g) % kParts != part) continue;
        sm90::TensorLoadMulticast(at, map, full, column + 64 * chunk, k + 16 * g, mask);
      } else {
        sm90::TensorLoad(at, map, full, column + 64 * chunk, k + 16 * g);
      }
    }
  }
}

// Runs in one thread.
template <GemmConfig kC>
__device__ __forceinline__ void ProduceGradient(const GradientMaps& maps, const GemmArgs& args,
                                                const GemmRuns& runs, uint32_t stages_at,
                                                uint32_t full, uint32_t empty, uint32_t rank,
                                                int first_tile, int stride) {
  constexpr int kChunksA = kC.bm / 64, kChunksB = kC.b_columns() / 64;
  const int rank_m = static_cast<int>(rank % kC.cluster_m);
  const int rank_n = static_cast<int>(rank / kC.cluster_m);
  uint16_t mask_a = 0;
  for (int i = 0; i < kC.cluster_n; ++i) mask_a |= 1u << (rank_m + i * kC.cluster_m);
  const uint16_t mask_b = ((1u << kC.cluster_m) - 1) << (rank_n * kC.cluster_m);
  Ring<kC.stages> ring;
  ring.parity = 1;  // every slot starts empty
  for (int tile = first_tile; tile < args.tiles_m * args.tiles_n; tile += stride) {
    const int2 origin = TileOrigin<kC>(args, tile, rank);
    for (int unit = 0; unit < args.chains; ++unit) {
      const Run run = runs.runs[unit];
      const Cut cut = CutOf<kC>(run.length);
      int k = run.begin;
      for (int s = 0; s < cut.stages; ++s) {
        sm90::BarrierWait(empty + ring.slot * 8, ring.parity);
        const uint32_t barrier = full + ring.slot * 8;
        const uint32_t stage = stages_at + ring.slot * kC.stage_bytes();
        if (s == 0 && cut.first < kC.bk / 16) {
          sm90::BarrierArriveExpect(barrier, cut.first * 2048 * (kChunksA + kChunksB));
          LoadShort<kC, kChunksB, kC.cluster_m>(stage + kC.a_bytes(), &maps.short_b, barrier,
                                                origin.y, k, cut.first, rank_m, mask_b);
          LoadShort<kC, kChunksA, kC.cluster_n>(stage, &maps.short_a, barrier, origin.x, k,
                                                cut.first, rank_n, mask_a);
          k += 16 * cut.first;
        } else {
          sm90::BarrierArriveExpect(barrier, kC.stage_bytes());
          LoadWhole<kC, kChunksB, kC.cluster_m>(stage + kC.a_bytes(), &maps.b, barrier, origin.y, k,
                                                rank_m, mask_b);
          LoadWhole<kC, kChunksA, kC.cluster_n>(stage, &maps.a, barrier, origin.x, k, rank_n,
                                                mask_a);
          k += kC.bk;
        }
        ring.Next();
      }
    }
  }
}

// A pair of dw where `yes`; else nothing is written, and +0 read.
__device__ __forceinline__ void StoreIf(float* y, float v0, float v1, bool yes) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.global.v2.f32 [%0], {%1, %2};\n}" ::"l"(y),
      "f"(v0), "f"(v1), "r"(static_cast<int>(yes))
      : "memory");
}
__device__ __forceinline__ void LoadIf(const float* y, float& v0, float& v1, bool yes) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.f32 %0, 0f00000000;\n"
      "mov.f32 %1, 0f00000000;\n@p ld.global.v2.f32 {%0, %1}, [%2];\n}"
      : "=&f"(v0), "=&f"(v1)
      : "l"(y), "r"(static_cast<int>(yes))
      : "memory");
}

// Four words of a thread in shared memory.
__device__ __forceinline__ void StoreShared4(uint32_t at, const float* v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(v[0]), "f"(v[1]),
               "f"(v[2]), "f"(v[3])
               : "memory");
}
__device__ __forceinline__ void LoadShared4(uint32_t at, float* v) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(at)
               : "memory");
}

// Brings a tile of dw into L2, by the threads of both warpgroups.
template <GemmConfig kC>
__device__ __forceinline__ void PrefetchTile(const GemmArgs& args, int2 origin, int thread) {
  const int row = origin.x + thread / 2;
  if (row >= args.m) return;
  const float* y = static_cast<const float*>(args.y) + row * args.y_stride + origin.y;
#pragma unroll
  for (int column = 0; column < kC.bn; column += 64) {
    const int at = column + 32 * (thread % 2);
    if (at < kC.bn && origin.y + at < args.n)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(y + at) : "memory");
  }
}

// A strip of dw in the layout of the accumulator fragment: a warp's 16 rows from `row0`, columns
// from `first` (a constant) behind `column0`. No branches, for products are under way around it.
// REQUIRES: args.pairs.
template <bool kStore, int kCount>
__device__ __forceinline__ void Strip(const GemmArgs& args, float (&v)[kCount], int row0,
                                      int column0, int first, int lane) {
  const int row = row0 + lane / 4, column = column0 + 2 * (lane % 4);
  float* y = static_cast<float*>(args.y) + row * args.y_stride + column;
  const int left = args.n - column;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int columns = row + 8 * half < args.m ? left : 0;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      float& v0 = v[4 * j + 2 * half];
      float& v1 = v[4 * j + 2 * half + 1];
      if constexpr (kStore) {
        StoreIf(y + first + 8 * j, v0, v1, first + 8 * j < columns);
      } else {
        LoadIf(y + first + 8 * j, v0, v1, first + 8 * j < columns);
      }
    }
    y += 8 * args.y_stride;
  }
}

// Writes +0 over the tokens of a stage from `first` to the end of its group. Every consumer
// warpgroup does so for its own rows of a and all of b; two of them write the same zeros. Eight
// threads a row of 128 bytes, 16 rows at once.
template <GemmConfig kC>
__device__ __forceinline__ void PadGroup(uint32_t a, uint32_t b, int first, int thread,
                                         uint32_t barrier) {
  const int row = first / 16 * 16 + thread / 8;
  if (row >= first) {
    const uint32_t at = row * 128 + thread % 8 * 16;
#pragma unroll
    for (int chunk = 0; chunk < 1 + kC.b_columns() / 64; ++chunk) {
      const uint32_t base = chunk == 0 ? a : b + (chunk - 1) * (kC.bk * 128);
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(base + at), "r"(0) : "memory");
    }
  }
  sm90::FenceProxyAsync();
  sm90::NamedBarrier(barrier, 128);
}

// One group of 16 tokens at a position of a stage; kClear starts the accumulator from +0.
template <GemmConfig kC, bool kClear>
__device__ __forceinline__ void GradientStep(float (&acc)[kC.bn / 2], uint32_t a, uint32_t b,
                                             int step) {
  const uint64_t desc_a = sm90::DescriptorMnMajor(a + step * 2048, kC.bk * 128);
  const uint64_t desc_b = sm90::DescriptorMnMajor(b + step * 2048, kC.bk * 128);
  if constexpr (kClear) {
    sm90::Wgmma<kC.bn>::template StepClear<1, 1>(acc, desc_a, desc_b);
  } else {
    sm90::Wgmma<kC.bn>::template Step<1, 1>(acc, desc_a, desc_b);
  }
}

// What one consumer warpgroup keeps while it walks the ring.
template <GemmConfig kC>
struct Walk {
  static constexpr int kSteps = kC.bk / 16;
  static constexpr int kCount = kC.bn / 2;
  uint32_t stages_at, full, empty;
  int thread, group;
  Ring<kC.stages> ring;
  uint32_t previous = 0;  // slot whose products may still be under way
  float acc[kCount];

  __device__ __forceinline__ uint32_t Stage() const {
    return stages_at + ring.slot * kC.stage_bytes();
  }
  __device__ __forceinline__ uint32_t A() const { return Stage() + group * (kC.bk * 128); }
  __device__ __forceinline__ uint32_t B() const { return Stage() + kC.a_bytes(); }

  // Warpgroups take turns to hand their products to the matrix unit, so that one multiplies while
  // the other ends a unit.
  __device__ __forceinline__ void AwaitTurn() const {
    if constexpr (kC.ordered) sm90::NamedBarrier(3 + group, 256);
  }
  __device__ __forceinline__ void PassTurn() const {
    if constexpr (kC.ordered) sm90::NamedBarrierArrive(3 + (group ^ 1), 256);
  }
  // +0 over the rows of the last group of a stage from `first` on.
  __device__ __forceinline__ void Pad(int first) const {
    PadGroup<kC>(A(), B(), first, thread, 1 + group);
  }

  // The first stage of a unit, of `groups` groups.
  __device__ __forceinline__ void First(int groups) {
    const uint32_t a = A(), b = B();
    sm90::WgmmaFence();
    GradientStep<kC, true>(acc, a, b, 0);
#pragma unroll 1
    for (int step = 1; step < groups; ++step) {
      sm90::WgmmaFence();
      GradientStep<kC, false>(acc, a, b, step);
    }
    sm90::WgmmaCommit();
  }
  // Any later stage. `rows`: tokens in its last group. `wait`: the turn is still to be waited for.
  __device__ __forceinline__ void Whole(int rows, bool wait) {
    sm90::BarrierWait(full + ring.slot * 8, ring.parity);
    if (rows < 16) Pad(16 * (kSteps - 1) + rows);
    if (wait) AwaitTurn();
    sm90::WgmmaFence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) GradientStep<kC, false>(acc, A(), B(), step);
    sm90::WgmmaCommit();
    PassTurn();
    sm90::WgmmaWait<1>();
    Release<kC>(empty + previous * 8, thread);
    previous = ring.slot;
    ring.Next();
  }
};

template <GemmConfig kC>
__device__ __forceinline__ void ConsumeGradient(const GemmArgs& args, const GemmRuns& runs,
                                                uint32_t stages_at, uint32_t full, uint32_t empty,
                                                uint32_t rank, int first_tile, int stride,
                                                int group) {
  static_assert(kC.blocks() == 1 && kC.consumers == 2);
  constexpr int kCount = kC.bn / 2;
  constexpr bool kHeld = kC.levels == 1;
  // kHeld: the tile's dw, from its first unit to its last. Else first what half of the sum is added
  // to, then the other half of the sum.
  constexpr int kMain = kHeld ? kCount : kCount / 2;
  constexpr int kChunk = kHeld && kCount % 16 == 0 ? 16 : 8;  // registers written or read at once
  constexpr int kChunks = kMain / kChunk;
  constexpr int kParked = kC.park / kChunk;  // chunks
  constexpr int kOut = kChunks - kParked;    // chunks that are written when a unit ends
  constexpr int kApart = 128 / kC.bk;        // stages between chunks
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const int warp_row = group * 64 + 16 * (thread / 32);
  const uint32_t park = stages_at + kC.stages * kC.stage_bytes() + (threadIdx.x - 128) * 16;
  Walk<kC> walk = {stages_at, full, empty, thread, group};
#pragma unroll
  for (int i = 0; i < kCount; ++i) walk.acc[i] = 0.0f;
  float main[kMain];
  float late[kHeld ? 1 : kChunk];
  bool pending = false;  // sums of the tile at `from` are still to be written
  int2 from = {};
  if constexpr (kC.ordered) {
    if (group == 1) sm90::NamedBarrierArrive(3, 256);
  }
  const auto chunk_of = [&](int c) -> float(&)[kChunk] {
    return *reinterpret_cast<float(*)[kChunk]>(main + kChunk * c);
  };
  const auto store = [&](int c) {
    Strip<true>(args, chunk_of(c), from.x + warp_row, from.y, 2 * kChunk * c, lane);
  };
  const auto load = [&](int2 origin, int c) {
    Strip<false>(args, chunk_of(c), origin.x + warp_row, origin.y, 2 * kChunk * c, lane);
  };
  // Not kHeld, behind the end of a unit: what was parked, then chunk after chunk of the other half,
  // to which the chunk before has come, while the next one is asked for.
  constexpr int kBehind = kHeld ? 0 : kParked + kChunks + 1;
  const auto behind = [&](int step) {
    if constexpr (!kHeld) {
      constexpr int kHalf = 2 * kMain;  // columns
      float sum[kChunk];
      if (step < kParked) {
#pragma unroll
        for (int i = 0; i < kChunk; i += 4)
          LoadShared4(park + (step * kChunk + i) / 4 * 4096, sum + i);
        Strip<true>(args, sum, from.x + warp_row, from.y, 2 * kChunk * (kOut + step), lane);
        return;
      }
      const int c = step - kParked;
      if (c > 0) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) sum[i] = __fadd_rn(late[i], main[kChunk * (c - 1) + i]);
        Strip<true>(args, sum, from.x + warp_row, from.y, kHalf + 2 * kChunk * (c - 1), lane);
      }
      if (c < kChunks)
        Strip<false>(args, late, from.x + warp_row, from.y, kHalf + 2 * kChunk * c, lane);
    }
  };
  for (int tile = first_tile; tile < args.tiles_m * args.tiles_n; tile += stride) {
    const int2 origin = TileOrigin<kC>(args, tile, rank);
    for (int unit = 0; unit < args.chains; ++unit) {
      const Cut cut = CutOf<kC>(runs.runs[unit].length);
      sm90::BarrierWait(full + walk.ring.slot * 8, walk.ring.parity);
      if (cut.stages == 1 && cut.rows < 16) walk.Pad(16 * (cut.first - 1) + cut.rows);
      walk.AwaitTurn();
      sm90::PinRegisters(walk.acc);
      walk.First(cut.first);
      walk.previous = walk.ring.slot;
      walk.ring.Next();
      int s = 1;
      if (cut.stages == 1) {
        walk.PassTurn();
      } else {
        ++s;
        walk.Whole(s == cut.stages ? cut.rows : 16, false);
      }
      const auto next = [&](int count) {
        for (int i = 0; i < count && s < cut.stages; ++i) {
          ++s;
          walk.Whole(s == cut.stages ? cut.rows : 16, true);
        }
      };
      if constexpr (kHeld) {
        constexpr int kLong = 2 * kChunks;  // stages that hide a tile's writes and reads
        if (unit == 0) {
          if (cut.stages - s > kLong) {
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
              walk.Whole(16, true);
              if (pending) store(c);
            }
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
              walk.Whole(16, true);
              load(origin, c);
            }
            s += kLong;
          } else {
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
              if (pending) store(c);
            }
#pragma unroll
            for (int c = 0; c < kChunks; ++c) load(origin, c);
          }
          pending = false;
        }
        // A short unit cannot hide the reads of the next tile: they find it in L2.
        if (unit == args.chains - 1 && runs.runs[0].length < (kLong + 3) * kC.bk &&
            tile + stride < args.tiles_m * args.tiles_n) {
          PrefetchTile<kC>(args, TileOrigin<kC>(args, tile + stride, rank), threadIdx.x - 128);
        }
        next(cut.stages);
      } else {
        if (pending) {
#pragma unroll
          for (int step = 0; step < kBehind; ++step) {
            behind(step);
            next(kApart);
          }
        }
        next(cut.stages - s - kApart * (kChunks + 2));
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          load(origin, c);
          next(kApart);
        }
        next(cut.stages);
      }
      sm90::WgmmaWait<0>();
      sm90::PinRegisters(walk.acc);
      Release<kC>(empty + walk.previous * 8, thread);
#pragma unroll
      for (int i = 0; i < kMain; ++i) main[i] = __fadd_rn(main[i], walk.acc[i]);
      if constexpr (!kHeld) {
        from = origin;
#pragma unroll
        for (int i = kChunk * kOut; i < kMain; i += 4)
          StoreShared4(park + (i - kChunk * kOut) / 4 * 4096, main + i);
#pragma unroll
        for (int c = 0; c < kOut; ++c) store(c);
#pragma unroll
        for (int i = 0; i < kMain; ++i) main[i] = walk.acc[kMain + i];
        pending = true;
      }
    }
    pending = true;
    from = origin;
  }
  if (pending) {
#pragma unroll
    for (int step = 0; step < (kHeld ? kChunks : kBehind); ++step) {
      if constexpr (kHeld) {
        store(step);
      } else {
        behind(step);
      }
    }
  }
  if constexpr (kC.ordered) {
    if (group == 0) sm90::NamedBarrier(3, 256);  // the last turn passed to it
  }
}

template <typename Tag>
__global__ void __launch_bounds__(Tag::kConfig.threads(), 1)
    linear_gradient_kernel(const __grid_constant__ GradientMaps maps,
                           const __grid_constant__ GemmArgs args,
                           const __grid_constant__ GemmRuns runs) {
  constexpr GemmConfig kC = Tag::kConfig;
  extern __shared__ uint8_t shared[];
  const auto [stages_at, full, empty] = MakeRing<kC>(shared, &maps.a, &maps.b);
  const uint32_t rank = kC.cluster() > 1 ? sm90::ClusterRank() : 0;
  const int first_tile = blockIdx.x / kC.cluster();
  const int stride = gridDim.x / kC.cluster();
  if (threadIdx.x < 128) {
    sm90::RegistersDecrease<24>();
    if (__shfl_sync(0xffffffff, threadIdx.x / 32, 0) == 0 && sm90::ElectOne()) {
      ProduceGradient<kC>(maps, args, runs, stages_at, full, empty, rank, first_tile, stride);
    }
    __syncwarp();
  } else {
    sm90::RegistersIncrease<240>();
    ConsumeGradient<kC>(args, runs, stages_at, full, empty, rank, first_tile, stride,
                        sm90::Uniform(static_cast<int>(threadIdx.x) / 128 - 1));
  }
  LeaveRing<kC>();
}

}  // namespace tare::ops::linear::gpu
