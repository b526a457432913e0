// linear on CUDA: from checked arguments to contractions (linear_cuda.h) and their launch.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>

#include "ops/linear/linear.h"
#include "ops/linear/linear_cuda.h"
#include "ops/linear/linear_plain.h"
#include "ops/trace.h"
#include "tensor/cuda_status.h"

namespace tare::ops::linear {
namespace {

int64_t Stride(int64_t given, int64_t width) { return given == 0 ? width : given; }

// Rows of the rounded copy of dy start at multiples of 16 bytes, as the copy engine wants them.
int64_t RoundedStride(int64_t n) { return (n + 7) / 8 * 8; }

Status CheckSizes(const Params& p, int64_t m) {
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
  if (m <= kLimit && p.n <= kLimit && p.k <= kLimit) return Ok();
  return Unsupported("linear: m {}, n {}, k {} on CUDA; each at most {}", m, p.n, p.k, kLimit);
}

// A contraction with the faults that are planted on this side: those that cut k act on the runs and
// run on the kernels that everyone uses; the others on a plain kernel. `rows`: of the call.
Status RunWithFaults(const Ctx& ctx, gpu::Contraction c, int64_t rows) {
  if (ctx.batch_invariance == BatchInvariance::kOff)
    return gpu::LaunchNative(c, ctx.stream, ctx.trace);
  const gpu::Faults faults = {
      fault::Active(kAccumulateBf16, ctx.side), fault::Active(kSplitFma, ctx.side),
      fault::Active(kReversedK, ctx.side), fault::Active(kBiasAfterCast, ctx.side)};
  if (!AnyFault(ctx.side)) return gpu::RunContraction(c, ctx.stream, ctx.trace);
  if (c.pass == gpu::Pass::kDw) {
    if (fault::Active(kDwPartialGroup, ctx.side)) {
      for (gpu::Run& run : c.runs) run.length = run.length / 16 * 16;
      std::erase_if(c.runs, [](const gpu::Run& run) { return run.length == 0; });
      if (c.runs.empty()) return Ok();
    }
  } else if (c.parts == 1 && c.chains() == 1) {
    // Equal runs of whole groups, at most eight: the tree that the kernels hold.
    int cuts = 1;
    if (fault::Active(kSplitByRows, ctx.side) && rows <= 4) cuts = 4;
    if (fault::Active(kSegmentsByRows, ctx.side) && rows > 16) cuts = 8;
    while (cuts > 1 && c.k < 16 * cuts) cuts /= 2;
    if (cuts > 1) {
      const auto groups = static_cast<int>((c.k + 15) / 16);
      c.runs.clear();
      for (int i = 0; i < cuts; ++i) {
        const int begin = 16 * (groups * i / cuts);
        const int end = std::min(static_cast<int>(c.k), 16 * (groups * (i + 1) / cuts));
        c.runs.push_back({begin, end - begin});
      }
      // The kernels want equal runs: others go through the plain one.
      if (c.k % (16 * cuts) != 0) return gpu::LaunchFaulty(c, faults, ctx.stream);
    }
  }
  if (faults.any()) return gpu::LaunchFaulty(c, faults, ctx.stream);
  return gpu::RunContraction(c, ctx.stream, ctx.trace);
}

std::vector<gpu::Run> Runs(const std::vector<gemm::Group>& groups) {
  std::vector<gpu::Run> runs;
  for (const gemm::Group& group : groups) {
    for (const gemm::Range& range : group) {
      runs.push_back({static_cast<int>(range.begin), static_cast<int>(range.end - range.begin)});
    }
  }
  return runs;
}

}  // namespace

size_t WorkspaceBytesCuda(const Ctx&, const Params&, int64_t) { return 0; }

size_t BackwardWorkspaceBytesCuda(const Ctx& ctx, const Params& p, int64_t m, int64_t) {
  // A dy that must be rounded first is rounded once, so that the Hopper kernels can read it.
  const bool rounds = BackwardUsesSm90(ctx.profile, p) && p.dy_dtype != p.backward_operand;
  return rounds ? static_cast<size_t>(m * RoundedStride(p.n)) * 2 : 0;
}

Status ForwardCuda(const Ctx& ctx, const Params& p, const Args& a) {
  TARE_RETURN_IF_ERROR(CheckSizes(p, a.m));
  gpu::Contraction c;
  c.pass = gpu::Pass::kForward;
  c.m = a.m;
  c.n = p.n;
  c.k = p.k;
  c.a = a.x;
  c.a_stride = Stride(a.x_stride, p.k);
  c.b = a.w;
  c.b_stride = p.k;
  c.y = a.y;
  c.y_stride = Stride(a.y_stride, p.n);
  c.a_dtype = p.x_dtype;
  c.b_dtype = p.w_dtype;
  c.y_dtype = p.y_dtype;
  c.ieee = !ForwardUsesSm90(ctx.profile, p);
  c.operand = c.ieee ? DType::kF32 : p.x_dtype;
  c.bias = a.bias;
  c.bias_dtype = p.bias_dtype;
  c.runs = Runs(ForwardGroups(p));
  return RunWithFaults(ctx, std::move(c), a.m);
}

Status BackwardCuda(const Ctx& ctx, const Params& p, const BackwardArgs& a) {
  TARE_RETURN_IF_ERROR(CheckSizes(p, a.m));
  const bool sm90 = BackwardUsesSm90(ctx.profile, p);
  const void* dy = a.dy;
  DType dy_dtype = p.dy_dtype;
  int64_t dy_stride = Stride(a.dy_stride, p.n);
  if (sm90 && dy_dtype != p.backward_operand && (a.dx != nullptr || a.dw != nullptr)) {
    const size_t needed = BackwardWorkspaceBytesCuda(ctx, p, a.m, 0);
    if (ctx.workspace == nullptr || ctx.workspace_bytes < needed) {
      return InvalidArgument("linear: ctx.workspace has {} bytes; BackwardWorkspaceBytes says {}",
                             ctx.workspace_bytes, needed);
    }
    TARE_RETURN_IF_ERROR(gpu::LaunchRound(dy, dy_dtype, dy_stride, a.m, p.n, ctx.workspace,
                                          p.backward_operand, RoundedStride(p.n), ctx.stream));
    dy = ctx.workspace;
    dy_dtype = p.backward_operand;
    dy_stride = RoundedStride(p.n);
  }
  gpu::Contraction c;
  c.a = dy;
  c.a_dtype = dy_dtype;
  c.a_stride = dy_stride;
  c.ieee = !sm90;
  c.operand = p.backward_operand;
  if (a.dx != nullptr) {
    c.pass = gpu::Pass::kDx;
    c.m = a.m;
    c.n = p.k;
    c.k = p.n;
    c.b = a.w;
    c.b_dtype = p.w_dtype;
    c.b_stride = p.k;
    c.y = a.dx;
    c.y_dtype = p.dx_dtype;
    c.y_stride = Stride(a.dx_stride, p.k);
    const auto groups = DxGroups(p);
    c.runs = Runs(groups);
    c.parts = static_cast<int>(groups.front().size());
    TARE_RETURN_IF_ERROR(RunWithFaults(ctx, c, a.m));
  }
  std::vector<gpu::Run> units;
  for (const TokenUnit& u : a.units)
    units.push_back({static_cast<int>(u.begin), static_cast<int>(u.rows)});
  if (a.dw != nullptr && !units.empty()) {
    c.pass = gpu::Pass::kDw;
    c.m = p.n;
    c.n = p.k;
    c.k = a.m;
    c.b = a.x;
    c.b_dtype = p.x_dtype;
    c.b_stride = Stride(a.x_stride, p.k);
    c.y = a.dw;
    c.y_dtype = DType::kF32;
    c.y_stride = p.k;
    c.runs = units;
    c.parts = 1;
    TARE_RETURN_IF_ERROR(RunWithFaults(ctx, c, a.m));
  }
  if (a.dbias != nullptr && !units.empty()) {
    TARE_RETURN_IF_ERROR(gpu::LaunchBiasGradient(a.dy, p.dy_dtype, Stride(a.dy_stride, p.n), p.n,
                                                 units, a.dbias, ctx.stream));
  }
  return Ok();
}

}  // namespace tare::ops::linear
