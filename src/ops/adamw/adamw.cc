#include "ops/adamw/adamw.h"
#include "ops/adamw/adamw_cuda.h"

#include "ops/cuda_entry.h"
#include "ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/adamw/adamw.cc"
#include "ops/simd_targets.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tare::ops::adamw {
namespace HWY_NAMESPACE {
using namespace tare::ops::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace)

// Floats between the one in use and the one asked for: a step reads four streams at once, more than
// the CPU's own prefetching keeps up with in pages of 4 KiB.
constexpr int64_t kAhead = 256;

// The fault switches are template arguments: the loop without them is the plain one.
template <bool kCoupled, bool kEpsInside>
void StepT(const Params& p, const StepConstants& k, const Args& a, int64_t begin, int64_t end) {
  const DF d;
  const VF beta1 = hn::Set(d, p.beta1), one_minus_beta1 = hn::Set(d, 1.0f - p.beta1);
  const VF beta2 = hn::Set(d, p.beta2), one_minus_beta2 = hn::Set(d, 1.0f - p.beta2);
  const VF c1 = hn::Set(d, k.c1), c2 = hn::Set(d, k.c2), decay = hn::Set(d, k.decay);
  const VF eps = hn::Set(d, p.eps), lr = hn::Set(d, a.lr), scale = hn::Set(d, a.grad_scale);
  const VF coupled = hn::Set(d, p.weight_decay);
  ForEachVector(end - begin, [&](int64_t at, int64_t n) HWY_ATTR {
    const int64_t i = begin + at;
    for (const float* stream : {a.master, a.m, a.v}) __builtin_prefetch(stream + i + kAhead, 1);
    __builtin_prefetch(a.grad + i + kAhead);
    const VF w = LoadPart(a.master + i, n);
    VF g = hn::Mul(LoadPart(a.grad + i, n), scale);
    if constexpr (kCoupled) g = hn::MulAdd(coupled, w, g);
    const VF m = hn::MulAdd(beta1, LoadPart(a.m + i, n), hn::Mul(one_minus_beta1, g));
    const VF v = hn::MulAdd(beta2, LoadPart(a.v + i, n), hn::Mul(hn::Mul(one_minus_beta2, g), g));
    VF denominator = hn::Mul(v, c2);
    if constexpr (kEpsInside) {
      denominator = hn::Sqrt(hn::Add(denominator, eps));
    } else {
      denominator = hn::Add(hn::Sqrt(denominator), eps);
    }
    const VF step = hn::Div(hn::Mul(m, c1), denominator);
    const VF out = hn::NegMulAdd(lr, step, hn::Mul(w, decay));
    StorePart(m, a.m + i, n);
    StorePart(v, a.v + i, n);
    StorePart(out, a.master + i, n);
    if (a.copy != nullptr) StorePart(out, a.copy + i, n);
  });
}
void StepRange(const Params& p, const StepConstants& k, const Args& a, int64_t begin, int64_t end,
               bool coupled, bool inside) {
  if (coupled) return StepT<true, false>(p, k, a, begin, end);
  if (inside) return StepT<false, true>(p, k, a, begin, end);
  StepT<false, false>(p, k, a, begin, end);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace tare::ops::adamw
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tare::ops::adamw {
namespace {

HWY_EXPORT(StepRange);

// x^n by repeated squaring, most significant bit first: a fixed order of f64 multiplications.
double Power(double x, int64_t n) {
  double result = 1.0;
  for (int bit = 62; bit >= 0; --bit) {
    result *= result;
    if ((n >> bit) & 1) result *= x;
  }
  return result;
}

}  // namespace

StepConstants ConstantsOf(const Params& params, float lr, int64_t step) {
  StepConstants k;
  if (params.bias_correction) {
    k.c1 = static_cast<float>(1.0 / (1.0 - Power(static_cast<double>(params.beta1), step)));
    k.c2 = static_cast<float>(1.0 / (1.0 - Power(static_cast<double>(params.beta2), step)));
  }
  k.decay =
      static_cast<float>(1.0 - static_cast<double>(lr) * static_cast<double>(params.weight_decay));
  return k;
}

Status Step(const Ctx& ctx, const Params& params, const Args& args) {
  TARE_RETURN_IF_ERROR(CheckDevice("adamw", ctx));
  const auto beta_ok = [](float b) { return b >= 0.0f && b < 1.0f; };
  if (!beta_ok(params.beta1) || !beta_ok(params.beta2)) {
    return InvalidArgument("adamw: betas are {} and {}; each in [0, 1)", params.beta1,
                           params.beta2);
  }
  if (!(params.eps >= 0.0f) || !std::isfinite(params.eps)) {
    return InvalidArgument("adamw: eps is {}; a finite number of at least 0", params.eps);
  }
  if (!(params.weight_decay >= 0.0f) || !std::isfinite(params.weight_decay)) {
    return InvalidArgument("adamw: weight_decay is {}; a finite number of at least 0",
                           params.weight_decay);
  }
  if (!std::isfinite(args.lr)) return InvalidArgument("adamw: lr is {}; a finite number", args.lr);
  if (!std::isfinite(args.grad_scale)) {
    return InvalidArgument("adamw: grad_scale is {}; a finite number", args.grad_scale);
  }
  if (args.step < 1)
    return InvalidArgument("adamw: step is {}; the first update is step 1", args.step);
  TARE_RETURN_IF_ERROR(CheckRows("adamw", args.count));
  TARE_RETURN_IF_ERROR(CheckPointer("adamw", "master", args.master, args.count));
  TARE_RETURN_IF_ERROR(CheckPointer("adamw", "m", args.m, args.count));
  TARE_RETURN_IF_ERROR(CheckPointer("adamw", "v", args.v, args.count));
  TARE_RETURN_IF_ERROR(CheckPointer("adamw", "grad", args.grad, args.count));
  Params used = params;
  if (fault::Active(kNoBiasCorrection, ctx.side)) used.bias_correction = false;
  const bool coupled = fault::Active(kCoupledDecay, ctx.side);
  const bool inside = fault::Active(kEpsInsideRoot, ctx.side);
  StepConstants constants = ConstantsOf(used, args.lr, args.step);
  if (coupled) constants.decay = 1.0f;
  TARE_WITH_CUDA_RETURN("adamw", ctx, StepCuda(ctx, used, constants, args, coupled, inside));
  ctx.pool->ParallelRanges(args.count, 16384, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(StepRange)(used, constants, args, begin, end, coupled, inside);
  });
  return Ok();
}

}  // namespace tare::ops::adamw
#endif  // HWY_ONCE
