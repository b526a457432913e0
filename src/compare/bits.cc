#include "compare/bits.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/check.h"

namespace tare::compare {
namespace {

// A floating format as bit fields. kInfinities: an all-ones exponent means infinity or NaN; without
// (e4m3) only the all-ones pattern is a NaN.
template <typename W, int kExponent, int kMantissa, bool kInfinities>
struct FloatFormat {
  using Word = W;
  static constexpr bool kIsFloat = true;
  static constexpr int kExponentBits = kExponent;
  static constexpr int kMantissaBits = kMantissa;
  static constexpr Word kSign = static_cast<Word>(Word{1} << (kExponent + kMantissa));
  static constexpr Word kMagnitude = static_cast<Word>(kSign - 1);
  static constexpr Word kNonFiniteMask =
      static_cast<Word>(kInfinities ? kMagnitude - ((Word{1} << kMantissa) - 1) : kMagnitude);
};
template <typename W, bool kSignedness>
struct IntFormat {
  using Word = W;
  static constexpr bool kIsFloat = false;
  static constexpr bool kSigned = kSignedness;
};

// Calls f with the format of `dtype`.
template <typename F>
auto WithFormat(DType dtype, F f) {
  switch (dtype) {
    case DType::kF64:
      return f(FloatFormat<uint64_t, 11, 52, true>{});
    case DType::kF32:
      return f(FloatFormat<uint32_t, 8, 23, true>{});
    case DType::kF16:
      return f(FloatFormat<uint16_t, 5, 10, true>{});
    case DType::kBF16:
      return f(FloatFormat<uint16_t, 8, 7, true>{});
    case DType::kE4M3:
      return f(FloatFormat<uint8_t, 4, 3, false>{});
    case DType::kE5M2:
      return f(FloatFormat<uint8_t, 5, 2, true>{});
    case DType::kI64:
      return f(IntFormat<uint64_t, true>{});
    case DType::kI32:
      return f(IntFormat<uint32_t, true>{});
    case DType::kI16:
      return f(IntFormat<uint16_t, true>{});
    case DType::kI8:
      return f(IntFormat<uint8_t, true>{});
    case DType::kU8:
    case DType::kBool:
      return f(IntFormat<uint8_t, false>{});
  }
  TARE_CHECK(false) << "no such dtype";
  __builtin_unreachable();
}

template <typename Word>
Word Load(const void* data, int64_t index) {
  Word word;
  std::memcpy(&word, static_cast<const char*>(data) + index * static_cast<int64_t>(sizeof(Word)),
              sizeof(Word));
  return word;
}

template <typename Format, typename Word = typename Format::Word>
bool FiniteWord(Word w) {
  if constexpr (Format::kIsFloat) {
    return (w & Format::kNonFiniteMask) != Format::kNonFiniteMask;
  } else {
    return true;
  }
}

// Position of a finite float on the line of representable values; both zeros are 0.
template <typename Format, typename Word = typename Format::Word>
int64_t LinePosition(Word w) {
  const int64_t magnitude = static_cast<int64_t>(w & Format::kMagnitude);
  return (w & Format::kSign) ? -magnitude : magnitude;
}

template <typename Format, typename Word = typename Format::Word>
uint64_t Distance(Word a, Word b) {
  if constexpr (Format::kIsFloat) {
    const uint64_t x = static_cast<uint64_t>(LinePosition<Format>(a));
    const uint64_t y = static_cast<uint64_t>(LinePosition<Format>(b));
    return LinePosition<Format>(a) > LinePosition<Format>(b) ? x - y : y - x;
  } else if constexpr (Format::kSigned) {
    using Signed = std::make_signed_t<Word>;
    // The sign is what is meant. NOLINTBEGIN(bugprone-signed-char-misuse)
    const auto x = static_cast<int64_t>(static_cast<Signed>(a));
    const auto y = static_cast<int64_t>(static_cast<Signed>(b));
    // NOLINTEND(bugprone-signed-char-misuse)
    return x > y ? static_cast<uint64_t>(x) - static_cast<uint64_t>(y)
                 : static_cast<uint64_t>(y) - static_cast<uint64_t>(x);
  } else {
    return a > b ? a - b : b - a;
  }
}

// The weight of the last mantissa bit, by exponent field: a table, because ldexp is a call.
template <typename Format>
std::array<double, size_t{1} << Format::kExponentBits> ScalesOf() {
  std::array<double, size_t{1} << Format::kExponentBits> scales{};
  constexpr int kBias = (1 << (Format::kExponentBits - 1)) - 1;
  for (int e = 0; e < static_cast<int>(scales.size()); ++e) {
    scales[static_cast<size_t>(e)] =
        std::ldexp(1.0, std::max(e, 1) - kBias - Format::kMantissaBits);
  }
  return scales;
}

template <typename Format, typename Word = typename Format::Word>
double ToDouble(Word w) {
  if constexpr (!Format::kIsFloat) {
    if constexpr (Format::kSigned) {
      return static_cast<double>(static_cast<std::make_signed_t<Word>>(w));
    } else {
      return static_cast<double>(w);
    }
  } else if constexpr (sizeof(Word) == 8) {
    return std::bit_cast<double>(w);
  } else if constexpr (sizeof(Word) == 4) {
    return static_cast<double>(std::bit_cast<float>(w));
  } else {
    const bool negative = (w & Format::kSign) != 0;
    const int exponent = static_cast<int>((w & Format::kMagnitude) >> Format::kMantissaBits);
    const int mantissa = static_cast<int>(w & ((Word{1} << Format::kMantissaBits) - 1));
    double value;
    if (!FiniteWord<Format>(w)) {
      const bool infinite = Format::kNonFiniteMask != Format::kMagnitude && mantissa == 0;
      value = infinite ? std::numeric_limits<double>::infinity()
                       : std::numeric_limits<double>::quiet_NaN();
    } else {
      // Exact: a small integer times a power of two.
      static const auto kScales = ScalesOf<Format>();
      const int significand = exponent == 0 ? mantissa : (1 << Format::kMantissaBits) + mantissa;
      value = significand * kScales[static_cast<size_t>(exponent)];
    }
    return negative ? -value : value;
  }
}

// True when the block holds equal bits and only finite values. Written so that the compiler turns
// it into vector code: both conditions are ORs without a branch, a cache line of each side at a
// time. The prefetch distance was measured on two 256 MiB runs: 0.89 of a plain sum without
// prefetch, 1.0 at 2 KiB.
template <typename Format>
bool CleanBlock(const char* a, const char* b, int64_t n) {
  using Word = typename Format::Word;
  constexpr int64_t kSize = static_cast<int64_t>(sizeof(Word));
  constexpr int64_t kLine = 64 / kSize;
  constexpr int64_t kAhead = 2048;
  Word differs = 0;
  Word special = 0;
  const auto one = [&](int64_t i) {
    Word x, y;
    std::memcpy(&x, a + i * kSize, sizeof(Word));
    std::memcpy(&y, b + i * kSize, sizeof(Word));
    differs |= static_cast<Word>(x ^ y);
    if constexpr (Format::kIsFloat) {
      special |= (x & Format::kNonFiniteMask) == Format::kNonFiniteMask ? Word(~Word{0}) : Word{0};
    }
  };
  int64_t i = 0;
  for (; i + kLine <= n; i += kLine) {
    __builtin_prefetch(a + i * kSize + kAhead);
    __builtin_prefetch(b + i * kSize + kAhead);
    for (int64_t k = 0; k < kLine; ++k) one(i + k);
  }
  for (; i < n; ++i) one(i);
  return (differs | special) == 0;
}

bool Inside(const Tier& tier, uint64_t ulp, double distance, double b) {
  if (tier.max_ulp && ulp > *tier.max_ulp) return false;
  if (tier.abs || tier.rel) {
    return distance <= tier.abs.value_or(0) + tier.rel.value_or(0) * std::fabs(b);
  }
  return true;
}

template <typename Format>
void CountBlock(const void* a, const void* b, int64_t begin, int64_t end,
                std::span<const Tier> tiers, BitCounts* counts) {
  using Word = typename Format::Word;
  for (int64_t i = begin; i < end; ++i) {
    const Word x = Load<Word>(a, i);
    const Word y = Load<Word>(b, i);
    const bool finite = FiniteWord<Format>(x) && FiniteWord<Format>(y);
    if (x == y && finite) continue;
    if (!finite) {
      ++counts->non_finite;
      if (x == y) ++counts->non_finite_equal;
      if (counts->first_non_finite.index < 0) counts->first_non_finite = {i, x, y};
      if (x == y) continue;
    }
    ++counts->mismatches;
    if (counts->first.index < 0) counts->first = {i, x, y};
    counts->constant_a = counts->constant_a && x == counts->first.word_a;
    counts->constant_b = counts->constant_b && y == counts->first.word_b;
    if (!finite) {
      for (size_t t = 0; t < tiers.size(); ++t) ++counts->outside[t];
      continue;
    }
    if constexpr (Format::kIsFloat) {
      if (((x | y) & Format::kMagnitude) == 0) ++counts->sign_of_zero;
    }
    const uint64_t ulp = Distance<Format>(x, y);
    const double distance = std::fabs(ToDouble<Format>(x) - ToDouble<Format>(y));
    counts->min_abs = counts->max_ulp_index < 0 ? distance : std::min(counts->min_abs, distance);
    if (ulp > counts->max_ulp || counts->max_ulp_index < 0) {
      counts->max_ulp = ulp;
      counts->max_ulp_index = i;
    }
    counts->max_abs = std::max(counts->max_abs, distance);
    counts->sum_abs += distance;
    for (size_t t = 0; t < tiers.size(); ++t) {
      if (!Inside(tiers[t], ulp, distance, ToDouble<Format>(y))) ++counts->outside[t];
    }
  }
  counts->compared += end - begin;
}

// 8 KiB of each side: both stay in the first-level cache for the counting pass.
constexpr int64_t kBlockBytes = 8192;

template <typename Format>
void CompareValid(const void* a, const void* b, int64_t begin, int64_t end,
                  std::span<const Tier> tiers, BitCounts* counts) {
  using Word = typename Format::Word;
  constexpr int64_t kBlock = kBlockBytes / static_cast<int64_t>(sizeof(Word));
  const char* pa = static_cast<const char*>(a);
  const char* pb = static_cast<const char*>(b);
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t stop = std::min(end, i + kBlock);
    const int64_t offset = i * static_cast<int64_t>(sizeof(Word));
    if (CleanBlock<Format>(pa + offset, pb + offset, stop - i)) {
      counts->compared += stop - i;
    } else {
      CountBlock<Format>(a, b, i, stop, tiers, counts);
    }
  }
}

}  // namespace

void BitCounts::Merge(const BitCounts& later) {
  compared += later.compared;
  masked += later.masked;
  mismatches += later.mismatches;
  sign_of_zero += later.sign_of_zero;
  non_finite += later.non_finite;
  non_finite_equal += later.non_finite_equal;
  if (later.max_ulp_index >= 0) {
    min_abs = max_ulp_index < 0 ? later.min_abs : std::min(min_abs, later.min_abs);
  }
  if (later.max_ulp_index >= 0 && (max_ulp_index < 0 || later.max_ulp > max_ulp)) {
    max_ulp = later.max_ulp;
    max_ulp_index = later.max_ulp_index;
  }
  max_abs = std::max(max_abs, later.max_abs);
  sum_abs += later.sum_abs;
  if (first.index >= 0 && later.first.index >= 0) {
    constant_a = constant_a && later.constant_a && first.word_a == later.first.word_a;
    constant_b = constant_b && later.constant_b && first.word_b == later.first.word_b;
  } else if (first.index < 0) {
    constant_a = later.constant_a;
    constant_b = later.constant_b;
    first = later.first;
  }
  for (size_t t = 0; t < kMaxTiers; ++t) outside[t] += later.outside[t];
  if (first_non_finite.index < 0) first_non_finite = later.first_non_finite;
}

BitCounts CompareRange(DType dtype, const void* a, const void* b, int64_t begin, int64_t end,
                       const MaskView& mask, std::span<const Tier> tiers) {
  TARE_CHECK(tiers.size() <= kMaxTiers);
  BitCounts counts;
  WithFormat(dtype, [&](auto format) {
    using Format = decltype(format);
    if (mask.data == nullptr) {
      CompareValid<Format>(a, b, begin, end, tiers, &counts);
      return;
    }
    // Runs of positions with the same mask value.
    int64_t i = begin;
    while (i < end) {
      int64_t position = i / mask.repeat;
      const uint8_t valid = mask.data[position];
      int64_t stop = (position + 1) * mask.repeat;
      while (stop < end && mask.data[stop / mask.repeat] == valid) stop += mask.repeat;
      stop = std::min(stop, end);
      if (valid) {
        CompareValid<Format>(a, b, i, stop, tiers, &counts);
      } else {
        counts.masked += stop - i;
      }
      i = stop;
    }
  });
  return counts;
}

std::optional<uint64_t> UlpDistance(DType dtype, uint64_t word_a, uint64_t word_b) {
  if (!IsFinite(dtype, word_a) || !IsFinite(dtype, word_b)) return std::nullopt;
  return WithFormat(dtype, [&](auto format) -> uint64_t {
    using Word = typename decltype(format)::Word;
    return Distance<decltype(format)>(static_cast<Word>(word_a), static_cast<Word>(word_b));
  });
}

bool IsFinite(DType dtype, uint64_t word) {
  return WithFormat(dtype, [&](auto format) {
    return FiniteWord<decltype(format)>(static_cast<typename decltype(format)::Word>(word));
  });
}

bool IsZero(DType dtype, uint64_t word) {
  return WithFormat(dtype, [&](auto format) {
    if constexpr (decltype(format)::kIsFloat) {
      return (word & decltype(format)::kMagnitude) == 0;
    } else {
      return word == 0;
    }
  });
}

double WordToDouble(DType dtype, uint64_t word) {
  return WithFormat(dtype, [&](auto format) {
    return ToDouble<decltype(format)>(static_cast<typename decltype(format)::Word>(word));
  });
}

uint64_t LoadWord(DType dtype, const void* data, int64_t index) {
  return WithFormat(dtype, [&](auto format) -> uint64_t {
    return Load<typename decltype(format)::Word>(data, index);
  });
}

std::string WordHex(DType dtype, uint64_t word) {
  return fmt::format("0x{:0{}x}", word, 2 * SizeOf(dtype));
}

}  // namespace tare::compare
