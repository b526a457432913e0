// fp8_linear on CUDA: no kernel yet. Every call says so; nothing falls back to the CPU.

#include "ops/fp8_linear/fp8_linear.h"

namespace tare::ops::fp8_linear {

size_t WorkspaceBytesCuda(const Ctx&, const Params&, int64_t) { return 0; }

Status ForwardCuda(const Ctx&, const Params&, const Args&) {
  return Unsupported("fp8_linear: no CUDA kernel yet; run it on the CPU");
}

}  // namespace tare::ops::fp8_linear
