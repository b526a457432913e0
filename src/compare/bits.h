#pragma once

// The innermost comparison: two runs of elements of one dtype, bit by bit. Knows nothing of names,
// files or threads. Equal and finite data costs one read of both sides (tried against a plain sum
// by `tare bench diff`); the counting path runs only on blocks that hold a difference or a
// non-finite value.

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "tensor/dtype.h"

namespace tare::compare {

// Where and how two elements differ.
struct Mismatch {
  int64_t index = -1;   // flat, row-major, within the tensor
  uint64_t word_a = 0;  // the bits, zero-extended
  uint64_t word_b = 0;
};

// A named tolerance. It reports beside the bit verdict and never replaces it. An element lies
// inside when it satisfies every bound that is set: distance in ulp, or |a - b| <= abs + rel * |b|.
struct Tier {
  std::string name;
  std::optional<uint64_t> max_ulp;
  std::optional<double> abs;
  std::optional<double> rel;
};
inline constexpr size_t kMaxTiers = 8;

// What a range of elements showed. Masked elements are in `masked` and nowhere else.
struct BitCounts {
  int64_t compared = 0;  // valid elements on both sides
  int64_t masked = 0;
  int64_t mismatches = 0;        // bits differ
  int64_t sign_of_zero = 0;      // of these: +0 against -0
  int64_t non_finite = 0;        // valid elements with a NaN or infinity on either side
  int64_t non_finite_equal = 0;  // of these: the bits agree
  uint64_t max_ulp = 0;          // over mismatches that are finite on both sides
  int64_t max_ulp_index = -1;
  double max_abs = 0;  // of |a - b| over the same, as exact as f64
  double min_abs = 0;
  double sum_abs = 0;
  // Every mismatch has the same bits on that side: the sign of a placeholder.
  bool constant_a = true;
  bool constant_b = true;
  std::array<int64_t, kMaxTiers> outside{};  // mismatches outside each tier
  Mismatch first;                            // lowest index whose bits differ
  Mismatch first_non_finite;                 // lowest index with a non-finite value

  int64_t finite_compared() const { return compared - non_finite; }
  // Joins the counts of a later range of the same tensor.
  void Merge(const BitCounts& later);
};

// Which elements of a tensor count. One byte per position along the leading dimensions, each spread
// over `repeat` consecutive elements. Null data: all.
struct MaskView {
  const uint8_t* data = nullptr;  // 0 or 1
  int64_t repeat = 1;
};

// Compares elements [begin, end) of two tensors whose first elements lie at `a` and `b` (any
// alignment). Indices in the result count from the tensor's start. REQUIRES: at most kMaxTiers
// tiers.
BitCounts CompareRange(DType dtype, const void* a, const void* b, int64_t begin, int64_t end,
                       const MaskView& mask = {}, std::span<const Tier> tiers = {});

// Representable values between two finite floats (0 for +0 against -0); for integers |a - b|, for
// bool 0 or 1. nullopt when either is a NaN or an infinity.
std::optional<uint64_t> UlpDistance(DType dtype, uint64_t word_a, uint64_t word_b);

bool IsFinite(DType dtype, uint64_t word);
bool IsZero(DType dtype, uint64_t word);
// Exact value; integers above 2^53 are rounded. NaN and infinities as such.
double WordToDouble(DType dtype, uint64_t word);
uint64_t LoadWord(DType dtype, const void* data, int64_t index);
// "0x3f80" with the dtype's width.
std::string WordHex(DType dtype, uint64_t word);

}  // namespace tare::compare
