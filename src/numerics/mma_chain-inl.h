// The arithmetic of the fast Hopper step, for each SIMD target (see mma_simd.cc). No include guard
// of its own: Highway's toggles.
//
// One group, 64 columns, kR rows of A:
//   1. Exponents, 64 to a vector: the largest byte sum is the largest exponent of the products.
//   2. A chain of FMAs under round-toward-zero, one for each product, that starts at an anchor
//      1.5 * 2^(emax - F + p), p the explicit bits of the chain's type: the last place of every
//      value of the chain is then the unit 2^(emax - F), so that each FMA rounds its term *down* to
//      the unit by itself. The chain is f64 for bf16 and f16, f32 for fp8: the sum of a group lies
//      below 2^32 (2^21 for fp8) units.
//   3. The rule cuts toward zero, which is one unit more for every negative term that is not a
//      multiple of the unit. No term is: A is scaled by 1 + 2^-29 (fp8: 1 + 2^-16), which moves a
//      term by less than its own last bit and less than a unit, so it passes no multiple; a zero
//      operand stands as +-2^-500 (2^-80), whose products are below any unit; c has a low bit set.
//      So each negative term, zeros by their operands' signs, is one unit low, and their number is
//      a population count of signs.

#if defined(TARE_NUMERICS_MMA_CHAIN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TARE_NUMERICS_MMA_CHAIN_INL_H_
#undef TARE_NUMERICS_MMA_CHAIN_INL_H_
#else
#define TARE_NUMERICS_MMA_CHAIN_INL_H_
#endif

#include <immintrin.h>

#include <cstring>
#include <type_traits>

#include "hwy/highway.h"
#include "numerics/mma_internal.h"

HWY_BEFORE_NAMESPACE();
namespace tare::numerics::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int kBytes = HWY_TARGET == HWY_AVX2 ? 32 : 64;
template <class T>
using Tag = hn::FixedTag<T, kBytes / sizeof(T)>;
using DF = Tag<float>;
using DU = Tag<uint32_t>;
using DB = Tag<int8_t>;
constexpr int kByteVectors = static_cast<int>(kMmaPanel) / kBytes;

// The chain of a type, and the accumulator as it walks: not zero, with a low bit set.
template <class T>
struct ChainForm;
template <>
struct ChainForm<double> {  // bf16, f16: F = 25
  using Bits = uint64_t;
  static constexpr int kPoint = 52;
  static constexpr double kAnchorUp = 0x1p27;    // 2^(52 - F)
  static constexpr Bits kKept = ~Bits{0} << 29;  // an f32's bits
  static constexpr Bits kMark = Bits{1} << 20;   // less than a unit, above the signs' bits
  static constexpr int kTogether = 2;            // rows whose sums are in registers at once
  static constexpr int kStep = HWY_TARGET == HWY_AVX2 ? 4 : 8;  // vectors of columns of each
  static constexpr int kLargestBase = 240 - 127, kSmallestBase = 100 - 127;
};
template <>
struct ChainForm<float> {  // fp8: F = 13
  using Bits = uint32_t;
  static constexpr int kPoint = 23;
  static constexpr float kAnchorUp = 0x1p10f;
  static constexpr Bits kKept = ~Bits{0} << 10;
  static constexpr Bits kMark = 1;
  static constexpr int kTogether = HWY_TARGET == HWY_AVX2 ? 2 : 4;
  static constexpr int kStep = 4;
  static constexpr int kLargestBase = 60, kSmallestBase = -60;  // all of fp8
};

template <MmaType kType>
using ChainOf = std::conditional_t<FormatOf(kType).bytes == 1, float, double>;
template <class T>
constexpr int kLanesOf = kBytes / static_cast<int>(sizeof(T));
template <class T>
constexpr int kVectorsOf = static_cast<int>(kMmaPanel) / kLanesOf<T>;

// out[r] = for each column the largest sum of exponents over the group, of kR rows at once; at
// least kMmaFar, which says that nothing near the group's base was found. No sum leaves int8.
template <int kGroup, int kR>
HWY_INLINE void LargestExponents(const uint32_t* const (&ae)[kR], const int8_t* HWY_RESTRICT be,
                                 int8_t (&out)[kR][kMmaPanel]) {
  const DU du;
  const DB db;
  for (int v = 0; v < kByteVectors; ++v) {
    const int8_t* e = be + v * kBytes;
    hn::Vec<DB> best[kR][2];
    for (int r = 0; r < kR; ++r) best[r][0] = best[r][1] = hn::Set(db, internal::kMmaFar);
#pragma GCC unroll 8
    for (int i = 0; i < kGroup; i += 2) {
      const auto b0 = hn::Load(db, e + i * kMmaPanel);
      const auto b1 = hn::Load(db, e + (i + 1) * kMmaPanel);
      for (int r = 0; r < kR; ++r) {
        const auto a0 = hn::BitCast(db, hn::Set(du, ae[r][i]));
        const auto a1 = hn::BitCast(db, hn::Set(du, ae[r][i + 1]));
        best[r][0] = hn::Max(best[r][0], hn::Add(a0, b0));
        best[r][1] = hn::Max(best[r][1], hn::Add(a1, b1));
      }
    }
    for (int r = 0; r < kR; ++r)
      hn::Store(hn::Max(best[r][0], best[r][1]), db, out[r] + v * kBytes);
  }
}

// Columns whose largest exponent is saturated, as a bit each.
HWY_INLINE uint64_t FarColumns(const int8_t* largest) {
  const DB db;
  uint64_t far = 0;
  for (int v = 0; v < kByteVectors; ++v) {
    uint8_t bits[8] = {};
    hn::StoreMaskBits(
        db, hn::Eq(hn::Load(db, largest + v * kBytes), hn::Set(db, internal::kMmaFar)), bits);
    uint64_t m;
    std::memcpy(&m, bits, 8);
    far |= m << (v * kBytes % 64);
  }
  return far;
}

// What a group's columns bring beside their products, of one row.
template <class T>
struct GroupScratch;
template <>
struct GroupScratch<double> {
  HWY_ALIGN uint16_t anchor[kMmaPanel];  // the high 16 bits of 1.5 * 2^(largest exponent)
#if HWY_TARGET > HWY_AVX3_DL
  HWY_ALIGN uint32_t negatives[kMmaPanel];
#endif
};
template <>
struct GroupScratch<float> {
  HWY_ALIGN int8_t largest[kMmaPanel];
};

// base: exponent that the bytes of `largest` are relative to. signs: a bit for each element of the
// group, of A broadcast and of B's columns.
HWY_INLINE void Prepare(const int8_t* HWY_RESTRICT largest, int base, uint32_t a_signs,
                        const uint32_t* HWY_RESTRICT b_signs, GroupScratch<double>& out) {
  using DW = Tag<int16_t>;
  const DW dw;
  const auto offset = hn::Set(dw, static_cast<int16_t>((1023 + base) * 16 + 8));
  constexpr int kWords = kBytes / 2;
  for (int j = 0; j < kMmaPanel; j += kWords) {
    const auto e = hn::PromoteTo(dw, hn::Load(hn::Rebind<int8_t, DW>(), largest + j));
    hn::Store(hn::Add(hn::ShiftLeft<4>(e), offset), dw, reinterpret_cast<int16_t*>(out.anchor + j));
  }
#if HWY_TARGET > HWY_AVX3_DL
  const DU du;
  const auto a = hn::Set(du, a_signs);
  for (int j = 0; j < kMmaPanel; j += kLanesOf<uint32_t>) {
    hn::Store(hn::PopulationCount(hn::Xor(a, hn::Load(du, b_signs + j))), du, out.negatives + j);
  }
#else
  (void)a_signs;
  (void)b_signs;
#endif
}

// Vector v of 1.5 * 2^(largest exponent).
HWY_INLINE hn::Vec<Tag<double>> Anchor(const GroupScratch<double>& s, int, int v) {
#if HWY_TARGET == HWY_AVX2
  const __m256i words =
      _mm256_cvtepu16_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(s.anchor + v * 4)));
  return hn::Vec<Tag<double>>{_mm256_castsi256_pd(_mm256_slli_epi64(words, 48))};
#else
  // The word of column l to the top of lane l; the other words of the index are not used.
  HWY_ALIGN static constexpr uint16_t kTop[4][32] = {
      {0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3,
       0, 0, 0, 4, 0, 0, 0, 5, 0, 0, 0, 6, 0, 0, 0, 7},
      {0, 0, 0, 8,  0, 0, 0, 9,  0, 0, 0, 10, 0, 0, 0, 11,
       0, 0, 0, 12, 0, 0, 0, 13, 0, 0, 0, 14, 0, 0, 0, 15},
      {0, 0, 0, 16, 0, 0, 0, 17, 0, 0, 0, 18, 0, 0, 0, 19,
       0, 0, 0, 20, 0, 0, 0, 21, 0, 0, 0, 22, 0, 0, 0, 23},
      {0, 0, 0, 24, 0, 0, 0, 25, 0, 0, 0, 26, 0, 0, 0, 27,
       0, 0, 0, 28, 0, 0, 0, 29, 0, 0, 0, 30, 0, 0, 0, 31}};
  const __m512i words = _mm512_load_si512(s.anchor + v / 4 * 32);
  return hn::Vec<Tag<double>>{_mm512_castsi512_pd(
      _mm512_maskz_permutexvar_epi16(0x88888888u, _mm512_load_si512(kTop[v % 4]), words))};
#endif
}

// How many terms are negative, c included.
HWY_INLINE hn::Vec<Tag<uint64_t>> Negatives(const GroupScratch<double>& s, uint64_t a_signs,
                                            const uint64_t* HWY_RESTRICT b_signs, int v,
                                            hn::Vec<Tag<double>> c) {
  using D = Tag<uint64_t>;
  const D d;
#if HWY_TARGET <= HWY_AVX3_DL
  (void)s;
  // By bits: a xor b where c has none, a and b where it has one. Bits 0 to 15 of c are zero; bit 63
  // is set in a and b, the others are zero in both.
  const __m512i a = _mm512_set1_epi64(static_cast<int64_t>(a_signs));
  const __m512i b = _mm512_load_si512(b_signs + v * 8);
  const __m512i signs = _mm512_ternarylogic_epi64(a, b, _mm512_castpd_si512(c.raw), 0x94);
  return hn::PopulationCount(hn::Vec<D>{signs});
#else
  (void)a_signs;
  (void)b_signs;
  const auto products =
      hn::PromoteTo(d, hn::Load(hn::Rebind<uint32_t, D>(), s.negatives + v * kLanesOf<uint64_t>));
  return hn::Add(products, hn::ShiftRight<63>(hn::BitCast(d, c)));
#endif
}

HWY_INLINE void Prepare(const int8_t* HWY_RESTRICT largest, int, uint32_t, const uint32_t*,
                        GroupScratch<float>& out) {
  std::memcpy(out.largest, largest, sizeof(out.largest));
}

HWY_INLINE hn::Vec<DF> Anchor(const GroupScratch<float>& s, int base, int v) {
  using DI = Tag<int32_t>;
  const DI di;
  const auto e =
      hn::PromoteTo(di, hn::Load(hn::Rebind<int8_t, DI>(), s.largest + v * kLanesOf<float>));
  const auto offset = hn::Set(di, (127 + base) * (1 << 23) + (1 << 22));
  return hn::BitCast(DF(), hn::Add(hn::ShiftLeft<23>(e), offset));
}

HWY_INLINE hn::Vec<DU> Negatives(const GroupScratch<float>&, uint32_t a_signs,
                                 const uint32_t* HWY_RESTRICT b_signs, int v, hn::Vec<DF> c) {
  const DU du;
  const auto products = hn::PopulationCount(
      hn::Xor(hn::Set(du, a_signs), hn::Load(du, b_signs + v * kLanesOf<float>)));
  return hn::Add(products, hn::ShiftRight<31>(hn::BitCast(du, c)));
}

// The operands of one group: kR rows of A, 64 columns of B.
template <class T, int kR>
struct GroupOperands {
  using Bits = typename ChainForm<T>::Bits;
  const T* a[kR];  // [group], scaled by kOff
  const T* b;      // [group][64]
  Bits a_signs[kR];
  const Bits* b_signs;  // [64]
  int base[kR];
};

// c[r] [64], the accumulators as they walk, over one group; columns from 0 to kUsed vectors.
template <class T, int kGroup, int kUsed, int kR>
HWY_INLINE void Chain(const GroupOperands<T, kR>& x, const GroupScratch<T> (&s)[kR],
                      T* const (&c)[kR]) {
  using Form = ChainForm<T>;
  using Bits = typename Form::Bits;
  using D = Tag<T>;
  using DBits = Tag<Bits>;
  const D d;
  const DBits dbits;
  constexpr int kL = kLanesOf<T>;
  constexpr int kS = kUsed < Form::kStep ? kUsed : Form::kStep;
  constexpr Bits kHalf = Bits{1} << (Form::kPoint - 1);
  constexpr Bits kSign = Bits{1} << (sizeof(T) * 8 - 1);
  const auto up = hn::Set(d, Form::kAnchorUp);
  for (int v0 = 0; v0 < kUsed; v0 += kS) {
    HWY_ALIGN T anchors[kR][kS * kL];
    hn::Vec<D> sum[kR][kS];
    for (int r = 0; r < kR; ++r) {
      for (int v = 0; v < kS; ++v) {
        const auto acc = hn::Load(d, c[r] + (v0 + v) * kL);
        // |c| with a mantissa in [1.5, 1.75): only its exponent counts, and the chain stays in its
        // binade.
        const auto safe = hn::BitCast(d, hn::OrAnd(hn::Set(dbits, kHalf), hn::BitCast(dbits, acc),
                                                   hn::Set(dbits, ~(kSign | kHalf >> 1))));
        const auto largest = hn::Max(safe, Anchor(s[r], x.base[r], v0 + v));
        hn::Vec<D> start;
        if constexpr (std::is_same_v<T, double>) {
          hn::Store(largest, d, anchors[r] + v * kL);
          start = hn::MulAdd(largest, up, acc);
        } else {
          // c may be subnormal (a marked zero): an FMA would take a detour, an addition does not.
          const auto anchor = hn::Mul(largest, up);
          hn::Store(anchor, d, anchors[r] + v * kL);
          start = hn::Add(anchor, acc);
        }
        const auto low = Negatives(s[r], x.a_signs[r], x.b_signs, v0 + v, acc);
        sum[r][v] = hn::BitCast(d, hn::Add(hn::BitCast(dbits, start), low));
      }
    }
    const T* column = x.b + v0 * kL;
#pragma GCC unroll 2
    for (int i = 0; i < kGroup; ++i, column += kMmaPanel) {
      hn::Vec<D> ai[kR];
      for (int r = 0; r < kR; ++r) ai[r] = hn::Set(d, x.a[r][i]);
      for (int v = 0; v < kS; ++v) {
        const auto b = hn::Load(d, column + v * kL);
        for (int r = 0; r < kR; ++r) sum[r][v] = hn::MulAdd(ai[r], b, sum[r][v]);
      }
    }
    for (int r = 0; r < kR; ++r) {
      for (int v = 0; v < kS; ++v) {
        const auto anchor = hn::Load(d, anchors[r] + v * kL);
        hn::Vec<D> total;  // exact
        if constexpr (std::is_same_v<T, double>) {
          total = hn::NegMulAdd(anchor, up, sum[r][v]);
        } else {
          total = hn::Sub(sum[r][v], anchor);
        }
        const auto cut = hn::OrAnd(hn::Set(dbits, Form::kMark), hn::BitCast(dbits, total),
                                   hn::Set(dbits, Form::kKept));
        hn::Store(hn::BitCast(d, cut), d, c[r] + (v0 + v) * kL);
      }
    }
  }
}

}  // namespace tare::numerics::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
