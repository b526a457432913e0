#pragma once

// The element types of Tare and their names in files and messages.

#include <cstdint>
#include <optional>
#include <string_view>

namespace tare {

enum class DType : uint8_t {
  kF64,
  kF32,
  kF16,
  kBF16,
  kE4M3,
  kE5M2,
  kI64,
  kI32,
  kI16,
  kI8,
  kU8,
  kBool,
};
inline constexpr int kDTypeCount = 12;

constexpr int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
    case DType::kI16:
      return 2;
    case DType::kE4M3:
    case DType::kE5M2:
    case DType::kI8:
    case DType::kU8:
    case DType::kBool:
      return 1;
  }
  return 0;
}

constexpr bool IsFloat(DType dtype) { return dtype <= DType::kE5M2; }

// "f64", "f32", "f16", "bf16", "e4m3", "e5m2", "i64", "i32", "i16", "i8", "u8", "bool".
std::string_view DTypeName(DType dtype);
std::optional<DType> ParseDType(std::string_view name);
// The names of the safetensors format: "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64",
// ...
std::string_view SafetensorsName(DType dtype);
std::optional<DType> ParseSafetensorsName(std::string_view name);

}  // namespace tare
