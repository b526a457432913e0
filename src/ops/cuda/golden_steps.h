#pragma once

// Test support: single matrix steps of a Hopper GPU, for golden tiles.

#include <cstdint>

#include "base/status.h"
#include "numerics/sm90.h"

namespace tare::ops::cuda {

// On the device: a [tiles, 64, K], b [tiles, 8, K] of the type's elements (K = 16 of two bytes or
// 32 of one), c [tiles, 64, 8]. instruction = c + a b^T by one wgmma of a warpgroup; function = the
// same by numerics::Sm90Step, a thread an element.
Status LaunchGoldenSteps(numerics::MmaType type, int64_t tiles, const void* a, const void* b,
                         const float* c, float* instruction, float* function);

}  // namespace tare::ops::cuda
