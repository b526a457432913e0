#pragma once

// A tile of a contraction in the sm90-mma step on the CPU: many output elements, each one f32
// accumulator that walks K in groups, with the bits of Sm90Step (numerics/sm90.h) whatever kernel
// runs. Operands are packed once: A by rows, B by panels of kMmaPanel columns.
//
//   MmaA a = MmaA::Pack(type, x, m, k, x_stride, 1);      // x [m, k]
//   MmaB b = MmaB::Pack(type, w, n, k, w_stride, 1);      // w [n, k]; (1, stride) for a [k, n]
//   matrix MmaTile(a, 0, m, b, 0, n, 0, k, c, n);                // c [m, n] continues from what it
//   holds
//
// A chain may be cut at any group boundary and continued later: its whole state is c.

#include <cstdint>
#include <new>
#include <string_view>
#include <vector>

#include "numerics/sm90.h"

namespace tare::numerics {

inline constexpr int64_t kMmaPanel = 64;  // columns of a panel of B

// The kernels. All give the same bits; kAuto takes the fastest that this CPU runs.
enum class MmaKernel : uint8_t { kAuto, kPlain, kAvx2, kAvx512, kAvx512Dl };
inline constexpr MmaKernel kMmaFastKernels[] = {MmaKernel::kAvx2, MmaKernel::kAvx512,
                                                MmaKernel::kAvx512Dl};
// "auto", "plain", "avx2", "avx512", "avx512-dl" (Ice Lake and later: VPOPCNTDQ).
std::string_view MmaKernelName(MmaKernel kernel);
bool MmaKernelSupported(MmaKernel kernel, MmaType type);
MmaKernel MmaBestKernel(MmaType type);

namespace internal {

// Vectors of a whole cache line are loaded from these buffers.
template <class T>
struct LineAllocator {
  using value_type = T;
  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}  // NOLINT(google-explicit-constructor)
  T* allocate(size_t n) {
    return static_cast<T*>(::operator new (n * sizeof(T), std::align_val_t{64}));
  }
  void deallocate(T* p, size_t) { ::operator delete (p, std::align_val_t{64}); }
  template <class U>
  bool operator==(const LineAllocator<U>&) const {
    return true;
  }
};
template <class T>
using LineVector = std::vector<T, LineAllocator<T>>;

// One group of one row of A, or of one panel of B, as the fast kernels see it.
struct MmaGroup {
  int16_t base = 0;       // largest exponent of a non-zero operand
  int16_t chain = 0;      // the same; kMmaNoChain where the group is special or zero
  bool special = false;   // holds a NaN or an infinity: the plain step takes it
  bool zero = false;      // holds nothing but zeros
  bool has_zero = false;  // holds one
};

inline constexpr int16_t kMmaNoChain = 1 << 13;

// Exponents are bytes relative to the group's base: 0 down to kMmaFar, where they saturate; a zero
// operand is kMmaZero. The largest sum of two, if above kMmaFar, is that of a true product.
inline constexpr int8_t kMmaZero = -64;
inline constexpr int8_t kMmaFar = -63;

struct MmaRows {
  MmaType type = MmaType::kBF16;
  int64_t rows = 0;
  int64_t k = 0;         // as given
  int64_t padded_k = 0;  // whole groups
  // Elements of A at [row][padded_k], of B at [panel][padded_k][kMmaPanel].
  LineVector<uint8_t> codes;        // as given; empty for bf16 and f16, where halves hold the same
  LineVector<uint16_t> halves;      // the value in bf16 (f16 for f16), exact
  LineVector<int8_t> exponents;     // B
  LineVector<uint32_t> exponents4;  // A: the byte four times, one broadcast from memory
  // A, as the chain multiplies it (mma_chain-inl.h): f64 of bf16 and f16, f32 of fp8.
  LineVector<double> chain64;
  LineVector<float> chain32;
  // Bit i is the sign of element i of the group: A [row][group], B [panel][group][kMmaPanel].
  LineVector<uint32_t> signs;
  LineVector<MmaGroup> groups;  // [row or panel][padded_k / group]
};

}  // namespace internal

class MmaA {
 public:
  // Element (m, k) is codes[m * row_stride + k * k_stride]; strides in elements.
  static MmaA Pack(MmaType type, const void* codes, int64_t rows, int64_t k, int64_t row_stride,
                   int64_t k_stride);
  MmaType type() const { return p_.type; }
  int64_t rows() const { return p_.rows; }
  int64_t k() const { return p_.k; }
  const internal::MmaRows& packed() const { return p_; }

 private:
  internal::MmaRows p_;
};

class MmaB {
 public:
  // Element (n, k) is codes[n * row_stride + k * k_stride].
  static MmaB Pack(MmaType type, const void* codes, int64_t rows, int64_t k, int64_t row_stride,
                   int64_t k_stride);
  MmaType type() const { return p_.type; }
  int64_t rows() const { return p_.rows; }
  int64_t k() const { return p_.k; }
  const internal::MmaRows& packed() const { return p_; }

 private:
  internal::MmaRows p_;
};

// c[(m - m0) * c_stride + (n - n0)] continues over k in [k0, k1) for m in [m0, m1), n in [n0, n1).
// REQUIRES: one type and one K; n0 a multiple of kMmaPanel; k0, and k1 unless it is K, whole
// groups. Thread-safe: threads may share a and b and write different parts of c.
void MmaTile(const MmaA& a, int64_t m0, int64_t m1, const MmaB& b, int64_t n0, int64_t n1,
             int64_t k0, int64_t k1, float* c, int64_t c_stride,
             MmaKernel kernel = MmaKernel::kAuto);

}  // namespace tare::numerics
