#include "ops/sampling/sampling.h"
#include "ops/sampling/sampling_cuda.h"

#include <algorithm>
#include <bit>

#include "numerics/elementary.h"
#include "numerics/philox.h"
#include "ops/logprob/leaf.h"
#include "ops/cuda_entry.h"
#include "ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/sampling/sampling.cc"
#include "ops/simd_targets.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "numerics/elementary_simd.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tare::ops::sampling {
namespace HWY_NAMESPACE {
using namespace tare::ops::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace)
namespace num = tare::numerics::HWY_NAMESPACE;

// z[i] = f32(logit[i]) / T for ids [begin, end) of a row; false when one is NaN. `maximum` has +0
// for -0.
bool Scale(const Params& p, const void* logits, float temperature, int64_t begin, int64_t end,
           float* z, float* maximum) {
  const DF d;
  auto nan = hn::IsNaN(hn::Zero(d));
  VF top = hn::Set(d, -__builtin_inff());
  const VF vt = hn::Set(d, temperature);
  WithRowDType(p.logits_dtype, [&](auto tag) HWY_ATTR {
    const auto* x = static_cast<const decltype(tag)*>(logits) + begin;
    z += begin;
    ForEachVector(end - begin, [&](int64_t i, int64_t n) HWY_ATTR {
      VF v = LoadPart(x + i, n);
      if (temperature != 1.0f) v = hn::Div(v, vt);
      nan = hn::Or(nan, hn::IsNaN(v));
      StorePart(v, z + i, n);
      if (n == static_cast<int64_t>(hn::Lanes(d))) {
        top = hn::Max(top, v);
      } else {
        for (int64_t k = 0; k < n; ++k) top = hn::Max(top, hn::Set(d, z[i + k]));
      }
    });
  });
  *maximum = hn::GetLane(hn::MaxOfLanes(d, top)) + 0.0f;
  return hn::AllFalse(d, nan);
}

// e[i] = exp2((z[i] - maximum) * log2e) * 2^40, exact after the exp2, for `count` ids.
void Masses(const float* z, float maximum, int64_t count, float* e) {
  const DF d;
  const VF m = hn::Set(d, maximum);
  ForEachVector(count, [&](int64_t i, int64_t n) HWY_ATTR {
    const VF x = hn::Mul(hn::Sub(LoadPart(z + i, n), m), hn::Set(d, 0x1.715476p0f));
    StorePart(hn::Mul(num::Exp2(d, x), hn::Set(d, 0x1p40f)), e + i, n);
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace tare::ops::sampling
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tare::ops::sampling {
namespace {

HWY_EXPORT(Scale);
HWY_EXPORT(Masses);

// A key that orders like the value: larger value, larger key; +0 and -0 have one key.
uint32_t KeyOf(float v) {
  const uint32_t bits = std::bit_cast<uint32_t>(v + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

// The prefix of the order (value descending, id ascending) over ids with in[i] != 0 at which a
// running total first reaches `goal`: all ids with a key above `key`, and the first `ties` ids with
// that key.
struct Prefix {
  uint32_t key = 0;
  int64_t ties = 0;
};

// Radix select over the key, most significant digit first. Counts and masses are integers, so the
// order of the passes over the ids is free. `mass` null counts ids. REQUIRES: goal at most the
// total.
Prefix Select(const std::vector<float>& z, const std::vector<uint8_t>& in,
              const std::vector<uint64_t>* mass, unsigned __int128 goal) {
  constexpr int kDigit = 8;
  uint32_t prefix = 0, mask = 0;
  unsigned __int128 above = 0;  // total of all keys above the current bucket
  for (int shift = 32 - kDigit; shift >= 0; shift -= kDigit) {
    std::vector<unsigned __int128> total(size_t{1} << kDigit, 0);
    for (size_t i = 0; i < z.size(); ++i) {
      const uint32_t key = KeyOf(z[i]);
      if (in[i] == 0 || (key & mask) != prefix) continue;
      total[(key >> shift) & ((1u << kDigit) - 1)] += mass == nullptr ? 1 : (*mass)[i];
    }
    uint32_t digit = (1u << kDigit) - 1;
    while (digit > 0 && above + total[digit] < goal) above += total[digit--];
    prefix |= digit << shift;
    mask |= ((1u << kDigit) - 1) << shift;
  }
  // Ties share one value, so one mass.
  Prefix p;
  p.key = prefix;
  for (size_t i = 0; i < z.size(); ++i) {
    if (in[i] == 0 || KeyOf(z[i]) != prefix) continue;
    ++p.ties;
    above += mass == nullptr ? 1 : (*mass)[i];
    if (above >= goal) break;
  }
  return p;
}

void KeepPrefix(const std::vector<float>& z, const Prefix& p, bool ties_high,
                std::vector<uint8_t>& in) {
  int64_t left = p.ties;
  for (size_t k = 0; k < z.size(); ++k) {
    const size_t i = ties_high ? z.size() - 1 - k : k;
    if (in[i] == 0) continue;
    const uint32_t key = KeyOf(z[i]);
    if (key > p.key) continue;
    if (key == p.key && left > 0) {
      --left;
      continue;
    }
    in[i] = 0;
  }
}

// floor(p * 2^32), exact. REQUIRES: p in [0, 1].
uint64_t Fixed(float p) { return static_cast<uint64_t>(static_cast<double>(p) * 0x1p32); }
// ceil(share * total / 2^32)
unsigned __int128 ShareOf(uint64_t share, uint64_t total) {
  const unsigned __int128 product = static_cast<unsigned __int128>(share) * total;
  return (product >> 32) + ((product & 0xffffffffu) != 0 ? 1 : 0);
}

// body(leaf, begin, end) for the ids of each vocabulary leaf, in parallel where the pool is free.
// What a leaf computes depends on no other, so the bits are those of one thread.
template <class Body>
void ForLeaves(ThreadPool& pool, int64_t vocab, const Body& body) {
  pool.ParallelFor(8, [&](int64_t leaf) {
    body(leaf, logprob::LeafBegin(vocab, leaf), logprob::LeafBegin(vocab, leaf + 1));
  });
}

float LogSoftmaxAt(ThreadPool& pool, const std::vector<float>& z, int64_t id) {
  logprob::Partial leaves[8];
  const int64_t vocab = static_cast<int64_t>(z.size());
  ForLeaves(pool, vocab, [&](int64_t leaf, int64_t begin, int64_t end) {
    leaves[leaf] = logprob::LeafOf(z.data(), DType::kF32, 1.0f, begin, end, false);
  });
  const logprob::Partial whole = logprob::TreeOfLeaves(leaves);
  return numerics::Canonical((z[static_cast<size_t>(id)] - whole.m) - numerics::Log(whole.l));
}

// Scale over a whole row.
bool ScaleRow(ThreadPool& pool, const Params& p, const void* logits, float temperature,
              std::vector<float>& z, float* maximum) {
  float top[8];
  bool clean[8];
  ForLeaves(pool, p.vocab, [&](int64_t leaf, int64_t begin, int64_t end) {
    clean[leaf] =
        HWY_DYNAMIC_DISPATCH(Scale)(p, logits, temperature, begin, end, z.data(), &top[leaf]);
  });
  *maximum = *std::max_element(top, top + 8);
  return std::all_of(clean, clean + 8, [](bool c) { return c; });
}

const void* RowOf(const Params& p, const void* logits, int64_t stride, int64_t row) {
  return static_cast<const char*>(logits) + row * stride * SizeOf(p.logits_dtype);
}

Status Check(const Ctx& ctx, const Params& p, int64_t rows) {
  TARE_RETURN_IF_ERROR(CheckDevice("sampling", ctx));
  TARE_RETURN_IF_ERROR(CheckDim("sampling", "vocab", p.vocab));
  TARE_RETURN_IF_ERROR(CheckRowDType("sampling", "logits_dtype", p.logits_dtype));
  return CheckRows("sampling", rows);
}

// One row; the message of a refusal, or empty.
std::string SampleRow(const Ctx& ctx, const Params& p, const Args& a, int64_t b) {
  const size_t vocab = static_cast<size_t>(p.vocab);
  const float asked = a.temperature == nullptr ? 1.0f : a.temperature[b];
  const bool greedy = asked == 0.0f;
  std::vector<float> z(vocab);
  float maximum = 0;
  const bool clean =
      ScaleRow(*ctx.pool, p, RowOf(p, a.logits, a.stride, b), greedy ? 1.0f : asked, z, &maximum);
  if (!clean) return fmt::format("sampling: row {} has a NaN logit", b);
  if (!std::isfinite(maximum))
    return fmt::format("sampling: the largest logit of row {} is {}; finite", b, maximum);
  const bool ties_high = fault::Active(kTiesHigh, ctx.side);
  std::vector<uint8_t> in(vocab, 1);
  int64_t kept = 1;
  int64_t token = -1;
  if (greedy) {
    for (int64_t i = 0; i < p.vocab; ++i) {
      in[static_cast<size_t>(i)] = 0;
      if (z[static_cast<size_t>(i)] == maximum && (token < 0 || ties_high)) token = i;
    }
    in[static_cast<size_t>(token)] = 1;
  } else {
    std::vector<float> e(vocab);
    std::vector<uint64_t> w(vocab);
    ForLeaves(*ctx.pool, p.vocab, [&](int64_t, int64_t begin, int64_t end) {
      HWY_DYNAMIC_DISPATCH(Masses)(z.data() + begin, maximum, end - begin, e.data() + begin);
      for (int64_t i = begin; i < end; ++i) {
        const auto at = static_cast<size_t>(i);
        w[at] = static_cast<uint64_t>(static_cast<int64_t>(e[at]));
      }
    });
    const int64_t top_k = a.top_k == nullptr ? 0 : a.top_k[b];
    if (top_k > 0 && top_k < p.vocab) {
      KeepPrefix(z, Select(z, in, nullptr, static_cast<unsigned __int128>(top_k)), ties_high, in);
    }
    const float top_p = a.top_p == nullptr ? 1.0f : a.top_p[b];
    if (top_p < 1.0f) {
      uint64_t mass = 0;
      for (size_t i = 0; i < vocab; ++i) mass += in[i] != 0 ? w[i] : 0;
      const unsigned __int128 goal = std::max<unsigned __int128>(1, ShareOf(Fixed(top_p), mass));
      KeepPrefix(z, Select(z, in, &w, goal), ties_high, in);
    }
    const float min_p = a.min_p == nullptr ? 0.0f : a.min_p[b];
    if (min_p > 0.0f) {
      const unsigned __int128 least =
          ShareOf(Fixed(min_p), uint64_t{1} << 40);  // w_max: exp2(0) = 1
      for (size_t i = 0; i < vocab; ++i) in[i] = in[i] != 0 && w[i] >= least ? 1 : 0;
    }
    uint64_t mass = 0;
    kept = 0;
    for (size_t i = 0; i < vocab; ++i) {
      if (in[i] == 0) continue;
      mass += w[i];
      ++kept;
    }
    uint64_t seed = a.seed[b];
    if (fault::Active(kSeedByRow, ctx.side)) seed += static_cast<uint64_t>(b);
    const uint32_t sample = a.sample == nullptr ? 0 : static_cast<uint32_t>(a.sample[b]);
    const uint64_t r = numerics::RandomAt(seed, static_cast<uint32_t>(a.position[b]),
                                          numerics::RandomPurpose::kToken, sample)
                           .Low64();
    const uint64_t t = numerics::MulHi64(r, mass);  // below mass, which is at least 2^40
    uint64_t sum = 0;
    for (int64_t i = 0; i < p.vocab && token < 0; ++i) {
      if (in[static_cast<size_t>(i)] == 0) continue;
      sum += w[static_cast<size_t>(i)];
      if (sum > t) token = i;
    }
  }
  a.token[b] = static_cast<int32_t>(token);
  if (a.kept != nullptr) a.kept[b] = static_cast<int32_t>(kept);
  if (a.candidates != nullptr) {
    const int64_t bytes = (p.vocab + 7) / 8;
    uint8_t* bits = a.candidates + b * bytes;
    std::memset(bits, 0, static_cast<size_t>(bytes));
    for (size_t i = 0; i < vocab; ++i)
      bits[i / 8] = static_cast<uint8_t>(bits[i / 8] | (in[i] << (i % 8)));
  }
  // Where every id is kept the processed distribution is the whole one.
  const bool all_kept = kept == p.vocab;
  float whole = 0.0f;
  if (a.logprob != nullptr || (a.processed_logprob != nullptr && all_kept))
    whole = LogSoftmaxAt(*ctx.pool, z, token);
  if (a.logprob != nullptr) a.logprob[b] = whole;
  if (a.processed_logprob != nullptr && all_kept) a.processed_logprob[b] = whole;
  if (a.processed_logprob != nullptr && !all_kept) {
    for (size_t i = 0; i < vocab; ++i) {
      if (in[i] == 0) z[i] = -__builtin_inff();
    }
    a.processed_logprob[b] = LogSoftmaxAt(*ctx.pool, z, token);
  }
  return {};
}

// Runs rows in parallel, or one after another with the threads inside each when there are fewer
// rows than threads, and gives the refusal of the lowest row.
template <class Row>
Status ForRows(const Ctx& ctx, int64_t rows, const Row& row) {
  std::vector<std::string> refusals(static_cast<size_t>(rows));
  const auto one = [&](int64_t b) { refusals[static_cast<size_t>(b)] = row(b); };
  if (rows < ctx.pool->threads()) {
    for (int64_t b = 0; b < rows; ++b) one(b);
  } else {
    ctx.pool->ParallelFor(rows, one);
  }
  for (const std::string& refusal : refusals) {
    if (!refusal.empty()) return Status(Code::kInvalidArgument, refusal);
  }
  return Ok();
}

}  // namespace

Status Forward(const Ctx& ctx, const Params& params, const Args& given) {
  TARE_RETURN_IF_ERROR(Check(ctx, params, given.rows));
  Args args = given;
  TARE_ASSIGN_OR_RETURN(args.stride, StrideOf("sampling", "stride", given.stride, params.vocab));
  TARE_RETURN_IF_ERROR(CheckPointer("sampling", "logits", args.logits, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("sampling", "seed", args.seed, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("sampling", "position", args.position, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("sampling", "token", args.token, args.rows));
  TARE_WITH_CUDA_RETURN("sampling", ctx, ForwardCuda(ctx, params, args));
  for (int64_t b = 0; b < args.rows; ++b) {
    if (args.temperature != nullptr &&
        !(args.temperature[b] >= 0.0f && std::isfinite(args.temperature[b]))) {
      return InvalidArgument("sampling: row {} has temperature {}; finite, at least 0", b,
                             args.temperature[b]);
    }
    if (args.top_k != nullptr && args.top_k[b] < 0) {
      return InvalidArgument("sampling: row {} has top_k {}; 0 (off) or more", b, args.top_k[b]);
    }
    if (args.top_p != nullptr && !(args.top_p[b] > 0.0f && args.top_p[b] <= 1.0f)) {
      return InvalidArgument("sampling: row {} has top_p {}; above 0, at most 1", b, args.top_p[b]);
    }
    if (args.min_p != nullptr && !(args.min_p[b] >= 0.0f && args.min_p[b] <= 1.0f)) {
      return InvalidArgument("sampling: row {} has min_p {}; 0 to 1", b, args.min_p[b]);
    }
    if (args.position[b] < 0)
      return InvalidArgument("sampling: row {} is at position {}", b, args.position[b]);
    if (args.sample != nullptr && args.sample[b] < 0) {
      return InvalidArgument("sampling: row {} has sample index {}", b, args.sample[b]);
    }
  }
  return ForRows(ctx, args.rows, [&](int64_t b) { return SampleRow(ctx, params, args, b); });
}

Status Replay(const Ctx& ctx, const Params& params, const ReplayArgs& args) {
  TARE_RETURN_IF_ERROR(Check(ctx, params, args.rows));
  TARE_ASSIGN_OR_RETURN(const int64_t stride,
                        StrideOf("sampling", "stride", args.stride, params.vocab));
  TARE_RETURN_IF_ERROR(CheckPointer("sampling", "logits", args.logits, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("sampling", "candidates", args.candidates, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("sampling", "targets", args.targets, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("sampling", "logprob", args.logprob, args.rows));
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda) {
    ReplayArgs strided = args;
    strided.stride = stride;
    return ReplayCuda(ctx, params, strided);
  }
#endif
  TARE_RETURN_IF_ERROR(CheckCpu("sampling", ctx));
  for (int64_t b = 0; b < args.rows; ++b) {
    if (args.targets[b] < 0 || args.targets[b] >= params.vocab) {
      return InvalidArgument("sampling: row {} has target {}; [0, {})", b, args.targets[b],
                             params.vocab);
    }
    if (args.temperature != nullptr &&
        !(args.temperature[b] > 0.0f && std::isfinite(args.temperature[b]))) {
      return InvalidArgument("sampling: row {} has temperature {}; finite and above 0", b,
                             args.temperature[b]);
    }
  }
  return ForRows(ctx, args.rows, [&](int64_t b) -> std::string {
    const float temperature = args.temperature == nullptr ? 1.0f : args.temperature[b];
    std::vector<float> z(static_cast<size_t>(params.vocab));
    float maximum = 0;
    if (!ScaleRow(*ctx.pool, params, RowOf(params, args.logits, stride, b), temperature, z,
                  &maximum)) {
      return fmt::format("sampling: row {} has a NaN logit", b);
    }
    const uint8_t* bits = args.candidates + b * ((params.vocab + 7) / 8);
    int64_t count = 0;
    for (size_t i = 0; i < z.size(); ++i) {
      const bool in = ((bits[i / 8] >> (i % 8)) & 1) != 0;
      count += in;
      if (!in) z[i] = -__builtin_inff();
    }
    if (count == 0) return fmt::format("sampling: the candidate set of row {} is empty", b);
    args.logprob[b] = LogSoftmaxAt(*ctx.pool, z, args.targets[b]);
    return {};
  });
}

Result<int32_t> Argmax(const float* values, int64_t count) {
  if (count < 1) return InvalidArgument("argmax of no value");
  int64_t best = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (std::isnan(values[i])) return InvalidArgument("argmax: value {} is NaN", i);
    if (values[i] > values[best]) best = i;
  }
  return static_cast<int32_t>(best);
}

}  // namespace tare::ops::sampling
#endif  // HWY_ONCE
