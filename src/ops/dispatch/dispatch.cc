#include "ops/dispatch/dispatch.h"
#include "ops/dispatch/dispatch_cuda.h"

#include "ops/cuda_entry.h"
#include "ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/dispatch/dispatch.cc"
#include "ops/simd_targets.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tare::ops::dispatch {
namespace HWY_NAMESPACE {
using namespace tare::ops::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace)

void ForwardRows(const Params& p, const Args& a, int64_t begin, int64_t end) {
  WithRowDType(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    for (int64_t r = begin; r < end; ++r) {
      const T* from = static_cast<const T*>(a.x) + a.row_token[r] * p.hidden;
      T* to = static_cast<T*>(a.out) + r * p.hidden;
      ForEachVector(p.hidden, [&](int64_t i, int64_t n)
                                  HWY_ATTR { StorePart(LoadPart(from + i, n), to + i, n); });
    }
  });
}

void BackwardRows(const Params& p, const BackwardArgs& a, int64_t begin, int64_t end) {
  const DF d;
  WithRowDType(p.grad_dtype, [&](auto tag) {
    using G = decltype(tag);
    for (int64_t t = begin; t < end; ++t) {
      G* to = static_cast<G*>(a.dx) + t * p.hidden;
      ForEachVector(p.hidden, [&](int64_t i, int64_t n) HWY_ATTR {
        VF acc = hn::Zero(d);
        for (int64_t s = 0; s < p.top_k; ++s) {
          const int32_t row = a.slot_row[t * p.top_k + s];
          if (row >= 0)
            acc = hn::Add(acc, LoadPart(static_cast<const G*>(a.dout) + row * p.hidden + i, n));
        }
        StorePart(acc, to + i, n);
      });
    }
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace tare::ops::dispatch
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tare::ops::dispatch {
namespace {

HWY_EXPORT(ForwardRows);
HWY_EXPORT(BackwardRows);

Status Check(const Params& p) {
  TARE_RETURN_IF_ERROR(CheckDim("dispatch", "hidden", p.hidden, int64_t{1} << 24));
  TARE_RETURN_IF_ERROR(CheckDim("dispatch", "top_k", p.top_k, 1024));
  TARE_RETURN_IF_ERROR(CheckRowDType("dispatch", "dtype", p.dtype));
  return CheckRowDType("dispatch", "grad_dtype", p.grad_dtype);
}

}  // namespace

Result<Plan> BuildPlan(int64_t rows, int64_t top_k, int64_t experts, const int32_t* ids) {
  TARE_RETURN_IF_ERROR(CheckRows("dispatch", rows));
  TARE_RETURN_IF_ERROR(CheckDim("dispatch", "top_k", top_k, 1024));
  TARE_RETURN_IF_ERROR(CheckDim("dispatch", "experts", experts, 65536));
  TARE_RETURN_IF_ERROR(CheckPointer("dispatch", "ids", ids, rows));
  if (rows > (int64_t{1} << 31) / top_k - 1)
    return InvalidArgument("dispatch: {} rows of {} slots", rows, top_k);
  Plan plan;
  plan.offsets.assign(static_cast<size_t>(experts + 1), 0);
  for (int64_t i = 0; i < rows * top_k; ++i) {
    if (ids[i] < -1 || ids[i] >= experts) {
      return InvalidArgument("dispatch: row {} slot {} names expert {}; -1 or [0, {})", i / top_k,
                             i % top_k, ids[i], experts);
    }
    if (ids[i] >= 0) ++plan.offsets[static_cast<size_t>(ids[i]) + 1];
  }
  for (size_t e = 1; e < plan.offsets.size(); ++e) plan.offsets[e] += plan.offsets[e - 1];
  std::vector<int64_t> next(plan.offsets.begin(), plan.offsets.end() - 1);
  plan.slot_row.assign(static_cast<size_t>(rows * top_k), -1);
  plan.row_token.assign(static_cast<size_t>(plan.offsets.back()), 0);
  for (int64_t i = 0; i < rows * top_k; ++i) {
    if (ids[i] < 0) continue;
    const int64_t row = next[static_cast<size_t>(ids[i])]++;
    plan.slot_row[static_cast<size_t>(i)] = static_cast<int32_t>(row);
    plan.row_token[static_cast<size_t>(row)] = static_cast<int32_t>(i / top_k);
  }
  return plan;
}

Status Forward(const Ctx& ctx, const Params& params, const Args& args) {
  TARE_RETURN_IF_ERROR(CheckDevice("dispatch", ctx));
  TARE_RETURN_IF_ERROR(Check(params));
  TARE_RETURN_IF_ERROR(CheckRows("dispatch", args.rows));
  TARE_RETURN_IF_ERROR(CheckRows("dispatch", args.out_rows));
  TARE_RETURN_IF_ERROR(CheckPointer("dispatch", "row_token", args.row_token, args.out_rows));
  TARE_RETURN_IF_ERROR(CheckPointer("dispatch", "x", args.x, args.out_rows));
  TARE_RETURN_IF_ERROR(CheckPointer("dispatch", "out", args.out, args.out_rows));
  TARE_WITH_CUDA_RETURN("dispatch", ctx, ForwardCuda(ctx, params, args));
  for (int64_t r = 0; r < args.out_rows; ++r) {
    if (args.row_token[r] < 0 || args.row_token[r] >= args.rows) {
      return InvalidArgument("dispatch: row {} names token {}; [0, {})", r, args.row_token[r],
                             args.rows);
    }
  }
  ctx.pool->ParallelRanges(args.out_rows,
                           RowGrain(args.out_rows, params.hidden, ctx.pool->threads()),
                           [&](int64_t begin, int64_t end) {
                             HWY_DYNAMIC_DISPATCH(ForwardRows)(params, args, begin, end);
                           });
  return Ok();
}

Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args) {
  TARE_RETURN_IF_ERROR(CheckDevice("dispatch", ctx));
  TARE_RETURN_IF_ERROR(Check(params));
  TARE_RETURN_IF_ERROR(CheckRows("dispatch", args.rows));
  TARE_RETURN_IF_ERROR(CheckRows("dispatch", args.out_rows));
  TARE_RETURN_IF_ERROR(CheckPointer("dispatch", "slot_row", args.slot_row, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("dispatch", "dout", args.dout, args.out_rows));
  TARE_RETURN_IF_ERROR(CheckPointer("dispatch", "dx", args.dx, args.rows));
  TARE_WITH_CUDA_RETURN("dispatch", ctx, BackwardCuda(ctx, params, args));
  for (int64_t i = 0; i < args.rows * params.top_k; ++i) {
    if (args.slot_row[i] < -1 || args.slot_row[i] >= args.out_rows) {
      return InvalidArgument("dispatch: row {} slot {} names row {}; -1 or [0, {})",
                             i / params.top_k, i % params.top_k, args.slot_row[i], args.out_rows);
    }
  }
  ctx.pool->ParallelRanges(args.rows, RowGrain(args.rows, params.hidden, ctx.pool->threads()),
                           [&](int64_t begin, int64_t end) {
                             HWY_DYNAMIC_DISPATCH(BackwardRows)(params, args, begin, end);
                           });
  return Ok();
}

}  // namespace tare::ops::dispatch
#endif  // HWY_ONCE
