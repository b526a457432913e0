#include "ops/attention/attention_plain.h"

#include <algorithm>
#include <vector>

#include "numerics/elementary.h"
#include "numerics/lanes.h"
#include "numerics/sm90.h"
#include "ops/linear/gemm.h"
#include "tensor/convert.h"

namespace tare::ops::attention {
namespace {

using gemm::LoadAsF32;
using gemm::RoundOperand;
using gemm::StoreRounded;
using numerics::Exp2;
using numerics::Fma;

struct Rules {
  Params p;
  bool sm90 = false;
  float c = 0.0f;
  float r = 0.0f;  // scale / cap
  bool sink = false;
  bool softcap = false;
  bool fp8 = false;
  bool scale_q = false;
  bool leak = false;
  bool tile_sums = false;
  int64_t low = 0;  // added to the window's lower edge

  Rules(const Ctx& ctx, const Params& params, size_t runs) : p(params) {
    const fault::Side side = ctx.side;
    sm90 = ctx.profile == Profile::kSm90Mma && p.dtype != DType::kF32;
    sink = p.sink && !fault::Active(kSinkMissing, side);
    softcap = p.softcap != 0.0f && !fault::Active(kSoftcapMissing, side);
    c = softcap ? kLog2e : p.scale * kLog2e;
    r = softcap ? p.scale / p.softcap : 0.0f;
    fp8 = fault::Active(kKvFp8, side);
    leak = fault::Active(kPackedLeak, side);
    scale_q = fault::Active(kScaleQFirst, side) && !softcap;
    if (scale_q) c = kLog2e;
    if (fault::Active(kWindowOffByOne, side)) low = -1;
    if (fault::Active(kSplitByBatch, side) && runs > 1) p.kv_split = p.kv_split == 256 ? 512 : 256;
  }

  float Round(float v) const { return RoundOperand(v, p.dtype); }
  float Kv(float v) const { return fp8 ? E4m3ToF32(F32ToE4m3(v)) : v; }

  // c0 + sum of a_i b_i by the profile's step.
  float Chain(const float* a, const float* b, int64_t n, float c0) const {
    if (!sm90) {
      for (int64_t i = 0; i < n; ++i) c0 = Fma(a[i], b[i], c0);
      return c0;
    }
    for (int64_t i = 0; i < n; i += 16) {
      uint16_t x[16] = {}, y[16] = {};
      for (int64_t j = i; j < std::min(n, i + 16); ++j) {
        x[j - i] = p.dtype == DType::kBF16 ? F32ToBf16(a[j]) : F32ToF16(a[j]);
        y[j - i] = p.dtype == DType::kBF16 ? F32ToBf16(b[j]) : F32ToF16(b[j]);
      }
      c0 = p.dtype == DType::kBF16 ? numerics::Sm90Step<numerics::MmaType::kBF16>(x, y, c0)
                                   : numerics::Sm90Step<numerics::MmaType::kF16>(x, y, c0);
    }
    return c0;
  }

  int64_t First(int64_t i) const {
    return p.window == 0 ? 0 : std::max<int64_t>(0, i - p.window + 1 + low);
  }

  // s as the softmax sees it; *u is tanh(.) under a soft cap.
  float Score(const float* q, const float* k, float* u) const {
    float s = Chain(q, k, p.head_dim, 0.0f);
    *u = 0.0f;
    if (softcap) {
      *u = numerics::Tanh(s * r);
      s = *u * p.softcap;
    }
    return s;
  }
};

std::vector<float> Row(const void* data, DType dtype, int64_t at, int64_t n) {
  std::vector<float> row(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) row[static_cast<size_t>(i)] = LoadAsF32(data, dtype, at + i);
  return row;
}

struct RowResult {
  std::vector<float> out;
  float lse2;
};

// One row of one head. k(j), v(j) give rows of f32 values.
template <class Key, class Value>
RowResult AttendRow(const Rules& rules, std::vector<float> q, int64_t i, float sink, const Key& key,
                    const Value& value) {
  const Params& p = rules.p;
  const int64_t d = p.head_dim;
  const float inf = numerics::FloatOf(0x7f800000u);
  const float c = rules.c;
  if (rules.scale_q) {
    for (float& v : q) v = rules.Round(v * p.scale);
  }
  const int64_t first = rules.First(i);
  std::vector<float> total(static_cast<size_t>(d));
  float r = -inf, l = 0.0f;
  bool started = false;
  for (int64_t split = first / p.kv_split; split * p.kv_split <= i; ++split) {
    std::vector<float> o(static_cast<size_t>(d), 0.0f);
    float rs = -inf;
    float lane[4] = {};
    bool first_tile = true;
    const int64_t split_end = std::min((split + 1) * p.kv_split, i + 1);
    for (int64_t tile = std::max(split * p.kv_split, first / p.kv_tile * p.kv_tile);
         tile < split_end; tile += p.kv_tile) {
      const int64_t begin = std::max(tile, first), end = std::min(tile + p.kv_tile, i + 1);
      std::vector<float> s(static_cast<size_t>(p.kv_tile)),
          prob(static_cast<size_t>(p.kv_tile), 0.0f);
      float top = -inf;
      for (int64_t j = begin; j < end; ++j) {
        float u;
        s[static_cast<size_t>(j - tile)] = rules.Score(q.data(), key(j).data(), &u);
        top = std::max(top, s[static_cast<size_t>(j - tile)]);  // a NaN counts as -inf
      }
      const float rn = NextReference(rs, top * c);
      const float alpha = first_tile ? 1.0f : Rescale(rs, rn);
      for (int64_t j = begin; j < end; ++j) {
        const auto at = static_cast<size_t>(j - tile);
        prob[at] = rules.Round(Probability(s[at], c * 0x1p-7f, ScoreOffset(rn)));
      }
      for (float& x : lane) x *= alpha;
      float tile_lane[4] = {};
      for (int64_t j = 0; j < p.kv_tile; ++j)
        (rules.tile_sums ? tile_lane : lane)[j % 8 / 2] += prob[static_cast<size_t>(j)];
      for (int q = 0; q < 4; ++q) lane[q] += tile_lane[q];
      std::vector<std::vector<float>> rows;
      for (int64_t j = tile; j < end; ++j) rows.push_back(value(j));
      for (int64_t x = 0; x < d; ++x) {
        std::vector<float> column;
        column.reserve(rows.size());
        for (const auto& row : rows) column.push_back(row[static_cast<size_t>(x)]);
        float& ox = o[static_cast<size_t>(x)];
        ox = rules.Chain(prob.data(), column.data(), end - tile, ox * alpha);
      }
      rs = rn;
      first_tile = false;
    }
    const float ls = (lane[0] + lane[1]) + (lane[2] + lane[3]);
    if (!started) {
      r = rs, l = ls, total = o, started = true;
      continue;
    }
    const float rn = numerics::MaxOf(r, rs);
    const float a = Rescale(r, rn), b = Rescale(rs, rn);
    l = Fma(ls, b, l * a);
    for (size_t x = 0; x < total.size(); ++x) total[x] = Fma(o[x], b, total[x] * a);
    r = rn;
  }
  RowResult result;
  float f = 1.0f;
  if (rules.sink) {
    const float t2 = sink * kLog2e;
    const float top = numerics::MaxOf(r, t2);
    f = Exp2(r - top);
    l = Fma(l, f, Exp2(t2 - top));
    for (float& x : total) x *= f;
    result.lse2 = top + numerics::Log2(l);
  } else {
    result.lse2 = r + numerics::Log2(l);
  }
  // r - r: NaN where the reference is not finite. NOLINTNEXTLINE(misc-redundant-expression)
  const float inverse = 1.0f / l + (r - r);
  for (float& x : total) x = x * inverse + 0.0f;
  result.out = std::move(total);
  return result;
}

}  // namespace

Params NativeParams(Params p, std::span<const Run> runs) {
  int64_t rows = 0;
  for (const Run& r : runs) rows += r.q_rows;
  p.kv_split = rows <= 2 ? 256 : rows <= 8 ? 512 : 2048;
  return p;
}

bool AnyFault(fault::Side side) {
  return fault::Active(kWindowOffByOne, side) || fault::Active(kSinkMissing, side) ||
         fault::Active(kSoftcapMissing, side) || fault::Active(kKvFp8, side) ||
         fault::Active(kSplitByBatch, side) || fault::Active(kSplitByDecode, side) ||
         fault::Active(kTileByRows, side) || fault::Active(kScaleQFirst, side) ||
         fault::Active(kPackedLeak, side) || fault::Active(kSinkGradientMissing, side);
}

float ScoreScale(const Params& p) { return p.softcap != 0.0f ? kLog2e : p.scale * kLog2e; }

Status PlainForward(const Ctx& ctx, const Params& params, const Args& a) {
  const int64_t d = params.head_dim;
  const int64_t group = params.q_heads / params.kv_heads;
  const int64_t q_stride = a.q_stride == 0 ? params.q_heads * d : a.q_stride;
  const int64_t out_stride = a.out_stride == 0 ? params.q_heads * d : a.out_stride;
  const int64_t k_stride = a.kv.k_stride == 0 ? params.kv_heads * d : a.kv.k_stride;
  const int64_t v_stride = a.kv.v_stride == 0 ? params.kv_heads * d : a.kv.v_stride;
  for (const Run& run : a.runs) {
    Rules rules(ctx, params, a.runs.size());
    if (fault::Active(kSplitByDecode, ctx.side) && run.q_rows == 1) {
      rules.p.kv_split = rules.p.kv_split == 256 ? 512 : rules.p.kv_split / 2 / 128 * 128;
    }
    // The size alone moves no bit: r is an integer, and a chain goes on over tiles. A kernel that
    // followed it would sum by tile.
    if (fault::Active(kTileByRows, ctx.side) && run.q_rows >= 64) {
      rules.p.kv_tile = 192 - rules.p.kv_tile;
      rules.tile_sums = true;
    }
    ctx.pool->ParallelFor(run.q_rows * params.q_heads, [&](int64_t item) {
      const int64_t t = item / params.q_heads, h = item % params.q_heads, kv_head = h / group;
      const auto load = [&](const void* data, int64_t stride, int64_t key) {
        int64_t at = KeyOffset(a.kv, run, key, stride, params.kv_heads * d) + kv_head * d;
        if (rules.leak && key == 0 && a.kv.block_table == nullptr && run.kv_begin > 0) at -= stride;
        std::vector<float> row = Row(data, params.dtype, at, d);
        for (float& v : row) v = rules.Kv(v);
        return row;
      };
      const RowResult r = AttendRow(
          rules, Row(a.q, params.dtype, (run.q_begin + t) * q_stride + h * d, d), run.position + t,
          params.sink ? a.sink[h] : 0.0f, [&](int64_t j) { return load(a.kv.k, k_stride, j); },
          [&](int64_t j) { return load(a.kv.v, v_stride, j); });
      for (int64_t x = 0; x < d; ++x) {
        StoreRounded(a.out, params.dtype, (run.q_begin + t) * out_stride + h * d + x,
                     r.out[static_cast<size_t>(x)]);
      }
      if (a.lse2 != nullptr) {
        a.lse2[(run.q_begin + t) * params.q_heads + h] = numerics::Canonical(r.lse2);
      }
    });
  }
  return Ok();
}

Status PlainBackward(const Ctx& ctx, const Params& params, const BackwardArgs& a) {
  const Rules rules(ctx, params, a.runs.size());
  const int64_t d = params.head_dim, heads = params.q_heads;
  const int64_t group = heads / params.kv_heads;
  const auto stride = [&](int64_t given, int64_t n) { return given == 0 ? n * d : given; };
  const int64_t q_stride = stride(a.q_stride, heads), out_stride = stride(a.out_stride, heads),
                dout_stride = stride(a.dout_stride, heads), dq_stride = stride(a.dq_stride, heads),
                k_stride = stride(a.k_stride, params.kv_heads),
                v_stride = stride(a.v_stride, params.kv_heads),
                dk_stride = stride(a.dk_stride, params.kv_heads),
                dv_stride = stride(a.dv_stride, params.kv_heads);
  const bool drop_sink = fault::Active(kSinkGradientMissing, ctx.side) || !rules.sink;
  std::vector<float> dsink(static_cast<size_t>(heads), 0.0f);
  for (const Run& run : a.runs) {
    const int64_t n = run.q_rows;
    // Per KV head, so that dk and dv of a group are added in head order.
    ctx.pool->ParallelFor(params.kv_heads, [&](int64_t kv_head) {
      const auto rows_of = [&](const void* data, int64_t s, int64_t begin, int64_t head) {
        std::vector<std::vector<float>> rows;
        rows.reserve(static_cast<size_t>(n));
        for (int64_t i = 0; i < n; ++i)
          rows.push_back(Row(data, params.dtype, (begin + i) * s + head * d, d));
        return rows;
      };
      auto k = rows_of(a.k, k_stride, run.kv_begin, kv_head);
      auto v = rows_of(a.v, v_stride, run.kv_begin, kv_head);
      for (auto* m : {&k, &v}) {
        for (auto& row : *m) {
          for (float& x : row) x = rules.Kv(x);
        }
      }
      const auto size = static_cast<size_t>(n);
      std::vector<std::vector<float>> dk(size, std::vector<float>(static_cast<size_t>(d), 0.0f)),
          dv = dk;
      for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        const auto q = rows_of(a.q, q_stride, run.q_begin, h);
        const auto o = rows_of(a.out, out_stride, run.q_begin, h);
        const auto go = rows_of(a.dout, dout_stride, run.q_begin, h);
        // p (rounded) and dS of every visible pair.
        std::vector<std::vector<float>> p(size, std::vector<float>(size, 0.0f)), ds = p;
        std::vector<float> delta(size);
        for (int64_t i = 0; i < n; ++i) {
          const auto at = static_cast<size_t>(i);
          delta[at] = numerics::LanesDot<32>(go[at].data(), o[at].data(), d);
          const float lse2 = a.lse2[(run.q_begin + i) * heads + h];
          for (int64_t j = rules.First(i); j <= i; ++j) {
            const auto key = static_cast<size_t>(j);
            float u;
            const float s = rules.Score(q[at].data(), k[key].data(), &u);
            const float prob = BackwardProbability(s, rules.c, lse2);
            const float dp = rules.Chain(go[at].data(), v[key].data(), d, 0.0f);
            float g = prob * (dp - delta[at]);
            if (rules.softcap) g = g * Fma(-u, u, 1.0f);
            ds[at][key] = rules.Round(g);
            p[at][key] = rules.Round(prob);
          }
          // dq: keys ascending, groups of the tensor-core step aligned to the absolute position.
          for (int64_t x = 0; x < d; ++x) {
            std::vector<float> column;
            for (int64_t j = 0; j <= i; ++j)
              column.push_back(k[static_cast<size_t>(j)][static_cast<size_t>(x)]);
            const float sum = rules.Chain(ds[at].data(), column.data(), i + 1, 0.0f);
            StoreRounded(a.dq, params.dtype, (run.q_begin + i) * dq_stride + h * d + x,
                         sum * params.scale + 0.0f);
          }
        }
        for (int64_t j = 0; j < n; ++j) {
          for (int64_t x = 0; x < d; ++x) {
            float sum_k = 0.0f, sum_v = 0.0f;
            for (int64_t cut = 0; cut < n; cut += params.unit_rows) {
              const int64_t end = std::min(n, cut + params.unit_rows);
              std::vector<float> pj, dsj, qx, gx;
              for (int64_t i = cut; i < end; ++i) {
                const auto at = static_cast<size_t>(i);
                pj.push_back(p[at][static_cast<size_t>(j)]);
                dsj.push_back(ds[at][static_cast<size_t>(j)]);
                qx.push_back(q[at][static_cast<size_t>(x)]);
                gx.push_back(go[at][static_cast<size_t>(x)]);
              }
              sum_v += rules.Chain(pj.data(), gx.data(), end - cut, 0.0f);
              sum_k += rules.Chain(dsj.data(), qx.data(), end - cut, 0.0f);
            }
            dk[static_cast<size_t>(j)][static_cast<size_t>(x)] += sum_k;
            dv[static_cast<size_t>(j)][static_cast<size_t>(x)] += sum_v;
          }
        }
        if (a.dsink != nullptr && !drop_sink) {
          const float t2 = a.sink[h] * kLog2e;
          for (int64_t cut = 0; cut < n; cut += params.unit_rows) {
            numerics::LanesState<32> lanes;
            lanes.Reset();
            lanes.Run(std::min(params.unit_rows, n - cut), [&](float acc, int64_t i) {
              const auto at = static_cast<size_t>(cut + i);
              const float lse2 = a.lse2[(run.q_begin + cut + i) * heads + h];
              return acc + -(Exp2(t2 - lse2) * delta[at]);
            });
            a.dsink[h] = numerics::Canonical(a.dsink[h] + lanes.Sum());
          }
        }
      }
      for (int64_t j = 0; j < n; ++j) {
        for (int64_t x = 0; x < d; ++x) {
          const auto key = static_cast<size_t>(j), at = static_cast<size_t>(x);
          StoreRounded(a.dk, params.dtype, (run.kv_begin + j) * dk_stride + kv_head * d + x,
                       dk[key][at] * params.scale + 0.0f);
          StoreRounded(a.dv, params.dtype, (run.kv_begin + j) * dv_stride + kv_head * d + x,
                       dv[key][at] + 0.0f);
        }
      }
    });
  }
  return Ok();
}

}  // namespace tare::ops::attention
