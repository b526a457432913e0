#include "numerics/quant.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "tensor/convert.h"

namespace tare::numerics {
namespace {

constexpr float kE4m3Max = 448.0f;
constexpr float kInt8Max = 127.0f;

bool Finite(float x) { return (BitsOf(x) & 0x7f800000u) != 0x7f800000u; }
float Magnitude(float x) { return FloatOf(BitsOf(x) & 0x7fffffffu); }

float PowerOfTwo(int exponent) {  // within [-149, 127]
  if (exponent >= -126) return FloatOf(static_cast<uint32_t>(exponent + 127) << 23);
  TARE_CHECK(exponent >= -149) << exponent;
  return FloatOf(1u << (exponent + 149));
}

int FloorLog2(float x) {  // REQUIRES: x > 0, finite
  const uint32_t bits = BitsOf(x);
  if (bits >= 0x00800000u) return static_cast<int>(bits >> 23) - 127;
  return 31 - __builtin_clz(bits) - 149;
}

// The smallest power of two s >= 2^-126 with s * max >= amax. Exact: s * max in f64.
float CoveringPower(float amax, float max) {
  for (int e = std::max(-126, FloorLog2(amax) - 9);; ++e) {
    if (static_cast<double>(PowerOfTwo(e)) * static_cast<double>(max) >=
        static_cast<double>(amax)) {
      return PowerOfTwo(e);
    }
  }
}

// Nearest integer of a value below 2^22, ties by the rule.
float RoundInteger(float x, QuantRounding rounding) {
  const float magnitude = Magnitude(x);
  float floor = static_cast<float>(static_cast<int32_t>(magnitude));
  const float rest = Sub(magnitude, floor);
  const bool odd = (static_cast<int32_t>(floor) & 1) != 0;
  if (rest > 0.5f || (rest == 0.5f && (odd || rounding == QuantRounding::kHalfAway))) floor += 1.0f;
  return FloatOf(BitsOf(floor) | (BitsOf(x) & 0x80000000u));
}

uint8_t EncodeE4m3(float q, QuantRounding rounding) {
  const uint8_t nearest = F32ToE4m3(q);
  if (rounding == QuantRounding::kNearestEven) return nearest;
  // A tie that went to even downward goes up instead.
  const float magnitude = Magnitude(q);
  const uint8_t code = nearest & 0x7f;
  if (code >= 0x7e) return nearest;
  const double low = E4m3ToF32(code), high = E4m3ToF32(static_cast<uint8_t>(code + 1));
  return static_cast<double>(magnitude) == (low + high) / 2 ? static_cast<uint8_t>(nearest + 1)
                                                            : nearest;
}

}  // namespace

std::string_view QuantFormatName(QuantFormat format) {
  switch (format) {
    case QuantFormat::kE4M3:
      return "e4m3";
    case QuantFormat::kInt8:
      return "int8";
    case QuantFormat::kMxFp4:
      return "mxfp4";
  }
  return "";
}

float QuantScale(QuantFormat format, ScaleRule rule, float amax) {
  TARE_CHECK(amax >= 0.0f && Finite(amax)) << "amax " << amax;
  if (amax == 0.0f) return 1.0f;
  if (format == QuantFormat::kMxFp4) {
    return PowerOfTwo(std::clamp(FloorLog2(amax) - 2, -127, 127));
  }
  const float max = format == QuantFormat::kE4M3 ? kE4m3Max : kInt8Max;
  if (rule == ScaleRule::kPowerOfTwo) return CoveringPower(amax, max);
  return std::max(Div(amax, max), 0x1p-126f);
}

float E2m1ToF32(uint8_t code) {
  constexpr float kValues[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const float v = kValues[code & 7];
  return (code & 8) != 0 ? -v : v;
}

uint8_t F32ToE2m1(float x, QuantRounding rounding) {
  const float magnitude = Magnitude(x);
  uint8_t code = 7;  // saturates
  for (uint8_t i = 0; i < 7; ++i) {
    const float middle = (E2m1ToF32(i) + E2m1ToF32(static_cast<uint8_t>(i + 1))) * 0.5f;
    const bool tie_stays = (i & 1) == 0 && rounding == QuantRounding::kNearestEven;
    if (magnitude < middle || (magnitude == middle && tie_stays)) {
      code = i;
      break;
    }
  }
  return static_cast<uint8_t>(code | ((BitsOf(x) >> 31) << 3));
}

uint8_t QuantEncode(QuantFormat format, float x, float scale, QuantRounding rounding) {
  const float q = Div(x, scale);
  switch (format) {
    case QuantFormat::kE4M3:
      return EncodeE4m3(q, rounding);
    case QuantFormat::kMxFp4:
      return F32ToE2m1(q, rounding);
    case QuantFormat::kInt8:
      break;
  }
  const float clamped = std::min(std::max(q, -kInt8Max), kInt8Max);
  return static_cast<uint8_t>(static_cast<int8_t>(RoundInteger(clamped, rounding)));
}

float QuantDecode(QuantFormat format, uint8_t code, float scale) {
  switch (format) {
    case QuantFormat::kE4M3:
      return Canonical(Mul(E4m3ToF32(code), scale));
    case QuantFormat::kMxFp4:
      return Mul(E2m1ToF32(code), scale);
    case QuantFormat::kInt8:
      break;
  }
  return Mul(static_cast<float>(static_cast<int8_t>(code)), scale);
}

Status Quantize(const QuantGrid& grid, const float* x, int64_t rows, int64_t cols, uint8_t* codes,
                float* scales) {
  if (grid.block_rows < 1 || grid.block_cols < 1 || rows < 0 || cols < 0) {
    return InvalidArgument("blocks of {} x {} over a matrix of {} x {}", grid.block_rows,
                           grid.block_cols, rows, cols);
  }
  for (int64_t r0 = 0; r0 < rows; r0 += grid.block_rows) {
    for (int64_t c0 = 0; c0 < cols; c0 += grid.block_cols) {
      const int64_t r1 = std::min(rows, r0 + grid.block_rows);
      const int64_t c1 = std::min(cols, c0 + grid.block_cols);
      float amax = 0.0f;
      for (int64_t r = r0; r < r1; ++r) {
        for (int64_t c = c0; c < c1; ++c) {
          const float v = x[r * cols + c];
          if (!Finite(v)) {
            return InvalidArgument("element [{}, {}] is {:#010x}, not finite: no {} block holds it",
                                   r, c, BitsOf(v), QuantFormatName(grid.format));
          }
          amax = std::max(amax, Magnitude(v));
        }
      }
      const float scale = QuantScale(grid.format, grid.scale_rule, amax);
      scales[r0 / grid.block_rows * grid.ScaleCols(cols) + c0 / grid.block_cols] = scale;
      for (int64_t r = r0; r < r1; ++r) {
        for (int64_t c = c0; c < c1; ++c) {
          codes[r * cols + c] = QuantEncode(grid.format, x[r * cols + c], scale, grid.rounding);
        }
      }
    }
  }
  return Ok();
}

Status Dequantize(const QuantGrid& grid, const uint8_t* codes, const float* scales, int64_t rows,
                  int64_t cols, float* x) {
  if (grid.block_rows < 1 || grid.block_cols < 1 || rows < 0 || cols < 0) {
    return InvalidArgument("blocks of {} x {} over a matrix of {} x {}", grid.block_rows,
                           grid.block_cols, rows, cols);
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      x[r * cols + c] =
          QuantDecode(grid.format, codes[r * cols + c],
                      scales[r / grid.block_rows * grid.ScaleCols(cols) + c / grid.block_cols]);
    }
  }
  return Ok();
}

std::string GridDifference(const QuantGrid& a, const QuantGrid& b, int64_t rows, int64_t cols,
                           int64_t b_row0, int64_t b_col0) {
  if (a.format != b.format) {
    return fmt::format("format {} against {}", QuantFormatName(a.format),
                       QuantFormatName(b.format));
  }
  if (a.scale_rule != b.scale_rule && a.format != QuantFormat::kMxFp4) {
    const auto name = [](ScaleRule r) { return r == ScaleRule::kFree ? "free" : "power-of-two"; };
    return fmt::format("scale {} against {}", name(a.scale_rule), name(b.scale_rule));
  }
  if (a.rounding != b.rounding) return "rounding half to even against half away from zero";
  // An axis is cut alike when every boundary that falls inside [0, n) of b's matrix is shared, and
  // b's first and last blocks are whole blocks of a, or end with the matrix of a.
  const auto axis = [](int64_t block_a, int64_t block_b, int64_t n, int64_t start,
                       const char* what) -> std::string {
    if (n == 0) return "";
    if (start % block_a != 0) {
      return fmt::format("{} {}: side b's matrix starts inside a block of {} of side a", what,
                         start, block_a);
    }
    for (int64_t i = 1; i < n; ++i) {
      const bool cut_a = (start + i) % block_a == 0, cut_b = i % block_b == 0;
      if (cut_a != cut_b) {
        return fmt::format(
            "{} {}: a block of side {} ends here, side {}'s goes on (blocks of {} and {})", what,
            start + i, cut_a ? 'a' : 'b', cut_a ? 'b' : 'a', block_a, block_b);
      }
    }
    return "";
  };
  std::string text = axis(a.block_rows, b.block_rows, rows, b_row0, "row");
  if (text.empty()) text = axis(a.block_cols, b.block_cols, cols, b_col0, "column");
  return text;
}

}  // namespace tare::numerics
