#pragma once

// What host and device share of dW's launch.

#include <cuda.h>

#include "ops/linear/gpu_config.h"

namespace tare::ops::linear::gpu {

// The operands of dW for the copy engine.
struct GradientMaps {
  CUtensorMap a, b;              // boxes of whole stages, or of one CTA's part of them
  CUtensorMap short_a, short_b;  // of one group of 16 tokens
};

}  // namespace tare::ops::linear::gpu
