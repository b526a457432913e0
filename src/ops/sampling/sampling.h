#pragma once

// Sampling by integer mass, so that a parallel select gives the same set and the same token in any
// order: w = u64(exp2((z - max) * log2e) * 2^40), z = f32(logit) / T.
// The kept set: all ids; then the top_k largest (value descending, id ascending, +0 and -0 tie);
// then the smallest non-empty prefix of those in the same order with sum w >= ceil(floor(p * 2^32)
// * S / 2^32), S the mass of the set so far; then the ids with w >= ceil(floor(min_p * 2^32) *
// w_max / 2^32). Draw: r = 64 bits of Philox4x32-10 with key = seed and counter = (position,
// RandomPurpose::kToken, sample, 0), t = mulhi(r, S_kept), the lowest id whose running sum in id
// order exceeds t. T = 0 is greedy by declared rule: the argmax (lowest id wins), the kept set is
// that id alone and `logprob` is the one at T = 1. No row reads another.

#include <cstdint>

#include "ops/contract.h"
#include "ops/op.h"

namespace tare::ops::sampling {

TARE_FAULT(kTiesHigh, "sampling.top_k_ties_highest", "sampling", "C3,C5",
           "equal logits are kept by the highest id");
TARE_FAULT(kSeedByRow, "sampling.seed_by_batch_row", "sampling", "C3",
           "the draw depends on the row of the batch");

struct Params {
  int64_t vocab = 0;                 // V
  DType logits_dtype = DType::kF32;  // bf16 or f32
};

struct Args {
  int64_t rows = 0;                    // B
  const void* logits = nullptr;        // [B, V], row b at logits + b * stride
  int64_t stride = 0;                  // elements; 0 means V
  const float* temperature = nullptr;  // [B], finite, >= 0; null means 1
  const int32_t* top_k = nullptr;      // [B], 0 is off; null means off
  const float* top_p = nullptr;        // [B], in (0, 1], 1 is off; null means off
  const float* min_p = nullptr;        // [B], in [0, 1], 0 is off; null means off
  const uint64_t* seed = nullptr;      // [B]
  const int32_t* position = nullptr;   // [B]: position of the sampled token in its sequence
  const int32_t* sample = nullptr;     // [B]: sample index within the request; null means 0
  int32_t* token = nullptr;            // [B]
  float* logprob = nullptr;  // [B]: log-softmax over the whole vocabulary at T; may be null
  float* processed_logprob = nullptr;  // [B]: log-softmax over the kept set; may be null
  int32_t* kept = nullptr;             // [B]: size of the kept set; may be null
  uint8_t* candidates = nullptr;       // [B, ceil(V / 8)]: bit (id % 8) of byte id / 8; may be null
};

// A NaN logit, a row without a finite maximum, or a parameter out of range is kInvalidArgument that
// names the row.
Contract ContractOf(const Params& params);
Status Forward(const Ctx& ctx, const Params& params, const Args& args);

// The processed logprob of given tokens over given candidate sets (what a trainer replays):
// section 4's log-softmax in which ids outside the set count as -inf. A target outside its set
// gives -inf. Shapes as above.
struct ReplayArgs {
  int64_t rows = 0;
  const void* logits = nullptr;  // [B, V]
  int64_t stride = 0;
  const float* temperature = nullptr;   // [B], > 0; null means 1
  const uint8_t* candidates = nullptr;  // [B, ceil(V / 8)]
  const int32_t* targets = nullptr;     // [B]
  float* logprob = nullptr;             // [B]
};
Status Replay(const Ctx& ctx, const Params& params, const ReplayArgs& args);

// The lowest index of the largest value; +0 and -0 tie. kInvalidArgument for a NaN or an empty row.
Result<int32_t> Argmax(const float* values, int64_t count);

}  // namespace tare::ops::sampling
