#pragma once

// The fork in an operator's entry between its CPU code and its CUDA part.

#include "ops/rows.h"

namespace tare::ops {

// For an operator with a CUDA part: what its arguments hold is looked at on the host only where
// they are on the host; the kernels refuse the rest (ops/cuda/refusal.h).
inline bool IsHost(const Ctx& ctx) { return ctx.device == Device::kCpu; }
inline Status CheckDevice(const char* op, const Ctx& ctx) {
  return IsHost(ctx) ? CheckCpu(op, ctx) : Ok();
}

// Goes to the CUDA part when the call is for a device. A build without one says so by name.
#ifdef TARE_WITH_CUDA
#define TARE_WITH_CUDA_RETURN(op, ctx, call) \
  if ((ctx).device == Device::kCuda) return call
#else
#define TARE_WITH_CUDA_RETURN(op, ctx, call)                   \
  if ((ctx).device != Device::kCpu) {                          \
    return Unsupported("{}: this build has no CUDA part", op); \
  }
#endif

}  // namespace tare::ops
