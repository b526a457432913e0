// grouped_linear on CUDA: no kernel yet. Every call says so; nothing falls back to the CPU.

#include "ops/grouped_linear/grouped_linear.h"

namespace tare::ops::grouped_linear {

size_t WorkspaceBytesCuda(const Ctx&, const Params&, int64_t) { return 0; }

size_t BackwardWorkspaceBytesCuda(const Ctx&, const Params&, int64_t, int64_t) { return 0; }

Status ForwardCuda(const Ctx&, const Params&, const Args&) {
  return Unsupported("grouped_linear: no CUDA kernel yet; run it on the CPU");
}

Status BackwardCuda(const Ctx&, const Params&, const BackwardArgs&) {
  return Unsupported("grouped_linear: no CUDA kernel yet; run its backward on the CPU");
}

}  // namespace tare::ops::grouped_linear
