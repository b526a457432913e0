#pragma once

// The element types of GGUF: their names, block layouts, and dequantisation to f32 with the bits of
// the `gguf` Python package: f32 products and sums, each rounded on its own, in its order. A NaN
// (from a scale that is not finite) is the canonical f32 NaN; that package leaves whatever the CPU
// made.

#include <cstdint>
#include <string_view>

#include "base/status.h"

namespace tare {

struct GgufTypeInfo {
  uint32_t id = 0;
  std::string_view name;  // "Q4_K"
  int64_t block_elements = 0;
  int64_t block_bytes = 0;
  bool readable = false;  // whether Tare dequantises it
};

// nullptr for a number that the format does not define.
const GgufTypeInfo* FindGgufType(uint32_t id);
// "F32 F16 ...": the readable ones, for messages.
std::string ReadableGgufTypes();

// `elements` values from whole blocks at `src` to `dst`. REQUIRES: a readable type; `elements` a
// multiple of its block. `src` needs no alignment.
void DequantizeGguf(const GgufTypeInfo& type, const void* src, float* dst, int64_t elements);

}  // namespace tare
