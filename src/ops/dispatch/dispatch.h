#pragma once

// MoE dispatch: token rows copied into expert order. Within an expert, rows keep (token, slot)
// order, so a row's place follows from the routes alone. Backward adds the slots of a token in f32,
// slots ascending, one rounding.

#include <cstdint>
#include <vector>

#include "ops/contract.h"
#include "ops/op.h"

namespace tare::ops::dispatch {

struct Params {
  int64_t hidden = 0;  // H
  int64_t top_k = 0;
  DType dtype = DType::kBF16;
  DType grad_dtype = DType::kBF16;
};

// Where each (token, slot) goes. Host memory.
struct Plan {
  std::vector<int64_t> offsets;    // [E + 1]: rows of expert e are [offsets[e], offsets[e + 1])
  std::vector<int32_t> slot_row;   // [T, k]: row of (t, s), -1 for a padded slot
  std::vector<int32_t> row_token;  // [R]: token of a row
};
// ids [T, k], each in [-1, experts); another value is kInvalidArgument with its row and slot.
Result<Plan> BuildPlan(int64_t rows, int64_t top_k, int64_t experts, const int32_t* ids);

struct Args {
  int64_t rows = 0;                    // T
  int64_t out_rows = 0;                // R
  const int32_t* row_token = nullptr;  // [R]
  const void* x = nullptr;             // [T, H]
  void* out = nullptr;                 // [R, H]
};

struct BackwardArgs {
  int64_t rows = 0;
  int64_t out_rows = 0;
  const int32_t* slot_row = nullptr;  // [T, k]
  const void* dout = nullptr;         // [R, H], grad_dtype
  void* dx = nullptr;                 // [T, H], grad_dtype
};

Contract ContractOf(const Params& params);
Status Forward(const Ctx& ctx, const Params& params, const Args& args);
Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::dispatch
