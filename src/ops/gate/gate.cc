#include "ops/gate/gate.h"
#include "ops/gate/gate_cuda.h"

#include "numerics/elementary.h"
#include "ops/cuda_entry.h"
#include "ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/gate/gate.cc"
#include "ops/simd_targets.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "numerics/elementary_simd.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tare::ops::gate {
namespace HWY_NAMESPACE {
using namespace tare::ops::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace)
namespace num = tare::numerics::HWY_NAMESPACE;

constexpr float kTwoSqrtTwoOverPi = 0x1.988454p0f;  // 2 * sqrt(2 / pi)
constexpr float kCubic = 0.044715f;

template <Activation kAct>
HWY_INLINE VF Act(VF g) {
  const DF d;
  if constexpr (kAct == Activation::kSilu) return num::Silu(d, g);
  if constexpr (kAct == Activation::kGeluTanh) return num::GeluTanh(d, g);
  return num::Gelu(d, g);
}

// act'(g), f32.
template <Activation kAct>
HWY_INLINE VF Derivative(VF g) {
  const DF d;
  const VF one = hn::Set(d, 1.0f);
  if constexpr (kAct == Activation::kSilu) {
    const VF s = num::Sigmoid(d, g);
    return hn::Mul(s, hn::MulAdd(g, hn::Sub(one, s), one));
  } else if constexpr (kAct == Activation::kGeluTanh) {
    // 0.5 (1 + tanh(u)) = sigmoid(2u), 2u = v = 2 sqrt(2/pi) (g + 0.044715 g^3)
    const VF c = hn::Set(d, kTwoSqrtTwoOverPi);
    const VF squared = hn::Mul(g, g);
    const VF v = hn::Mul(c, hn::Mul(g, hn::MulAdd(hn::Set(d, kCubic), squared, one)));
    const VF dv = hn::Mul(c, hn::MulAdd(hn::Set(d, 3 * kCubic), squared, one));
    const VF s = num::Sigmoid(d, v);
    return hn::MulAdd(hn::Mul(g, dv), hn::Mul(s, hn::Sub(one, s)), s);
  } else {
    const VF half = hn::Set(d, 0.5f);
    const VF phi_cap = hn::MulAdd(half, num::Erf(d, hn::Mul(g, hn::Set(d, 0x1.6a09e6p-1f))), half);
    const VF phi =
        hn::Mul(num::Exp(d, hn::Mul(hn::Mul(g, g), hn::Set(d, -0.5f))), hn::Set(d, 0x1.988454p-2f));
    return hn::MulAdd(g, phi, phi_cap);
  }
}

template <Activation kAct, typename T>
void ForwardT(const Params& p, const Args& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const T* g = static_cast<const T*>(a.gate) + t * a.stride;
    const T* u = static_cast<const T*>(a.up) + t * a.stride;
    T* y = static_cast<T*>(a.y) + t * p.width;
    ForEachVector(p.width, [&](int64_t i, int64_t n) HWY_ATTR {
      StorePart(hn::Mul(Act<kAct>(LoadPart(g + i, n)), LoadPart(u + i, n)), y + i, n);
    });
  }
}
template <Activation kAct, typename T, typename G>
void BackwardT(const Params& p, const BackwardArgs& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const T* g = static_cast<const T*>(a.gate) + t * a.stride;
    const T* u = static_cast<const T*>(a.up) + t * a.stride;
    const G* dy = static_cast<const G*>(a.dy) + t * p.width;
    G* dg = static_cast<G*>(a.dgate) + t * a.dstride;
    G* du = static_cast<G*>(a.dup) + t * a.dstride;
    ForEachVector(p.width, [&](int64_t i, int64_t n) HWY_ATTR {
      const VF vg = LoadPart(g + i, n);
      const VF vdy = LoadPart(dy + i, n);
      const VF dgate = hn::Mul(hn::Mul(vdy, LoadPart(u + i, n)), Derivative<kAct>(vg));
      StorePart(hn::Mul(vdy, Act<kAct>(vg)), du + i, n);
      StorePart(dgate, dg + i, n);
    });
  }
}

template <class Body>
void WithActivation(Activation activation, const Body& body) {
  switch (activation) {
    case Activation::kSilu:
      return body(std::integral_constant<Activation, Activation::kSilu>());
    case Activation::kGeluTanh:
      return body(std::integral_constant<Activation, Activation::kGeluTanh>());
    case Activation::kGeluErf:
      return body(std::integral_constant<Activation, Activation::kGeluErf>());
  }
}
void ForwardRows(const Params& p, const Args& a, int64_t begin, int64_t end) {
  WithActivation(p.activation, [&](auto act) {
    WithRowDType(p.dtype,
                 [&](auto t) { ForwardT<decltype(act)::value, decltype(t)>(p, a, begin, end); });
  });
}
void BackwardRows(const Params& p, const BackwardArgs& a, int64_t begin, int64_t end) {
  WithActivation(p.activation, [&](auto act) {
    WithRowDType(p.dtype, [&](auto t) {
      WithRowDType(p.grad_dtype, [&](auto g) {
        BackwardT<decltype(act)::value, decltype(t), decltype(g)>(p, a, begin, end);
      });
    });
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace tare::ops::gate
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tare::ops::gate {
namespace {

HWY_EXPORT(ForwardRows);
HWY_EXPORT(BackwardRows);

Status Check(const Params& p) {
  TARE_RETURN_IF_ERROR(CheckDim("gate", "width", p.width, int64_t{1} << 24));
  TARE_RETURN_IF_ERROR(CheckRowDType("gate", "dtype", p.dtype));
  return CheckRowDType("gate", "grad_dtype", p.grad_dtype);
}

// Forward with planted faults: one plain loop.
template <typename T>
void FaultyForward(const Params& p, const Args& a, bool approximate, bool early) {
  for (int64_t t = 0; t < a.rows; ++t) {
    for (int64_t i = 0; i < p.width; ++i) {
      const float g = ToFloat(static_cast<const T*>(a.gate)[t * a.stride + i]);
      const float u = ToFloat(static_cast<const T*>(a.up)[t * a.stride + i]);
      float act;
      switch (p.activation) {
        case Activation::kGeluTanh:
          act = numerics::GeluTanh(g);
          break;
        case Activation::kGeluErf:
          act = numerics::Gelu(g);
          break;
        default:
          act = numerics::Silu(g);
      }
      if (approximate) {
        const float x = std::max(-127.0f, std::min(127.0f, -g * 0x1.715476p0f));
        act = g / (1.0f + numerics::Exp2P(x));
      }
      if (early) act = ViaBf16(act);
      PutFloat(act * u, static_cast<T*>(a.y) + t * p.width + i);
    }
  }
}

}  // namespace

std::string_view ActivationName(Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return "silu";
    case Activation::kGeluTanh:
      return "gelu-tanh";
    case Activation::kGeluErf:
      return "gelu-erf";
  }
  return "unknown";
}

Status Forward(const Ctx& ctx, const Params& params, const Args& given) {
  TARE_RETURN_IF_ERROR(CheckDevice("gate", ctx));
  TARE_RETURN_IF_ERROR(Check(params));
  TARE_RETURN_IF_ERROR(CheckRows("gate", given.rows));
  Args args = given;
  TARE_ASSIGN_OR_RETURN(args.stride, StrideOf("gate", "stride", given.stride, params.width));
  TARE_RETURN_IF_ERROR(CheckPointer("gate", "gate", args.gate, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("gate", "up", args.up, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("gate", "y", args.y, args.rows));
  TARE_WITH_CUDA_RETURN("gate", ctx, ForwardCuda(ctx, params, args));
  const bool approximate = fault::Active(kApproximateExp, ctx.side);
  const bool early = fault::Active(kEarlyCast, ctx.side);
  if (approximate || early) {
    WithRowDType(params.dtype,
                 [&](auto t) { FaultyForward<decltype(t)>(params, args, approximate, early); });
    return Ok();
  }
  ctx.pool->ParallelRanges(args.rows, RowGrain(args.rows, params.width, ctx.pool->threads()),
                           [&](int64_t begin, int64_t end) {
                             HWY_DYNAMIC_DISPATCH(ForwardRows)(params, args, begin, end);
                           });
  return Ok();
}

Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& given) {
  TARE_RETURN_IF_ERROR(CheckDevice("gate", ctx));
  TARE_RETURN_IF_ERROR(Check(params));
  TARE_RETURN_IF_ERROR(CheckRows("gate", given.rows));
  BackwardArgs args = given;
  TARE_ASSIGN_OR_RETURN(args.stride, StrideOf("gate", "stride", given.stride, params.width));
  TARE_ASSIGN_OR_RETURN(args.dstride, StrideOf("gate", "dstride", given.dstride, params.width));
  TARE_RETURN_IF_ERROR(CheckPointer("gate", "gate", args.gate, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("gate", "up", args.up, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("gate", "dy", args.dy, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("gate", "dgate", args.dgate, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("gate", "dup", args.dup, args.rows));
  TARE_WITH_CUDA_RETURN("gate", ctx, BackwardCuda(ctx, params, args));
  ctx.pool->ParallelRanges(args.rows, RowGrain(args.rows, params.width, ctx.pool->threads()),
                           [&](int64_t begin, int64_t end) {
                             HWY_DYNAMIC_DISPATCH(BackwardRows)(params, args, begin, end);
                           });
  if (fault::Active(kDetached, ctx.side)) {
    const int64_t bytes = params.width * SizeOf(params.grad_dtype);
    for (int64_t t = 0; t < args.rows; ++t) {
      std::memset(static_cast<char*>(args.dgate) + t * args.dstride * SizeOf(params.grad_dtype), 0,
                  static_cast<size_t>(bytes));
    }
  }
  return Ok();
}

}  // namespace tare::ops::gate
#endif  // HWY_ONCE
