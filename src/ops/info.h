#pragma once

// Short words for writing registry entries of row operators (src/ops/<op>/<op>_info.cc).

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ops/registry.h"

namespace tare::ops {

// Typed pointers into operands, wherever they lie.
template <typename T>
const T* In(const Tensor& t) {
  return static_cast<const T*>(t.data());
}
template <typename T>
T* Out(const Tensor& t) {
  return static_cast<T*>(const_cast<void*>(t.data()));
}

// What a registry entry makes on the host for a call, where the operator reads it: the pointer
// itself on the CPU; on a device a copy that stays, one for each content, so that a captured call
// can be replayed.
template <typename T>
Result<const T*> OnDevice(const Ctx& ctx, const T* data, int64_t count) {
  if (ctx.device == Device::kCpu || count == 0) return data;
  static std::mutex mutex;
  static auto* kept = new std::map<std::string, Tensor>();
  const auto bytes = static_cast<size_t>(count) * sizeof(T);
  const std::string content(reinterpret_cast<const char*>(data), bytes);
  std::lock_guard lock(mutex);
  if (const auto at = kept->find(content); at != kept->end()) return In<T>(at->second);
  if (kept->size() > 4096) kept->clear();
  TARE_ASSIGN_OR_RETURN(Tensor host, Tensor::Allocate(DType::kU8, {static_cast<int64_t>(bytes)}));
  std::memcpy(host.mutable_data(), data, bytes);
  TARE_ASSIGN_OR_RETURN(Tensor there, host.To(ctx.device));
  return In<T>(kept->emplace(content, std::move(there)).first->second);
}
template <typename T>
Result<std::vector<T>> OnHost(const Tensor& t) {
  TARE_ASSIGN_OR_RETURN(const Tensor host, t.To(Device::kCpu));
  return std::vector<T>(In<T>(host), In<T>(host) + t.elements());
}

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
  info.devices = {Device::kCpu, Device::kCuda};
  info.profiles = {Profile::kIeeeF32, Profile::kSm90Mma};
  return info;
}

// Tolerances that most row operators share.
inline Tolerance ElementTolerance(DType dtype, const char* what) {
  if (dtype == DType::kF32) return {-21, -100, std::string("f32: ") + what};
  return {-8, -100, std::string("bf16: one rounding of the result; ") + what};
}

}  // namespace tare::ops
