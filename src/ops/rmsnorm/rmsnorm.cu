// rmsnorm on CUDA: a warp for each row, the row's values kept in shared memory between the sum and
// the product, or (prefill) rmsnorm_bulk.cuh; the weight's gradient by blocks of columns, a warp
// for each token lane.

#include "ops/rmsnorm/rmsnorm_bulk.cuh"

namespace tare::ops::rmsnorm {
namespace {

using namespace tare::ops::cuda;  // NOLINT(google-build-using-namespace)

constexpr int kWarps = 4;
constexpr int kBatch = 8;  // chunks whose loads are in flight together

// kResidual: h = round(x + residual) of dtype R; else h is x.
template <typename T, typename R, bool kResidual, bool kVec>
__global__ void __launch_bounds__(32 * kWarps)
    rmsnorm_forward_kernel(const __grid_constant__ ForwardArgs a) {
  using C = Chunk<kVec>;
  using H = std::conditional_t<kResidual, R, T>;
  extern __shared__ __align__(16) uint8_t shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t width = a.width;
  const int chunks = static_cast<int>((width + 127) / 128);
  // h as it is stored, which is what it was rounded to: each thread reads what it wrote itself.
  H* stage = reinterpret_cast<H*>(shared) + static_cast<int64_t>(warp) * chunks * 128;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + warp; row < a.rows;
       row += int64_t{gridDim.x} * kWarps) {
    const T* x = static_cast<const T*>(a.x) + row * width;
    T* y = static_cast<T*>(a.y) + row * width;
    const R* residual = kResidual ? static_cast<const R*>(a.residual) + row * width : nullptr;
    R* sum_out = kResidual ? static_cast<R*>(a.residual_out) + row * width : nullptr;
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int c0 = 0; c0 < chunks; c0 += kBatch) {
      float h[kBatch][4], r[kBatch][4];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int64_t at = int64_t{c0 + b} * 128;
        C::Load(x + at, width - at, lane, h[b]);
        if constexpr (kResidual) C::Load(residual + at, width - at, lane, r[b]);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int64_t at = int64_t{c0 + b} * 128;
        if (at >= width) break;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (kResidual) h[b][e] = RoundAs(Add(h[b][e], r[b][e]), sum_out);
          acc[e] = Fma(h[b][e], h[b][e], acc[e]);
        }
        if constexpr (kResidual) C::Store(h[b], sum_out + at, width - at, lane);
        if (a.staged) Store4(h[b], stage + at + 4 * lane);
      }
    }
    const float rstd = Div(1.0f, numerics::Sqrt(Fma(C::Tree(acc), a.inverse, a.eps)));
    if (lane == 0 && a.rstd != nullptr) Put(rstd, a.rstd + row);
    for (int c = 0; c < chunks; ++c) {
      const int64_t at = int64_t{c} * 128;
      float h[4], w[4];
      if (a.staged) {
        Widen4(LoadRaw4(stage + at + 4 * lane), h);
      } else {
        const H* again =
            kResidual ? reinterpret_cast<const H*>(sum_out) : reinterpret_cast<const H*>(x);
        C::Load(again + at, width - at, lane, h);
      }
      C::LoadWeight(a.w, a.w_f32, at, width - at, lane, w);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (a.unit_offset) w[e] = Add(w[e], 1.0f);
        h[e] = Mul(Mul(h[e], rstd), w[e]);
      }
      C::Store(h, y + at, width - at, lane);
    }
  }
}

template <typename H, typename G, bool kVec>
__global__ void __launch_bounds__(32 * kWarps)
    rmsnorm_backward_kernel(const __grid_constant__ BackwardRowArgs a) {
  using C = Chunk<kVec>;
  extern __shared__ __align__(16) uint8_t shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t width = a.width;
  const int chunks = static_cast<int>((width + 127) / 128);
  // h and dy as they came: each thread reads what it wrote itself.
  uint8_t* mine = shared + static_cast<int64_t>(warp) * chunks * 128 * (sizeof(H) + sizeof(G));
  H* stage_h = reinterpret_cast<H*>(mine);
  G* stage_dy = reinterpret_cast<G*>(mine + static_cast<int64_t>(chunks) * 128 * sizeof(H));
  for (int64_t row = int64_t{blockIdx.x} * kWarps + warp; row < a.rows;
       row += int64_t{gridDim.x} * kWarps) {
    const H* h = static_cast<const H*>(a.h) + row * width;
    const G* dy = static_cast<const G*>(a.dy) + row * width;
    const G* extra = a.extra == nullptr ? nullptr : static_cast<const G*>(a.extra) + row * width;
    G* dx = static_cast<G*>(a.dx) + row * width;
    const float r = a.rstd[row];
    // g = dy * w and x^ = h * r of a chunk whose h and dy are there.
    const auto prepare = [&](int64_t at, float(&g)[4], float(&xhat)[4]) {
      float w[4];
      C::LoadWeight(a.w, a.w_f32, at, width - at, lane, w);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (a.unit_offset) w[e] = Add(w[e], 1.0f);
        g[e] = Mul(g[e], w[e]);
        xhat[e] = Mul(xhat[e], r);
      }
    };
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int c0 = 0; c0 < chunks; c0 += kBatch) {
      float g[kBatch][4], xhat[kBatch][4];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int64_t at = int64_t{c0 + b} * 128;
        C::Load(dy + at, width - at, lane, g[b]);
        C::Load(h + at, width - at, lane, xhat[b]);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int64_t at = int64_t{c0 + b} * 128;
        if (at >= width) break;
        if (a.staged) {
          Store4(g[b], stage_dy + at + 4 * lane);
          Store4(xhat[b], stage_h + at + 4 * lane);
        }
        prepare(at, g[b], xhat[b]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          // An element behind the row takes no part.
          if (at + C::Index(lane, e) < width) acc[e] = Fma(g[b][e], xhat[b][e], acc[e]);
        }
      }
    }
    const float c = Mul(C::Tree(acc), a.inverse);
    for (int c0 = 0; c0 < chunks; c0 += kBatch) {
      float add[kBatch][4];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int64_t at = int64_t{c0 + b} * 128;
        if (extra != nullptr) C::Load(extra + at, width - at, lane, add[b]);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int64_t at = int64_t{c0 + b} * 128;
        if (at >= width) break;
        float g[4], xhat[4];
        if (a.staged) {
          Widen4(LoadRaw4(stage_dy + at + 4 * lane), g);
          Widen4(LoadRaw4(stage_h + at + 4 * lane), xhat);
        } else {
          C::Load(dy + at, width - at, lane, g);
          C::Load(h + at, width - at, lane, xhat);
        }
        prepare(at, g, xhat);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float u = Fma(-c, xhat[e], g[e]);
          g[e] = extra == nullptr ? Mul(u, r) : Fma(u, r, add[b][e]);
        }
        C::Store(g, dx + at, width - at, lane);
      }
    }
  }
}

// Columns 32b .. 32b + 31 of the weight's gradient: warp l folds the tokens l, l + 32, ... of each
// unit, then warp c adds column c's lanes.
template <typename H, typename G>
__global__ void __launch_bounds__(1024)
    rmsnorm_weight_kernel(int64_t width, const void* h_, const void* dy_, const float* rstd,
                          float* dw, const __grid_constant__ UnitList units) {
  __shared__ float lanes[32][33];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = int64_t{blockIdx.x} * 32 + lane;
  const H* h = static_cast<const H*>(h_) + column;
  const G* dy = static_cast<const G*>(dy_) + column;
  for (int u = 0; u < units.count; ++u) {
    const int64_t begin = units.unit[u].begin, rows = units.unit[u].rows;
    float acc = 0.0f;
    if (column < width) {
      // The loads of a batch go out before the batch before is summed.
      constexpr int kAhead = 8;
      float x[2][kAhead], d[2][kAhead], r[2][kAhead];
      const auto fetch = [&](int64_t first, float(&xs)[kAhead], float(&ds)[kAhead],
                             float(&rs)[kAhead]) {
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          if (first + 32 * k >= rows) break;
          const int64_t t = begin + first + 32 * k;
          xs[k] = Widen(h[t * width]), ds[k] = Widen(dy[t * width]), rs[k] = rstd[t];
        }
      };
      const auto add = [&](int64_t first, const float(&xs)[kAhead], const float(&ds)[kAhead],
                           const float(&rs)[kAhead]) {
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          if (first + 32 * k < rows) acc = Fma(ds[k], Mul(xs[k], rs[k]), acc);
        }
      };
      fetch(warp, x[0], d[0], r[0]);
      for (int64_t i = warp; i < rows; i += 64 * kAhead) {
        fetch(i + 32 * kAhead, x[1], d[1], r[1]);
        add(i, x[0], d[0], r[0]);
        fetch(i + 64 * kAhead, x[0], d[0], r[0]);
        add(i + 32 * kAhead, x[1], d[1], r[1]);
      }
    }
    lanes[warp][lane] = acc;
    __syncthreads();
    const float sum = TreeOf32(lanes[lane][warp]);
    const int64_t mine = int64_t{blockIdx.x} * 32 + warp;
    if (lane == 0 && mine < width) Put(Add(dw[mine], sum), dw + mine);
    __syncthreads();
  }
}

struct Faults {
  bool unrounded_sum, cast_before_add, late_cast, reversed, split_fma;
};

// Forward with planted faults, as the CPU's: one thread a row, off the fast path.
template <typename T, typename R>
__global__ void rmsnorm_faulty_kernel(const __grid_constant__ ForwardArgs a, bool add_residual,
                                      Faults f) {
  const int64_t t = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (t >= a.rows) return;
  const int64_t width = a.width;
  const auto value = [&](int64_t i, bool store) {
    float v = Widen(static_cast<const T*>(a.x)[t * width + i]);
    if (!add_residual) return v;
    float residual = Widen(static_cast<const R*>(a.residual)[t * width + i]);
    if (f.cast_before_add) v = ThroughBf16(v), residual = ThroughBf16(residual);
    v = Add(v, residual);
    R* out = static_cast<R*>(a.residual_out) + t * width + i;
    const float rounded = RoundAs(v, out);
    if (store) Put(v, out);
    return f.unrounded_sum ? v : rounded;
  };
  float lane[128];
  for (float& l : lane) l = 0.0f;
  for (int64_t j = 0; j < width; ++j) {
    const float v = value(f.reversed ? width - 1 - j : j, false);
    lane[j % 128] = f.split_fma ? Add(lane[j % 128], Mul(v, v)) : Fma(v, v, lane[j % 128]);
  }
  for (int half = 64; half >= 1; half /= 2) {
    for (int j = 0; j < half; ++j) lane[j] = Add(lane[j], lane[j + half]);
  }
  const float r = Div(1.0f, numerics::Sqrt(Fma(lane[0], a.inverse, a.eps)));
  if (a.rstd != nullptr) Put(r, a.rstd + t);
  for (int64_t i = 0; i < width; ++i) {
    float v = Mul(value(i, true), r);
    if (f.late_cast) v = ThroughBf16(v);
    float w = LoadAny(a.w, a.w_f32, i);
    if (a.unit_offset) w = Add(w, 1.0f);
    Put(Mul(v, w), static_cast<T*>(a.y) + t * width + i);
  }
}

// Rows enough for the copy engine's kernel to pay, all of its widths and addresses.
constexpr int64_t kBulkRows = 512;
bool CanBulk(const Params& p, const ForwardArgs& a) {
  return p.dtype == DType::kBF16 && a.rows >= kBulkRows && p.hidden % 128 == 0 &&
         Aligned16({a.x, a.y, a.residual, a.residual_out});
}

// As many CTAs as fit beside each other.
template <class Kernel, class KernelArgs>
Status RunBulk(Kernel* kernel, const Ctx& ctx, const KernelArgs& a, const BulkShape& shape,
               int team) {
  TARE_RETURN_IF_ERROR(AllowShared(kernel, shape.shared));
  TARE_ASSIGN_OR_RETURN(const unsigned sms, Multiprocessors());
  const auto beside = static_cast<unsigned>(std::max<size_t>(1, kMostShared / shape.shared));
  kernel<<<sms * std::min(beside, 4u), 32 * static_cast<unsigned>(team * shape.teams), shape.shared,
           Stream(ctx)>>>(a, shape);
  return Launched();
}

template <class Kernel, class KernelArgs>
Status Run(Kernel* kernel, const Ctx& ctx, const KernelArgs& a, size_t shared) {
  TARE_RETURN_IF_ERROR(AllowShared(kernel, shared));
  kernel<<<GridFor(a.rows, kWarps), 32 * kWarps, shared, Stream(ctx)>>>(a);
  return Launched();
}

}  // namespace

Status ForwardCuda(const Ctx& ctx, const Params& p, const Args& args) {
  ForwardArgs a = {args.rows,
                   p.hidden,
                   args.x,
                   args.residual,
                   args.w,
                   args.y,
                   args.residual_out,
                   args.rstd,
                   1.0f / static_cast<float>(p.hidden),
                   p.eps,
                   p.weight_dtype == DType::kF32,
                   p.unit_offset,
                   false};
  const Faults faults = {fault::Active(kUnroundedSum, ctx.side),
                         fault::Active(kCastBeforeAdd, ctx.side),
                         fault::Active(kLateCast, ctx.side), fault::Active(kReversed, ctx.side),
                         fault::Active(kSplitFma, ctx.side)};
  if (fault::Active(kEpsilon, ctx.side)) a.eps *= 10.0f;
  return WithRowDType(p.dtype, [&](auto x) {
    return WithRowDType(p.residual_dtype, [&](auto residual) -> Status {
      using T = decltype(x);
      using R = decltype(residual);
      if (faults.unrounded_sum || faults.cast_before_add || faults.late_cast || faults.reversed ||
          faults.split_fma) {
        rmsnorm_faulty_kernel<T, R>
            <<<static_cast<unsigned>((a.rows + 63) / 64), 64, 0, Stream(ctx)>>>(a, p.add_residual,
                                                                                faults);
        return Launched();
      }
      size_t shared = static_cast<size_t>(kWarps) * static_cast<size_t>((p.hidden + 127) / 128) *
                      128 * (p.add_residual ? sizeof(R) : sizeof(T));
      a.staged = shared <= kMostShared;
      if (!a.staged) shared = 0;
      const bool vec = p.hidden % 4 == 0 && Aligned4(a.x, p.dtype) && Aligned4(a.y, p.dtype) &&
                       Aligned4(a.w, p.weight_dtype) && Aligned4(a.residual, p.residual_dtype) &&
                       Aligned4(a.residual_out, p.residual_dtype);
      if constexpr (sizeof(T) == 2) {
        const BulkShape bulk = ShapeOf(
            p.add_residual ? BulkStageBytes<R, true>(p.hidden) : BulkStageBytes<R, false>(p.hidden),
            BulkBytesOfWeight(p.hidden), kMostTeams);
        if (bulk.teams > 0 && CanBulk(p, a)) {
          return p.add_residual
                     ? RunBulk(&rmsnorm_bulk_kernel<R, true>, ctx, a, bulk, kForwardTeam)
                     : RunBulk(&rmsnorm_bulk_kernel<R, false>, ctx, a, bulk, kForwardTeam);
        }
      }
      if (p.add_residual) {
        return vec ? Run(&rmsnorm_forward_kernel<T, R, true, true>, ctx, a, shared)
                   : Run(&rmsnorm_forward_kernel<T, R, true, false>, ctx, a, shared);
      }
      return vec ? Run(&rmsnorm_forward_kernel<T, T, false, true>, ctx, a, shared)
                 : Run(&rmsnorm_forward_kernel<T, T, false, false>, ctx, a, shared);
    });
  });
}

Status BackwardCuda(const Ctx& ctx, const Params& p, const BackwardArgs& args) {
  TARE_RETURN_IF_ERROR(CheckDeviceRows("rmsnorm", args.rows));
  BackwardRowArgs a = {args.rows,
                       p.hidden,
                       args.h,
                       args.w,
                       args.dy,
                       args.dresidual_out,
                       args.dx,
                       args.rstd,
                       1.0f / static_cast<float>(p.hidden),
                       p.weight_dtype == DType::kF32,
                       p.unit_offset,
                       false};
  const DType h_dtype = p.add_residual ? p.residual_dtype : p.dtype;
  const TokenUnit everything[] = {{0, args.rows}};
  std::span<const TokenUnit> units = args.units;
  if (fault::Active(kPaddedRows, ctx.side)) units = everything;
  return WithRowDType(h_dtype, [&](auto h) {
    return WithRowDType(p.grad_dtype, [&](auto g) -> Status {
      using H = decltype(h);
      using G = decltype(g);
      // The weight first: dx may overwrite dy.
      const bool by_bulk =
          a.rows >= kBulkRows && p.hidden % kWeightColumns == 0 && Aligned16({args.h, args.dy});
      TARE_RETURN_IF_ERROR(ForUnits(units, [&](const UnitList& list) -> Status {
        if (by_bulk) {
          auto* const kernel = &rmsnorm_bulk_weight_kernel<H, G>;
          TARE_RETURN_IF_ERROR(AllowShared(kernel, WeightShared<H, G>()));
          kernel<<<kWeightCluster* static_cast<unsigned>(p.hidden / kWeightColumns), 256,
                   WeightShared<H, G>(), Stream(ctx)>>>(p.hidden, static_cast<const H*>(args.h),
                                                        static_cast<const G*>(args.dy), args.rstd,
                                                        args.dw, list);
          return Launched();
        }
        rmsnorm_weight_kernel<H, G>
            <<<static_cast<unsigned>((p.hidden + 31) / 32), 1024, 0, Stream(ctx)>>>(
                p.hidden, args.h, args.dy, args.rstd, args.dw, list);
        return Launched();
      }));
      const BulkShape bulk =
          ShapeOf(BulkBackwardStageBytes<H, G>(p.hidden, a.extra != nullptr),
                  BulkBytesOfWeight(p.hidden), kMostThreads / 32 / kBackwardTeam);
      if (bulk.teams > 0 && a.rows >= kBulkRows && p.hidden % 128 == 0 &&
          Aligned16({a.h, a.dy, a.extra, a.dx})) {
        return a.extra != nullptr
                   ? RunBulk(&rmsnorm_bulk_backward_kernel<H, G, true>, ctx, a, bulk, kBackwardTeam)
                   : RunBulk(&rmsnorm_bulk_backward_kernel<H, G, false>, ctx, a, bulk,
                             kBackwardTeam);
      }
      size_t shared = static_cast<size_t>(kWarps) * static_cast<size_t>((p.hidden + 127) / 128) *
                      128 * (sizeof(H) + sizeof(G));
      a.staged = shared <= kMostShared;
      if (!a.staged) shared = 0;
      const bool vec = p.hidden % 4 == 0 && Aligned4(a.h, h_dtype) &&
                       Aligned4(a.dy, p.grad_dtype) && Aligned4(a.extra, p.grad_dtype) &&
                       Aligned4(a.dx, p.grad_dtype) && Aligned4(a.w, p.weight_dtype);
      return vec ? Run(&rmsnorm_backward_kernel<H, G, true>, ctx, a, shared)
                 : Run(&rmsnorm_backward_kernel<H, G, false>, ctx, a, shared);
    });
  });
}

}  // namespace tare::ops::rmsnorm
