// adamw on CUDA: elementwise, four elements a thread.

#include "ops/adamw/adamw_cuda.h"
#include "ops/cuda/rows.cuh"

namespace tare::ops::adamw {
namespace {

using namespace tare::ops::cuda;  // NOLINT(google-build-using-namespace)

struct Constants {
  float beta1, rest1, beta2, rest2, c1, c2, decay, eps, lr, scale, weight_decay;
};

template <bool kCoupled, bool kEpsInside>
__device__ __forceinline__ void Update(const Constants& k, float grad, float& w, float& m,
                                       float& v) {
  float g = Mul(grad, k.scale);
  if constexpr (kCoupled) g = Fma(k.weight_decay, w, g);
  m = Fma(k.beta1, m, Mul(k.rest1, g));
  v = Fma(k.beta2, v, Mul(Mul(k.rest2, g), g));
  float denominator = Mul(v, k.c2);
  if constexpr (kEpsInside) {
    denominator = numerics::Sqrt(Add(denominator, k.eps));
  } else {
    denominator = Add(numerics::Sqrt(denominator), k.eps);
  }
  w = Fma(-k.lr, Div(Mul(m, k.c1), denominator), Mul(w, k.decay));
}

template <bool kCoupled, bool kEpsInside>
__global__ void __launch_bounds__(256)
    adamw_kernel(int64_t count, const __grid_constant__ Constants k, float* master, float* m_,
                 float* v_, const float* grad, uint16_t* copy, bool vec) {
  const int64_t groups = vec ? count / 4 : 0;
  const int64_t thread = int64_t{blockIdx.x} * 256 + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * 256;
  for (int64_t i = thread; i < groups; i += threads) {
    float w[4], m[4], v[4], g[4];
    Widen4(LoadRaw4(master + 4 * i), w);
    Widen4(LoadRaw4(m_ + 4 * i), m);
    Widen4(LoadRaw4(v_ + 4 * i), v);
    Widen4(LoadRaw4(grad + 4 * i), g);
#pragma unroll
    for (int e = 0; e < 4; ++e) Update<kCoupled, kEpsInside>(k, g[e], w[e], m[e], v[e]);
    Store4(m, m_ + 4 * i);
    Store4(v, v_ + 4 * i);
    Store4(w, master + 4 * i);
    if (copy != nullptr) Store4(w, copy + 4 * i);
  }
  for (int64_t i = 4 * groups + thread; i < count; i += threads) {
    float w = master[i], m = m_[i], v = v_[i];
    Update<kCoupled, kEpsInside>(k, grad[i], w, m, v);
    Put(m, m_ + i);
    Put(v, v_ + i);
    Put(w, master + i);
    if (copy != nullptr) Put(w, copy + i);
  }
}

}  // namespace

Status StepCuda(const Ctx& ctx, const Params& p, const StepConstants& s, const Args& a,
                bool coupled, bool inside) {
  if (a.count == 0) return Ok();
  const Constants k = {p.beta1, 1.0f - p.beta1, p.beta2, 1.0f - p.beta2, s.c1,          s.c2,
                       s.decay, p.eps,          a.lr,    a.grad_scale,   p.weight_decay};
  const bool vec = Aligned4(a.master, DType::kF32) && Aligned4(a.m, DType::kF32) &&
                   Aligned4(a.v, DType::kF32) && Aligned4(a.grad, DType::kF32) &&
                   Aligned4(a.copy, DType::kBF16);
  const unsigned grid = GridFor(a.count / 4 + 1, 256, int64_t{1} << 30);
  const auto run = [&](auto* kernel) {
    kernel<<<grid, 256, 0, Stream(ctx)>>>(a.count, k, a.master, a.m, a.v, a.grad, a.copy, vec);
    return Launched();
  };
  if (coupled) return run(&adamw_kernel<true, false>);
  if (inside) return run(&adamw_kernel<false, true>);
  return run(&adamw_kernel<false, false>);
}

}  // namespace tare::ops::adamw
