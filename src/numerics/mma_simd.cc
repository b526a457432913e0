// The fast kernels of the Hopper step: one source, compiled for AVX2, AVX-512 (Skylake's) and
// AVX-512 with VPOPCNTDQ (Ice Lake's and later). The arithmetic is in mma_chain-inl.h; here K is
// walked in blocks whose operands are widened to the chain's type.
//
// What the chain cannot represent goes to the plain step: NaN and infinity (marked when packed), a
// large c, an exponent near the ends of f32, and single columns whose products all lie 2^63 below
// the largest of their panel.
//
// The tile runs under MXCSR round-toward-zero: every operation of it but the chain's FMAs is exact.

#ifndef HWY_WANT_AVX3_DL
#define HWY_WANT_AVX3_DL
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "numerics/mma_simd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "numerics/mma_chain-inl.h"
#include "numerics/mma_internal.h"

HWY_BEFORE_NAMESPACE();
namespace tare::numerics::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using internal::MmaGroup;
using internal::MmaRows;

// A row of c as the chain walks it: a zero is +-kZero (f64) or the mark alone, the others have the
// mark set. Columns past `columns` are zeros.
HWY_INLINE void FromFloats(const float* HWY_RESTRICT c, int64_t columns, double* HWY_RESTRICT out) {
  const double* const end = out + kMmaPanel;
  for (; columns > 0; --columns, ++c, ++out) {
    const uint64_t bits = BitsOf(static_cast<double>(*c)) | ChainForm<double>::kMark;
    *out = *c == 0 ? std::copysign(internal::kChainZero<double>, static_cast<double>(*c))
                   : DoubleOf(bits);
  }
  std::fill(out, const_cast<double*>(end), internal::kChainZero<double>);
}
HWY_INLINE void FromFloats(const float* HWY_RESTRICT c, int64_t columns, float* HWY_RESTRICT out) {
  const float* const end = out + kMmaPanel;
  for (; columns > 0; --columns, ++c, ++out) {
    *out = FloatOf(BitsOf(*c) | ChainForm<float>::kMark);
  }
  std::fill(out, const_cast<float*>(end), FloatOf(ChainForm<float>::kMark));
}

// Back. Under round-toward-zero +-kZero becomes +-0. A float whose own low bit was set (only an
// accumulator from outside, for fp8) loses it, which every step of fp8 cuts.
HWY_INLINE void ToFloats(const double* HWY_RESTRICT in, int64_t columns, float* HWY_RESTRICT c) {
  for (int64_t j = 0; j < columns; ++j) {
    c[j] = Canonical(static_cast<float>(DoubleOf(BitsOf(in[j]) & ChainForm<double>::kKept)));
  }
}
HWY_INLINE void ToFloats(const float* HWY_RESTRICT in, int64_t columns, float* HWY_RESTRICT c) {
  for (int64_t j = 0; j < columns; ++j) {
    c[j] = Canonical(FloatOf(BitsOf(in[j]) & ~ChainForm<float>::kMark));
  }
}

// Whether the chain cannot take a row: 16 groups add less than 2^124 (f64), and an f32 anchor must
// not overflow.
constexpr int kGroupsUnchecked = 16;
template <class T>
HWY_INLINE bool Large(const float* c, int64_t columns) {
  constexpr uint32_t kLimit = (std::is_same_v<T, double> ? 127 + 126 : 127 + 100) << 23;
  uint32_t largest = 0;
  for (int64_t j = 0; j < columns; ++j) largest = std::max(largest, BitsOf(c[j]) & 0x7fffffffu);
  return largest >= kLimit;
}

// A group that holds nothing but zeros: c as the rule returns it.
template <MmaType kType>
HWY_INLINE float ZeroGroup(float c) {
  constexpr uint32_t kCut = ~((1u << FormatOf(kType).result_cut) - 1);
  if (c != c) return CanonicalNan();
  const uint32_t bits = BitsOf(c) & kCut;
  return (bits << 1) == 0 ? 0.0f : FloatOf(bits);
}

// K is walked in blocks of which B stays in the first-level cache, and rows of A in runs that take
// a group together before the next, so that the latency of one chain hides behind the others.
constexpr int64_t kRows = 64;  // accumulators kept in the chain's form
constexpr int64_t kRun = 8;
template <class T>
constexpr int64_t kBlock = sizeof(T) == 8 ? 32 : 64;

template <class T, int kGroup>
struct Block {
  using Bits = typename ChainForm<T>::Bits;
  static constexpr int64_t kGroups = kBlock<T> / kGroup;
  HWY_ALIGN T c[kRows * kMmaPanel];
  HWY_ALIGN T b[kBlock<T> * kMmaPanel];
  HWY_ALIGN Bits b_signs[kGroups * kMmaPanel];
  Bits a_signs[kRun * kGroups];
  bool large[kRows];  // the row's c is beyond the chain
  bool any_large;
};

HWY_INLINE const double* ChainValues(const MmaRows& a, double) { return a.chain64.data(); }
HWY_INLINE const float* ChainValues(const MmaRows& a, float) { return a.chain32.data(); }

// Signs as Negatives() wants them.
HWY_INLINE uint64_t Widen(uint32_t signs, uint64_t) { return signs | uint64_t{1} << 63; }
HWY_INLINE uint32_t Widen(uint32_t signs, uint32_t) { return signs; }

template <MmaType kType>
HWY_INLINE hn::Vec<DF> LoadHalves(const uint16_t* in) {
  const DF d;
  if constexpr (kType == MmaType::kF16) {
#if HWY_TARGET == HWY_AVX2
    return hn::Vec<DF>{_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)))};
#else
    return hn::Vec<DF>{_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)))};
#endif
  } else {
    const auto bits = hn::PromoteTo(DU(), hn::LoadU(hn::Rebind<uint16_t, DF>(), in));
    return hn::BitCast(d, hn::ShiftLeft<16>(bits));
  }
}

// x, with +-kZero for a zero.
template <class D>
HWY_INLINE hn::Vec<D> NoZero(D d, hn::Vec<D> x) {
  using T = hn::TFromD<D>;
  const auto zero = hn::CopySignToAbs(hn::Set(d, internal::kChainZero<T>), x);
  return hn::IfThenElse(hn::Eq(x, hn::Zero(d)), zero, x);
}

// n (a multiple of 16) elements of B as the chain takes them.
template <MmaType kType, bool kZeros>
HWY_INLINE void WidenValues(const uint16_t* HWY_RESTRICT in, int64_t n,
                            ChainOf<kType>* HWY_RESTRICT out) {
  using T = ChainOf<kType>;
  const Tag<T> d;
  const DF df;
  for (int64_t i = 0; i < n; i += kLanesOf<float>) {
    const auto x = LoadHalves<kType>(in + i);
    if constexpr (std::is_same_v<T, float>) {
      hn::Store(kZeros ? NoZero(d, x) : x, d, out + i);
    } else {
      HWY_ALIGN float f[kLanesOf<float>];
      hn::Store(x, df, f);
      for (int h = 0; h < 2; ++h) {
        const auto v =
            hn::PromoteTo(d, hn::Load(hn::Rebind<float, Tag<T>>(), f + h * kLanesOf<double>));
        hn::Store(kZeros ? NoZero(d, v) : v, d, out + i + h * kLanesOf<double>);
      }
    }
  }
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

// Where a tile stands.
struct Place {
  const MmaRows& a;
  const MmaRows& b;
  int64_t panel;
  int64_t columns;  // of the panel
  uint64_t lanes;   // a bit for each
};

// The group at k for kR rows from `row` on, which are `run` in the run and `kept` in the block.
template <MmaType kType, int kUsed, int kR>
HWY_INLINE void GroupOfRows(const Place& p, int64_t row, int64_t run, int64_t kept, int64_t k,
                            int64_t k_block, Block<ChainOf<kType>, FormatOf(kType).group>& block) {
  using T = ChainOf<kType>;
  using Form = ChainForm<T>;
  constexpr int kGroup = FormatOf(kType).group;
  const int64_t g = (k - k_block) / kGroup;
  const MmaGroup y = p.b.groups[static_cast<size_t>((p.panel * p.b.padded_k + k) / kGroup)];
  const uint32_t* ae[kR];
  for (int r = 0; r < kR; ++r) {
    ae[r] = &p.a.exponents4[static_cast<size_t>((row + r) * p.a.padded_k + k)];
  }
  HWY_ALIGN int8_t largest[kR][kMmaPanel];
  LargestExponents<kGroup, kR>(
      ae, &p.b.exponents[static_cast<size_t>((p.panel * p.b.padded_k + k) * kMmaPanel)], largest);

  GroupOperands<T, kR> x;
  x.b = block.b + (k - k_block) * kMmaPanel;
  x.b_signs = block.b_signs + g * kMmaPanel;
  T* c[kR];
  uint64_t slow[kR];  // columns for the plain step
  bool any_slow = false, any_fast = false;
  GroupScratch<T> scratch[kR];
  for (int r = 0; r < kR; ++r) {
    const MmaGroup z = p.a.groups[static_cast<size_t>(((row + r) * p.a.padded_k + k) / kGroup)];
    const int base = z.chain + y.chain;
    const bool all = static_cast<unsigned>(base - Form::kSmallestBase) >
                         static_cast<unsigned>(Form::kLargestBase - Form::kSmallestBase) ||
                     (block.any_large && block.large[kept + r]);
    slow[r] = all ? p.lanes : FarColumns(largest[r]) & p.lanes;
    any_slow |= slow[r] != 0;
    any_fast |= slow[r] != p.lanes;
    c[r] = block.c + (kept + r) * kMmaPanel;
    x.a[r] = ChainValues(p.a, T{}) + (row + r) * p.a.padded_k + k;
    x.a_signs[r] = block.a_signs[(run + r) * Block<T, kGroup>::kGroups + g];
    x.base[r] = all ? 0 : base;
    Prepare(largest[r], x.base[r], static_cast<uint32_t>(x.a_signs[r]),
            internal::MmaSigns(p.b, p.panel, k, kGroup), scratch[r]);
  }
  if (HWY_LIKELY(!any_slow)) {
    Chain<T, kGroup, kUsed, kR>(x, scratch, c);
    return;
  }
  float exact[kR][kMmaPanel];
  for (int r = 0; r < kR; ++r) {
    if (slow[r] == 0) continue;
    ToFloats(c[r], p.columns, exact[r]);
    const MmaGroup z = p.a.groups[static_cast<size_t>(((row + r) * p.a.padded_k + k) / kGroup)];
    if ((z.zero || y.zero) && !z.special && !y.special) {
      for (int64_t j = 0; j < p.columns; ++j) exact[r][j] = ZeroGroup<kType>(exact[r][j]);
    } else {
      SlowGroup<kType>(p.a, p.b, row + r, p.panel, k, slow[r], exact[r]);
    }
  }
  if (any_fast) Chain<T, kGroup, kUsed, kR>(x, scratch, c);
  for (int r = 0; r < kR; ++r) {
    if (slow[r] == 0) continue;
    HWY_ALIGN T patched[kMmaPanel];
    FromFloats(exact[r], p.columns, patched);
    for (uint64_t lanes = slow[r]; lanes != 0; lanes &= lanes - 1) {
      const int j = __builtin_ctzll(lanes);
      c[r][j] = patched[j];
    }
    ToFloats(c[r], p.columns, exact[r]);
    block.large[kept + r] = Large<T>(exact[r], p.columns);
    block.any_large |= block.large[kept + r];
  }
}

// Rows [m0, m0 + rows) of the block over [k, kn).
template <MmaType kType, int kUsed>
void RowsPanel(const Place& p, int64_t m0, int64_t rows, int64_t k, int64_t kn,
               Block<ChainOf<kType>, FormatOf(kType).group>& block) {
  using T = ChainOf<kType>;
  constexpr int kGroup = FormatOf(kType).group;
  constexpr int kR = ChainForm<T>::kTogether;
  for (int64_t run = 0; run < rows; run += kRun) {
    const int64_t n = std::min(kRun, rows - run);
    for (int64_t r = 0; r < n; ++r) {
      const auto at = static_cast<size_t>(((m0 + run + r) * p.a.padded_k + k) / kGroup);
      for (int64_t g = 0; g < (kn - k) / kGroup; ++g) {
        block.a_signs[r * Block<T, kGroup>::kGroups + g] =
            Widen(p.a.signs[at + static_cast<size_t>(g)], typename ChainForm<T>::Bits{});
      }
    }
    for (int64_t at = k; at < kn; at += kGroup) {
      int64_t r = 0;
      for (; r + kR <= n; r += kR) {
        GroupOfRows<kType, kUsed, kR>(p, m0 + run + r, r, run + r, at, k, block);
      }
      for (; r < n; ++r) {
        GroupOfRows<kType, kUsed, 1>(p, m0 + run + r, r, run + r, at, k, block);
      }
    }
  }
}

template <MmaType kType>
HWY_NOINLINE void TypedTile(const MmaRows& a, int64_t m0, int64_t m1, const MmaRows& b, int64_t n0,
                            int64_t n1, int64_t k0, int64_t k1, float* c, int64_t c_stride) {
  using T = ChainOf<kType>;
  constexpr int kGroup = FormatOf(kType).group;
  constexpr int kVectors = kVectorsOf<T>;
  Block<T, kGroup> block;
  k1 = std::min(a.padded_k, (k1 + kGroup - 1) / kGroup * kGroup);
  if (k0 >= k1) return;
  for (int64_t n = n0; n < n1; n += kMmaPanel) {
    const int64_t columns = std::min(kMmaPanel, n1 - n);
    const Place p{a, b, n / kMmaPanel, columns,
                  columns == 64 ? ~uint64_t{0} : (uint64_t{1} << columns) - 1};
    for (int64_t m = m0; m < m1; m += kRows) {
      const int64_t rows = std::min(kRows, m1 - m);
      float* out = c + (m - m0) * c_stride + (n - n0);
      block.any_large = false;
      for (int64_t r = 0; r < rows; ++r) {
        FromFloats(out + r * c_stride, columns, block.c + r * kMmaPanel);
        block.large[r] = Large<T>(out + r * c_stride, columns);
        block.any_large |= block.large[r];
      }
      int64_t checked = k0;
      for (int64_t k = k0; k < k1; k += kBlock<T>) {
        const int64_t kn = std::min(k1, k + kBlock<T>);
        if (kn - checked > kGroupsUnchecked * kGroup) {
          for (int64_t r = 0; r < rows; ++r) {
            float now[kMmaPanel];
            ToFloats(block.c + r * kMmaPanel, columns, now);
            block.large[r] = Large<T>(now, columns);
            block.any_large |= block.large[r];
          }
          checked = k;
        }
        for (int64_t i = k; i < kn; i += kGroup) {
          const auto at = static_cast<size_t>((p.panel * b.padded_k + i) * kMmaPanel);
          T* to = block.b + (i - k) * kMmaPanel;
          if (b.groups[at / kMmaPanel / kGroup].has_zero) {
            WidenValues<kType, true>(&b.halves[at], kGroup * kMmaPanel, to);
          } else {
            WidenValues<kType, false>(&b.halves[at], kGroup * kMmaPanel, to);
          }
          const uint32_t* signs = internal::MmaSigns(b, p.panel, i, kGroup);
          for (int64_t j = 0; j < kMmaPanel; ++j) {
            block.b_signs[(i - k) / kGroup * kMmaPanel + j] =
                Widen(signs[j], typename ChainForm<T>::Bits{});
          }
        }
        if (columns * 2 <= kMmaPanel) {
          RowsPanel<kType, kVectors / 2>(p, m, rows, k, kn, block);
        } else {
          RowsPanel<kType, kVectors>(p, m, rows, k, kn, block);
        }
      }
      for (int64_t r = 0; r < rows; ++r) {
        ToFloats(block.c + r * kMmaPanel, columns, out + r * c_stride);
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
#if HWY_TARGETS & HWY_AVX3_DL
  if (kernel == MmaKernel::kAvx512Dl && (supported & HWY_AVX3_DL) != 0) return N_AVX3_DL::Tile;
#endif
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
