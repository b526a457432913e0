// kv_cache on CUDA: no kernel yet. Every call says so; nothing falls back to the CPU.

#include "ops/kv_cache/kv_cache.h"

namespace tare::ops::kv_cache {

Status ForwardCuda(const Ctx&, const Params&, const Args&) {
  return Unsupported("kv_cache: no CUDA kernel yet; run it on the CPU");
}

}  // namespace tare::ops::kv_cache
