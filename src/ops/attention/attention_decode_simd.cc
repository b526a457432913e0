// Attention of a run of one token (decode) in the ieee-f32 step: the few rows that share a KV head
// are too few to fill the lanes of a vector, so lanes are keys for the scores and head elements for
// P V. The same chains, hence the same bits, as attention_simd.cc at a quarter of its time.

#include "ops/attention/attention_kernels.h"

#if defined(__x86_64__)
#define HWY_BASELINE_TARGETS HWY_AVX2  // older CPUs are refused at start-up: no fused multiply-add
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention/attention_decode_simd.cc"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "numerics/elementary_simd.h"
#include "numerics/fp.h"
#include "ops/attention/attention_plain.h"
#include "ops/attention/attention_simd-inl.h"
#include "ops/linear/simd_rows-inl.h"

#ifndef TARE_OPS_ATTENTION_DECODE_ONCE
#define TARE_OPS_ATTENTION_DECODE_ONCE
namespace tare::ops::attention {
// The sums of one head over one split: reference r, denominator l, O [d].
struct SplitSum {
  float *r, *l, *o;
};
// O comes first and a head takes a multiple of 16 floats, so that vectors stay aligned.
inline SplitSum SplitSumAt(float* sums, int64_t head, int64_t d) {
  float* at = sums + head * (d + 16);
  return {at + d, at + d + 1, at};
}
}  // namespace tare::ops::attention
#endif

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

// s[r][key] = chain(d) of q[r][d] k[key][d] for R rows and NG groups of keys. A chain is as slow as
// the latency of its multiply-adds, so R * NG of them go on side by side.
template <bool kBf16, int R, int NG>
HWY_INLINE void ScoreGroups(const float* q, int64_t ldq, const uint32_t* blocks, int64_t words,
                            float* s, int64_t lds) {
  const DF df;
  const DU du;
  const auto high = hn::Set(du, 0xffff0000u);
  VF acc[NG][R];
#pragma GCC unroll 4
  for (int g = 0; g < NG; ++g) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[g][r] = hn::Zero(df);
  }
  for (int64_t c = 0; c < words; c += 4) {
#pragma GCC unroll 4
    for (int g = 0; g < NG; ++g) {
      hn::Vec<DU> w[4];
      Transpose(blocks + (g * words + c) * kL, w);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        if constexpr (kBf16) {
          const VF even = hn::BitCast(df, hn::ShiftLeft<16>(w[i])),
                   odd = hn::BitCast(df, hn::And(w[i], high));
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r)
            acc[g][r] = hn::MulAdd(hn::Set(df, q[r * ldq + 2 * (c + i)]), even, acc[g][r]);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r)
            acc[g][r] = hn::MulAdd(hn::Set(df, q[r * ldq + 2 * (c + i) + 1]), odd, acc[g][r]);
        } else {
          const VF k = hn::BitCast(df, w[i]);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r)
            acc[g][r] = hn::MulAdd(hn::Set(df, q[r * ldq + c + i]), k, acc[g][r]);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < NG; ++g) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) hn::Store(acc[g][r], df, s + r * lds + g * kL);
  }
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
                             const uint8_t* const* v, int64_t begin, int64_t end, int64_t x) {
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

// Addresses of one KV head's keys, page by page.
class KeyWalk {
 public:
  KeyWalk(const KvSource& kv, const Run& run, const void* data, int64_t stride, int64_t row,
          int64_t offset, int64_t size)
      : data_(static_cast<const uint8_t*>(data) + offset * size),
        table_(kv.block_table == nullptr ? nullptr : kv.block_table + run.block_row * kv.max_pages),
        page_size_(kv.page_size),
        step_((table_ == nullptr ? stride : row) * size),
        base_(table_ == nullptr ? run.kv_begin * step_ : 0) {}

  // rows[j] = address of key `key` + j, j < count.
  void Rows(int64_t key, int64_t count, const uint8_t** rows) const {
    if (table_ == nullptr) {
      const uint8_t* at = data_ + base_ + key * step_;
      for (int64_t j = 0; j < count; ++j) rows[j] = at + j * step_;
      return;
    }
    int64_t page = key / page_size_, in_page = key % page_size_;
    for (int64_t j = 0; j < count; ++page, in_page = 0) {
      const uint8_t* at = data_ + (table_[page] * page_size_ + in_page) * step_;
      const int64_t end = std::min(count, j + page_size_ - in_page);
      for (; j < end; ++j, at += step_) rows[j] = at;
    }
  }

 private:
  const uint8_t* data_;
  const int32_t* table_;
  int64_t page_size_, step_, base_;
};

HWY_INLINE void PrefetchRow(const uint8_t* row, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) hwy::Prefetch(row + at);
}

// Split `split` of heads h0 .. h0 + R - 1 (of one KV head) of the run's only token.
template <bool kBf16, int R>
void SplitRows(const Params& p, const Args& a, const Run& run, int64_t kv_head, int64_t h0,
               int64_t split, const SplitSum* sums) {
  const DF df;
  const hn::FixedTag<float, 4> d4;
  constexpr DType kDType = kBf16 ? DType::kBF16 : DType::kF32;
  const int64_t d = p.head_dim, size = SizeOf(kDType), words = d * size / 4;
  const int64_t position = run.position, row = p.kv_heads * d;
  const int64_t low = p.window == 0 ? 0 : std::max<int64_t>(0, position - p.window + 1);
  const int64_t q_stride = a.q_stride == 0 ? p.q_heads * d : a.q_stride;
  const KeyWalk keys(a.kv, run, a.kv.k, a.kv.k_stride == 0 ? row : a.kv.k_stride, row, kv_head * d,
                     size);
  const KeyWalk values(a.kv, run, a.kv.v, a.kv.v_stride == 0 ? row : a.kv.v_stride, row,
                       kv_head * d, size);
  const float c_scalar = ScoreScale(p);
  const bool softcap = p.softcap != 0.0f;

  static thread_local KeyTile tile_data;
  alignas(64) float q[R * kDimMax], o[R * kDimMax], s[R * kTileMax];
  alignas(64) float lane[R][4];
  // The rows of this tile and of the next one, whose lines are asked for while this one is at work.
  const uint8_t *k_rows[2][kTileMax], *v_rows[2][kTileMax];
  float m[R], alpha[R];  // m: reference r of the split
  for (int r = 0; r < R; ++r)
    rows::LoadRow(a.q, kDType, run.q_begin * q_stride + (h0 + r) * d, d, q + r * d);
  // One lane's worth of a vector function; both forms have the same bits.
  const auto exp2 = [&](float x) { return hn::GetLane(num::Exp2(df, hn::Set(df, x))); };

  const int64_t split_end = std::min((split + 1) * p.kv_split, position + 1);
  for (int r = 0; r < R; ++r) {
    m[r] = -__builtin_inff();
    hn::Store(hn::Zero(d4), d4, lane[r]);
  }
  std::memset(o, 0, static_cast<size_t>(R * d) * sizeof(float));
  const int64_t first_tile = std::max(split * p.kv_split, low / p.kv_tile * p.kv_tile);
  const auto find = [&](int64_t tile, int half) {
    const int64_t count = std::min(p.kv_tile, split_end - tile);
    keys.Rows(tile, count, k_rows[half]);
    values.Rows(tile, count, v_rows[half]);
    return count;
  };
  find(first_tile, 0);
  int half = 0;
  for (int64_t tile = first_tile; tile < split_end; tile += p.kv_tile, half ^= 1) {
    const int64_t begin = std::max(tile, low) - tile,
                  end = std::min(tile + p.kv_tile, split_end) - tile;
    const int64_t first_group = begin / kL, groups = (end + kL - 1) / kL;
    const uint8_t *const *k_row = k_rows[half], *const *v_row = v_rows[half];
    const int64_t ahead =
        tile + p.kv_tile < split_end ? find(tile + p.kv_tile, half ^ 1) : int64_t{0};
    for (int64_t j = first_group * kL; j < groups * kL; ++j) {
      // Keys that are not there repeat the last one: finite, and masked below.
      CopyPieces(k_row[std::min(j, end - 1)], words, j, tile_data.blocks);
      if (tile == first_tile && j < end) PrefetchRow(v_row[j], d * size);
      if (j < ahead) PrefetchRow(k_rows[half ^ 1][j], d * size);
    }
    constexpr int kNg = R <= 3 ? (kL >= 16 ? 4 : 2) : R == 4 && kL >= 16 ? 2 : 1;
    int64_t g = first_group;
    for (; g + kNg <= groups; g += kNg) {
      ScoreGroups<kBf16, R, kNg>(q, d, tile_data.blocks + g * words * kL, words, s + g * kL,
                                 kTileMax);
    }
    for (; g < groups; ++g) {
      ScoreGroups<kBf16, R, 1>(q, d, tile_data.blocks + g * words * kL, words, s + g * kL,
                               kTileMax);
    }
    for (int64_t j = 0; j < ahead; ++j) PrefetchRow(v_rows[half ^ 1][j], d * size);
    for (int r = 0; r < R; ++r) {
      float* sr = s + r * kTileMax;
      for (g = first_group; softcap && g < groups; ++g) {
        const VF u =
            num::Tanh(df, hn::Mul(hn::Load(df, sr + g * kL), hn::Set(df, p.scale / p.softcap)));
        hn::Store(hn::Mul(u, hn::Set(df, p.softcap)), df, sr + g * kL);
      }
      for (int64_t j = first_group * kL; j < begin; ++j) sr[j] = -__builtin_inff();
      for (int64_t j = end; j < groups * kL; ++j) sr[j] = -__builtin_inff();
      VF top = hn::Set(df, -__builtin_inff());
      for (g = first_group; g < groups; ++g) top = Larger(top, hn::Load(df, sr + g * kL));
      const float rn = NextReference(m[r], hn::GetLane(hn::MaxOfLanes(df, top)) * c_scalar);
      alpha[r] = tile == first_tile ? 1.0f : rn == m[r] ? 1.0f : exp2(m[r] - rn);
      m[r] = rn;
      const VF c7 = hn::Set(df, c_scalar * 0x1p-7f),
               offset = hn::Set(df, attention::ScoreOffset(rn));
      for (g = first_group; g < groups; ++g) {
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
    for (; x + kNv * kL <= d; x += kNv * kL)
      ValueColumns<kBf16, R, kNv>(o, d, alpha, s, kTileMax, v_row, begin, end, x);
    for (; x < d; x += kL)
      ValueColumns<kBf16, R, 1>(o, d, alpha, s, kTileMax, v_row, begin, end, x);
  }
  for (int r = 0; r < R; ++r) {
    const SplitSum& sum = sums[r];
    *sum.r = m[r];
    *sum.l = (lane[r][0] + lane[r][1]) + (lane[r][2] + lane[r][3]);
    std::memcpy(sum.o, o + r * d, static_cast<size_t>(d) * sizeof(float));
  }
}

template <bool kBf16>
void SplitTyped(const Params& p, const Args& a, const Run& run, int64_t kv_head, int64_t split,
                float* sums) {
  const int64_t group = p.q_heads / p.kv_heads;
  SplitSum at[8];
  for (int64_t h = 0; h < group;) {
    const int64_t left = group - h, first = kv_head * group + h;
    const int64_t count = left >= 8 ? 8 : left >= 4 ? 4 : left;
    for (int64_t r = 0; r < count; ++r) at[r] = SplitSumAt(sums, h + r, p.head_dim);
    switch (count) {
      case 8:
        SplitRows<kBf16, 8>(p, a, run, kv_head, first, split, at);
        break;
      case 4:
        SplitRows<kBf16, 4>(p, a, run, kv_head, first, split, at);
        break;
      case 3:
        SplitRows<kBf16, 3>(p, a, run, kv_head, first, split, at);
        break;
      case 2:
        SplitRows<kBf16, 2>(p, a, run, kv_head, first, split, at);
        break;
      default:
        SplitRows<kBf16, 1>(p, a, run, kv_head, first, split, at);
    }
    h += count;
  }
}

void DecodeSplitImpl(const Params& p, const Args& a, const Run& run, int64_t kv_head, int64_t split,
                     float* sums) {
  if (p.dtype == DType::kBF16) return SplitTyped<true>(p, a, run, kv_head, split, sums);
  return SplitTyped<false>(p, a, run, kv_head, split, sums);
}

void DecodeJoinImpl(const Params& p, const Args& a, const Run& run, int64_t kv_head, int64_t splits,
                    float* sums) {
  const DF df;
  const int64_t d = p.head_dim, group = p.q_heads / p.kv_heads;
  const int64_t out_stride = a.out_stride == 0 ? p.q_heads * d : a.out_stride;
  const auto exp2 = [&](float x) { return hn::GetLane(num::Exp2(df, hn::Set(df, x))); };
  const auto log2 = [&](float x) { return hn::GetLane(num::Log2(df, hn::Set(df, x))); };
  const auto max2 = [](float x, float y) { return x > y ? x : y; };
  for (int64_t g = 0; g < group; ++g) {
    const int64_t h = kv_head * group + g;
    const SplitSum total = SplitSumAt(sums, g, d);
    float rt = *total.r, l = *total.l, f = 1.0f, lse;
    for (int64_t i = 1; i < splits; ++i) {
      const SplitSum next = SplitSumAt(sums + i * DecodeSplitFloats(p), g, d);
      const float rn = max2(rt, *next.r);
      const float fa = exp2(rt - rn), fb = exp2(*next.r - rn);
      l = numerics::Fma(*next.l, fb, l * fa);
      rt = rn;
      for (int64_t x = 0; x < d; x += kL) {
        hn::Store(hn::MulAdd(hn::Load(df, next.o + x), hn::Set(df, fb),
                             hn::Mul(hn::Load(df, total.o + x), hn::Set(df, fa))),
                  df, total.o + x);
      }
    }
    if (p.sink) {
      const float t2 = a.sink[h] * kLog2e;
      const float top = rt != rt ? rt : t2 != t2 ? t2 : max2(rt, t2);
      f = exp2(rt - top);
      l = numerics::Fma(l, f, exp2(t2 - top));
      lse = top + log2(l);
    } else {
      lse = rt + log2(l);
    }
    // rt - rt: NaN where the reference is not finite. NOLINTNEXTLINE(misc-redundant-expression)
    const VF inverse = hn::Set(df, 1.0f / l + (rt - rt)), fv = hn::Set(df, f);
    for (int64_t x = 0; x < d; x += kL) {
      VF v = hn::Load(df, total.o + x);
      if (p.sink) v = hn::Mul(v, fv);
      hn::Store(hn::Add(hn::Mul(v, inverse), hn::Zero(df)), df, total.o + x);
    }
    rows::StoreRow(a.out, p.dtype, run.q_begin * out_stride + h * d, total.o, d);
    if (a.lse2 != nullptr) a.lse2[run.q_begin * p.q_heads + h] = numerics::Canonical(lse);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace tare::ops::attention
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tare::ops::attention {
HWY_EXPORT(DecodeSplitImpl);
HWY_EXPORT(DecodeJoinImpl);

void DecodeSplit(const Params& params, const Args& args, const Run& run, int64_t kv_head,
                 int64_t split, float* sums) {
  HWY_DYNAMIC_DISPATCH(DecodeSplitImpl)(params, args, run, kv_head, split, sums);
}
void DecodeJoin(const Params& params, const Args& args, const Run& run, int64_t kv_head,
                int64_t splits, float* sums) {
  HWY_DYNAMIC_DISPATCH(DecodeJoinImpl)(params, args, run, kv_head, splits, sums);
}
}  // namespace tare::ops::attention
#endif
