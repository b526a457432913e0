// The native arm of linear on CUDA: cuBLAS as its heuristics like it. The bits of a row change with
// the number of rows, and dW is one sum over all tokens.

#include "ops/cuda/cublas_peer.h"
#include "ops/linear/linear_cuda.h"
#include "ops/trace.h"

namespace tare::ops::linear::gpu {
namespace {

Status Check(const Contraction& c) {
  const bool trans_a = c.pass == Pass::kDw, trans_b = c.pass != Pass::kForward;
  if (c.a_dtype != DType::kBF16 || c.b_dtype != DType::kBF16 ||
      (c.y_dtype != DType::kBF16 && c.y_dtype != DType::kF32)) {
    return Unsupported("linear: the native CUDA arm takes bf16 operands and bf16 or f32 results");
  }
  if (c.bias != nullptr || (c.pass != Pass::kDw && c.chains() != 1))
    return Unsupported("linear: the native CUDA arm has no bias and no segments");
  if (c.a_stride != (trans_a ? c.m : c.k) || c.b_stride != (trans_b ? c.n : c.k) ||
      c.y_stride != c.n) {
    return Unsupported("linear: the native CUDA arm takes contiguous operands");
  }
  return Ok();
}

// Units that follow each other are one sum. So are those between which fewer than 16 rows lie: a
// packed batch holds zeros there (ops/token_units.h).
std::vector<Run> Joined(const std::vector<Run>& units) {
  std::vector<Run> runs;
  for (const Run& unit : units) {
    if (!runs.empty() && unit.begin - (runs.back().begin + runs.back().length) < 16) {
      runs.back().length = unit.begin + unit.length - runs.back().begin;
    } else {
      runs.push_back(unit);
    }
  }
  return runs;
}

}  // namespace

Status LaunchNative(const Contraction& c, StreamHandle stream_handle, LaunchTrace* trace) {
  TARE_RETURN_IF_ERROR(Check(c));
  if (c.m == 0 || c.n == 0) return Ok();
  TARE_ASSIGN_OR_RETURN(const cuda::CublasPeer* const peer, cuda::NativePeer());
  auto* const stream = static_cast<cudaStream_t>(stream_handle);
  const bool f32 = c.y_dtype == DType::kF32;
  if (c.pass == Pass::kDw) {
    for (const Run& run : Joined(c.runs)) {
      TARE_RETURN_IF_ERROR(peer->Gemm(stream, true, true, c.m, c.n, run.length,
                                      static_cast<const uint16_t*>(c.a) + run.begin * c.a_stride,
                                      static_cast<const uint16_t*>(c.b) + run.begin * c.b_stride,
                                      c.y, f32, true));
    }
  } else {
    TARE_RETURN_IF_ERROR(
        peer->Gemm(stream, false, c.pass == Pass::kDx, c.m, c.n, c.k, c.a, c.b, c.y, f32, false));
  }
  if (trace != nullptr) {
    const char* op = c.pass == Pass::kForward ? "linear"
                     : c.pass == Pass::kDx    ? "linear.dx"
                                              : "linear.dw";
    const char* kernel = c.pass == Pass::kForward ? "linear_fwd_cublas"
                         : c.pass == Pass::kDx    ? "linear_bwd_dx_cublas"
                                                  : "linear_bwd_dw_cublas";
    trace->Record({op, kernel, "version=" + peer->version(),
                   fmt::format("bf16,bf16->{}", DTypeName(c.y_dtype)),
                   fmt::format("M={} N={} K={}", c.m, c.n, c.k)});
  }
  return Ok();
}

}  // namespace tare::ops::linear::gpu
