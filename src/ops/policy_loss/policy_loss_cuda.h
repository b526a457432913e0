#pragma once

// Between policy_loss.cc and policy_loss.cu: what the entries call for a device, after their
// checks.

#include "ops/policy_loss/policy_loss.h"

namespace tare::ops::policy_loss {

Status ForwardCuda(const Ctx& ctx, const Params& params, const Args& args);
Status BackwardCuda(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::policy_loss
