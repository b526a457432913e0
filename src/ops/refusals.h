#pragma once

// Values that only a device can look at: what a kernel refused while it ran (ops/cuda/refusal.h),
// for code that knows no CUDA.

#include "base/status.h"
#include "ops/op.h"

namespace tare::ops {

// On a device: waits for ctx.stream, then kInvalidArgument with the lowest row that a kernel
// refused since the last call, or OK. On the CPU always OK: the operators say it at once.
Status TakeRefusals(const Ctx& ctx);

}  // namespace tare::ops
