#pragma once

// Between grad_norm.cc and grad_norm.cu: what the entries call for a device, after their checks.

#include "ops/grad_norm/grad_norm.h"

namespace tare::ops::grad_norm {

// grad_norm.cu
size_t WorkspaceBytesCuda(int64_t leaves);
Status LeavesCuda(const Ctx& ctx, const Entry& entry, int64_t begin, int64_t end, float* leaves);
// The tree over leaves [0, count), count > 0, of ctx.workspace; `bad`: the lowest leaf that is not
// finite, or -1. Waits for the stream.
Status TreeCuda(const Ctx& ctx, int64_t count, double* sum, int64_t* bad);

}  // namespace tare::ops::grad_norm
