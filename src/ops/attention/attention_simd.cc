// Attention, compiled once per SIMD target and chosen at run time.
//
// Forward: the lanes of every vector are rows (tokens times the heads of a group), so scores,
// masks, sums and outputs are all vertical and each lane is the contract's scalar program.
// Backward: lanes are keys for S, P, dV and dK, and head elements for dQ.

#include "ops/attention/attention_kernels.h"

#if defined(__x86_64__)
#define HWY_BASELINE_TARGETS HWY_AVX2  // older CPUs are refused at start-up: no fused multiply-add
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention/attention_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "numerics/elementary_simd.h"
#include "numerics/lanes.h"
#include "numerics/mma.h"
#include "ops/attention/attention_plain.h"
#include "ops/attention/attention_simd-inl.h"
#include "ops/linear/simd_rows-inl.h"
#include "tensor/convert.h"

#ifndef TARE_OPS_ATTENTION_SIMD_ONCE
#define TARE_OPS_ATTENTION_SIMD_ONCE
namespace tare::ops::attention {
// Grow-only scratch of a worker. Take() hands out pieces aligned to 64 bytes.
class Scratch {
 public:
  void Reset(size_t floats) {
    if (floats > capacity_) {
      buffer_.reset(static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64)));
      capacity_ = floats;
    }
    used_ = 0;
  }
  float* Take(int64_t floats) {
    float* at = buffer_.get() + used_;
    used_ += (static_cast<size_t>(floats) + 15) / 16 * 16;
    TARE_CHECK(used_ <= capacity_);
    return at;
  }

 private:
  std::unique_ptr<float, void (*)(void*)> buffer_{nullptr, std::free};
  size_t capacity_ = 0;
  size_t used_ = 0;
};
inline thread_local Scratch attention_scratch;
}  // namespace tare::ops::attention
#endif

HWY_BEFORE_NAMESPACE();
namespace tare::ops::attention {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace num = tare::numerics::HWY_NAMESPACE;
namespace rows = tare::ops::gemm::HWY_NAMESPACE;
using rows::DF;
using rows::kL;
using rows::VF;
using DI = hn::ScalableTag<int32_t>;

constexpr int kMr = kL >= 16 ? 8 : 4;

enum class Init { kZero, kLoad, kScale };

// c[r][lane] = init + chain(k ascending) of a(r, k) * b[k][lane] for MR rows and NV vectors, with
// a(r, k) = a[r * ra + k * ka]. kScale starts from c * scale[lane].
template <int MR, int NV, Init kInit>
HWY_INLINE void Micro(float* HWY_RESTRICT c, int64_t ldc, const float* HWY_RESTRICT a, int64_t ra,
                      int64_t ka, const float* HWY_RESTRICT b, int64_t ldb, int64_t count,
                      const float* HWY_RESTRICT scale) {
  const DF df;
  VF acc[MR][NV];
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) {
      if constexpr (kInit == Init::kZero) {
        acc[r][v] = hn::Zero(df);
      } else {
        acc[r][v] = hn::Load(df, c + r * ldc + v * kL);
        if constexpr (kInit == Init::kScale)
          acc[r][v] = hn::Mul(acc[r][v], hn::Load(df, scale + v * kL));
      }
    }
  }
  for (int64_t k = 0; k < count; ++k) {
    VF bv[NV];
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) bv[v] = hn::Load(df, b + v * kL);
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
      const VF av = hn::Set(df, a[r * ra]);
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) acc[r][v] = hn::MulAdd(av, bv[v], acc[r][v]);
    }
    a += ka;
    b += ldb;
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) hn::Store(acc[r][v], df, c + r * ldc + v * kL);
  }
}

template <int NV, Init kInit, int MR = kMr>
HWY_INLINE void MicroColumn(int64_t r_count, float* c, int64_t ldc, const float* a, int64_t ra,
                            int64_t ka, const float* b, int64_t ldb, int64_t count,
                            const float* scale) {
  int64_t r = 0;
  for (; r + MR <= r_count; r += MR) {
    Micro<MR, NV, kInit>(c + r * ldc, ldc, a + r * ra, ra, ka, b, ldb, count, scale);
  }
  if constexpr (MR > 1) {
    if (r < r_count) {
      MicroColumn<NV, kInit, MR / 2>(r_count - r, c + r * ldc, ldc, a + r * ra, ra, ka, b, ldb,
                                     count, scale);
    }
  }
}

// The whole tile: rows [0, r_count), lanes [0, width), width a multiple of 16.
template <Init kInit>
void MatTile(int64_t r_count, int64_t width, float* c, int64_t ldc, const float* a, int64_t ra,
             int64_t ka, const float* b, int64_t ldb, int64_t count, const float* scale = nullptr) {
  int64_t w = 0;
  for (; w + 2 * kL <= width; w += 2 * kL) {
    MicroColumn<2, kInit>(r_count, c + w, ldc, a, ra, ka, b + w, ldb, count,
                          scale ? scale + w : nullptr);
  }
  for (; w < width; w += kL) {
    MicroColumn<1, kInit>(r_count, c + w, ldc, a, ra, ka, b + w, ldb, count,
                          scale ? scale + w : nullptr);
  }
}

// The same tile in the sm90-mma step: operands are exact values of kDType, turned back into codes.
// The caller's tiles start at multiples of 16 positions, so groups are the contract's.
template <DType kDType, Init kInit>
void MatTileSm90(int64_t r_count, int64_t width, float* c, int64_t ldc, const float* a, int64_t ra,
                 int64_t ka, const float* b, int64_t ldb, int64_t count, const float* scale) {
  constexpr auto kType = kDType == DType::kF16 ? numerics::MmaType::kF16 : numerics::MmaType::kBF16;
  const auto code = [](float v) { return kDType == DType::kF16 ? F32ToF16(v) : F32ToBf16(v); };
  std::vector<uint16_t> ac(static_cast<size_t>(r_count * count)),
      bc(static_cast<size_t>(count * width));
  for (int64_t r = 0; r < r_count; ++r) {
    for (int64_t k = 0; k < count; ++k)
      ac[static_cast<size_t>(r * count + k)] = code(a[r * ra + k * ka]);
  }
  for (int64_t k = 0; k < count; ++k) {
    for (int64_t w = 0; w < width; ++w)
      bc[static_cast<size_t>(k * width + w)] = code(b[k * ldb + w]);
  }
  const auto pa = numerics::MmaA::Pack(kType, ac.data(), r_count, count, count, 1);
  const auto pb = numerics::MmaB::Pack(kType, bc.data(), width, count, 1, width);
  for (int64_t r = 0; r < r_count; ++r) {
    for (int64_t w = 0; w < width; ++w) {
      if (kInit == Init::kZero) c[r * ldc + w] = 0.0f;
      if (kInit == Init::kScale) c[r * ldc + w] *= scale[w];
    }
  }
  numerics::MmaTile(pa, 0, r_count, pb, 0, width, 0, count, c, ldc);
}

template <DType kDType, bool kSm90, Init kInit>
HWY_INLINE void Product(int64_t r_count, int64_t width, float* c, int64_t ldc, const float* a,
                        int64_t ra, int64_t ka, const float* b, int64_t ldb, int64_t count,
                        const float* scale = nullptr) {
  if constexpr (kSm90) {
    MatTileSm90<kDType, kInit>(r_count, width, c, ldc, a, ra, ka, b, ldb, count, scale);
  } else {
    MatTile<kInit>(r_count, width, c, ldc, a, ra, ka, b, ldb, count, scale);
  }
}

template <DType kDType>
HWY_INLINE VF RoundTo(VF v) {
  if constexpr (kDType == DType::kBF16) return rows::RoundToBf16(v);
  if constexpr (kDType == DType::kF16) return rows::RoundToF16(v);
  return v;
}

struct Lanes {
  int32_t low[kMaxLanes];   // first visible key
  int32_t high[kMaxLanes];  // last visible key: the row's own position
};

template <DType kDType, bool kSm90>
void ForwardBlockTyped(const Params& p, const Args& a, const Run& run, int64_t kv_head,
                       int64_t flat0, int64_t lanes) {
  const DF df;
  const DI di;
  const int64_t d = p.head_dim, group = p.q_heads / p.kv_heads;
  const int64_t width = (lanes + 15) / 16 * 16;
  const int64_t q_stride = a.q_stride == 0 ? p.q_heads * d : a.q_stride;
  const int64_t out_stride = a.out_stride == 0 ? p.q_heads * d : a.out_stride;
  const int64_t k_stride = a.kv.k_stride == 0 ? p.kv_heads * d : a.kv.k_stride;
  const int64_t v_stride = a.kv.v_stride == 0 ? p.kv_heads * d : a.kv.v_stride;
  const bool softcap = p.softcap != 0.0f;
  const VF c = hn::Set(df, ScoreScale(p));
  const VF minus_inf = hn::Set(df, -__builtin_inff());
  const VF one = hn::Set(df, 1.0f);

  Scratch& scratch = attention_scratch;
  scratch.Reset(static_cast<size_t>(3 * d * width + p.kv_tile * width + 2 * p.kv_tile * d +
                                    16 * width + d + 256));
  float* qt = scratch.Take(d * width);
  float* o = scratch.Take(d * width);
  float* total = scratch.Take(d * width);
  float* s = scratch.Take(p.kv_tile * width);
  float* kf = scratch.Take(p.kv_tile * d);
  float* vf = scratch.Take(p.kv_tile * d);
  float* m = scratch.Take(width);  // reference r of the split
  float* alpha = scratch.Take(width);
  float* quad = scratch.Take(4 * width);
  float* m_total = scratch.Take(width);
  float* l_total = scratch.Take(width);
  float* fa = scratch.Take(width);
  float* fb = scratch.Take(width);
  float* line = scratch.Take(d);

  alignas(64) Lanes at;
  int32_t min_low = INT32_MAX, max_low = 0, min_high = INT32_MAX, max_high = 0;
  for (int64_t i = 0; i < width; ++i) {
    // Lanes past the block repeat its last row and are not stored.
    const int64_t flat = flat0 + std::min(i, lanes - 1);
    const int64_t t = flat / group, h = kv_head * group + flat % group;
    const int64_t position = run.position + t;
    at.high[i] = static_cast<int32_t>(position);
    at.low[i] =
        static_cast<int32_t>(p.window == 0 ? 0 : std::max<int64_t>(0, position - p.window + 1));
    min_low = std::min(min_low, at.low[i]), max_low = std::max(max_low, at.low[i]);
    min_high = std::min(min_high, at.high[i]), max_high = std::max(max_high, at.high[i]);
    rows::LoadRow(a.q, kDType, (run.q_begin + t) * q_stride + h * d, d, line);
    for (int64_t x = 0; x < d; ++x) qt[x * width + i] = line[x];
  }

  const int64_t first_split = min_low / p.kv_split, last_split = max_high / p.kv_split;
  for (int64_t split = first_split; split <= last_split; ++split) {
    const int64_t split_begin = split * p.kv_split;
    const int64_t split_end = std::min<int64_t>(split_begin + p.kv_split, max_high + 1);
    for (int64_t w = 0; w < width; w += kL) {
      hn::Store(minus_inf, df, m + w);
      for (int q = 0; q < 4; ++q) hn::Store(hn::Zero(df), df, quad + q * width + w);
    }
    const int64_t first_tile = std::max<int64_t>(split_begin, min_low / p.kv_tile * p.kv_tile);
    for (int64_t tile = first_tile; tile < split_end; tile += p.kv_tile) {
      const int64_t keys = std::min(p.kv_tile, split_end - tile);
      for (int64_t j = 0; j < keys; ++j) {
        const int64_t row = p.kv_heads * d;
        rows::LoadRow(a.kv.k, kDType, KeyOffset(a.kv, run, tile + j, k_stride, row) + kv_head * d,
                      d, kf + j * d);
        rows::LoadRow(a.kv.v, kDType, KeyOffset(a.kv, run, tile + j, v_stride, row) + kv_head * d,
                      d, vf + j * d);
      }
      Product<kDType, kSm90, Init::kZero>(keys, width, s, width, kf, d, 1, qt, width, d);
      const bool masked = tile < max_low || tile + keys - 1 > min_high;
      for (int64_t w = 0; w < width; w += kL) {
        const auto low = hn::Load(di, at.low + w), high = hn::Load(di, at.high + w);
        const auto visible = [&](int64_t j) {
          const auto key = hn::Set(di, static_cast<int32_t>(tile + j));
          return hn::RebindMask(df, hn::AndNot(hn::Lt(key, low), hn::Not(hn::Gt(key, high))));
        };
        const VF old = hn::Load(df, m + w);
        VF top = minus_inf;
        for (int64_t j = 0; j < keys; ++j) {
          VF x = hn::Load(df, s + j * width + w);
          if (softcap) {
            const VF u = num::Tanh(df, hn::Mul(x, hn::Set(df, p.scale / p.softcap)));
            x = hn::Mul(u, hn::Set(df, p.softcap));
          }
          if (masked) x = hn::IfThenElse(visible(j), x, minus_inf);
          if (masked || softcap) hn::Store(x, df, s + j * width + w);
          top = Larger(top, x);
        }
        // Seen before in this split: only then is there something to rescale.
        const auto begin = hn::Max(low, hn::Set(di, static_cast<int32_t>(split_begin)));
        const auto seen =
            hn::And(hn::Lt(begin, hn::Set(di, static_cast<int32_t>(tile))),
                    hn::Not(hn::Lt(high, hn::Set(di, static_cast<int32_t>(split_begin)))));
        // A row without a visible key here has top = -inf and keeps its reference.
        const VF mc = hn::Mul(top, c);
        VF r = hn::IfThenElse(hn::Le(mc, hn::Add(old, hn::Set(df, kSlack))), old, hn::Ceil(mc));
        r = hn::Add(r, hn::Sub(r, r));  // an infinite one is NaN
        const auto sees = hn::AndNot(hn::Lt(high, hn::Set(di, static_cast<int32_t>(tile))),
                                     hn::Lt(low, hn::Set(di, static_cast<int32_t>(tile + keys))));
        r = hn::IfThenElse(hn::RebindMask(df, sees), r, old);
        const VF scale =
            hn::IfThenElse(hn::RebindMask(df, seen), num::Exp2(df, hn::Sub(old, r)), one);
        const VF c7 = hn::Mul(c, hn::Set(df, 0x1p-7f));
        const VF offset = ScoreOffset(df, r);
        VF l[4];
        for (int q = 0; q < 4; ++q) l[q] = hn::Mul(hn::Load(df, quad + q * width + w), scale);
        const auto probability = [&](int64_t j) {
          float* sj = s + j * width + w;
          VF x = RoundTo<kDType>(Probability(df, hn::Load(df, sj), c7, offset));
          if (masked) x = hn::IfThenElseZero(visible(j), x);
          hn::Store(x, df, sj);
          return x;
        };
        int64_t j = 0;
        for (; j + 8 <= keys; j += 8) {
          for (int q = 0; q < 4; ++q) {
            l[q] = hn::Add(l[q], probability(j + 2 * q));
            l[q] = hn::Add(l[q], probability(j + 2 * q + 1));
          }
        }
        for (; j < keys; ++j) l[j % 8 / 2] = hn::Add(l[j % 8 / 2], probability(j));
        for (int q = 0; q < 4; ++q) hn::Store(l[q], df, quad + q * width + w);
        hn::Store(r, df, m + w);
        hn::Store(scale, df, alpha + w);
      }
      if (tile == first_tile) {
        Product<kDType, kSm90, Init::kZero>(d, width, o, width, vf, 1, d, s, width, keys);
      } else {
        Product<kDType, kSm90, Init::kScale>(d, width, o, width, vf, 1, d, s, width, keys, alpha);
      }
    }
    // Combine: a lane that saw nothing here keeps its total, one whose first split this is takes
    // it.
    const bool alone = first_split == last_split;
    for (int64_t w = 0; w < width; w += kL) {
      const VF l =
          hn::Add(hn::Add(hn::Load(df, quad + w), hn::Load(df, quad + width + w)),
                  hn::Add(hn::Load(df, quad + 2 * width + w), hn::Load(df, quad + 3 * width + w)));
      const VF ms = hn::Load(df, m + w);
      if (alone) {
        hn::Store(ms, df, m_total + w), hn::Store(l, df, l_total + w);
        continue;
      }
      const auto low = hn::Load(di, at.low + w), high = hn::Load(di, at.high + w);
      const auto begin = hn::Set(di, static_cast<int32_t>(split_begin));
      const auto none = hn::RebindMask(
          df, hn::Or(hn::Lt(high, begin),
                     hn::Not(hn::Lt(low, hn::Set(di, static_cast<int32_t>(split_end))))));
      const auto first = hn::RebindMask(df, hn::Not(hn::Lt(low, begin)));
      const VF mt = split == first_split ? minus_inf : hn::Load(df, m_total + w);
      const VF lt = split == first_split ? hn::Zero(df) : hn::Load(df, l_total + w);
      const VF top = hn::Max(mt, ms);
      VF fa_v = num::Exp2(df, hn::Sub(mt, top));
      VF fb_v = num::Exp2(df, hn::Sub(ms, top));
      VF l_new = hn::MulAdd(l, fb_v, hn::Mul(lt, fa_v));
      l_new = hn::IfThenElse(none, lt, hn::IfThenElse(first, l, l_new));
      const VF m_new = hn::IfThenElse(none, mt, hn::IfThenElse(first, ms, top));
      hn::Store(l_new, df, l_total + w), hn::Store(m_new, df, m_total + w);
      hn::Store(fa_v, df, fa + w), hn::Store(fb_v, df, fb + w);
      for (int64_t x = 0; x < d; ++x) {
        const VF ov = hn::Load(df, o + x * width + w);
        const VF tv = split == first_split ? hn::Zero(df) : hn::Load(df, total + x * width + w);
        const VF both = hn::MulAdd(ov, fb_v, hn::Mul(tv, fa_v));
        hn::Store(hn::IfThenElse(none, tv, hn::IfThenElse(first, ov, both)), df,
                  total + x * width + w);
      }
    }
    if (alone) std::swap(o, total);
  }

  float* lse2 = fa;
  for (int64_t w = 0; w < width; w += kL) {
    const VF mt = hn::Load(df, m_total + w);
    VF l = hn::Load(df, l_total + w);
    VF f = one, lse;
    if (p.sink) {
      alignas(64) float t[kMaxLanes];
      for (int64_t i = 0; i < kL; ++i) {
        const int64_t flat = flat0 + std::min(w + i, lanes - 1);
        t[i] = a.sink[kv_head * group + flat % group];
      }
      const VF t2 = hn::Mul(hn::Load(df, t), hn::Set(df, kLog2e));
      // A NaN reference must stay one; hn::Max would drop it.
      const VF top =
          hn::IfThenElse(hn::IsNaN(mt), mt, hn::IfThenElse(hn::IsNaN(t2), t2, hn::Max(mt, t2)));
      f = num::Exp2(df, hn::Sub(mt, top));
      l = hn::MulAdd(l, f, num::Exp2(df, hn::Sub(t2, top)));
      lse = hn::Add(top, num::Log2(df, l));
    } else {
      lse = hn::Add(mt, num::Log2(df, l));
    }
    hn::Store(lse, df, lse2 + w);
    const VF inverse = hn::Add(hn::Div(one, l), hn::Sub(mt, mt));
    for (int64_t x = 0; x < d; ++x) {
      VF v = hn::Load(df, total + x * width + w);
      if (p.sink) v = hn::Mul(v, f);
      hn::Store(hn::Add(hn::Mul(v, inverse), hn::Zero(df)), df, total + x * width + w);
    }
  }
  for (int64_t i = 0; i < lanes; ++i) {
    const int64_t t = (flat0 + i) / group, h = kv_head * group + (flat0 + i) % group;
    for (int64_t x = 0; x < d; ++x) line[x] = total[x * width + i];
    rows::StoreRow(a.out, kDType, (run.q_begin + t) * out_stride + h * d, line, d);
    if (a.lse2 != nullptr) a.lse2[(run.q_begin + t) * p.q_heads + h] = numerics::Canonical(lse2[i]);
  }
}

void ForwardBlockImpl(const Params& p, const Args& a, const Run& run, int64_t kv_head,
                      int64_t flat0, int64_t lanes, bool sm90) {
  const auto call = [&](auto block) { block(p, a, run, kv_head, flat0, lanes); };
  switch (p.dtype) {
    case DType::kBF16:
      return call(sm90 ? ForwardBlockTyped<DType::kBF16, true>
                       : ForwardBlockTyped<DType::kBF16, false>);
    case DType::kF16:
      return call(sm90 ? ForwardBlockTyped<DType::kF16, true>
                       : ForwardBlockTyped<DType::kF16, false>);
    default:
      return call(ForwardBlockTyped<DType::kF32, false>);
  }
}

template <DType kDType, bool kSm90>
void BackwardHeadsTyped(const Params& p, const BackwardArgs& a, const Run& run, int64_t h_begin,
                        int64_t h_end, float* dk, float* dv, float* dsink_units) {
  constexpr int64_t kKeys = 64, kRows = 64;
  const DF df;
  const DI di;
  const int64_t d = p.head_dim, n = run.q_rows, heads = p.q_heads;
  const int64_t kv_head = h_begin / (heads / p.kv_heads);
  const auto stride = [&](int64_t given, int64_t count) { return given == 0 ? count * d : given; };
  const int64_t q_stride = stride(a.q_stride, heads), out_stride = stride(a.out_stride, heads);
  const int64_t dout_stride = stride(a.dout_stride, heads), dq_stride = stride(a.dq_stride, heads);
  const int64_t k_stride = stride(a.k_stride, p.kv_heads),
                v_stride = stride(a.v_stride, p.kv_heads);
  const bool softcap = p.softcap != 0.0f;
  const float c_scalar = ScoreScale(p);
  const VF c = hn::Set(df, c_scalar);

  Scratch& scratch = attention_scratch;
  scratch.Reset(static_cast<size_t>(n * (3 * d + 2) + 2 * kRows * kKeys + 7 * d * kKeys + d + 512));
  float* q = scratch.Take(n * d);  // of one head, f32
  float* go = scratch.Take(n * d);
  float* dq = scratch.Take(n * d);
  float* delta = scratch.Take(n);
  float* lse2 = scratch.Take(n);
  float* s = scratch.Take(kRows * kKeys);
  float* ds = scratch.Take(kRows * kKeys);
  float* kt = scratch.Take(d * kKeys);  // [d][key]
  float* vt = scratch.Take(d * kKeys);
  float* kf = scratch.Take(kKeys * d);  // [key][d]
  float* acc_k = scratch.Take(d * kKeys);
  float* acc_v = scratch.Take(d * kKeys);
  float* sum_k = scratch.Take(d * kKeys);  // over the cuts of 4,096 rows
  float* sum_v = scratch.Take(d * kKeys);
  float* line = scratch.Take(d);

  for (int64_t h = h_begin; h < h_end; ++h) {
    for (int64_t i = 0; i < n; ++i) {
      rows::LoadRow(a.q, kDType, (run.q_begin + i) * q_stride + h * d, d, q + i * d);
      rows::LoadRow(a.dout, kDType, (run.q_begin + i) * dout_stride + h * d, d, go + i * d);
      rows::LoadRow(a.out, kDType, (run.q_begin + i) * out_stride + h * d, d, line);
      delta[i] = numerics::LanesDot<32>(go + i * d, line, d);
      lse2[i] = a.lse2[(run.q_begin + i) * heads + h];
    }
    std::fill(dq, dq + n * d, 0.0f);
    for (int64_t key0 = 0; key0 < n; key0 += kKeys) {
      const int64_t keys = std::min(kKeys, n - key0);
      for (int64_t j = 0; j < kKeys; ++j) {
        if (j < keys) {
          rows::LoadRow(a.k, kDType, (run.kv_begin + key0 + j) * k_stride + kv_head * d, d,
                        kf + j * d);
          rows::LoadRow(a.v, kDType, (run.kv_begin + key0 + j) * v_stride + kv_head * d, d, line);
        } else {
          std::fill(kf + j * d, kf + (j + 1) * d, 0.0f);
          std::fill(line, line + d, 0.0f);
        }
        for (int64_t x = 0; x < d; ++x) {
          kt[x * kKeys + j] = kf[j * d + x];
          vt[x * kKeys + j] = line[x];
        }
      }
      std::fill(acc_k, acc_k + d * kKeys, 0.0f);
      std::fill(acc_v, acc_v + d * kKeys, 0.0f);
      std::fill(sum_k, sum_k + d * kKeys, 0.0f);
      std::fill(sum_v, sum_v + d * kKeys, 0.0f);
      const int64_t row_end = p.window == 0 ? n : std::min(n, key0 + keys - 1 + p.window);
      int64_t next_cut = (key0 / p.unit_rows + 1) * p.unit_rows;
      for (int64_t i0 = key0; i0 < row_end;) {
        const int64_t i1 = std::min({i0 + kRows, row_end, next_cut});
        const int64_t count = i1 - i0;
        Product<kDType, kSm90, Init::kZero>(count, kKeys, s, kKeys, q + i0 * d, d, 1, kt, kKeys, d);
        Product<kDType, kSm90, Init::kZero>(count, kKeys, ds, kKeys, go + i0 * d, d, 1, vt, kKeys,
                                            d);
        const bool masked =
            keys < kKeys || i0 < key0 + kKeys - 1 || (p.window != 0 && i1 - 1 - p.window >= key0);
        for (int64_t i = i0; i < i1; ++i) {
          const VF minus_lse = hn::Set(df, -lse2[i]);
          const VF delta_v = hn::Set(df, delta[i]);
          const int64_t low = p.window == 0 ? 0 : std::max<int64_t>(0, i - p.window + 1);
          const auto low_v = hn::Set(di, static_cast<int32_t>(low - key0));
          const auto high_v = hn::Set(di, static_cast<int32_t>(std::min(i, n - 1) - key0));
          for (int64_t w = 0; w < kKeys; w += kL) {
            float* sp = s + (i - i0) * kKeys + w;
            float* dp = ds + (i - i0) * kKeys + w;
            VF x = hn::Load(df, sp), u = hn::Zero(df);
            if (softcap) {
              u = num::Tanh(df, hn::Mul(x, hn::Set(df, p.scale / p.softcap)));
              x = hn::Mul(u, hn::Set(df, p.softcap));
            }
            VF prob = BackwardProbability(df, x, c, minus_lse);
            VF g = hn::Mul(prob, hn::Sub(hn::Load(df, dp), delta_v));
            if (softcap) g = hn::Mul(g, hn::NegMulAdd(u, u, hn::Set(df, 1.0f)));
            prob = RoundTo<kDType>(prob);
            g = RoundTo<kDType>(g);
            if (masked) {
              const auto key = hn::Add(hn::Iota(di, 0), hn::Set(di, static_cast<int32_t>(w)));
              const auto visible =
                  hn::RebindMask(df, hn::AndNot(hn::Lt(key, low_v), hn::Not(hn::Gt(key, high_v))));
              prob = hn::IfThenElseZero(visible, prob);
              g = hn::IfThenElseZero(visible, g);
            }
            hn::Store(prob, df, sp);
            hn::Store(g, df, dp);
          }
        }
        Product<kDType, kSm90, Init::kLoad>(d, kKeys, acc_v, kKeys, go + i0 * d, 1, d, s, kKeys,
                                            count);
        Product<kDType, kSm90, Init::kLoad>(d, kKeys, acc_k, kKeys, q + i0 * d, 1, d, ds, kKeys,
                                            count);
        Product<kDType, kSm90, Init::kLoad>(count, d, dq + i0 * d, d, ds, kKeys, 1, kf, d, keys);
        i0 = i1;
        if (i0 == next_cut || i0 == row_end) {
          next_cut += p.unit_rows;
          for (int64_t x = 0; x < d * kKeys; x += kL) {
            hn::Store(hn::Add(hn::Load(df, sum_k + x), hn::Load(df, acc_k + x)), df, sum_k + x);
            hn::Store(hn::Add(hn::Load(df, sum_v + x), hn::Load(df, acc_v + x)), df, sum_v + x);
            hn::Store(hn::Zero(df), df, acc_k + x);
            hn::Store(hn::Zero(df), df, acc_v + x);
          }
        }
      }
      const bool first_head = h == h_begin;
      for (int64_t j = 0; j < keys; ++j) {
        float* k_row = dk + (key0 + j) * d;
        float* v_row = dv + (key0 + j) * d;
        for (int64_t x = 0; x < d; ++x) {
          k_row[x] = (first_head ? 0.0f : k_row[x]) + sum_k[x * kKeys + j];
          v_row[x] = (first_head ? 0.0f : v_row[x]) + sum_v[x * kKeys + j];
        }
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t x = 0; x < d; ++x) line[x] = dq[i * d + x] * p.scale + 0.0f;
      rows::StoreRow(a.dq, kDType, (run.q_begin + i) * dq_stride + h * d, line, d);
    }
    if (dsink_units != nullptr) {
      const float t2 = a.sink[h] * kLog2e;
      for (int64_t cut = 0; cut < n; cut += p.unit_rows) {
        const int64_t count = std::min(p.unit_rows, n - cut);
        for (int64_t i = 0; i < count; i += kL) {
          alignas(64) float part[16];
          for (int64_t j = 0; j < kL; ++j) part[j] = i + j < count ? lse2[cut + i + j] : 0.0f;
          hn::Store(num::Exp2(df, hn::Sub(hn::Set(df, t2), hn::Load(df, part))), df, part);
          // The row's P of the sink replaces its lse2, which is not needed any more.
          for (int64_t j = 0; j < kL && i + j < count; ++j) lse2[cut + i + j] = part[j];
        }
        numerics::LanesState<32> lanes;
        lanes.Reset();
        lanes.Run(count,
                  [&](float acc, int64_t i) { return acc + -(lse2[cut + i] * delta[cut + i]); });
        dsink_units[cut / p.unit_rows * heads + h] = lanes.Sum();
      }
    }
  }
}

template <DType kDType>
void StoreKvTyped(const Params& p, const BackwardArgs& a, const Run& run, int64_t kv_head,
                  const float* dk, const float* dv) {
  const int64_t d = p.head_dim;
  const auto stride = [&](int64_t given) { return given == 0 ? p.kv_heads * d : given; };
  const int64_t dk_stride = stride(a.dk_stride), dv_stride = stride(a.dv_stride);
  std::vector<float> line(static_cast<size_t>(d));
  for (int64_t j = 0; j < run.q_rows; ++j) {
    for (int64_t x = 0; x < d; ++x) line[x] = dk[j * d + x] * p.scale + 0.0f;
    rows::StoreRow(a.dk, kDType, (run.kv_begin + j) * dk_stride + kv_head * d, line.data(), d);
    for (int64_t x = 0; x < d; ++x) line[x] = dv[j * d + x] + 0.0f;
    rows::StoreRow(a.dv, kDType, (run.kv_begin + j) * dv_stride + kv_head * d, line.data(), d);
  }
}

void BackwardHeadsImpl(const Params& p, const BackwardArgs& a, const Run& run, int64_t h_begin,
                       int64_t h_end, float* dk, float* dv, float* dsink_units, bool sm90) {
  const auto call = [&](auto heads) { heads(p, a, run, h_begin, h_end, dk, dv, dsink_units); };
  switch (p.dtype) {
    case DType::kBF16:
      return call(sm90 ? BackwardHeadsTyped<DType::kBF16, true>
                       : BackwardHeadsTyped<DType::kBF16, false>);
    case DType::kF16:
      return call(sm90 ? BackwardHeadsTyped<DType::kF16, true>
                       : BackwardHeadsTyped<DType::kF16, false>);
    default:
      return call(BackwardHeadsTyped<DType::kF32, false>);
  }
}

void StoreKvImpl(const Params& p, const BackwardArgs& a, const Run& run, int64_t kv_head,
                 const float* dk, const float* dv) {
  switch (p.dtype) {
    case DType::kBF16:
      return StoreKvTyped<DType::kBF16>(p, a, run, kv_head, dk, dv);
    case DType::kF16:
      return StoreKvTyped<DType::kF16>(p, a, run, kv_head, dk, dv);
    default:
      return StoreKvTyped<DType::kF32>(p, a, run, kv_head, dk, dv);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace tare::ops::attention
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tare::ops::attention {
HWY_EXPORT(ForwardBlockImpl);
HWY_EXPORT(BackwardHeadsImpl);
HWY_EXPORT(StoreKvImpl);

void ForwardBlock(const Params& params, const Args& args, const Run& run, int64_t kv_head,
                  int64_t flat0, int64_t lanes, bool sm90) {
  HWY_DYNAMIC_DISPATCH(ForwardBlockImpl)(params, args, run, kv_head, flat0, lanes, sm90);
}
void BackwardHeads(const Params& params, const BackwardArgs& args, const Run& run, int64_t h_begin,
                   int64_t h_end, float* dk, float* dv, float* dsink_units, bool sm90) {
  HWY_DYNAMIC_DISPATCH(BackwardHeadsImpl)
  (params, args, run, h_begin, h_end, dk, dv, dsink_units, sm90);
}
void StoreKv(const Params& params, const BackwardArgs& args, const Run& run, int64_t kv_head,
             const float* dk, const float* dv) {
  HWY_DYNAMIC_DISPATCH(StoreKvImpl)(params, args, run, kv_head, dk, dv);
}
}  // namespace tare::ops::attention
#endif
