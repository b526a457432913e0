// sampling on CUDA: a block a row. Every decision is made on integers (keys, masses of 2^40 units)
// whose sums are exact in any order, so the passes over the ids are free to run in parallel. Logits
// are read again in each pass: a row lies in the L2 cache.

#include "numerics/elementary.h"
#include "numerics/philox.h"
#include "ops/logprob/leaf.cuh"
#include "ops/sampling/sampling_cuda.h"

namespace tare::ops::sampling {
namespace {

using namespace tare::ops::cuda;  // NOLINT(google-build-using-namespace)

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int64_t kMostVocab = int64_t{1} << 23;  // masses of a row stay below 2^63

struct KernelArgs {
  int64_t rows, vocab, stride;
  const void* logits;
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p;
  const uint64_t* seed;
  const int32_t *position, *sample;
  int32_t* token;
  float *logprob, *processed;
  int32_t* kept;
  uint8_t* candidates;
  unsigned long long* refused;
  bool ties_high, seed_by_row;
};

// A key that orders like the value: +0 and -0 have one key.
__device__ __forceinline__ uint32_t KeyOf(float v) {
  const uint32_t bits = __float_as_uint(Add(v, 0.0f));
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
// floor(p * 2^32), exact. REQUIRES: p in [0, 1].
__device__ __forceinline__ uint64_t Fixed(float p) {
  return static_cast<uint64_t>(static_cast<double>(p) * 0x1p32);
}
// ceil(share * total / 2^32). REQUIRES: share <= 2^32, total < 2^63.
__device__ __forceinline__ uint64_t ShareOf(uint64_t share, uint64_t total) {
  const uint64_t high = __umul64hi(share, total), low = share * total;
  return (high << 32 | low >> 32) + ((low & 0xffffffffu) != 0 ? 1 : 0);
}

// Everything that a row's passes share.
struct Shared {
  unsigned long long bucket[256];
  unsigned long long total[kWarps];
  float value[kWarps];
  logprob::Partial leaves[8];
  unsigned long long above;
  long long found;
  uint32_t digit;
  int flag;
};

// The sum over the block, in every thread; integers, so any order.
__device__ unsigned long long BlockSum(Shared& s, unsigned long long v) {
  for (int half = 16; half >= 1; half /= 2) v += __shfl_xor_sync(kAllLanes, v, half);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.total[threadIdx.x / 32] = v;
  __syncthreads();
  unsigned long long sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += s.total[w];
  return sum;
}

// bucket[digit] += w over the lanes of a full warp with w != 0. Most lanes of a warp share few
// digits, so each digit's weights are added in the warp first: one atomic for each instead of one
// for each lane, all on one word.
__device__ __forceinline__ void AddToBuckets(unsigned long long* bucket, uint32_t digit,
                                             unsigned long long w) {
  unsigned open = __ballot_sync(kAllLanes, w != 0);
  while (open != 0) {
    const int leader = __ffs(static_cast<int>(open)) - 1;
    const uint32_t d = __shfl_sync(kAllLanes, digit, leader);
    const bool mine = w != 0 && digit == d;
    unsigned long long sum = mine ? w : 0;
#pragma unroll
    for (int half = 16; half >= 1; half /= 2) sum += __shfl_xor_sync(kAllLanes, sum, half);
    if (static_cast<int>(threadIdx.x % 32) == leader) atomicAdd(&bucket[d], sum);
    open &= ~__ballot_sync(kAllLanes, mine);
  }
}

// What was kept: ids with a key above `key`, and those with it up to id `last_tie` (from it, when
// ties go to the highest id). Two such cuts and a least mass make the set.
struct Cut {
  bool on = false;
  uint32_t key = 0;
  int64_t last_tie = 0;
};

template <typename T>
struct Row {
  const T* logits;
  float temperature, maximum;
  int64_t vocab;
  bool ties_high;
  Cut top_k, top_p;
  uint64_t least = 0;

  __device__ float Z(int64_t i) const {
    const float v = Widen(logits[i]);
    return temperature != 1.0f ? Div(v, temperature) : v;
  }
  // u64(exp2(x) * 2^40), truncated. Below -41 it is 0; from there on exp2 needs no care.
  __device__ uint64_t Mass(float z) const {
    const float x = Mul(Sub(z, maximum), logprob::kLog2eCuda);
    if (x < -41.0f) return 0;
    return static_cast<uint64_t>(static_cast<int64_t>(Mul(numerics::Exp2Near(x), 0x1p40f)));
  }
  __device__ bool Passes(const Cut& c, uint32_t key, int64_t i) const {
    if (!c.on || key > c.key) return true;
    return key == c.key && (ties_high ? i >= c.last_tie : i <= c.last_tie);
  }
  // Whether id i is in the set as far as it is decided.
  __device__ bool In(int64_t i, float z) const {
    const uint32_t key = KeyOf(z);
    return Passes(top_k, key, i) && Passes(top_p, key, i) && (least == 0 || Mass(z) >= least);
  }
};

// The running total over ids in id order (backwards when `backward`) of weight(i), at the first id
// where it exceeds `goal`; -1 when it never does. Chunks of one id a thread.
template <class Weight>
__device__ int64_t FirstAbove(Shared& s, int64_t vocab, bool backward, unsigned long long goal,
                              const Weight& weight) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned long long before = 0;
  for (int64_t first = 0; first < vocab; first += kThreads) {
    const int64_t k = first + threadIdx.x;
    const int64_t i = backward ? vocab - 1 - k : k;
    const unsigned long long mine = k < vocab ? weight(i) : 0;
    unsigned long long running = mine;
    for (int step = 1; step < 32; step *= 2) {
      const unsigned long long left = __shfl_up_sync(kAllLanes, running, step);
      if (lane >= step) running += left;
    }
    __syncthreads();
    if (lane == 31) s.total[warp] = running;
    if (threadIdx.x == 0) s.found = -1;
    __syncthreads();
    unsigned long long earlier = before, all = before;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) earlier += s.total[w];
      all += s.total[w];
    }
    running += earlier;
    // Running totals ascend: the first one above the goal is the only one whose predecessor is not.
    if (mine > 0 && running > goal && running - mine <= goal) s.found = i;
    __syncthreads();
    if (s.found >= 0) return s.found;
    before = all;
  }
  return -1;
}

// The cut at which the total in the order (value descending, ties by id) first reaches `goal`.
// weight(i, z) is 0 for ids outside the set. REQUIRES: 1 <= goal <= the total.
template <typename T, class Weight>
__device__ Cut Select(Shared& s, const Row<T>& row, unsigned long long goal, const Weight& weight) {
  uint32_t prefix = 0, mask = 0;
  unsigned long long above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += kThreads) s.bucket[i] = 0;
    __syncthreads();
    // Whole warps, so that they can add together.
    for (int64_t first = 0; first < row.vocab; first += kThreads) {
      const int64_t i = first + threadIdx.x;
      unsigned long long w = 0;
      uint32_t key = 0;
      if (i < row.vocab) {
        const float z = row.Z(i);
        key = KeyOf(z);
        if ((key & mask) == prefix) w = weight(i, z);
      }
      AddToBuckets(s.bucket, key >> shift & 255, w);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t digit = 255;
      unsigned long long sum = above;
      while (digit > 0 && sum + s.bucket[digit] < goal) sum += s.bucket[digit--];
      s.digit = digit;
      s.above = sum;
    }
    __syncthreads();
    prefix |= s.digit << shift;
    mask |= 255u << shift;
    above = s.above;
  }
  // Ties in id order until the goal is reached: the first whose running total exceeds goal - 1.
  Cut cut;
  cut.on = true;
  cut.key = prefix;
  cut.last_tie = FirstAbove(s, row.vocab, row.ties_high, goal - 1 - above, [&](int64_t i) {
    const float z = row.Z(i);
    return KeyOf(z) == prefix ? weight(i, z) : 0ull;
  });
  // Without any weight at this key (masses that are all zero) every tie stays.
  if (cut.last_tie < 0) cut.last_tie = row.ties_high ? 0 : row.vocab;
  return cut;
}

// Log-softmax of `id` over the ids for which in(i, z) holds; in thread 0.
template <typename T, class In>
__device__ float LogSoftmaxAt(Shared& s, const Row<T>& row, int64_t id, const In& in) {
  const int warp = threadIdx.x / 32;
  __syncthreads();
  if (warp < 8) {
    const int64_t size = (row.vocab + 7) / 8;
    const auto at = [&](int64_t i) {
      const float z = row.Z(i);
      return in(i, z) ? z : logprob::MinusInfinity();
    };
    const logprob::Partial p = logprob::LeafOfWarp<false, false>(
        at, [](int64_t) { return float2{}; }, 1.0f, min(warp * size, row.vocab),
        min((warp + 1) * size, row.vocab));
    if (threadIdx.x % 32 == 0) s.leaves[warp] = p;
  }
  __syncthreads();
  if (threadIdx.x != 0) return 0.0f;
  const logprob::Partial whole = logprob::TreeOfLeavesCuda(s.leaves);
  const float z = row.Z(id);
  const float masked = in(id, z) ? z : logprob::MinusInfinity();
  return numerics::Canonical(Sub(Sub(masked, whole.m), numerics::Log(whole.l)));
}

// The largest scaled logit, or a refusal: uniform over the block.
template <typename T>
__device__ bool Maximum(Shared& s, Row<T>& row, unsigned long long* refused, int64_t b,
                        bool need_finite) {
  float top = logprob::MinusInfinity();
  bool nan = false;
  for (int64_t i = threadIdx.x; i < row.vocab; i += kThreads) {
    const float z = row.Z(i);
    nan |= z != z;
    top = fmaxf(top, z);
  }
  for (int half = 16; half >= 1; half /= 2) {
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, half));
    nan |= __shfl_xor_sync(kAllLanes, static_cast<int>(nan), half) != 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) s.flag = 0;
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    s.value[threadIdx.x / 32] = top;
    if (nan) s.flag = 1;
  }
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) top = fmaxf(top, s.value[w]);
  row.maximum = Add(top, 0.0f);
  const bool bad_nan = s.flag != 0;
  const bool bad_max = need_finite && (__float_as_uint(row.maximum) & 0x7f800000u) == 0x7f800000u;
  if (threadIdx.x == 0 && (bad_nan || bad_max))
    Refuse(refused, bad_nan ? Refusal::kSamplingNan : Refusal::kSamplingMaximum, b);
  return !bad_nan && !bad_max;
}

// 0, or what is wrong with the row's parameters.
__device__ uint8_t CheckParameters(const KernelArgs& a, int64_t b) {
  const float inf = __uint_as_float(0x7f800000u);
  if (a.temperature != nullptr && !(a.temperature[b] >= 0.0f && a.temperature[b] < inf))
    return static_cast<uint8_t>(Refusal::kSamplingTemperature);
  if (a.top_k != nullptr && a.top_k[b] < 0) return static_cast<uint8_t>(Refusal::kSamplingTopK);
  if (a.top_p != nullptr && !(a.top_p[b] > 0.0f && a.top_p[b] <= 1.0f))
    return static_cast<uint8_t>(Refusal::kSamplingTopP);
  if (a.min_p != nullptr && !(a.min_p[b] >= 0.0f && a.min_p[b] <= 1.0f))
    return static_cast<uint8_t>(Refusal::kSamplingMinP);
  if (a.position[b] < 0) return static_cast<uint8_t>(Refusal::kSamplingPosition);
  if (a.sample != nullptr && a.sample[b] < 0) return static_cast<uint8_t>(Refusal::kSamplingSample);
  return 0;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) sampling_kernel(const __grid_constant__ KernelArgs a) {
  __shared__ Shared s;
  for (int64_t b = blockIdx.x; b < a.rows; b += gridDim.x) {
    __syncthreads();
    const uint8_t bad = CheckParameters(a, b);
    const float asked = a.temperature == nullptr ? 1.0f : a.temperature[b];
    const bool greedy = asked == 0.0f;
    Row<T> row;
    row.logits = static_cast<const T*>(a.logits) + b * a.stride;
    row.temperature = greedy ? 1.0f : asked;
    row.vocab = a.vocab;
    row.ties_high = a.ties_high;
    if (bad != 0 || !Maximum(s, row, a.refused, b, true)) {
      if (threadIdx.x == 0) {
        if (bad != 0) Refuse(a.refused, static_cast<Refusal>(bad), b);
        a.token[b] = -1;
      }
      continue;
    }
    int64_t token = -1;
    int64_t kept = 1;
    if (greedy) {
      token = FirstAbove(s, a.vocab, a.ties_high, 0,
                         [&](int64_t i) { return row.Z(i) == row.maximum ? 1ull : 0ull; });
    } else {
      const int64_t top_k = a.top_k == nullptr ? 0 : a.top_k[b];
      if (top_k > 0 && top_k < a.vocab) {
        row.top_k = Select(s, row, static_cast<unsigned long long>(top_k),
                           [](int64_t, float) { return 1ull; });
      }
      const auto mass_of_set = [&] {
        unsigned long long mass = 0;
        for (int64_t i = threadIdx.x; i < a.vocab; i += kThreads) {
          const float z = row.Z(i);
          if (row.In(i, z)) mass += row.Mass(z);
        }
        return BlockSum(s, mass);
      };
      const float top_p = a.top_p == nullptr ? 1.0f : a.top_p[b];
      if (top_p < 1.0f) {
        const uint64_t share = ShareOf(Fixed(top_p), mass_of_set());
        const Cut cut = Select(s, row, static_cast<unsigned long long>(share < 1 ? 1 : share),
                               [&](int64_t i, float z) -> unsigned long long {
                                 return row.In(i, z) ? row.Mass(z) : 0;
                               });
        row.top_p = cut;
      }
      const float min_p = a.min_p == nullptr ? 0.0f : a.min_p[b];
      if (min_p > 0.0f) row.least = ShareOf(Fixed(min_p), uint64_t{1} << 40);
      unsigned long long mass = 0, count = 0;
      for (int64_t i = threadIdx.x; i < a.vocab; i += kThreads) {
        const float z = row.Z(i);
        if (!row.In(i, z)) continue;
        mass += row.Mass(z);
        ++count;
      }
      mass = BlockSum(s, mass);
      kept = static_cast<int64_t>(BlockSum(s, count));
      uint64_t seed = a.seed[b];
      if (a.seed_by_row) seed += static_cast<uint64_t>(b);
      const uint32_t sample = a.sample == nullptr ? 0 : static_cast<uint32_t>(a.sample[b]);
      const uint64_t r = numerics::RandomAt(seed, static_cast<uint32_t>(a.position[b]),
                                            numerics::RandomPurpose::kToken, sample)
                             .Low64();
      token = FirstAbove(s, a.vocab, false, numerics::MulHi64(r, mass), [&](int64_t i) {
        const float z = row.Z(i);
        return row.In(i, z) ? static_cast<unsigned long long>(row.Mass(z)) : 0ull;
      });
    }
    const auto in = [&](int64_t i, float z) { return greedy ? i == token : row.In(i, z); };
    if (threadIdx.x == 0) {
      a.token[b] = static_cast<int32_t>(token);
      if (a.kept != nullptr) a.kept[b] = static_cast<int32_t>(kept);
    }
    if (a.candidates != nullptr) {
      const int64_t bytes = (a.vocab + 7) / 8;
      for (int64_t k = threadIdx.x; k < bytes; k += kThreads) {
        uint32_t bits = 0;
        for (int j = 0; j < 8; ++j) {
          const int64_t i = 8 * k + j;
          if (i < a.vocab && in(i, row.Z(i))) bits |= 1u << j;
        }
        a.candidates[b * bytes + k] = static_cast<uint8_t>(bits);
      }
    }
    if (a.logprob != nullptr) {
      const float v = LogSoftmaxAt(s, row, token, [](int64_t, float) { return true; });
      if (threadIdx.x == 0) a.logprob[b] = v;
    }
    if (a.processed != nullptr) {
      const float v = LogSoftmaxAt(s, row, token, in);
      if (threadIdx.x == 0) a.processed[b] = v;
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    replay_kernel(int64_t rows, int64_t vocab, int64_t stride, const void* logits,
                  const float* temperature, const uint8_t* candidates, const int32_t* targets,
                  float* logprob, unsigned long long* refused) {
  __shared__ Shared s;
  const float inf = __uint_as_float(0x7f800000u);
  for (int64_t b = blockIdx.x; b < rows; b += gridDim.x) {
    __syncthreads();
    Row<T> row;
    row.logits = static_cast<const T*>(logits) + b * stride;
    row.temperature = temperature == nullptr ? 1.0f : temperature[b];
    row.vocab = vocab;
    row.ties_high = false;
    const bool target = targets[b] >= 0 && targets[b] < vocab;
    const bool warm = row.temperature > 0.0f && row.temperature < inf;
    bool good = target && warm;
    if (!good && threadIdx.x == 0)
      Refuse(refused, target ? Refusal::kSamplingTemperature : Refusal::kSamplingTarget, b);
    good = good && Maximum(s, row, refused, b, false);
    const int64_t bytes = (vocab + 7) / 8;
    const uint8_t* bits = candidates + b * bytes;
    const auto in = [&](int64_t i, float) { return (bits[i / 8] >> (i % 8) & 1) != 0; };
    if (good) {
      unsigned long long count = 0;
      for (int64_t i = threadIdx.x; i < vocab; i += kThreads) count += in(i, 0.0f);
      good = BlockSum(s, count) > 0;
      if (!good && threadIdx.x == 0) Refuse(refused, Refusal::kSamplingEmptySet, b);
    }
    if (!good) {
      if (threadIdx.x == 0) logprob[b] = 0.0f;
      continue;
    }
    const float v = LogSoftmaxAt(s, row, targets[b], in);
    if (threadIdx.x == 0) logprob[b] = v;
  }
}

Status CheckVocab(const Params& p) {
  if (p.vocab <= kMostVocab) return Ok();
  return Unsupported("sampling: a vocabulary of {} on CUDA; at most {}", p.vocab, kMostVocab);
}

}  // namespace

Status ForwardCuda(const Ctx& ctx, const Params& p, const Args& args) {
  TARE_RETURN_IF_ERROR(CheckVocab(p));
  TARE_ASSIGN_OR_RETURN(unsigned long long* const refused, RefusalWord());
  if (args.rows == 0) return Ok();
  const KernelArgs a = {args.rows,
                        p.vocab,
                        args.stride,
                        args.logits,
                        args.temperature,
                        args.top_k,
                        args.top_p,
                        args.min_p,
                        args.seed,
                        args.position,
                        args.sample,
                        args.token,
                        args.logprob,
                        args.processed_logprob,
                        args.kept,
                        args.candidates,
                        refused,
                        fault::Active(kTiesHigh, ctx.side),
                        fault::Active(kSeedByRow, ctx.side)};
  return WithRowDType(p.logits_dtype, [&](auto tag) -> Status {
    sampling_kernel<decltype(tag)><<<GridFor(a.rows, 1), kThreads, 0, Stream(ctx)>>>(a);
    return Launched();
  });
}

Status ReplayCuda(const Ctx& ctx, const Params& p, const ReplayArgs& a) {
  TARE_RETURN_IF_ERROR(CheckVocab(p));
  TARE_ASSIGN_OR_RETURN(unsigned long long* const refused, RefusalWord());
  if (a.rows == 0) return Ok();
  return WithRowDType(p.logits_dtype, [&](auto tag) -> Status {
    replay_kernel<decltype(tag)><<<GridFor(a.rows, 1), kThreads, 0, Stream(ctx)>>>(
        a.rows, p.vocab, a.stride, a.logits, a.temperature, a.candidates, a.targets, a.logprob,
        refused);
    return Launched();
  });
}

}  // namespace tare::ops::sampling
