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

// The same tree, then norm and factor of it into result[0] and [1]; the factor's tree is over the
// first `clip_count` leaves (all of them but for a planted fault; more than none). Does not wait.
Status FinishCuda(const Ctx& ctx, int64_t count, int64_t clip_count, float max_norm, float* result);

}  // namespace tare::ops::grad_norm
