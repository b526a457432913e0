#pragma once

// Between cross_entropy.cc and cross_entropy.cu: what the entries call for a device, after their
// checks.

#include "ops/cross_entropy/cross_entropy.h"

namespace tare::ops::cross_entropy {

Status ForwardCuda(const Ctx& ctx, const Params& params, const Args& args);
Status BackwardCuda(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::cross_entropy
