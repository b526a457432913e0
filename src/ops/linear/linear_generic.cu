// The generic CUDA kernels of linear: every dtype, stride, shape and run of k, in both profiles.
// They serve what the Hopper kernels cannot take (odd strides, f16, groups cut in the middle of a
// tensor), the ieee-f32 profile, and as the reference for the fast ones on large shapes. Speed is
// not promised.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "ops/linear/linear_cuda.h"
#include "tensor/cuda_status.h"

namespace tare::ops::linear::gpu {
namespace {

enum class StepKind { kIeee, kBf16, kF16 };

constexpr int kTile = 64;
constexpr int kThreads = 256;
constexpr int kMaxLevels = 3;

struct GenericArgs {
  int64_t m, n;
  const void* a;
  const void* b;
  int64_t a_i, a_k, b_j, b_k;  // elements between neighbours in each index
  DType a_dtype, b_dtype, operand, y_dtype, bias_dtype;
  void* y;
  int64_t y_stride;
  const void* bias;
  int chains, parts;
  bool add;  // each chain's sum is added to y (f32)
};

__device__ float LoadElement(const void* data, DType dtype, int64_t at) {
  switch (dtype) {
    case DType::kBF16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]);
    case DType::kF16:
      return __half2float(static_cast<const __half*>(data)[at]);
    default:
      return static_cast<const float*>(data)[at];
  }
}

__device__ float RoundTo(float value, DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return __bfloat162float(__float2bfloat16_rn(value));
    case DType::kF16:
      return __half2float(__float2half_rn(value));
    default:
      return value;
  }
}

__device__ void StoreElement(void* data, DType dtype, int64_t at, float value) {
  switch (dtype) {
    case DType::kBF16:
      static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16_rn(value);
      break;
    case DType::kF16:
      static_cast<__half*>(data)[at] = __float2half_rn(value);
      break;
    default:
      static_cast<float*>(data)[at] = value;
  }
}

// The source index of position `p` of a chain made of `parts` runs.
__device__ int SourceK(const Run* runs, int parts, int p) {
  for (int i = 0; i < parts - 1; ++i) {
    if (p < runs[i].length) return runs[i].begin + p;
    p -= runs[i].length;
  }
  return runs[parts - 1].begin + p;
}

template <StepKind kStep>
__device__ uint32_t Pack16(float low, float high) {
  if constexpr (kStep == StepKind::kF16) {
    const __half2 packed = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(packed);
  } else {
    const __nv_bfloat162 packed = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(packed);
  }
}

// Element e of a thread's 16 accumulators, as a position in the tile.
template <StepKind kStep>
__device__ int2 Position(int e) {
  const int thread = static_cast<int>(threadIdx.x);
  if constexpr (kStep == StepKind::kIeee) {
    return {thread / 16 * 4 + e / 4, thread % 16 * 4 + e % 4};
  } else {
    const int lane = thread % 32;
    const int warp = thread / 32;
    return {warp % 4 * 16 + lane / 4 + 8 * (e / 2 % 2),
            warp / 4 * 32 + e / 4 * 8 + lane % 4 * 2 + e % 2};
  }
}

// Adds `count` (1 to 16) products a position to acc, k ascending.
template <StepKind kStep>
__device__ void AddGroup(float (&acc)[16], const float (&a)[16][kTile + 1],
                         const float (&b)[16][kTile + 1], int count) {
  const int thread = static_cast<int>(threadIdx.x);
  if constexpr (kStep == StepKind::kIeee) {
    // Never padded: a product of zeros would turn an accumulator of -0 into +0.
    for (int k = 0; k < count; ++k) {
#pragma unroll
      for (int e = 0; e < 16; ++e) {
        acc[e] = __fmaf_rn(a[k][thread / 16 * 4 + e / 4], b[k][thread % 16 * 4 + e % 4], acc[e]);
      }
    }
  } else {
    const int lane = thread % 32;
    const int warp = thread / 32;
    const int g = lane / 4;
    const int q = lane % 4 * 2;
    const int row = warp % 4 * 16 + g;
    const uint32_t a0 = Pack16<kStep>(a[q][row], a[q + 1][row]);
    const uint32_t a1 = Pack16<kStep>(a[q][row + 8], a[q + 1][row + 8]);
    const uint32_t a2 = Pack16<kStep>(a[q + 8][row], a[q + 9][row]);
    const uint32_t a3 = Pack16<kStep>(a[q + 8][row + 8], a[q + 9][row + 8]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = warp / 4 * 32 + j * 8 + g;
      const uint32_t b0 = Pack16<kStep>(b[q][column], b[q + 1][column]);
      const uint32_t b1 = Pack16<kStep>(b[q + 8][column], b[q + 9][column]);
      float* d = acc + 4 * j;
      if constexpr (kStep == StepKind::kF16) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
      } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
      }
    }
  }
}

template <StepKind kStep>
__global__ void __launch_bounds__(kThreads)
    linear_generic_kernel(const __grid_constant__ GenericArgs args,
                          const __grid_constant__ GemmRuns runs) {
  __shared__ float a_tile[16][kTile + 1];
  __shared__ float b_tile[16][kTile + 1];
  const int64_t row0 = static_cast<int64_t>(blockIdx.y) * kTile;
  const int64_t column0 = static_cast<int64_t>(blockIdx.x) * kTile;
  float acc[16];
  float saved[kMaxLevels][16];
  for (int chain = 0; chain < args.chains; ++chain) {
    const Run* chain_runs = runs.runs + chain * args.parts;
    int length = 0;
    for (int i = 0; i < args.parts; ++i) length += chain_runs[i].length;
#pragma unroll
    for (int e = 0; e < 16; ++e) acc[e] = 0.0f;
    for (int p0 = 0; p0 < length; p0 += 16) {
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < 16 * kTile; i += kThreads) {
        const int k = i % 16;
        const int at = i / 16;
        float a = 0.0f;
        float b = 0.0f;
        if (p0 + k < length) {
          const int64_t source = SourceK(chain_runs, args.parts, p0 + k);
          if (row0 + at < args.m) {
            a = RoundTo(
                LoadElement(args.a, args.a_dtype, (row0 + at) * args.a_i + source * args.a_k),
                args.operand);
          }
          if (column0 + at < args.n) {
            b = RoundTo(
                LoadElement(args.b, args.b_dtype, (column0 + at) * args.b_j + source * args.b_k),
                args.operand);
          }
        }
        a_tile[k][at] = a;
        b_tile[k][at] = b;
      }
      __syncthreads();
      AddGroup<kStep>(acc, a_tile, b_tile, min(16, length - p0));
    }
    if (args.add) {
#pragma unroll
      for (int e = 0; e < 16; ++e) {
        const int2 at = Position<kStep>(e);
        if (row0 + at.x < args.m && column0 + at.y < args.n) {
          float* y = static_cast<float*>(args.y) + (row0 + at.x) * args.y_stride + column0 + at.y;
          *y = __fadd_rn(*y, acc[e]);
        }
      }
    } else if (args.chains > 1) {
      bool open = true;  // a binary counter: a finished pair moves one level up
#pragma unroll
      for (int level = 0; level < kMaxLevels; ++level) {
        if (!open) continue;
#pragma unroll
        for (int e = 0; e < 16; ++e) {
          if ((chain >> level) & 1) {
            acc[e] = __fadd_rn(saved[level][e], acc[e]);
          } else {
            saved[level][e] = acc[e];
          }
        }
        open = (chain >> level) & 1;
      }
    }
  }
  if (args.add) return;
#pragma unroll
  for (int e = 0; e < 16; ++e) {
    const int2 at = Position<kStep>(e);
    const int64_t row = row0 + at.x;
    const int64_t column = column0 + at.y;
    if (row >= args.m || column >= args.n) continue;
    float value = acc[e];
    if (args.bias != nullptr)
      value = __fadd_rn(value, LoadElement(args.bias, args.bias_dtype, column));
    StoreElement(args.y, args.y_dtype, row * args.y_stride + column, value);
  }
}

struct BiasUnits {
  int count;
  Run runs[GemmRuns::kMax];
};

// A block of 32 x 32: lane y of a column folds rows y, y + 32, ... of the unit; then the tree.
__global__ void __launch_bounds__(1024)
    linear_bias_gradient_kernel(const void* dy, DType dtype, int64_t stride, int64_t n,
                                const __grid_constant__ BiasUnits units, float* dbias) {
  __shared__ float lanes[32][33];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  for (int u = 0; u < units.count; ++u) {
    float sum = 0.0f;
    if (column < n) {
      for (int row = static_cast<int>(threadIdx.y); row < units.runs[u].length; row += 32) {
        sum = __fadd_rn(sum, LoadElement(dy, dtype, (units.runs[u].begin + row) * stride + column));
      }
    }
    lanes[threadIdx.y][threadIdx.x] = sum;
    for (unsigned half = 16; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.y < half) {
        lanes[threadIdx.y][threadIdx.x] =
            __fadd_rn(lanes[threadIdx.y][threadIdx.x], lanes[threadIdx.y + half][threadIdx.x]);
      }
    }
    if (threadIdx.y == 0 && column < n)
      dbias[column] = __fadd_rn(dbias[column], lanes[0][threadIdx.x]);
    __syncthreads();
  }
}

__global__ void __launch_bounds__(256)
    linear_round_kernel(const void* from, DType from_dtype, int64_t from_stride, int64_t rows,
                        int64_t columns, void* to, DType to_dtype, int64_t to_stride) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * columns;
       i += stride) {
    const int64_t row = i / columns;
    const int64_t column = i - row * columns;
    StoreElement(to, to_dtype, row * to_stride + column,
                 LoadElement(from, from_dtype, row * from_stride + column));
  }
}

}  // namespace

Status LaunchRound(const void* from, DType from_dtype, int64_t from_stride, int64_t rows,
                   int64_t columns, void* to, DType to_dtype, int64_t to_stride,
                   StreamHandle stream) {
  const int64_t blocks = std::min<int64_t>((rows * columns + 255) / 256, 132 * 16);
  linear_round_kernel<<<static_cast<unsigned>(blocks), 256, 0, static_cast<cudaStream_t>(stream)>>>(
      from, from_dtype, from_stride, rows, columns, to, to_dtype, to_stride);
  TARE_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  return Ok();
}

Status LaunchGeneric(const Contraction& c, StreamHandle stream) {
  const bool trans_a = c.pass == Pass::kDw;
  const bool trans_b = c.pass != Pass::kForward;
  GenericArgs args = {};
  args.m = c.m;
  args.n = c.n;
  args.a = c.a;
  args.b = c.b;
  args.a_i = trans_a ? 1 : c.a_stride;
  args.a_k = trans_a ? c.a_stride : 1;
  args.b_j = trans_b ? 1 : c.b_stride;
  args.b_k = trans_b ? c.b_stride : 1;
  args.a_dtype = c.a_dtype;
  args.b_dtype = c.b_dtype;
  args.operand = c.operand;
  args.y_dtype = c.y_dtype;
  args.y = c.y;
  args.y_stride = c.y_stride;
  args.bias = c.bias;
  args.bias_dtype = c.bias_dtype;
  args.parts = c.parts;
  args.add = c.pass == Pass::kDw;
  const int chains = c.chains();
  const dim3 grid(static_cast<unsigned>((c.n + kTile - 1) / kTile),
                  static_cast<unsigned>((c.m + kTile - 1) / kTile));
  const int per_launch = args.add ? GemmRuns::kMax : std::max(chains, 1);
  for (int first = 0; first < std::max(chains, args.add ? 0 : 1); first += per_launch) {
    args.chains = std::min(per_launch, chains - first);
    GemmRuns runs = {};
    std::copy_n(c.runs.data() + first * c.parts, args.chains * c.parts, runs.runs);
    const auto kernel = c.ieee                     ? linear_generic_kernel<StepKind::kIeee>
                        : c.operand == DType::kF16 ? linear_generic_kernel<StepKind::kF16>
                                                   : linear_generic_kernel<StepKind::kBf16>;
    kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args, runs);
    TARE_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  }
  return Ok();
}

Status LaunchBiasGradient(const void* dy, DType dtype, int64_t stride, int64_t n,
                          const std::vector<Run>& units, float* dbias, StreamHandle stream) {
  for (size_t first = 0; first < units.size(); first += GemmRuns::kMax) {
    BiasUnits part;
    part.count = static_cast<int>(std::min<size_t>(GemmRuns::kMax, units.size() - first));
    std::copy_n(units.data() + first, part.count, part.runs);
    linear_bias_gradient_kernel<<<static_cast<unsigned>((n + 31) / 32), dim3(32, 32), 0,
                                  static_cast<cudaStream_t>(stream)>>>(dy, dtype, stride, n, part,
                                                                       dbias);
    TARE_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  }
  return Ok();
}

}  // namespace tare::ops::linear::gpu
