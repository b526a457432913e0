#pragma once

// LaunchTrace: which kernel really ran, for which op, dtype and shape. Inventories and gates read
// it (a kernel named by reading source is not evidence that it ran).

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace tare::ops {

struct Launch {
  std::string op;      // "linear"
  std::string kernel;  // "linear_fwd_ieee_avx512", "linear_fwd_wgmma_128x256"
  std::string config;  // printable launch configuration, "tile=128x256x64 stages=4"
  std::string dtypes;  // "bf16,bf16->bf16"
  std::string shape;   // "M=8 N=576 K=576"
};

class LaunchTrace {
 public:
  void Record(Launch launch) {
    std::lock_guard lock(mutex_);
    launches_.push_back(std::move(launch));
  }
  std::vector<Launch> Take() {
    std::lock_guard lock(mutex_);
    return std::exchange(launches_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<Launch> launches_;
};

}  // namespace tare::ops
