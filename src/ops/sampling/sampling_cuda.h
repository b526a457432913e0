#pragma once

// Between sampling.cc and sampling.cu: what the entries call for a device, after their checks.

#include "ops/sampling/sampling.h"

namespace tare::ops::sampling {

Status ForwardCuda(const Ctx& ctx, const Params& params, const Args& args);
Status ReplayCuda(const Ctx& ctx, const Params& params, const ReplayArgs& args);

}  // namespace tare::ops::sampling
