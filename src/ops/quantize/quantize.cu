// quantize on CUDA: eight threads for each row and block of 128 of bf16, else a warp.

#include "ops/cuda/eights.cuh"
#include "ops/quantize/quantize_cuda.h"

namespace tare::ops::quantize {
namespace {

using namespace tare::ops::cuda;  // NOLINT(google-build-using-namespace)

constexpr int kWarps = 8;
constexpr int kAhead = 4;  // blocks of 128 whose loads are in flight together

// The e4m3 code of v, nearest even, saturating: the bit steps of quantize.cc. REQUIRES: v finite.
__device__ __forceinline__ uint32_t E4m3Code(float v) {
  const float magnitude = fabsf(v);
  const uint32_t bits = __float_as_uint(magnitude);
  const uint32_t sign = (__float_as_uint(v) & 0x80000000u) >> 24;
  const uint32_t rounded = (bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20;
  const uint32_t normal = min(rounded - (120u << 3), 0x7eu);
  const uint32_t small = __float_as_uint(Add(magnitude, 0x1p14f)) - __float_as_uint(0x1p14f);
  return (magnitude < 0x1p-6f ? small : normal) | sign;
}

// The nearest code with ties away from zero: the planted defect.
__device__ uint32_t HalfAway(float v) {
  const float magnitude = fabsf(v);
  const auto value_of = [](int code) {
    const int exponent = code >> 3;
    const float mantissa = static_cast<float>(code & 7) / 8.0f;
    float value = exponent == 0 ? mantissa * 0x1p-6f : (1.0f + mantissa) * 0x1p-6f;
    for (int i = 1; i < exponent; ++i) value *= 2.0f;
    return value;
  };
  int code = 0;
  while (code < 0x7e && magnitude >= (value_of(code) + value_of(code + 1)) * 0.5f) ++code;
  return static_cast<uint32_t>(code) | (__float_as_uint(v) >> 31 << 7);
}

// x / scale, correctly rounded, for a block whose scale and 1 / scale are known: the quotient by
// the reciprocal and one step of its remainder (Markstein). Where a remainder could lose bits the
// quotient is below 2^-20, which is code 0 whatever its last bit; scales outside (2^-60, 2^100)
// have a reciprocal of 0 here and take the division. The sign is x's: a zero remainder would turn
// -0 to +0.
__device__ __forceinline__ float Quotient(float x, float scale, float reciprocal) {
  if (reciprocal == 0.0f) return Div(x, scale);
  const float q = Mul(x, reciprocal);
  return copysignf(Fma(Fma(-q, scale, x), reciprocal, q), x);
}

// Codes of two values by the conversion instruction: nearest even, saturating, as E4m3Code.
__device__ __forceinline__ uint32_t CodePair(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Codes of one block whose scale is known.
template <bool kVec>
__device__ __forceinline__ void StoreCodes(const float (&v)[4], float scale, float reciprocal,
                                           bool half_away, uint8_t* q, int64_t count, int lane) {
  float x[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) x[e] = Quotient(v[e], scale, reciprocal);
  uint32_t codes = CodePair(x[0], x[1]) | CodePair(x[2], x[3]) << 16;
  if (half_away) {
    codes = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) codes |= HalfAway(x[e]) << (8 * e);
  }
  if constexpr (kVec) {
    if (4 * lane < count) *reinterpret_cast<uint32_t*>(q + 4 * lane) = codes;
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (lane + 32 * e < count) q[lane + 32 * e] = static_cast<uint8_t>(codes >> (8 * e));
    }
  }
}

// The largest magnitude of a block; non-finite values are refused and count as 0.
template <bool kVec>
__device__ __forceinline__ float BlockMax(float (&v)[4], int64_t row, int64_t first, int lane,
                                          unsigned long long* refused) {
  float top = 0.0f;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if ((__float_as_uint(v[e]) & 0x7f800000u) == 0x7f800000u) {
      if (refused != nullptr)
        Refuse(refused, Refusal::kQuantizeNotFinite, row, first + Chunk<kVec>::Index(lane, e));
      v[e] = 0.0f;
    }
    top = fmaxf(top, fabsf(v[e]));
  }
#pragma unroll
  for (int half = 16; half >= 1; half /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, half));
  return top;
}

__device__ __forceinline__ float ScaleOf(float amax) {
  const float scale = Div(amax, 448.0f);
  return scale == 0.0f ? 1.0f : scale;
}

template <typename T, bool kVec>
__global__ void __launch_bounds__(32 * kWarps)
    quantize_kernel(int64_t rows, int64_t width, const void* x_, uint8_t* q, float* scales,
                    unsigned long long* refused, bool half_away) {
  const int lane = threadIdx.x % 32;
  const int64_t blocks = (width + kBlock - 1) / kBlock, total = rows * blocks;
  for (int64_t first = (int64_t{blockIdx.x} * kWarps + threadIdx.x / 32) * kAhead; first < total;
       first += int64_t{gridDim.x} * kWarps * kAhead) {
    // Where the blocks lie: one division, then one step after the other.
    int64_t row[kAhead], at[kAhead];
    {
      const RowPlace place = PlaceOf(first, blocks);
      int64_t r = place.row, b = place.in_row;
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        row[k] = r < rows ? r : rows - 1;
        at[k] = b * kBlock;
        if (++b == blocks) b = 0, ++r;
      }
    }
    float v[kAhead][4];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      Chunk<kVec>::Load(static_cast<const T*>(x_) + row[k] * width + at[k], width - at[k], lane,
                        v[k]);
    }
    // Lane k divides for block k.
    float mine = 0.0f;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const float amax =
          BlockMax<kVec>(v[k], row[k], at[k], lane, first + k < total ? refused : nullptr);
      if (lane == k) mine = amax;
    }
    const float my_scale = ScaleOf(mine);
    const float my_reciprocal =
        my_scale > 0x1p-60f && my_scale < 0x1p100f ? Div(1.0f, my_scale) : 0.0f;
    if (lane < kAhead && first + lane < total) scales[first + lane] = my_scale;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const float scale = __shfl_sync(kAllLanes, my_scale, k);
      const float reciprocal = __shfl_sync(kAllLanes, my_reciprocal, k);
      if (first + k >= total) break;
      StoreCodes<kVec>(v[k], scale, reciprocal, half_away, q + row[k] * width + at[k],
                       width - at[k], lane);
    }
  }
}

// The larger magnitude of two bf16 in each half, as bits.
__device__ __forceinline__ uint32_t MaxMagnitudes(uint32_t a, uint32_t b) {
  return __vmaxu2(a & 0x7fff7fffu, b & 0x7fff7fffu);
}

// bf16 rows of whole sixteens, addresses of 16 bytes: a thread takes 16 elements, eight neighbours
// a block of 128 (of the last block of a row maybe fewer), and no more: several blocks under way in
// a thread were slower (0.88, 0.76 of copy bandwidth with two and three, 0.95 with one).
__global__ void __launch_bounds__(256)
    quantize_bf16_kernel(int64_t rows, int64_t width, const uint16_t* x, uint8_t* q, float* scales,
                         unsigned long long* refused, bool half_away) {
  const int lane = threadIdx.x % 8;
  const int64_t blocks = (width + kBlock - 1) / kBlock, total = rows * blocks;
  const int64_t first = int64_t{blockIdx.x} * 32 + threadIdx.x / 8;
  const bool whole = first < total;  // else the last block once more, and nothing is written
  const RowPlace place = PlaceOf(min(first, total - 1), blocks);
  const int at = static_cast<int>(place.in_row * kBlock) + 16 * lane;
  const bool mine = at < width;
  const auto* from = reinterpret_cast<const uint4*>(x + place.row * width + at);
  uint4 low = make_uint4(0, 0, 0, 0), high = low;
  if (mine) low = from[0], high = from[1];
  uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  const auto largest = [&] {
    uint32_t top = MaxMagnitudes(words[0], words[1]);
#pragma unroll
    for (int i = 2; i < 8; ++i) top = MaxMagnitudes(top, words[i]);
    return max(top & 0xffffu, top >> 16);
  };
  uint32_t top = largest();
  if (top >= 0x7f80u) {  // values that are not finite are refused and count as 0
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const uint32_t shift = i % 2 * 16;
      if ((words[i / 2] >> shift & 0x7f80u) != 0x7f80u) continue;
      if (whole) Refuse(refused, Refusal::kQuantizeNotFinite, place.row, at + i);
      words[i / 2] &= ~(0xffffu << shift);
    }
    top = largest();
  }
#pragma unroll
  for (int half = 4; half >= 1; half /= 2) top = max(top, __shfl_xor_sync(kAllLanes, top, half));
  const float scale = ScaleOf(__uint_as_float(top << 16));
  const float reciprocal = scale > 0x1p-60f && scale < 0x1p100f ? Div(1.0f, scale) : 0.0f;
  if (!whole) return;
  if (lane == 0) scales[first] = scale;
  if (!mine) return;
  uint32_t codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float v[4];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      v[2 * e] = Quotient(__uint_as_float(words[2 * i + e] << 16), scale, reciprocal);
      v[2 * e + 1] = Quotient(__uint_as_float(words[2 * i + e] & 0xffff0000u), scale, reciprocal);
    }
    codes[i] = CodePair(v[0], v[1]) | CodePair(v[2], v[3]) << 16;
    if (half_away)
      codes[i] = HalfAway(v[0]) | HalfAway(v[1]) << 8 | HalfAway(v[2]) << 16 | HalfAway(v[3]) << 24;
  }
  *reinterpret_cast<uint4*>(q + place.row * width + at) =
      make_uint4(codes[0], codes[1], codes[2], codes[3]);
}

// The planted fault of one scale for the whole batch: one block reads everything first.
template <typename T>
__global__ void __launch_bounds__(1024)
    quantize_per_tensor_kernel(int64_t rows, int64_t width, const void* x_, uint8_t* q,
                               float* scales, bool half_away) {
  __shared__ float top[1024];
  const T* x = static_cast<const T*>(x_);
  float mine = 0.0f;
  for (int64_t i = threadIdx.x; i < rows * width; i += 1024) mine = fmaxf(mine, fabsf(Widen(x[i])));
  top[threadIdx.x] = mine;
  __syncthreads();
  for (int half = 512; half >= 1; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half)
      top[threadIdx.x] = fmaxf(top[threadIdx.x], top[threadIdx.x + half]);
    __syncthreads();
  }
  const float scale = top[0] > 0.0f ? Div(top[0], 448.0f) : 1.0f;
  const int64_t blocks = (width + kBlock - 1) / kBlock;
  for (int64_t i = threadIdx.x; i < rows * blocks; i += 1024) scales[i] = scale;
  for (int64_t i = threadIdx.x; i < rows * width; i += 1024) {
    const float v = Div(Widen(x[i]), scale);
    q[i] = static_cast<uint8_t>(half_away ? HalfAway(v) : E4m3Code(v));
  }
}

template <typename G>
__global__ void __launch_bounds__(256) quantize_backward_kernel(int64_t count, const G* dy, G* dx) {
  for (int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * 256)
    Put(Widen(dy[i]), dx + i);
}

}  // namespace

Status ForwardCuda(const Ctx& ctx, const Params& p, const Args& args) {
  TARE_ASSIGN_OR_RETURN(unsigned long long* const refused, RefusalWord());
  if (args.rows == 0) return Ok();
  const bool half_away = fault::Active(kHalfAway, ctx.side);
  const bool per_tensor = fault::Active(kPerTensor, ctx.side);
  const bool vec =
      p.width % 4 == 0 && Aligned4(args.x, p.dtype) && reinterpret_cast<uintptr_t>(args.q) % 4 == 0;
  return WithRowDType(p.dtype, [&](auto tag) -> Status {
    using T = decltype(tag);
    if (per_tensor) {
      quantize_per_tensor_kernel<T>
          <<<1, 1024, 0, Stream(ctx)>>>(args.rows, p.width, args.x, args.q, args.scale, half_away);
      return Launched();
    }
    const int64_t total = args.rows * ((p.width + kBlock - 1) / kBlock);
    if constexpr (sizeof(T) == 2) {
      if (p.width % 16 == 0 && Aligned16({args.x, args.q})) {
        quantize_bf16_kernel<<<GridFor(total, 32, int64_t{1} << 30), 256, 0, Stream(ctx)>>>(
            args.rows, p.width, static_cast<const uint16_t*>(args.x), args.q, args.scale, refused,
            half_away);
        return Launched();
      }
    }
    const auto run = [&](auto* kernel) {
      kernel<<<GridFor(total, kWarps * kAhead, int64_t{1} << 30), 32 * kWarps, 0, Stream(ctx)>>>(
          args.rows, p.width, args.x, args.q, args.scale, refused, half_away);
      return Launched();
    };
    return vec ? run(&quantize_kernel<T, true>) : run(&quantize_kernel<T, false>);
  });
}

Status BackwardCuda(const Ctx& ctx, const Params& p, const BackwardArgs& args) {
  const int64_t count = args.rows * p.width;
  if (count == 0) return Ok();
  return WithRowDType(p.grad_dtype, [&](auto tag) -> Status {
    using G = decltype(tag);
    quantize_backward_kernel<G><<<GridFor(count, 256), 256, 0, Stream(ctx)>>>(
        count, static_cast<const G*>(args.dy), static_cast<G*>(args.dx));
    return Launched();
  });
}

}  // namespace tare::ops::quantize
