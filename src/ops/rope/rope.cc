#include "ops/rope/rope.h"
#include "ops/rope/rope_cuda.h"

#include "numerics/elementary64.h"
#include "ops/cuda_entry.h"
#include "ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rope/rope.cc"
#include "ops/simd_targets.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tare::ops::rope {
namespace HWY_NAMESPACE {
using namespace tare::ops::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace)

// kSign -1 rotates back. Loads of a pair come before its stores, so x may be y.
template <typename T, int kSign>
void RotateT(const Params& p, const Args& a, int64_t begin, int64_t end) {
  const DF d;
  const int64_t half = p.rotary_dim / 2;
  const VF flip = hn::Set(d, static_cast<float>(kSign));
  for (int64_t t = begin; t < end; ++t) {
    const float* cos = a.cos + a.positions[t] * half;
    const float* sin = a.sin + a.positions[t] * half;
    for (int64_t head = 0; head < a.heads; ++head) {
      const T* x = static_cast<const T*>(a.x) + t * a.x_stride + head * p.head_dim;
      T* y = static_cast<T*>(a.y) + t * a.y_stride + head * p.head_dim;
      if (p.layout == Layout::kHalfSplit) {
        ForEachVector(half, [&](int64_t i, int64_t n) HWY_ATTR {
          const VF c = LoadPart(cos + i, n);
          const VF s = hn::Mul(LoadPart(sin + i, n), flip);
          const VF x1 = LoadPart(x + i, n);
          const VF x2 = LoadPart(x + half + i, n);
          StorePart(hn::MulSub(x1, c, hn::Mul(x2, s)), y + i, n);
          StorePart(hn::MulAdd(x2, c, hn::Mul(x1, s)), y + half + i, n);
        });
      } else {
        for (int64_t i = 0; i < half; ++i) {
          const float c = cos[i];
          const float s = sin[i] * static_cast<float>(kSign);
          const float x1 = ToFloat(x[2 * i]);
          const float x2 = ToFloat(x[2 * i + 1]);
          PutFloat(__builtin_fmaf(x1, c, -(x2 * s)), y + 2 * i);
          PutFloat(__builtin_fmaf(x2, c, x1 * s), y + 2 * i + 1);
        }
      }
      ForEachVector(p.head_dim - p.rotary_dim, [&](int64_t i, int64_t n) HWY_ATTR {
        StorePart(LoadPart(x + p.rotary_dim + i, n), y + p.rotary_dim + i, n);
      });
    }
  }
}
void ForwardRows(const Params& p, const Args& a, int64_t begin, int64_t end) {
  WithRowDType(p.dtype, [&](auto t) { RotateT<decltype(t), 1>(p, a, begin, end); });
}
void BackwardRows(const Params& p, const Args& a, int64_t begin, int64_t end) {
  WithRowDType(p.dtype, [&](auto t) { RotateT<decltype(t), -1>(p, a, begin, end); });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace tare::ops::rope
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tare::ops::rope {
namespace {

HWY_EXPORT(ForwardRows);
HWY_EXPORT(BackwardRows);

constexpr double kTwoPi = 0x1.921fb54442d18p2;

Status CheckParams(const Params& p) {
  TARE_RETURN_IF_ERROR(CheckDim("rope", "head_dim", p.head_dim, 65536));
  if (p.rotary_dim < 2 || p.rotary_dim > p.head_dim || p.rotary_dim % 2 != 0) {
    return InvalidArgument("rope: rotary_dim is {}; even, 2 to head_dim {}", p.rotary_dim,
                           p.head_dim);
  }
  TARE_RETURN_IF_ERROR(CheckRowDType("rope", "dtype", p.dtype));
  if (!(p.theta > 1.0) || !std::isfinite(p.theta)) {
    return InvalidArgument("rope: theta is {}; a finite number above 1", p.theta);
  }
  if (p.scaling == Scaling::kNone) return Ok();
  if (!(p.factor >= 1.0) || !std::isfinite(p.factor)) {
    return InvalidArgument("rope: factor is {}; a finite number of at least 1", p.factor);
  }
  if (p.scaling == Scaling::kLinear) return Ok();
  if (p.original_max_position < 1) {
    return InvalidArgument("rope: {} scaling needs original_max_position of at least 1, got {}",
                           ScalingName(p.scaling), p.original_max_position);
  }
  if (p.scaling == Scaling::kLlama3 &&
      !(p.low_freq_factor > 0 && p.high_freq_factor > p.low_freq_factor)) {
    return InvalidArgument(
        "rope: llama3 scaling needs 0 < low_freq_factor < high_freq_factor, got {} and {}",
        p.low_freq_factor, p.high_freq_factor);
  }
  if (p.scaling == Scaling::kYarn && !(p.beta_slow > 0 && p.beta_fast > p.beta_slow)) {
    return InvalidArgument("rope: yarn scaling needs 0 < beta_slow < beta_fast, got {} and {}",
                           p.beta_slow, p.beta_fast);
  }
  return Ok();
}

// f64, in radians a position. The formulas are those of the papers and of Hugging Face
// `modeling_rope_utils`, evaluated in f64.
std::vector<double> Frequencies(const Params& p) {
  const int64_t half = p.rotary_dim / 2;
  std::vector<double> frequencies(static_cast<size_t>(half));
  double low = 0, high = 0;
  if (p.scaling == Scaling::kYarn) {
    const auto dim_of = [&](double rotations) {
      return static_cast<double>(p.rotary_dim) *
             numerics::LogF64(static_cast<double>(p.original_max_position) / (rotations * kTwoPi)) /
             (2.0 * numerics::LogF64(p.theta));
    };
    low = std::max(__builtin_floor(dim_of(p.beta_fast)), 0.0);
    high = std::min(__builtin_ceil(dim_of(p.beta_slow)), static_cast<double>(p.rotary_dim - 1));
    if (low == high) high += 0.001;
  }
  for (int64_t i = 0; i < half; ++i) {
    const double exponent = static_cast<double>(2 * i) / static_cast<double>(p.rotary_dim);
    double f = 1.0 / numerics::PowF64(p.theta, exponent);
    switch (p.scaling) {
      case Scaling::kNone:
        break;
      case Scaling::kLinear:
        f /= p.factor;
        break;
      case Scaling::kLlama3: {
        const double original = static_cast<double>(p.original_max_position);
        const double wavelength = kTwoPi / f;
        if (wavelength > original / p.low_freq_factor) {
          f /= p.factor;
        } else if (wavelength >= original / p.high_freq_factor) {
          const double smooth = (original / wavelength - p.low_freq_factor) /
                                (p.high_freq_factor - p.low_freq_factor);
          f = (1.0 - smooth) * (f / p.factor) + smooth * f;
        }
        break;
      }
      case Scaling::kYarn: {
        const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
        f = (f / p.factor) * ramp + f * (1.0 - ramp);
        break;
      }
    }
    frequencies[static_cast<size_t>(i)] = f;
  }
  return frequencies;
}

// Forward or backward with planted faults: one plain loop.
template <typename T>
void FaultyRotate(const Params& p, const Args& a, bool positions_bf16, bool cast, float sign) {
  const int64_t half = p.rotary_dim / 2;
  const auto low = [&](float v) { return cast ? ViaBf16(v) : v; };
  for (int64_t t = 0; t < a.rows; ++t) {
    int64_t position = a.positions[t];
    if (positions_bf16) position = static_cast<int64_t>(ViaBf16(static_cast<float>(position)));
    position = std::min(position, a.table_positions - 1);
    for (int64_t head = 0; head < a.heads; ++head) {
      const T* x = static_cast<const T*>(a.x) + t * a.x_stride + head * p.head_dim;
      T* y = static_cast<T*>(a.y) + t * a.y_stride + head * p.head_dim;
      for (int64_t i = 0; i < half; ++i) {
        const bool split = p.layout == Layout::kHalfSplit;
        const int64_t i1 = split ? i : 2 * i;
        const int64_t i2 = split ? i + half : 2 * i + 1;
        const float c = low(a.cos[position * half + i]);
        const float s = low(a.sin[position * half + i]) * sign;
        const float x1 = ToFloat(x[i1]);
        const float x2 = ToFloat(x[i2]);
        PutFloat(cast ? low(x1 * c) + low(-(x2 * s)) : __builtin_fmaf(x1, c, -(x2 * s)), y + i1);
        PutFloat(cast ? low(x2 * c) + low(x1 * s) : __builtin_fmaf(x2, c, x1 * s), y + i2);
      }
      for (int64_t i = p.rotary_dim; i < p.head_dim; ++i) PutFloat(ToFloat(x[i]), y + i);
    }
  }
}

Result<Args> CheckArgs(const Ctx& ctx, const Params& p, const Args& given) {
  TARE_RETURN_IF_ERROR(CheckDevice("rope", ctx));
  TARE_RETURN_IF_ERROR(CheckParams(p));
  TARE_RETURN_IF_ERROR(CheckRows("rope", given.rows));
  TARE_RETURN_IF_ERROR(CheckDim("rope", "heads", given.heads, 65536));
  Args args = given;
  const int64_t width = given.heads * p.head_dim;
  TARE_ASSIGN_OR_RETURN(args.x_stride, StrideOf("rope", "x_stride", given.x_stride, width));
  TARE_ASSIGN_OR_RETURN(args.y_stride, StrideOf("rope", "y_stride", given.y_stride, width));
  TARE_RETURN_IF_ERROR(CheckPointer("rope", "positions", args.positions, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("rope", "cos", args.cos, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("rope", "sin", args.sin, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("rope", "x", args.x, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("rope", "y", args.y, args.rows));
  for (int64_t t = 0; IsHost(ctx) && t < args.rows; ++t) {
    if (args.positions[t] < 0 || args.positions[t] >= args.table_positions) {
      return InvalidArgument("rope: row {} is at position {}; the table has [0, {})", t,
                             args.positions[t], args.table_positions);
    }
  }
  return args;
}

Status Rotate(const Ctx& ctx, const Params& params, const Args& given, bool backward) {
  TARE_ASSIGN_OR_RETURN(const Args args, CheckArgs(ctx, params, given));
  TARE_WITH_CUDA_RETURN("rope", ctx, RotateCuda(ctx, params, args, backward));
  const bool positions_bf16 = fault::Active(kPositionsBf16, ctx.side);
  const bool cast = fault::Active(kCastBeforeRotate, ctx.side);
  const bool detached = backward && fault::Active(kDetached, ctx.side);
  if (positions_bf16 || cast || detached) {
    const float sign = detached ? 0.0f : backward ? -1.0f : 1.0f;
    Params p = params;
    if (detached) p.rotary_dim = 0;
    WithRowDType(params.dtype,
                 [&](auto t) { FaultyRotate<decltype(t)>(p, args, positions_bf16, cast, sign); });
    return Ok();
  }
  ctx.pool->ParallelRanges(args.rows,
                           RowGrain(args.rows, args.heads * params.head_dim, ctx.pool->threads()),
                           [&](int64_t begin, int64_t end) {
                             if (backward) {
                               HWY_DYNAMIC_DISPATCH(BackwardRows)(params, args, begin, end);
                             } else {
                               HWY_DYNAMIC_DISPATCH(ForwardRows)(params, args, begin, end);
                             }
                           });
  return Ok();
}

}  // namespace

std::string_view ScalingName(Scaling scaling) {
  switch (scaling) {
    case Scaling::kNone:
      return "none";
    case Scaling::kLinear:
      return "linear";
    case Scaling::kLlama3:
      return "llama3";
    case Scaling::kYarn:
      return "yarn";
  }
  return "unknown";
}

Result<Table> BuildTable(const Params& given, int64_t positions, fault::Side side) {
  TARE_RETURN_IF_ERROR(CheckParams(given));
  if (positions < 1 || positions > int64_t{1} << 20) {
    return InvalidArgument("rope: a table of {} positions; 1 to 2^20", positions);
  }
  Params p = given;
  if (fault::Active(kOtherScaling, side)) {
    if (p.scaling == Scaling::kNone) {
      p.scaling = Scaling::kLinear;
      p.factor = 2.0;
    } else {
      p.scaling = Scaling::kNone;
    }
  }
  const std::vector<double> frequencies = Frequencies(p);
  double attention = 1.0;
  if (p.scaling == Scaling::kYarn) {
    attention =
        p.attention_factor > 0 ? p.attention_factor : 0.1 * numerics::LogF64(p.factor) + 1.0;
  }
  Table table;
  table.positions = positions;
  const size_t half = frequencies.size();
  table.cos.resize(static_cast<size_t>(positions) * half);
  table.sin.resize(static_cast<size_t>(positions) * half);
  for (int64_t position = 0; position < positions; ++position) {
    for (size_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position) * frequencies[i];
      const size_t at = static_cast<size_t>(position) * half + i;
      table.cos[at] = static_cast<float>(numerics::CosF64(angle) * attention);
      table.sin[at] = static_cast<float>(numerics::SinF64(angle) * attention);
    }
  }
  return table;
}

Status Forward(const Ctx& ctx, const Params& params, const Args& args) {
  return Rotate(ctx, params, args, false);
}
Status Backward(const Ctx& ctx, const Params& params, const Args& args) {
  return Rotate(ctx, params, args, true);
}

}  // namespace tare::ops::rope
#endif  // HWY_ONCE
