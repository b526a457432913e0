#pragma once

// How fast the emulated step runs beside the same core's f32 FMA, interleaved in one run.

#include "numerics/mma.h"

namespace tare::numerics {

struct MmaRate {
  double products_per_second = 0;  // best round, by the thread's CPU time
  double fma_per_second = 0;       // best round: ten independent chains of full-width vectors
};

// One thread, operands from a bell shape, [64, 1024] x [1024, 512], `rounds` interleaved pairs.
MmaRate MeasureMmaRate(MmaType type, MmaKernel kernel, int rounds);

}  // namespace tare::numerics
