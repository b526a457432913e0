// The fast kernels of the Hopper step: one source, compiled for AVX2 and for AVX-512.
//
// For 64 columns and one row of A, a group takes two passes.
//   1. Exponents, 64 to a vector: the largest byte sum gives emax of the products.
//   2. Products, f32 lanes: a * b is exact (at most 22 significant bits); times 2^(F - emax), exact
//      again; conversion to int32 by truncation is then the rule's cut toward zero at 2^(emax - F);
//      int32 additions are exact. The sum becomes f32 under round-toward-zero and is scaled back.
// fp8 sums need 21 bits above the unit, which f32 holds: there one FMA chain under
// round-toward-zero starts at 1.5 * 2^(emax - F + 23), where the last place is the unit, so that
// every FMA rounds its product down to the unit by itself. The rule cuts toward zero, which differs
// for negative products that are not multiples of the unit: those are counted, 64 to a vector, from
// the exponents of the operands' lowest set bits, whose sum is that of the product.
//
// What this cannot represent is found by its traces and given to the plain step: NaN and infinity
// (marked when packed; in c they convert to INT_MIN), a product more than 2^62 below the largest of
// its panel, an exponent near the ends of f32, and a sum beyond int32.
//
// The tile runs under MXCSR round-toward-zero: every other operation in it is exact.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "numerics/mma_simd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "numerics/mma_internal.h"

HWY_BEFORE_NAMESPACE();
namespace tare::numerics::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using internal::MmaGroup;
using internal::MmaRows;

#if HWY_TARGET == HWY_AVX2
using D = hn::FixedTag<float, 8>;
#else
using D = hn::FixedTag<float, 16>;
#endif
using DI = hn::RebindToSigned<D>;
using DU = hn::RebindToUnsigned<D>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(D()));
constexpr int kStep = 4;  // vectors of columns with their sums in registers
constexpr int kVectors = static_cast<int>(kMmaPanel) / kLanes;
using DB = hn::FixedTag<int8_t, kLanes * 4>;
constexpr int kByteVectors = static_cast<int>(kMmaPanel) / (kLanes * 4);
using DQ = hn::FixedTag<int8_t, kLanes>;  // bytes for one vector of lanes

// cvttps2dq without Highway's repair of overflow: INT_MIN is wanted there.
HWY_INLINE hn::Vec<DI> Truncate(hn::Vec<D> v) {
#if HWY_TARGET == HWY_AVX2
  return hn::Vec<DI>{_mm256_cvttps_epi32(v.raw)};
#else
  return hn::Vec<DI>{_mm512_cvttps_epi32(v.raw)};
#endif
}

// A group that holds nothing but zeros: c as the rule returns it.
template <MmaType kType>
HWY_INLINE float ZeroGroup(float c) {
  constexpr uint32_t kCut = ~((1u << FormatOf(kType).result_cut) - 1);
  if (c != c) return CanonicalNan();
  const uint32_t bits = BitsOf(c) & kCut;
  return (bits << 1) == 0 ? 0.0f : FloatOf(bits);
}

template <MmaType kType>
HWY_NOINLINE void SlowGroup(const MmaRows& a, const MmaRows& b, int64_t row, int64_t panel,
                            int64_t k, uint64_t lanes, float* c) {
  const auto* ac = internal::MmaCodes<kType>(a) + row * a.padded_k + k;
  const auto* bc = internal::MmaCodes<kType>(b) + (panel * b.padded_k + k) * kMmaPanel;
  for (; lanes != 0; lanes &= lanes - 1) {
    const int j = __builtin_ctzll(lanes);
    c[j] = Sm90Step<kType>(ac, bc + j, c[j], 1, kMmaPanel);
  }
}

constexpr int64_t kRows = 8;  // rows of A that walk a panel together
// Rows whose sums are in registers at once: they share the loads of B.
constexpr int kTogether = HWY_TARGET == HWY_AVX2 ? 1 : 2;

// Rows of A in a block of K as the products want them.
constexpr int64_t kBlock = 64;
struct RowsOfA {
  HWY_ALIGN float value[kRows * kBlock];
  // fp8: the exponent of the lowest set bit four times, kMmaNoBit for a zero; and kMmaPanel where
  // the value is negative, else 0.
  HWY_ALIGN uint32_t lowest4[kRows * kBlock];
  HWY_ALIGN int32_t flip[kRows * kBlock];
};

// Exponents of lowest set bits are bytes relative to the group's base: from 0 down to -34 (e5m2),
// so their sums lie in [-68, 0]. One that holds a zero lies in [26, 120], above kMmaAllCut, the
// limit under which every other product is cut.
constexpr int32_t kMmaNoBit = 60;
constexpr int32_t kMmaAllCut = 10;

// What pass 1 leaves for pass 2, 64 columns of one row.
struct Scaled {
  HWY_ALIGN float scale[kMmaPanel];  // 2^(F - emax); fp8: the anchor
  HWY_ALIGN int32_t
      sum[kMmaPanel];  // c, cut, in units of 2^(emax - F); fp8: where the chain starts
  HWY_ALIGN int8_t lowest[kMmaPanel];  // fp8: emax - F relative to the group's base
};

// out[r] = for each column the largest sum of exponents over the group, of R rows at once. No sum
// leaves int8: the smallest is twice kMmaZero.
template <int kGroup, int R>
HWY_INLINE void LargestExponents(const uint32_t* const (&ae)[R], const int8_t* HWY_RESTRICT be,
                                 int8_t (&out)[R][kMmaPanel]) {
  const DU du;
  const DB db;
  for (int v = 0; v < kByteVectors; ++v) {
    const int8_t* e = be + v * kLanes * 4;
    hn::Vec<DB> best[R][2];
    for (int r = 0; r < R; ++r) best[r][0] = best[r][1] = hn::Set(db, 2 * internal::kMmaZero);
#pragma GCC unroll 8
    for (int i = 0; i < kGroup; i += 2) {
      const auto b0 = hn::Load(db, e + i * kMmaPanel);
      const auto b1 = hn::Load(db, e + (i + 1) * kMmaPanel);
      for (int r = 0; r < R; ++r) {
        const auto a0 = hn::BitCast(db, hn::Set(du, ae[r][i]));
        const auto a1 = hn::BitCast(db, hn::Set(du, ae[r][i + 1]));
        best[r][0] = hn::Max(best[r][0], hn::Add(a0, b0));
        best[r][1] = hn::Max(best[r][1], hn::Add(a1, b1));
      }
    }
    for (int r = 0; r < R; ++r)
      hn::Store(hn::Max(best[r][0], best[r][1]), db, out[r] + v * kLanes * 4);
  }
}

// Columns whose largest exponent is saturated, as a bit each.
HWY_INLINE uint64_t FarColumns(const int8_t* product_max) {
  const DB db;
  uint64_t far = 0;
  for (int v = 0; v < kByteVectors; ++v) {
    uint8_t bits[8] = {};
    const auto largest = hn::Load(db, product_max + v * kLanes * 4);
    hn::StoreMaskBits(db, hn::Lt(largest, hn::Set(db, internal::kMmaFar + 1)), bits);
    uint64_t m;
    std::memcpy(&m, bits, 8);
    far |= m << (v * kLanes * 4 % 64);
  }
  return far;
}

// The rest of pass 1 of the group at k for one row: true if pass 2 may follow, else c is already
// the result.
template <MmaType kType, int kUsed>
HWY_INLINE bool Pass1(const MmaRows& a, const MmaRows& b, int64_t row, int64_t panel, int64_t k,
                      uint64_t lanes, const int8_t* HWY_RESTRICT product_max, float* HWY_RESTRICT c,
                      Scaled& out) {
  constexpr MmaFormat kFormat = FormatOf(kType);
  constexpr int kGroup = kFormat.group;
  const D d;
  const DI di;
  const MmaGroup x = a.groups[static_cast<size_t>((row * a.padded_k + k) / kGroup)];
  const MmaGroup y = b.groups[static_cast<size_t>((panel * b.padded_k + k) / kGroup)];
  const int base = x.base + y.base + 127;  // biased exponent of the largest conceivable product
  if (HWY_UNLIKELY(x.special || y.special || base > 240 || base < 100)) {
    if (!(x.special || y.special) && (x.zero || y.zero)) {
      for (int j = 0; j < kUsed * kLanes; ++j) c[j] = ZeroGroup<kType>(c[j]);
    } else {
      SlowGroup<kType>(a, b, row, panel, k, lanes, c);
    }
    return false;
  }
  if (HWY_UNLIKELY((FarColumns(product_max) & lanes) != 0)) {
    SlowGroup<kType>(a, b, row, panel, k, lanes, c);
    return false;
  }
  const auto exponent_mask = hn::Set(di, 0x7f800000);
  const auto bias = hn::Set(di, base << 23);
  auto largest = hn::Zero(di);
  for (int v = 0; v < kUsed; ++v) {
    const auto acc = hn::LoadU(d, c + v * kLanes);
    const auto products = hn::Add(
        hn::ShiftLeft<23>(hn::PromoteTo(di, hn::Load(DQ(), product_max + v * kLanes))), bias);
    const auto w = hn::Max(hn::And(hn::BitCast(di, acc), exponent_mask), products);
    if constexpr (kFormat.bytes == 1) {
      largest = hn::Max(largest, w);
      const auto anchor = hn::Mul(hn::BitCast(d, w), hn::Set(d, 1536.0f));
      // c cut toward zero: its own sign on the anchor.
      const auto signed_anchor = hn::CopySignToAbs(anchor, acc);
      const auto cut = hn::Sub(hn::Add(acc, signed_anchor), signed_anchor);
      hn::Store(anchor, d, out.scale + v * kLanes);
      hn::Store(hn::BitCast(di, hn::Add(anchor, cut)), di, out.sum + v * kLanes);
      const auto unit = hn::Sub(hn::ShiftRight<23>(w), hn::Set(di, base + kFormat.f));
      hn::Store(hn::DemoteTo(DQ(), hn::Min(unit, hn::Set(di, kMmaAllCut))), DQ(),
                out.lowest + v * kLanes);
      continue;
    }
    const auto scale = hn::BitCast(d, hn::Sub(hn::Set(di, (254 + kFormat.f) << 23), w));
    hn::Store(scale, d, out.scale + v * kLanes);
    hn::Store(Truncate(hn::Mul(acc, scale)), di, out.sum + v * kLanes);
  }
  if constexpr (kFormat.bytes == 1) {
    // A large or special c: the anchor would overflow.
    if (HWY_UNLIKELY(!hn::AllFalse(di, hn::Gt(largest, hn::Set(di, 230 << 23))))) {
      SlowGroup<kType>(a, b, row, panel, k, lanes, c);
      return false;
    }
  }
  return true;
}

// Pass 2 for fp8, R rows: bk [group, 64] as f32; x, at: where the group of the first row begins;
// low [group][2][64]: exponents of the lowest set bits of negative elements, then of positive ones,
// kMmaNoBit elsewhere.
template <MmaType kType, int kUsed, int R>
HWY_INLINE void Pass2Chain(const RowsOfA& x, int64_t at, const float* HWY_RESTRICT bk,
                           const int8_t* HWY_RESTRICT low, const Scaled* const (&in)[R],
                           float* const (&c)[R]) {
  constexpr MmaFormat kFormat = FormatOf(kType);
  constexpr int kS = kUsed < kStep ? kUsed : kStep;
  const D d;
  const DI di;
  const DU du;
  const DB db;
  // Negative products that the chain rounds away from zero, by column.
  HWY_ALIGN int8_t count[R][kMmaPanel];
  for (int v = 0; v < kByteVectors; ++v) {
    hn::Vec<DB> counted[R];
    hn::Vec<DB> limit[R];
    for (int r = 0; r < R; ++r) {
      counted[r] = hn::Zero(db);
      limit[r] = hn::Load(db, in[r]->lowest + v * kLanes * 4);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kFormat.group; ++i) {
      for (int r = 0; r < R; ++r) {
        const int64_t ai = at + r * kBlock + i;
        const auto lowest =
            hn::Add(hn::BitCast(db, hn::Set(du, x.lowest4[ai])),
                    hn::Load(db, low + i * 2 * kMmaPanel + x.flip[ai] + v * kLanes * 4));
        const auto cut = hn::Lt(lowest, limit[r]);
#if HWY_TARGET == HWY_AVX2
        counted[r] = hn::Sub(counted[r], hn::VecFromMask(db, cut));
#else
        counted[r] = hn::Vec<DB>{
            _mm512_mask_add_epi8(counted[r].raw, cut.raw, counted[r].raw, hn::Set(db, 1).raw)};
#endif
      }
    }
    for (int r = 0; r < R; ++r) hn::Store(counted[r], db, count[r] + v * kLanes * 4);
  }
  const auto kept = hn::BitCast(d, hn::Set(di, -(1 << kFormat.result_cut)));
  for (int v0 = 0; v0 < kUsed; v0 += kS) {
    hn::Vec<D> sum[R][kS];
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kS; ++v)
        sum[r][v] = hn::BitCast(d, hn::Load(di, in[r]->sum + (v0 + v) * kLanes));
    }
    const float* column = bk + v0 * kLanes;
#pragma GCC unroll 4
    for (int i = 0; i < kFormat.group; ++i, column += kMmaPanel) {
      hn::Vec<D> ai[R];
      for (int r = 0; r < R; ++r) ai[r] = hn::Set(d, x.value[at + r * kBlock + i]);
      for (int v = 0; v < kS; ++v) {
        const auto b = hn::Load(d, column + v * kLanes);
        for (int r = 0; r < R; ++r) sum[r][v] = hn::MulAdd(ai[r], b, sum[r][v]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kS; ++v) {
        const int64_t to = (v0 + v) * kLanes;
        // One more in the last place is one unit more.
        const auto bits =
            hn::Add(hn::BitCast(di, sum[r][v]), hn::PromoteTo(di, hn::Load(DQ(), count[r] + to)));
        const auto total = hn::Sub(hn::BitCast(d, bits), hn::Load(d, in[r]->scale + to));  // exact
        hn::StoreU(hn::And(total, kept), d, c[r] + to);
      }
    }
  }
}

// Pass 2, R rows: ak[r] [group], bk [group, 64] as f32. Leaves c[r] as it was and says so in fit[r]
// when the sums do not fit.
template <MmaType kType, int kUsed, int R>
HWY_INLINE void Pass2(const float* const (&ak)[R], const float* HWY_RESTRICT bk,
                      const Scaled* const (&in)[R], float* const (&c)[R], bool (&fit)[R]) {
  constexpr MmaFormat kFormat = FormatOf(kType);
  constexpr int kS = kUsed < kStep ? kUsed : kStep;
  const D d;
  const DI di;
  const DU du;
  // |sum| beyond this may have wrapped, or holds an INT_MIN of a special c.
  const auto limit = hn::Set(du, kFormat.bytes == 2 ? 2090000000u : 1u << 29);
  HWY_ALIGN float next[R][kMmaPanel];
  hn::Vec<DU> worst[R];
  for (int r = 0; r < R; ++r) worst[r] = hn::Zero(du);
  for (int v0 = 0; v0 < kUsed; v0 += kS) {
    hn::Vec<DI> sum[R][kS];
    hn::Vec<D> scale[R][kS];
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kS; ++v) {
        scale[r][v] = hn::Load(d, in[r]->scale + (v0 + v) * kLanes);
        sum[r][v] = hn::Load(di, in[r]->sum + (v0 + v) * kLanes);
      }
    }
    const float* at = bk + v0 * kLanes;
#pragma GCC unroll 2
    for (int i = 0; i < kFormat.group; ++i, at += kMmaPanel) {
      hn::Vec<D> ai[R];
      for (int r = 0; r < R; ++r) ai[r] = hn::Set(d, ak[r][i]);
      for (int v = 0; v < kS; ++v) {
        const auto column = hn::Load(d, at + v * kLanes);
        for (int r = 0; r < R; ++r) {
          const auto p = hn::Mul(ai[r], column);
          sum[r][v] = hn::Add(sum[r][v], Truncate(hn::Mul(p, scale[r][v])));
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < kS; ++v) {
        worst[r] = hn::Max(worst[r], hn::BitCast(du, hn::Abs(sum[r][v])));
        const auto unit =
            hn::BitCast(d, hn::Sub(hn::Set(di, 254 << 23), hn::BitCast(di, scale[r][v])));
        hn::Store(hn::Mul(hn::ConvertTo(d, sum[r][v]), unit), d, next[r] + (v0 + v) * kLanes);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    fit[r] = hn::AllFalse(du, hn::Gt(worst[r], limit));
    if (HWY_UNLIKELY(!fit[r])) continue;
    for (int v = 0; v < kUsed; ++v)
      hn::StoreU(hn::Load(d, next[r] + v * kLanes), d, c[r] + v * kLanes);
  }
}

// R rows of the group at k through both passes; `at` is where the first one's group begins in x.
// bk: this group of the panel as f32.
template <MmaType kType, int kUsed, int R>
HWY_INLINE void GroupOfRows(const MmaRows& a, const RowsOfA& x, int64_t at, const MmaRows& b,
                            int64_t row, int64_t panel, int64_t k, const float* HWY_RESTRICT bk,
                            const int8_t* HWY_RESTRICT low, uint64_t lanes, float* c,
                            int64_t c_stride) {
  constexpr int kGroup = FormatOf(kType).group;
  Scaled scaled[R];
  HWY_ALIGN int8_t product_max[R][kMmaPanel];
  const uint32_t* ae[R];
  const float* ak[R];
  float* cr[R];
  const Scaled* in[R];
  for (int r = 0; r < R; ++r) {
    ae[r] = &a.exponents4[static_cast<size_t>((row + r) * a.padded_k + k)];
    ak[r] = x.value + at + r * kBlock;
    cr[r] = c + r * c_stride;
    in[r] = &scaled[r];
  }
  LargestExponents<kGroup, R>(
      ae, &b.exponents[static_cast<size_t>((panel * b.padded_k + k) * kMmaPanel)], product_max);
  bool go[R];
  bool all = true;
  for (int r = 0; r < R; ++r) {
    go[r] = Pass1<kType, kUsed>(a, b, row + r, panel, k, lanes, product_max[r], cr[r], scaled[r]);
    all = all && go[r];
  }
  if (HWY_UNLIKELY(!all)) {
    for (int r = 0; r < R && R > 1; ++r) {
      if (!go[r]) continue;
      const float* const ak1[1] = {ak[r]};
      const Scaled* const in1[1] = {in[r]};
      float* const c1[1] = {cr[r]};
      if constexpr (FormatOf(kType).bytes == 1) {
        Pass2Chain<kType, kUsed, 1>(x, at + r * kBlock, bk, low, in1, c1);
      } else {
        bool fit[1];
        Pass2<kType, kUsed, 1>(ak1, bk, in1, c1, fit);
        if (!fit[0]) SlowGroup<kType>(a, b, row + r, panel, k, lanes, cr[r]);
      }
    }
    return;
  }
  if constexpr (FormatOf(kType).bytes == 1) {
    Pass2Chain<kType, kUsed, R>(x, at, bk, low, in, cr);
  } else {
    bool fit[R];
    Pass2<kType, kUsed, R>(ak, bk, in, cr, fit);
    for (int r = 0; r < R; ++r) {
      if (HWY_UNLIKELY(!fit[r])) SlowGroup<kType>(a, b, row + r, panel, k, lanes, cr[r]);
    }
  }
}

// Rows [m0, m0 + rows) of c (64 columns each, c_stride apart) walk the groups of [k0, k1). bf holds
// the panel from k0 on. All rows take a group before the next one, so that the latency of one row's
// chain hides behind the others.
template <MmaType kType, int kUsed>
void RowsPanel(const MmaRows& a, const RowsOfA& x, const MmaRows& b, int64_t m0, int64_t rows,
               int64_t panel, int64_t k0, int64_t k1, const float* bf, const int8_t* low,
               uint64_t lanes, float* c, int64_t c_stride) {
  constexpr MmaFormat kFormat = FormatOf(kType);
  for (int64_t k = k0; k < k1; k += kFormat.group) {
    const float* bk = bf + (k - k0) * kMmaPanel;
    const int8_t* lk = low + (k - k0) * 2 * kMmaPanel;
    int64_t r = 0;
    for (; r + kTogether <= rows; r += kTogether) {
      GroupOfRows<kType, kUsed, kTogether>(a, x, r * kBlock + k - k0, b, m0 + r, panel, k, bk, lk,
                                           lanes, c + r * c_stride, c_stride);
    }
    for (; r < rows; ++r) {
      GroupOfRows<kType, kUsed, 1>(a, x, r * kBlock + k - k0, b, m0 + r, panel, k, bk, lk, lanes,
                                   c + r * c_stride, c_stride);
    }
  }
}

template <MmaType kType>
HWY_INLINE hn::Vec<D> LoadHalves(const uint16_t* in) {
  const D d;
  if constexpr (kType == MmaType::kF16) {
#if HWY_TARGET == HWY_AVX2
    return hn::Vec<D>{_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)))};
#else
    return hn::Vec<D>{_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)))};
#endif
  } else {
    const auto bits = hn::PromoteTo(DI(), hn::LoadU(hn::Rebind<uint16_t, D>(), in));
    return hn::BitCast(d, hn::ShiftLeft<16>(bits));
  }
}

// The exponent of the lowest set bit of x, relative to base, or kMmaNoBit for a zero.
HWY_INLINE hn::Vec<DI> LowestBit(hn::Vec<D> x, int base) {
  const D d;
  const DI di;
  const auto bits = hn::BitCast(di, x);
  const auto significand = hn::Or(hn::And(bits, hn::Set(di, 0x7fffff)), hn::Set(di, 0x800000));
  const auto lowest = hn::ConvertTo(d, hn::And(significand, hn::Neg(significand)));
  const auto exponent = hn::Add(hn::ShiftRight<23>(hn::And(bits, hn::Set(di, 0x7fffffff))),
                                hn::ShiftRight<23>(hn::BitCast(di, lowest)));
  const auto relative = hn::Sub(exponent, hn::Set(di, 127 + 23 + 127 + base));
  return hn::IfThenElse(hn::RebindMask(di, hn::Eq(x, hn::Zero(d))), hn::Set(di, kMmaNoBit),
                        relative);
}

// B [n, 64] from row k of the panel on as f32 [n][64] and, for fp8, its lowest bits as Pass2Chain
// wants them.
template <MmaType kType>
HWY_INLINE void WidenB(const MmaRows& b, int64_t panel, int64_t k, int64_t n,
                       float* HWY_RESTRICT out, int8_t* HWY_RESTRICT low) {
  const D d;
  const DI di;
  const uint16_t* in = &b.halves[static_cast<size_t>((panel * b.padded_k + k) * kMmaPanel)];
  for (int64_t i = 0; i < n; ++i, in += kMmaPanel) {
    int base = 0;
    if constexpr (FormatOf(kType).bytes == 1) {
      base =
          b.groups[static_cast<size_t>((panel * b.padded_k + k + i) / FormatOf(kType).group)].base;
    }
    for (int64_t j = 0; j < kMmaPanel; j += kLanes) {
      const auto x = LoadHalves<kType>(in + j);
      hn::Store(x, d, out + i * kMmaPanel + j);
      if constexpr (FormatOf(kType).bytes == 1) {
        const auto lowest = LowestBit(x, base);
        const auto none = hn::Set(di, kMmaNoBit);
        const auto negative = hn::RebindMask(di, hn::Lt(x, hn::Zero(d)));
        int8_t* to = low + i * 2 * kMmaPanel + j;
        hn::Store(hn::DemoteTo(DQ(), hn::IfThenElse(negative, lowest, none)), DQ(), to);
        hn::Store(hn::DemoteTo(DQ(), hn::IfThenElse(negative, none, lowest)), DQ(), to + kMmaPanel);
      }
    }
  }
}

// n (whole groups) elements of a row of A from k on, to place `to` of x.
template <MmaType kType>
HWY_INLINE void WidenA(const MmaRows& a, int64_t row, int64_t k, int64_t n, int64_t to,
                       RowsOfA& x) {
  const D d;
  const DI di;
  const DU du;
  const uint16_t* in = &a.halves[static_cast<size_t>(row * a.padded_k + k)];
  for (int64_t i = 0; i < n; i += kLanes, to += kLanes) {
    const auto v = LoadHalves<kType>(in + i);
    hn::Store(v, d, x.value + to);
    if constexpr (FormatOf(kType).bytes == 1) {
      const auto at = static_cast<size_t>((row * a.padded_k + k + i) / FormatOf(kType).group);
      const auto byte =
          hn::And(hn::BitCast(du, LowestBit(v, a.groups[at].base)), hn::Set(du, 0xff));
      hn::Store(hn::Mul(byte, hn::Set(du, 0x01010101u)), du, x.lowest4 + to);
      const auto negative = hn::ShiftRight<31>(hn::BitCast(di, v));
      hn::Store(hn::And(negative, hn::Set(di, static_cast<int32_t>(kMmaPanel))), di, x.flip + to);
    }
  }
}

template <MmaType kType>
HWY_NOINLINE void TypedTile(const MmaRows& a, int64_t m0, int64_t m1, const MmaRows& b, int64_t n0,
                            int64_t n1, int64_t k0, int64_t k1, float* c, int64_t c_stride) {
  // The block of K of which B stays in the first-level cache.
  RowsOfA x;
  HWY_ALIGN float bf[kBlock * kMmaPanel];
  HWY_ALIGN int8_t low[FormatOf(kType).bytes == 1 ? kBlock * 2 * kMmaPanel : 1];
  HWY_ALIGN float tile[kRows * kMmaPanel];
  k1 = std::min(a.padded_k,
                (k1 + FormatOf(kType).group - 1) / FormatOf(kType).group * FormatOf(kType).group);
  for (int64_t n = n0; n < n1; n += kMmaPanel) {
    const int64_t columns = std::min(kMmaPanel, n1 - n);
    const uint64_t lanes = columns == 64 ? ~uint64_t{0} : (uint64_t{1} << columns) - 1;
    const int64_t panel = n / kMmaPanel;
    for (int64_t k = k0; k < k1; k += kBlock) {
      const int64_t kn = std::min(k1, k + kBlock);
      WidenB<kType>(b, panel, k, kn - k, bf, low);
      for (int64_t m = m0; m < m1; m += kRows) {
        const int64_t rows = std::min(kRows, m1 - m);
        for (int64_t r = 0; r < rows; ++r) WidenA<kType>(a, m + r, k, kn - k, r * kBlock, x);
        float* out = c + (m - m0) * c_stride + (n - n0);
        if (columns == kMmaPanel) {
          RowsPanel<kType, kVectors>(a, x, b, m, rows, panel, k, kn, bf, low, lanes, out, c_stride);
          continue;
        }
        for (int64_t r = 0; r < rows; ++r) {
          float* to = tile + r * kMmaPanel;
          std::memcpy(to, out + r * c_stride, static_cast<size_t>(columns) * 4);
          std::fill(to + columns, to + kMmaPanel, 0.0f);
        }
        if ((columns + kLanes - 1) / kLanes * 2 <= kVectors) {
          RowsPanel<kType, kVectors / 2>(a, x, b, m, rows, panel, k, kn, bf, low, lanes, tile,
                                         kMmaPanel);
        } else {
          RowsPanel<kType, kVectors>(a, x, b, m, rows, panel, k, kn, bf, low, lanes, tile,
                                     kMmaPanel);
        }
        for (int64_t r = 0; r < rows; ++r) {
          std::memcpy(out + r * c_stride, tile + r * kMmaPanel, static_cast<size_t>(columns) * 4);
        }
      }
    }
  }
}

void Tile(const MmaRows& a, int64_t m0, int64_t m1, const MmaRows& b, int64_t n0, int64_t n1,
          int64_t k0, int64_t k1, float* c, int64_t c_stride) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x6000);  // toward zero
  switch (a.type) {
    case MmaType::kBF16:
      TypedTile<MmaType::kBF16>(a, m0, m1, b, n0, n1, k0, k1, c, c_stride);
      break;
    case MmaType::kF16:
      TypedTile<MmaType::kF16>(a, m0, m1, b, n0, n1, k0, k1, c, c_stride);
      break;
    case MmaType::kE4M3:
      TypedTile<MmaType::kE4M3>(a, m0, m1, b, n0, n1, k0, k1, c, c_stride);
      break;
    case MmaType::kE5M2:
      TypedTile<MmaType::kE5M2>(a, m0, m1, b, n0, n1, k0, k1, c, c_stride);
      break;
  }
  _mm_setcsr(before);
}

}  // namespace tare::numerics::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tare::numerics::internal {

MmaTileFunction MmaFastTile(MmaKernel kernel) {
  // Asked once: the answer costs CPUID instructions, which a virtual machine traps.
  static const int64_t supported = hwy::SupportedTargets();
#if HWY_TARGETS & HWY_AVX3
  if (kernel == MmaKernel::kAvx512 && (supported & HWY_AVX3) != 0) return N_AVX3::Tile;
#endif
#if HWY_TARGETS & HWY_AVX2
  if (kernel == MmaKernel::kAvx2 && (supported & HWY_AVX2) != 0) return N_AVX2::Tile;
#endif
  (void)kernel;
  return nullptr;
}

}  // namespace tare::numerics::internal
#endif
