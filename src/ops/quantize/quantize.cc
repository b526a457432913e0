#include "ops/quantize/quantize.h"
#include "ops/quantize/quantize_cuda.h"

#include <cstring>

#include "ops/cuda_entry.h"
#include "ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/quantize/quantize.cc"
#include "ops/simd_targets.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tare::ops::quantize {
namespace HWY_NAMESPACE {
using namespace tare::ops::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace)

// e4m3 codes of v, nearest even, saturating; tensor/convert.h is the plain form of it. Normal
// numbers round in the bits; below 2^-6 the sum with 2^14 rounds to the quantum 2^-9 by itself.
HWY_INLINE hn::Vec<DU> E4m3Codes(VF v) {
  const DF d;
  const DU du;
  const VF magnitude = hn::Abs(v);
  const auto bits = hn::BitCast(du, magnitude);
  const auto sign = hn::ShiftRight<24>(hn::And(hn::BitCast(du, v), hn::Set(du, 0x80000000u)));
  const auto odd = hn::And(hn::ShiftRight<20>(bits), hn::Set(du, 1u));
  const auto rounded = hn::ShiftRight<20>(hn::Add(hn::Add(bits, hn::Set(du, 0x7ffffu)), odd));
  const auto normal = hn::Min(hn::Sub(rounded, hn::Set(du, 120u << 3)), hn::Set(du, 0x7eu));
  const VF magic = hn::Set(d, 0x1p14f);
  const auto small = hn::Sub(hn::BitCast(du, hn::Add(magnitude, magic)), hn::BitCast(du, magic));
  const auto is_small = hn::RebindMask(du, hn::Lt(magnitude, hn::Set(d, 0x1p-6f)));
  return hn::Or(hn::IfThenElse(is_small, small, normal), sign);
}

template <typename T>
void ForwardT(const Params& p, const Args& a, int64_t begin, int64_t end) {
  const DF d;
  const int64_t blocks = (p.width + kBlock - 1) / kBlock;
  for (int64_t t = begin; t < end; ++t) {
    const T* x = static_cast<const T*>(a.x) + t * p.width;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t at = b * kBlock;
      const int64_t count = std::min(kBlock, p.width - at);
      VF top = hn::Zero(d);
      ForEachVector(count, [&](int64_t i, int64_t n)
                               HWY_ATTR { top = hn::Max(top, hn::Abs(LoadPart(x + at + i, n))); });
      const float amax = hn::GetLane(hn::MaxOfLanes(d, top));
      // A scale that underflows to zero (amax below 448 * 2^-149) would divide by zero.
      float scale = amax / 448.0f;
      if (scale == 0.0f) scale = 1.0f;
      a.scale[t * blocks + b] = scale;
      const VF vs = hn::Set(d, scale);
      ForEachVector(count, [&](int64_t i, int64_t n) HWY_ATTR {
        HWY_ALIGN uint32_t codes[hn::MaxLanes(d)];
        hn::Store(E4m3Codes(hn::Div(LoadPart(x + at + i, n), vs)), DU(), codes);
        for (int64_t k = 0; k < n; ++k)
          a.q[t * p.width + at + i + k] = static_cast<uint8_t>(codes[k]);
      });
    }
  }
}
void ForwardRows(const Params& p, const Args& a, int64_t begin, int64_t end) {
  WithRowDType(p.dtype, [&](auto t) { ForwardT<decltype(t)>(p, a, begin, end); });
}

// The first column of row t that is not finite, or -1.
int64_t NonFinite(const Params& p, const Args& a, int64_t t) {
  return WithRowDType(p.dtype, [&](auto tag) -> int64_t {
    const auto* x = static_cast<const decltype(tag)*>(a.x) + t * p.width;
    VF sum = hn::Zero(DF());
    ForEachVector(p.width, [&](int64_t i, int64_t n) HWY_ATTR {
      // x * 0 is 0 for a finite x and NaN otherwise.
      sum = hn::MulAdd(LoadPart(x + i, n), hn::Zero(DF()), sum);
    });
    if (hn::AllFalse(DF(), hn::IsNaN(sum))) return -1;
    int64_t i = 0;
    while (std::isfinite(ToFloat(x[i]))) ++i;
    return i;
  });
}

void BackwardRange(const Params& p, const BackwardArgs& a, int64_t begin, int64_t end) {
  WithRowDType(p.grad_dtype, [&](auto tag) {
    using G = decltype(tag);
    const G* from = static_cast<const G*>(a.dy) + begin;
    G* to = static_cast<G*>(a.dx) + begin;
    ForEachVector(end - begin, [&](int64_t i, int64_t n)
                                   HWY_ATTR { StorePart(LoadPart(from + i, n), to + i, n); });
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace tare::ops::quantize
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tare::ops::quantize {
namespace {

HWY_EXPORT(ForwardRows);
HWY_EXPORT(NonFinite);
HWY_EXPORT(BackwardRange);

Status Check(const Params& p, int64_t rows) {
  TARE_RETURN_IF_ERROR(CheckDim("quantize", "width", p.width, int64_t{1} << 24));
  TARE_RETURN_IF_ERROR(CheckRowDType("quantize", "dtype", p.dtype));
  TARE_RETURN_IF_ERROR(CheckRowDType("quantize", "grad_dtype", p.grad_dtype));
  return CheckRows("quantize", rows);
}

// Nearest e4m3 magnitude with ties away from zero, by search over the 127 finite codes.
uint8_t HalfAway(float v) {
  const float magnitude = v < 0 ? -v : v;
  const auto value_of = [](int code) {
    const int exponent = code >> 3;
    const float mantissa = static_cast<float>(code & 7) / 8.0f;
    float value = exponent == 0 ? mantissa * 0x1p-6f : (1.0f + mantissa) * 0x1p-6f;
    for (int i = 1; i < exponent; ++i) value *= 2.0f;
    return value;
  };
  int code = 0;
  while (code < 0x7e && magnitude >= (value_of(code) + value_of(code + 1)) * 0.5f) ++code;
  return static_cast<uint8_t>(code | (__builtin_signbit(v) ? 0x80 : 0));
}

template <typename T>
void FaultyForward(const Params& p, const Args& a, bool per_tensor, bool half_away) {
  if (per_tensor) {
    const T* x = static_cast<const T*>(a.x);
    float amax = 0.0f;
    for (int64_t i = 0; i < a.rows * p.width; ++i) amax = std::max(amax, std::fabs(ToFloat(x[i])));
    const float scale = amax > 0.0f ? amax / 448.0f : 1.0f;
    const int64_t blocks = (p.width + kBlock - 1) / kBlock;
    std::fill_n(a.scale, a.rows * blocks, scale);
  }
  for (int64_t t = 0; t < a.rows; ++t) {
    for (int64_t i = 0; i < p.width; ++i) {
      const float v = ToFloat(static_cast<const T*>(a.x)[t * p.width + i]) /
                      a.scale[t * ((p.width + kBlock - 1) / kBlock) + i / kBlock];
      // Without the rounding fault, a nudge toward zero keeps exact halfway cases on the even side.
      uint8_t code = HalfAway(v);
      if (!half_away && (code & 1) != 0 && HalfAway(v * 0x1.fffffep-1f) != code)
        code = HalfAway(v * 0x1.fffffep-1f);
      a.q[t * p.width + i] = code;
    }
  }
}

}  // namespace

Status Forward(const Ctx& ctx, const Params& params, const Args& args) {
  TARE_RETURN_IF_ERROR(CheckDevice("quantize", ctx));
  TARE_RETURN_IF_ERROR(Check(params, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("quantize", "x", args.x, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("quantize", "q", args.q, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("quantize", "scale", args.scale, args.rows));
  TARE_WITH_CUDA_RETURN("quantize", ctx, ForwardCuda(ctx, params, args));
  const int64_t grain = RowGrain(args.rows, params.width, ctx.pool->threads());
  std::vector<int64_t> bad(static_cast<size_t>(args.rows), -1);
  ctx.pool->ParallelRanges(args.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      bad[static_cast<size_t>(t)] = HWY_DYNAMIC_DISPATCH(NonFinite)(params, args, t);
  });
  for (int64_t t = 0; t < args.rows; ++t) {
    if (bad[static_cast<size_t>(t)] >= 0) {
      return InvalidArgument("quantize: row {} column {} is not finite", t,
                             bad[static_cast<size_t>(t)]);
    }
  }
  ctx.pool->ParallelRanges(args.rows, grain, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(ForwardRows)(params, args, begin, end);
  });
  const bool per_tensor = fault::Active(kPerTensor, ctx.side);
  const bool half_away = fault::Active(kHalfAway, ctx.side);
  if (per_tensor || half_away) {
    WithRowDType(params.dtype,
                 [&](auto t) { FaultyForward<decltype(t)>(params, args, per_tensor, half_away); });
  }
  return Ok();
}

Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args) {
  TARE_RETURN_IF_ERROR(CheckDevice("quantize", ctx));
  TARE_RETURN_IF_ERROR(Check(params, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("quantize", "dy", args.dy, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("quantize", "dx", args.dx, args.rows));
  TARE_WITH_CUDA_RETURN("quantize", ctx, BackwardCuda(ctx, params, args));
  ctx.pool->ParallelRanges(args.rows * params.width, 16384, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(BackwardRange)(params, args, begin, end);
  });
  return Ok();
}

}  // namespace tare::ops::quantize
#endif  // HWY_ONCE
