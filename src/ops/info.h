#pragma once

// Short words for writing registry entries of row operators (src/ops/<op>/<op>_info.cc).

#include <string>

#include "ops/registry.h"

namespace tare::ops {

inline std::string Name(DType dtype) { return std::string(DTypeName(dtype)); }

inline Operand RowOperand(const char* name, DType dtype, Shape shape, bool grad = false) {
  return {.name = name,
          .dtype = dtype,
          .shape = std::move(shape),
          .grad = grad,
          .grad_dtype = IsFloat(dtype) ? dtype : DType::kF32};
}
inline Operand SharedOperand(const char* name, DType dtype, Shape shape, bool grad = false) {
  Operand o = RowOperand(name, dtype, std::move(shape), grad);
  o.role = Role::kShared;
  return o;
}
inline Operand SavedOperand(const char* name, DType dtype, Shape shape) {
  Operand o = RowOperand(name, dtype, std::move(shape));
  o.saved = true;
  return o;
}
inline Operand IndexOperand(const char* name, Shape shape, int64_t limit,
                            Fill fill = Fill::kIndex) {
  Operand o = RowOperand(name, DType::kI32, std::move(shape));
  o.fill = fill;
  o.limit = limit;
  return o;
}

// Row operators are alike in these.
inline OpInfo RowOpInfo(const char* name) {
  OpInfo info;
  info.name = name;
  info.dtypes = {DType::kBF16, DType::kF32};
  info.devices = {Device::kCpu};
  info.profiles = {Profile::kIeeeF32, Profile::kSm90Mma};
  return info;
}

// Tolerances that most row operators share.
inline Tolerance ElementTolerance(DType dtype, const char* what) {
  if (dtype == DType::kF32) return {-21, -100, std::string("f32: ") + what};
  return {-8, -100, std::string("bf16: one rounding of the result; ") + what};
}

}  // namespace tare::ops
