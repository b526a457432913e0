#include "ops/headnorm/headnorm.h"
#include "ops/headnorm/headnorm_cuda.h"

#include "ops/cuda_entry.h"
#include "ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/headnorm/headnorm.cc"
#include "ops/simd_targets.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tare::ops::headnorm {
namespace HWY_NAMESPACE {
using namespace tare::ops::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace)

template <typename T>
void ForwardT(const Params& p, const Args& a, const float* w, int64_t begin, int64_t end) {
  const DF d;
  const int64_t padded = RoundUp(p.head_dim, 32);
  float* h = Scratch(static_cast<size_t>(padded));
  const float inv = 1.0f / static_cast<float>(p.head_dim);
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t head = 0; head < p.heads; ++head) {
      const T* x = static_cast<const T*>(a.x) + t * a.x_stride + head * p.head_dim;
      T* y = static_cast<T*>(a.y) + t * a.y_stride + head * p.head_dim;
      ForEachVector(p.head_dim, [&](int64_t i, int64_t n)
                                    HWY_ATTR { StorePart(LoadPart(x + i, n), h + i, n); });
      for (int64_t i = p.head_dim; i < padded; ++i) h[i] = 0.0f;
      const float s = LanesDot<32>(h, h, padded);
      const float r = 1.0f / __builtin_sqrtf(__builtin_fmaf(s, inv, p.eps));
      if (a.rstd != nullptr) PutFloat(r, a.rstd + t * p.heads + head);
      const VF vr = hn::Set(d, r);
      ForEachVector(p.head_dim, [&](int64_t i, int64_t n) HWY_ATTR {
        StorePart(hn::Mul(hn::Mul(LoadPart(h + i, n), vr), LoadPart(w + i, n)), y + i, n);
      });
    }
  }
}

template <typename T, typename G>
void BackwardRowsT(const Params& p, const BackwardArgs& a, const float* w, int64_t begin,
                   int64_t end) {
  const DF d;
  const int64_t padded = RoundUp(p.head_dim, 32);
  float* g = Scratch(static_cast<size_t>(2 * padded));
  float* xhat = g + padded;
  const float inv = 1.0f / static_cast<float>(p.head_dim);
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t head = 0; head < p.heads; ++head) {
      const T* x = static_cast<const T*>(a.x) + t * a.x_stride + head * p.head_dim;
      const G* dy = static_cast<const G*>(a.dy) + t * a.dy_stride + head * p.head_dim;
      G* dx = static_cast<G*>(a.dx) + t * a.dx_stride + head * p.head_dim;
      const VF vr = hn::Set(d, a.rstd[t * p.heads + head]);
      ForEachVector(p.head_dim, [&](int64_t i, int64_t n) HWY_ATTR {
        StorePart(hn::Mul(LoadPart(dy + i, n), LoadPart(w + i, n)), g + i, n);
        StorePart(hn::Mul(LoadPart(x + i, n), vr), xhat + i, n);
      });
      for (int64_t i = p.head_dim; i < padded; ++i) {
        g[i] = -0.0f;
        xhat[i] = 0.0f;
      }
      const VF vc = hn::Set(d, LanesDot<32>(g, xhat, padded) * inv);
      ForEachVector(p.head_dim, [&](int64_t i, int64_t n) HWY_ATTR {
        const VF u = hn::NegMulAdd(vc, LoadPart(xhat + i, n), LoadPart(g + i, n));
        StorePart(hn::Mul(u, vr), dx + i, n);
      });
    }
  }
}

// sum[0 .. head_dim) of one head over one unit's tokens, by lanes(32).
template <typename T, typename G>
void BackwardWeightT(const Params& p, const BackwardArgs& a, const TokenUnit& unit, int64_t head,
                     float* sum) {
  const DF d;
  const int64_t stride = RoundUp(p.head_dim, static_cast<int64_t>(hn::Lanes(d)));
  float* lane = Scratch(static_cast<size_t>(32 * stride));
  std::memset(lane, 0, static_cast<size_t>(32 * stride) * sizeof(float));
  for (int64_t i = 0; i < unit.rows; ++i) {
    const int64_t t = unit.begin + i;
    const VF vr = hn::Set(d, a.rstd[t * p.heads + head]);
    const T* x = static_cast<const T*>(a.x) + t * a.x_stride + head * p.head_dim;
    const G* dy = static_cast<const G*>(a.dy) + t * a.dy_stride + head * p.head_dim;
    float* to = lane + (i % 32) * stride;
    ForEachVector(p.head_dim, [&](int64_t j, int64_t n) HWY_ATTR {
      const VF xhat = hn::Mul(LoadPart(x + j, n), vr);
      hn::StoreU(hn::MulAdd(LoadPart(dy + j, n), xhat, hn::LoadU(d, to + j)), d, to + j);
    });
  }
  for (int64_t half = 16; half >= 1; half /= 2) {
    for (int64_t l = 0; l < half; ++l) {
      for (int64_t j = 0; j < p.head_dim; ++j)
        lane[l * stride + j] += lane[(l + half) * stride + j];
    }
  }
  std::memcpy(sum, lane, static_cast<size_t>(p.head_dim) * sizeof(float));
}

void Widen(const Params& p, const void* w, float* out) {
  const DF d;
  WithRowDType(p.weight_dtype, [&](auto tag) {
    const auto* from = static_cast<const decltype(tag)*>(w);
    ForEachVector(p.head_dim, [&](int64_t i, int64_t n) HWY_ATTR {
      VF v = LoadPart(from + i, n);
      if (p.unit_offset) v = hn::Add(v, hn::Set(d, 1.0f));
      StorePart(v, out + i, n);
    });
  });
}
void ForwardRows(const Params& p, const Args& a, const float* w, int64_t begin, int64_t end) {
  WithRowDType(p.dtype, [&](auto x) { ForwardT<decltype(x)>(p, a, w, begin, end); });
}
void BackwardRows(const Params& p, const BackwardArgs& a, const float* w, int64_t begin,
                  int64_t end) {
  WithRowDType(p.dtype, [&](auto x) {
    WithRowDType(p.grad_dtype,
                 [&](auto g) { BackwardRowsT<decltype(x), decltype(g)>(p, a, w, begin, end); });
  });
}
void BackwardWeight(const Params& p, const BackwardArgs& a, const TokenUnit& unit, int64_t head,
                    float* sum) {
  WithRowDType(p.dtype, [&](auto x) {
    WithRowDType(p.grad_dtype,
                 [&](auto g) { BackwardWeightT<decltype(x), decltype(g)>(p, a, unit, head, sum); });
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace tare::ops::headnorm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tare::ops::headnorm {
namespace {

HWY_EXPORT(Widen);
HWY_EXPORT(ForwardRows);
HWY_EXPORT(BackwardRows);
HWY_EXPORT(BackwardWeight);

Status Check(const Params& p) {
  TARE_RETURN_IF_ERROR(CheckDim("headnorm", "heads", p.heads, 65536));
  TARE_RETURN_IF_ERROR(CheckDim("headnorm", "head_dim", p.head_dim, 65536));
  TARE_RETURN_IF_ERROR(CheckRowDType("headnorm", "dtype", p.dtype));
  TARE_RETURN_IF_ERROR(CheckRowDType("headnorm", "weight_dtype", p.weight_dtype));
  TARE_RETURN_IF_ERROR(CheckRowDType("headnorm", "grad_dtype", p.grad_dtype));
  if (!(p.eps >= 0.0f) || p.eps > 1.0f)
    return InvalidArgument("headnorm: eps is {}; 0 to 1", p.eps);
  return Ok();
}

// Adds the vectors of `heads` heads as a tree of halves: the first ceil(n / 2) and the rest, each
// summed the same way. Contiguous groups of heads on tensor-parallel ranks are whole subtrees.
void TreeOfHeads(float* sums, int64_t heads, int64_t width) {
  if (heads == 1) return;
  const int64_t first = (heads + 1) / 2;
  TreeOfHeads(sums, first, width);
  TreeOfHeads(sums + first * width, heads - first, width);
  for (int64_t i = 0; i < width; ++i) sums[i] += sums[first * width + i];
}

}  // namespace

size_t BackwardWorkspaceBytes(const Ctx& ctx, const Params& params, int64_t units) {
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda) return BackwardWorkspaceBytesCuda(params, units);
#endif
  (void)ctx, (void)params, (void)units;
  return 0;
}

Status Forward(const Ctx& ctx, const Params& params, const Args& given) {
  TARE_RETURN_IF_ERROR(CheckDevice("headnorm", ctx));
  TARE_RETURN_IF_ERROR(Check(params));
  TARE_RETURN_IF_ERROR(CheckRows("headnorm", given.rows));
  Args args = given;
  const int64_t width = params.heads * params.head_dim;
  TARE_ASSIGN_OR_RETURN(args.x_stride, StrideOf("headnorm", "x_stride", given.x_stride, width));
  TARE_ASSIGN_OR_RETURN(args.y_stride, StrideOf("headnorm", "y_stride", given.y_stride, width));
  TARE_RETURN_IF_ERROR(CheckPointer("headnorm", "x", args.x, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("headnorm", "w", args.w, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("headnorm", "y", args.y, args.rows));
  if (args.rows == 0) return Ok();
  TARE_WITH_CUDA_RETURN("headnorm", ctx, ForwardCuda(ctx, params, args));
  std::vector<float> w(static_cast<size_t>(params.head_dim));
  HWY_DYNAMIC_DISPATCH(Widen)(params, args.w, w.data());
  ctx.pool->ParallelRanges(args.rows, RowGrain(args.rows, width, ctx.pool->threads()),
                           [&](int64_t begin, int64_t end) {
                             HWY_DYNAMIC_DISPATCH(ForwardRows)(params, args, w.data(), begin, end);
                           });
  return Ok();
}

Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& given) {
  TARE_RETURN_IF_ERROR(CheckDevice("headnorm", ctx));
  TARE_RETURN_IF_ERROR(Check(params));
  TARE_RETURN_IF_ERROR(CheckRows("headnorm", given.rows));
  TARE_RETURN_IF_ERROR(CheckUnits(given.units, given.rows).Annotate("headnorm"));
  BackwardArgs args = given;
  const int64_t width = params.heads * params.head_dim;
  TARE_ASSIGN_OR_RETURN(args.x_stride, StrideOf("headnorm", "x_stride", given.x_stride, width));
  TARE_ASSIGN_OR_RETURN(args.dy_stride, StrideOf("headnorm", "dy_stride", given.dy_stride, width));
  TARE_ASSIGN_OR_RETURN(args.dx_stride, StrideOf("headnorm", "dx_stride", given.dx_stride, width));
  TARE_RETURN_IF_ERROR(CheckPointer("headnorm", "x", args.x, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("headnorm", "w", args.w, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("headnorm", "rstd", args.rstd, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("headnorm", "dy", args.dy, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("headnorm", "dx", args.dx, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("headnorm", "dw", args.dw, args.rows));
  if (args.rows == 0) return Ok();
  TARE_WITH_CUDA_RETURN("headnorm", ctx, BackwardCuda(ctx, params, args));
  std::vector<float> w(static_cast<size_t>(params.head_dim));
  HWY_DYNAMIC_DISPATCH(Widen)(params, args.w, w.data());
  // The weight first: dx may overwrite dy.
  std::vector<float> sums(static_cast<size_t>(width));
  for (const TokenUnit& unit : args.units) {
    ctx.pool->ParallelFor(params.heads, [&](int64_t head) {
      HWY_DYNAMIC_DISPATCH(BackwardWeight)
      (params, args, unit, head, sums.data() + head * params.head_dim);
    });
    TreeOfHeads(sums.data(), params.heads, params.head_dim);
    for (int64_t i = 0; i < params.head_dim; ++i)
      PutFloat(args.dw[i] + sums[static_cast<size_t>(i)], args.dw + i);
  }
  ctx.pool->ParallelRanges(args.rows, RowGrain(args.rows, width, ctx.pool->threads()),
                           [&](int64_t begin, int64_t end) {
                             HWY_DYNAMIC_DISPATCH(BackwardRows)(params, args, w.data(), begin, end);
                           });
  return Ok();
}

}  // namespace tare::ops::headnorm
#endif  // HWY_ONCE
