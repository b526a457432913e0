#pragma once

// Between token_units.cc and token_units.cu.

#include "ops/token_units.h"

namespace tare::ops {

Status SumBatchSegmentsCuda(const Ctx& ctx, float* grad, int32_t batch_segments, int64_t count);
// to[i] = to[i] + from[i], f32.
Status AddCuda(const Ctx& ctx, float* to, const float* from, int64_t count);

}  // namespace tare::ops
