#pragma once

// Between embedding.cc and embedding.cu: what the entries call for a device, after their checks.

#include "ops/embedding/embedding.h"

namespace tare::ops::embedding {

Status ForwardCuda(const Ctx& ctx, const Params& params, const Args& args);
Status BackwardCuda(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::embedding
