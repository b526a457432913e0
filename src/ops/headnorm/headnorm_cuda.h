#pragma once

// Between headnorm.cc and headnorm.cu: what the entries call for a device, after their checks.

#include "ops/headnorm/headnorm.h"

namespace tare::ops::headnorm {

Status ForwardCuda(const Ctx& ctx, const Params& params, const Args& args);
Status BackwardCuda(const Ctx& ctx, const Params& params, const BackwardArgs& args);
size_t BackwardWorkspaceBytesCuda(const Params& params, int64_t units);

}  // namespace tare::ops::headnorm
