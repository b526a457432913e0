#pragma once

// Measures the comparison beside what the machine itself reaches in the same run: a plain
// multi-threaded sum over both sets (read bandwidth) and SHA-256 on all threads. Arms are
// interleaved and the best of several rounds counts, because other load on the machine only ever
// slows an arm. Beside the wall clock stands the processor time of all threads, which other load
// moves far less: on a busy machine it is the fairer ratio.

#include <cstdint>
#include <string>

#include "base/env.h"
#include "base/status.h"
#include "base/thread_pool.h"

namespace tare::compare {

struct SpeedOptions {
  std::string dir;  // two files of `set_bytes` are made there and removed
  int64_t set_bytes = int64_t{1} << 30;
  int64_t small_tensors = 100'000;  // in the second pair of files
  int rounds = 5;
  ThreadPool* pool = nullptr;  // REQUIRES: not null
};

struct Speed {
  // GB per second of processor time, of the arms below with the same names.
  struct PerCpu {
    double sum = 0, diff = 0, diff_fresh = 0, diff_digests = 0, sha256 = 0;
  } cpu;
  // GB (10^9 bytes) per second over both sets together.
  double sum = 0;                    // plain sum of both streams, mapped and touched
  double diff = 0;                   // the same mapping compared
  double diff_fresh = 0;             // opened, mapped anew and compared, page faults included
  double diff_digests = 0;           // compared with digests of both sides in the same pass
  double sha256 = 0;                 // bytes hashed per second on all threads, one stream
  double worst_case = 0;             // every element differs: the counting path
  double small_seconds = 0;          // two files of `small_tensors` tensors, opening included
  double small_cpu_seconds = 0;      // processor time of the same
  int64_t peak_anonymous_bytes = 0;  // of this process while comparing the large sets
};

Result<Speed> MeasureDiff(Env* env, const SpeedOptions& options);

}  // namespace tare::compare
