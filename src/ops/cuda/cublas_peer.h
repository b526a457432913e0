#pragma once

// cuBLAS as the opponent in benches, loaded at run time so that nothing of Tare links against it.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "base/status.h"

namespace tare::ops::cuda {

class CublasPeer {
 public:
  // Allocates its workspace; one peer serves one thread. Looks in TARE_CUBLAS (a full path), then
  // for libcublas.so.13 and .12 on the loader's path.
  static Result<CublasPeer> Open();

  // Row-major d [m, n] = a b, + d when `accumulate`; f32 accumulation, heuristics of the library.
  // a is [m, k] or, with trans_a, [k, m]; b is [n, k] (as a weight) or, with trans_b, [k, n]. bf16.
  Status Gemm(cudaStream_t stream, bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k,
              const void* a, const void* b, void* d, bool d_f32, bool accumulate) const;
  const std::string& version() const { return version_; }

 private:
  void* handle_ = nullptr;
  void* gemm_ = nullptr;
  void* set_stream_ = nullptr;
  void* set_workspace_ = nullptr;
  void* workspace_ = nullptr;
  std::string version_;
};

}  // namespace tare::ops::cuda
