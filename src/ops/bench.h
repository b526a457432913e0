#pragma once

// Benches of operators: each case times ours and a peer in turn in the same run, so that other load
// on the machine meets both. `add_op_bench(NAME)` in src/ops/CMakeLists.txt enters the function
//   namespace tare::ops::NAME { void AddBenches(BenchList& list); }
// and `tare bench ops` runs what it adds.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/thread_pool.h"

namespace tare::ops {

struct BenchCase {
  std::string op;     // "rmsnorm"
  std::string what;   // "forward", "backward", "step"
  std::string shape;  // "T=2048 H=4096 bf16"
  std::string peer;   // "copy of the same bytes"
  int64_t bytes = 0;  // that one call must move at least
  // Prepares buffers and returns the two bodies; both run on the pool that is given.
  struct Bodies {
    std::function<void()> ours;
    std::function<void()> peer;
    std::shared_ptr<void> keep;  // what the bodies refer to
  };
  std::function<Bodies(ThreadPool& pool)> prepare;

  std::string Name() const { return op + "/" + what + "/" + shape; }
};

class BenchList {
 public:
  void Add(BenchCase bench) { cases_.push_back(std::move(bench)); }
  const std::vector<BenchCase>& cases() const { return cases_; }

 private:
  std::vector<BenchCase> cases_;
};

// Everything that add_op_bench entered.
const BenchList& AllBenches();

struct BenchResult {
  double ours_us = 0;  // best of the rounds
  double peer_us = 0;
  double ours_median_us = 0;
  double peer_median_us = 0;
  double ratio() const { return peer_us / ours_us; }  // above 1: ours is faster
};

// Warm-up, then `rounds` times ours and peer in turn, each long enough to time (about 5 ms). With
// `cpu_time` the process's CPU time counts instead of the clock on the wall, which a busy machine
// disturbs less. REQUIRES: a pool of one thread for cpu_time.
BenchResult RunBench(const BenchCase& bench, ThreadPool& pool, int rounds, bool cpu_time = false);

// The peer of an operator bound by memory: reads `read_bytes` and writes `write_bytes`, on the
// pool.
BenchCase::Bodies WithCopyPeer(ThreadPool& pool, int64_t read_bytes, int64_t write_bytes,
                               std::function<void()> ours, std::shared_ptr<void> keep);

}  // namespace tare::ops
