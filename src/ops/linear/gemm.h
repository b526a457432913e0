#pragma once

// The chain GEMM on the CPU: what linear, grouped_linear and their gradients have in common.
//
//   C[m, n] = chain over k of A[m, k] * B[k, n],   per output element one f32 accumulator from +0
//
// K is a list of groups, each a list of index ranges walked in order. kTree gives the balanced tree
// of neighbours over the groups' chains, plus bias, rounded once into y. kAddEach adds every
// group's chain to an f32 gradient in turn. Tiles, threads and the SIMD target are schedule: each
// output element sees the same operations in the same order whatever they are.
//
// Internal to src/ops: arguments are checked by the operators.

#include <cstdint>
#include <functional>
#include <vector>

#include "numerics/mma.h"
#include "numerics/profile.h"
#include "ops/op.h"
#include "tensor/dtype.h"

namespace tare::ops::gemm {

inline constexpr int64_t kPanel = 32;  // columns of a packed panel

// One operand in memory. `rows` (may be null) maps a row index to the row that is read.
struct Matrix {
  const void* data = nullptr;
  DType dtype = DType::kBF16;
  int64_t stride = 0;  // elements between rows
  const int32_t* rows = nullptr;
  bool round_to_bf16 = false;  // f32 elements are rounded to bf16 (nearest even) as they are read
  bool round_to_f16 = false;
};

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
};
using Group = std::vector<Range>;

enum class BLayout : uint8_t {
  kRowsAreK,  // B[k, n] at data[k * stride + n]
  kRowsAreN,  // B[k, n] at data[n * stride + k]: an unpacked weight in the forward
  kPacked,    // panels of 32 columns (linear::PackedWeight)
};

struct Problem {
  int64_t m = 0;
  int64_t n = 0;
  Matrix a;
  bool a_rows_are_k = false;  // false: A[m, k] at data[m * stride + k]; true: data[k * stride + m]
  Matrix b;
  BLayout b_layout = BLayout::kRowsAreK;
  int64_t packed_k = 0;  // kPacked: K of the whole panel
  const numerics::MmaB* mma_b =
      nullptr;  // sm90-mma: B packed beforehand (one group per segment, no gaps)
  std::vector<Group> groups;

  enum class Sink : uint8_t { kTree, kAddEach };
  Sink sink = Sink::kTree;
  void* y = nullptr;  // kTree: y[m, n] of y_dtype; kAddEach: f32, added to
  DType y_dtype = DType::kF32;
  int64_t y_stride = 0;
  const void* bias = nullptr;  // [n] or null
  DType bias_dtype = DType::kBF16;
};

// What a kernel of one SIMD target ran as, for the launch trace.
struct Schedule {
  int64_t tile_m = 0;
  int64_t tile_n = 0;
  const char* kernel = "";
};

// ieee-f32 step. Chooses tiles by shape and thread count.
Schedule RunIeee(ThreadPool& pool, const Problem& problem);
// sm90-mma step for bf16 or f16 operands: see gemm_sm90.cc.
Schedule RunSm90(ThreadPool& pool, const Problem& problem);

// The native arm (batch invariance off): as RunIeee, but K is split by the number of rows, the way
// today's libraries do. Bits of a row change with m.
Schedule RunNative(ThreadPool& pool, const Problem& problem);

// Packs w [n, k] row-major into panels: bf16 and f16 as 16-bit pairs (column i low, 16 + i high),
// f32 as [k][32]. Columns past n are zero. `out` holds ceil(n / 32) * 32 * k elements.
void PackPanels(ThreadPool& pool, const void* w, DType dtype, int64_t n, int64_t k, void* out);

// Scalar helpers, one rounding each, canonical NaN.
float LoadAsF32(const void* data, DType dtype, int64_t index);
void StoreRounded(void* data, DType dtype, int64_t index, float value);
float RoundOperand(float value, DType to);  // to bf16 or f16 and back; f32 as it is

}  // namespace tare::ops::gemm
