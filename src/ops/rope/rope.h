#pragma once

// Rotary position embedding. Angles, their sines and cosines are computed in f64 by our own
// functions and rounded to f32 once, into a table that both devices read:
//   y1 = dtype(fma(x1, c, -(x2 * s)));  y2 = dtype(fma(x2, c, x1 * s))
// (x1, x2) are elements (i, i + R/2) of a head in the half-split layout and (2i, 2i + 1) in the
// interleaved one, R the rotary part; elements from R on are copied.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ops/contract.h"
#include "ops/op.h"

namespace tare::ops::rope {

TARE_FAULT(kPositionsBf16, "rope.positions_bf16", "rope", "C3,C5",
           "positions are rounded to bf16, so positions above 256 collide");
TARE_FAULT(kOtherScaling, "rope.other_scaling", "rope", "C2,C5",
           "frequency scaling of the configuration is left out (or halved where there is none)");
TARE_FAULT(kCastBeforeRotate, "rope.cast_before_rotate", "rope", "C3,C5",
           "cosine, sine and every product are rounded to bf16");
TARE_FAULT(kDetached, "rope.gradient_not_rotated_back", "rope", "C7",
           "the gradient passes as if forward had not rotated");

enum class Layout : uint8_t { kHalfSplit, kInterleaved };
enum class Scaling : uint8_t { kNone, kLinear, kLlama3, kYarn };
std::string_view ScalingName(Scaling scaling);  // "none", "linear", "llama3", "yarn"

struct Params {
  int64_t head_dim = 0;
  int64_t rotary_dim = 0;  // R: even, at most head_dim
  Layout layout = Layout::kHalfSplit;
  DType dtype = DType::kBF16;
  double theta = 10000.0;
  Scaling scaling = Scaling::kNone;
  double factor = 1.0;                // linear, llama3, yarn
  double low_freq_factor = 1.0;       // llama3
  double high_freq_factor = 4.0;      // llama3
  int64_t original_max_position = 0;  // llama3, yarn
  double beta_fast = 32.0;            // yarn
  double beta_slow = 1.0;             // yarn
  // yarn: multiplies cosine and sine. 0 takes 0.1 * ln(factor) + 1.
  double attention_factor = 0.0;
};

// cos and sin of every position and pair: f32 [positions, rotary_dim / 2] each.
struct Table {
  int64_t positions = 0;
  std::vector<float> cos;
  std::vector<float> sin;
};
// positions: 1 to 2^20.
Result<Table> BuildTable(const Params& params, int64_t positions,
                         fault::Side side = fault::Side::kNone);

struct Args {
  int64_t rows = 0;                    // T
  int64_t heads = 0;                   // of this buffer: q and k are two calls, or one over both
  const int32_t* positions = nullptr;  // [T], each in [0, table_positions)
  const float* cos = nullptr;          // [table_positions, R / 2]
  const float* sin = nullptr;
  int64_t table_positions = 0;
  const void* x = nullptr;  // [T, heads, head_dim], row t at x + t * x_stride
  int64_t x_stride = 0;     // elements; 0 means heads * head_dim
  void* y = nullptr;        // [T, heads, head_dim]; may be x with the same stride
  int64_t y_stride = 0;
};

Contract ContractOf(const Params& params);
Status Forward(const Ctx& ctx, const Params& params, const Args& args);
// The transpose of the rotation: x is dy, y is dx. May be in place.
Status Backward(const Ctx& ctx, const Params& params, const Args& args);

}  // namespace tare::ops::rope
