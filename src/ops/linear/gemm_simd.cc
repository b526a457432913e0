// Kernels of the chain GEMM, compiled once per SIMD target and chosen at run time. Vectors run over
// output columns only, so a lane is one output element and its chain of FMAs is the contract's.

#include "numerics/fp.h"
#include "ops/linear/gemm_kernels.h"

#if defined(__x86_64__)
#define HWY_BASELINE_TARGETS HWY_AVX2  // older CPUs are refused at start-up: no fused multiply-add
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/linear/gemm_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "hwy/cache_control.h"

#include "ops/linear/simd_rows-inl.h"

#include <algorithm>
#include <cstring>
#include <memory>

#ifndef TARE_OPS_LINEAR_GEMM_SIMD_ONCE
#define TARE_OPS_LINEAR_GEMM_SIMD_ONCE
namespace tare::ops::gemm {
// Blocks of the tile loop. K blocks of 256: a B panel is 32 KiB and 12 rows of A 12 KiB, which
// share the 48 KiB L1; A, B and C of a tile together stay well inside the L2.
inline constexpr int64_t kBlockK = 256;
inline constexpr int64_t kMaxTileM = 192;
inline constexpr int64_t kMaxTileN = 256;
inline constexpr int64_t kStrideA = kBlockK + 16;  // A rows: not a power of two, so sets spread
inline constexpr int64_t kMaxGroups = 8;

// Grow-only scratch of a worker, aligned to 64 bytes.
struct TileScratch {
  std::unique_ptr<float, void (*)(void*)> buffer{nullptr, std::free};
  size_t floats = 0;
  float* Get(size_t need) {
    if (need > floats) {
      buffer.reset(static_cast<float*>(std::aligned_alloc(64, (need * 4 + 63) / 64 * 64)));
      floats = need;
    }
    return buffer.get();
  }
};
inline thread_local TileScratch tile_scratch;
}  // namespace tare::ops::gemm
#endif

HWY_BEFORE_NAMESPACE();
namespace tare::ops::gemm {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int kMr = kL >= 16 ? 12 : 6;  // 24 (12) accumulators of 32 (16) registers

void ConvertRowImpl(const Matrix& m, int64_t row, int64_t begin, int64_t count, float* dst) {
  const DF df;
  if (m.rows != nullptr) row = m.rows[row];
  const int64_t at = row * m.stride + begin;
  LoadRow(m.data, m.dtype, at, count, dst);
  if (!m.round_to_bf16 && !m.round_to_f16) return;
  int64_t i = 0;
  if (m.round_to_bf16) {
    for (; i + kL <= count; i += kL) hn::StoreU(RoundToBf16(hn::LoadU(df, dst + i)), df, dst + i);
  }
  const DType to = m.round_to_bf16 ? DType::kBF16 : DType::kF16;
  for (; i < count; ++i) dst[i] = RoundOperand(dst[i], to);
}

// acc[MR x 32] over kc steps. A element (r, k) at a[r * RS + k * KS], B at b[k * 32 + column], C
// continues from c (rows ldc apart).
template <int MR, int64_t RS, int64_t KS>
void Micro(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, int64_t kc,
           float* HWY_RESTRICT c, int64_t ldc) {
  const DF df;
  for (int64_t col = 0; col < kPanel; col += 2 * kL) {
    VF acc0[MR], acc1[MR];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      acc0[r] = hn::Load(df, c + r * ldc + col);
      acc1[r] = hn::Load(df, c + r * ldc + col + kL);
    }
    const float* bp = b + col;
    const float* ap = a;
    for (int64_t k = 0; k < kc; ++k) {
      const VF b0 = hn::Load(df, bp);
      const VF b1 = hn::Load(df, bp + kL);
      bp += kPanel;
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
        const VF av = hn::Set(df, ap[r * RS]);
        acc0[r] = hn::MulAdd(av, b0, acc0[r]);
        acc1[r] = hn::MulAdd(av, b1, acc1[r]);
      }
      ap += KS;
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      hn::Store(acc0[r], df, c + r * ldc + col);
      hn::Store(acc1[r], df, c + r * ldc + col + kL);
    }
  }
}

template <int64_t RS, int64_t KS, int MR = kMr>
void MicroRows(int rows, const float* a, const float* b, int64_t kc, float* c, int64_t ldc) {
  if (rows == MR) {
    Micro<MR, RS, KS>(a, b, kc, c, ldc);
  } else if constexpr (MR > 1) {
    MicroRows<RS, KS, MR - 1>(rows, a, b, kc, c, ldc);
  }
}

// Rows [k0, k0 + kc) of B, columns [n0, n1), as f32 panels [panel][kc][32], zero past n.
void PackB(const Problem& p, int64_t k0, int64_t kc, int64_t n0, int64_t n1, float* out) {
  const DF df;
  const DU du;
  const int64_t panels = (n1 - n0 + kPanel - 1) / kPanel;
  if (p.b_layout == BLayout::kPacked) {
    for (int64_t j = 0; j < panels; ++j) {
      const int64_t panel = n0 / kPanel + j;
      float* dst = out + j * kc * kPanel;
      if (p.b.dtype == DType::kBF16) {
        const uint32_t* src =
            static_cast<const uint32_t*>(p.b.data) + (panel * p.packed_k + k0) * (kPanel / 2);
        const auto high = hn::Set(du, 0xffff0000u);
        for (int64_t k = 0; k < kc; ++k) {
          for (int64_t h = 0; h < 16; h += kL) {
            const auto w = hn::Load(du, src + k * 16 + h);
            hn::Store(hn::BitCast(df, hn::ShiftLeft<16>(w)), df, dst + k * kPanel + h);
            hn::Store(hn::BitCast(df, hn::And(w, high)), df, dst + k * kPanel + 16 + h);
          }
        }
      } else if (p.b.dtype == DType::kF32) {
        std::memcpy(dst, static_cast<const float*>(p.b.data) + (panel * p.packed_k + k0) * kPanel,
                    static_cast<size_t>(kc * kPanel) * sizeof(float));
      } else {  // f16 pairs
        const uint16_t* src =
            static_cast<const uint16_t*>(p.b.data) + (panel * p.packed_k + k0) * kPanel;
        for (int64_t i = 0; i < kc * kPanel; ++i) {
          const int64_t word = i / 2 % 16, half = i % 2;
          dst[i / kPanel * kPanel + half * 16 + word] = LoadAsF32(src, p.b.dtype, i);
        }
      }
    }
    return;
  }
  alignas(64) float row[kMaxTileN > kBlockK ? kMaxTileN : kBlockK];
  if (p.b_layout == BLayout::kRowsAreK) {
    const int64_t count = n1 - n0;
    for (int64_t k = 0; k < kc; ++k) {
      ConvertRowImpl(p.b, k0 + k, n0, count, row);
      for (int64_t i = count; i < panels * kPanel; ++i) row[i] = 0.0f;
      for (int64_t j = 0; j < panels; ++j) {
        float* dst = out + (j * kc + k) * kPanel;
        for (int64_t i = 0; i < kPanel; i += kL) {
          hn::Store(hn::Load(df, row + j * kPanel + i), df, dst + i);
        }
      }
    }
    return;
  }
  for (int64_t n = n0; n < n0 + panels * kPanel; ++n) {
    float* dst = out + ((n - n0) / kPanel) * kc * kPanel + (n - n0) % kPanel;
    if (n >= n1) {
      for (int64_t k = 0; k < kc; ++k) dst[k * kPanel] = 0.0f;
      continue;
    }
    ConvertRowImpl(p.b, n, k0, kc, row);
    for (int64_t k = 0; k < kc; ++k) dst[k * kPanel] = row[k];
  }
}

HWY_INLINE void FoldTree(float* const* c, int64_t groups, int64_t at, VF* out) {
  const DF df;
  VF v[kMaxGroups];
  for (int64_t g = 0; g < groups; ++g) v[g] = hn::Load(df, c[g] + at);
  for (int64_t step = 1; step < groups; step *= 2) {
    for (int64_t g = 0; g + step < groups; g += 2 * step) v[g] = hn::Add(v[g], v[g + step]);
  }
  *out = v[0];
}

void IeeeTileImpl(const Problem& p, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  const DF df;
  const int64_t rows = m1 - m0;
  const int64_t cols = n1 - n0;
  const int64_t ldc = (cols + kPanel - 1) / kPanel * kPanel;
  const bool tree = p.sink == Problem::Sink::kTree;
  const int64_t buffers = tree ? static_cast<int64_t>(p.groups.size()) : 1;
  const size_t c_floats = static_cast<size_t>(rows * ldc);
  const size_t a_floats = static_cast<size_t>(kMaxTileM * kStrideA);
  const size_t b_floats = static_cast<size_t>(kBlockK * ldc);
  float* scratch = tile_scratch.Get(c_floats * static_cast<size_t>(buffers) + a_floats + b_floats);
  float* c[kMaxGroups];
  for (int64_t g = 0; g < buffers; ++g) c[g] = scratch + c_floats * static_cast<size_t>(g);
  float* a = scratch + c_floats * static_cast<size_t>(buffers);
  float* b = a + a_floats;

  for (size_t g = 0; g < p.groups.size(); ++g) {
    float* acc = c[tree ? g : 0];
    std::memset(acc, 0, c_floats * sizeof(float));
    for (const Range& range : p.groups[g]) {
      for (int64_t k0 = range.begin; k0 < range.end; k0 += kBlockK) {
        const int64_t kc = std::min(kBlockK, range.end - k0);
        PackB(p, k0, kc, n0, n1, b);
        if (p.a_rows_are_k) {
          for (int64_t k = 0; k < kc; ++k) ConvertRowImpl(p.a, k0 + k, m0, rows, a + k * kMaxTileM);
        } else {
          for (int64_t r = 0; r < rows; ++r) ConvertRowImpl(p.a, m0 + r, k0, kc, a + r * kStrideA);
        }
        for (int64_t j = 0; j < ldc / kPanel; ++j) {
          const float* bp = b + j * kc * kPanel;
          for (int64_t r = 0; r < rows;) {
            // Two near-equal last tiles are faster than a full and a tiny one.
            const int64_t left = rows - r;
            const int64_t take = left >= 2 * kMr || left == kMr ? kMr
                                 : left > kMr                   ? (left + 1) / 2
                                                                : left;
            float* cp = acc + r * ldc + j * kPanel;
            if (p.a_rows_are_k) {
              MicroRows<1, kMaxTileM>(static_cast<int>(take), a + r, bp, kc, cp, ldc);
            } else {
              MicroRows<kStrideA, 1>(static_cast<int>(take), a + r * kStrideA, bp, kc, cp, ldc);
            }
            r += take;
          }
        }
      }
    }
    if (tree) continue;
    // One nearest-even add of this unit's chain to the main gradient.
    for (int64_t r = 0; r < rows; ++r) {
      float* dst = static_cast<float*>(p.y) + (m0 + r) * p.y_stride + n0;
      const float* src = acc + r * ldc;
      int64_t i = 0;
      for (; i + kL <= cols; i += kL) {
        const VF sum = hn::Add(hn::LoadU(df, dst + i), hn::Load(df, src + i));
        const auto nan =
            hn::BitCast(df, hn::Set(hn::RebindToUnsigned<DF>(), numerics::kCanonicalNanBits));
        hn::StoreU(hn::IfThenElse(hn::IsNaN(sum), nan, sum), df, dst + i);
      }
      for (; i < cols; ++i) dst[i] = numerics::Canonical(dst[i] + src[i]);
    }
  }
  if (!tree) return;

  alignas(64) float line[kMaxTileN + 64];
  alignas(64) float bias[kMaxTileN + 64];
  if (p.bias != nullptr) {
    for (int64_t i = 0; i < cols; ++i) bias[i] = LoadAsF32(p.bias, p.bias_dtype, n0 + i);
    for (int64_t i = cols; i < ldc; ++i) bias[i] = 0.0f;
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < ldc; i += kL) {
      VF v;
      FoldTree(c, buffers, r * ldc + i, &v);
      if (p.bias != nullptr) v = hn::Add(v, hn::Load(df, bias + i));
      hn::Store(v, df, line + i);
    }
    StoreRow(p.y, p.y_dtype, (m0 + r) * p.y_stride + n0, line, cols);
  }
}

// Lines of a panel between the one in use and the one asked for.
template <int M>
constexpr int64_t kAhead = M > 4 ? 64 : 24;

// acc[M][P panels][2] over k in [k0, k1) of bf16 panels; column half `col` of 0 or 8 when a vector
// holds 8 lanes. Results to out[m][panel][32].
template <int M, int P>
HWY_INLINE void StreamBf16(const float* HWY_RESTRICT x, int64_t ldx, const uint32_t* HWY_RESTRICT w,
                           int64_t panel_words, int64_t k0, int64_t k1, float* HWY_RESTRICT out) {
  const DF df;
  const DU du;
  const auto high = hn::Set(du, 0xffff0000u);
  for (int64_t h = 0; h < 16; h += kL) {
    VF lo[M][P], hi[M][P];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int j = 0; j < P; ++j) lo[m][j] = hi[m][j] = hn::Zero(df);
    }
    for (int64_t k = k0; k < k1; ++k) {
      VF b0[P], b1[P];
#pragma GCC unroll 8
      for (int j = 0; j < P; ++j) {
        const uint32_t* at = w + j * panel_words + k * 16 + h;
        // The more rows, the fewer streams and the later the CPU's own prefetching. Behind the last
        // panel this asks for nothing that exists, which is allowed.
        if (h == 0) __builtin_prefetch(at + kAhead<M> * 16);
        const auto word = hn::Load(du, at);
        b0[j] = hn::BitCast(df, hn::ShiftLeft<16>(word));
        b1[j] = hn::BitCast(df, hn::And(word, high));
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const VF xv = hn::Set(df, x[m * ldx + k]);
#pragma GCC unroll 8
        for (int j = 0; j < P; ++j) {
          lo[m][j] = hn::MulAdd(xv, b0[j], lo[m][j]);
          hi[m][j] = hn::MulAdd(xv, b1[j], hi[m][j]);
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int j = 0; j < P; ++j) {
        hn::Store(lo[m][j], df, out + (m * P + j) * kPanel + h);
        hn::Store(hi[m][j], df, out + (m * P + j) * kPanel + 16 + h);
      }
    }
  }
}

template <int M, int P>
HWY_INLINE void StreamF32(const float* HWY_RESTRICT x, int64_t ldx, const float* HWY_RESTRICT w,
                          int64_t panel_floats, int64_t k0, int64_t k1, float* HWY_RESTRICT out) {
  const DF df;
  for (int64_t col = 0; col < kPanel; col += 2 * kL) {
    VF lo[M][P], hi[M][P];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int j = 0; j < P; ++j) lo[m][j] = hi[m][j] = hn::Zero(df);
    }
    for (int64_t k = k0; k < k1; ++k) {
#pragma GCC unroll 8
      for (int j = 0; j < P; ++j) {
        const VF b0 = hn::Load(df, w + j * panel_floats + k * kPanel + col);
        const VF b1 = hn::Load(df, w + j * panel_floats + k * kPanel + col + kL);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          const VF xv = hn::Set(df, x[m * ldx + k]);
          lo[m][j] = hn::MulAdd(xv, b0, lo[m][j]);
          hi[m][j] = hn::MulAdd(xv, b1, hi[m][j]);
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int j = 0; j < P; ++j) {
        hn::Store(lo[m][j], df, out + (m * P + j) * kPanel + col);
        hn::Store(hi[m][j], df, out + (m * P + j) * kPanel + col + kL);
      }
    }
  }
}

// Whether rows of y are stored past the caches. The weights that stream through have pushed y out
// of them, and to fetch its lines in order to overwrite them costs a quarter of the read bandwidth
// at 8 rows. One row is too little to matter.
bool StoresPast(const Problem& p) {
  const int64_t size = SizeOf(p.y_dtype);
  return p.m > 1 && (p.y_dtype == DType::kF32 || p.y_dtype == DType::kBF16) &&
         reinterpret_cast<uintptr_t>(p.y) % 64 == 0 && p.y_stride * size % 64 == 0;
}

// Rows M, panels p and p + 1 .. p + P - 1, all groups; writes y.
template <int M, int P>
void StreamPanels(const Problem& p, const float* x, int64_t ldx, int64_t panel, int splits) {
  const DF df;
  const int64_t groups = static_cast<int64_t>(p.groups.size());
  alignas(64) float out[kMaxGroups][M * P * kPanel];
  alignas(64) float part[M * P * kPanel];
  float* buffers[kMaxGroups];
  for (int64_t g = 0; g < groups; ++g) {
    buffers[g] = out[g];
    const Range range = p.groups[static_cast<size_t>(g)][0];
    const int64_t length = range.end - range.begin;
    for (int s = 0; s < splits; ++s) {
      const int64_t k0 = range.begin + length * s / splits;
      const int64_t k1 = range.begin + length * (s + 1) / splits;
      float* dst = s == 0 ? out[g] : part;
      if (p.b.dtype == DType::kBF16) {
        const int64_t words = p.packed_k * 16;
        StreamBf16<M, P>(x, ldx, static_cast<const uint32_t*>(p.b.data) + panel * words, words, k0,
                         k1, dst);
      } else {
        const int64_t floats = p.packed_k * kPanel;
        StreamF32<M, P>(x, ldx, static_cast<const float*>(p.b.data) + panel * floats, floats, k0,
                        k1, dst);
      }
      if (s > 0) {
        for (int64_t i = 0; i < M * P * kPanel; i += kL) {
          hn::Store(hn::Add(hn::Load(df, out[g] + i), hn::Load(df, part + i)), df, out[g] + i);
        }
      }
    }
  }
  const int64_t n0 = panel * kPanel;
  const int64_t cols = std::min<int64_t>(P * kPanel, p.n - n0);
  alignas(64) float bias[P * kPanel] = {};
  if (p.bias != nullptr) {
    for (int64_t i = 0; i < cols; ++i) bias[i] = LoadAsF32(p.bias, p.bias_dtype, n0 + i);
  }
  alignas(64) float line[P * kPanel];
  const bool past = StoresPast(p) && cols == P * kPanel;
  for (int m = 0; m < M; ++m) {
    for (int64_t i = 0; i < P * kPanel; i += kL) {
      VF v;
      FoldTree(buffers, groups, m * P * kPanel + i, &v);
      if (p.bias != nullptr) v = hn::Add(v, hn::Load(df, bias + i));
      hn::Store(v, df, line + i);
    }
    const int64_t at = m * p.y_stride + n0;
    if (past) {
      StoreRow<true>(p.y, p.y_dtype, at, line, cols);
    } else {
      StoreRow(p.y, p.y_dtype, at, line, cols);
    }
  }
}

template <int M>
void StreamRows(const Problem& p, const float* x, int64_t k, int64_t p0, int64_t p1, int splits) {
  // Chains in flight: at least 8 hide the latency of an FMA. More panels at once are more streams.
  constexpr int kP = M == 1 ? 4 : M <= 4 ? 2 : 1;
  int64_t panel = p0;
  for (; panel + kP <= p1; panel += kP) StreamPanels<M, kP>(p, x, k, panel, splits);
  for (; panel < p1; ++panel) StreamPanels<M, 1>(p, x, k, panel, splits);
  hwy::FlushStream();  // whoever is told that y is ready finds it
}

void IeeeStreamImpl(const Problem& p, const float* x, int64_t k, int64_t p0, int64_t p1,
                    int splits) {
  switch (p.m) {
    case 1:
      return StreamRows<1>(p, x, k, p0, p1, splits);
    case 2:
      return StreamRows<2>(p, x, k, p0, p1, splits);
    case 3:
      return StreamRows<3>(p, x, k, p0, p1, splits);
    case 4:
      return StreamRows<4>(p, x, k, p0, p1, splits);
    case 5:
      return StreamRows<5>(p, x, k, p0, p1, splits);
    case 6:
      return StreamRows<6>(p, x, k, p0, p1, splits);
    case 7:
      return StreamRows<7>(p, x, k, p0, p1, splits);
    case 8:
      return StreamRows<8>(p, x, k, p0, p1, splits);
  }
}

constexpr int kFmaChains = 12;

float FmaLoopImpl(int64_t iterations) {
  const DF df;
  VF acc[kFmaChains];
  const VF a = hn::Set(df, 0.9999999f), b = hn::Set(df, 1e-7f);
  for (VF& v : acc) v = hn::Iota(df, 1.0f);
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (VF& v : acc) v = hn::MulAdd(v, a, b);
  }
  VF sum = acc[0];
  for (int i = 1; i < kFmaChains; ++i) sum = hn::Add(sum, acc[i]);
  return hn::GetLane(hn::SumOfLanes(df, sum));
}

int64_t FmaLoopProductsImpl(int64_t iterations) { return iterations * kFmaChains * kL; }

uint64_t ReadLoopImpl(const uint64_t* data, int64_t n) {
  const hn::ScalableTag<uint64_t> d;
  constexpr int64_t lanes = static_cast<int64_t>(hn::MaxLanes(hn::ScalableTag<uint64_t>()));
  auto s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  for (int64_t i = 0; i + 4 * lanes <= n; i += 4 * lanes) {
    s0 = hn::Add(s0, hn::LoadU(d, data + i));
    s1 = hn::Add(s1, hn::LoadU(d, data + i + lanes));
    s2 = hn::Add(s2, hn::LoadU(d, data + i + 2 * lanes));
    s3 = hn::Add(s3, hn::LoadU(d, data + i + 3 * lanes));
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3))));
}

const char* TargetNameImpl() { return kL == 16 ? "avx512" : "avx2"; }

}  // namespace HWY_NAMESPACE
}  // namespace tare::ops::gemm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tare::ops::gemm {
HWY_EXPORT(IeeeTileImpl);
HWY_EXPORT(IeeeStreamImpl);
HWY_EXPORT(ConvertRowImpl);
HWY_EXPORT(TargetNameImpl);
HWY_EXPORT(FmaLoopImpl);
HWY_EXPORT(FmaLoopProductsImpl);
HWY_EXPORT(ReadLoopImpl);

void IeeeTile(const Problem& problem, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
  HWY_DYNAMIC_DISPATCH(IeeeTileImpl)(problem, m0, m1, n0, n1);
}
void IeeeStream(const Problem& problem, const float* x_f32, int64_t k, int64_t p0, int64_t p1,
                int splits) {
  HWY_DYNAMIC_DISPATCH(IeeeStreamImpl)(problem, x_f32, k, p0, p1, splits);
}
void ConvertRow(const Matrix& matrix, int64_t row, int64_t begin, int64_t count, float* dst) {
  HWY_DYNAMIC_DISPATCH(ConvertRowImpl)(matrix, row, begin, count, dst);
}
float FmaLoop(int64_t iterations) { return HWY_DYNAMIC_DISPATCH(FmaLoopImpl)(iterations); }
int64_t FmaLoopProducts(int64_t iterations) {
  return HWY_DYNAMIC_DISPATCH(FmaLoopProductsImpl)(iterations);
}
uint64_t ReadLoop(const uint64_t* data, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(ReadLoopImpl)(data, n);
}
const char* SimdTargetName() { return HWY_DYNAMIC_DISPATCH(TargetNameImpl)(); }
}  // namespace tare::ops::gemm
#endif
