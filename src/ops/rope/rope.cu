// rope on CUDA: a thread for eight or four pairs of one head (or one pair, where four cannot be
// read at once). Both elements of a pair are read before either is written, so x may be y.

#include "ops/cuda/eights.cuh"
#include "ops/rope/rope_cuda.h"

namespace tare::ops::rope {
namespace {

using namespace tare::ops::cuda;  // NOLINT(google-build-using-namespace)

struct KernelArgs {
  int64_t rows;
  uint32_t heads, dim, half, items;  // items of a head: groups of pairs, then of copied elements
  const int32_t* positions;
  const float *cos, *sin;
  int64_t table_positions;
  const void* x;
  void* y;
  int64_t x_stride, y_stride;
  float sign;
  bool interleaved;
  unsigned long long* refused;
};

template <typename T, int kGroup>
__global__ void __launch_bounds__(256) rope_kernel(const __grid_constant__ KernelArgs a) {
  const uint32_t per_row = a.heads * a.items;
  const int64_t total = a.rows * per_row;
  for (int64_t at = int64_t{blockIdx.x} * 256 + threadIdx.x; at < total;
       at += int64_t{gridDim.x} * 256) {
    const auto [row, in_row] = PlaceOf(at, per_row);
    const auto rest = static_cast<uint32_t>(in_row);
    const uint32_t head = rest / a.items;
    const uint32_t i = (rest - head * a.items) * kGroup;  // the first pair, or half + element
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride + int64_t{head} * a.dim;
    T* y = static_cast<T*>(a.y) + row * a.y_stride + int64_t{head} * a.dim;
    const int64_t position = a.positions[row];
    if (position < 0 || position >= a.table_positions) {
      if (rest == 0) Refuse(a.refused, Refusal::kRopePosition, row);
      continue;
    }
    const float* cos = a.cos + position * a.half + i;
    const float* sin = a.sin + position * a.half + i;
    if constexpr (kGroup == 8) {
      if (i < a.half) {
        float x1[8], x2[8], c[8], s[8];
        Load8(x + i, x1);
        Load8(x + a.half + i, x2);
        Load8(cos, c);
        Load8(sin, s);
        float y2[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float se = Mul(s[e], a.sign);
          y2[e] = Fma(x2[e], c[e], Mul(x1[e], se));
          x1[e] = Fma(x1[e], c[e], -Mul(x2[e], se));
        }
        Store8(x1, y + i);
        Store8(y2, y + a.half + i);
      } else {
        float v[8];
        Load8(x + a.half + i, v);
        Store8(v, y + a.half + i);
      }
    } else if constexpr (kGroup == 4) {
      if (i < a.half) {
        float x1[4], x2[4], c[4], s[4], y1[4], y2[4];
        Widen4(LoadRaw4(x + i), x1);
        Widen4(LoadRaw4(x + a.half + i), x2);
        Widen4(LoadRaw4(cos), c);
        Widen4(LoadRaw4(sin), s);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float se = Mul(s[e], a.sign);
          y1[e] = Fma(x1[e], c[e], -Mul(x2[e], se));
          y2[e] = Fma(x2[e], c[e], Mul(x1[e], se));
        }
        Store4(y1, y + i);
        Store4(y2, y + a.half + i);
      } else {
        float v[4];
        Widen4(LoadRaw4(x + a.half + i), v);
        Store4(v, y + a.half + i);
      }
    } else {
      if (i < a.half) {
        const uint32_t i1 = a.interleaved ? 2 * i : i;
        const uint32_t i2 = a.interleaved ? 2 * i + 1 : i + a.half;
        const float c = cos[0], s = Mul(sin[0], a.sign);
        const float x1 = Widen(x[i1]), x2 = Widen(x[i2]);
        Put(Fma(x1, c, -Mul(x2, s)), y + i1);
        Put(Fma(x2, c, Mul(x1, s)), y + i2);
      } else {
        Put(Widen(x[a.half + i]), y + a.half + i);
      }
    }
  }
}

// With planted faults, as the CPU's: a thread a row.
template <typename T>
__global__ void rope_faulty_kernel(const __grid_constant__ KernelArgs a, bool positions_bf16,
                                   bool cast) {
  const int64_t t = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (t >= a.rows) return;
  const auto low = [&](float v) { return cast ? ThroughBf16(v) : v; };
  int64_t position = a.positions[t];
  if (positions_bf16) position = static_cast<int64_t>(ThroughBf16(static_cast<float>(position)));
  if (position >= a.table_positions) position = a.table_positions - 1;
  if (position < 0) position = 0;
  for (uint32_t head = 0; head < a.heads; ++head) {
    const T* x = static_cast<const T*>(a.x) + t * a.x_stride + int64_t{head} * a.dim;
    T* y = static_cast<T*>(a.y) + t * a.y_stride + int64_t{head} * a.dim;
    for (uint32_t i = 0; i < a.half; ++i) {
      const uint32_t i1 = a.interleaved ? 2 * i : i;
      const uint32_t i2 = a.interleaved ? 2 * i + 1 : i + a.half;
      const float c = low(a.cos[position * a.half + i]);
      const float s = Mul(low(a.sin[position * a.half + i]), a.sign);
      const float x1 = Widen(x[i1]), x2 = Widen(x[i2]);
      Put(cast ? Add(low(Mul(x1, c)), low(-Mul(x2, s))) : Fma(x1, c, -Mul(x2, s)), y + i1);
      Put(cast ? Add(low(Mul(x2, c)), low(Mul(x1, s))) : Fma(x2, c, Mul(x1, s)), y + i2);
    }
    for (uint32_t i = 2 * a.half; i < a.dim; ++i) Put(Widen(x[i]), y + i);
  }
}

}  // namespace

Status RotateCuda(const Ctx& ctx, const Params& p, const Args& args, bool backward) {
  TARE_ASSIGN_OR_RETURN(unsigned long long* const refused, RefusalWord());
  const bool positions_bf16 = fault::Active(kPositionsBf16, ctx.side);
  const bool cast = fault::Active(kCastBeforeRotate, ctx.side);
  const bool detached = backward && fault::Active(kDetached, ctx.side);
  KernelArgs a = {args.rows,
                  static_cast<uint32_t>(args.heads),
                  static_cast<uint32_t>(p.head_dim),
                  static_cast<uint32_t>(p.rotary_dim / 2),
                  0,
                  args.positions,
                  args.cos,
                  args.sin,
                  args.table_positions,
                  args.x,
                  args.y,
                  args.x_stride,
                  args.y_stride,
                  backward ? -1.0f : 1.0f,
                  p.layout == Layout::kInterleaved,
                  refused};
  if (args.rows == 0) return Ok();
  return WithRowDType(p.dtype, [&](auto tag) -> Status {
    using T = decltype(tag);
    if (positions_bf16 || cast || detached) {
      if (detached) a.half = 0;
      rope_faulty_kernel<T><<<static_cast<unsigned>((a.rows + 127) / 128), 128, 0, Stream(ctx)>>>(
          a, positions_bf16, cast);
      return Launched();
    }
    const bool vec = !a.interleaved && a.half % 4 == 0 && a.dim % 4 == 0 && a.x_stride % 4 == 0 &&
                     a.y_stride % 4 == 0 && Aligned4(a.x, p.dtype) && Aligned4(a.y, p.dtype) &&
                     Aligned4(a.cos, DType::kF32) && Aligned4(a.sin, DType::kF32);
    const bool wide = vec && sizeof(T) == 2 && a.half % 8 == 0 && a.dim % 8 == 0 &&
                      a.x_stride % 8 == 0 && a.y_stride % 8 == 0 && Aligned16({a.x, a.y});
    a.items = (a.half + (a.dim - 2 * a.half)) / (wide ? 8 : vec ? 4 : 1);
    const unsigned grid = GridFor(a.rows * a.heads * a.items, 256, int64_t{1} << 30);
    if (wide) {
      if constexpr (sizeof(T) == 2) rope_kernel<T, 8><<<grid, 256, 0, Stream(ctx)>>>(a);
    } else if (vec) {
      rope_kernel<T, 4><<<grid, 256, 0, Stream(ctx)>>>(a);
    } else {
      rope_kernel<T, 1><<<grid, 256, 0, Stream(ctx)>>>(a);
    }
    return Launched();
  });
}

}  // namespace tare::ops::rope
