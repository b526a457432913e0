#pragma once

// Between router.cc and router.cu: what the entries call for a device, after their checks.

#include "ops/router/router.h"

namespace tare::ops::router {

Status ForwardCuda(const Ctx& ctx, const Params& params, const Args& args);
Status BackwardCuda(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::router
