#pragma once

// Between cast.cc and cast.cu: what the entries call for a device, after their checks.

#include "ops/cast/cast.h"

namespace tare::ops::cast {

Status RunCuda(const Ctx& ctx, DType from, DType to, const Args& args);

}  // namespace tare::ops::cast
