#pragma once

// Tensor: a dense, contiguous, row-major block of elements with a dtype, a shape and a device.
// Cheap to copy (storage is shared and never resized). A view is a Tensor that shares storage at an
// offset. Bounds are checked at every edge; elements are reached through typed pointers after that.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "tensor/device.h"
#include "tensor/dtype.h"

namespace tare {

using Shape = std::vector<int64_t>;

std::string ShapeToString(const Shape& shape);  // "[3, 576]"
// Product of the dimensions; kInvalidArgument for a negative one or an overflow of int64.
Result<int64_t> ElementCount(const Shape& shape);

class Tensor {
 public:
  Tensor() = default;  // no storage, shape [0]

  // Zero-filled, aligned to 64 bytes (256 on a device). kExhausted when memory is short.
  static Result<Tensor> Allocate(DType dtype, Shape shape, Device device = Device::kCpu);
  // Wraps memory that `owner` keeps alive (a mapped file, say). CPU only; may be read-only: a
  // caller that asks mutable_data() of it must know that it is not. REQUIRES: data aligned to
  // SizeOf(dtype), holding the whole shape.
  static Result<Tensor> Wrap(const void* data, DType dtype, Shape shape,
                             std::shared_ptr<const void> owner);

  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  int64_t rank() const { return static_cast<int64_t>(shape_.size()); }
  int64_t dim(int64_t i) const;  // negative counts from the back
  int64_t elements() const { return elements_; }
  int64_t size_bytes() const { return elements_ * SizeOf(dtype_); }
  Device device() const { return device_; }
  bool defined() const { return data_ != nullptr || elements_ == 0; }

  const void* data() const { return data_; }
  void* mutable_data() { return const_cast<void*>(data_); }
  // REQUIRES: sizeof(T) == SizeOf(dtype()) and a CPU tensor.
  template <typename T>
  const T* as() const {
    CheckTyped(sizeof(T));
    return static_cast<const T*>(data_);
  }
  template <typename T>
  T* mutable_as() {
    CheckTyped(sizeof(T));
    return static_cast<T*>(const_cast<void*>(data_));
  }

  // Rows [begin, end) of the first dimension, sharing storage. kInvalidArgument out of bounds.
  Result<Tensor> Slice(int64_t begin, int64_t end) const;
  // The same elements under another shape of equal count.
  Result<Tensor> Reshape(Shape shape) const;
  // The same bytes under another dtype of equal size.
  Result<Tensor> BitCast(DType dtype) const;
  Result<Tensor> Clone() const;            // a fresh copy on the same device
  Result<Tensor> To(Device device) const;  // a copy on another device; the same tensor if there

 private:
  void CheckTyped(size_t size) const;

  DType dtype_ = DType::kF32;
  Device device_ = Device::kCpu;
  Shape shape_ = {0};
  int64_t elements_ = 0;
  const void* data_ = nullptr;
  std::shared_ptr<const void> owner_;
};

}  // namespace tare
