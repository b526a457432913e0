// router on CUDA: a warp a row. The choice walks the order (value descending, index ascending) from
// one expert to the next, so it needs no record of who was taken.

#include "numerics/elementary.h"
#include "ops/cuda/rows.cuh"
#include "ops/router/router_cuda.h"

namespace tare::ops::router {
namespace {

using namespace tare::ops::cuda;  // NOLINT(google-build-using-namespace)

constexpr int kWarps = 8;

struct KernelArgs {
  int64_t rows;
  int experts, top_k;
  const void* logits;
  const uint8_t* valid;
  int32_t* ids;
  float *weights, *probs;
  float scale;
  bool renormalise, ties_high, sorted;
  unsigned long long* refused;
};

// True when (z, i) comes after (z0, i0): value descending, then the index by the rule. Plain
// comparisons: +0 ties -0.
__device__ __forceinline__ bool After(float z, int i, float z0, int i0, bool ties_high) {
  return z < z0 || (z == z0 && (ties_high ? i < i0 : i > i0));
}

// The next chosen expert after (z0, i0); i0 < 0: the first. `at(i)` gives the logit. Uniform over
// the warp.
template <class At>
__device__ int Next(int experts, const At& at, float z0, int i0, bool ties_high, float* z) {
  const int lane = threadIdx.x % 32;
  int best = -1;
  float best_z = 0.0f;
  for (int i = lane; i < experts; i += 32) {
    const float v = at(i);
    if (i0 >= 0 && !After(v, i, z0, i0, ties_high)) continue;
    if (best < 0 || After(best_z, best, v, i, ties_high)) best = i, best_z = v;
  }
#pragma unroll
  for (int half = 16; half >= 1; half /= 2) {
    const int other = __shfl_xor_sync(kAllLanes, best, half);
    const float other_z = __shfl_xor_sync(kAllLanes, best_z, half);
    if (other >= 0 && (best < 0 || After(best_z, best, other_z, other, ties_high)))
      best = other, best_z = other_z;
  }
  *z = best_z;
  return best;
}

template <typename T>
__global__ void __launch_bounds__(32 * kWarps)
    router_forward_kernel(const __grid_constant__ KernelArgs a) {
  const int lane = threadIdx.x % 32;
  for (int64_t t = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; t < a.rows;
       t += int64_t{gridDim.x} * kWarps) {
    const T* logits = static_cast<const T*>(a.logits) + t * a.experts;
    int32_t* ids = a.ids + t * a.top_k;
    float* weights = a.weights + t * a.top_k;
    float* probs = a.probs == nullptr ? nullptr : a.probs + t * a.experts;
    const auto at = [&](int i) { return Widen(logits[i]); };
    bool usable = a.valid == nullptr || a.valid[t] != 0;
    float m = __uint_as_float(0xff800000u);
    if (usable) {
      int nan = 0x7fffffff;
      for (int i = lane; i < a.experts; i += 32) {
        const float z = at(i);
        if (z != z) nan = min(nan, i);
        m = fmaxf(m, z);
      }
#pragma unroll
      for (int half = 16; half >= 1; half /= 2) {
        m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, half));
        nan = min(nan, __shfl_xor_sync(kAllLanes, nan, half));
      }
      if (nan != 0x7fffffff) {
        if (lane == 0) Refuse(a.refused, Refusal::kRouterNan, t, nan);
        usable = false;
      }
    }
    if (!usable) {
      for (int s = lane; s < a.top_k; s += 32) ids[s] = -1, weights[s] = 0.0f;
      for (int i = lane; probs != nullptr && i < a.experts; i += 32) probs[i] = 0.0f;
      continue;
    }
    m = Add(m, 0.0f);
    const auto e_at = [&](int i) { return numerics::Exp2(Mul(Sub(at(i), m), 0x1.715476p0f)); };
    float acc = 0.0f;
    for (int i = lane; i < a.experts; i += 32) acc = Add(acc, e_at(i));
    const float s = TreeOf32(acc);
    for (int i = lane; probs != nullptr && i < a.experts; i += 32) Put(Div(e_at(i), s), probs + i);
    float z = 0.0f;
    int id = -1;
    for (int slot = 0; slot < a.top_k; ++slot) {
      id = Next(a.experts, at, z, id, a.ties_high, &z);
      if (lane == 0) ids[slot] = id;
    }
    // Each slot's p; one lane adds them in slot order.
    if (lane == 0) {
      if (a.sorted) {
        for (int i = 1; i < a.top_k; ++i) {
          const int32_t v = ids[i];
          int j = i;
          for (; j > 0 && ids[j - 1] > v; --j) ids[j] = ids[j - 1];
          ids[j] = v;
        }
      }
      float sum = Div(e_at(ids[0]), s);
      for (int slot = 1; slot < a.top_k; ++slot) sum = Add(sum, Div(e_at(ids[slot]), s));
      for (int slot = 0; slot < a.top_k; ++slot) {
        float w = Div(e_at(ids[slot]), s);
        if (a.renormalise) w = Div(w, sum);
        if (a.scale != 1.0f) w = Mul(w, a.scale);
        Put(w, weights + slot);
      }
    }
  }
}

struct BackwardKernelArgs {
  int64_t rows;
  int experts, top_k;
  const int32_t* ids;
  const float *probs, *dweights;
  void* dlogits;
  const void* logits;  // for the planted fault, else null
  float scale;
  bool renormalise, logits_f32;
  unsigned long long* refused;
};

template <typename G>
__global__ void __launch_bounds__(32 * kWarps)
    router_backward_kernel(const __grid_constant__ BackwardKernelArgs a) {
  extern __shared__ int32_t chosen[];  // [kWarps][top_k], the recomputed choice of the fault
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int64_t t = int64_t{blockIdx.x} * kWarps + warp; t < a.rows;
       t += int64_t{gridDim.x} * kWarps) {
    const int32_t* ids = a.ids + t * a.top_k;
    const float* p = a.probs + t * a.experts;
    const float* dw = a.dweights + t * a.top_k;
    G* out = static_cast<G*>(a.dlogits) + t * a.experts;
    // Padding has -1 in every slot; anything else outside [0, E) is refused.
    const bool padding = ids[0] < 0;
    int bad = 0x7fffffff;
    for (int s = lane; s < a.top_k; s += 32) {
      if (ids[s] < -1 || ids[s] >= a.experts || (ids[s] < 0) != padding) bad = min(bad, s);
    }
    for (int half = 16; half >= 1; half /= 2) bad = min(bad, __shfl_xor_sync(kAllLanes, bad, half));
    if (bad != 0x7fffffff && lane == 0) Refuse(a.refused, Refusal::kRouterId, t, bad);
    if (padding || bad != 0x7fffffff) {
      for (int i = lane; i < a.experts; i += 32) Put(0.0f, out + i);
      continue;
    }
    if (a.logits != nullptr) {
      // What a forward with other rounding sees: logits a little coarser than bf16.
      const auto at = [&](int i) {
        return __uint_as_float(__float_as_uint(LoadAny(a.logits, a.logits_f32, t * a.experts + i)) &
                               0xfffc0000u);
      };
      float z = 0.0f;
      int id = -1;
      for (int s = 0; s < a.top_k; ++s) {
        id = Next(a.experts, at, z, id, false, &z);
        if (lane == 0) chosen[warp * a.top_k + s] = id;
      }
      __syncwarp();
      ids = chosen + warp * a.top_k;
    }
    float sum = p[ids[0]], d = 0.0f;
    if (a.renormalise) {
      for (int s = 1; s < a.top_k; ++s) sum = Add(sum, p[ids[s]]);
      for (int s = 0; s < a.top_k; ++s) d = Fma(dw[s], Div(p[ids[s]], sum), d);
    }
    const auto dp_at = [&](int i) {
      float dp = 0.0f;
      for (int s = 0; s < a.top_k; ++s) {
        if (ids[s] != i) continue;
        dp = a.renormalise ? Mul(Div(Sub(dw[s], d), sum), a.scale) : Mul(dw[s], a.scale);
      }
      return dp;
    };
    float acc = 0.0f;
    for (int i = lane; i < a.experts; i += 32) acc = Fma(dp_at(i), p[i], acc);
    const float dot = TreeOf32(acc);
    for (int i = lane; i < a.experts; i += 32) Put(Mul(p[i], Sub(dp_at(i), dot)), out + i);
  }
}

}  // namespace

Status ForwardCuda(const Ctx& ctx, const Params& p, const Args& args) {
  TARE_ASSIGN_OR_RETURN(unsigned long long* const refused, RefusalWord());
  if (args.rows == 0) return Ok();
  const KernelArgs a = {args.rows,
                        static_cast<int>(p.experts),
                        static_cast<int>(p.top_k),
                        args.logits,
                        args.valid,
                        args.ids,
                        args.weights,
                        args.probs,
                        p.scale,
                        p.renormalise != fault::Active(kRenormalise, ctx.side),
                        fault::Active(kTiesHigh, ctx.side),
                        fault::Active(kSortedOrder, ctx.side),
                        refused};
  return WithRowDType(p.logits_dtype, [&](auto tag) -> Status {
    router_forward_kernel<decltype(tag)>
        <<<GridFor(a.rows, kWarps), 32 * kWarps, 0, Stream(ctx)>>>(a);
    return Launched();
  });
}

Status BackwardCuda(const Ctx& ctx, const Params& p, const BackwardArgs& args) {
  TARE_ASSIGN_OR_RETURN(unsigned long long* const refused, RefusalWord());
  if (args.rows == 0) return Ok();
  const bool recompute = fault::Active(kRecompute, ctx.side) && args.logits != nullptr;
  const BackwardKernelArgs a = {args.rows,
                                static_cast<int>(p.experts),
                                static_cast<int>(p.top_k),
                                args.ids,
                                args.probs,
                                args.dweights,
                                args.dlogits,
                                recompute ? args.logits : nullptr,
                                p.scale,
                                p.renormalise,
                                p.logits_dtype == DType::kF32,
                                refused};
  const size_t shared = recompute ? static_cast<size_t>(kWarps * p.top_k) * sizeof(int32_t) : 0;
  return WithRowDType(p.grad_dtype, [&](auto tag) -> Status {
    auto* kernel = &router_backward_kernel<decltype(tag)>;
    TARE_RETURN_IF_ERROR(AllowShared(kernel, shared));
    kernel<<<GridFor(a.rows, kWarps), 32 * kWarps, shared, Stream(ctx)>>>(a);
    return Launched();
  });
}

}  // namespace tare::ops::router
