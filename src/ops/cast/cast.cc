#include "ops/cast/cast.h"
#include "ops/cast/cast_cuda.h"

#include "ops/cuda_entry.h"
#include "ops/rows.h"
#include "tensor/convert.h"

namespace tare::ops::cast {
namespace {

Status Run(const Ctx& ctx, DType from, DType to, const Args& args) {
  TARE_RETURN_IF_ERROR(CheckDevice("cast", ctx));
  for (const DType dtype : {from, to}) {
    if (dtype != DType::kF32 && dtype != DType::kBF16 && dtype != DType::kF16) {
      return Unsupported("cast: {} to {}; f32, bf16 and f16 are built", DTypeName(from),
                         DTypeName(to));
    }
  }
  TARE_RETURN_IF_ERROR(CheckRows("cast", args.count));
  TARE_RETURN_IF_ERROR(CheckPointer("cast", "x", args.x, args.count));
  TARE_RETURN_IF_ERROR(CheckPointer("cast", "y", args.y, args.count));
  TARE_WITH_CUDA_RETURN("cast", ctx, RunCuda(ctx, from, to, args));
  return ConvertElements(args.x, from, args.y, to, args.count, Fp8Overflow::kNonFinite, ctx.pool);
}

}  // namespace

Status Forward(const Ctx& ctx, const Params& params, const Args& args) {
  return Run(ctx, params.from, params.to, args);
}
Status Backward(const Ctx& ctx, const Params& params, const Args& args) {
  return Run(ctx, params.to, params.from, args);
}

}  // namespace tare::ops::cast
