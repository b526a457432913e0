#pragma once

// The Hopper contraction kernel under linear forward and dX, persistent, warp-specialised:
// d[i, j] = sum_k a[i, k] * b[j, k] in the sm90-mma arithmetic. dW's is in gpu_gradient.cuh.
//
// What fixes the bits: every output element has one f32 accumulator that takes the groups of 16 k
// of a chain in ascending order, starting from +0 (Wgmma::Step). Nothing else of GemmConfig can
// move a bit, so tile, stages, cluster and order of tiles are free to be chosen for speed.
//
// One producer thread fills a ring of shared-memory stages through tensor maps; each consumer
// warpgroup owns bm / consumers rows of the tile and reads all of its columns. CTAs of a cluster
// share one operand: each loads its part and multicasts it.
//
// A chain is one run of k, or `parts` runs one after the other (the segment-major k of a fused
// weight's dX); a run may start anywhere. A group that runs past the end of the tensor reads +0
// there.

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "ops/cuda/sm90.cuh"
#include "ops/cuda/wgmma.cuh"
#include "ops/linear/gpu_config.h"

namespace tare::ops::linear::gpu {

// Loads, by one thread -----------------------------------------------------------------------

// One operand's part of a stage: kRows tile rows from row `row`, kC.bk elements from `k`. A CTA
// loads `part` of the kParts that the CTAs in `mask` load for each other.
template <GemmConfig kC, bool kTrans, int kParts, int kRows>
__device__ __forceinline__ void LoadOperand(uint32_t stage, const CUtensorMap* map, uint32_t full,
                                            int row, int k, int box_rows, uint32_t part,
                                            uint16_t mask) {
  constexpr int kCount = kTrans ? kRows / 64 / kParts : kC.bk / 64;
  static_assert(kCount > 0 && (!kTrans || kRows % (64 * kParts) == 0));
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    // MN-major: boxes of 64 rows and all k of the stage. K-major: boxes of all rows and 64 k.
    const int first = static_cast<int>(part) * (kTrans ? kCount : box_rows);
    const uint32_t at =
        kTrans ? stage + (first + i) * (kC.bk * 128) : stage + i * (kRows * 128) + first * 128;
    const int x = kTrans ? row + 64 * (first + i) : k + 64 * i;
    const int y = kTrans ? k : row + first;
    if constexpr (kParts > 1) {
      sm90::TensorLoadMulticast(at, map, full, x, y, mask);
    } else {
      sm90::TensorLoad(at, map, full, x, y);
    }
  }
}

// Position in the ring of stages.
template <int kStages>
struct Ring {
  uint32_t slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void Next() {
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// The tile a CTA works on, from the index of its cluster's tile.
template <GemmConfig kC>
__device__ __forceinline__ int2 TileOrigin(const GemmArgs& args, int tile, uint32_t rank) {
  const int per_group = args.group_m * args.tiles_n;
  const int group = tile / per_group;
  const int in_group = tile - group * per_group;
  const int first_m = group * args.group_m;
  const int rows = min(args.group_m, args.tiles_m - first_m);
  int tile_n = in_group / rows;
  int tile_m = first_m + in_group - tile_n * rows;
  tile_m = tile_m * kC.cluster_m + rank % kC.cluster_m;
  tile_n = tile_n * kC.cluster_n + rank / kC.cluster_m;
  return {tile_m * kC.bm, tile_n * kC.bn};
}

__device__ __forceinline__ Run RunAt(const GemmArgs&, const GemmRuns& runs, int index) {
  return runs.runs[index];
}
__device__ __forceinline__ Run RunAt(const GemmArgs& args, const NoRuns&, int index) {
  return {index * args.chain_length, args.chain_length};
}

// Multiplication, by one warpgroup -----------------------------------------------------------

// Adds one group of 16 k at stage position `step` to the accumulators of all row blocks.
template <GemmConfig kC, int kBlocks>
__device__ __forceinline__ void GroupStep(float (&acc)[kBlocks][kC.bn / 2], uint32_t a, uint32_t b,
                                          int step) {
  const uint64_t desc_b =
      kC.trans_b ? sm90::DescriptorMnMajor(b + step * 2048, kC.bk * 128)
                 : sm90::DescriptorKMajor(b + (step / 4) * (kC.bn * 128) + (step % 4) * 32);
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const uint64_t desc_a =
        kC.trans_a
            ? sm90::DescriptorMnMajor(a + i * (kC.bk * 128) + step * 2048, kC.bk * 128)
            : sm90::DescriptorKMajor(a + i * 8192 + (step / 4) * (kC.bm * 128) + (step % 4) * 32);
    sm90::Wgmma<kC.bn>::template Step<kC.trans_a, kC.trans_b>(acc[i], desc_a, desc_b);
  }
}

// Tells every CTA that fills this slot that one consumer warpgroup is done with it.
template <GemmConfig kC>
__device__ __forceinline__ void Release(uint32_t empty, int thread) {
  if constexpr (kC.cluster() == 1) {
    if (thread == 0) sm90::BarrierArrive(empty);
  } else {
    if (thread < kC.cluster()) sm90::BarrierArriveRemote(sm90::MapToRank(empty, thread));
  }
}

// The last, shorter stage of a run: `steps` groups (1 to kMost), all in flight at once.
template <GemmConfig kC, int kBlocks, int kMost>
__device__ __forceinline__ void AddTail(float (&acc)[kBlocks][kC.bn / 2], uint32_t a, uint32_t b,
                                        int steps) {
  if constexpr (kMost > 1) {
    if (steps < kMost) {
      AddTail<kC, kBlocks, kMost - 1>(acc, a, b, steps);
      return;
    }
  }
  sm90::WgmmaFence();
#pragma unroll
  for (int step = 0; step < kMost; ++step) GroupStep<kC, kBlocks>(acc, a, b, step);
  sm90::WgmmaCommit();
  sm90::WgmmaWait<0>();
}

// One run: adds the products of `length` k to acc. Leaves no matrix instruction in flight.
template <GemmConfig kC, int kBlocks>
__device__ __forceinline__ void AddRun(float (&acc)[kBlocks][kC.bn / 2], int length,
                                       uint32_t stages_at, uint32_t a_offset, uint32_t full,
                                       uint32_t empty, Ring<kC.stages>& ring, int thread) {
  constexpr int kSteps = kC.bk / 16;
  const int blocks = length / kC.bk;
  const int rest = length - blocks * kC.bk;
  uint32_t previous = 0;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) sm90::PinRegisters(acc[i]);
  for (int block = 0; block < blocks; ++block) {
    sm90::BarrierWait(full + ring.slot * 8, ring.parity);
    const uint32_t stage = stages_at + ring.slot * kC.stage_bytes();
    sm90::WgmmaFence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      GroupStep<kC, kBlocks>(acc, stage + a_offset, stage + kC.a_bytes(), step);
    }
    sm90::WgmmaCommit();
    sm90::WgmmaWait<1>();  // one stage of instructions stays in flight; the one before is free
    if (block > 0) Release<kC>(empty + previous * 8, thread);
    previous = ring.slot;
    ring.Next();
  }
  if (rest == 0) {
    sm90::WgmmaWait<0>();
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) sm90::PinRegisters(acc[i]);
    if (blocks > 0) Release<kC>(empty + previous * 8, thread);
    return;
  }
  sm90::BarrierWait(full + ring.slot * 8, ring.parity);
  const uint32_t stage = stages_at + ring.slot * kC.stage_bytes();
  AddTail<kC, kBlocks, kSteps>(acc, stage + a_offset, stage + kC.a_bytes(), (rest + 15) / 16);
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) sm90::PinRegisters(acc[i]);
  if (blocks > 0) Release<kC>(empty + previous * 8, thread);
  Release<kC>(empty + ring.slot * 8, thread);
  ring.Next();
}

template <int kCount>
__device__ __forceinline__ void AddInto(float (&acc)[kCount], const float (&left)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] = __fadd_rn(left[i], acc[i]);
}

// Output -------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 packed = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(packed);
}

__device__ __forceinline__ float LoadBias(const GemmArgs& args, int column) {
  if (column >= args.n) return 0.0f;
  return args.bias_f32 ? static_cast<const float*>(args.bias)[column]
                       : __bfloat162float(static_cast<const __nv_bfloat16*>(args.bias)[column]);
}

template <int kCount>
__device__ __forceinline__ void AddBias(const GemmArgs& args, float (&acc)[kCount], int column0,
                                        int lane) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const int column = column0 + 8 * j + 2 * (lane % 4);
    const float b0 = LoadBias(args, column);
    const float b1 = LoadBias(args, column + 1);
    acc[4 * j] = __fadd_rn(acc[4 * j], b0);
    acc[4 * j + 1] = __fadd_rn(acc[4 * j + 1], b1);
    acc[4 * j + 2] = __fadd_rn(acc[4 * j + 2], b0);
    acc[4 * j + 3] = __fadd_rn(acc[4 * j + 3], b1);
  }
}

// Fragment straight to global memory; any shape and alignment.
template <int kCount>
__device__ __forceinline__ void StoreDirect(const GemmArgs& args, const float (&acc)[kCount],
                                            int row0, int column0, int lane) {
  const bool pairs = args.pairs;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row0 + lane / 4 + 8 * half;
    if (row >= args.m) continue;
    const int64_t base = row * args.y_stride;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const int column = column0 + 8 * j + 2 * (lane % 4);
      const float v0 = acc[4 * j + 2 * half];
      const float v1 = acc[4 * j + 2 * half + 1];
      if (column >= args.n) continue;
      if (args.out_f32) {
        float* y = static_cast<float*>(args.y) + base + column;
        if (pairs) {
          *reinterpret_cast<float2*>(y) = {v0, v1};
        } else {
          y[0] = v0;
          if (column + 1 < args.n) y[1] = v1;
        }
      } else {
        __nv_bfloat16* y = static_cast<__nv_bfloat16*>(args.y) + base + column;
        if (pairs) {
          *reinterpret_cast<uint32_t*>(y) = PackBf16(v0, v1);
        } else {
          y[0] = __float2bfloat16_rn(v0);
          if (column + 1 < args.n) y[1] = __float2bfloat16_rn(v1);
        }
      }
    }
  }
}

// 64 rows through two buffers of 64 columns each, written by the copy engine while the warpgroup
// goes on. `buffers` belong to this warpgroup alone and take turns over all calls (`turn`);
// `barrier` is its hardware barrier.
template <int kCount>
__device__ __forceinline__ void StoreStaged(const GemmArgs& args, const CUtensorMap* map,
                                            const float (&acc)[kCount], int row0, int column0,
                                            uint32_t buffers, uint32_t& turn, uint32_t barrier,
                                            int thread) {
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int matrix_row = warp * 16 + lane % 8 + 8 * ((lane / 8) % 2);
  const int matrix_column = lane / 16;
#pragma unroll
  for (int chunk = 0; chunk < kCount / 32; ++chunk) {
    const int column = column0 + 64 * chunk;
    const uint32_t buffer = buffers + turn * 8192;
    turn ^= 1;
    if (thread == 0) sm90::BulkWaitRead<1>();  // the store before the last has left this buffer
    sm90::NamedBarrier(barrier, 128);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float* d = acc + 32 * chunk + 4 * j;
      const uint32_t at = buffer + matrix_row * 128 + (((j + matrix_column) ^ (lane % 8)) * 16);
      sm90::StoreMatrix4(at, PackBf16(d[0], d[1]), PackBf16(d[2], d[3]), PackBf16(d[4], d[5]),
                         PackBf16(d[6], d[7]));
    }
    sm90::FenceProxyAsync();
    sm90::NamedBarrier(barrier, 128);
    if (thread == 0) {
      if (column < args.n && row0 < args.m) sm90::TensorStore(map, buffer, column, row0);
      sm90::BulkCommit();
    }
  }
}

// The kernel ---------------------------------------------------------------------------------

// Runs in one thread.
template <GemmConfig kC, typename Runs>
__device__ __forceinline__ void Produce(const CUtensorMap* map_a, const CUtensorMap* map_b,
                                        const GemmArgs& args, const Runs& runs, uint32_t stages_at,
                                        uint32_t full, uint32_t empty, uint32_t rank,
                                        int first_tile, int stride) {
  const int box_a = args.a_rows / kC.cluster_n;
  const int box_b = kC.bn / kC.cluster_m;
  const uint32_t rank_m = rank % kC.cluster_m;
  const uint32_t rank_n = rank / kC.cluster_m;
  uint16_t mask_a = 0;  // those abreast, which share a
  for (int i = 0; i < kC.cluster_n; ++i) mask_a |= 1u << (rank_m + i * kC.cluster_m);
  const uint16_t mask_b = ((1u << kC.cluster_m) - 1) << (rank_n * kC.cluster_m);
  const uint32_t a_bytes =
      kC.trans_a ? kC.a_bytes() : static_cast<uint32_t>(args.a_rows) * kC.bk * 2;
  Ring<kC.stages> ring;
  ring.parity = 1;  // every slot starts empty
  for (int tile = first_tile; tile < args.tiles_m * args.tiles_n; tile += stride) {
    const int2 origin = TileOrigin<kC>(args, tile, rank);
    for (int index = 0; index < args.chains * args.parts; ++index) {
      const Run run = RunAt(args, runs, index);
      const int end = run.begin + run.length;
      for (int k = run.begin; k < end; k += kC.bk) {
        sm90::BarrierWait(empty + ring.slot * 8, ring.parity);
        const uint32_t barrier = full + ring.slot * 8;
        const uint32_t stage = stages_at + ring.slot * kC.stage_bytes();
        sm90::BarrierArriveExpect(barrier, a_bytes + kC.b_bytes());
        LoadOperand<kC, kC.trans_b, kC.cluster_m, kC.bn>(stage + kC.a_bytes(), map_b, barrier,
                                                         origin.y, k, box_b, rank_m, mask_b);
        LoadOperand<kC, kC.trans_a, kC.cluster_n, kC.bm>(stage, map_a, barrier, origin.x, k, box_a,
                                                         rank_n, mask_a);
        ring.Next();
      }
    }
  }
}

template <GemmConfig kC, typename Runs>
__device__ __forceinline__ void Consume(const CUtensorMap* map_y, const GemmArgs& args,
                                        const Runs& runs, uint32_t stages_at, uint32_t full,
                                        uint32_t empty, uint32_t rank, int first_tile, int stride,
                                        int group) {
  constexpr int kBlocks = kC.blocks();  // row blocks of 64 a warpgroup holds
  constexpr int kCount = kC.bn / 2;
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const uint32_t a_offset = group * kBlocks * (kC.trans_a ? kC.bk * 128 : 8192);
  const uint32_t buffers = stages_at + kC.stages * kC.stage_bytes() + group * 2 * 8192;
  Ring<kC.stages> ring;
  uint32_t turn = 0;
  float acc[kBlocks][kCount];
  float saved[kC.levels > 0 ? kC.levels : 1][kBlocks][kCount];
  for (int tile = first_tile; tile < args.tiles_m * args.tiles_n; tile += stride) {
    const int2 origin = TileOrigin<kC>(args, tile, rank);
    const int row0 = origin.x + group * kBlocks * 64;
    const int warp_row0 = row0 + 16 * warp;
    for (int chain = 0; chain < args.chains; ++chain) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) acc[i][j] = 0.0f;
      }
      for (int part = 0; part < args.parts; ++part) {
        const Run run = RunAt(args, runs, chain * args.parts + part);
        AddRun<kC, kBlocks>(acc, run.length, stages_at, a_offset, full, empty, ring, thread);
      }
      if constexpr (kC.levels > 0) {
        // A binary counter: a finished pair moves one level up.
        if (args.chains > 1) {
          bool open = true;
#pragma unroll
          for (int level = 0; level < kC.levels; ++level) {
            if (!open) continue;
#pragma unroll
            for (int i = 0; i < kBlocks; ++i) {
              if ((chain >> level) & 1) {
                AddInto(acc[i], saved[level][i]);
              } else {
#pragma unroll
                for (int j = 0; j < kCount; ++j) saved[level][i][j] = acc[i][j];
              }
            }
            open = (chain >> level) & 1;
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (args.bias != nullptr) AddBias(args, acc[i], origin.y, lane);
      if constexpr (kC.staged) {
        if (args.out_tma) {
          StoreStaged(args, map_y, acc[i], row0 + 64 * i, origin.y, buffers, turn, 1 + group,
                      thread);
          continue;
        }
      }
      StoreDirect(args, acc[i], warp_row0 + 64 * i, origin.y, lane);
    }
  }
  if constexpr (kC.staged) {
    if (thread == 0) sm90::BulkWaitRead<0>();  // shared memory must outlive the copies
  }
}

// Where a kernel's ring lies in its shared memory: addresses of the stages and of each stage's two
// barriers. What a kernel keeps between stages and barriers has kC.epilogue_bytes().
struct RingPlace {
  uint32_t stages_at, full, empty;
};

// Makes the barriers and lets every thread that uses them see them.
template <GemmConfig kC>
__device__ __forceinline__ RingPlace MakeRing(uint8_t* shared, const CUtensorMap* map_a,
                                              const CUtensorMap* map_b) {
  RingPlace ring;
  ring.stages_at = (sm90::SharedAddress(shared) + 1023) / 1024 * 1024;
  ring.full = ring.stages_at + kC.stages * kC.stage_bytes() + kC.epilogue_bytes();
  ring.empty = ring.full + kC.stages * 8;
  if (threadIdx.x == 0) {
    sm90::PrefetchTensorMap(map_a);
    sm90::PrefetchTensorMap(map_b);
    for (int s = 0; s < kC.stages; ++s) {
      sm90::BarrierInit(ring.full + s * 8, 1);
      sm90::BarrierInit(ring.empty + s * 8, kC.consumers * kC.cluster());
    }
    sm90::BarrierInitFence();
  }
  if constexpr (kC.cluster() > 1) {
    sm90::ClusterSync();
  } else {
    __syncthreads();
  }
  return ring;
}

// At a kernel's end: a CTA's shared memory must outlive its neighbours' copies into it and arrivals
// at its barriers.
template <GemmConfig kC>
__device__ __forceinline__ void LeaveRing() {
  if constexpr (kC.cluster() > 1) {
    __syncwarp();
    sm90::ClusterSync();
  }
}

// `Tag::kConfig` is the configuration (a type, because nvcc 13.0 cannot name a kernel by a
// structure).
template <typename Tag, typename Runs>
__global__ void __launch_bounds__(Tag::kConfig.threads(), 1)
    linear_wgmma_kernel(const __grid_constant__ CUtensorMap map_a,
                        const __grid_constant__ CUtensorMap map_b,
                        const __grid_constant__ CUtensorMap map_y,
                        const __grid_constant__ GemmArgs args, const __grid_constant__ Runs runs) {
  constexpr GemmConfig kC = Tag::kConfig;
  extern __shared__ uint8_t shared[];
  const auto [stages_at, full, empty] = MakeRing<kC>(shared, &map_a, &map_b);
  const uint32_t rank = kC.cluster() > 1 ? sm90::ClusterRank() : 0;
  const int first_tile = blockIdx.x / kC.cluster();
  const int stride = gridDim.x / kC.cluster();
  if (threadIdx.x < 128) {
    if constexpr (kC.consumers == 2) sm90::RegistersDecrease<24>();
    if (__shfl_sync(0xffffffff, threadIdx.x / 32, 0) == 0 && sm90::ElectOne()) {
      Produce<kC>(&map_a, &map_b, args, runs, stages_at, full, empty, rank, first_tile, stride);
    }
    __syncwarp();
  } else {
    if constexpr (kC.consumers == 2) sm90::RegistersIncrease<240>();
    Consume<kC>(&map_y, args, runs, stages_at, full, empty, rank, first_tile, stride,
                threadIdx.x / 128 - 1);
  }
  LeaveRing<kC>();
}

}  // namespace tare::ops::linear::gpu
