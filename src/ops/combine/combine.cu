// combine on CUDA: four columns of a token a thread, slots ascending; backward a warp for each
// token and slot.

#include "ops/combine/combine_cuda.h"
#include "ops/cuda/eights.cuh"

namespace tare::ops::combine {
namespace {

using namespace tare::ops::cuda;  // NOLINT(google-build-using-namespace)

constexpr int kWarps = 8;

struct KernelArgs {
  int64_t rows, expert_rows, hidden;
  int top_k, slots;  // slots: fewer than top_k under a planted fault
  const void* y;
  const int32_t* slot_row;
  const float* weights;
  void* out;
  unsigned long long* refused;
};

template <typename T, int kGroup>
__global__ void __launch_bounds__(256)
    combine_forward_kernel(const __grid_constant__ KernelArgs a, bool by_arrival) {
  const int64_t per_row = a.hidden / kGroup, total = a.rows * per_row;
  for (int64_t at = int64_t{blockIdx.x} * 256 + threadIdx.x; at < total;
       at += int64_t{gridDim.x} * 256) {
    const auto [t, group] = PlaceOf(at, per_row);
    const int64_t i = group * kGroup;
    const int32_t* rows = a.slot_row + t * a.top_k;
    float acc[kGroup] = {};
    int64_t previous = -1;  // by_arrival: rows ascending instead of slots
    for (int k = 0; k < a.slots; ++k) {
      int s = k;
      if (by_arrival) {
        s = -1;
        for (int j = 0; j < a.slots; ++j) {
          if (rows[j] > previous && (s < 0 || rows[j] < rows[s])) s = j;
        }
        if (s < 0) break;
        previous = rows[s];
      }
      const int64_t row = rows[s];
      if (row < -1 || row >= a.expert_rows) {
        if (i == 0) Refuse(a.refused, Refusal::kCombineRow, t, s);
        continue;
      }
      if (row < 0) continue;
      const T* y = static_cast<const T*>(a.y) + row * a.hidden + i;
      const float w = a.weights[t * a.top_k + s];
      float v[kGroup];
      if constexpr (kGroup == 4) {
        Widen4(LoadRaw4(y), v);
      } else {
        v[0] = Widen(y[0]);
      }
#pragma unroll
      for (int e = 0; e < kGroup; ++e) acc[e] = Fma(w, v[e], acc[e]);
    }
    T* out = static_cast<T*>(a.out) + t * a.hidden + i;
    if constexpr (kGroup == 4) {
      Store4(acc, out);
    } else {
      Put(acc[0], out);
    }
  }
}

// bf16 rows of whole eights and at most eight slots: a thread takes eight columns, and the rows of
// all slots are under way before the first is added.
__global__ void __launch_bounds__(256) combine_bf16_kernel(const __grid_constant__ KernelArgs a) {
  constexpr int kSlots = 8;
  const int64_t per_row = a.hidden / 8, total = a.rows * per_row;
  for (int64_t item = int64_t{blockIdx.x} * 256 + threadIdx.x; item < total;
       item += int64_t{gridDim.x} * 256) {
    const auto [t, at] = PlaceOf(item, per_row);
    uint4 raw[kSlots];
    int32_t rows[kSlots];
#pragma unroll
    for (int k = 0; k < kSlots; ++k) rows[k] = k < a.slots ? a.slot_row[t * a.top_k + k] : -1;
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      if (rows[k] < -1 || rows[k] >= a.expert_rows) {
        if (at == 0) Refuse(a.refused, Refusal::kCombineRow, t, k);
        rows[k] = -1;
      }
      if (rows[k] >= 0) {
        raw[k] = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(a.y) +
                                                 rows[k] * a.hidden + 8 * at);
      }
    }
    float acc[8] = {};
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      if (rows[k] < 0) continue;
      const float w = a.weights[t * a.top_k + k];
      float v[8];
      Widen8(raw[k], v);
#pragma unroll
      for (int e = 0; e < 8; ++e) acc[e] = Fma(w, v[e], acc[e]);
    }
    Store8(acc, static_cast<uint16_t*>(a.out) + t * a.hidden + 8 * at);
  }
}

struct BackwardKernelArgs {
  int64_t rows, expert_rows, hidden;
  int top_k;
  const void* y;
  const int32_t* slot_row;
  const float* weights;
  const void* dout;
  void* dy;
  float* dweights;
  unsigned long long* refused;
};

template <typename T, typename G, bool kVec>
__global__ void __launch_bounds__(32 * kWarps)
    combine_backward_kernel(const __grid_constant__ BackwardKernelArgs a) {
  using C = Chunk<kVec>;
  const int lane = threadIdx.x % 32;
  const int64_t total = a.rows * a.top_k;
  for (int64_t at = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; at < total;
       at += int64_t{gridDim.x} * kWarps) {
    const int64_t row = a.slot_row[at], t = at / a.top_k;
    if (row < 0 || row >= a.expert_rows) {
      if (lane == 0) {
        if (row != -1) Refuse(a.refused, Refusal::kCombineRow, t, at - t * a.top_k);
        a.dweights[at] = 0.0f;
      }
      continue;
    }
    const G* dout = static_cast<const G*>(a.dout) + t * a.hidden;
    const T* y = static_cast<const T*>(a.y) + row * a.hidden;
    G* dy = static_cast<G*>(a.dy) + row * a.hidden;
    const float w = a.weights[at];
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    constexpr int kBatch = 4;
    for (int64_t first = 0; first < a.hidden; first += 128 * kBatch) {
      float g[kBatch][4], v[kBatch][4];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int64_t i = first + 128 * b;
        C::Load(dout + i, a.hidden - i, lane, g[b]);
        C::Load(y + i, a.hidden - i, lane, v[b]);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int64_t i = first + 128 * b;
        if (i >= a.hidden) break;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (i + C::Index(lane, e) < a.hidden) acc[e] = Fma(g[b][e], v[b][e], acc[e]);
          g[b][e] = Mul(w, g[b][e]);
        }
        C::Store(g[b], dy + i, a.hidden - i, lane);
      }
    }
    const float dweight = C::Tree(acc);
    if (lane == 0) Put(dweight, a.dweights + at);
  }
}

}  // namespace

Status ForwardCuda(const Ctx& ctx, const Params& p, const Args& args) {
  TARE_ASSIGN_OR_RETURN(unsigned long long* const refused, RefusalWord());
  if (args.rows == 0) return Ok();
  const int top_k = static_cast<int>(p.top_k);
  const KernelArgs a = {args.rows,
                        args.expert_rows,
                        p.hidden,
                        top_k,
                        top_k - (fault::Active(kLastSlotDropped, ctx.side) ? 1 : 0),
                        args.y,
                        args.slot_row,
                        args.weights,
                        args.out,
                        refused};
  const bool by_arrival = fault::Active(kByArrival, ctx.side);
  const bool vec = p.hidden % 4 == 0 && Aligned4(a.y, p.dtype) && Aligned4(a.out, p.dtype);
  return WithRowDType(p.dtype, [&](auto tag) -> Status {
    using T = decltype(tag);
    if (sizeof(T) == 2 && !by_arrival && p.hidden % 8 == 0 && top_k <= 8 &&
        Aligned16({a.y, a.out})) {
      combine_bf16_kernel<<<GridFor(a.rows * p.hidden / 8, 256, int64_t{1} << 30), 256, 0,
                            Stream(ctx)>>>(a);
      return Launched();
    }
    const unsigned grid = GridFor(a.rows * p.hidden / (vec ? 4 : 1), 256, int64_t{1} << 30);
    if (vec) {
      combine_forward_kernel<T, 4><<<grid, 256, 0, Stream(ctx)>>>(a, by_arrival);
    } else {
      combine_forward_kernel<T, 1><<<grid, 256, 0, Stream(ctx)>>>(a, by_arrival);
    }
    return Launched();
  });
}

Status BackwardCuda(const Ctx& ctx, const Params& p, const BackwardArgs& args) {
  TARE_ASSIGN_OR_RETURN(unsigned long long* const refused, RefusalWord());
  // Rows of no slot become +0. That no two slots name one row is not looked at here: the routes
  // come from BuildPlan, which gives every slot its own.
  TARE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(
      args.dy, 0, static_cast<size_t>(args.expert_rows * p.hidden * SizeOf(p.grad_dtype)),
      Stream(ctx)));
  if (args.rows == 0) return Ok();
  const BackwardKernelArgs a = {
      args.rows, args.expert_rows, p.hidden,     static_cast<int>(p.top_k),
      args.y,    args.slot_row,    args.weights, args.dout,
      args.dy,   args.dweights,    refused};
  const bool vec = p.hidden % 4 == 0 && Aligned4(a.y, p.dtype) && Aligned4(a.dout, p.grad_dtype) &&
                   Aligned4(a.dy, p.grad_dtype);
  return WithRowDType(p.dtype, [&](auto x) {
    return WithRowDType(p.grad_dtype, [&](auto g) -> Status {
      using T = decltype(x);
      using G = decltype(g);
      const unsigned grid = GridFor(a.rows * a.top_k, kWarps, int64_t{1} << 30);
      if (vec) {
        combine_backward_kernel<T, G, true><<<grid, 32 * kWarps, 0, Stream(ctx)>>>(a);
      } else {
        combine_backward_kernel<T, G, false><<<grid, 32 * kWarps, 0, Stream(ctx)>>>(a);
      }
      return Launched();
    });
  });
}

}  // namespace tare::ops::combine
