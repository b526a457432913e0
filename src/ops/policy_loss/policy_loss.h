#pragma once

// The policy loss of GRPO, PPO and DAPO, per token:
//   d = logprob - old;  rho = exp(d)
//   s1 = rho * A;  s2 = min(max(rho, 1 - clip_low), 1 + clip_high) * A;  pg = -min(s1, s2)
//   dual clip (c > 0, A < 0): pg = min(pg, -(c * A))
//   k = logprob - ref:  k1 = k;  k2 = 0.5 * k * k;  k3 = expm1(-k) + k     estimates of KL(policy
//   || ref) loss = pg + kl_coef * kl - entropy_coef * entropy
// times the token's weight: 1 / N_tokens, or 1 / (N_sequences * valid tokens of its sequence), or
// 1 / divisor. The counts are of the *global* batch and come from the caller as integers, so that
// cutting the batch moves no bit. A masked token is selected away, never multiplied: whatever its
// slots hold (NaN, -inf, a ratio of inf) reaches neither loss nor gradient. A non-finite loss or
// gradient at a valid token is kInvalidArgument that names the token.

#include <cstdint>
#include <span>

#include "ops/contract.h"
#include "ops/op.h"
#include "ops/units.h"

namespace tare::ops::policy_loss {

TARE_FAULT(kMaskByMultiply, "policy_loss.mask_by_multiply", "policy_loss", "C7",
           "masked tokens are multiplied by zero instead of left out");
TARE_FAULT(kDetached, "policy_loss.detached_forward", "policy_loss", "C7",
           "the gradient takes the ratio as 1");
TARE_FAULT(kLocalCount, "policy_loss.count_of_the_shard", "policy_loss", "C7",
           "the divisor is the number of valid tokens in this call");

enum class Kl : uint8_t { kNone, kK1, kK2, kK3 };
enum class Normalise : uint8_t { kToken, kSequence, kConstant };

struct Params {
  float clip_low = 0.2f;   // in [0, 1)
  float clip_high = 0.2f;  // DAPO's clip-higher: 0.28
  float dual_clip = 0.0f;  // c > 1, or 0: off
  Kl kl = Kl::kNone;
  float kl_coef = 0.0f;
  float entropy_coef = 0.0f;
  Normalise normalise = Normalise::kToken;
  float divisor = 1.0f;  // kConstant
};

struct Args {
  int64_t rows = 0;                    // T
  const float* logprob = nullptr;      // [T]: of the policy being trained
  const float* old_logprob = nullptr;  // [T]: of the policy that sampled
  const float* ref_logprob = nullptr;  // [T]; null iff kl is kNone
  const float* entropy = nullptr;      // [T]; null iff entropy_coef is 0
  const float* advantage = nullptr;    // [T]
  const uint8_t* mask = nullptr;       // [T], 1 counts
  // kToken: valid tokens of the global batch; kSequence: its sequences; else unused.
  int64_t global_count = 0;
  // kSequence: valid tokens of the sequence that a token belongs to, [T]; else null.
  const int32_t* sequence_tokens = nullptr;
  std::span<const TokenUnit> units;
  float* token_loss = nullptr;  // [T]: weighted, +0 where masked; may be null
  double* loss = nullptr;       // [1], added to: the units' lanes(32) sums, each added in f64
  // Statistics of this call, exact integers; may be null.
  int64_t* valid_tokens = nullptr;
  int64_t* clipped_tokens = nullptr;  // valid tokens where the clipped branch was taken
};

struct BackwardArgs {
  int64_t rows = 0;
  const float* logprob = nullptr;
  const float* old_logprob = nullptr;
  const float* ref_logprob = nullptr;
  const float* advantage = nullptr;
  const uint8_t* mask = nullptr;
  int64_t global_count = 0;
  const int32_t* sequence_tokens = nullptr;
  float dloss = 1.0f;
  float* dlogprob = nullptr;  // [T]: +0 where masked
  float* dentropy = nullptr;  // [T]; null iff entropy_coef is 0
};

Contract ContractOf(const Params& params);
Status Forward(const Ctx& ctx, const Params& params, const Args& args);
Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::policy_loss
