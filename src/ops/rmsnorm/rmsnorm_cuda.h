#pragma once

// Between rmsnorm.cc and rmsnorm.cu: what the entries call for a device, after their checks.

#include "ops/rmsnorm/rmsnorm.h"

namespace tare::ops::rmsnorm {

Status ForwardCuda(const Ctx& ctx, const Params& params, const Args& args);
Status BackwardCuda(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::rmsnorm
