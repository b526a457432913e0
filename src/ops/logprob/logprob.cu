// logprob on CUDA: a block a row, a warp a leaf of the vocabulary; every logit is read once.

#include "ops/logprob/leaf.cuh"
#include "ops/logprob/logprob_cuda.h"

namespace tare::ops::logprob {
namespace {

using namespace tare::ops::cuda;  // NOLINT(google-build-using-namespace)

struct KernelArgs {
  int64_t rows, vocab, stride;
  const void* logits;
  const int32_t* targets;
  const float* temperature;
  float *logprob, *entropy, *max, *log_sum;
  unsigned long long* refused;
};

__device__ __forceinline__ bool GoodTemperature(float t) {
  return t > 0.0f && t < __uint_as_float(0x7f800000u);
}

// What a row stores, from its whole and its target's scaled logit.
__device__ void Finish(const KernelArgs& a, int64_t t, float z_target, Partial whole) {
  const float nan = numerics::CanonicalNan();
  if (whole.l != whole.l) whole = {nan, nan, nan};
  const float log_sum = numerics::Log(whole.l);
  const float logprob = a.targets[t] >= 0 ? Sub(Sub(z_target, whole.m), log_sum) : 0.0f;
  Put(logprob, a.logprob + t);
  if (a.entropy != nullptr) Put(Sub(log_sum, Div(whole.u, whole.l)), a.entropy + t);
  if (a.max != nullptr) Put(whole.m, a.max + t);
  if (a.log_sum != nullptr) Put(log_sum, a.log_sum + t);
}

__device__ __forceinline__ float2 Pair(const float* p) {
  return *reinterpret_cast<const float2*>(p);
}
__device__ __forceinline__ float2 Pair(const uint16_t* p) {
  const uint32_t v = *reinterpret_cast<const uint32_t*>(p);
  return {__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u)};
}

// True when row t may be computed; else it is refused and its outputs are +0.
__device__ bool CheckRow(const KernelArgs& a, int64_t t, float temperature) {
  const bool target = a.targets[t] >= -1 && a.targets[t] < a.vocab;
  if (target && GoodTemperature(temperature)) return true;
  if (threadIdx.x == 0) {
    Refuse(a.refused, target ? Refusal::kLogprobTemperature : Refusal::kLogprobTarget, t);
    a.logprob[t] = 0.0f;
    if (a.entropy != nullptr) a.entropy[t] = 0.0f;
    if (a.max != nullptr) a.max[t] = 0.0f;
    if (a.log_sum != nullptr) a.log_sum[t] = 0.0f;
  }
  return false;
}

template <typename T, bool kEntropy, bool kPairs>
__global__ void __launch_bounds__(256) logprob_kernel(const __grid_constant__ KernelArgs a) {
  __shared__ Partial leaves[8];
  const int leaf = threadIdx.x / 32;
  for (int64_t t = blockIdx.x; t < a.rows; t += gridDim.x) {
    const T* row = static_cast<const T*>(a.logits) + t * a.stride;
    const float temperature = a.temperature == nullptr ? 1.0f : a.temperature[t];
    if (!CheckRow(a, t, temperature)) continue;
    const int64_t size = (a.vocab + 7) / 8;
    const int64_t begin = min(leaf * size, a.vocab), end = min((leaf + 1) * size, a.vocab);
    const Partial p = LeafOfWarp<kEntropy, kPairs>([row](int64_t i) { return Widen(row[i]); },
                                                   [row](int64_t i) { return Pair(row + i); },
                                                   temperature, begin, end);
    if (threadIdx.x % 32 == 0) leaves[leaf] = p;
    __syncthreads();
    if (threadIdx.x == 0) {
      float z = a.targets[t] >= 0 ? Widen(row[a.targets[t]]) : 0.0f;
      if (temperature != 1.0f) z = Div(z, temperature);
      Finish(a, t, z, TreeOfLeavesCuda(leaves));
    }
    __syncthreads();
  }
}

// The bits of numerics::Exp for x in [-86, 0.5], where nothing is clamped and the result is normal:
// the power of two is added to the exponent.
__device__ __forceinline__ float ExpNear(float x) {
  float r, v;
  int32_t n;
  numerics::internal::ExpParts<numerics::internal::ScalarF32>(x, r, v, n);
  return __uint_as_float(__float_as_uint(Add(1.0f, Add(r, v))) + (static_cast<uint32_t>(n) << 23));
}

struct BackwardKernelArgs {
  int64_t rows, ids, stride, dstride, id_begin;
  const void* logits;
  const int32_t* targets;
  const float *temperature, *max, *log_sum, *entropy, *dlogprob, *dentropy;
  void* dlogits;
};

// A thread takes kTogether groups of kGroup ids, a block's width apart, whose loads are in flight
// together.
constexpr int kTogether = 3;

template <typename T, typename G, int kGroup>
__global__ void __launch_bounds__(256)
    logprob_backward_kernel(const __grid_constant__ BackwardKernelArgs a) {
  const int64_t per_row = a.ids / kGroup;
  for (int64_t t = blockIdx.y; t < a.rows; t += gridDim.y) {
    const T* x = static_cast<const T*>(a.logits) + t * a.stride;
    G* out = static_cast<G*>(a.dlogits) + t * a.dstride;
    const float temperature = a.temperature == nullptr ? 1.0f : a.temperature[t];
    const int32_t target = a.targets[t];
    const bool nothing = target < 0 && a.dentropy == nullptr;
    const float g = target < 0 ? 0.0f : a.dlogprob[t];
    const float m = a.max[t], l = a.log_sum[t];
    const float dh = a.dentropy == nullptr ? 0.0f : a.dentropy[t];
    const float h = a.dentropy == nullptr ? 0.0f : a.entropy[t];
    const int64_t column = target < 0 ? -1 : target - a.id_begin;
    for (int64_t i0 = int64_t{blockIdx.x} * (256 * kTogether) + threadIdx.x; i0 < per_row;
         i0 += int64_t{gridDim.x} * (256 * kTogether)) {
      float all[kTogether][4];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const int64_t i = i0 + 256 * k;
        all[k][0] = all[k][1] = all[k][2] = all[k][3] = 0.0f;
        if (nothing || i >= per_row) continue;
        if constexpr (kGroup == 4) {
          Widen4(LoadRaw4(x + 4 * i), all[k]);
        } else {
          all[k][0] = Widen(x[i]);
        }
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const int64_t i = i0 + 256 * k;
        if (i >= per_row) break;
        float(&v)[4] = all[k];
        if (!nothing) {
          float q[kGroup];
          bool near = true;
#pragma unroll
          for (int e = 0; e < kGroup; ++e) {
            float z = v[e];
            if (temperature != 1.0f) z = Div(z, temperature);
            q[e] = Sub(Sub(z, m), l);
            near = near && q[e] >= -86.0f && q[e] <= 0.5f;
          }
          // Away from the target, without an entropy's gradient, near: 0 - p is -p, as p is no
          // zero.
          const int64_t from_first = column - kGroup * i;
          const bool plain = a.dentropy == nullptr && (from_first < 0 || from_first >= kGroup);
          if (near && plain) {
#pragma unroll
            for (int e = 0; e < kGroup; ++e) {
              const float dz = Mul(g, -ExpNear(q[e]));
              v[e] = temperature != 1.0f ? Div(dz, temperature) : dz;
            }
          } else {
            const int target_at =
                from_first < 0 || from_first >= kGroup ? -1 : static_cast<int>(from_first);
#pragma unroll
            for (int e = 0; e < kGroup; ++e) {
              const float p = numerics::Exp(q[e]);
              float dz = Mul(g, Sub(e == target_at ? 1.0f : 0.0f, p));
              if (a.dentropy != nullptr) dz = Fma(-dh, p == 0.0f ? 0.0f : Mul(p, Add(q[e], h)), dz);
              v[e] = temperature != 1.0f ? Div(dz, temperature) : dz;
            }
          }
        }
        if constexpr (kGroup == 4) {
          Store4(v, out + 4 * i);
        } else {
          Put(v[0], out + i);
        }
      }
    }
  }
}

struct Faults {
  bool logits_bf16, late, missing, approximate, one_leaf, padded;
};

// The row as a plain loop over the same blocks, with planted faults: a thread a row.
template <typename T>
__global__ void logprob_faulty_kernel(const __grid_constant__ KernelArgs a, Faults f) {
  const int64_t t = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (t >= a.rows) return;
  const T* row = static_cast<const T*>(a.logits) + t * a.stride;
  const float temperature = a.temperature == nullptr || f.missing ? 1.0f : a.temperature[t];
  const auto z_at = [&](int64_t i) {
    if (i >= a.vocab) return 0.0f;  // a padded column
    float v = Widen(row[i]);
    if (f.logits_bf16) v = ThroughBf16(v);
    if (temperature != 1.0f) v = Div(v, temperature);
    return f.late ? ThroughBf16(v) : v;
  };
  const int64_t vocab = f.padded ? a.vocab / 64 * 64 + 64 : a.vocab;
  const int64_t leaf_size = f.one_leaf ? vocab : (vocab + 7) / 8;
  Partial leaves[8];
  for (int64_t leaf = 0; leaf < 8; ++leaf) {
    leaves[leaf] = {MinusInfinity(), 0.0f, 0.0f};
    const int64_t end = min(vocab, (leaf + 1) * leaf_size);
    for (int64_t at = min(vocab, leaf * leaf_size); at < end; at += kBlock) {
      const int64_t stop = min(end, at + kBlock);
      Partial block = {MinusInfinity(), 0.0f, 0.0f};
      for (int64_t i = at; i < stop; ++i) block.m = fmaxf(block.m, Add(z_at(i), 0.0f));
      float l[4] = {}, u[4] = {};
      for (int64_t i = at; i < stop && block.m > MinusInfinity(); ++i) {
        const float difference = Sub(z_at(i), block.m);
        const float x = Mul(difference, kLog2eCuda);
        const float e = f.approximate ? numerics::Exp2P(x) : numerics::Exp2(x);
        const int q = static_cast<int>((i - at) % 8 / 2);
        l[q] = Add(l[q], e);
        if (e != 0.0f) u[q] = Add(u[q], Mul(e, difference));
      }
      block.l = Add(Add(l[0], l[1]), Add(l[2], l[3]));
      block.u = Add(Add(u[0], u[1]), Add(u[2], u[3]));
      leaves[leaf] = MergeCuda(leaves[leaf], block);
    }
  }
  Finish(a, t, a.targets[t] >= 0 ? z_at(a.targets[t]) : 0.0f, TreeOfLeavesCuda(leaves));
}

}  // namespace

Status ForwardCuda(const Ctx& ctx, const Params& p, const Args& args) {
  TARE_ASSIGN_OR_RETURN(unsigned long long* const refused, RefusalWord());
  const KernelArgs a = {args.rows,    p.vocab,          args.stride,  args.logits,
                        args.targets, args.temperature, args.logprob, args.entropy,
                        args.max,     args.log_sum,     refused};
  if (a.rows == 0) return Ok();
  const Faults faults = {fault::Active(kLogitsBf16, ctx.side),
                         fault::Active(kTemperatureLate, ctx.side),
                         fault::Active(kTemperatureMissing, ctx.side),
                         fault::Active(kApproximateExp, ctx.side),
                         fault::Active(kOneLeaf, ctx.side),
                         fault::Active(kPaddedVocab, ctx.side)};
  return WithRowDType(p.logits_dtype, [&](auto tag) -> Status {
    using T = decltype(tag);
    if (faults.logits_bf16 || faults.late || faults.missing || faults.approximate ||
        faults.one_leaf || faults.padded) {
      logprob_faulty_kernel<T>
          <<<static_cast<unsigned>((a.rows + 63) / 64), 64, 0, Stream(ctx)>>>(a, faults);
      return Launched();
    }
    const bool pairs = p.vocab % 2 == 0 && LeafSize(p.vocab) % 2 == 0 && a.stride % 2 == 0 &&
                       reinterpret_cast<uintptr_t>(a.logits) % (2 * sizeof(T)) == 0;
    const auto run = [&](auto* kernel) {
      kernel<<<GridFor(a.rows, 1), 256, 0, Stream(ctx)>>>(a);
      return Launched();
    };
    if (a.entropy != nullptr) {
      return pairs ? run(&logprob_kernel<T, true, true>) : run(&logprob_kernel<T, true, false>);
    }
    return pairs ? run(&logprob_kernel<T, false, true>) : run(&logprob_kernel<T, false, false>);
  });
}

Status BackwardCuda(const Ctx& ctx, const Params& p, const BackwardArgs& args) {
  const BackwardKernelArgs a = {args.rows,     args.ids,     args.stride,  args.dstride,
                                args.id_begin, args.logits,  args.targets, args.temperature,
                                args.max,      args.log_sum, args.entropy, args.dlogprob,
                                args.dentropy, args.dlogits};
  if (a.rows == 0) return Ok();
  const bool vec = a.ids % 4 == 0 && a.stride % 4 == 0 && a.dstride % 4 == 0 &&
                   Aligned4(a.logits, p.logits_dtype) && Aligned4(a.dlogits, p.grad_dtype);
  return WithRowDType(p.logits_dtype, [&](auto x) {
    return WithRowDType(p.grad_dtype, [&](auto g) -> Status {
      using T = decltype(x);
      using G = decltype(g);
      const dim3 grid(GridFor(a.ids / (vec ? 4 : 1), 256 * kTogether, 64),
                      static_cast<unsigned>(std::min<int64_t>(a.rows, 65535)));
      if (vec) {
        logprob_backward_kernel<T, G, 4><<<grid, 256, 0, Stream(ctx)>>>(a);
      } else {
        logprob_backward_kernel<T, G, 1><<<grid, 256, 0, Stream(ctx)>>>(a);
      }
      return Launched();
    });
  });
}

}  // namespace tare::ops::logprob
