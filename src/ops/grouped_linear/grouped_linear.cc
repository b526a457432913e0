#include "ops/grouped_linear/grouped_linear.h"

#include <algorithm>
#include <vector>

#include "ops/linear/gemm.h"
#include "ops/linear/gemm_kernels.h"
#include "ops/linear/gradient_operands.h"
#include "ops/linear/linear_plain.h"
#include "ops/registry.h"
#include "ops/trace.h"

namespace tare::ops::grouped_linear {
namespace {

Status CheckCommon(const Ctx& ctx, const Params& p, int64_t rows, std::span<const int64_t> offsets,
                   const int32_t* token_of, int64_t x_rows, int64_t x_stride) {
  TARE_RETURN_IF_ERROR(linear::Check(p.linear).Annotate("grouped_linear"));
  if (p.experts <= 0)
    return InvalidArgument("grouped_linear: {} experts; there must be at least one", p.experts);
  if (p.linear.bias) return InvalidArgument("grouped_linear: experts have no bias");
  if (static_cast<int64_t>(offsets.size()) != p.experts + 1 || offsets[0] != 0 ||
      offsets.back() != rows || rows < 0) {
    return InvalidArgument("grouped_linear: offsets must be {} values from 0 to {} rows",
                           p.experts + 1, rows);
  }
  for (int64_t e = 0; e < p.experts; ++e) {
    if (offsets[static_cast<size_t>(e)] > offsets[static_cast<size_t>(e + 1)]) {
      return InvalidArgument(
          "grouped_linear: offsets[{}] is {}, offsets[{}] is {}; they must not descend", e,
          offsets[static_cast<size_t>(e)], e + 1, offsets[static_cast<size_t>(e + 1)]);
    }
  }
  if (x_stride != 0 && x_stride < p.linear.k) {
    return InvalidArgument("grouped_linear: x_stride {}; it must be 0 or at least {}", x_stride,
                           p.linear.k);
  }
  if (ctx.device != Device::kCpu) return Ok();
  if (ctx.pool == nullptr)
    return InvalidArgument("grouped_linear: ctx.pool is null; the CPU needs one");
  if (token_of == nullptr) {
    if (x_rows < rows)
      return InvalidArgument("grouped_linear: x has {} rows, {} are read", x_rows, rows);
    return Ok();
  }
  for (int64_t r = 0; r < rows; ++r) {
    if (token_of[r] < 0 || token_of[r] >= x_rows) {
      return InvalidArgument("grouped_linear: token_of[{}] is {}; x has {} rows", r, token_of[r],
                             x_rows);
    }
  }
  return Ok();
}

Status CheckPointer(std::string_view field, const void* pointer) {
  if (pointer != nullptr) return Ok();
  return InvalidArgument("grouped_linear: {} is null", field);
}

const void* At(const void* base, DType dtype, int64_t elements) {
  return static_cast<const uint8_t*>(base) + elements * SizeOf(dtype);
}
void* At(void* base, DType dtype, int64_t elements) {
  return static_cast<uint8_t*>(base) + elements * SizeOf(dtype);
}

// Every expert with rows: side by side when there are enough of them, else one after another with
// the threads inside each. Bits do not depend on which.
void ForEachExpert(const Ctx& ctx, std::span<const int64_t> offsets,
                   const std::function<void(int64_t)>& body) {
  std::vector<int64_t> busy;
  for (size_t e = 0; e + 1 < offsets.size(); ++e) {
    if (offsets[e + 1] > offsets[e]) busy.push_back(static_cast<int64_t>(e));
  }
  if (static_cast<int64_t>(busy.size()) < 2 * ctx.pool->threads()) {
    for (int64_t e : busy) body(e);
    return;
  }
  // The fullest first, so that threads end together.
  std::stable_sort(busy.begin(), busy.end(), [&](int64_t a, int64_t b) {
    const auto size = [&](int64_t e) {
      return offsets[static_cast<size_t>(e + 1)] - offsets[static_cast<size_t>(e)];
    };
    return size(a) > size(b);
  });
  ctx.pool->ParallelFor(static_cast<int64_t>(busy.size()),
                        [&](int64_t i) { body(busy[static_cast<size_t>(i)]); });
}

void Trace(const Ctx& ctx, const Params& p, const char* op, const char* kernel, int64_t rows) {
  if (ctx.trace == nullptr) return;
  ctx.trace->Record({op, fmt::format("{}_{}", kernel, gemm::SimdTargetName()),
                     fmt::format("experts={} threads={}", p.experts, ctx.pool->threads()),
                     fmt::format("{},{}->{}", DTypeName(p.linear.x_dtype),
                                 DTypeName(p.linear.w_dtype), DTypeName(p.linear.y_dtype)),
                     fmt::format("R={} N={} K={}", rows, p.linear.n, p.linear.k)});
}

}  // namespace

size_t WorkspaceBytes(const Ctx& ctx, const Params& params, int64_t rows) {
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda) return WorkspaceBytesCuda(ctx, params, rows);
#endif
  (void)ctx, (void)params, (void)rows;
  return 0;
}

size_t BackwardWorkspaceBytes(const Ctx& ctx, const Params& params, int64_t rows, int64_t units) {
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda) return BackwardWorkspaceBytesCuda(ctx, params, rows, units);
#endif
  (void)ctx, (void)params, (void)rows, (void)units;
  return 0;
}

Status Forward(const Ctx& ctx, const Params& p, const Args& a) {
  TARE_RETURN_IF_ERROR(CheckCommon(ctx, p, a.rows, a.offsets, a.token_of, a.x_rows, a.x_stride));
  if (a.rows == 0) return Ok();
  TARE_RETURN_IF_ERROR(CheckPointer("x", a.x));
  TARE_RETURN_IF_ERROR(CheckPointer("y", a.y));
  const bool packed = ctx.device == Device::kCpu && !a.packed.empty();
  if (packed && static_cast<int64_t>(a.packed.size()) != p.experts) {
    return InvalidArgument("grouped_linear: {} packed weights for {} experts", a.packed.size(),
                           p.experts);
  }
  if (!packed) TARE_RETURN_IF_ERROR(CheckPointer("w", a.w));
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda) return ForwardCuda(ctx, p, a);
#endif
  if (ctx.device != Device::kCpu) return Unsupported("grouped_linear: this build has no CUDA part");

  linear::Params lp = p.linear;
  std::vector<gemm::Group> groups = linear::ForwardGroups(lp);
  if (fault::Active(kSplitByTotal, ctx.side) && a.rows > 16) {
    groups = {{{0, lp.k / 2}}, {{lp.k / 2, lp.k}}};
  }
  const bool sm90 = linear::ForwardUsesSm90(ctx.profile, lp);
  const int64_t stride = a.x_stride == 0 ? lp.k : a.x_stride;
  for (int64_t e = 0; packed && e < p.experts; ++e) {
    const linear::PackedWeight& w = a.packed[static_cast<size_t>(e)];
    if (w.n() != lp.n || w.k() != lp.k || w.dtype() != lp.w_dtype) {
      return InvalidArgument(
          "grouped_linear: packed weight {} is {} [{}, {}], params say {} [{}, {}]", e,
          DTypeName(w.dtype()), w.n(), w.k(), DTypeName(lp.w_dtype), lp.n, lp.k);
    }
    if (a.w == nullptr && w.panels() == nullptr && !sm90) {
      return InvalidArgument(
          "grouped_linear: expert {} is packed for sm90-mma, but this call computes in ieee-f32",
          e);
    }
  }
  ForEachExpert(ctx, a.offsets, [&](int64_t e) {
    const int64_t begin = a.offsets[static_cast<size_t>(e)];
    gemm::Problem problem;
    problem.m = a.offsets[static_cast<size_t>(e + 1)] - begin;
    problem.n = lp.n;
    problem.a = {.data = a.token_of != nullptr ? a.x : At(a.x, lp.x_dtype, begin * stride),
                 .dtype = lp.x_dtype,
                 .stride = stride,
                 .rows = a.token_of != nullptr ? a.token_of + begin : nullptr};
    const linear::PackedWeight* w = packed ? &a.packed[static_cast<size_t>(e)] : nullptr;
    if (w != nullptr && sm90 && w->mma() != nullptr) {
      problem.mma_b = w->mma();
    } else if (w != nullptr && w->panels() != nullptr) {
      problem.b = {.data = w->panels(), .dtype = lp.w_dtype, .stride = lp.k};
      problem.b_layout = gemm::BLayout::kPacked;
      problem.packed_k = lp.k;
    } else {
      problem.b = {
          .data = At(a.w, lp.w_dtype, e * lp.n * lp.k), .dtype = lp.w_dtype, .stride = lp.k};
      problem.b_layout = gemm::BLayout::kRowsAreN;
    }
    problem.groups = groups;
    problem.y = At(a.y, lp.y_dtype, begin * lp.n);
    problem.y_dtype = lp.y_dtype;
    problem.y_stride = lp.n;
    if (sm90) {
      gemm::RunSm90(*ctx.pool, problem);
    } else if (ctx.batch_invariance == BatchInvariance::kOff) {
      gemm::RunNative(*ctx.pool, problem);
    } else {
      gemm::RunIeee(*ctx.pool, problem);
    }
  });
  Trace(ctx, p, "grouped_linear", sm90 ? "grouped_linear_fwd_sm90" : "grouped_linear_fwd_ieee",
        a.rows);
  return Ok();
}

Status Backward(const Ctx& ctx, const Params& p, const BackwardArgs& a) {
  TARE_RETURN_IF_ERROR(CheckCommon(ctx, p, a.rows, a.offsets, a.token_of, a.x_rows, a.x_stride));
  // Units are over tokens: without a map a routed row is its own token.
  const int64_t tokens = a.token_of == nullptr ? a.rows : a.x_rows;
  if (a.dw != nullptr) TARE_RETURN_IF_ERROR(CheckUnits(a.units, tokens).Annotate("grouped_linear"));
  if (a.rows == 0) return Ok();
  TARE_RETURN_IF_ERROR(linear::CheckGradientOperands("grouped_linear", a.dy, a.x, a.w,
                                                     a.dx != nullptr, a.dw != nullptr));
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda) return BackwardCuda(ctx, p, a);
#endif
  if (ctx.device != Device::kCpu) return Unsupported("grouped_linear: this build has no CUDA part");
  const linear::Params& lp = p.linear;
  const auto token = [&](int64_t r) {
    return a.token_of == nullptr ? r : static_cast<int64_t>(a.token_of[r]);
  };
  for (int64_t e = 0; a.dw != nullptr && e < p.experts; ++e) {
    for (int64_t r = a.offsets[static_cast<size_t>(e)] + 1;
         r < a.offsets[static_cast<size_t>(e + 1)]; ++r) {
      if (token(r) <= token(r - 1)) {
        return InvalidArgument(
            "grouped_linear: rows {} and {} of expert {} hold tokens {} and {}; they must ascend",
            r - 1, r, e, token(r - 1), token(r));
      }
    }
  }
  const bool sm90 = linear::BackwardUsesSm90(ctx.profile, lp);
  const auto run = [&](const gemm::Problem& problem) {
    if (sm90)
      gemm::RunSm90(*ctx.pool, problem);
    else
      gemm::RunIeee(*ctx.pool, problem);
  };
  if (a.dx != nullptr) {
    const std::vector<gemm::Group> groups = linear::DxGroups(lp);
    ForEachExpert(ctx, a.offsets, [&](int64_t e) {
      const int64_t begin = a.offsets[static_cast<size_t>(e)];
      gemm::Problem problem;
      problem.m = a.offsets[static_cast<size_t>(e + 1)] - begin;
      problem.n = lp.k;
      problem.a =
          linear::GradientOperand(lp, At(a.dy, lp.dy_dtype, begin * lp.n), lp.dy_dtype, lp.n);
      problem.b =
          linear::GradientOperand(lp, At(a.w, lp.w_dtype, e * lp.n * lp.k), lp.w_dtype, lp.k);
      problem.groups = groups;
      problem.y = At(a.dx, lp.dx_dtype, begin * lp.k);
      problem.y_dtype = lp.dx_dtype;
      problem.y_stride = lp.k;
      run(problem);
    });
    Trace(ctx, p, "grouped_linear.dx", sm90 ? "grouped_linear_dx_sm90" : "grouped_linear_dx_ieee",
          a.rows);
  }
  if (a.dw != nullptr) {
    const int64_t stride = a.x_stride == 0 ? lp.k : a.x_stride;
    ForEachExpert(ctx, a.offsets, [&](int64_t e) {
      gemm::Problem problem;
      problem.m = lp.n;
      problem.n = lp.k;
      problem.a = linear::GradientOperand(lp, a.dy, lp.dy_dtype, lp.n);
      problem.a_rows_are_k = true;
      problem.b = linear::GradientOperand(lp, a.x, lp.x_dtype, stride);
      if (!a.x_by_row) problem.b.rows = a.token_of;
      // The expert's rows of each unit: one range, because they ascend by token.
      int64_t r = a.offsets[static_cast<size_t>(e)];
      const int64_t end = a.offsets[static_cast<size_t>(e + 1)];
      for (const TokenUnit& u : a.units) {
        while (r < end && token(r) < u.begin) ++r;
        const int64_t first = r;
        while (r < end && token(r) < u.begin + u.rows) ++r;
        if (r > first) problem.groups.push_back({{first, r}});
      }
      if (problem.groups.empty()) return;
      problem.sink = gemm::Problem::Sink::kAddEach;
      problem.y = a.dw + e * lp.n * lp.k;
      problem.y_stride = lp.k;
      run(problem);
    });
    Trace(ctx, p, "grouped_linear.dw", sm90 ? "grouped_linear_dw_sm90" : "grouped_linear_dw_ieee",
          a.rows);
  }
  return Ok();
}

}  // namespace tare::ops::grouped_linear
