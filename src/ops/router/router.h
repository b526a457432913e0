#pragma once

// MoE router: softmax over the experts by lanes(32), top-k by value descending and index ascending,
// distinct; +0 and -0 tie. The choice is made on the logits, so a rounding of exp cannot make a
// tie.
//   e = exp2((z - max) * log2e);  s = lanes(32) of e;  p = e / s
//   w = p[id] (renormalised: divided by the sum of the chosen p in slot order), then * scale
// Slots are in the router's order (best first). A NaN logit is an error that names row and expert.
// Backward reads the saved decision and never decides again.

#include <cstdint>

#include "ops/contract.h"
#include "ops/op.h"

namespace tare::ops::router {

TARE_FAULT(kTiesHigh, "router.ties_highest_index", "router", "C3,C5",
           "equal logits are taken by the highest index");
TARE_FAULT(kSortedOrder, "router.order_sorted", "router", "C3,C5",
           "the chosen experts are handed on in index order instead of score order");
TARE_FAULT(kRenormalise, "router.renormalise_flipped", "router", "C5",
           "weights are renormalised where the contract says not to, or not where it says so");
TARE_FAULT(kRecompute, "router.decision_recomputed", "router", "C6,C7",
           "backward decides again from perturbed logits instead of reading the saved decision");

struct Params {
  int64_t experts = 0;               // E
  int64_t top_k = 0;                 // k <= E
  DType logits_dtype = DType::kF32;  // bf16 or f32
  DType grad_dtype = DType::kF32;    // of dlogits
  bool renormalise = true;
  float scale = 1.0f;
};

struct Args {
  int64_t rows = 0;              // T
  const void* logits = nullptr;  // [T, E]
  const uint8_t* valid =
      nullptr;               // [T], 0 marks a padded row: ids -1, weights and probs +0; may be null
  int32_t* ids = nullptr;    // [T, k]
  float* weights = nullptr;  // [T, k]
  float* probs = nullptr;    // [T, E], for backward; may be null
};

struct BackwardArgs {
  int64_t rows = 0;
  const int32_t* ids = nullptr;     // [T, k], saved
  const float* probs = nullptr;     // [T, E], saved
  const float* dweights = nullptr;  // [T, k]
  void* dlogits = nullptr;          // [T, E], grad_dtype
  const void* logits = nullptr;     // [T, E]; may be null, read by the planted fault alone
};

Contract ContractOf(const Params& params);
Status Forward(const Ctx& ctx, const Params& params, const Args& args);
Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args);

// For a recompute of the forward during backward: kPrecondition "recomputed decision differs from
// saved" with the first token and both lists when the two decisions differ in any id or order.
Status CheckDecision(int64_t rows, int64_t top_k, const int32_t* saved, const int32_t* recomputed);

}  // namespace tare::ops::router
