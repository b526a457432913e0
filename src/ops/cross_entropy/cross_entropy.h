#pragma once

// Cross entropy over logprobs: loss = sum over valid tokens of -logprob * weight / N, N the
// caller's global count. Masked tokens are selected away, never multiplied. The token weight w
// (advantage of a plain policy gradient, or null for 1) may have either sign.

#include <cstdint>
#include <span>

#include "ops/contract.h"
#include "ops/op.h"
#include "ops/units.h"

namespace tare::ops::cross_entropy {

struct Params {};

struct Args {
  int64_t rows = 0;                // T
  const float* logprob = nullptr;  // [T]
  const float* weight = nullptr;   // [T]; may be null
  const uint8_t* mask = nullptr;   // [T], 1 counts
  int64_t global_count = 0;        // N >= 1
  std::span<const TokenUnit> units;
  float* token_loss = nullptr;  // [T]; may be null
  double* loss = nullptr;       // [1], added to: the units' lanes(32) sums, each added in f64
};

struct BackwardArgs {
  int64_t rows = 0;
  const float* weight = nullptr;  // [T]; may be null
  const uint8_t* mask = nullptr;  // [T]
  int64_t global_count = 0;
  float dloss = 1.0f;
  float* dlogprob = nullptr;  // [T]: -(weight * dloss / N), +0 where masked
};

Contract ContractOf(const Params& params);
Status Forward(const Ctx& ctx, const Params& params, const Args& args);
Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::cross_entropy
