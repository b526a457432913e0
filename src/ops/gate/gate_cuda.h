#pragma once

// Between gate.cc and gate.cu: what the entries call for a device, after their checks.

#include "ops/gate/gate.h"

namespace tare::ops::gate {

Status ForwardCuda(const Ctx& ctx, const Params& params, const Args& args);
Status BackwardCuda(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::gate
