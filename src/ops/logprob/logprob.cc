#include "ops/logprob/logprob.h"
#include "ops/logprob/logprob_cuda.h"

#include "numerics/elementary.h"
#include "ops/logprob/leaf.h"
#include "ops/cuda_entry.h"
#include "ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/logprob/logprob.cc"
#include "ops/simd_targets.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "numerics/elementary_simd.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tare::ops::logprob {
namespace HWY_NAMESPACE {
using namespace tare::ops::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace)
namespace num = tare::numerics::HWY_NAMESPACE;

constexpr float kLog2e = 0x1.715476p0f;
constexpr float kInfinity = __builtin_inff();
constexpr int64_t kGroup = 8;  // blocks whose quad-lane sums run side by side

// Quad-lane sums of `kGroup` blocks of 128 values: column 8b + 2q and 8b + 2q + 1 belong to lane q,
// b ascending, the even one first; then (l0 + l1) + (l2 + l3). Two blocks share one vector of
// eight.
HWY_INLINE void QuadSums(const float* e, float* sums) {
  const hn::CappedTag<float, 8> d8;
  using V8 = hn::Vec<decltype(d8)>;
  static_assert(hn::MaxLanes(decltype(d8)()) == 8);
  V8 acc[kGroup / 2];
  for (auto& v : acc) v = hn::Zero(d8);
  for (int64_t b = 0; b < 16; ++b) {
    for (int64_t pair = 0; pair < kGroup / 2; ++pair) {
      const V8 first = hn::LoadU(d8, e + (2 * pair) * kBlock + 8 * b);
      const V8 second = hn::LoadU(d8, e + (2 * pair + 1) * kBlock + 8 * b);
      acc[pair] = hn::Add(acc[pair], hn::ConcatEven(d8, second, first));
      acc[pair] = hn::Add(acc[pair], hn::ConcatOdd(d8, second, first));
    }
  }
  for (int64_t pair = 0; pair < kGroup / 2; ++pair) {
    HWY_ALIGN float q[8];
    hn::Store(acc[pair], d8, q);
    sums[2 * pair] = (q[0] + q[1]) + (q[2] + q[3]);
    sums[2 * pair + 1] = (q[4] + q[5]) + (q[6] + q[7]);
  }
}

template <typename T, bool kEntropy>
Partial LeafT(const T* x, float temperature, int64_t begin, int64_t end) {
  const DF d;
  constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(d));
  const int64_t blocks = (end - begin + kBlock - 1) / kBlock;
  if (blocks == 0) return {-kInfinity, 0.0f, 0.0f};
  const int64_t padded = RoundUp(blocks, 16);
  // Per block: maximum, sum, entropy sum, and the exponent of the merge.
  float* m = Scratch(static_cast<size_t>(5 * padded));
  float* l = m + padded;
  float* u = l + padded;
  float* shift = u + padded;
  float* factor = shift + padded;
  HWY_ALIGN float z[kGroup * kBlock];
  HWY_ALIGN float e[kGroup * kBlock];
  HWY_ALIGN float w[kEntropy ? kGroup * kBlock : 1];
  const VF vt = hn::Set(d, temperature);
  for (int64_t first = 0; first < blocks; first += kGroup) {
    const int64_t group = std::min(kGroup, blocks - first);
    for (int64_t b = 0; b < kGroup; ++b) {
      float* zb = z + b * kBlock;
      const int64_t at = begin + (first + b) * kBlock;
      const int64_t count = b < group ? std::min(kBlock, end - at) : 0;
      VF maximum = hn::Set(d, -kInfinity);
      if (count == kBlock) {
        for (int64_t i = 0; i < kBlock; i += kLanes) {
          VF v = Load(x + at + i);
          if (temperature != 1.0f) v = hn::Div(v, vt);
          hn::Store(v, d, zb + i);
          maximum = hn::Max(maximum, v);
        }
      } else {
        for (int64_t i = 0; i < kBlock; i += kLanes) hn::Store(hn::Set(d, -kInfinity), d, zb + i);
        ForEachVector(count, [&](int64_t i, int64_t n) HWY_ATTR {
          VF v = LoadPart(x + at + i, n);
          if (temperature != 1.0f) v = hn::Div(v, vt);
          StorePart(v, zb + i, n);
        });
        for (int64_t i = 0; i < kBlock; i += kLanes)
          maximum = hn::Max(maximum, hn::Load(d, zb + i));
      }
      // A NaN may get lost in the maximum; it comes back through the sum. -0 becomes +0.
      const float block_max = hn::GetLane(hn::MaxOfLanes(d, maximum)) + 0.0f;
      // Ids of a block without any finite logit would differ by NaN (-inf - -inf): from 0 they
      // differ by -inf and count as nothing, and a NaN among them stays one.
      const VF vm = hn::Set(d, block_max == -kInfinity ? 0.0f : block_max);
      const VF log2e = hn::Set(d, kLog2e);
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        const VF difference = hn::Sub(hn::Load(d, zb + i), vm);
        const VF used = num::Exp2(d, hn::Mul(difference, log2e));
        hn::Store(used, d, e + b * kBlock + i);
        if constexpr (kEntropy) {
          const VF product = hn::Mul(used, difference);
          hn::Store(hn::IfThenZeroElse(hn::Eq(used, hn::Zero(d)), product), d, w + b * kBlock + i);
        }
      }
      if (b < group) m[first + b] = block_max;
    }
    float sums[kGroup];
    QuadSums(e, sums);
    for (int64_t b = 0; b < group; ++b) l[first + b] = sums[b];
    if constexpr (kEntropy) {
      QuadSums(w, sums);
      for (int64_t b = 0; b < group; ++b) u[first + b] = sums[b];
    }
  }
  // Every merge scales one side by exp2((m2 - m1) * log2e), m1 the larger maximum of the past and
  // the block: known beforehand, so the exponentials are taken side by side.
  float past = m[0];
  shift[0] = 0.0f;
  for (int64_t b = 1; b < blocks; ++b) {
    const bool higher = m[b] > past;
    shift[b] = past == m[b] ? 0.0f : higher ? past - m[b] : m[b] - past;
    if (higher) past = m[b];
  }
  for (int64_t b = blocks; b < padded; ++b) shift[b] = 0.0f;
  for (int64_t b = 0; b < padded; b += kLanes) {
    hn::StoreU(num::Exp2(d, hn::Mul(hn::LoadU(d, shift + b), hn::Set(d, kLog2e))), d, factor + b);
  }
  Partial p = {m[0], l[0], kEntropy ? u[0] : 0.0f};
  for (int64_t b = 1; b < blocks; ++b) {
    if (m[b] == -kInfinity && l[b] == 0.0f) continue;  // nothing in the block
    if (p.m == -kInfinity && p.l == 0.0f) {
      p = {m[b], l[b], kEntropy ? u[b] : 0.0f};
      continue;
    }
    const bool higher = m[b] > p.m;
    const Partial block = {m[b], l[b], kEntropy ? u[b] : 0.0f};
    const Partial& one = higher ? block : p;
    const Partial& two = higher ? p : block;
    Partial merged = {one.m, __builtin_fmaf(two.l, factor[b], one.l), 0.0f};
    if constexpr (kEntropy) {
      merged.u = __builtin_fmaf(__builtin_fmaf(two.l, shift[b], two.u), factor[b], one.u);
    }
    p = merged;
  }
  return p;
}

Partial Leaf(const void* logits, DType dtype, float temperature, int64_t begin, int64_t end,
             bool entropy) {
  return WithRowDType(dtype, [&](auto tag) {
    const auto* x = static_cast<const decltype(tag)*>(logits);
    return entropy ? LeafT<decltype(tag), true>(x, temperature, begin, end)
                   : LeafT<decltype(tag), false>(x, temperature, begin, end);
  });
}

// dlogits of columns [begin, end) of row t.
template <typename T, typename G>
void BackwardT(const BackwardArgs& a, int64_t t, int64_t begin, int64_t end) {
  const DF d;
  const T* x = static_cast<const T*>(a.logits) + t * a.stride;
  G* out = static_cast<G*>(a.dlogits) + t * a.dstride;
  const float temperature = a.temperature == nullptr ? 1.0f : a.temperature[t];
  const float dh = a.dentropy == nullptr ? 0.0f : a.dentropy[t];
  const int32_t target = a.targets[t];
  if (target < 0 && a.dentropy == nullptr) {
    ForEachVector(end - begin, [&](int64_t i, int64_t n)
                                   HWY_ATTR { StorePart(hn::Zero(d), out + begin + i, n); });
    return;
  }
  const float g = target < 0 ? 0.0f : a.dlogprob[t];
  const VF vg = hn::Set(d, g), vt = hn::Set(d, temperature), vm = hn::Set(d, a.max[t]);
  const VF vl = hn::Set(d, a.log_sum[t]), vdh = hn::Set(d, dh);
  const VF vh = hn::Set(d, a.dentropy == nullptr ? 0.0f : a.entropy[t]);
  const auto one = [&](VF v, VF indicator) HWY_ATTR {
    if (temperature != 1.0f) v = hn::Div(v, vt);
    const VF q = hn::Sub(hn::Sub(v, vm), vl);
    const VF p = num::Exp(d, q);
    VF dz = hn::Mul(vg, hn::Sub(indicator, p));
    if (a.dentropy != nullptr) {
      const VF term = hn::IfThenZeroElse(hn::Eq(p, hn::Zero(d)), hn::Mul(p, hn::Add(q, vh)));
      dz = hn::NegMulAdd(vdh, term, dz);
    }
    return temperature != 1.0f ? hn::Div(dz, vt) : dz;
  };
  ForEachVector(end - begin, [&](int64_t i, int64_t n) HWY_ATTR {
    StorePart(one(LoadPart(x + begin + i, n), hn::Zero(d)), out + begin + i, n);
  });
  const int64_t column = target - a.id_begin;
  if (target >= 0 && column >= begin && column < end) {
    StoreN(one(LoadN(x + column, 1), hn::Set(d, 1.0f)), out + column, 1);
  }
}
void BackwardIds(const Params& p, const BackwardArgs& a, int64_t t, int64_t begin, int64_t end) {
  WithRowDType(p.logits_dtype, [&](auto x) {
    WithRowDType(p.grad_dtype,
                 [&](auto g) { BackwardT<decltype(x), decltype(g)>(a, t, begin, end); });
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace tare::ops::logprob
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tare::ops::logprob {
namespace {

HWY_EXPORT(Leaf);
HWY_EXPORT(BackwardIds);

// Ids that make a piece worth a wake-up of the pool.
constexpr int64_t kPieceIds = 16384;

Partial Merge(const Partial& a, const Partial& b) {
  if (b.m == -__builtin_inff() && b.l == 0.0f) return a;
  if (a.m == -__builtin_inff() && a.l == 0.0f) return b;
  const Partial& one = b.m > a.m ? b : a;
  const Partial& two = b.m > a.m ? a : b;
  const float shift = one.m == two.m ? 0.0f : two.m - one.m;
  const float factor = numerics::Exp2(shift * 0x1.715476p0f);
  return {one.m, __builtin_fmaf(two.l, factor, one.l),
          __builtin_fmaf(__builtin_fmaf(two.l, shift, two.u), factor, one.u)};
}

float LogitAt(const void* logits, DType dtype, int64_t i) {
  return dtype == DType::kF32 ? static_cast<const float*>(logits)[i]
                              : ToFloat(static_cast<const uint16_t*>(logits)[i]);
}

struct Faults {
  bool logits_bf16, late, missing, approximate, one_leaf, padded;
  bool any() const { return logits_bf16 || late || missing || approximate || one_leaf || padded; }
};

// The row as a plain loop over the same blocks, with planted faults.
Partial FaultyRow(const std::vector<float>& z, const Faults& f) {
  const int64_t vocab = static_cast<int64_t>(z.size());
  const int64_t leaf_size = f.one_leaf ? vocab : LeafSize(vocab);
  Partial leaves[8];
  for (int64_t leaf = 0; leaf < 8; ++leaf) {
    leaves[leaf] = {-__builtin_inff(), 0.0f, 0.0f};
    const int64_t end = std::min(vocab, (leaf + 1) * leaf_size);
    for (int64_t at = std::min(vocab, leaf * leaf_size); at < end; at += kBlock) {
      const int64_t stop = std::min(end, at + kBlock);
      Partial block = {-__builtin_inff(), 0.0f, 0.0f};
      for (int64_t i = at; i < stop; ++i)
        block.m = std::max(block.m, z[static_cast<size_t>(i)] + 0.0f);
      float l[4] = {}, u[4] = {};
      for (int64_t i = at; i < stop && block.m > -__builtin_inff(); ++i) {
        const float difference = z[static_cast<size_t>(i)] - block.m;
        const float x = difference * 0x1.715476p0f;
        const float e = f.approximate ? numerics::Exp2P(x) : numerics::Exp2(x);
        l[(i - at) % 8 / 2] += e;
        if (e != 0.0f) u[(i - at) % 8 / 2] += e * difference;
      }
      block.l = (l[0] + l[1]) + (l[2] + l[3]);
      block.u = (u[0] + u[1]) + (u[2] + u[3]);
      leaves[leaf] = Merge(leaves[leaf], block);
    }
  }
  return TreeOfLeaves(leaves);
}

void Finish(const Params& p, const Args& a, int64_t t, const void* row, float temperature,
            Partial whole) {
  const float nan = __builtin_bit_cast(float, 0x7fffffffu);
  if (std::isnan(whole.l)) whole = {nan, nan, nan};
  const float log_sum = numerics::Log(whole.l);
  const int32_t target = a.targets[t];
  float logprob = 0.0f;
  if (target >= 0) {
    float z = LogitAt(row, p.logits_dtype, target);
    if (temperature != 1.0f) z /= temperature;
    logprob = (z - whole.m) - log_sum;
  }
  PutFloat(logprob, a.logprob + t);
  if (a.entropy != nullptr) PutFloat(log_sum - whole.u / whole.l, a.entropy + t);
  if (a.max != nullptr) PutFloat(whole.m, a.max + t);
  if (a.log_sum != nullptr) PutFloat(log_sum, a.log_sum + t);
}

void FaultyForward(const Params& p, const Args& a, const Faults& f) {
  for (int64_t t = 0; t < a.rows; ++t) {
    const char* row = static_cast<const char*>(a.logits) + t * a.stride * SizeOf(p.logits_dtype);
    float temperature = a.temperature == nullptr || f.missing ? 1.0f : a.temperature[t];
    std::vector<float> z;
    for (int64_t i = 0; i < p.vocab; ++i) {
      float v = LogitAt(row, p.logits_dtype, i);
      if (f.logits_bf16) v = ViaBf16(v);
      if (temperature != 1.0f) v /= temperature;
      if (f.late) v = ViaBf16(v);
      z.push_back(v);
    }
    if (f.padded) z.resize(static_cast<size_t>(p.vocab / 64 * 64 + 64), 0.0f);
    Partial whole = FaultyRow(z, f);
    Params plain = p;
    plain.logits_dtype = DType::kF32;
    Finish(plain, a, t, z.data(), 1.0f, whole);
  }
}

Status Check(const Ctx& ctx, const Params& p, int64_t rows, const int32_t* targets,
             const float* temperature) {
  TARE_RETURN_IF_ERROR(CheckDim("logprob", "vocab", p.vocab));
  TARE_RETURN_IF_ERROR(CheckRowDType("logprob", "logits_dtype", p.logits_dtype));
  TARE_RETURN_IF_ERROR(CheckRowDType("logprob", "grad_dtype", p.grad_dtype));
  TARE_RETURN_IF_ERROR(CheckRows("logprob", rows));
  TARE_RETURN_IF_ERROR(CheckPointer("logprob", "targets", targets, rows));
  for (int64_t t = 0; IsHost(ctx) && t < rows; ++t) {
    if (targets[t] < -1 || targets[t] >= p.vocab) {
      return InvalidArgument("logprob: row {} has target {}; -1 (none) or [0, {})", t, targets[t],
                             p.vocab);
    }
    if (temperature != nullptr && !(temperature[t] > 0.0f && std::isfinite(temperature[t]))) {
      return InvalidArgument(
          "logprob: row {} has temperature {}; finite and above 0 (greedy scoring is T = 1)", t,
          temperature[t]);
    }
  }
  return Ok();
}

}  // namespace

Partial LeafOf(const void* logits, DType dtype, float temperature, int64_t begin, int64_t end,
               bool entropy) {
  return HWY_DYNAMIC_DISPATCH(Leaf)(logits, dtype, temperature, begin, end, entropy);
}

Partial TreeOfLeaves(const Partial leaves[8]) {
  Partial p[8];
  for (int i = 0; i < 8; ++i) p[i] = leaves[i];
  for (int step = 1; step < 8; step *= 2) {
    for (int i = 0; i + step < 8; i += 2 * step) p[i] = Merge(p[i], p[i + step]);
  }
  return p[0];
}

Status Forward(const Ctx& ctx, const Params& params, const Args& given) {
  TARE_RETURN_IF_ERROR(CheckDevice("logprob", ctx));
  TARE_RETURN_IF_ERROR(Check(ctx, params, given.rows, given.targets, given.temperature));
  Args args = given;
  TARE_ASSIGN_OR_RETURN(args.stride, StrideOf("logprob", "stride", given.stride, params.vocab));
  TARE_RETURN_IF_ERROR(CheckPointer("logprob", "logits", args.logits, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("logprob", "logprob", args.logprob, args.rows));
  TARE_WITH_CUDA_RETURN("logprob", ctx, ForwardCuda(ctx, params, args));
  const Faults faults = {fault::Active(kLogitsBf16, ctx.side),
                         fault::Active(kTemperatureLate, ctx.side),
                         fault::Active(kTemperatureMissing, ctx.side),
                         fault::Active(kApproximateExp, ctx.side),
                         fault::Active(kOneLeaf, ctx.side),
                         fault::Active(kPaddedVocab, ctx.side)};
  if (faults.any()) {
    FaultyForward(params, args, faults);
    return Ok();
  }
  // Leaves are independent, so that one row of a decode step still uses every thread.
  std::vector<Partial> leaves(static_cast<size_t>(args.rows * kLeaves));
  const int64_t row_bytes = args.stride * SizeOf(params.logits_dtype);
  const auto row_of = [&](int64_t t) {
    return static_cast<const char*>(args.logits) + t * row_bytes;
  };
  const auto temperature_of = [&](int64_t t) {
    return args.temperature == nullptr ? 1.0f : args.temperature[t];
  };
  const int64_t grain = std::max<int64_t>(1, kPieceIds / LeafSize(params.vocab));
  ctx.pool->ParallelRanges(args.rows * kLeaves, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = i / kLeaves;
      const int64_t leaf = i % kLeaves;
      leaves[static_cast<size_t>(i)] =
          LeafOf(row_of(t), params.logits_dtype, temperature_of(t), LeafBegin(params.vocab, leaf),
                 LeafBegin(params.vocab, leaf + 1), args.entropy != nullptr);
    }
  });
  for (int64_t t = 0; t < args.rows; ++t) {
    Finish(params, args, t, row_of(t), temperature_of(t),
           TreeOfLeaves(leaves.data() + t * kLeaves));
  }
  return Ok();
}

Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& given) {
  TARE_RETURN_IF_ERROR(CheckDevice("logprob", ctx));
  TARE_RETURN_IF_ERROR(Check(ctx, params, given.rows, given.targets, given.temperature));
  BackwardArgs args = given;
  if (given.id_begin < 0 || given.ids < 0 || given.id_begin > params.vocab - given.ids ||
      (given.ids == 0 && given.id_begin != 0)) {
    return InvalidArgument("logprob: IDs [{}, {}) of a vocabulary of {}", given.id_begin,
                           given.id_begin + given.ids, params.vocab);
  }
  if (args.ids == 0) args.ids = params.vocab;
  TARE_ASSIGN_OR_RETURN(args.stride, StrideOf("logprob", "stride", given.stride, args.ids));
  TARE_ASSIGN_OR_RETURN(args.dstride, StrideOf("logprob", "dstride", given.dstride, args.ids));
  TARE_RETURN_IF_ERROR(CheckPointer("logprob", "logits", args.logits, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("logprob", "max", args.max, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("logprob", "log_sum", args.log_sum, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("logprob", "dlogprob", args.dlogprob, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("logprob", "dlogits", args.dlogits, args.rows));
  if (args.dentropy != nullptr)
    TARE_RETURN_IF_ERROR(CheckPointer("logprob", "entropy", args.entropy, args.rows));
  TARE_WITH_CUDA_RETURN("logprob", ctx, BackwardCuda(ctx, params, args));
  const int64_t pieces = (args.ids + kPieceIds - 1) / kPieceIds;
  const int64_t grain = std::max<int64_t>(1, kPieceIds / args.ids);
  ctx.pool->ParallelRanges(args.rows * pieces, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t from = i % pieces * kPieceIds;
      HWY_DYNAMIC_DISPATCH(BackwardIds)
      (params, args, i / pieces, from, std::min(args.ids, from + kPieceIds));
    }
  });
  return Ok();
}

}  // namespace tare::ops::logprob
#endif  // HWY_ONCE
