#pragma once

// Block quantisation: which values a block can hold, its scale, and the rounding into it. A grid is
// data, so that two sides can be compared before a number is (NUM-05, NUM-16).
//
// All formats: code = round(x / scale), one IEEE division, then one rounding to the element format,
// nearest even, saturating; value = element * scale, one rounding. Rules for the scale, amax being
// the largest |x| of the block:
//   e4m3   kFree: amax / 448, rounded once, at least 2^-126.  kPowerOfTwo: the smallest power of
//   two
//          >= amax / 448 (exact comparison), within [2^-126, 2^127].
//   int8   kFree: amax / 127 (codes -127..127, never -128).   kPowerOfTwo: likewise with 127.
//   mxfp4  always a power of two, 2^(floor(log2 amax) - 2) within [2^-127, 2^127] (OCP MX 1.0):
//   values
//          above 6 * scale saturate, by design of the format.
// A block of zeros (both signs) has scale 1 and codes that dequantise to zeros of the same sign
// (int8 has no -0). NaN or infinity in a block is an error with its place: no grid holds them.

#include <cstdint>
#include <string>

#include "base/status.h"
#include "numerics/fp.h"

namespace tare::numerics {

enum class QuantFormat : uint8_t { kE4M3, kInt8, kMxFp4 };
enum class ScaleRule : uint8_t { kFree, kPowerOfTwo };
// kHalfAway is no contract's choice: it is the planted defect of a quantiser that rounds half away
// from zero.
enum class QuantRounding : uint8_t { kNearestEven, kHalfAway };

std::string_view QuantFormatName(QuantFormat format);  // "e4m3", "int8", "mxfp4"

// A grid over a matrix [rows, cols]: blocks of block_rows x block_cols starting at (0, 0), the last
// ones short. 1 x 128 and 128 x 128 for e4m3, 1 x cols (one scale a channel) for int8, 1 x 32 for
// mxfp4.
struct QuantGrid {
  QuantFormat format = QuantFormat::kE4M3;
  ScaleRule scale_rule = ScaleRule::kFree;
  QuantRounding rounding = QuantRounding::kNearestEven;
  int64_t block_rows = 1;
  int64_t block_cols = 128;

  int64_t ScaleRows(int64_t rows) const { return (rows + block_rows - 1) / block_rows; }
  int64_t ScaleCols(int64_t cols) const { return (cols + block_cols - 1) / block_cols; }
};

// The scale of a block with this amax. REQUIRES: amax finite and >= 0.
float QuantScale(QuantFormat format, ScaleRule rule, float amax);

// One element into its code (mxfp4: the low four bits) and back. REQUIRES: x finite, scale > 0.
uint8_t QuantEncode(QuantFormat format, float x, float scale,
                    QuantRounding rounding = QuantRounding::kNearestEven);
float QuantDecode(QuantFormat format, uint8_t code, float scale);

// The element values: e2m1 of mxfp4 (+-0, 0.5, 1, 1.5, 2, 3, 4, 6).
float E2m1ToF32(uint8_t code);
uint8_t F32ToE2m1(float x, QuantRounding rounding = QuantRounding::kNearestEven);

// x [rows, cols], row stride cols -> codes [rows, cols], one byte each (mxfp4 too), scales
// [ScaleRows, ScaleCols]. kInvalidArgument for a bad grid, or a NaN or infinity, with its place.
Status Quantize(const QuantGrid& grid, const float* x, int64_t rows, int64_t cols, uint8_t* codes,
                float* scales);
Status Dequantize(const QuantGrid& grid, const uint8_t* codes, const float* scales, int64_t rows,
                  int64_t cols, float* x);

// Why two sides' grids cannot give equal codes over [rows, cols]: a sentence that names the first
// difference (format, scale rule, rounding, or the first element that lies in other blocks), or ""
// if they are one grid. A block alignment that differs only beyond the matrix is no difference.
// `b_row0` and `b_col0`: where side b's matrix starts inside side a's (a tensor-parallel shard).
std::string GridDifference(const QuantGrid& a, const QuantGrid& b, int64_t rows, int64_t cols,
                           int64_t b_row0 = 0, int64_t b_col0 = 0);

}  // namespace tare::numerics
