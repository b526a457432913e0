#include "tensor/tensor.h"

#include <cstdlib>
#include <cstring>

#include "base/huge_pages.h"

#ifdef TARE_WITH_CUDA
#include "tensor/device_memory.h"
#endif

namespace tare {

std::string ShapeToString(const Shape& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

Result<int64_t> ElementCount(const Shape& shape) {
  int64_t count = 1;
  for (int64_t d : shape) {
    if (d < 0) return InvalidArgument("shape {} has a negative dimension", ShapeToString(shape));
    if (__builtin_mul_overflow(count, d, &count)) {
      return InvalidArgument("shape {} has more than 2^63 elements", ShapeToString(shape));
    }
  }
  return count;
}

constexpr int64_t kHugeBytes = int64_t{4} << 20;

Result<Tensor> Tensor::Allocate(DType dtype, Shape shape, Device device) {
  TARE_ASSIGN_OR_RETURN(const int64_t elements, ElementCount(shape));
  int64_t size = 0;
  if (__builtin_mul_overflow(elements, SizeOf(dtype), &size)) {
    return InvalidArgument("a {} tensor of shape {} has more than 2^63 bytes", DTypeName(dtype),
                           ShapeToString(shape));
  }
#ifndef TARE_WITH_CUDA
  if (device != Device::kCpu) return Unsupported("this build has no {} part", DeviceName(device));
#endif
  Tensor t;
  t.dtype_ = dtype;
  t.device_ = device;
  t.shape_ = std::move(shape);
  t.elements_ = elements;
#ifdef TARE_WITH_CUDA
  if (size > 0 && device == Device::kCuda) {
    TARE_ASSIGN_OR_RETURN(t.owner_, AllocateCuda(static_cast<size_t>(size)));
    t.data_ = t.owner_.get();
    return t;
  }
#endif
  // Large ones are streamed through, and often only partly used (a KV cache): huge pages, and zeros
  // from the kernel where they are touched.
  if (size >= kHugeBytes) {
    std::shared_ptr<void> data = AllocateHuge(static_cast<size_t>(size));
    if (data == nullptr) return Error(Code::kExhausted, "no memory for {} bytes", size);
    t.data_ = data.get();
    t.owner_ = std::move(data);
    return t;
  }
  if (size > 0) {
    const size_t padded = (static_cast<size_t>(size) + 63) / 64 * 64;
    void* data = std::aligned_alloc(64, padded);
    if (data == nullptr) return Error(Code::kExhausted, "no memory for {} bytes", padded);
    std::memset(data, 0, padded);
    t.data_ = data;
    t.owner_ =
        std::shared_ptr<const void>(data, [](const void* p) { std::free(const_cast<void*>(p)); });
  }
  return t;
}

Result<Tensor> Tensor::Wrap(const void* data, DType dtype, Shape shape,
                            std::shared_ptr<const void> owner) {
  TARE_ASSIGN_OR_RETURN(const int64_t elements, ElementCount(shape));
  if (elements > 0 && data == nullptr)
    return InvalidArgument("null data for {}", ShapeToString(shape));
  if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(SizeOf(dtype)) != 0) {
    return InvalidArgument("data of a {} tensor is not aligned to {} bytes", DTypeName(dtype),
                           SizeOf(dtype));
  }
  Tensor t;
  t.dtype_ = dtype;
  t.shape_ = std::move(shape);
  t.elements_ = elements;
  t.data_ = data;
  t.owner_ = std::move(owner);
  return t;
}

int64_t Tensor::dim(int64_t i) const {
  const int64_t r = rank();
  const int64_t at = i < 0 ? i + r : i;
  TARE_CHECK(at >= 0 && at < r) << "dimension " << i << " of shape " << ShapeToString(shape_);
  return shape_[static_cast<size_t>(at)];
}

void Tensor::CheckTyped(size_t size) const {
  TARE_CHECK(device_ == Device::kCpu) << "typed access to a " << DeviceName(device_) << " tensor";
  TARE_CHECK(static_cast<int64_t>(size) == SizeOf(dtype_))
      << "element of " << size << " bytes asked of a " << DTypeName(dtype_) << " tensor";
}

Result<Tensor> Tensor::Slice(int64_t begin, int64_t end) const {
  if (rank() == 0 || begin < 0 || end < begin || end > shape_[0]) {
    return InvalidArgument("rows [{}, {}) of shape {}", begin, end, ShapeToString(shape_));
  }
  Tensor t = *this;
  const int64_t row = shape_[0] == 0 ? 0 : elements_ / shape_[0];
  t.shape_[0] = end - begin;
  t.elements_ = row * (end - begin);
  if (data_ != nullptr) t.data_ = static_cast<const char*>(data_) + begin * row * SizeOf(dtype_);
  return t;
}

Result<Tensor> Tensor::Reshape(Shape shape) const {
  TARE_ASSIGN_OR_RETURN(const int64_t elements, ElementCount(shape));
  if (elements != elements_) {
    return InvalidArgument("shape {} does not hold the elements of {}", ShapeToString(shape),
                           ShapeToString(shape_));
  }
  Tensor t = *this;
  t.shape_ = std::move(shape);
  return t;
}

Result<Tensor> Tensor::BitCast(DType dtype) const {
  if (SizeOf(dtype) != SizeOf(dtype_)) {
    return InvalidArgument("bits of {} are not bits of {}", DTypeName(dtype_), DTypeName(dtype));
  }
  Tensor t = *this;
  t.dtype_ = dtype;
  return t;
}

namespace {

Result<Tensor> Copy(const Tensor& from, Device device) {
  TARE_ASSIGN_OR_RETURN(Tensor to, Tensor::Allocate(from.dtype(), from.shape(), device));
  if (from.size_bytes() == 0) return to;
  const auto bytes = static_cast<size_t>(from.size_bytes());
#ifdef TARE_WITH_CUDA
  if (device == Device::kCuda || from.device() == Device::kCuda) {
    TARE_RETURN_IF_ERROR(
        CopyBytesCuda(to.mutable_data(), device, from.data(), from.device(), bytes));
    return to;
  }
#endif
  std::memcpy(to.mutable_data(), from.data(), bytes);
  return to;
}

}  // namespace

Result<Tensor> Tensor::Clone() const { return Copy(*this, device_); }

Result<Tensor> Tensor::To(Device device) const {
  if (device == device_) return *this;
  return Copy(*this, device);
}

}  // namespace tare
