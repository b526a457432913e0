#pragma once

// Exact dtype conversions, one element at a time, on the host and on the device, all in integers:
// no rounding mode, flush mode, compiler or instruction set can move a bit. Bulk: `ConvertElements`
// and `Convert` below (host only).
//
// Rules, for every pair of dtypes (float: f64 f32 f16 bf16 e4m3 e5m2):
//   same dtype        the bits are copied, NaN payloads too.
//   NaN               becomes the canonical NaN of the destination, sign cleared, payload dropped:
//                     f64 0x7fffffffffffffff, f32 0x7fffffff, f16 and bf16 0x7fff, e4m3 and e5m2
//                     0x7f.
//   float to float    one rounding from the source's exact value, to nearest even; subnormals are
//   kept
//                     on both sides; the sign of zero is kept.
//   overflow          after rounding as if the exponent were unbounded. f32, f16 and bf16 give
//   infinity
//                     of the sign. fp8 asks Fp8Overflow:
//                       kSaturate   the largest finite value of the sign (e4m3 448, e5m2 57344),
//                       also
//                                   for an infinite source: what `cvt.rn.satfinite` does;
//                       kNonFinite  e5m2 gives infinity; e4m3 has none and gives NaN (0x7f).
//   integer to float  one rounding, to nearest even. bool counts as 0 or 1.
//   to integer, bool  never rounds, clamps or wraps: a value that the destination does not hold
//                     exactly is an error that names the element.

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/status.h"
#include "base/thread_pool.h"
#include "tensor/dtype.h"
#include "tensor/hd.h"
#include "tensor/tensor.h"

namespace tare {

enum class Fp8Overflow : uint8_t { kSaturate, kNonFinite };

// The layout of a binary floating-point format.
template <DType kDType>
struct FloatFormat;

template <typename BitsType, int kExponent, int kMantissa, bool kHasInfinity>
struct FloatFormatBase {
  using Bits = BitsType;
  static constexpr int kExponentBits = kExponent;
  static constexpr int kMantissaBits = kMantissa;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr bool kInfinity = kHasInfinity;
  static constexpr uint64_t kSign = uint64_t{1} << (kExponent + kMantissa);
  // Magnitudes. e4m3 has no infinity and one NaN, the all-ones magnitude.
  static constexpr uint64_t kNan = kSign - 1;
  static constexpr uint64_t kInf = kNan >> kMantissa << kMantissa;
  static constexpr uint64_t kMaxFinite = kHasInfinity ? kInf - 1 : kNan - 1;
};
template <>
struct FloatFormat<DType::kF64> : FloatFormatBase<uint64_t, 11, 52, true> {};
template <>
struct FloatFormat<DType::kF32> : FloatFormatBase<uint32_t, 8, 23, true> {};
template <>
struct FloatFormat<DType::kF16> : FloatFormatBase<uint16_t, 5, 10, true> {};
template <>
struct FloatFormat<DType::kBF16> : FloatFormatBase<uint16_t, 8, 7, true> {};
template <>
struct FloatFormat<DType::kE4M3> : FloatFormatBase<uint8_t, 4, 3, false> {};
template <>
struct FloatFormat<DType::kE5M2> : FloatFormatBase<uint8_t, 5, 2, true> {};

TARE_HD uint32_t F32Bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}
TARE_HD float F32FromBits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

namespace internal {

TARE_HD int HighestBit(uint64_t x) {  // REQUIRES: x != 0
#ifdef __CUDA_ARCH__
  return 63 - __clzll(static_cast<long long>(x));
#else
  return 63 - __builtin_clzll(x);
#endif
}

// (-1)^negative * significand * 2^exponent, rounded once to the nearest even value of `To`.
template <DType kTo>
TARE_HD typename FloatFormat<kTo>::Bits EncodeFloat(bool negative, uint64_t significand,
                                                    int exponent, Fp8Overflow overflow) {
  using F = FloatFormat<kTo>;
  const uint64_t sign = negative ? F::kSign : 0;
  if (significand == 0) return static_cast<typename F::Bits>(sign);
  constexpr int kMinExponent = 1 - F::kBias;
  const int top = HighestBit(significand);
  const int e = top + exponent;  // NOLINTBEGIN(clang-analyzer-core.UndefinedBinaryOperatorResult)
  const bool normal = e >= kMinExponent;
  const int shift = (normal ? e : kMinExponent) - F::kMantissaBits - exponent;
  uint64_t kept = 0;
  if (shift <= 0) {
    kept = significand << -shift;
  } else if (shift <= top + 1) {  // else below half of the smallest subnormal: zero
    const uint64_t rest = shift == 64 ? significand : significand & ((uint64_t{1} << shift) - 1);
    const uint64_t half = uint64_t{1} << (shift - 1);
    kept = shift == 64 ? 0 : significand >> shift;
    kept += rest > half || (rest == half && (kept & 1) != 0) ? 1 : 0;
  }
  // A carry is right by itself. NOLINTEND(clang-analyzer-core.UndefinedBinaryOperatorResult)
  uint64_t magnitude = kept;
  if (normal) {
    magnitude = e > F::kBias + 1 ? F::kSign
                                 : (static_cast<uint64_t>(e + F::kBias) << F::kMantissaBits) +
                                       kept - (uint64_t{1} << F::kMantissaBits);
  }
  if (magnitude > F::kMaxFinite) {
    if (F::kMantissaBits <= 3 && overflow == Fp8Overflow::kSaturate) {
      magnitude = F::kMaxFinite;
    } else if (F::kInfinity) {
      magnitude = F::kInf;
    } else {
      return static_cast<typename F::Bits>(F::kNan);
    }
  }
  return static_cast<typename F::Bits>(sign | magnitude);
}

}  // namespace internal

// The bits of one float dtype as the bits of another, by the rules above.
template <DType kFrom, DType kTo>
TARE_HD typename FloatFormat<kTo>::Bits ConvertFloatBits(
    typename FloatFormat<kFrom>::Bits bits, Fp8Overflow overflow = Fp8Overflow::kSaturate) {
  using From = FloatFormat<kFrom>;
  using To = FloatFormat<kTo>;
  if constexpr (kFrom == kTo) {
    return bits;
  } else {
    const uint64_t magnitude = bits & (From::kSign - 1);
    const bool negative = (bits & From::kSign) != 0;
    if (magnitude > (From::kInfinity ? From::kInf : From::kMaxFinite)) {
      return static_cast<typename To::Bits>(To::kNan);
    }
    if (From::kInfinity && magnitude == From::kInf) {
      // Larger than every finite value: the overflow rule decides.
      return internal::EncodeFloat<kTo>(negative, 1, 1 << 14, overflow);
    }
    const int field = static_cast<int>(magnitude >> From::kMantissaBits);
    const uint64_t mantissa = magnitude & ((uint64_t{1} << From::kMantissaBits) - 1);
    const uint64_t significand =
        field == 0 ? mantissa : mantissa | uint64_t{1} << From::kMantissaBits;
    const int exponent = (field == 0 ? 1 : field) - From::kBias - From::kMantissaBits;
    return internal::EncodeFloat<kTo>(negative, significand, exponent, overflow);
  }
}

// Shorthands with f32 on one side; bits of the narrow types are plain integers.
TARE_HD uint16_t F32ToBf16(float x) {
  const uint32_t u = F32Bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
TARE_HD float Bf16ToF32(uint16_t b) {
  return F32FromBits((b & 0x7fffu) > 0x7f80u ? 0x7fffffffu : static_cast<uint32_t>(b) << 16);
}
TARE_HD uint16_t F32ToF16(float x) {
  return ConvertFloatBits<DType::kF32, DType::kF16>(F32Bits(x));
}
TARE_HD float F16ToF32(uint16_t h) {
  return F32FromBits(ConvertFloatBits<DType::kF16, DType::kF32>(h));
}
TARE_HD uint8_t F32ToE4m3(float x, Fp8Overflow overflow = Fp8Overflow::kSaturate) {
  return ConvertFloatBits<DType::kF32, DType::kE4M3>(F32Bits(x), overflow);
}
TARE_HD float E4m3ToF32(uint8_t b) {
  return F32FromBits(ConvertFloatBits<DType::kE4M3, DType::kF32>(b));
}
TARE_HD uint8_t F32ToE5m2(float x, Fp8Overflow overflow = Fp8Overflow::kSaturate) {
  return ConvertFloatBits<DType::kF32, DType::kE5M2>(F32Bits(x), overflow);
}
TARE_HD float E5m2ToF32(uint8_t b) {
  return F32FromBits(ConvertFloatBits<DType::kE5M2, DType::kF32>(b));
}

// `n` elements of dtype `from` at `src` to dtype `to` at `dst` (CPU memory, each aligned to its
// element, not overlapping). kInvalidArgument names the first element that an integer or bool
// destination does not hold; `dst` is then unspecified. A bool source byte other than 0 or 1 is
// kDataLoss. `pool` may be null; the bits never depend on it.
Status ConvertElements(const void* src, DType from, void* dst, DType to, int64_t n,
                       Fp8Overflow overflow = Fp8Overflow::kSaturate, ThreadPool* pool = nullptr);

// A new CPU tensor of dtype `to`; the same tensor when it has that dtype. REQUIRES: CPU tensor.
Result<Tensor> Convert(const Tensor& tensor, DType to,
                       Fp8Overflow overflow = Fp8Overflow::kSaturate, ThreadPool* pool = nullptr);

}  // namespace tare
