#include "ops/router/router.h"
#include "ops/router/router_cuda.h"

#include <atomic>

#include "ops/cuda_entry.h"
#include "ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/router/router.cc"
#include "ops/simd_targets.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "numerics/elementary_simd.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tare::ops::router {
namespace HWY_NAMESPACE {
using namespace tare::ops::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace)
namespace num = tare::numerics::HWY_NAMESPACE;

// z[0 .. padded) in f32, the pads -inf; false when one is NaN.
template <typename T>
bool WidenT(const T* x, int64_t experts, int64_t padded, float* z) {
  const DF d;
  auto nan = hn::IsNaN(hn::Zero(d));
  ForEachVector(experts, [&](int64_t i, int64_t n) HWY_ATTR {
    const VF v = LoadPart(x + i, n);
    nan = hn::Or(nan, hn::IsNaN(v));
    StorePart(v, z + i, n);
  });
  for (int64_t i = experts; i < padded; ++i) z[i] = -__builtin_inff();
  return hn::AllFalse(d, nan);
}
bool Widen(const Params& p, const void* logits, int64_t row, int64_t padded, float* z) {
  return WithRowDType(p.logits_dtype, [&](auto tag) {
    return WidenT(static_cast<const decltype(tag)*>(logits) + row * p.experts, p.experts, padded,
                  z);
  });
}

// z becomes e = exp2((z - m) * log2e), then p = e / s with s = lanes(32) of e.
void Softmax(float* z, int64_t padded) {
  const DF d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  VF maximum = hn::Set(d, -__builtin_inff());
  for (int64_t i = 0; i < padded; i += lanes) maximum = hn::Max(maximum, hn::LoadU(d, z + i));
  const VF m = hn::Set(d, hn::GetLane(hn::MaxOfLanes(d, maximum)) + 0.0f);
  HWY_ALIGN float lane[32] = {};
  for (int64_t i = 0; i < padded; i += lanes) {
    const VF e = num::Exp2(d, hn::Mul(hn::Sub(hn::LoadU(d, z + i), m), hn::Set(d, 0x1.715476p0f)));
    hn::StoreU(e, d, z + i);
    hn::Store(hn::Add(hn::Load(d, lane + i % 32), e), d, lane + i % 32);
  }
  const VF s = hn::Set(d, LaneTree<32>(lane));
  for (int64_t i = 0; i < padded; i += lanes) hn::StoreU(hn::Div(hn::LoadU(d, z + i), s), d, z + i);
}

// dlogits of one row from its saved probabilities and the gradient of each p (zero outside the
// choice).
template <typename G>
void BackwardT(const float* p, const float* dp, int64_t experts, G* out) {
  const DF d;
  const int64_t padded = RoundUp(experts, 32);
  float* a = Scratch(static_cast<size_t>(2 * padded));
  float* b = a + padded;
  for (int64_t i = 0; i < padded; ++i) {
    a[i] = i < experts ? dp[i] : -0.0f;
    b[i] = i < experts ? p[i] : 0.0f;
  }
  const VF dot = hn::Set(d, LanesDot<32>(a, b, padded));
  ForEachVector(experts, [&](int64_t i, int64_t n) HWY_ATTR {
    StorePart(hn::Mul(LoadPart(b + i, n), hn::Sub(LoadPart(a + i, n), dot)), out + i, n);
  });
}
void BackwardRow(const Params& p, const float* probs, const float* dp, void* dlogits, int64_t row) {
  WithRowDType(p.grad_dtype, [&](auto tag) {
    BackwardT(probs, dp, p.experts, static_cast<decltype(tag)*>(dlogits) + row * p.experts);
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace tare::ops::router
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tare::ops::router {
namespace {

HWY_EXPORT(Widen);
HWY_EXPORT(Softmax);
HWY_EXPORT(BackwardRow);

Status Check(const Params& p, int64_t rows) {
  TARE_RETURN_IF_ERROR(CheckDim("router", "experts", p.experts, 65536));
  if (p.top_k < 1 || p.top_k > p.experts) {
    return InvalidArgument("router: top_k is {}; 1 to {} experts", p.top_k, p.experts);
  }
  if (!std::isfinite(p.scale))
    return InvalidArgument("router: scale is {}; a finite number", p.scale);
  TARE_RETURN_IF_ERROR(CheckRowDType("router", "logits_dtype", p.logits_dtype));
  TARE_RETURN_IF_ERROR(CheckRowDType("router", "grad_dtype", p.grad_dtype));
  return CheckRows("router", rows);
}

// The k largest of z: value descending, index ascending (descending with `ties_high`); +0 ties -0.
// Plain selection: k passes over the experts.
void Choose(const float* z, int64_t experts, int64_t k, bool ties_high, int32_t* ids) {
  std::vector<uint8_t> taken(static_cast<size_t>(experts), 0);
  for (int64_t s = 0; s < k; ++s) {
    int64_t best = -1;
    for (int64_t i = 0; i < experts; ++i) {
      if (taken[static_cast<size_t>(i)] != 0) continue;
      if (best < 0 || z[i] > z[best] || (ties_high && z[i] == z[best])) best = i;
    }
    taken[static_cast<size_t>(best)] = 1;
    ids[s] = static_cast<int32_t>(best);
  }
}

void BackwardOne(const Params& p, const BackwardArgs& a, int64_t t, const int32_t* ids) {
  const float* probs = a.probs + t * p.experts;
  const float* dw = a.dweights + t * p.top_k;
  std::vector<float> dp(static_cast<size_t>(p.experts), 0.0f);
  if (p.renormalise) {
    float sum = probs[ids[0]];
    for (int64_t s = 1; s < p.top_k; ++s) sum += probs[ids[s]];
    // w = scale * q / sum: dq = scale * (dw - sum of dw * w') / sum, w' = q / sum
    float dot = 0.0f;
    for (int64_t s = 0; s < p.top_k; ++s) dot = __builtin_fmaf(dw[s], probs[ids[s]] / sum, dot);
    for (int64_t s = 0; s < p.top_k; ++s)
      dp[static_cast<size_t>(ids[s])] = ((dw[s] - dot) / sum) * p.scale;
  } else {
    for (int64_t s = 0; s < p.top_k; ++s) dp[static_cast<size_t>(ids[s])] = dw[s] * p.scale;
  }
  HWY_DYNAMIC_DISPATCH(BackwardRow)(p, probs, dp.data(), a.dlogits, t);
}

}  // namespace

Status Forward(const Ctx& ctx, const Params& given, const Args& args) {
  TARE_RETURN_IF_ERROR(CheckDevice("router", ctx));
  Params params = given;
  TARE_RETURN_IF_ERROR(Check(params, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("router", "logits", args.logits, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("router", "ids", args.ids, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("router", "weights", args.weights, args.rows));
  TARE_WITH_CUDA_RETURN("router", ctx, ForwardCuda(ctx, params, args));
  const int64_t padded = RoundUp(params.experts, 32);
  const int64_t grain = RowGrain(args.rows, params.experts * 8, ctx.pool->threads());
  const auto valid = [&](int64_t t) { return args.valid == nullptr || args.valid[t] != 0; };
  // Every row is looked at before anything is written.
  std::atomic<int64_t> bad{args.rows};
  ctx.pool->ParallelRanges(args.rows, grain, [&](int64_t begin, int64_t end) {
    float* z = Scratch(static_cast<size_t>(padded));
    for (int64_t t = begin; t < end; ++t) {
      if (!valid(t) || HWY_DYNAMIC_DISPATCH(Widen)(params, args.logits, t, padded, z)) continue;
      int64_t seen = bad.load();
      while (t < seen && !bad.compare_exchange_weak(seen, t)) {
      }
    }
  });
  if (bad.load() < args.rows) {
    float* z = Scratch(static_cast<size_t>(padded));
    HWY_DYNAMIC_DISPATCH(Widen)(params, args.logits, bad.load(), padded, z);
    int64_t expert = 0;
    while (!std::isnan(z[expert])) ++expert;
    return InvalidArgument("router: the logit of row {} expert {} is NaN", bad.load(), expert);
  }
  const bool ties_high = fault::Active(kTiesHigh, ctx.side);
  const bool sorted = fault::Active(kSortedOrder, ctx.side);
  if (fault::Active(kRenormalise, ctx.side)) params.renormalise = !params.renormalise;
  ctx.pool->ParallelRanges(args.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      int32_t* ids = args.ids + t * params.top_k;
      float* weights = args.weights + t * params.top_k;
      float* probs = args.probs == nullptr ? nullptr : args.probs + t * params.experts;
      if (!valid(t)) {
        std::fill_n(ids, params.top_k, -1);
        std::fill_n(weights, params.top_k, 0.0f);
        if (probs != nullptr) std::fill_n(probs, params.experts, 0.0f);
        continue;
      }
      float* z = Scratch(static_cast<size_t>(padded));
      HWY_DYNAMIC_DISPATCH(Widen)(params, args.logits, t, padded, z);
      Choose(z, params.experts, params.top_k, ties_high, ids);
      if (sorted) std::sort(ids, ids + params.top_k);
      HWY_DYNAMIC_DISPATCH(Softmax)(z, padded);
      float sum = z[ids[0]];
      for (int64_t s = 1; s < params.top_k; ++s) sum += z[ids[s]];
      for (int64_t s = 0; s < params.top_k; ++s) {
        float w = params.renormalise ? z[ids[s]] / sum : z[ids[s]];
        if (params.scale != 1.0f) w *= params.scale;
        PutFloat(w, weights + s);
      }
      if (probs != nullptr) {
        for (int64_t i = 0; i < params.experts; ++i) PutFloat(z[i], probs + i);
      }
    }
  });
  return Ok();
}

Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args) {
  TARE_RETURN_IF_ERROR(CheckDevice("router", ctx));
  TARE_RETURN_IF_ERROR(Check(params, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("router", "ids", args.ids, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("router", "probs", args.probs, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("router", "dweights", args.dweights, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("router", "dlogits", args.dlogits, args.rows));
  TARE_WITH_CUDA_RETURN("router", ctx, BackwardCuda(ctx, params, args));
  const auto padding = [&](int64_t t) { return args.ids[t * params.top_k] < 0; };
  for (int64_t i = 0; i < args.rows * params.top_k; ++i) {
    const int32_t id = args.ids[i];
    if (id >= params.experts || (id < 0 && !padding(i / params.top_k)) || id < -1) {
      return InvalidArgument("router: row {} slot {} names expert {}; [0, {}), or -1 in all slots",
                             i / params.top_k, i % params.top_k, id, params.experts);
    }
  }
  const bool recompute = fault::Active(kRecompute, ctx.side) && args.logits != nullptr;
  const int64_t width = params.experts * SizeOf(params.grad_dtype);
  ctx.pool->ParallelRanges(
      args.rows, RowGrain(args.rows, params.experts * 4, ctx.pool->threads()),
      [&](int64_t begin, int64_t end) {
        std::vector<int32_t> again(static_cast<size_t>(params.top_k));
        const int64_t padded = RoundUp(params.experts, 32);
        for (int64_t t = begin; t < end; ++t) {
          const int32_t* ids = args.ids + t * params.top_k;
          if (padding(t)) {
            std::memset(static_cast<char*>(args.dlogits) + t * width, 0,
                        static_cast<size_t>(width));
            continue;
          }
          if (recompute) {
            std::vector<float> z(static_cast<size_t>(padded));
            HWY_DYNAMIC_DISPATCH(Widen)(params, args.logits, t, padded, z.data());
            // What a forward with other rounding sees: logits a little coarser than bf16.
            for (float& v : z)
              v = __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, v) & 0xfffc0000u);
            Choose(z.data(), params.experts, params.top_k, false, again.data());
            ids = again.data();
          }
          BackwardOne(params, args, t, ids);
        }
      });
  return Ok();
}

Status CheckDecision(int64_t rows, int64_t top_k, const int32_t* saved, const int32_t* recomputed) {
  for (int64_t t = 0; t < rows; ++t) {
    const int32_t* a = saved + t * top_k;
    const int32_t* b = recomputed + t * top_k;
    if (std::equal(a, a + top_k, b)) continue;
    return Error(
        Code::kPrecondition,
        "router: recomputed decision differs from saved: row {} saved [{}], recomputed [{}]", t,
        fmt::join(a, a + top_k, ", "), fmt::join(b, b + top_k, ", "));
  }
  return Ok();
}

}  // namespace tare::ops::router
#endif  // HWY_ONCE
