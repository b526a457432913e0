#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rmsnorm/rmsnorm_cuda.h"

#include "ops/cuda_entry.h"
#include "ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rmsnorm/rmsnorm.cc"
#include "ops/simd_targets.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tare::ops::rmsnorm {
namespace HWY_NAMESPACE {
using namespace tare::ops::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace)

// f32 of w, or of 1 + w, padded with zeros.
template <typename W>
void WidenWeight(const W* w, bool unit_offset, int64_t width, float* out) {
  const DF d;
  ForEachVector(width, [&](int64_t i, int64_t n) HWY_ATTR {
    VF v = LoadPart(w + i, n);
    if (unit_offset) v = hn::Add(v, hn::Set(d, 1.0f));
    StorePart(v, out + i, n);
  });
}

template <typename T, typename R>
void ForwardT(const Params& p, const Args& a, const float* w, int64_t begin, int64_t end) {
  const DF d;
  const int64_t width = p.hidden;
  const int64_t padded = RoundUp(width, 128);
  float* h = Scratch(static_cast<size_t>(padded));
  const float inv = 1.0f / static_cast<float>(width);
  for (int64_t t = begin; t < end; ++t) {
    const T* x = static_cast<const T*>(a.x) + t * width;
    T* y = static_cast<T*>(a.y) + t * width;
    if (p.add_residual) {
      const R* residual = static_cast<const R*>(a.residual) + t * width;
      R* out = static_cast<R*>(a.residual_out) + t * width;
      ForEachVector(width, [&](int64_t i, int64_t n) HWY_ATTR {
        const VF sum = hn::Add(LoadPart(x + i, n), LoadPart(residual + i, n));
        const VF stored = RoundAs(sum, out);
        StorePart(stored, out + i, n);
        StorePart(stored, h + i, n);
      });
    } else {
      ForEachVector(
          width, [&](int64_t i, int64_t n) HWY_ATTR { StorePart(LoadPart(x + i, n), h + i, n); });
    }
    for (int64_t i = width; i < padded; ++i) h[i] = 0.0f;  // 0 * 0 is neutral: squares are never -0
    const float s = LanesDot<128>(h, h, padded);
    const float r = 1.0f / __builtin_sqrtf(__builtin_fmaf(s, inv, p.eps));
    if (a.rstd != nullptr) PutFloat(r, a.rstd + t);
    const VF vr = hn::Set(d, r);
    ForEachVector(width, [&](int64_t i, int64_t n) HWY_ATTR {
      StorePart(hn::Mul(hn::Mul(LoadPart(h + i, n), vr), LoadPart(w + i, n)), y + i, n);
    });
  }
}

template <typename H, typename G>
void BackwardRowsT(const Params& p, const BackwardArgs& a, const float* w, int64_t begin,
                   int64_t end) {
  const DF d;
  const int64_t width = p.hidden;
  const int64_t padded = RoundUp(width, 128);
  float* g = Scratch(static_cast<size_t>(2 * padded));
  float* xhat = g + padded;
  const float inv = 1.0f / static_cast<float>(width);
  for (int64_t t = begin; t < end; ++t) {
    const H* h = static_cast<const H*>(a.h) + t * width;
    const G* dy = static_cast<const G*>(a.dy) + t * width;
    const G* extra =
        a.dresidual_out == nullptr ? nullptr : static_cast<const G*>(a.dresidual_out) + t * width;
    G* dx = static_cast<G*>(a.dx) + t * width;
    const float r = a.rstd[t];
    const VF vr = hn::Set(d, r);
    ForEachVector(width, [&](int64_t i, int64_t n) HWY_ATTR {
      StorePart(hn::Mul(LoadPart(dy + i, n), LoadPart(w + i, n)), g + i, n);
      StorePart(hn::Mul(LoadPart(h + i, n), vr), xhat + i, n);
    });
    for (int64_t i = width; i < padded; ++i) {
      g[i] = -0.0f;
      xhat[i] = 0.0f;
    }
    const float c = LanesDot<128>(g, xhat, padded) * inv;
    const VF vc = hn::Set(d, c);
    ForEachVector(width, [&](int64_t i, int64_t n) HWY_ATTR {
      const VF u = hn::NegMulAdd(vc, LoadPart(xhat + i, n), LoadPart(g + i, n));
      const VF v = extra == nullptr ? hn::Mul(u, vr) : hn::MulAdd(u, vr, LoadPart(extra + i, n));
      StorePart(v, dx + i, n);
    });
  }
}

// Columns [begin, end) of the weight's gradient: per unit lanes(32) over its tokens.
template <typename H, typename G>
void BackwardWeightT(const Params& p, const BackwardArgs& a, int64_t begin, int64_t end) {
  const DF d;
  const int64_t width = p.hidden;
  const int64_t columns = end - begin;
  const int64_t stride = RoundUp(columns, static_cast<int64_t>(hn::Lanes(d)));
  float* lane = Scratch(static_cast<size_t>(32 * stride));
  for (const TokenUnit& unit : a.units) {
    std::memset(lane, 0, static_cast<size_t>(32 * stride) * sizeof(float));
    for (int64_t i = 0; i < unit.rows; ++i) {
      const int64_t t = unit.begin + i;
      const VF vr = hn::Set(d, a.rstd[t]);
      const H* h = static_cast<const H*>(a.h) + t * width + begin;
      const G* dy = static_cast<const G*>(a.dy) + t * width + begin;
      float* to = lane + (i % 32) * stride;
      ForEachVector(columns, [&](int64_t j, int64_t n) HWY_ATTR {
        const VF xhat = hn::Mul(LoadPart(h + j, n), vr);
        hn::StoreU(hn::MulAdd(LoadPart(dy + j, n), xhat, hn::LoadU(d, to + j)), d, to + j);
      });
    }
    for (int64_t half = 16; half >= 1; half /= 2) {
      for (int64_t l = 0; l < half; ++l) {
        for (int64_t j = 0; j < columns; ++j) lane[l * stride + j] += lane[(l + half) * stride + j];
      }
    }
    for (int64_t j = 0; j < columns; ++j) PutFloat(a.dw[begin + j] + lane[j], a.dw + begin + j);
  }
}

void Widen(const Params& p, const void* w, float* out) {
  WithRowDType(p.weight_dtype, [&](auto tag) {
    WidenWeight(static_cast<const decltype(tag)*>(w), p.unit_offset, p.hidden, out);
  });
}
void ForwardRows(const Params& p, const Args& a, const float* w, int64_t begin, int64_t end) {
  WithRowDType(p.dtype, [&](auto x) {
    WithRowDType(p.residual_dtype, [&](auto residual) {
      ForwardT<decltype(x), decltype(residual)>(p, a, w, begin, end);
    });
  });
}
void BackwardRows(const Params& p, const BackwardArgs& a, const float* w, int64_t begin,
                  int64_t end) {
  WithRowDType(p.add_residual ? p.residual_dtype : p.dtype, [&](auto h) {
    WithRowDType(p.grad_dtype,
                 [&](auto g) { BackwardRowsT<decltype(h), decltype(g)>(p, a, w, begin, end); });
  });
}
void BackwardWeight(const Params& p, const BackwardArgs& a, int64_t begin, int64_t end) {
  WithRowDType(p.add_residual ? p.residual_dtype : p.dtype, [&](auto h) {
    WithRowDType(p.grad_dtype,
                 [&](auto g) { BackwardWeightT<decltype(h), decltype(g)>(p, a, begin, end); });
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace tare::ops::rmsnorm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tare::ops::rmsnorm {
namespace {

HWY_EXPORT(Widen);
HWY_EXPORT(ForwardRows);
HWY_EXPORT(BackwardRows);
HWY_EXPORT(BackwardWeight);

struct Faults {
  bool unrounded_sum, cast_before_add, epsilon, late_cast, reversed, split_fma;
  bool any() const {
    return unrounded_sum || cast_before_add || epsilon || late_cast || reversed || split_fma;
  }
};
Faults FaultsOf(fault::Side side) {
  return {fault::Active(kUnroundedSum, side), fault::Active(kCastBeforeAdd, side),
          fault::Active(kEpsilon, side),      fault::Active(kLateCast, side),
          fault::Active(kReversed, side),     fault::Active(kSplitFma, side)};
}

// Forward with planted faults: one plain loop, off the fast path.
template <typename T, typename R>
void FaultyForward(const Params& p, const Args& a, const float* w, const Faults& f) {
  const int64_t width = p.hidden;
  std::vector<float> h(static_cast<size_t>(width));
  for (int64_t t = 0; t < a.rows; ++t) {
    for (int64_t i = 0; i < width; ++i) {
      float v = ToFloat(static_cast<const T*>(a.x)[t * width + i]);
      if (p.add_residual) {
        float residual = ToFloat(static_cast<const R*>(a.residual)[t * width + i]);
        if (f.cast_before_add) v = ViaBf16(v), residual = ViaBf16(residual);
        v += residual;
        R* out = static_cast<R*>(a.residual_out) + t * width + i;
        PutFloat(v, out);
        if (!f.unrounded_sum) v = ToFloat(*out);
      }
      h[static_cast<size_t>(i)] = v;
    }
    float lane[128] = {};
    for (int64_t j = 0; j < width; ++j) {
      const int64_t i = f.reversed ? width - 1 - j : j;
      const float v = h[static_cast<size_t>(i)];
      lane[j % 128] = f.split_fma ? lane[j % 128] + v * v : __builtin_fmaf(v, v, lane[j % 128]);
    }
    for (int half = 64; half >= 1; half /= 2) {
      for (int j = 0; j < half; ++j) lane[j] += lane[j + half];
    }
    const float eps = f.epsilon ? p.eps * 10.0f : p.eps;
    const float r =
        1.0f / __builtin_sqrtf(__builtin_fmaf(lane[0], 1.0f / static_cast<float>(width), eps));
    if (a.rstd != nullptr) PutFloat(r, a.rstd + t);
    for (int64_t i = 0; i < width; ++i) {
      float v = h[static_cast<size_t>(i)] * r;
      if (f.late_cast) v = ViaBf16(v);
      PutFloat(v * w[i], static_cast<T*>(a.y) + t * width + i);
    }
  }
}

Status Check(const Params& p) {
  TARE_RETURN_IF_ERROR(CheckDim("rmsnorm", "hidden", p.hidden, int64_t{1} << 24));
  TARE_RETURN_IF_ERROR(CheckRowDType("rmsnorm", "dtype", p.dtype));
  TARE_RETURN_IF_ERROR(CheckRowDType("rmsnorm", "weight_dtype", p.weight_dtype));
  TARE_RETURN_IF_ERROR(CheckRowDType("rmsnorm", "residual_dtype", p.residual_dtype));
  TARE_RETURN_IF_ERROR(CheckRowDType("rmsnorm", "grad_dtype", p.grad_dtype));
  if (!(p.eps >= 0.0f) || p.eps > 1.0f) return InvalidArgument("rmsnorm: eps is {}; 0 to 1", p.eps);
  return Ok();
}

}  // namespace

Status Forward(const Ctx& ctx, const Params& params, const Args& args) {
  TARE_RETURN_IF_ERROR(CheckDevice("rmsnorm", ctx));
  TARE_RETURN_IF_ERROR(Check(params));
  TARE_RETURN_IF_ERROR(CheckRows("rmsnorm", args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("rmsnorm", "x", args.x, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("rmsnorm", "w", args.w, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("rmsnorm", "y", args.y, args.rows));
  const bool has = args.residual != nullptr && args.residual_out != nullptr;
  const bool none = args.residual == nullptr && args.residual_out == nullptr;
  if (args.rows > 0 && !(params.add_residual ? has : none)) {
    return InvalidArgument("rmsnorm: residual and residual_out must be {}",
                           params.add_residual ? "given" : "null");
  }
  TARE_WITH_CUDA_RETURN("rmsnorm", ctx, ForwardCuda(ctx, params, args));
  std::vector<float> w(static_cast<size_t>(params.hidden));
  if (args.rows > 0) HWY_DYNAMIC_DISPATCH(Widen)(params, args.w, w.data());
  const Faults faults = FaultsOf(ctx.side);
  if (faults.any()) {
    WithRowDType(params.dtype, [&](auto x) {
      WithRowDType(params.residual_dtype, [&](auto residual) {
        FaultyForward<decltype(x), decltype(residual)>(params, args, w.data(), faults);
      });
    });
    return Ok();
  }
  ctx.pool->ParallelRanges(args.rows, RowGrain(args.rows, params.hidden, ctx.pool->threads()),
                           [&](int64_t begin, int64_t end) {
                             HWY_DYNAMIC_DISPATCH(ForwardRows)(params, args, w.data(), begin, end);
                           });
  return Ok();
}

Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args) {
  TARE_RETURN_IF_ERROR(CheckDevice("rmsnorm", ctx));
  TARE_RETURN_IF_ERROR(Check(params));
  TARE_RETURN_IF_ERROR(CheckRows("rmsnorm", args.rows));
  TARE_RETURN_IF_ERROR(CheckUnits(args.units, args.rows).Annotate("rmsnorm"));
  TARE_RETURN_IF_ERROR(CheckPointer("rmsnorm", "h", args.h, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("rmsnorm", "w", args.w, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("rmsnorm", "rstd", args.rstd, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("rmsnorm", "dy", args.dy, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("rmsnorm", "dx", args.dx, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("rmsnorm", "dw", args.dw, args.rows));
  if (args.rows == 0) return Ok();
  TARE_WITH_CUDA_RETURN("rmsnorm", ctx, BackwardCuda(ctx, params, args));
  std::vector<float> w(static_cast<size_t>(params.hidden));
  HWY_DYNAMIC_DISPATCH(Widen)(params, args.w, w.data());
  // The weight first: dx may overwrite dy.
  BackwardArgs weight_args = args;
  const TokenUnit everything[] = {{0, args.rows}};
  if (fault::Active(kPaddedRows, ctx.side)) weight_args.units = everything;
  ctx.pool->ParallelRanges(params.hidden, 128, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(BackwardWeight)(params, weight_args, begin, end);
  });
  ctx.pool->ParallelRanges(args.rows, RowGrain(args.rows, params.hidden, ctx.pool->threads()),
                           [&](int64_t begin, int64_t end) {
                             HWY_DYNAMIC_DISPATCH(BackwardRows)(params, args, w.data(), begin, end);
                           });
  return Ok();
}

}  // namespace tare::ops::rmsnorm
#endif  // HWY_ONCE
