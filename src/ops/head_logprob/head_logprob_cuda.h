#pragma once

// Between head_logprob.cc and head_logprob_cuda.cc: the device's part, composed of linear and
// logprob there. All memory comes from ctx.workspace.

#include "ops/head_logprob/head_logprob.h"

namespace tare::ops::head_logprob {

size_t WorkspaceBytesCuda(const Params& params, int64_t rows);
size_t BackwardWorkspaceBytesCuda(const Ctx& ctx, const Params& params, int64_t rows);
Status ForwardCuda(const Ctx& ctx, const Params& params, const Args& args);
Status BackwardCuda(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::head_logprob
