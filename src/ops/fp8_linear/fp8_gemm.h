#pragma once

// Between the entries of fp8_linear on CUDA and its kernels.

#include <cstdint>
#include <string>

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
// `groups`: warpgroups of 64 rows of x in a tile, 2 or 3; 0: Groups() of the call. No bit depends
// on it. `config`, when not null, gets the launch configuration.
Status Launch(const Problem& p, StreamHandle stream, std::string* config = nullptr, int groups = 0);
int Groups(int64_t m, int64_t n, int sms);
// One thread for each output, any shape and both profiles.
Status LaunchGeneric(const Problem& p, StreamHandle stream);
// args.y = round(tree over `segments` sums [S, m, n] (+ bias)).
Status LaunchFinish(const Params& params, const Args& args, const float* sums, StreamHandle stream);

}  // namespace tare::ops::fp8_linear::gpu
