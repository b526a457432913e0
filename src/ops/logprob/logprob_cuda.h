#pragma once

// Between logprob.cc and logprob.cu: what the entries call for a device, after their checks.

#include "ops/logprob/logprob.h"

namespace tare::ops::logprob {

Status ForwardCuda(const Ctx& ctx, const Params& params, const Args& args);
Status BackwardCuda(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::logprob
