#include "tensor/dtype.h"

#include <array>

namespace tare {
namespace {

constexpr std::array<std::string_view, kDTypeCount> kNames = {
    "f64", "f32", "f16", "bf16", "e4m3", "e5m2", "i64", "i32", "i16", "i8", "u8", "bool"};
constexpr std::array<std::string_view, kDTypeCount> kSafetensorsNames = {
    "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL"};

std::optional<DType> Find(const std::array<std::string_view, kDTypeCount>& names,
                          std::string_view name) {
  for (int i = 0; i < kDTypeCount; ++i) {
    if (names[i] == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

}  // namespace

std::string_view DTypeName(DType dtype) { return kNames[static_cast<int>(dtype)]; }
std::optional<DType> ParseDType(std::string_view name) { return Find(kNames, name); }
std::string_view SafetensorsName(DType dtype) { return kSafetensorsNames[static_cast<int>(dtype)]; }
std::optional<DType> ParseSafetensorsName(std::string_view name) {
  return Find(kSafetensorsNames, name);
}

}  // namespace tare
