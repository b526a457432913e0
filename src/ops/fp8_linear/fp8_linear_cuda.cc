// fp8_linear on CUDA: from checked arguments to its kernels.

#include <limits>

#include "ops/fp8_linear/fp8_gemm.h"
#include "ops/fp8_linear/fp8_linear.h"
#include "ops/trace.h"

namespace tare::ops::fp8_linear {

// The partial sums of the segments, when there are several.
size_t WorkspaceBytesCuda(const Ctx&, const Params& p, int64_t m) {
  return p.segments == 1 ? 0 : static_cast<size_t>(p.segments * m * p.n) * sizeof(float);
}

Status ForwardCuda(const Ctx& ctx, const Params& p, const Args& a) {
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
  if (a.m > kLimit || p.n > kLimit || p.k > kLimit)
    return Unsupported("fp8_linear: m {}, n {}, k {} on CUDA; each at most {}", a.m, p.n, p.k,
                       kLimit);
  const size_t needed = WorkspaceBytesCuda(ctx, p, a.m);
  if (needed > 0 && (ctx.workspace == nullptr || ctx.workspace_bytes < needed)) {
    return InvalidArgument("fp8_linear: ctx.workspace has {} bytes; WorkspaceBytes says {}",
                           ctx.workspace_bytes, needed);
  }
  gpu::Problem problem;
  problem.params = p;
  problem.args = a;
  problem.ieee = ctx.profile != Profile::kSm90Mma;
  problem.one_chain = fault::Active(kOneChain, ctx.side);
  problem.scales_in_turn = fault::Active(kScalesInTurn, ctx.side);
  const int64_t blocks = (p.k + kBlock - 1) / kBlock;
  bool hopper = false;
  std::string config;
  for (int64_t s = 0; s < p.segments; ++s) {
    problem.first = s * blocks / p.segments;
    problem.last = (s + 1) * blocks / p.segments;
    if (p.segments > 1) problem.out = static_cast<float*>(ctx.workspace) + s * a.m * p.n;
    hopper = gpu::CanUse(problem);
    TARE_RETURN_IF_ERROR(hopper ? gpu::Launch(problem, ctx.stream, &config)
                                : gpu::LaunchGeneric(problem, ctx.stream));
  }
  if (p.segments > 1) {
    TARE_RETURN_IF_ERROR(
        gpu::LaunchFinish(p, a, static_cast<const float*>(ctx.workspace), ctx.stream));
  }
  if (ctx.trace != nullptr) {
    ctx.trace->Record({"fp8_linear", hopper ? "fp8_linear_fwd_wgmma" : "fp8_linear_fwd_generic",
                       config, fmt::format("e4m3,e4m3->{}", DTypeName(p.y_dtype)),
                       fmt::format("M={} N={} K={}", a.m, p.n, p.k)});
  }
  return Ok();
}

}  // namespace tare::ops::fp8_linear
