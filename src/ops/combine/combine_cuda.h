#pragma once

// Between combine.cc and combine.cu: what the entries call for a device, after their checks.

#include "ops/combine/combine.h"

namespace tare::ops::combine {

Status ForwardCuda(const Ctx& ctx, const Params& params, const Args& args);
Status BackwardCuda(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::combine
