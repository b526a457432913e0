#pragma once

// Token embedding: out[t] = table[ids[t]] (times `scale` where the model has one).
// An id outside the vocabulary is kInvalidArgument that names the row; nothing is clamped.

#include <cstdint>
#include <span>

#include "ops/contract.h"
#include "ops/op.h"
#include "ops/units.h"

namespace tare::ops::embedding {

struct Params {
  int64_t vocab = 0;
  int64_t hidden = 0;
  DType dtype = DType::kBF16;  // of out
  DType table_dtype = DType::kBF16;
  DType grad_dtype = DType::kBF16;  // of dout
  float scale = 1.0f;  // Gemma: sqrt(hidden), rounded to dtype by the caller; 1 is no multiply
};

struct Args {
  int64_t rows = 0;              // T
  const int32_t* ids = nullptr;  // [T]
  const void* table = nullptr;   // [vocab, hidden], table_dtype
  void* out = nullptr;           // [T, hidden], dtype
};

struct BackwardArgs {
  int64_t rows = 0;
  const int32_t* ids = nullptr;  // [T]
  const void* dout = nullptr;    // [T, hidden], grad_dtype
  float* dtable = nullptr;       // [vocab, hidden], main gradient, added to
  std::span<const TokenUnit> units;
};

Contract ContractOf(const Params& params);
Status Forward(const Ctx& ctx, const Params& params, const Args& args);
Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args);

}  // namespace tare::ops::embedding
