#pragma once

// Between rope.cc and rope.cu: what the entries call for a device, after their checks.

#include "ops/rope/rope.h"

namespace tare::ops::rope {

Status RotateCuda(const Ctx& ctx, const Params& params, const Args& args, bool backward);

}  // namespace tare::ops::rope
