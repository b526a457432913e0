#pragma once

// Small helpers of the row operators' host code: argument checks that name what is wrong, dtype
// dispatch, and cutting rows into pieces for the pool.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "numerics/fp.h"
#include "ops/op.h"
#include "tensor/convert.h"
#include "tensor/dtype.h"

namespace tare::ops {

// Element types in kernels: float for f32, uint16_t for the bits of a bf16.
inline Status CheckRowDType(const char* op, const char* what, DType dtype) {
  if (dtype == DType::kF32 || dtype == DType::kBF16) return Ok();
  return Unsupported("{}: {} is {}; f32 and bf16 are built", op, what, DTypeName(dtype));
}

inline Status CheckCpu(const char* op, const Ctx& ctx) {
  if (ctx.device != Device::kCpu) {
    return Unsupported("{}: not built for device {}", op, DeviceName(ctx.device));
  }
  if (ctx.pool == nullptr) return InvalidArgument("{}: a CPU call needs ctx.pool", op);
  return Ok();
}

inline Status CheckPointer(const char* op, const char* what, const void* pointer,
                           int64_t elements) {
  if (pointer == nullptr && elements > 0) return InvalidArgument("{}: {} is null", op, what);
  return Ok();
}

inline Status CheckRows(const char* op, int64_t rows) {
  if (rows < 0) return InvalidArgument("{}: {} rows; 0 or more", op, rows);
  return Ok();
}

inline Status CheckDim(const char* op, const char* what, int64_t value,
                       int64_t max = int64_t{1} << 31) {
  if (value < 1 || value > max)
    return InvalidArgument("{}: {} is {}; 1 to {}", op, what, value, max);
  return Ok();
}

// Resolves a stride argument: 0 means dense; a smaller one than the row overlaps and is refused.
inline Result<int64_t> StrideOf(const char* op, const char* what, int64_t stride, int64_t width) {
  if (stride == 0) return width;
  if (stride < width) return InvalidArgument("{}: {} is {}; at least {}", op, what, stride, width);
  return stride;
}

// Calls body(T()) with T = float or uint16_t. REQUIRES: CheckRowDType.
template <class Body>
auto WithRowDType(DType dtype, const Body& body) {
  return dtype == DType::kF32 ? body(float()) : body(uint16_t());  // NOLINT(bugprone-branch-clone)
}

// Rows per piece so that a piece is worth a wake-up (about 32 KiB of f32), the last pieces stay
// small enough to balance, and one row is never cut.
inline int64_t RowGrain(int64_t rows, int64_t width, int threads) {
  const int64_t enough = std::max<int64_t>(1, 8192 / std::max<int64_t>(1, width));
  const int64_t fair = std::max<int64_t>(1, rows / (4 * threads));
  return std::max(enough, std::min<int64_t>(fair, 64 * enough));
}

inline int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// f32 scratch of one thread, kept between calls so that a row costs no allocation.
inline float* Scratch(size_t floats) {
  thread_local std::vector<float> buffer;
  if (buffer.size() < floats) buffer.resize(floats);
  return buffer.data();
}

// Scalar twins of the vector loads and stores, for fault paths and rare cases.
inline float ToFloat(float x) { return x; }
inline float ToFloat(uint16_t x) { return Bf16ToF32(x); }
inline void PutFloat(float x, float* p) { *p = numerics::Canonical(x); }
inline void PutFloat(float x, uint16_t* p) { *p = F32ToBf16(x); }
inline float ViaBf16(float x) { return Bf16ToF32(F32ToBf16(x)); }

}  // namespace tare::ops
