// cast on CUDA: elementwise, by the rules of tensor/convert.h.

#include "ops/cast/cast_cuda.h"
#include "ops/cuda/rows.cuh"
#include "tensor/convert.h"

namespace tare::ops::cast {
namespace {

using namespace tare::ops::cuda;  // NOLINT(google-build-using-namespace)

template <typename From, typename To>
__global__ void __launch_bounds__(256)
    cast_vector_kernel(int64_t groups, const From* from, To* to) {
  for (int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x; i < groups;
       i += int64_t{gridDim.x} * 256) {
    float v[4];
    Widen4(LoadRaw4(from + 4 * i), v);
    Store4(v, to + 4 * i);
  }
}

template <DType kFrom, DType kTo>
__global__ void __launch_bounds__(256)
    cast_kernel(int64_t begin, int64_t count, const typename FloatFormat<kFrom>::Bits* from,
                typename FloatFormat<kTo>::Bits* to) {
  for (int64_t i = begin + int64_t{blockIdx.x} * 256 + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * 256) {
    to[i] = ConvertFloatBits<kFrom, kTo>(from[i], Fp8Overflow::kNonFinite);
  }
}

template <DType kFrom, DType kTo>
Status Run(const Ctx& ctx, const Args& args) {
  using FromBits = typename FloatFormat<kFrom>::Bits;
  using ToBits = typename FloatFormat<kTo>::Bits;
  const auto* from = static_cast<const FromBits*>(args.x);
  auto* to = static_cast<ToBits*>(args.y);
  int64_t done = 0;
  if constexpr (kFrom != kTo && kFrom != DType::kF16 && kTo != DType::kF16) {
    using From = std::conditional_t<kFrom == DType::kF32, float, uint16_t>;
    using To = std::conditional_t<kTo == DType::kF32, float, uint16_t>;
    if (Aligned4(args.x, kFrom) && Aligned4(args.y, kTo) && args.count >= 4) {
      const int64_t groups = args.count / 4;
      cast_vector_kernel<<<GridFor(groups, 256, int64_t{1} << 30), 256, 0, Stream(ctx)>>>(
          groups, static_cast<const From*>(args.x), static_cast<To*>(args.y));
      TARE_RETURN_IF_ERROR(Launched());
      done = 4 * groups;
    }
  }
  if (done == args.count) return Ok();
  cast_kernel<kFrom, kTo>
      <<<GridFor(args.count - done, 256, int64_t{1} << 30), 256, 0, Stream(ctx)>>>(done, args.count,
                                                                                   from, to);
  return Launched();
}

template <DType kFrom>
Status To(const Ctx& ctx, DType to, const Args& args) {
  switch (to) {
    case DType::kF32:
      return Run<kFrom, DType::kF32>(ctx, args);
    case DType::kBF16:
      return Run<kFrom, DType::kBF16>(ctx, args);
    default:
      return Run<kFrom, DType::kF16>(ctx, args);
  }
}

}  // namespace

Status RunCuda(const Ctx& ctx, DType from, DType to, const Args& args) {
  if (args.count == 0) return Ok();
  switch (from) {
    case DType::kF32:
      return To<DType::kF32>(ctx, to, args);
    case DType::kBF16:
      return To<DType::kBF16>(ctx, to, args);
    default:
      return To<DType::kF16>(ctx, to, args);
  }
}

}  // namespace tare::ops::cast
