#pragma once

// Operands for tests and fuzzing of the sm90-mma step: every class of bit pattern that the rule
// treats apart, mixed inside one group. Deterministic: Philox over a seed.

#include <cstdint>
#include <string_view>

#include "numerics/philox.h"
#include "numerics/sm90.h"

namespace tare::numerics {

enum class Pattern : uint8_t {
  kNormal,     // sign, fraction random, exponents of a bell shape around one
  kWide,       // exponents over the whole range
  kZeros,      // half of the operands zero
  kCancel,     // pairs that cancel almost wholly
  kSubnormal,  // many subnormal operands
  kFinite,     // any finite bits
  kAny,        // any bits: NaN and infinities too
  kLarge,      // near overflow
  kSmall,      // products near and below the smallest f32
  kCarry,      // significands of all ones: the largest sums
};
inline constexpr int kPatternCount = 10;

inline std::string_view PatternName(Pattern p) {
  constexpr std::string_view kNames[] = {"normal", "wide", "zeros", "cancel", "subnormal",
                                         "finite", "any",  "large", "small",  "carry"};
  return kNames[static_cast<int>(p)];
}

class PatternSource {
 public:
  explicit PatternSource(uint64_t seed) : seed_(seed) {}

  uint32_t Next() {
    if (used_ == 4) {
      block_ = Philox4x32(
          PhiloxBlock{{static_cast<uint32_t>(at_), static_cast<uint32_t>(at_ >> 32), 0x7465u, 0}},
          static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32));
      ++at_;
      used_ = 0;
    }
    return block_.v[used_++];
  }
  int64_t Below(int64_t n) {
    return static_cast<int64_t>((static_cast<uint64_t>(Next()) * static_cast<uint64_t>(n)) >> 32);
  }

  template <MmaType kType>
  uint32_t Operand(Pattern pattern) {
    constexpr MmaFormat kFormat = FormatOf(kType);
    constexpr int kM = kFormat.significand_bits;
    constexpr uint32_t kFraction = (1u << kM) - 1;
    constexpr uint32_t kTop = (1u << kFormat.exponent_bits) - 1;
    constexpr int kTotal = 1 + kFormat.exponent_bits + kM;
    const uint32_t r = Next();
    const uint32_t sign = (r & 1) << (kTotal - 1);
    uint32_t fraction = (r >> 1) & kFraction;
    uint32_t e = 0;
    // Largest exponent field that is surely finite.
    const uint32_t finite_top = kFormat.has_infinity ? kTop - 1 : kTop;
    switch (pattern) {
      case Pattern::kNormal:
      case Pattern::kCancel: {
        // Exponent of a bell shape: about 0, -1, -2 with falling weights.
        const int drop = __builtin_ctz(Next() | 0x10000u);
        const int up = (r >> 30) == 0 ? 1 : 0;
        const int x = kFormat.bias + up - (drop < kFormat.bias ? drop : kFormat.bias - 1);
        e = static_cast<uint32_t>(x);
        break;
      }
      case Pattern::kWide:
        e = 1 + static_cast<uint32_t>(Below(kTop - 1));
        break;
      case Pattern::kZeros:
        if ((r >> 31) != 0) return sign;
        e = static_cast<uint32_t>(kFormat.bias) - static_cast<uint32_t>(Below(3));
        break;
      case Pattern::kSubnormal:
        e = (r >> 30) == 0 ? static_cast<uint32_t>(Below(kTop)) : 0;
        break;
      case Pattern::kFinite:
        e = static_cast<uint32_t>(Below(finite_top + 1));
        break;
      case Pattern::kAny:
        return (r >> 1) & ((1u << kTotal) - 1);
      case Pattern::kLarge:
        e = finite_top - static_cast<uint32_t>(Below((kTop >> 1) + 2 < 6 ? (kTop >> 1) + 2 : 6));
        if ((r >> 29) != 0) e = (static_cast<uint32_t>(kFormat.bias) + finite_top) / 2;
        break;
      case Pattern::kSmall:
        e = static_cast<uint32_t>(Below(kFormat.bias));
        if (kType == MmaType::kBF16) e = 40 + static_cast<uint32_t>(Below(30));
        break;
      case Pattern::kCarry:
        fraction = kFraction - static_cast<uint32_t>(Below(2));
        e = static_cast<uint32_t>(kFormat.bias) + ((r >> 28) == 0 ? 0u : 1u);
        if ((r >> 20 & 7) != 0) return (e << kM) | fraction;  // mostly one sign
        break;
    }
    uint32_t bits = sign | (e << kM) | fraction;
    // e4m3 keeps its one NaN for kAny.
    if (!kFormat.has_infinity && e == kTop && fraction == kFraction) bits &= ~1u;
    return bits;
  }

  // a [m, k] and b [n, k]; returns the class that was drawn.
  template <MmaType kType>
  Pattern FillOperands(typename MmaStorage<kType>::Type* a, int64_t m,
                       typename MmaStorage<kType>::Type* b, int64_t n, int64_t k) {
    const Pattern pattern = static_cast<Pattern>(Below(kPatternCount));
    FillWith<kType>(pattern, a, m, b, n, k);
    return pattern;
  }

  template <MmaType kType>
  void FillWith(Pattern pattern, typename MmaStorage<kType>::Type* a, int64_t m,
                typename MmaStorage<kType>::Type* b, int64_t n, int64_t k) {
    using T = typename MmaStorage<kType>::Type;
    for (int64_t i = 0; i < m * k; ++i) a[i] = static_cast<T>(Operand<kType>(pattern));
    for (int64_t i = 0; i < n * k; ++i) b[i] = static_cast<T>(Operand<kType>(pattern));
    if (pattern == Pattern::kCancel) {
      // The odd element repeats the even one, b's with the other sign and sometimes the last bit.
      constexpr int kTop = FormatOf(kType).bytes * 8 - 1;
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 1; j < k; j += 2) a[i * k + j] = a[i * k + j - 1];
      }
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 1; j < k; j += 2) {
          b[i * k + j] =
              static_cast<T>(b[i * k + j - 1] ^ (1u << kTop) ^ (Next() >> 30 == 0 ? 1u : 0u));
        }
      }
    }
  }

  template <MmaType kType>
  void FillAccumulators(Pattern pattern, float* c, int64_t n) {
    constexpr uint32_t kCut = ~((1u << FormatOf(kType).result_cut) - 1);
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t r = Next();
      uint32_t bits = r;
      switch (Below(8)) {
        case 0:
          bits = 0;
          break;  // +0
        case 1:
          bits = (r & 0x807fffffu) | ((110u + (r >> 24 & 31)) << 23);
          break;  // near one
        case 2:
          bits = (r & 0x807fffffu) | (127u << 23);
          break;
        case 3:
          bits = r & 0x807fffffu;
          break;  // subnormal
        case 4:
          bits = (r & 0x807fffffu) | ((240u + (r >> 24 & 7)) << 23);
          break;
        case 5:
          bits = (r & 0x80000000u) | (127u << 23);
          break;
        default:
          break;  // any exponent
      }
      const bool special = (bits & 0x7f800000u) == 0x7f800000u;
      if (special && pattern != Pattern::kAny) bits &= 0x80000000u | 0x3fffffffu;
      // A chain's accumulator has the result's mantissa; the first one may have any.
      if ((Next() >> 30) != 0 && !special) bits &= kCut;
      c[i] = FloatOf(bits);
    }
  }

 private:
  uint64_t seed_;
  uint64_t at_ = 0;
  int used_ = 4;
  PhiloxBlock block_{};
};

}  // namespace tare::numerics
