// fp8_linear on Hopper: e4m3 tiles of 128 x 128 or 192 x 128, K in blocks of 128.
//
// What fixes the bits: the partial sum of a block starts from +0 and takes its four steps of 32 k
// in order; then acc = fma(partial, x_scale * w_scale, acc), blocks ascending. Two or three
// warpgroups of 64 rows, so that some multiply while others add their partial sums.

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "numerics/fp.h"
#include "numerics/lanes.h"
#include "numerics/sm90.h"
#include "ops/cuda/descriptors.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/cuda/sm90.cuh"
#include "ops/cuda/tensor_map.h"
#include "ops/fp8_linear/fp8_gemm.h"
#include "ops/linear/gpu_gemm.cuh"
#include "tensor/convert.h"

namespace tare::ops::fp8_linear::gpu {
namespace {

constexpr int kTile = 128;         // rows of w
constexpr int kCount = kTile / 2;  // accumulators of a thread

// By the number of warpgroups that multiply, each 64 rows of x.
template <int kGroups>
struct Shape {
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kStages = kGroups == 2 ? 6 : 4;
  static constexpr int kXBytes = kRows * 128;
  static constexpr int kStageBytes = kXBytes + kTile * 128;
  static constexpr int kStagingBytes = kGroups * 2 * 8192;  // of the output
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kStagingBytes + kStages * 16;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kRegisters = kGroups == 2 ? 240 : 160;
};

struct KernelArgs {
  linear::gpu::GemmArgs gemm;  // m, n, y, y_stride, out_f32, pairs, bias, bias_f32
  const float *x_scale, *w_scale;
  int blocks, first, last;  // K blocks in all, and of this call
  int tiles_m, tiles_n, group_m;
};

// d (+)= A[64 x 32] B[32 x 128]^T, e4m3, both K-major in shared memory. kClear: from +0.
template <bool kClear>
__device__ __forceinline__ void Step(float (&d)[kCount], uint64_t a, uint64_t b) {
#define TARE_FP8_STEP(scale)                                                                       \
  asm volatile(                                                                                    \
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"                                    \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                     \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "           \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "           \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"             \
      "}, %64, %65, " scale ", 1, 1;"                                                              \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), \
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), \
        "+f"(d[63])                                                                                \
      : "l"(a), "l"(b))
  if constexpr (kClear) {
    TARE_FP8_STEP("0");
  } else {
    TARE_FP8_STEP("1");
  }
#undef TARE_FP8_STEP
}

template <int kRows>
__device__ __forceinline__ int2 TileOrigin(const KernelArgs& a, int tile) {
  const int per_group = a.group_m * a.tiles_n;
  const int group = tile / per_group, in_group = tile - group * per_group;
  const int first_m = group * a.group_m, rows = min(a.group_m, a.tiles_m - first_m);
  const int tile_n = in_group / rows;
  return {(first_m + in_group - tile_n * rows) * kRows, tile_n * kTile};
}

// Every tile begins at slot 0 of the ring, so that a slot is a constant where it is used: a warp a
// scheduler and group issues the whole loop, and addresses made from a slot's number took as many
// cycles as the sums. Each slot has its own parity, a bit of `phases`.
template <int kGroups>
__global__ void __launch_bounds__(Shape<kGroups>::kThreads, 1)
    fp8_wgmma_kernel(const __grid_constant__ CUtensorMap map_x,
                     const __grid_constant__ CUtensorMap map_w,
                     const __grid_constant__ CUtensorMap map_y,
                     const __grid_constant__ KernelArgs args) {
  using S = Shape<kGroups>;
  constexpr int kStages = S::kStages, kStageBytes = S::kStageBytes;
  extern __shared__ uint8_t shared[];
  const uint32_t stages_at = (sm90::SharedAddress(shared) + 1023) / 1024 * 1024;
  const uint32_t staging = stages_at + kStages * kStageBytes;
  const uint32_t full = staging + S::kStagingBytes, empty = full + kStages * 8;
  if (threadIdx.x == 0) {
    sm90::PrefetchTensorMap(&map_x);
    sm90::PrefetchTensorMap(&map_w);
    for (int s = 0; s < kStages; ++s) {
      sm90::BarrierInit(full + s * 8, 1);
      sm90::BarrierInit(empty + s * 8, kGroups);
    }
    sm90::BarrierInitFence();
  }
  __syncthreads();
  const int tiles = args.tiles_m * args.tiles_n;
  if (threadIdx.x < 128) {
    sm90::RegistersDecrease<24>();
    if (__shfl_sync(0xffffffff, threadIdx.x / 32, 0) == 0 && sm90::ElectOne()) {
      uint32_t phases = ~0u;  // every slot starts empty
      for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int2 origin = TileOrigin<S::kRows>(args, tile);
        for (int b = args.first; b < args.last; b += kStages) {
#pragma unroll
          for (int s = 0; s < kStages; ++s) {
            if (b + s >= args.last) break;
            sm90::BarrierWait(empty + s * 8, phases >> s & 1);
            phases ^= 1u << s;
            const uint32_t barrier = full + s * 8, stage = stages_at + s * kStageBytes;
            sm90::BarrierArriveExpect(barrier, kStageBytes);
            // The maps see pairs of codes as 16-bit elements.
            sm90::TensorLoad(stage, &map_x, barrier, 64 * (b + s), origin.x);
            sm90::TensorLoad(stage + S::kXBytes, &map_w, barrier, 64 * (b + s), origin.y);
          }
        }
      }
    }
    __syncwarp();
    return;
  }
  sm90::RegistersIncrease<S::kRegisters>();
  const int group = sm90::Uniform(static_cast<int>(threadIdx.x) / 128 - 1);
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const uint32_t x_low = sm90::DescriptorLow(stages_at + group * 64 * 128);
  const uint32_t w_low = sm90::DescriptorLow(stages_at + S::kXBytes);
  uint32_t phases = 0, turn = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int2 origin = TileOrigin<S::kRows>(args, tile);
    const int row0 = origin.x + 64 * group;
    const int row = row0 + 16 * (thread / 32) + lane / 4;
    // Rows behind the matrix read its last scale; what they compute is not stored. Scales come one
    // block ahead.
    const float* scale_a = args.x_scale + int64_t{min(row, args.gemm.m - 1)} * args.blocks;
    const float* scale_b = args.x_scale + int64_t{min(row + 8, args.gemm.m - 1)} * args.blocks;
    const float* scale_w = args.w_scale + int64_t{origin.y / kTile} * args.blocks;
    scale_a += args.first, scale_b += args.first, scale_w += args.first;
    float next_a = *scale_a, next_b = *scale_b, next_w = *scale_w;
    float acc[kCount], partial[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) acc[i] = partial[i] = 0.0f;
    for (int b = args.first; b < args.last; b += kStages) {
#pragma unroll
      for (int s = 0; s < kStages; ++s) {
        if (b + s >= args.last) break;
        const float sa = __fmul_rn(next_a, next_w), sb = __fmul_rn(next_b, next_w);
        if (b + s + 1 < args.last)
          next_a = scale_a[s + 1], next_b = scale_b[s + 1], next_w = scale_w[s + 1];
        sm90::BarrierWait(full + s * 8, phases >> s & 1);
        phases ^= 1u << s;
        sm90::PinRegisters(partial);
        sm90::WgmmaFence();
        Step<true>(partial, sm90::Descriptor(x_low, s * kStageBytes),
                   sm90::Descriptor(w_low, s * kStageBytes));
#pragma unroll
        for (int step = 1; step < 4; ++step) {
          Step<false>(partial, sm90::Descriptor(x_low, s * kStageBytes + 32 * step),
                      sm90::Descriptor(w_low, s * kStageBytes + 32 * step));
        }
        sm90::WgmmaCommit();
        sm90::WgmmaWait<0>();
        sm90::PinRegisters(partial);
        if (thread == 0) sm90::BarrierArrive(empty + s * 8);
#pragma unroll
        for (int j = 0; j < kCount / 4; ++j) {
          acc[4 * j] = __fmaf_rn(partial[4 * j], sa, acc[4 * j]);
          acc[4 * j + 1] = __fmaf_rn(partial[4 * j + 1], sa, acc[4 * j + 1]);
          acc[4 * j + 2] = __fmaf_rn(partial[4 * j + 2], sb, acc[4 * j + 2]);
          acc[4 * j + 3] = __fmaf_rn(partial[4 * j + 3], sb, acc[4 * j + 3]);
        }
      }
      scale_a += kStages, scale_b += kStages, scale_w += kStages;
    }
    if (args.gemm.bias != nullptr) linear::gpu::AddBias(args.gemm, acc, origin.y, lane);
    if (args.gemm.out_tma) {
      linear::gpu::StoreStaged(args.gemm, &map_y, acc, row0, origin.y, staging + group * 2 * 8192,
                               turn, 1 + group, thread);
    } else {
      linear::gpu::StoreDirect(args.gemm, acc, row0 + 16 * (thread / 32), origin.y, lane);
    }
  }
  if (thread == 0) sm90::BulkWaitRead<0>();  // shared memory must outlive the copies
}

// The result or the sum of one segment, one thread an output.
struct Generic {
  Params p;
  Args a;
  bool ieee;
  int64_t first, last;
  float* out;
  bool one_chain, in_turn;  // planted faults
};
__device__ float SumOf(const Generic& g, int64_t m, int64_t n) {
  const Params& p = g.p;
  const Args& a = g.a;
  const int64_t blocks = (p.k + kBlock - 1) / kBlock;
  const uint8_t* x = static_cast<const uint8_t*>(a.x) + m * p.k;
  const uint8_t* w = static_cast<const uint8_t*>(a.w) + n * p.k;
  float acc = 0.0f;
  for (int64_t b = g.first; b < g.last; ++b) {
    if (g.one_chain && b > 0) break;
    const int64_t k0 = b * kBlock, k1 = g.one_chain ? p.k : min(p.k, k0 + kBlock);
    float partial = 0.0f;
    if (g.ieee) {
      for (int64_t k = k0; k < k1; ++k)
        partial = numerics::Fma(E4m3ToF32(x[k]), E4m3ToF32(w[k]), partial);
    } else {
      partial = numerics::Sm90Chain<numerics::MmaType::kE4M3>(x + k0, w + k0, k1 - k0, partial);
    }
    const float x_scale = a.x_scale[m * blocks + b], w_scale = a.w_scale[n / kBlock * blocks + b];
    const float scale = g.in_turn ? w_scale : numerics::Mul(x_scale, w_scale);
    if (g.in_turn) partial = numerics::Mul(partial, x_scale);
    acc = numerics::Fma(partial, scale, acc);
  }
  return acc;
}

__device__ void StoreResult(const Params& p, const Args& a, int64_t at, int64_t n, float v) {
  if (p.bias) {
    const float bias = p.bias_dtype == DType::kF32 ? static_cast<const float*>(a.bias)[n]
                       : p.bias_dtype == DType::kBF16
                           ? cuda::Widen(static_cast<const uint16_t*>(a.bias)[n])
                           : F16ToF32(static_cast<const uint16_t*>(a.bias)[n]);
    v = numerics::Add(v, bias);
  }
  if (p.y_dtype == DType::kF32) {
    static_cast<float*>(a.y)[at] = numerics::Canonical(v);
  } else {
    static_cast<uint16_t*>(a.y)[at] = p.y_dtype == DType::kBF16
                                          ? cuda::Bf16Bits(v)
                                          : ConvertFloatBits<DType::kF32, DType::kF16>(
                                                __float_as_uint(v), Fp8Overflow::kNonFinite);
  }
}

__global__ void __launch_bounds__(128) fp8_generic_kernel(const __grid_constant__ Generic g) {
  const int64_t at = int64_t{blockIdx.x} * 128 + threadIdx.x;
  if (at >= g.a.m * g.p.n) return;
  const float v = SumOf(g, at / g.p.n, at % g.p.n);
  if (g.out != nullptr) {
    g.out[at] = v;
  } else {
    StoreResult(g.p, g.a, at, at % g.p.n, v);
  }
}

__global__ void __launch_bounds__(256)
    fp8_finish_kernel(const __grid_constant__ Params p, const __grid_constant__ Args a,
                      const float* sums) {
  const int64_t at = int64_t{blockIdx.x} * 256 + threadIdx.x, count = a.m * p.n;
  if (at >= count) return;
  float runs[8];
  for (int s = 0; s < p.segments; ++s) runs[s] = sums[s * count + at];
  StoreResult(p, a, at, at % p.n, numerics::NeighbourTree(runs, int64_t{p.segments}));
}

template <int kGroups>
Status Run(const Problem& p, KernelArgs a, int sms, StreamHandle stream) {
  using S = Shape<kGroups>;
  a.tiles_m = static_cast<int>((p.args.m + S::kRows - 1) / S::kRows);
  a.group_m = std::min(16, a.tiles_m);
  CUtensorMap map_x = {}, map_w = {}, map_y = {};
  const int64_t pairs = p.params.k / 2;
  TARE_RETURN_IF_ERROR(cuda::MapMatrix16(p.args.x, p.args.m, pairs, pairs, S::kRows, &map_x));
  TARE_RETURN_IF_ERROR(cuda::MapMatrix16(p.args.w, p.params.n, pairs, pairs, kTile, &map_w));
  a.gemm.out_tma = !a.gemm.out_f32 && cuda::CanMap(a.gemm.y, p.args.m, p.params.n, a.gemm.y_stride);
  if (a.gemm.out_tma) {
    TARE_RETURN_IF_ERROR(
        cuda::MapMatrix16(a.gemm.y, p.args.m, p.params.n, a.gemm.y_stride, 64, &map_y));
  }
  auto* const kernel = &fp8_wgmma_kernel<kGroups>;
  TARE_RETURN_IF_ERROR(cuda::AllowShared(kernel, S::kSharedBytes));
  const auto grid = static_cast<unsigned>(std::min<int64_t>(sms, int64_t{a.tiles_m} * a.tiles_n));
  kernel<<<grid, S::kThreads, S::kSharedBytes, static_cast<cudaStream_t>(stream)>>>(map_x, map_w,
                                                                                    map_y, a);
  return cuda::Launched();
}

}  // namespace

// A wave of tiles of three warpgroups takes 1.39 to 1.44 times one of two (H200).
int Groups(int64_t m, int64_t n, int sms) {
  const int64_t tiles_n = (n + kTile - 1) / kTile;
  const auto waves = [&](int64_t rows) {
    const int64_t tiles = (m + rows - 1) / rows * tiles_n;
    return static_cast<double>((tiles + sms - 1) / sms);
  };
  return waves(192) * 1.42 < waves(128) ? 3 : 2;
}

bool CanUse(const Problem& p) {
  if (p.ieee || p.one_chain || p.scales_in_turn || p.params.k % 16 != 0) return false;
  if (p.out == nullptr &&
      (p.params.y_dtype == DType::kF16 || (p.params.bias && p.params.bias_dtype == DType::kF16)))
    return false;
  const int64_t pairs = p.params.k / 2;
  return cuda::CanMap(p.args.x, p.args.m, pairs, pairs) &&
         cuda::CanMap(p.args.w, p.params.n, pairs, pairs);
}

Status Launch(const Problem& p, StreamHandle stream, std::string* config, int groups) {
  const Params& params = p.params;
  KernelArgs a = {};
  a.gemm.m = static_cast<int>(p.args.m);
  a.gemm.n = static_cast<int>(params.n);
  a.gemm.y = p.out != nullptr ? p.out : p.args.y;
  a.gemm.y_stride = params.n;
  a.gemm.out_f32 = p.out != nullptr || params.y_dtype == DType::kF32;
  a.gemm.pairs =
      params.n % 2 == 0 && reinterpret_cast<uintptr_t>(a.gemm.y) % (a.gemm.out_f32 ? 8 : 4) == 0;
  a.gemm.bias = p.out != nullptr ? nullptr : p.args.bias;
  a.gemm.bias_f32 = params.bias_dtype == DType::kF32;
  a.x_scale = p.args.x_scale;
  a.w_scale = p.args.w_scale;
  a.blocks = static_cast<int>((params.k + kBlock - 1) / kBlock);
  a.first = static_cast<int>(p.first);
  a.last = static_cast<int>(p.last);
  a.tiles_n = static_cast<int>((params.n + kTile - 1) / kTile);
  int device = 0, sms = 0;
  TARE_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  TARE_CUDA_RETURN_IF_ERROR(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  if (groups == 0) groups = Groups(p.args.m, params.n, sms);
  if (groups != 2 && groups != 3) return InvalidArgument("fp8_linear: {} warpgroups", groups);
  if (config != nullptr) {
    *config = fmt::format("tile={}x{}x128 stages={} consumers={}", 64 * groups, kTile,
                          groups == 2 ? Shape<2>::kStages : Shape<3>::kStages, groups);
  }
  return groups == 2 ? Run<2>(p, a, sms, stream) : Run<3>(p, a, sms, stream);
}

Status LaunchGeneric(const Problem& p, StreamHandle stream) {
  const int64_t count = p.args.m * p.params.n;
  fp8_generic_kernel<<<static_cast<unsigned>((count + 127) / 128), 128, 0,
                       static_cast<cudaStream_t>(stream)>>>(
      {p.params, p.args, p.ieee, p.first, p.last, p.out, p.one_chain, p.scales_in_turn});
  return cuda::Launched();
}

Status LaunchFinish(const Params& params, const Args& args, const float* sums,
                    StreamHandle stream) {
  const int64_t count = args.m * params.n;
  fp8_finish_kernel<<<static_cast<unsigned>((count + 255) / 256), 256, 0,
                      static_cast<cudaStream_t>(stream)>>>(params, args, sums);
  return cuda::Launched();
}

}  // namespace tare::ops::fp8_linear::gpu
