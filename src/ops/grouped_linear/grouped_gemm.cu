// All experts of a grouped contraction in one persistent Hopper launch. A tile belongs to one
// expert; what it computes is exactly what linear's kernel computes (one accumulator walks k in
// order), so neither the tile nor the other experts can move a bit.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>

#include "ops/cuda/tensor_map.h"
#include "ops/grouped_linear/grouped_gemm.h"
#include "ops/linear/gpu_gemm.cuh"
#include "tensor/cuda_status.h"

namespace tare::ops::grouped_linear::gpu {
namespace {

using linear::gpu::GemmArgs;
using linear::gpu::GemmConfig;
using linear::gpu::Ring;

constexpr int kMostExperts = 256;

// First routed row and first tile of every expert.
struct Experts {
  int row[kMostExperts + 1];
  int tile[kMostExperts + 1];
};

inline constexpr GemmConfig kConfigs[] = {
    // Few rows an expert: the weights stream past.
    {.bm = 64, .bn = 64, .bk = 128, .stages = 7, .consumers = 1, .staged = false},
    {.bm = 128, .bn = 128, .bk = 64, .stages = 6, .staged = false},
    {.bm = 128, .bn = 256, .bk = 64, .stages = 4, .staged = false},
    // The same for dx.
    {.bm = 64, .bn = 64, .bk = 64, .stages = 12, .consumers = 1, .trans_b = true, .staged = false},
    {.bm = 128, .bn = 128, .bk = 64, .stages = 6, .trans_b = true, .staged = false},
    {.bm = 128, .bn = 256, .bk = 64, .stages = 4, .trans_b = true, .staged = false},
};
constexpr int kPerPass = 3;

template <int kIndex>
struct Tag {
  static constexpr GemmConfig kConfig = kConfigs[kIndex];
};

struct TilePlace {
  int expert, row, column;
};

template <GemmConfig kC>
__device__ __forceinline__ TilePlace PlaceOf(const Experts& experts, int count, int tile) {
  int low = 0, high = count - 1;  // the last expert whose first tile is not behind this one
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (experts.tile[middle] <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int rows = experts.row[low + 1] - experts.row[low];
  const int tiles_m = (rows + kC.bm - 1) / kC.bm;
  const int in_expert = tile - experts.tile[low];
  const int tile_n = in_expert / tiles_m;
  return {low, experts.row[low] + (in_expert - tile_n * tiles_m) * kC.bm, tile_n * kC.bn};
}

template <typename Tag>
__global__ void __launch_bounds__(Tag::kConfig.threads(), 1)
    grouped_wgmma_kernel(const __grid_constant__ CUtensorMap map_a,
                         const __grid_constant__ CUtensorMap map_b,
                         const __grid_constant__ GemmArgs args, int length, int count, int tiles,
                         const __grid_constant__ Experts experts) {
  constexpr GemmConfig kC = Tag::kConfig;
  extern __shared__ uint8_t shared[];
  const auto [stages_at, full, empty] = linear::gpu::MakeRing<kC>(shared, &map_a, &map_b);
  const int first = blockIdx.x, stride = gridDim.x;
  if (threadIdx.x < 128) {
    if constexpr (kC.consumers == 2) sm90::RegistersDecrease<24>();
    if (__shfl_sync(0xffffffff, threadIdx.x / 32, 0) == 0 && sm90::ElectOne()) {
      Ring<kC.stages> ring;
      ring.parity = 1;  // every slot starts empty
      for (int tile = first; tile < tiles; tile += stride) {
        const TilePlace place = PlaceOf<kC>(experts, count, tile);
        for (int k = 0; k < length; k += kC.bk) {
          sm90::BarrierWait(empty + ring.slot * 8, ring.parity);
          const uint32_t barrier = full + ring.slot * 8;
          const uint32_t stage = stages_at + ring.slot * kC.stage_bytes();
          sm90::BarrierArriveExpect(barrier, kC.stage_bytes());
          const int b_row = kC.trans_b ? place.column : place.expert * args.n + place.column;
          const int b_k = kC.trans_b ? place.expert * length + k : k;
          linear::gpu::LoadOperand<kC, kC.trans_b, 1, kC.bn>(stage + kC.a_bytes(), &map_b, barrier,
                                                             b_row, b_k, kC.bn, 0, 0);
          linear::gpu::LoadOperand<kC, false, 1, kC.bm>(stage, &map_a, barrier, place.row, k, kC.bm,
                                                        0, 0);
          ring.Next();
        }
      }
    }
    __syncwarp();
    return;
  }
  if constexpr (kC.consumers == 2) sm90::RegistersIncrease<240>();
  constexpr int kBlocks = kC.blocks();
  constexpr int kCount = kC.bn / 2;
  const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
  const uint32_t a_offset = group * kBlocks * 8192;
  Ring<kC.stages> ring;
  float acc[kBlocks][kCount];
  for (int tile = first; tile < tiles; tile += stride) {
    const TilePlace place = PlaceOf<kC>(experts, count, tile);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) acc[i][j] = 0.0f;
    }
    linear::gpu::AddRun<kC, kBlocks>(acc, length, stages_at, a_offset, full, empty, ring, thread);
    GemmArgs mine = args;
    mine.m = experts.row[place.expert + 1];  // rows behind it are the next expert's
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      linear::gpu::StoreDirect(mine, acc[i],
                               place.row + group * kBlocks * 64 + 64 * i + 16 * (thread / 32),
                               place.column, thread % 32);
    }
  }
}

const void* KernelOf(int index) {
  static const std::array<const void*, 6> kernels = {
      reinterpret_cast<const void*>(&grouped_wgmma_kernel<Tag<0>>),
      reinterpret_cast<const void*>(&grouped_wgmma_kernel<Tag<1>>),
      reinterpret_cast<const void*>(&grouped_wgmma_kernel<Tag<2>>),
      reinterpret_cast<const void*>(&grouped_wgmma_kernel<Tag<3>>),
      reinterpret_cast<const void*>(&grouped_wgmma_kernel<Tag<4>>),
      reinterpret_cast<const void*>(&grouped_wgmma_kernel<Tag<5>>)};
  return kernels[static_cast<size_t>(index)];
}

template <typename Word>
__global__ void __launch_bounds__(256)
    gather_rows_kernel(const uint8_t* from, int64_t stride, const int32_t* rows, int64_t count,
                       int64_t words, Word* to) {
  const int64_t total = count * words;
  for (int64_t at = int64_t{blockIdx.x} * 256 + threadIdx.x; at < total;
       at += int64_t{gridDim.x} * 256) {
    const int64_t i = at / words, w = at - i * words;
    to[at] = reinterpret_cast<const Word*>(from + rows[i] * stride)[w];
  }
}

struct Pointers {
  const void* p[kMostPointers];
};
__global__ void __launch_bounds__(kMostPointers)
    write_pointers_kernel(const __grid_constant__ Pointers from, int count, const void** to) {
  if (static_cast<int>(threadIdx.x) < count) to[threadIdx.x] = from.p[threadIdx.x];
}

}  // namespace

bool CanUse(const Problem& p) {
  const int64_t experts = static_cast<int64_t>(p.offsets.size()) - 1;
  if (experts < 1 || experts > kMostExperts || p.offsets.back() == 0) return false;
  const int64_t rows = p.offsets.back();
  if (p.dx && p.k % 16 != 0) return false;  // a short last group would read the next expert's rows
  const int64_t b_rows = experts * (p.dx ? p.k : p.n), b_columns = p.dx ? p.n : p.k;
  return cuda::CanMap(p.a, rows, p.k, p.k) && cuda::CanMap(p.w, b_rows, b_columns, b_columns);
}

Status Launch(const Problem& p, StreamHandle stream, std::string* text) {
  const int experts = static_cast<int>(p.offsets.size()) - 1;
  const int64_t rows = p.offsets.back();
  int64_t busy = 0;
  for (int e = 0; e < experts; ++e) busy += p.offsets[e + 1] > p.offsets[e];
  const int64_t each = rows / std::max<int64_t>(1, busy);
  const int index = (p.dx ? kPerPass : 0) + (each <= 64 ? 0 : each <= 256 ? 1 : 2);
  const GemmConfig& config = kConfigs[index];
  Experts list = {};
  int tiles = 0;
  const int tiles_n = static_cast<int>((p.n + config.bn - 1) / config.bn);
  for (int e = 0; e < experts; ++e) {
    list.row[e] = static_cast<int>(p.offsets[e]);
    list.tile[e] = tiles;
    const int64_t of_expert = p.offsets[e + 1] - p.offsets[e];
    tiles += static_cast<int>((of_expert + config.bm - 1) / config.bm) * tiles_n;
  }
  list.row[experts] = static_cast<int>(rows);
  list.tile[experts] = tiles;
  GemmArgs args = {};
  args.n = static_cast<int>(p.n);
  args.out_f32 = p.y_f32;
  args.pairs = p.n % 2 == 0 && reinterpret_cast<uintptr_t>(p.y) % (p.y_f32 ? 8 : 4) == 0;
  args.y = p.y;
  args.y_stride = p.n;
  int length = static_cast<int>(p.k), count = experts;
  CUtensorMap map_a = {}, map_b = {};
  TARE_RETURN_IF_ERROR(cuda::MapMatrix16(p.a, rows, p.k, p.k, config.bm, &map_a));
  if (p.dx) {
    TARE_RETURN_IF_ERROR(
        cuda::MapMatrix16(p.w, int64_t{experts} * p.k, p.n, p.n, config.bk, &map_b));
  } else {
    TARE_RETURN_IF_ERROR(
        cuda::MapMatrix16(p.w, int64_t{experts} * p.n, p.k, p.k, config.bn, &map_b));
  }
  const void* kernel = KernelOf(index);
  TARE_CUDA_RETURN_IF_ERROR(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, config.shared_bytes()));
  int device = 0, sms = 0;
  TARE_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  TARE_CUDA_RETURN_IF_ERROR(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  void* parameters[] = {&map_a, &map_b, &args, &length, &count, &tiles, &list};
  TARE_CUDA_RETURN_IF_ERROR(cudaLaunchKernel(
      kernel, dim3(static_cast<unsigned>(std::min(tiles, sms))),
      dim3(static_cast<unsigned>(config.threads())), parameters,
      static_cast<size_t>(config.shared_bytes()), static_cast<cudaStream_t>(stream)));
  if (text != nullptr) {
    *text = fmt::format("tile={}x{}x{} stages={} consumers={} tiles={}", config.bm, config.bn,
                        config.bk, config.stages, config.consumers, tiles);
  }
  return Ok();
}

Status LaunchGather(const void* from, int64_t stride, const int32_t* rows, int64_t count,
                    int64_t row_bytes, void* to, StreamHandle stream) {
  if (count == 0) return Ok();
  const auto fits = [&](int64_t size) {
    return row_bytes % size == 0 && stride % size == 0 &&
           reinterpret_cast<uintptr_t>(from) % static_cast<uintptr_t>(size) == 0 &&
           reinterpret_cast<uintptr_t>(to) % static_cast<uintptr_t>(size) == 0;
  };
  const auto run = [&](auto word) {
    using Word = decltype(word);
    const int64_t words = row_bytes / static_cast<int64_t>(sizeof(Word));
    const auto grid =
        static_cast<unsigned>(std::min<int64_t>((count * words + 255) / 256, int64_t{1} << 30));
    gather_rows_kernel<Word><<<grid, 256, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const uint8_t*>(from), stride, rows, count, words, static_cast<Word*>(to));
  };
  if (fits(16)) {
    run(uint4{});
  } else if (fits(4)) {
    run(uint32_t{});
  } else {
    run(uint16_t{});
  }
  TARE_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  return Ok();
}

Status LaunchPointers(std::span<const void* const> pointers, const void** to, StreamHandle stream) {
  if (pointers.size() > kMostPointers)
    return Unsupported("grouped_linear: {} pointers; at most {}", pointers.size(), kMostPointers);
  Pointers list = {};
  std::copy(pointers.begin(), pointers.end(), list.p);
  write_pointers_kernel<<<1, kMostPointers, 0, static_cast<cudaStream_t>(stream)>>>(
      list, static_cast<int>(pointers.size()), to);
  TARE_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  return Ok();
}

}  // namespace tare::ops::grouped_linear::gpu
