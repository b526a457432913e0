// dispatch on CUDA: rows gathered by token; backward adds the slots of a token, ascending.

#include "ops/cuda/eights.cuh"
#include "ops/dispatch/dispatch_cuda.h"

namespace tare::ops::dispatch {
namespace {

using namespace tare::ops::cuda;  // NOLINT(google-build-using-namespace)

// kGroup consecutive elements: 8, or 1 where they cannot be read at once.
template <typename T, int kGroup>
__device__ __forceinline__ void LoadGroup(const T* p, float (&v)[kGroup]) {
  if constexpr (kGroup == 8) {
    Load8(p, v);
  } else {
    v[0] = Widen(p[0]);
  }
}
template <typename T, int kGroup>
__device__ __forceinline__ void StoreGroup(const float (&v)[kGroup], T* p) {
  if constexpr (kGroup == 8) {
    Store8(v, p);
  } else {
    Put(v[0], p);
  }
}

template <typename T, int kGroup>
__global__ void __launch_bounds__(256)
    dispatch_forward_kernel(int64_t rows, int64_t out_rows, int64_t hidden,
                            const int32_t* row_token, const T* x, T* out,
                            unsigned long long* refused) {
  const int64_t per_row = hidden / kGroup, total = out_rows * per_row;
  for (int64_t at = int64_t{blockIdx.x} * 256 + threadIdx.x; at < total;
       at += int64_t{gridDim.x} * 256) {
    const auto [row, group] = PlaceOf(at, per_row);
    const int64_t i = group * kGroup;
    const int64_t token = row_token[row];
    float v[kGroup] = {};
    if (token >= 0 && token < rows) {
      LoadGroup(x + token * hidden + i, v);
    } else if (i == 0) {
      Refuse(refused, Refusal::kDispatchToken, row);
    }
    StoreGroup(v, out + row * hidden + i);
  }
}

template <typename G, int kGroup>
__global__ void __launch_bounds__(256)
    dispatch_backward_kernel(int64_t rows, int64_t out_rows, int64_t hidden, int top_k,
                             const int32_t* slot_row, const G* dout, G* dx,
                             unsigned long long* refused) {
  const int64_t per_row = hidden / kGroup, total = rows * per_row;
  for (int64_t at = int64_t{blockIdx.x} * 256 + threadIdx.x; at < total;
       at += int64_t{gridDim.x} * 256) {
    const auto [t, group] = PlaceOf(at, per_row);
    const int64_t i = group * kGroup;
    float acc[kGroup] = {};
    for (int s = 0; s < top_k; ++s) {
      const int64_t row = slot_row[t * top_k + s];
      if (row < -1 || row >= out_rows) {
        if (i == 0) Refuse(refused, Refusal::kDispatchRow, t, s);
        continue;
      }
      if (row < 0) continue;
      float v[kGroup];
      LoadGroup(dout + row * hidden + i, v);
#pragma unroll
      for (int e = 0; e < kGroup; ++e) acc[e] = Add(acc[e], v[e]);
    }
    StoreGroup(acc, dx + t * hidden + i);
  }
}

}  // namespace

Status ForwardCuda(const Ctx& ctx, const Params& p, const Args& a) {
  TARE_ASSIGN_OR_RETURN(unsigned long long* const refused, RefusalWord());
  if (a.out_rows == 0) return Ok();
  return WithRowDType(p.dtype, [&](auto tag) -> Status {
    using T = decltype(tag);
    const auto* x = static_cast<const T*>(a.x);
    auto* out = static_cast<T*>(a.out);
    const bool vec = p.hidden % 8 == 0 && Aligned16({x, out});
    const unsigned grid = GridFor(a.out_rows * p.hidden / (vec ? 8 : 1), 256, int64_t{1} << 30);
    if (vec) {
      dispatch_forward_kernel<T, 8><<<grid, 256, 0, Stream(ctx)>>>(a.rows, a.out_rows, p.hidden,
                                                                   a.row_token, x, out, refused);
    } else {
      dispatch_forward_kernel<T, 1><<<grid, 256, 0, Stream(ctx)>>>(a.rows, a.out_rows, p.hidden,
                                                                   a.row_token, x, out, refused);
    }
    return Launched();
  });
}

Status BackwardCuda(const Ctx& ctx, const Params& p, const BackwardArgs& a) {
  TARE_ASSIGN_OR_RETURN(unsigned long long* const refused, RefusalWord());
  if (a.rows == 0) return Ok();
  return WithRowDType(p.grad_dtype, [&](auto tag) -> Status {
    using G = decltype(tag);
    const auto* dout = static_cast<const G*>(a.dout);
    auto* dx = static_cast<G*>(a.dx);
    const bool vec = p.hidden % 8 == 0 && Aligned16({dout, dx});
    const unsigned grid = GridFor(a.rows * p.hidden / (vec ? 8 : 1), 256, int64_t{1} << 30);
    const int top_k = static_cast<int>(p.top_k);
    if (vec) {
      dispatch_backward_kernel<G, 8><<<grid, 256, 0, Stream(ctx)>>>(
          a.rows, a.out_rows, p.hidden, top_k, a.slot_row, dout, dx, refused);
    } else {
      dispatch_backward_kernel<G, 1><<<grid, 256, 0, Stream(ctx)>>>(
          a.rows, a.out_rows, p.hidden, top_k, a.slot_row, dout, dx, refused);
    }
    return Launched();
  });
}

}  // namespace tare::ops::dispatch
