#pragma once

// Between the entries of fp8_linear on CUDA and its kernels.

#include <cstdint>

#include "base/status.h"
#include "ops/fp8_linear/fp8_linear.h"

namespace tare::ops::fp8_linear::gpu {

struct Problem {
  Params params;
  Args args;
  bool ieee = false;
  // The K blocks [first, last) of one segment; f32 sums go to `out` [m, n] without bias when it is
  // not null, else the result goes to args.y.
  int64_t first = 0, last = 0;
  float* out = nullptr;
  bool one_chain = false, scales_in_turn = false;  // planted faults, of the generic kernel
};

// True when the Hopper kernel can take it: K a multiple of 16, addresses of 16 bytes.
// A planted fault is the generic kernel's.
bool CanUse(const Problem& p);
Status Launch(const Problem& p, StreamHandle stream);
// One thread for each output, any shape and both profiles.
Status LaunchGeneric(const Problem& p, StreamHandle stream);
// args.y = round(tree over `segments` sums [S, m, n] (+ bias)).
Status LaunchFinish(const Params& params, const Args& args, const float* sums, StreamHandle stream);

}  // namespace tare::ops::fp8_linear::gpu
