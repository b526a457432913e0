#pragma once

// MoE combine: acc = fma(w[t, s], y[row(t, s)], acc) from +0 in ascending slot order of the
// router's choice, f32, one rounding at the end. A slot with row -1 (padding) is skipped.

#include <cstdint>

#include "ops/contract.h"
#include "ops/op.h"

namespace tare::ops::combine {

TARE_FAULT(kByArrival, "combine.order_by_arrival", "combine", "C3,C5",
           "slots are added in the order of their rows in the expert buffer");
TARE_FAULT(kLastSlotDropped, "combine.last_slot_dropped", "combine", "C3,C5",
           "the last expert slot of every token is left out");

struct Params {
  int64_t hidden = 0;               // H
  int64_t top_k = 0;                // k
  DType dtype = DType::kBF16;       // of y (expert outputs) and out
  DType grad_dtype = DType::kBF16;  // of dout and dy
};

struct Args {
  int64_t rows = 0;                   // T
  int64_t expert_rows = 0;            // R
  const void* y = nullptr;            // [R, H]: expert outputs, in expert order
  const int32_t* slot_row = nullptr;  // [T, k], each in [-1, R)
  const float* weights = nullptr;     // [T, k]
  void* out = nullptr;                // [T, H]
};

struct BackwardArgs {
  int64_t rows = 0;
  int64_t expert_rows = 0;
  const void* y = nullptr;            // [R, H]
  const int32_t* slot_row = nullptr;  // [T, k]; a row of y belongs to at most one slot
  const float* weights = nullptr;     // [T, k]
  const void* dout = nullptr;         // [T, H], grad_dtype
  void* dy = nullptr;                 // [R, H], grad_dtype: rows of no slot become +0
  float* dweights = nullptr;          // [T, k]: lanes(128) of fma(dout, y, .); +0 for a padded slot
};

Contract ContractOf(const Params& params);
Status Forward(const Ctx& ctx, const Params& params, const Args& args);
Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::combine
