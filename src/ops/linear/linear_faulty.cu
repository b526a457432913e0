// linear's planted faults on a device: the plain scalar loops of linear_plain.cc, one thread for
// each output. A fault run is not meant to be fast.

#include "numerics/fp.h"
#include "numerics/sm90.h"
#include "ops/cuda/rows.cuh"
#include "ops/linear/linear_cuda.h"
#include "tensor/convert.h"

namespace tare::ops::linear::gpu {
namespace {

struct KernelArgs {
  Pass pass;
  int64_t m, n;
  const void *a, *b, *bias;
  int64_t a_stride, b_stride, y_stride;
  void* y;
  DType a_dtype, b_dtype, y_dtype, operand, bias_dtype;
  bool ieee;
  int parts, chains;
  Faults faults;
};

__device__ float LoadF32(const void* p, DType dtype, int64_t i) {
  if (dtype == DType::kF32) return static_cast<const float*>(p)[i];
  const uint16_t bits = static_cast<const uint16_t*>(p)[i];
  return dtype == DType::kBF16 ? Bf16ToF32(bits) : F16ToF32(bits);
}
__device__ uint16_t Half(float v, DType dtype) {
  return dtype == DType::kBF16
             ? F32ToBf16(v)
             : ConvertFloatBits<DType::kF32, DType::kF16>(F32Bits(v), Fp8Overflow::kNonFinite);
}
__device__ float Rounded(float v, DType dtype) {
  if (dtype == DType::kF32) return v;
  return dtype == DType::kBF16 ? Bf16ToF32(Half(v, dtype)) : F16ToF32(Half(v, dtype));
}
__device__ void Store(void* y, DType dtype, int64_t i, float v) {
  if (dtype == DType::kF32) {
    static_cast<float*>(y)[i] = numerics::Canonical(v);
  } else {
    static_cast<uint16_t*>(y)[i] = Half(v, dtype);
  }
}

__device__ float Step(const KernelArgs& args, float c, const uint16_t* a, const uint16_t* b) {
  return args.operand == DType::kBF16 ? numerics::Sm90Step<numerics::MmaType::kBF16>(a, b, c)
                                      : numerics::Sm90Step<numerics::MmaType::kF16>(a, b, c);
}

__global__ void __launch_bounds__(128) linear_faulty_kernel(const __grid_constant__ KernelArgs args,
                                                            const __grid_constant__ GemmRuns runs) {
  const int64_t at = int64_t{blockIdx.x} * 128 + threadIdx.x;
  if (at >= args.m * args.n) return;
  const int64_t i = at / args.n, j = at % args.n;
  const bool trans_a = args.pass == Pass::kDw, trans_b = args.pass != Pass::kForward;
  float sums[8];
  for (int chain = 0; chain < args.chains; ++chain) {
    const Run* parts = runs.runs + chain * args.parts;
    int64_t length = 0;
    for (int p = 0; p < args.parts; ++p) length += parts[p].length;
    // Product q of the chain, in the order in which the fault walks.
    const auto load = [&](int64_t q, float& x, float& w) {
      if (args.faults.reversed) q = length - 1 - q;
      int p = 0;
      while (q >= parts[p].length) q -= parts[p++].length;
      const int64_t k = parts[p].begin + q;
      x = Rounded(
          LoadF32(args.a, args.a_dtype, trans_a ? k * args.a_stride + i : i * args.a_stride + k),
          args.operand);
      w = Rounded(
          LoadF32(args.b, args.b_dtype, trans_b ? k * args.b_stride + j : j * args.b_stride + k),
          args.operand);
    };
    float c = 0.0f;
    for (int64_t k = 0; k < length; k += 16) {
      const int group = static_cast<int>(length - k < 16 ? length - k : 16);
      if (args.ieee) {
        for (int q = 0; q < group; ++q) {
          float x, w;
          load(k + q, x, w);
          c = args.faults.split_fma ? numerics::Add(c, numerics::Mul(x, w))
                                    : numerics::Fma(x, w, c);
        }
      } else {
        uint16_t pa[16] = {}, pb[16] = {};
        for (int q = 0; q < group; ++q) {
          float x, w;
          load(k + q, x, w);
          pa[q] = Half(x, args.operand);
          pb[q] = Half(w, args.operand);
        }
        if (args.faults.split_fma) {
          // The nearest defect of this step: products enter one at a time.
          for (int q = 0; q < group; ++q) {
            uint16_t one_a[16] = {pa[q]}, one_b[16] = {pb[q]};
            c = Step(args, c, one_a, one_b);
          }
        } else {
          c = Step(args, c, pa, pb);
        }
      }
      if (args.faults.accumulate_bf16) c = Rounded(c, DType::kBF16);
    }
    if (args.pass == Pass::kDw) {
      auto* y = static_cast<float*>(args.y) + i * args.y_stride + j;
      *y = numerics::Canonical(numerics::Add(*y, c));
      continue;
    }
    sums[chain & 7] = c;
  }
  if (args.pass == Pass::kDw) return;
  for (int step = 1; step < args.chains; step *= 2) {
    for (int s = 0; s + step < args.chains; s += 2 * step)
      sums[s] = numerics::Add(sums[s], sums[s + step]);
  }
  float y = sums[0];
  if (args.bias != nullptr) {
    if (args.faults.bias_late) y = Rounded(y, args.y_dtype);
    y = numerics::Add(y, LoadF32(args.bias, args.bias_dtype, j));
  }
  Store(args.y, args.y_dtype, i * args.y_stride + j, y);
}

}  // namespace

Status LaunchFaulty(const Contraction& c, const Faults& faults, StreamHandle stream) {
  if (c.m == 0 || c.n == 0 || c.runs.empty()) return Ok();
  KernelArgs args = {c.pass,    c.m,        c.n,        c.a,        c.b,
                     c.bias,    c.a_stride, c.b_stride, c.y_stride, c.y,
                     c.a_dtype, c.b_dtype,  c.y_dtype,  c.operand,  c.bias_dtype,
                     c.ieee,    c.parts,    c.chains(), faults};
  GemmRuns runs;
  if (static_cast<int>(c.runs.size()) > GemmRuns::kMax || (c.pass != Pass::kDw && c.chains() > 8)) {
    return Unsupported(
        "linear: a planted fault on CUDA takes {} runs in 8 chains; these are {} in {}",
        GemmRuns::kMax, c.runs.size(), c.chains());
  }
  std::copy(c.runs.begin(), c.runs.end(), runs.runs);
  linear_faulty_kernel<<<static_cast<unsigned>((c.m * c.n + 127) / 128), 128, 0,
                         static_cast<cudaStream_t>(stream)>>>(args, runs);
  return cuda::Launched();
}

}  // namespace tare::ops::linear::gpu
