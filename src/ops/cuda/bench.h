#pragma once

// Timing on the device for benches: several arms interleaved, each launched from one CUDA graph in
// which a read of 256 MiB before every call leaves its data cold.

#include <cuda_runtime_api.h>

#include <functional>
#include <string>
#include <vector>

#include "base/status.h"

namespace tare::ops::cuda {

struct Arm {
  std::string name;
  std::function<Status()> call;  // enqueues one call on the bench's stream; captured
};

struct Timing {
  double median_us = 0;
  double low_us = 0;  // of the rounds
  double high_us = 0;
};

class Bench {
 public:
  static Result<Bench> Create();
  cudaStream_t stream() const { return stream_; }
  // How the cache is emptied before each call.
  enum class Flush { kRead, kWrite, kNone };

  // Time of one call of each arm: a graph of `calls` times (flush, call) minus a graph of `calls`
  // times flush, over `calls`; the median of `rounds` rounds in which all arms take turns.
  Result<std::vector<Timing>> Time(const std::vector<Arm>& arms, int calls, int rounds,
                                   Flush flush = Flush::kRead);

 private:
  Status Enqueue(Flush flush) const;
  Result<cudaGraphExec_t> Capture(const std::function<Status()>* call, int calls,
                                  Flush flush) const;
  Result<double> Launch(cudaGraphExec_t graph) const;

  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  void* flush_ = nullptr;
  uint32_t* sink_ = nullptr;
};

// GPU name, driver, runtime, clocks as they are: one line of JSON fields for a result file.
Result<std::string> DeviceFacts();

}  // namespace tare::ops::cuda
