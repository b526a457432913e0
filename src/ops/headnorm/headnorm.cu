// headnorm on CUDA: eight threads a head.

#include "ops/cuda/rows.cuh"
#include "ops/headnorm/headnorm_cuda.h"

namespace tare::ops::headnorm {
namespace {

using namespace tare::ops::cuda;  // NOLINT(google-build-using-namespace)

constexpr int kWarps = 8;

struct ForwardArgs {
  int64_t total;  // rows * heads
  int heads, dim;
  const void *x, *w;
  int64_t x_stride, y_stride;
  void* y;
  float* rstd;
  float inverse, eps;
  bool w_f32, unit_offset;
};

// Eight threads a head, four heads a warp: thread t of a head has the elements 32c + 4t .. 32c + 4t
// + 3 of every chunk of 32, which are the lanes 4t .. 4t + 3, so each folds its lanes by itself.
// kVec: the four are read at once; else one by one. kChunks: head_dim / 32 rounded up, kept in
// registers.
struct Head {
  int64_t item, row;
  int64_t column;
  bool there;
};
__device__ __forceinline__ Head HeadOf(int64_t item, int64_t total, uint32_t heads, int dim) {
  const bool there = item < total;
  const uint32_t safe = static_cast<uint32_t>(there ? item : total - 1);
  const uint32_t row = safe / heads;
  return {safe, row, int64_t{safe - row * heads} * dim, there};
}

template <bool kVec, typename T>
__device__ __forceinline__ void LoadFour(const T* p, int left, float (&v)[4]) {
  if constexpr (kVec) {
    if (left > 0) {
      Widen4(LoadRaw4(p), v);
    } else {
      v[0] = v[1] = v[2] = v[3] = 0.0f;
    }
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = e < left ? Widen(p[e]) : 0.0f;
  }
}
template <bool kVec, typename T>
__device__ __forceinline__ void StoreFour(const float (&v)[4], int left, T* p) {
  if constexpr (kVec) {
    if (left > 0) Store4(v, p);
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (e < left) Put(v[e], p + e);
    }
  }
}
// The tree over 32 lanes, four in each of eight neighbouring threads.
__device__ __forceinline__ float TreeOfHead(float (&acc)[4]) {
#pragma unroll
  for (int half = 4; half >= 1; half /= 2) {
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[e] = Add(acc[e], __shfl_xor_sync(kAllLanes, acc[e], half));
  }
  return Add(Add(acc[0], acc[2]), Add(acc[1], acc[3]));
}
template <bool kVec>
__device__ __forceinline__ void Weights(const void* w, bool f32, bool unit_offset, int at, int left,
                                        float (&v)[4]) {
  if (f32) {
    LoadFour<kVec>(static_cast<const float*>(w) + at, left, v);
  } else {
    LoadFour<kVec>(static_cast<const uint16_t*>(w) + at, left, v);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (unit_offset) v[e] = Add(v[e], 1.0f);
  }
}

template <typename T, int kChunks, bool kVec>
__global__ void __launch_bounds__(32 * kWarps)
    headnorm_forward_kernel(const __grid_constant__ ForwardArgs a) {
  const int t = threadIdx.x % 8;
  float w[kChunks][4];
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
    Weights<kVec>(a.w, a.w_f32, a.unit_offset, 32 * c + 4 * t, a.dim - 32 * c - 4 * t, w[c]);
  // A warp stays together for the shuffles: its four heads start at `first`.
  for (int64_t first = (int64_t{blockIdx.x} * kWarps + threadIdx.x / 32) * 4; first < a.total;
       first += int64_t{gridDim.x} * kWarps * 4) {
    const Head head = HeadOf(first + threadIdx.x % 32 / 8, a.total, a.heads, a.dim);
    const T* x = static_cast<const T*>(a.x) + head.row * a.x_stride + head.column + 4 * t;
    T* y = static_cast<T*>(a.y) + head.row * a.y_stride + head.column + 4 * t;
    float v[kChunks][4];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) LoadFour<kVec>(x + 32 * c, a.dim - 32 * c - 4 * t, v[c]);
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[e] = Fma(v[c][e], v[c][e], acc[e]);
    }
    const float r = Div(1.0f, numerics::Sqrt(Fma(TreeOfHead(acc), a.inverse, a.eps)));
    if (!head.there) continue;
    if (t == 0 && a.rstd != nullptr) Put(r, a.rstd + head.item);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) v[c][e] = Mul(Mul(v[c][e], r), w[c][e]);
      StoreFour<kVec>(v[c], a.dim - 32 * c - 4 * t, y + 32 * c);
    }
  }
}

// Any head size: a warp a head, lane i in thread i, the head read twice.
template <typename T>
__global__ void __launch_bounds__(32 * kWarps)
    headnorm_wide_kernel(const __grid_constant__ ForwardArgs a) {
  const int lane = threadIdx.x % 32;
  for (int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; item < a.total;
       item += int64_t{gridDim.x} * kWarps) {
    const Head head = HeadOf(item, a.total, a.heads, a.dim);
    const T* x = static_cast<const T*>(a.x) + head.row * a.x_stride + head.column;
    T* y = static_cast<T*>(a.y) + head.row * a.y_stride + head.column;
    float acc = 0.0f;
    for (int i = lane; i < a.dim; i += 32) {
      const float h = Widen(x[i]);
      acc = Fma(h, h, acc);
    }
    const float r = Div(1.0f, numerics::Sqrt(Fma(TreeOf32(acc), a.inverse, a.eps)));
    if (lane == 0 && a.rstd != nullptr) Put(r, a.rstd + item);
    for (int i = lane; i < a.dim; i += 32) {
      float w = LoadAny(a.w, a.w_f32, i);
      if (a.unit_offset) w = Add(w, 1.0f);
      Put(Mul(Mul(Widen(x[i]), r), w), y + i);
    }
  }
}

struct BackwardArgsCuda {
  int64_t total;
  int heads, dim;
  const void *x, *w, *dy;
  void* dx;
  int64_t x_stride, dy_stride, dx_stride;
  const float* rstd;
  float inverse;
  bool w_f32, unit_offset;
};

template <typename T, typename G, int kChunks, bool kVec>
__global__ void __launch_bounds__(32 * kWarps)
    headnorm_backward_kernel(const __grid_constant__ BackwardArgsCuda a) {
  const int t = threadIdx.x % 8;
  for (int64_t first = (int64_t{blockIdx.x} * kWarps + threadIdx.x / 32) * 4; first < a.total;
       first += int64_t{gridDim.x} * kWarps * 4) {
    const Head head = HeadOf(first + threadIdx.x % 32 / 8, a.total, a.heads, a.dim);
    const T* x = static_cast<const T*>(a.x) + head.row * a.x_stride + head.column + 4 * t;
    const G* dy = static_cast<const G*>(a.dy) + head.row * a.dy_stride + head.column + 4 * t;
    G* dx = static_cast<G*>(a.dx) + head.row * a.dx_stride + head.column + 4 * t;
    const float r = a.rstd[head.item];
    float g[kChunks][4], xhat[kChunks][4];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      LoadFour<kVec>(dy + 32 * c, a.dim - 32 * c - 4 * t, g[c]);
      LoadFour<kVec>(x + 32 * c, a.dim - 32 * c - 4 * t, xhat[c]);
    }
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int left = a.dim - 32 * c - 4 * t;
      float w[4];
      Weights<kVec>(a.w, a.w_f32, a.unit_offset, 32 * c + 4 * t, left, w);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        g[c][e] = Mul(g[c][e], w[e]);
        xhat[c][e] = Mul(xhat[c][e], r);
        if (e < left) acc[e] = Fma(g[c][e], xhat[c][e], acc[e]);
      }
    }
    const float m = Mul(TreeOfHead(acc), a.inverse);
    if (!head.there) continue;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) g[c][e] = Mul(Fma(-m, xhat[c][e], g[c][e]), r);
      StoreFour<kVec>(g[c], a.dim - 32 * c - 4 * t, dx + 32 * c);
    }
  }
}

template <typename T, typename G>
__global__ void __launch_bounds__(32 * kWarps)
    headnorm_wide_backward_kernel(const __grid_constant__ BackwardArgsCuda a) {
  const int lane = threadIdx.x % 32;
  for (int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; item < a.total;
       item += int64_t{gridDim.x} * kWarps) {
    const Head head = HeadOf(item, a.total, a.heads, a.dim);
    const T* x = static_cast<const T*>(a.x) + head.row * a.x_stride + head.column;
    const G* dy = static_cast<const G*>(a.dy) + head.row * a.dy_stride + head.column;
    G* dx = static_cast<G*>(a.dx) + head.row * a.dx_stride + head.column;
    const float r = a.rstd[item];
    const auto read = [&](int i, float& g, float& xhat) {
      float w = LoadAny(a.w, a.w_f32, i);
      if (a.unit_offset) w = Add(w, 1.0f);
      g = Mul(Widen(dy[i]), w);
      xhat = Mul(Widen(x[i]), r);
    };
    float acc = 0.0f;
    for (int i = lane; i < a.dim; i += 32) {
      float g, xhat;
      read(i, g, xhat);
      acc = Fma(g, xhat, acc);
    }
    const float m = Mul(TreeOf32(acc), a.inverse);
    for (int i = lane; i < a.dim; i += 32) {
      float g, xhat;
      read(i, g, xhat);
      Put(Mul(Fma(-m, xhat, g), r), dx + i);
    }
  }
}

// sums[unit][head][D]: one head over one unit's tokens by lanes(32), 32 columns a block.
template <typename T, typename G>
__device__ __forceinline__ float HeadSum(const BackwardArgsCuda& a, float (&lanes)[32][33],
                                         int64_t begin, int64_t rows, int head, int first_column) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = first_column + lane;
  float acc = 0.0f;
  if (column < a.dim) {
    const int64_t at = int64_t{head} * a.dim + column;
    const T* x = static_cast<const T*>(a.x) + at;
    const G* dy = static_cast<const G*>(a.dy) + at;
#pragma unroll 8
    for (int64_t i = warp; i < rows; i += 32) {
      const int64_t t = begin + i;
      const float xhat = Mul(Widen(x[t * a.x_stride]), a.rstd[t * a.heads + head]);
      acc = Fma(Widen(dy[t * a.dy_stride]), xhat, acc);
    }
  }
  __syncthreads();  // the last reader is done
  lanes[warp][lane] = acc;
  __syncthreads();
  return TreeOf32(lanes[lane][warp]);  // of column first_column + warp
}

template <typename T, typename G>
__global__ void __launch_bounds__(1024)
    headnorm_unit_sums_kernel(const __grid_constant__ BackwardArgsCuda a, float* sums,
                              const __grid_constant__ UnitList units) {
  __shared__ float lanes[32][33];
  const int head = blockIdx.y, unit = blockIdx.z, first = blockIdx.x * 32;
  const float sum =
      HeadSum<T, G>(a, lanes, units.unit[unit].begin, units.unit[unit].rows, head, first);
  const int column = first + static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x % 32 == 0 && column < a.dim)
    sums[(int64_t{unit} * a.heads + head) * a.dim + column] = sum;
}

// The tree of halves over heads, without recursion: heads [begin, end) split at begin + ceil(n /
// 2). `at(head)` gives a head's sum.
template <class At>
__device__ float TreeOfHeads(int heads, const At& at) {
  // An explicit stack of open ranges; 17 levels hold 65,536 heads.
  struct Node {
    int begin, end;
    float left;
    bool has_left;
  };
  Node stack[18];
  int depth = 0;
  stack[0] = {0, heads, 0.0f, false};
  float value = 0.0f;
  for (;;) {
    Node& node = stack[depth];
    if (node.end - node.begin > 1 && !node.has_left) {
      stack[depth + 1] = {node.begin, node.begin + (node.end - node.begin + 1) / 2, 0.0f, false};
      ++depth;
      continue;
    }
    if (node.end - node.begin == 1) value = at(node.begin);
    // Go up: a finished left side opens the right one, a finished right side is added.
    for (;;) {
      if (depth == 0) return value;
      Node& parent = stack[depth - 1];
      if (!parent.has_left) {
        parent.left = value;
        parent.has_left = true;
        stack[depth] = {parent.begin + (parent.end - parent.begin + 1) / 2, parent.end, 0.0f,
                        false};
        break;
      }
      value = Add(parent.left, value);
      --depth;
    }
  }
}

__global__ void headnorm_add_units_kernel(int heads, int dim, int units, const float* sums,
                                          float* dw) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= dim) return;
  float total = dw[column];
  for (int u = 0; u < units; ++u) {
    const float* unit = sums + int64_t{u} * heads * dim + column;
    total = numerics::Canonical(
        Add(total, TreeOfHeads(heads, [&](int head) { return unit[int64_t{head} * dim]; })));
  }
  dw[column] = total;
}

// Without a workspace: one block walks its columns' units and heads in turn. `heads` sums of 32
// columns in shared memory.
template <typename T, typename G>
__global__ void __launch_bounds__(1024)
    headnorm_weight_kernel(const __grid_constant__ BackwardArgsCuda a, float* dw,
                           const __grid_constant__ UnitList units) {
  extern __shared__ float sums[];  // [heads][32]
  __shared__ float lanes[32][33];
  const int first = blockIdx.x * 32, warp = threadIdx.x / 32;
  for (int u = 0; u < units.count; ++u) {
    for (int head = 0; head < a.heads; ++head) {
      const float sum =
          HeadSum<T, G>(a, lanes, units.unit[u].begin, units.unit[u].rows, head, first);
      if (threadIdx.x % 32 == 0) sums[head * 32 + warp] = sum;
    }
    if (threadIdx.x % 32 == 0 && first + warp < a.dim) {
      const float tree = TreeOfHeads(a.heads, [&](int head) { return sums[head * 32 + warp]; });
      Put(Add(dw[first + warp], tree), dw + first + warp);
    }
    __syncthreads();
  }
}

}  // namespace

size_t BackwardWorkspaceBytesCuda(const Params& p, int64_t units) {
  const int64_t at_once = std::min<int64_t>(units, UnitList::kMost);
  return static_cast<size_t>(at_once * p.heads * p.head_dim) * sizeof(float);
}

Status ForwardCuda(const Ctx& ctx, const Params& p, const Args& args) {
  TARE_RETURN_IF_ERROR(CheckDeviceRows("headnorm", args.rows * p.heads));
  const ForwardArgs a = {args.rows * p.heads,
                         static_cast<int>(p.heads),
                         static_cast<int>(p.head_dim),
                         args.x,
                         args.w,
                         args.x_stride,
                         args.y_stride,
                         args.y,
                         args.rstd,
                         1.0f / static_cast<float>(p.head_dim),
                         p.eps,
                         p.weight_dtype == DType::kF32,
                         p.unit_offset};
  return WithRowDType(p.dtype, [&](auto tag) -> Status {
    using T = decltype(tag);
    const auto run = [&](auto* kernel, int heads_at_once) {
      kernel<<<GridFor(a.total, kWarps * heads_at_once, 132 * 16), 32 * kWarps, 0, Stream(ctx)>>>(
          a);
      return Launched();
    };
    const bool vec = p.head_dim % 4 == 0 && a.x_stride % 4 == 0 && a.y_stride % 4 == 0 &&
                     Aligned4(a.x, p.dtype) && Aligned4(a.y, p.dtype) &&
                     Aligned4(a.w, p.weight_dtype);
    if (p.head_dim > 256) return run(&headnorm_wide_kernel<T>, 1);
    if (!vec) return run(&headnorm_forward_kernel<T, 8, false>, 4);
    if (p.head_dim <= 64) return run(&headnorm_forward_kernel<T, 2, true>, 4);
    if (p.head_dim <= 128) return run(&headnorm_forward_kernel<T, 4, true>, 4);
    return run(&headnorm_forward_kernel<T, 8, true>, 4);
  });
}

Status BackwardCuda(const Ctx& ctx, const Params& p, const BackwardArgs& args) {
  TARE_RETURN_IF_ERROR(CheckDeviceRows("headnorm", args.rows * p.heads));
  const BackwardArgsCuda a = {args.rows * p.heads,
                              static_cast<int>(p.heads),
                              static_cast<int>(p.head_dim),
                              args.x,
                              args.w,
                              args.dy,
                              args.dx,
                              args.x_stride,
                              args.dy_stride,
                              args.dx_stride,
                              args.rstd,
                              1.0f / static_cast<float>(p.head_dim),
                              p.weight_dtype == DType::kF32,
                              p.unit_offset};
  const auto columns = static_cast<unsigned>((p.head_dim + 31) / 32);
  const size_t needed = BackwardWorkspaceBytesCuda(p, static_cast<int64_t>(args.units.size()));
  const bool wide = ctx.workspace != nullptr && ctx.workspace_bytes >= needed;
  const size_t shared = static_cast<size_t>(p.heads) * 32 * sizeof(float);
  if (!wide && shared > kMostShared) {
    return InvalidArgument("headnorm: {} heads on CUDA need a workspace of {} bytes; {} are given",
                           p.heads, needed, ctx.workspace_bytes);
  }
  return WithRowDType(p.dtype, [&](auto x) {
    return WithRowDType(p.grad_dtype, [&](auto g) -> Status {
      using T = decltype(x);
      using G = decltype(g);
      // The weight first: dx may overwrite dy.
      TARE_RETURN_IF_ERROR(ForUnits(args.units, [&](const UnitList& list) -> Status {
        if (wide) {
          auto* sums = static_cast<float*>(ctx.workspace);
          const dim3 grid(columns, static_cast<unsigned>(p.heads),
                          static_cast<unsigned>(list.count));
          headnorm_unit_sums_kernel<T, G><<<grid, 1024, 0, Stream(ctx)>>>(a, sums, list);
          TARE_RETURN_IF_ERROR(Launched());
          headnorm_add_units_kernel<<<static_cast<unsigned>((p.head_dim + 127) / 128), 128, 0,
                                      Stream(ctx)>>>(a.heads, a.dim, list.count, sums, args.dw);
          return Launched();
        }
        TARE_RETURN_IF_ERROR(AllowShared(&headnorm_weight_kernel<T, G>, shared));
        headnorm_weight_kernel<T, G><<<columns, 1024, shared, Stream(ctx)>>>(a, args.dw, list);
        return Launched();
      }));
      const auto run = [&](auto* kernel, int heads_at_once) {
        kernel<<<GridFor(a.total, kWarps * heads_at_once, 132 * 16), 32 * kWarps, 0, Stream(ctx)>>>(
            a);
        return Launched();
      };
      const bool vec = p.head_dim % 4 == 0 && a.x_stride % 4 == 0 && a.dy_stride % 4 == 0 &&
                       a.dx_stride % 4 == 0 && Aligned4(a.x, p.dtype) &&
                       Aligned4(a.dy, p.grad_dtype) && Aligned4(a.dx, p.grad_dtype) &&
                       Aligned4(a.w, p.weight_dtype);
      if (p.head_dim > 256) return run(&headnorm_wide_backward_kernel<T, G>, 1);
      if (!vec) return run(&headnorm_backward_kernel<T, G, 8, false>, 4);
      if (p.head_dim <= 128) return run(&headnorm_backward_kernel<T, G, 4, true>, 4);
      return run(&headnorm_backward_kernel<T, G, 8, true>, 4);
    });
  });
}

}  // namespace tare::ops::headnorm
