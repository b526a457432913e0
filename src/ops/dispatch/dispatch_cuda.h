#pragma once

// Between dispatch.cc and dispatch.cu: what the entries call for a device, after their checks.

#include "ops/dispatch/dispatch.h"

namespace tare::ops::dispatch {

Status ForwardCuda(const Ctx& ctx, const Params& params, const Args& args);
Status BackwardCuda(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::dispatch
