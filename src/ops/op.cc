#include "ops/op.h"

#include "ops/refusals.h"
#include "ops/trace.h"
#ifdef TARE_WITH_CUDA
#include "ops/cuda/refusal.h"
#endif

namespace tare::ops {

// The registry of operators is generated from src/ops/CMakeLists.txt.

Status TakeRefusals(const Ctx& ctx) {
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda) return cuda::TakeRefusal(ctx.stream);
#endif
  (void)ctx;
  return Ok();
}

}  // namespace tare::ops
