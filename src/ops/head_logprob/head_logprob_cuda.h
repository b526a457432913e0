#pragma once

// Between head_logprob.cc and head_logprob_cuda.cc: what both compose of, and the device's part,
// composed of linear and logprob there. All memory comes from ctx.workspace.

#include "ops/head_logprob/head_logprob.h"
#include "ops/linear/linear.h"

namespace tare::ops::head_logprob {

// The product for `features` columns of the head's weight.
inline linear::Params LinearOf(const Params& p, int64_t features) {
  linear::Params l;
  l.n = features;
  l.k = p.hidden;
  l.x_dtype = l.w_dtype = l.dy_dtype = l.backward_operand = p.dtype;
  l.y_dtype = p.logits_dtype;
  l.dx_dtype = DType::kF32;
  return l;
}

inline const char* At(const void* base, int64_t elements, DType dtype) {
  return static_cast<const char*>(base) + elements * SizeOf(dtype);
}

size_t WorkspaceBytesCuda(const Params& params, int64_t rows);
size_t BackwardWorkspaceBytesCuda(const Ctx& ctx, const Params& params, int64_t rows);
Status ForwardCuda(const Ctx& ctx, const Params& params, const Args& args);
Status BackwardCuda(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::head_logprob
