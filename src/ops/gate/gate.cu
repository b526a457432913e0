// gate on CUDA: elementwise; large bf16 calls by table (gate_table.cuh), others four elements a
// thread.

#include "ops/gate/gate_table.cuh"

namespace tare::ops::gate {
namespace {

using namespace tare::ops::cuda;  // NOLINT(google-build-using-namespace)

// kGroup elements of a row at a time: 4, or 1 where four cannot be read at once.
template <typename T, int kGroup>
__device__ __forceinline__ void LoadGroup(const T* p, float (&v)[kGroup]) {
  if constexpr (kGroup == 4) {
    Widen4(LoadRaw4(p), v);
  } else {
    v[0] = Widen(p[0]);
  }
}
template <typename T, int kGroup>
__device__ __forceinline__ void StoreGroup(const float (&v)[kGroup], T* p) {
  if constexpr (kGroup == 4) {
    Store4(v, p);
  } else {
    Put(v[0], p);
  }
}

template <Activation kAct, typename T, int kGroup>
__global__ void __launch_bounds__(256) gate_forward_kernel(const __grid_constant__ ForwardArgs a) {
  const int64_t per_row = a.width / kGroup;
  for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    const T* g = static_cast<const T*>(a.gate) + row * a.stride;
    const T* u = static_cast<const T*>(a.up) + row * a.stride;
    T* y = static_cast<T*>(a.y) + row * a.width;
    for (int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x; i < per_row;
         i += int64_t{gridDim.x} * 256) {
      float vg[kGroup], vu[kGroup];
      LoadGroup(g + i * kGroup, vg);
      LoadGroup(u + i * kGroup, vu);
#pragma unroll
      for (int e = 0; e < kGroup; ++e) vg[e] = Mul(Act<kAct>(vg[e]), vu[e]);
      StoreGroup(vg, y + i * kGroup);
    }
  }
}

template <Activation kAct, typename T, typename G, int kGroup>
__global__ void __launch_bounds__(256)
    gate_backward_kernel(const __grid_constant__ BackwardArgsCuda a) {
  const int64_t per_row = a.width / kGroup;
  for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    const T* g = static_cast<const T*>(a.gate) + row * a.stride;
    const T* u = static_cast<const T*>(a.up) + row * a.stride;
    const G* dy = static_cast<const G*>(a.dy) + row * a.width;
    G* dg = static_cast<G*>(a.dgate) + row * a.dstride;
    G* du = static_cast<G*>(a.dup) + row * a.dstride;
    for (int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x; i < per_row;
         i += int64_t{gridDim.x} * 256) {
      float vg[kGroup], vu[kGroup], vd[kGroup];
      LoadGroup(g + i * kGroup, vg);
      LoadGroup(u + i * kGroup, vu);
      LoadGroup(dy + i * kGroup, vd);
#pragma unroll
      for (int e = 0; e < kGroup; ++e) {
        const float dgate = Mul(Mul(vd[e], vu[e]), Derivative<kAct>(vg[e]));
        vu[e] = Mul(vd[e], Act<kAct>(vg[e]));
        vg[e] = a.detached ? 0.0f : dgate;
      }
      StoreGroup(vu, du + i * kGroup);
      StoreGroup(vg, dg + i * kGroup);
    }
  }
}

template <Activation kAct, typename T>
__global__ void gate_faulty_kernel(const __grid_constant__ ForwardArgs a, bool approximate,
                                   bool early) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= a.rows * a.width) return;
  const int64_t row = i / a.width, column = i % a.width;
  const float g = Widen(static_cast<const T*>(a.gate)[row * a.stride + column]);
  const float u = Widen(static_cast<const T*>(a.up)[row * a.stride + column]);
  float act = Act<kAct>(g);
  if (approximate) {
    const float x = fmaxf(-127.0f, fminf(127.0f, Mul(-g, 0x1.715476p0f)));
    act = Div(g, Add(1.0f, numerics::Exp2P(x)));
  }
  if (early) act = ThroughBf16(act);
  Put(Mul(act, u), static_cast<T*>(a.y) + i);
}

template <class Body>
Status WithActivation(Activation activation, const Body& body) {
  switch (activation) {
    case Activation::kSilu:
      return body(std::integral_constant<Activation, Activation::kSilu>());
    case Activation::kGeluTanh:
      return body(std::integral_constant<Activation, Activation::kGeluTanh>());
    case Activation::kGeluErf:
      return body(std::integral_constant<Activation, Activation::kGeluErf>());
  }
  return InvalidArgument("gate: activation {}", static_cast<int>(activation));
}

// A row's groups over x, rows over y.
dim3 Grid(int64_t rows, int64_t groups) {
  return dim3(GridFor(groups, 256, 4096), static_cast<unsigned>(std::min<int64_t>(rows, 65535)));
}

}  // namespace

Status ForwardCuda(const Ctx& ctx, const Params& p, const Args& args) {
  if (args.rows == 0) return Ok();
  const ForwardArgs a = {args.rows, p.width, args.stride, args.gate, args.up, args.y};
  const bool approximate = fault::Active(kApproximateExp, ctx.side);
  const bool early = fault::Active(kEarlyCast, ctx.side);
  const bool vec = p.width % 4 == 0 && a.stride % 4 == 0 && Aligned4(a.gate, p.dtype) &&
                   Aligned4(a.up, p.dtype) && Aligned4(a.y, p.dtype);
  const bool by_table = p.dtype == DType::kBF16 && a.rows * a.width >= kTableElements &&
                        p.width % 8 == 0 && a.stride % 8 == 0 && Aligned16({a.gate, a.up, a.y});
  TARE_ASSIGN_OR_RETURN(const unsigned table_grid, Multiprocessors());
  return WithActivation(p.activation, [&](auto act) {
    return WithRowDType(p.dtype, [&](auto tag) -> Status {
      using T = decltype(tag);
      constexpr Activation kAct = decltype(act)::value;
      if (approximate || early) {
        const int64_t total = a.rows * a.width;
        gate_faulty_kernel<kAct, T>
            <<<static_cast<unsigned>((total + 255) / 256), 256, 0, Stream(ctx)>>>(a, approximate,
                                                                                  early);
      } else if (by_table) {
        if constexpr (sizeof(T) == 2)
          gate_table_forward_kernel<kAct><<<table_grid, kTableThreads, 0, Stream(ctx)>>>(a);
      } else if (vec) {
        gate_forward_kernel<kAct, T, 4><<<Grid(a.rows, a.width / 4), 256, 0, Stream(ctx)>>>(a);
      } else {
        gate_forward_kernel<kAct, T, 1><<<Grid(a.rows, a.width), 256, 0, Stream(ctx)>>>(a);
      }
      return Launched();
    });
  });
}

Status BackwardCuda(const Ctx& ctx, const Params& p, const BackwardArgs& args) {
  if (args.rows == 0) return Ok();
  const BackwardArgsCuda a = {
      args.rows, p.width, args.stride, args.dstride, args.gate,
      args.up,   args.dy, args.dgate,  args.dup,     fault::Active(kDetached, ctx.side)};
  const bool vec = p.width % 4 == 0 && a.stride % 4 == 0 && a.dstride % 4 == 0 &&
                   Aligned4(a.gate, p.dtype) && Aligned4(a.up, p.dtype) &&
                   Aligned4(a.dy, p.grad_dtype) && Aligned4(a.dgate, p.grad_dtype) &&
                   Aligned4(a.dup, p.grad_dtype);
  const bool by_table = p.dtype == DType::kBF16 && a.rows * p.width >= kTableElements &&
                        p.width % 8 == 0 && a.stride % 8 == 0 && a.dstride % 8 == 0 &&
                        Aligned16({a.gate, a.up, a.dy, a.dgate, a.dup});
  TARE_ASSIGN_OR_RETURN(const unsigned table_grid, Multiprocessors());
  return WithActivation(p.activation, [&](auto act) {
    return WithRowDType(p.dtype, [&](auto x) {
      return WithRowDType(p.grad_dtype, [&](auto g) -> Status {
        using T = decltype(x);
        using G = decltype(g);
        constexpr Activation kAct = decltype(act)::value;
        if (by_table) {
          if constexpr (sizeof(T) == 2)
            gate_table_backward_kernel<kAct, G><<<table_grid, kTableThreads, 0, Stream(ctx)>>>(a);
        } else if (vec) {
          gate_backward_kernel<kAct, T, G, 4>
              <<<Grid(a.rows, a.width / 4), 256, 0, Stream(ctx)>>>(a);
        } else {
          gate_backward_kernel<kAct, T, G, 1><<<Grid(a.rows, a.width), 256, 0, Stream(ctx)>>>(a);
        }
        return Launched();
      });
    });
  });
}

}  // namespace tare::ops::gate
