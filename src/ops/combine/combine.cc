#include "ops/combine/combine.h"
#include "ops/combine/combine_cuda.h"

#include "ops/cuda_entry.h"
#include "ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/combine/combine.cc"
#include "ops/simd_targets.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tare::ops::combine {
namespace HWY_NAMESPACE {
using namespace tare::ops::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace)

// Slots of token t are added in the order of `order` (indices into its slots), `slots` of them.
template <typename T>
void ForwardT(const Params& p, const Args& a, int64_t begin, int64_t end, bool by_arrival,
              int64_t slots) {
  const DF d;
  std::vector<int64_t> order(static_cast<size_t>(slots));
  for (int64_t t = begin; t < end; ++t) {
    const int32_t* rows = a.slot_row + t * p.top_k;
    const float* weights = a.weights + t * p.top_k;
    T* out = static_cast<T*>(a.out) + t * p.hidden;
    for (int64_t s = 0; s < slots; ++s) order[static_cast<size_t>(s)] = s;
    if (by_arrival)
      std::sort(order.begin(), order.end(),
                [&](int64_t x, int64_t y) { return rows[x] < rows[y]; });
    ForEachVector(p.hidden, [&](int64_t i, int64_t n) HWY_ATTR {
      VF acc = hn::Zero(d);
      for (int64_t s : order) {
        if (rows[s] < 0) continue;
        const T* y = static_cast<const T*>(a.y) + rows[s] * p.hidden;
        acc = hn::MulAdd(hn::Set(d, weights[s]), LoadPart(y + i, n), acc);
      }
      StorePart(acc, out + i, n);
    });
  }
}
void ForwardRows(const Params& p, const Args& a, int64_t begin, int64_t end, bool by_arrival,
                 int64_t slots) {
  WithRowDType(p.dtype,
               [&](auto t) { ForwardT<decltype(t)>(p, a, begin, end, by_arrival, slots); });
}

template <typename T, typename G>
void BackwardT(const Params& p, const BackwardArgs& a, int64_t begin, int64_t end) {
  const DF d;
  const int64_t padded = RoundUp(p.hidden, 128);
  float* g = Scratch(static_cast<size_t>(2 * padded));
  float* e = g + padded;
  for (int64_t t = begin; t < end; ++t) {
    const G* dout = static_cast<const G*>(a.dout) + t * p.hidden;
    ForEachVector(p.hidden, [&](int64_t i, int64_t n)
                                HWY_ATTR { StorePart(LoadPart(dout + i, n), g + i, n); });
    for (int64_t i = p.hidden; i < padded; ++i) {
      g[i] = -0.0f;
      e[i] = 0.0f;
    }
    for (int64_t s = 0; s < p.top_k; ++s) {
      const int64_t row = a.slot_row[t * p.top_k + s];
      if (row < 0) {
        a.dweights[t * p.top_k + s] = 0.0f;
        continue;
      }
      const T* y = static_cast<const T*>(a.y) + row * p.hidden;
      G* dy = static_cast<G*>(a.dy) + row * p.hidden;
      const VF w = hn::Set(d, a.weights[t * p.top_k + s]);
      ForEachVector(p.hidden, [&](int64_t i, int64_t n) HWY_ATTR {
        StorePart(LoadPart(y + i, n), e + i, n);
        StorePart(hn::Mul(w, LoadPart(g + i, n)), dy + i, n);
      });
      PutFloat(LanesDot<128>(g, e, padded), a.dweights + t * p.top_k + s);
    }
  }
}
void BackwardRows(const Params& p, const BackwardArgs& a, int64_t begin, int64_t end) {
  WithRowDType(p.dtype, [&](auto t) {
    WithRowDType(p.grad_dtype,
                 [&](auto g) { BackwardT<decltype(t), decltype(g)>(p, a, begin, end); });
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace tare::ops::combine
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tare::ops::combine {
namespace {

HWY_EXPORT(ForwardRows);
HWY_EXPORT(BackwardRows);

Status Check(const Ctx& ctx, const Params& p, int64_t rows, int64_t expert_rows,
             const int32_t* slot_row) {
  TARE_RETURN_IF_ERROR(CheckDim("combine", "hidden", p.hidden, int64_t{1} << 24));
  TARE_RETURN_IF_ERROR(CheckDim("combine", "top_k", p.top_k, 1024));
  TARE_RETURN_IF_ERROR(CheckRowDType("combine", "dtype", p.dtype));
  TARE_RETURN_IF_ERROR(CheckRowDType("combine", "grad_dtype", p.grad_dtype));
  TARE_RETURN_IF_ERROR(CheckRows("combine", rows));
  TARE_RETURN_IF_ERROR(CheckRows("combine", expert_rows));
  TARE_RETURN_IF_ERROR(CheckPointer("combine", "slot_row", slot_row, rows));
  for (int64_t i = 0; IsHost(ctx) && i < rows * p.top_k; ++i) {
    if (slot_row[i] < -1 || slot_row[i] >= expert_rows) {
      return InvalidArgument("combine: row {} slot {} names row {}; -1 or [0, {})", i / p.top_k,
                             i % p.top_k, slot_row[i], expert_rows);
    }
  }
  return Ok();
}

}  // namespace

Status Forward(const Ctx& ctx, const Params& params, const Args& args) {
  TARE_RETURN_IF_ERROR(CheckDevice("combine", ctx));
  TARE_RETURN_IF_ERROR(Check(ctx, params, args.rows, args.expert_rows, args.slot_row));
  TARE_RETURN_IF_ERROR(CheckPointer("combine", "y", args.y, args.expert_rows));
  TARE_RETURN_IF_ERROR(CheckPointer("combine", "weights", args.weights, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("combine", "out", args.out, args.rows));
  TARE_WITH_CUDA_RETURN("combine", ctx, ForwardCuda(ctx, params, args));
  const bool by_arrival = fault::Active(kByArrival, ctx.side);
  const int64_t slots = params.top_k - (fault::Active(kLastSlotDropped, ctx.side) ? 1 : 0);
  ctx.pool->ParallelRanges(
      args.rows, RowGrain(args.rows, params.hidden * params.top_k, ctx.pool->threads()),
      [&](int64_t begin, int64_t end) {
        HWY_DYNAMIC_DISPATCH(ForwardRows)(params, args, begin, end, by_arrival, slots);
      });
  return Ok();
}

Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args) {
  TARE_RETURN_IF_ERROR(CheckDevice("combine", ctx));
  TARE_RETURN_IF_ERROR(Check(ctx, params, args.rows, args.expert_rows, args.slot_row));
  TARE_RETURN_IF_ERROR(CheckPointer("combine", "y", args.y, args.expert_rows));
  TARE_RETURN_IF_ERROR(CheckPointer("combine", "weights", args.weights, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("combine", "dout", args.dout, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("combine", "dy", args.dy, args.expert_rows));
  TARE_RETURN_IF_ERROR(CheckPointer("combine", "dweights", args.dweights, args.rows));
  TARE_WITH_CUDA_RETURN("combine", ctx, BackwardCuda(ctx, params, args));
  // Two slots of one row would write the same gradient: whichever came last would win.
  std::vector<uint8_t> taken(static_cast<size_t>(args.expert_rows), 0);
  for (int64_t i = 0; i < args.rows * params.top_k; ++i) {
    const int32_t row = args.slot_row[i];
    if (row < 0) continue;
    if (taken[static_cast<size_t>(row)] != 0) {
      return InvalidArgument("combine: row {} slot {} names row {}, which another slot has",
                             i / params.top_k, i % params.top_k, row);
    }
    taken[static_cast<size_t>(row)] = 1;
  }
  const int64_t row_bytes = params.hidden * SizeOf(params.grad_dtype);
  for (int64_t r = 0; r < args.expert_rows; ++r) {
    if (taken[static_cast<size_t>(r)] == 0) {
      std::memset(static_cast<char*>(args.dy) + r * row_bytes, 0, static_cast<size_t>(row_bytes));
    }
  }
  ctx.pool->ParallelRanges(args.rows,
                           RowGrain(args.rows, params.hidden * params.top_k, ctx.pool->threads()),
                           [&](int64_t begin, int64_t end) {
                             HWY_DYNAMIC_DISPATCH(BackwardRows)(params, args, begin, end);
                           });
  return Ok();
}

}  // namespace tare::ops::combine
#endif  // HWY_ONCE
