#pragma once

// The paired benchmark of BI=0 against BI=1 (C10-10): pairs on fresh servers of one node, in
// balanced order, with counted tokens; per concurrency a confidence bound of the slowdown against
// the agreed margin.

#include <string>
#include <vector>

#include "workflow/gates/evidence_parts.h"

namespace tare::workflow {

struct BenchArm {
  std::string switch_value, kernels, image, commits, workload, node;
  int64_t requests = 0, completed = 0, failed = 0, input_tokens = 0, output_tokens = 0;
  int64_t cache_hits = 0, served_before = 0, loaded_samples = 0, duration_us = 0;
  int64_t throughput_micro = 0;  // output tokens in 1e6 s
};
struct BenchPair {
  std::string order;  // "off first", "on first"
  BenchArm off, on;
};
struct BenchPoint {
  int64_t concurrency = 0;
  std::vector<BenchPair> pairs;
  // As reported, in parts per million of BI=0 time over BI=1 time... slowdown: off / on throughput.
  int64_t median_ppm = 0, upper_ppm = 0;
};
struct Pairing {
  std::string node;
  std::vector<BenchPoint> points;
};

Pairing ReadPairing(const Field& field);

// Slowdown of a point: mean, and the one-sided 95 % bounds of the mean of the log ratios (Student's
// t), back as ratios. REQUIRES: at least two pairs with positive throughputs.
struct Slowdown {
  double median = 1, mean = 1, lower = 1, upper = 1;
};
Slowdown SlowdownOf(const BenchPoint& point);

void CheckPairing(Judging* judging, const Subject& subject, const Recipe& agreement,
                  const std::string& commits, const Pairing& pairing);

}  // namespace tare::workflow
