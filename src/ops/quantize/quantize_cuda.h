#pragma once

// Between quantize.cc and quantize.cu: what the entries call for a device, after their checks.

#include "ops/quantize/quantize.h"

namespace tare::ops::quantize {

Status ForwardCuda(const Ctx& ctx, const Params& params, const Args& args);
Status BackwardCuda(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::quantize
