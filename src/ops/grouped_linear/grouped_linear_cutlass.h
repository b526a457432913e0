#pragma once

// CUTLASS's grouped GEMM as an opponent of grouped_linear_cuda_bench. Built where its headers are
// found (TARE_CUTLASS); nothing else of Tare includes them.

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "ops/cuda/cublas_peer.h"

namespace tare::ops::grouped_linear {

// One configuration set up for a list of products: its buffers live as long as it does.
struct CutlassCall {
  std::string tile;
  std::function<Status(cudaStream_t)> run;
};

// d [m, n] = a b for every group, as CublasPeer::MakeGroups: bf16, f32 accumulation, b [n, k] or,
// with trans_b, [k, n]. The configurations that can be set up, best for few rows first.
Result<std::vector<CutlassCall>> MakeCutlassCalls(bool trans_b, int64_t n, int64_t k,
                                                  std::span<const cuda::CublasPeer::Group> groups);

}  // namespace tare::ops::grouped_linear
