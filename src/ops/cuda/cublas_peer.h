#pragma once

// cuBLAS as the native arm of the operators (BatchInvariance::kOff) and so the opponent in benches,
// loaded at run time: nothing of Tare links against it.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

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

  // Many products of one n and k in one call, each with its own m: cublasGemmGroupedBatchedEx.
  struct Group {
    int64_t m = 0;
    const void* a = nullptr;
    const void* b = nullptr;
    void* d = nullptr;
  };
  // What a grouped call reads again and again: host arrays and, on the device, the addresses.
  struct Groups {
    std::vector<int> n, m, k, lda, ldb, ldc, trans_b, trans_a, size;
    std::vector<float> alpha, beta;
    const void** addresses = nullptr;  // 3 x groups on the device: b, a, d
  };
  // Empty groups are left out. Allocates the addresses; freed with the process.
  Result<Groups> MakeGroups(bool trans_b, int64_t n, int64_t k,
                            std::span<const Group> groups) const;
  // The same without addresses on the device: `addresses` gets what must lie there.
  static Groups HostGroups(bool trans_b, int64_t n, int64_t k, std::span<const Group> groups,
                           std::vector<const void*>* addresses);
  bool has_grouped() const { return grouped_ != nullptr; }
  Status GemmGrouped(cudaStream_t stream, const Groups& groups) const;  // bf16, not accumulated
  const std::string& version() const { return version_; }

 private:
  void* handle_ = nullptr;
  void* gemm_ = nullptr;
  void* grouped_ = nullptr;  // may be missing
  void* set_stream_ = nullptr;
  void* set_workspace_ = nullptr;
  void* workspace_ = nullptr;
  std::string version_;
};

// The one that the native arms of this thread share.
Result<const CublasPeer*> NativePeer();

}  // namespace tare::ops::cuda
