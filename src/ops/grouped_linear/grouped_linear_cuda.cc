// grouped_linear on CUDA: forward and dx of bf16 layers in one Hopper launch over all experts; what
// that cannot take (other dtypes, segments, the ieee-f32 step) and dw go expert by expert through
// linear's contractions, with the same bits. The native arm is cuBLAS.

#include <cuda_runtime_api.h>

#include "ops/cuda/cublas_peer.h"
#include "ops/grouped_linear/grouped_gemm.h"
#include "ops/grouped_linear/grouped_linear.h"
#include "ops/linear/linear_cuda.h"
#include "ops/linear/linear_plain.h"
#include "ops/trace.h"
#include "tensor/cuda_status.h"

namespace tare::ops::grouped_linear {
namespace {

namespace lg = linear::gpu;

int64_t RoundUp(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Rows of the rounded copy of dy are dense when the copy engine can read them so.
int64_t XBytes(const Params& p, int64_t rows) {
  return RoundUp(rows * p.linear.k * SizeOf(p.linear.x_dtype));
}
int64_t DyBytes(const Ctx& ctx, const Params& p, int64_t rows) {
  const bool rounds = linear::BackwardUsesSm90(ctx.profile, p.linear) &&
                      p.linear.dy_dtype != p.linear.backward_operand;
  return rounds ? RoundUp(rows * p.linear.n * 2) : 0;
}

// The native arm: addresses of all experts' operands, for one grouped call.
int64_t PointerBytes(const Ctx& ctx, const Params& p) {
  if (ctx.batch_invariance == BatchInvariance::kOn) return 0;
  return RoundUp(3 * p.experts * static_cast<int64_t>(sizeof(void*)));
}

Status CheckWorkspace(const Ctx& ctx, size_t needed) {
  if (needed == 0 || (ctx.workspace != nullptr && ctx.workspace_bytes >= needed)) return Ok();
  return InvalidArgument("grouped_linear: ctx.workspace has {} bytes; WorkspaceBytes says {}",
                         ctx.workspace_bytes, needed);
}

const void* At(const void* base, DType dtype, int64_t elements) {
  return static_cast<const uint8_t*>(base) + elements * SizeOf(dtype);
}
void* At(void* base, DType dtype, int64_t elements) {
  return static_cast<uint8_t*>(base) + elements * SizeOf(dtype);
}

std::vector<lg::Run> Runs(const std::vector<gemm::Group>& groups) {
  std::vector<lg::Run> runs;
  for (const auto& group : groups) {
    for (const auto& range : group)
      runs.push_back({static_cast<int>(range.begin), static_cast<int>(range.end - range.begin)});
  }
  return runs;
}

void Trace(const Ctx& ctx, const Params& p, const char* op, const char* kernel,
           const std::string& config, int64_t rows) {
  if (ctx.trace == nullptr) return;
  ctx.trace->Record({op, kernel, config,
                     fmt::format("{},{}->{}", DTypeName(p.linear.x_dtype),
                                 DTypeName(p.linear.w_dtype), DTypeName(p.linear.y_dtype)),
                     fmt::format("E={} R={} N={} K={}", p.experts, rows, p.linear.n, p.linear.k)});
}

// x in routed order, dense: as it is, or gathered into `to`.
Result<const void*> RoutedX(const Ctx& ctx, const Params& p, const void* x, int64_t x_stride,
                            const int32_t* token_of, int64_t rows, void* to) {
  const int64_t k = p.linear.k, size = SizeOf(p.linear.x_dtype);
  const int64_t stride = x_stride == 0 ? k : x_stride;
  if (token_of == nullptr && stride == k) return x;
  if (token_of == nullptr) {
    TARE_CUDA_RETURN_IF_ERROR(
        cudaMemcpy2DAsync(to, static_cast<size_t>(k * size), x, static_cast<size_t>(stride * size),
                          static_cast<size_t>(k * size), static_cast<size_t>(rows),
                          cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(ctx.stream)));
    return static_cast<const void*>(to);
  }
  TARE_RETURN_IF_ERROR(
      gpu::LaunchGather(x, stride * size, token_of, rows, k * size, to, ctx.stream));
  return static_cast<const void*>(to);
}

// From so many rows an expert on cuBLAS is faster expert by expert than by its grouped call (H200:
// 1,067 us against 1,385 at 512, 764 against 268 at 64).
constexpr int64_t kRowsByExpert = 256;

// The native arm of forward and dx: cuBLAS, grouped or expert by expert, as the number of rows
// says.
Status Native(const Ctx& ctx, const gpu::Problem& p, const char* op, DType y_dtype,
              const void** pointers) {
  const auto experts = static_cast<int64_t>(p.offsets.size()) - 1;
  TARE_ASSIGN_OR_RETURN(const cuda::CublasPeer* const peer, cuda::NativePeer());
  std::vector<cuda::CublasPeer::Group> groups;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t begin = p.offsets[static_cast<size_t>(e)];
    const int64_t m = p.offsets[static_cast<size_t>(e + 1)] - begin;
    if (m == 0) continue;
    groups.push_back({m, At(p.a, DType::kBF16, begin * p.k), At(p.w, DType::kBF16, e * p.n * p.k),
                      At(p.y, y_dtype, begin * p.n)});
  }
  if (groups.empty()) return Ok();
  auto* const stream = static_cast<cudaStream_t>(ctx.stream);
  const int64_t rows = p.offsets.back(), busy = static_cast<int64_t>(groups.size());
  const bool grouped = peer->has_grouped() && !p.y_f32 && rows / busy < kRowsByExpert &&
                       3 * busy <= gpu::kMostPointers;
  if (grouped) {
    std::vector<const void*> addresses;
    auto call = cuda::CublasPeer::HostGroups(p.dx, p.n, p.k, groups, &addresses);
    TARE_RETURN_IF_ERROR(gpu::LaunchPointers(addresses, pointers, ctx.stream));
    call.addresses = pointers;
    TARE_RETURN_IF_ERROR(peer->GemmGrouped(stream, call));
  } else {
    for (const auto& g : groups)
      TARE_RETURN_IF_ERROR(
          peer->Gemm(stream, false, p.dx, g.m, p.n, p.k, g.a, g.b, g.d, p.y_f32, false));
  }
  if (ctx.trace != nullptr) {
    ctx.trace->Record({op, grouped ? "grouped_linear_cublas_grouped" : "grouped_linear_cublas",
                       "version=" + peer->version(),
                       fmt::format("bf16,bf16->{}", DTypeName(y_dtype)),
                       fmt::format("E={} R={} N={} K={}", experts, rows, p.n, p.k)});
  }
  return Ok();
}

// What the native arm takes: bf16 operands, one chain.
Status CheckNative(const Params& p, DType dy_dtype, DType y_dtype, int32_t segments) {
  const linear::Params& l = p.linear;
  if (l.x_dtype == DType::kBF16 && l.w_dtype == DType::kBF16 && dy_dtype == DType::kBF16 &&
      y_dtype != DType::kF16 && segments == 1)
    return Ok();
  return Unsupported("grouped_linear: the native CUDA arm takes bf16 operands without segments");
}

}  // namespace

size_t WorkspaceBytesCuda(const Ctx& ctx, const Params& p, int64_t rows) {
  return static_cast<size_t>(XBytes(p, rows) + PointerBytes(ctx, p));
}

size_t BackwardWorkspaceBytesCuda(const Ctx& ctx, const Params& p, int64_t rows, int64_t) {
  return static_cast<size_t>(XBytes(p, rows) + DyBytes(ctx, p, rows) + PointerBytes(ctx, p));
}

Status ForwardCuda(const Ctx& ctx, const Params& p, const Args& a) {
  const linear::Params& l = p.linear;
  TARE_RETURN_IF_ERROR(CheckWorkspace(ctx, WorkspaceBytesCuda(ctx, p, a.rows)));
  TARE_ASSIGN_OR_RETURN(const void* const x,
                        RoutedX(ctx, p, a.x, a.x_stride, a.token_of, a.rows, ctx.workspace));
  const bool sm90 = linear::ForwardUsesSm90(ctx.profile, l);
  const bool split = fault::Active(kSplitByTotal, ctx.side) && a.rows > 16;
  const gpu::Problem problem = {false, a.offsets, l.n, l.k, x, a.w, a.y, l.y_dtype == DType::kF32};
  if (ctx.batch_invariance == BatchInvariance::kOff) {
    TARE_RETURN_IF_ERROR(CheckNative(p, DType::kBF16, l.y_dtype, l.segments));
    return Native(ctx, problem, "grouped_linear", l.y_dtype,
                  static_cast<const void**>(At(ctx.workspace, DType::kU8, XBytes(p, a.rows))));
  }
  if (!split && sm90 && l.x_dtype == DType::kBF16 && l.segments == 1 && l.y_dtype != DType::kF16 &&
      gpu::CanUse(problem)) {
    std::string config;
    TARE_RETURN_IF_ERROR(gpu::Launch(problem, ctx.stream, &config));
    Trace(ctx, p, "grouped_linear", "grouped_linear_fwd_wgmma", config, a.rows);
    return Ok();
  }
  lg::Contraction c;
  c.pass = lg::Pass::kForward;
  c.n = l.n;
  c.k = l.k;
  c.a_stride = c.b_stride = l.k;
  c.y_stride = l.n;
  c.a_dtype = l.x_dtype;
  c.b_dtype = l.w_dtype;
  c.y_dtype = l.y_dtype;
  c.ieee = !sm90;
  c.operand = c.ieee ? DType::kF32 : l.x_dtype;
  c.runs = Runs(linear::ForwardGroups(l));
  if (split) {  // the planted fault: two runs, the first of whole groups
    const int half = static_cast<int>(l.k / 32 * 16);
    c.runs = {{0, half}, {half, static_cast<int>(l.k) - half}};
  }
  for (int64_t e = 0; e < p.experts; ++e) {
    const int64_t begin = a.offsets[static_cast<size_t>(e)];
    c.m = a.offsets[static_cast<size_t>(e + 1)] - begin;
    if (c.m == 0) continue;
    c.a = At(x, l.x_dtype, begin * l.k);
    c.b = At(a.w, l.w_dtype, e * l.n * l.k);
    c.y = At(a.y, l.y_dtype, begin * l.n);
    TARE_RETURN_IF_ERROR(lg::RunContraction(c, ctx.stream, nullptr));
  }
  Trace(ctx, p, "grouped_linear", "grouped_linear_fwd_by_expert", "", a.rows);
  return Ok();
}

Status BackwardCuda(const Ctx& ctx, const Params& p, const BackwardArgs& a) {
  const linear::Params& l = p.linear;
  TARE_RETURN_IF_ERROR(CheckWorkspace(ctx, BackwardWorkspaceBytesCuda(ctx, p, a.rows, 0)));
  auto* workspace = static_cast<uint8_t*>(ctx.workspace);
  const bool native = ctx.batch_invariance == BatchInvariance::kOff;
  const bool sm90 = linear::BackwardUsesSm90(ctx.profile, l);
  const void* dy = a.dy;
  DType dy_dtype = l.dy_dtype;
  if (DyBytes(ctx, p, a.rows) > 0) {
    void* rounded = workspace + XBytes(p, a.rows);
    TARE_RETURN_IF_ERROR(lg::LaunchRound(dy, dy_dtype, l.n, a.rows, l.n, rounded,
                                         l.backward_operand, l.n, ctx.stream));
    dy = rounded;
    dy_dtype = l.backward_operand;
  }
  lg::Contraction c;
  c.a_dtype = dy_dtype;
  c.a_stride = l.n;
  c.ieee = !sm90;
  c.operand = l.backward_operand;
  if (a.dx != nullptr) {
    const gpu::Problem problem = {true, a.offsets, l.k,  l.n,
                                  dy,   a.w,       a.dx, l.dx_dtype == DType::kF32};
    const auto groups = linear::DxGroups(l);
    std::string config;
    // Several parts of one chain are one run in the fused kernel only when they follow each other.
    bool in_order = groups.size() == 1;
    int64_t at = 0;
    for (const auto& range : groups.front()) {
      in_order = in_order && range.begin == at;
      at = range.end;
    }
    in_order = in_order && at == l.n;
    for (const auto& range : groups.front())
      in_order = in_order && ((range.end - range.begin) % 16 == 0 || range.end == l.n);
    if (native) {
      TARE_RETURN_IF_ERROR(CheckNative(p, dy_dtype, l.dx_dtype, l.dx_segments));
      auto* pointers = workspace + XBytes(p, a.rows) + DyBytes(ctx, p, a.rows);
      TARE_RETURN_IF_ERROR(Native(ctx, problem, "grouped_linear.dx", l.dx_dtype,
                                  reinterpret_cast<const void**>(pointers)));
    } else if (sm90 && in_order && dy_dtype == DType::kBF16 && l.w_dtype == DType::kBF16 &&
               l.dx_dtype != DType::kF16 && gpu::CanUse(problem)) {
      TARE_RETURN_IF_ERROR(gpu::Launch(problem, ctx.stream, &config));
      Trace(ctx, p, "grouped_linear.dx", "grouped_linear_dx_wgmma", config, a.rows);
    } else {
      c.pass = lg::Pass::kDx;
      c.n = l.k;
      c.k = l.n;
      c.b_dtype = l.w_dtype;
      c.b_stride = l.k;
      c.y_dtype = l.dx_dtype;
      c.y_stride = l.k;
      c.runs = Runs(groups);
      c.parts = static_cast<int>(groups.front().size());
      for (int64_t e = 0; e < p.experts; ++e) {
        const int64_t begin = a.offsets[static_cast<size_t>(e)];
        c.m = a.offsets[static_cast<size_t>(e + 1)] - begin;
        if (c.m == 0) continue;
        c.a = At(dy, dy_dtype, begin * l.n);
        c.b = At(a.w, l.w_dtype, e * l.n * l.k);
        c.y = At(a.dx, l.dx_dtype, begin * l.k);
        TARE_RETURN_IF_ERROR(lg::RunContraction(c, ctx.stream, nullptr));
      }
      Trace(ctx, p, "grouped_linear.dx", "grouped_linear_dx_by_expert", "", a.rows);
    }
  }
  if (a.dw == nullptr) return Ok();
  if (a.token_of != nullptr && a.host_token_of == nullptr)
    return InvalidArgument("grouped_linear: on CUDA dw needs host_token_of beside token_of");
  const auto token = [&](int64_t r) {
    return a.host_token_of == nullptr ? r : static_cast<int64_t>(a.host_token_of[r]);
  };
  TARE_ASSIGN_OR_RETURN(
      const void* const x,
      RoutedX(ctx, p, a.x, a.x_stride, a.x_by_row ? nullptr : a.token_of, a.rows, workspace));
  c.pass = lg::Pass::kDw;
  c.a = dy;
  c.m = l.n;
  c.n = l.k;
  c.k = a.rows;
  c.b = x;
  c.b_dtype = l.x_dtype;
  c.b_stride = l.k;
  c.y_dtype = DType::kF32;
  c.y_stride = l.k;
  c.parts = 1;
  for (int64_t e = 0; e < p.experts; ++e) {
    int64_t r = a.offsets[static_cast<size_t>(e)];
    const int64_t end = a.offsets[static_cast<size_t>(e + 1)];
    c.runs.clear();
    // The expert's rows of each unit: one run, because they ascend by token.
    for (const TokenUnit& u : a.units) {
      while (r < end && token(r) < u.begin) ++r;
      const int64_t first = r;
      while (r < end && token(r) < u.begin + u.rows) {
        if (r > first && token(r) <= token(r - 1)) {
          return InvalidArgument(
              "grouped_linear: rows {} and {} of expert {} hold tokens {} and {}; they must ascend",
              r - 1, r, e, token(r - 1), token(r));
        }
        ++r;
      }
      if (r > first) c.runs.push_back({static_cast<int>(first), static_cast<int>(r - first)});
    }
    if (c.runs.empty()) continue;
    c.y = a.dw + e * l.n * l.k;
    TARE_RETURN_IF_ERROR(native ? lg::LaunchNative(c, ctx.stream, nullptr)
                                : lg::RunContraction(c, ctx.stream, nullptr));
  }
  Trace(ctx, p, "grouped_linear.dw",
        native ? "grouped_linear_dw_cublas" : "grouped_linear_dw_by_expert", "", a.rows);
  return Ok();
}

}  // namespace tare::ops::grouped_linear
