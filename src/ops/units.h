#pragma once

// The unit of every sum over tokens: a sequence, cut at every kUnitRows tokens from its own start.
// A unit's sum is added to the f32 main gradient with one nearest-even add, units ascending in
// (sequence index in the global batch, unit), so packing, padding and micro-batch cuts move no bit.

#include <cstdint>
#include <span>

#include "base/status.h"

namespace tare::ops {

inline constexpr int64_t kUnitRows = 4096;

// Rows [begin, begin + rows) of the packed token buffers. The first row of a unit is its row 0:
// lane and group numbers count from there.
struct TokenUnit {
  int64_t begin = 0;
  int64_t rows = 0;  // 1 to kUnitRows
};

// kInvalidArgument when a unit is empty, longer than kUnitRows, outside [0, rows), or begins before
// the end of the one listed before it.
Status CheckUnits(std::span<const TokenUnit> units, int64_t rows);

}  // namespace tare::ops
