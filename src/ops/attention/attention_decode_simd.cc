// Attention of a run of one token (decode) in the ieee-f32 step: the few rows that share a KV head
// are too few to fill the lanes of a vector, so lanes are keys for the scores and head elements for
// P V. The same chains, hence the same bits, as attention_simd.cc at a quarter of its time.

#include "ops/attention/attention_kernels.h"

#if defined(__x86_64__)
#define HWY_BASELINE_TARGETS HWY_AVX2  // older CPUs are refused at start-up: no fused multiply-add
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention/attention_decode_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "numerics/elementary_simd.h"
#include "numerics/fp.h"
#include "ops/attention/attention_plain.h"
#include "ops/attention/attention_simd-inl.h"
#include "ops/linear/simd_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tare::ops::attention {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace num = tare::numerics::HWY_NAMESPACE;
namespace rows = tare::ops::gemm::HWY_NAMESPACE;
using rows::DF;
using rows::DU;
using rows::kL;
using rows::VF;

constexpr int64_t kTileMax = 128;
constexpr int64_t kDimMax = 256;

// K rows of a tile, transposed for lanes of keys: word w of 32 bits (two bf16 or one f32) of keys
// [kL * g, kL * g + kL) is vector (g * words + w).
struct KeyTile {
  alignas(64) uint32_t blocks[kTileMax * kDimMax];
};

// Copies 16-byte pieces so that a full vector holds piece c of keys r, 4 + r, 8 + r, ... of its
// group.
HWY_INLINE void CopyPieces(const uint8_t* row, int64_t words, int64_t key, uint32_t* blocks) {
  const int64_t group = key / kL, in_group = key % kL, block = in_group / 4, r = in_group % 4;
  uint32_t* out = blocks + group * words * kL + r * kL + block * 4;
  for (int64_t c = 0; c < words / 4; ++c) std::memcpy(out + c * 4 * kL, row + c * 16, 16);
}

// The four words of piece c for all keys of a group.
HWY_INLINE void Transpose(const uint32_t* blocks, hn::Vec<DU>* w) {
  const DU du;
  const hn::Repartition<uint64_t, DU> d64;
  const auto a = hn::Load(du, blocks), b = hn::Load(du, blocks + kL);
  const auto c = hn::Load(du, blocks + 2 * kL), d = hn::Load(du, blocks + 3 * kL);
  const auto ab_lo = hn::BitCast(d64, hn::InterleaveLower(du, a, b)),
             ab_hi = hn::BitCast(d64, hn::InterleaveUpper(du, a, b));
  const auto cd_lo = hn::BitCast(d64, hn::InterleaveLower(du, c, d)),
             cd_hi = hn::BitCast(d64, hn::InterleaveUpper(du, c, d));
  w[0] = hn::BitCast(du, hn::InterleaveLower(d64, ab_lo, cd_lo));
  w[1] = hn::BitCast(du, hn::InterleaveUpper(d64, ab_lo, cd_lo));
  w[2] = hn::BitCast(du, hn::InterleaveLower(d64, ab_hi, cd_hi));
  w[3] = hn::BitCast(du, hn::InterleaveUpper(d64, ab_hi, cd_hi));
}

// s[r][key] = chain(d) of q[r][d] k[key][d] for R rows and one group of keys.
template <bool kBf16, int R>
HWY_INLINE void ScoreGroup(const float* q, int64_t ldq, const uint32_t* blocks, int64_t words,
                           float* s, int64_t lds) {
  const DF df;
  const DU du;
  const auto high = hn::Set(du, 0xffff0000u);
  VF acc[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) acc[r] = hn::Zero(df);
  for (int64_t c = 0; c < words; c += 4) {
    hn::Vec<DU> w[4];
    Transpose(blocks + c * kL, w);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      if constexpr (kBf16) {
        const VF even = hn::BitCast(df, hn::ShiftLeft<16>(w[i])),
                 odd = hn::BitCast(df, hn::And(w[i], high));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          acc[r] = hn::MulAdd(hn::Set(df, q[r * ldq + 2 * (c + i)]), even, acc[r]);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          acc[r] = hn::MulAdd(hn::Set(df, q[r * ldq + 2 * (c + i) + 1]), odd, acc[r]);
      } else {
        const VF k = hn::BitCast(df, w[i]);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r] = hn::MulAdd(hn::Set(df, q[r * ldq + c + i]), k, acc[r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) hn::Store(acc[r], df, s + r * lds);
}

template <bool kBf16>
HWY_INLINE VF LoadValue(const void* row, int64_t at) {
  const DF df;
  if constexpr (kBf16) {
    const DU du;
    const hn::Rebind<uint16_t, DU> d16;
    return hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(
                               du, hn::LoadU(d16, static_cast<const uint16_t*>(row) + at))));
  } else {
    return hn::LoadU(df, static_cast<const float*>(row) + at);
  }
}

// o[r][x .. x + NV vectors] = o * alpha[r], then chain(keys) of p[r][key] v[key][x].
template <bool kBf16, int R, int NV>
HWY_INLINE void ValueColumns(float* o, int64_t ldo, const float* alpha, const float* p, int64_t ldp,
                             const void* const* v, int64_t begin, int64_t end, int64_t x) {
  const DF df;
  VF acc[R][NV];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < NV; ++i)
      acc[r][i] = hn::Mul(hn::Load(df, o + r * ldo + x + i * kL), hn::Set(df, alpha[r]));
  }
  for (int64_t j = begin; j < end; ++j) {
    VF value[NV];
#pragma GCC unroll 4
    for (int i = 0; i < NV; ++i) value[i] = LoadValue<kBf16>(v[j], x + i * kL);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const VF pr = hn::Set(df, p[r * ldp + j]);
#pragma GCC unroll 4
      for (int i = 0; i < NV; ++i) acc[r][i] = hn::MulAdd(pr, value[i], acc[r][i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < NV; ++i) hn::Store(acc[r][i], df, o + r * ldo + x + i * kL);
  }
}

// Rows [0, R) of one KV head: heads h0 .. h0 + R - 1 of the only token of the run.
template <bool kBf16, int R>
void DecodeRows(const Params& p, const Args& a, const Run& run, int64_t kv_head, int64_t h0) {
  const DF df;
  const hn::FixedTag<float, 4> d4;
  constexpr DType kDType = kBf16 ? DType::kBF16 : DType::kF32;
  const int64_t d = p.head_dim, size = SizeOf(kDType), words = d * size / 4;
  const int64_t position = run.position, row = p.kv_heads * d;
  const int64_t low = p.window == 0 ? 0 : std::max<int64_t>(0, position - p.window + 1);
  const int64_t k_stride = a.kv.k_stride == 0 ? row : a.kv.k_stride,
                v_stride = a.kv.v_stride == 0 ? row : a.kv.v_stride;
  const int64_t q_stride = a.q_stride == 0 ? p.q_heads * d : a.q_stride;
  const int64_t out_stride = a.out_stride == 0 ? p.q_heads * d : a.out_stride;
  const float c_scalar = ScoreScale(p);
  const bool softcap = p.softcap != 0.0f;

  static thread_local KeyTile tile_data;
  alignas(64) float q[R * kDimMax], o[R * kDimMax], total[R * kDimMax], s[R * kTileMax];
  alignas(64) float lane[R][4];
  const void* v_row[kTileMax];
  // m: reference r of the split
  float m[R], m_total[R] = {}, l_total[R] = {}, alpha[R];
  for (int r = 0; r < R; ++r)
    rows::LoadRow(a.q, kDType, run.q_begin * q_stride + (h0 + r) * d, d, q + r * d);
  // One lane's worth of a vector function; both forms have the same bits.
  const auto exp2 = [&](float x) { return hn::GetLane(num::Exp2(df, hn::Set(df, x))); };
  const auto max2 = [](float x, float y) { return x > y ? x : y; };

  bool started = false;
  for (int64_t split = low / p.kv_split; split * p.kv_split <= position; ++split) {
    const int64_t split_end = std::min((split + 1) * p.kv_split, position + 1);
    for (int r = 0; r < R; ++r) {
      m[r] = -__builtin_inff();
      hn::Store(hn::Zero(d4), d4, lane[r]);
    }
    std::memset(o, 0, static_cast<size_t>(R * d) * sizeof(float));
    bool first_tile = true;
    for (int64_t tile = std::max(split * p.kv_split, low / p.kv_tile * p.kv_tile); tile < split_end;
         tile += p.kv_tile) {
      const int64_t begin = std::max(tile, low) - tile,
                    end = std::min(tile + p.kv_tile, split_end) - tile;
      const int64_t first_group = begin / kL, groups = (end + kL - 1) / kL;
      for (int64_t j = first_group * kL; j < groups * kL; ++j) {
        // Keys that are not there repeat the last one: finite, and masked below.
        const int64_t key = tile + std::min(j, end - 1);
        const auto* k = static_cast<const uint8_t*>(a.kv.k) +
                        (KeyOffset(a.kv, run, key, k_stride, row) + kv_head * d) * size;
        CopyPieces(k, words, j, tile_data.blocks);
        if (j < end) {
          v_row[j] = static_cast<const uint8_t*>(a.kv.v) +
                     (KeyOffset(a.kv, run, key, v_stride, row) + kv_head * d) * size;
        }
      }
      for (int64_t g = first_group; g < groups; ++g) {
        ScoreGroup<kBf16, R>(q, d, tile_data.blocks + g * words * kL, words, s + g * kL, kTileMax);
      }
      for (int r = 0; r < R; ++r) {
        float* sr = s + r * kTileMax;
        for (int64_t g = first_group; softcap && g < groups; ++g) {
          const VF u =
              num::Tanh(df, hn::Mul(hn::Load(df, sr + g * kL), hn::Set(df, p.scale / p.softcap)));
          hn::Store(hn::Mul(u, hn::Set(df, p.softcap)), df, sr + g * kL);
        }
        for (int64_t j = first_group * kL; j < begin; ++j) sr[j] = -__builtin_inff();
        for (int64_t j = end; j < groups * kL; ++j) sr[j] = -__builtin_inff();
        VF top = hn::Set(df, -__builtin_inff());
        for (int64_t g = first_group; g < groups; ++g) top = Larger(top, hn::Load(df, sr + g * kL));
        const float rn = NextReference(m[r], hn::GetLane(hn::MaxOfLanes(df, top)) * c_scalar);
        alpha[r] = first_tile ? 1.0f : exp2(m[r] - rn);
        m[r] = rn;
        const VF c7 = hn::Set(df, c_scalar * 0x1p-7f),
                 offset = hn::Set(df, attention::ScoreOffset(rn));
        for (int64_t g = first_group; g < groups; ++g) {
          VF y = Probability(df, hn::Load(df, sr + g * kL), c7, offset);
          if constexpr (kBf16) y = rows::RoundToBf16(y);
          hn::Store(y, df, sr + g * kL);
        }
        // Masked p is +0 even where a whole row of -inf made it NaN.
        for (int64_t j = first_group * kL; j < begin; ++j) sr[j] = 0.0f;
        for (int64_t j = end; j < groups * kL; ++j) sr[j] = 0.0f;
        auto l = hn::Mul(hn::Load(d4, lane[r]), hn::Set(d4, alpha[r]));
        for (int64_t j = first_group * kL; j < groups * kL; j += 8) {
          const auto x = hn::Load(d4, sr + j), y = hn::Load(d4, sr + j + 4);
          l = hn::Add(l, hn::ConcatEven(d4, y, x));
          l = hn::Add(l, hn::ConcatOdd(d4, y, x));
        }
        hn::Store(l, d4, lane[r]);
      }
      constexpr int kNv = R <= 4 ? 4 : 2;
      int64_t x = 0;
      for (; x + kNv * kL <= d; x += kNv * kL) {
        ValueColumns<kBf16, R, kNv>(o, d, alpha, s, kTileMax, v_row, begin, end, x);
      }
      for (; x < d; x += kL)
        ValueColumns<kBf16, R, 1>(o, d, alpha, s, kTileMax, v_row, begin, end, x);
      first_tile = false;
    }
    for (int r = 0; r < R; ++r) {
      const float ls = (lane[r][0] + lane[r][1]) + (lane[r][2] + lane[r][3]);
      float* t = total + r * d;
      if (!started) {
        m_total[r] = m[r], l_total[r] = ls;
        std::memcpy(t, o + r * d, static_cast<size_t>(d) * sizeof(float));
        continue;
      }
      const float mn = max2(m_total[r], m[r]);
      const float fa = exp2(m_total[r] - mn), fb = exp2(m[r] - mn);
      l_total[r] = numerics::Fma(ls, fb, l_total[r] * fa);
      m_total[r] = mn;
      for (int64_t x = 0; x < d; x += kL) {
        hn::Store(hn::MulAdd(hn::Load(df, o + r * d + x), hn::Set(df, fb),
                             hn::Mul(hn::Load(df, t + x), hn::Set(df, fa))),
                  df, t + x);
      }
    }
    started = true;
  }
  for (int r = 0; r < R; ++r) {
    const int64_t h = h0 + r;
    float l = l_total[r], f = 1.0f, lse;
    const auto log2 = [&](float x) { return hn::GetLane(num::Log2(df, hn::Set(df, x))); };
    if (p.sink) {
      const float t2 = a.sink[h] * kLog2e, rt = m_total[r];
      const float top = rt != rt ? rt : t2 != t2 ? t2 : max2(rt, t2);
      f = exp2(rt - top);
      l = numerics::Fma(l, f, exp2(t2 - top));
      lse = top + log2(l);
    } else {
      lse = m_total[r] + log2(l);
    }
    const float rt_end = m_total[r];
    const VF inverse = hn::Set(df, 1.0f / l + (rt_end - rt_end)), fv = hn::Set(df, f);
    float* t = total + r * d;
    for (int64_t x = 0; x < d; x += kL) {
      VF v = hn::Load(df, t + x);
      if (p.sink) v = hn::Mul(v, fv);
      hn::Store(hn::Add(hn::Mul(v, inverse), hn::Zero(df)), df, t + x);
    }
    rows::StoreRow(a.out, kDType, run.q_begin * out_stride + h * d, t, d);
    if (a.lse2 != nullptr) a.lse2[run.q_begin * p.q_heads + h] = numerics::Canonical(lse);
  }
}

template <bool kBf16>
void DecodeTyped(const Params& p, const Args& a, const Run& run, int64_t kv_head) {
  const int64_t group = p.q_heads / p.kv_heads;
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group;) {
    const int64_t left = (kv_head + 1) * group - h;
    if (left >= 8)
      DecodeRows<kBf16, 8>(p, a, run, kv_head, h), h += 8;
    else if (left >= 4)
      DecodeRows<kBf16, 4>(p, a, run, kv_head, h), h += 4;
    else if (left == 3)
      DecodeRows<kBf16, 3>(p, a, run, kv_head, h), h += 3;
    else if (left == 2)
      DecodeRows<kBf16, 2>(p, a, run, kv_head, h), h += 2;
    else
      DecodeRows<kBf16, 1>(p, a, run, kv_head, h), h += 1;
  }
}

void DecodeImpl(const Params& p, const Args& a, const Run& run, int64_t kv_head) {
  if (p.dtype == DType::kBF16) return DecodeTyped<true>(p, a, run, kv_head);
  return DecodeTyped<false>(p, a, run, kv_head);
}

}  // namespace HWY_NAMESPACE
}  // namespace tare::ops::attention
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tare::ops::attention {
HWY_EXPORT(DecodeImpl);
void DecodeHead(const Params& params, const Args& args, const Run& run, int64_t kv_head) {
  HWY_DYNAMIC_DISPATCH(DecodeImpl)(params, args, run, kv_head);
}
}  // namespace tare::ops::attention
#endif
