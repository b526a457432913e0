// The fast kernels of the Hopper step: one source, compiled for AVX2 and for AVX-512.
//
// For 64 columns and one row of A, a group takes two passes.
//   1. Exponents, 64 to a vector: the largest byte sum gives emax of the products.
//   2. Products, f32 lanes: a * b is exact (at most 22 significant bits); times 2^(F - emax), exact
//      again; conversion to int32 by truncation is then the rule's cut toward zero at 2^(emax - F);
//      int32 additions are exact. The sum becomes f32 under round-toward-zero and is scaled back.
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

// What pass 1 leaves for pass 2, 64 columns of one row.
struct Scaled {
  HWY_ALIGN float scale[kMmaPanel];  // 2^(F - emax); fp8: where the positive sum starts
  HWY_ALIGN int32_t sum[kMmaPanel];  // c, cut, in units of 2^(emax - F); fp8: the negative sum
};

// Pass 1 of the group at k for one row: true if pass 2 may follow, else c is already the result.
template <MmaType kType, int kUsed>
HWY_INLINE bool Pass1(const MmaRows& a, const MmaRows& b, int64_t row, int64_t panel, int64_t k,
                      uint64_t lanes, float* HWY_RESTRICT c, Scaled& out) {
  constexpr MmaFormat kFormat = FormatOf(kType);
  constexpr int kGroup = kFormat.group;
  const D d;
  const DI di;
  const DU du;
  const DB db;
  const MmaGroup x = a.groups[static_cast<size_t>((row * a.padded_k + k) / kGroup)];
  const MmaGroup y = b.groups[static_cast<size_t>((panel * b.padded_k + k) / kGroup)];
  const int base = x.base + y.base + 127;  // biased exponent of the largest conceivable product
  if (HWY_UNLIKELY(x.special || y.special || base > 240 || base < 100)) {
    if (!(x.special || y.special) && (x.zero || y.zero)) {
      for (int j = 0; j < kMmaPanel; ++j) c[j] = ZeroGroup<kType>(c[j]);
    } else {
      SlowGroup<kType>(a, b, row, panel, k, lanes, c);
    }
    return false;
  }
  const uint32_t* HWY_RESTRICT ae = &a.exponents4[static_cast<size_t>(row * a.padded_k + k)];
  const int8_t* HWY_RESTRICT be =
      &b.exponents[static_cast<size_t>((panel * b.padded_k + k) * kMmaPanel)];
  // No sum leaves int8: the smallest is twice kMmaZero.
  HWY_ALIGN int8_t product_max[kMmaPanel];
  uint64_t far = 0;
  for (int v = 0; v < kByteVectors; ++v) {
    const int8_t* e = be + v * kLanes * 4;
    auto best0 = hn::Set(db, 2 * internal::kMmaZero);
    auto best1 = best0;
    for (int i = 0; i < kGroup; i += 2) {
      const auto a0 = hn::BitCast(db, hn::Set(du, ae[i]));
      const auto a1 = hn::BitCast(db, hn::Set(du, ae[i + 1]));
      best0 = hn::Max(best0, hn::Add(a0, hn::Load(db, e + i * kMmaPanel)));
      best1 = hn::Max(best1, hn::Add(a1, hn::Load(db, e + (i + 1) * kMmaPanel)));
    }
    const auto best = hn::Max(best0, best1);
    hn::Store(best, db, product_max + v * kLanes * 4);
    uint8_t bits[8] = {};
    hn::StoreMaskBits(db, hn::Lt(best, hn::Set(db, internal::kMmaFar + 1)), bits);
    uint64_t m;
    std::memcpy(&m, bits, 8);
    far |= m << (v * kLanes * 4 % 64);
  }
  if (HWY_UNLIKELY((far & lanes) != 0)) {
    SlowGroup<kType>(a, b, row, panel, k, lanes, c);
    return false;
  }
  const auto exponent_mask = hn::Set(di, 0x7f800000);
  const auto bias = hn::Set(di, base);
  auto largest = hn::Zero(di);
  for (int v = 0; v < kUsed; ++v) {
    const auto acc = hn::Load(d, c + v * kLanes);
    const auto products = hn::ShiftLeft<23>(
        hn::Add(hn::PromoteTo(di, hn::Load(DQ(), product_max + v * kLanes)), bias));
    const auto w = hn::Max(hn::And(hn::BitCast(di, acc), exponent_mask), products);
    if constexpr (kFormat.bytes == 1) {
      largest = hn::Max(largest, w);
      const auto anchor = hn::Mul(hn::BitCast(d, w), hn::Set(d, 1536.0f));
      const auto zero = hn::Zero(d);
      hn::Store(hn::Add(hn::Max(acc, zero), anchor), d, out.scale + v * kLanes);
      hn::Store(hn::BitCast(di, hn::Sub(hn::Min(acc, zero), anchor)), di, out.sum + v * kLanes);
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

// Pass 2 for fp8. The sum of 32 products and c needs 21 bits above the unit, so f32 holds it:
// positive and negative products go to two FMA chains that start at +-1.5 * 2^(emax - F + 23),
// where the last place is the unit, so that rounding toward zero is the rule's cut. bk
// [group][2][64]: the positive elements, then the negative ones, zero elsewhere; flip[i] is 64
// where a is negative.
template <MmaType kType, int kUsed>
HWY_INLINE void Pass2Chains(const float* HWY_RESTRICT ak, const int64_t* HWY_RESTRICT flip,
                            const float* HWY_RESTRICT bk, const Scaled& in, float* HWY_RESTRICT c) {
  constexpr MmaFormat kFormat = FormatOf(kType);
  const D d;
  const DI di;
  for (int v0 = 0; v0 < kUsed; v0 += kStep) {
    hn::Vec<D> plus[kStep];
    hn::Vec<D> minus[kStep];
    for (int v = 0; v < kStep; ++v) {
      plus[v] = hn::Load(d, in.scale + (v0 + v) * kLanes);
      minus[v] = hn::BitCast(d, hn::Load(di, in.sum + (v0 + v) * kLanes));
    }
#pragma GCC unroll 8
    for (int i = 0; i < kFormat.group; ++i) {
      const auto ai = hn::Set(d, ak[i]);
      const float* positive = bk + i * 2 * kMmaPanel + flip[i] + v0 * kLanes;
      const float* negative = bk + i * 2 * kMmaPanel + (flip[i] ^ kMmaPanel) + v0 * kLanes;
      // Plain base registers: an indexed operand would split every FMA into two micro-operations.
      asm("" : "+r"(positive), "+r"(negative));
      for (int v = 0; v < kStep; ++v) {
        plus[v] = hn::MulAdd(ai, hn::Load(d, positive + v * kLanes), plus[v]);
        minus[v] = hn::MulAdd(ai, hn::Load(d, negative + v * kLanes), minus[v]);
      }
    }
    for (int v = 0; v < kStep; ++v) {
      const auto sum = hn::Add(plus[v], minus[v]);  // exact: the anchors cancel
      hn::Store(hn::And(sum, hn::BitCast(d, hn::Set(di, -(1 << kFormat.result_cut)))), d,
                c + (v0 + v) * kLanes);
    }
  }
}

// Pass 2: ak [group], bk [group, 64] as f32. Leaves c as it was and answers false when the sums do
// not fit.
template <MmaType kType, int kUsed>
HWY_INLINE bool Pass2(const float* HWY_RESTRICT ak, const float* HWY_RESTRICT bk, const Scaled& in,
                      float* HWY_RESTRICT c) {
  constexpr MmaFormat kFormat = FormatOf(kType);
  const D d;
  const DI di;
  const DU du;
  // |sum| beyond this may have wrapped, or holds an INT_MIN of a special c.
  const auto limit = hn::Set(du, kFormat.bytes == 2 ? 2090000000u : 1u << 29);
  HWY_ALIGN float next[kMmaPanel];
  auto worst = hn::Zero(du);
  for (int v0 = 0; v0 < kUsed; v0 += kStep) {
    hn::Vec<DI> sum[kStep];
    hn::Vec<D> scale[kStep];
    for (int v = 0; v < kStep; ++v) {
      scale[v] = hn::Load(d, in.scale + (v0 + v) * kLanes);
      sum[v] = hn::Load(di, in.sum + (v0 + v) * kLanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kFormat.group; ++i) {
      const auto ai = hn::Set(d, ak[i]);
      for (int v = 0; v < kStep; ++v) {
        const auto p = hn::Mul(ai, hn::Load(d, bk + i * kMmaPanel + (v0 + v) * kLanes));
        sum[v] = hn::Add(sum[v], Truncate(hn::Mul(p, scale[v])));
      }
    }
    for (int v = 0; v < kStep; ++v) {
      worst = hn::Max(worst, hn::BitCast(du, hn::Abs(sum[v])));
      const auto unit = hn::BitCast(d, hn::Sub(hn::Set(di, 254 << 23), hn::BitCast(di, scale[v])));
      auto y0 = hn::Mul(hn::ConvertTo(d, sum[v]), unit);
      if constexpr (kFormat.result_cut != 0) {
        y0 = hn::And(y0, hn::BitCast(d, hn::Set(di, -(1 << kFormat.result_cut))));
      }
      hn::Store(y0, d, next + (v0 + v) * kLanes);
    }
  }
  if (HWY_UNLIKELY(!hn::AllFalse(du, hn::Gt(worst, limit)))) return false;
  for (int v = 0; v < kUsed; ++v) hn::Store(hn::Load(d, next + v * kLanes), d, c + v * kLanes);
  return true;
}

// Rows [m0, m0 + rows) of c (64 columns each) walk the groups of [k0, k1). Both passes run over all
// rows in turn, so that the latency of one row's chain hides behind the others.
template <MmaType kType, int kUsed>
void RowsPanel(const MmaRows& a, const MmaRows& b, int64_t m0, int64_t rows, int64_t panel,
               int64_t k0, int64_t k1, const float* af, const int64_t* flip, int64_t af_stride,
               const float* bf, uint64_t lanes, float* HWY_RESTRICT c) {
  constexpr int kGroup = FormatOf(kType).group;
  Scaled scaled[kRows];
  bool go[kRows];
  for (int64_t k = k0; k < k1; k += kGroup) {
    for (int64_t r = 0; r < rows; ++r) {
      go[r] = Pass1<kType, kUsed>(a, b, m0 + r, panel, k, lanes, c + r * kMmaPanel, scaled[r]);
    }
    for (int64_t r = 0; r < rows; ++r) {
      if (HWY_UNLIKELY(!go[r])) continue;
      if constexpr (FormatOf(kType).bytes == 1) {
        const int64_t at = r * af_stride + (k - k0);
        Pass2Chains<kType, kUsed>(af + at, flip + at, bf + (k - k0) * 2 * kMmaPanel, scaled[r],
                                  c + r * kMmaPanel);
        continue;
      }
      if (HWY_UNLIKELY(
              !(Pass2<kType, kUsed>(af + r * af_stride + (k - k0), bf + (k - k0) * kMmaPanel,
                                    scaled[r], c + r * kMmaPanel)))) {
        SlowGroup<kType>(a, b, m0 + r, panel, k, lanes, c + r * kMmaPanel);
      }
    }
  }
}

template <MmaType kType>
HWY_INLINE void Widen(const uint16_t* in, int64_t n, float* out) {
  const D d;
  for (int64_t i = 0; i < n; i += kLanes) {
    if constexpr (kType == MmaType::kF16) {
#if HWY_TARGET == HWY_AVX2
      _mm256_store_ps(out + i,
                      _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
#else
      _mm512_store_ps(
          out + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i))));
#endif
    } else {
      const auto bits = hn::PromoteTo(DI(), hn::LoadU(hn::Rebind<uint16_t, D>(), in + i));
      hn::Store(hn::BitCast(d, hn::ShiftLeft<16>(bits)), d, out + i);
    }
  }
}

// Splits b [n, 64] by sign: out [n][2][64].
HWY_INLINE void SplitSigns(const float* in, int64_t n, float* out) {
  const D d;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < kMmaPanel; j += kLanes) {
      const auto x = hn::Load(d, in + i * kMmaPanel + j);
      hn::Store(hn::Max(x, hn::Zero(d)), d, out + i * 2 * kMmaPanel + j);
      hn::Store(hn::Min(x, hn::Zero(d)), d, out + i * 2 * kMmaPanel + kMmaPanel + j);
    }
  }
}

template <MmaType kType>
HWY_NOINLINE void TypedTile(const MmaRows& a, int64_t m0, int64_t m1, const MmaRows& b, int64_t n0,
                            int64_t n1, int64_t k0, int64_t k1, float* c, int64_t c_stride) {
  // 32 KiB of B as f32: the block of K that stays in the first-level cache. fp8 holds both signs.
  constexpr bool kSplit = FormatOf(kType).bytes == 1;
  constexpr int64_t kBlock = kSplit ? 64 : 128;
  HWY_ALIGN float bf[kBlock * kMmaPanel];
  HWY_ALIGN float split[kSplit ? kBlock * 2 * kMmaPanel : kLanes];
  HWY_ALIGN int64_t flip[kSplit ? kRows * kBlock : kLanes] = {};
  HWY_ALIGN float af[kRows * kBlock];
  HWY_ALIGN float tile[kRows * kMmaPanel];
  k1 = std::min(a.padded_k,
                (k1 + FormatOf(kType).group - 1) / FormatOf(kType).group * FormatOf(kType).group);
  for (int64_t n = n0; n < n1; n += kMmaPanel) {
    const int64_t columns = std::min(kMmaPanel, n1 - n);
    const uint64_t lanes = columns == 64 ? ~uint64_t{0} : (uint64_t{1} << columns) - 1;
    const int64_t panel = n / kMmaPanel;
    for (int64_t k = k0; k < k1; k += kBlock) {
      const int64_t kn = std::min(k1, k + kBlock);
      Widen<kType>(&b.halves[static_cast<size_t>((panel * b.padded_k + k) * kMmaPanel)],
                   (kn - k) * kMmaPanel, bf);
      if constexpr (kSplit) SplitSigns(bf, kn - k, split);
      const float* operand = kSplit ? split : bf;
      for (int64_t m = m0; m < m1; m += kRows) {
        const int64_t rows = std::min(kRows, m1 - m);
        for (int64_t r = 0; r < rows; ++r) {
          Widen<kType>(&a.halves[static_cast<size_t>((m + r) * a.padded_k + k)], kn - k,
                       af + r * kBlock);
          if constexpr (kSplit) {
            for (int64_t i = 0; i < kn - k; ++i) {
              flip[r * kBlock + i] = af[r * kBlock + i] < 0.0f ? kMmaPanel : 0;
            }
          }
          float* to = tile + r * kMmaPanel;
          std::memcpy(to, c + (m + r - m0) * c_stride + (n - n0), static_cast<size_t>(columns) * 4);
          std::fill(to + columns, to + kMmaPanel, 0.0f);
        }
        if ((columns + kLanes - 1) / kLanes * 2 <= kVectors) {
          RowsPanel<kType, kVectors / 2>(a, b, m, rows, panel, k, kn, af, flip, kBlock, operand,
                                         lanes, tile);
        } else {
          RowsPanel<kType, kVectors>(a, b, m, rows, panel, k, kn, af, flip, kBlock, operand, lanes,
                                     tile);
        }
        for (int64_t r = 0; r < rows; ++r) {
          std::memcpy(c + (m + r - m0) * c_stride + (n - n0), tile + r * kMmaPanel,
                      static_cast<size_t>(columns) * 4);
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
