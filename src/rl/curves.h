#pragma once

// Reward, loss, gradient norm, ratio and time by phase of runs of the loop, from their receipts: as
// numbers, and as one SVG file that needs nothing else.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace tare::rl {

struct Curves {
  std::string name;  // "seed 1"
  struct Step {
    double reward = 0, loss = 0, gradient_norm = 0, ratio_min = 1, ratio_max = 1, lr = 0;
    // Seconds: sampling, comparing both paths before the update, forward with loss and backward,
    // optimizer, publishing.
    double rollout = 0, compare = 0, forward_backward = 0, optimizer = 0, publish = 0;
  };
  std::vector<Step> steps;
  std::vector<std::pair<int64_t, double>> held_out;  // version, mean reward
};

// kDataLoss when the receipt lacks a field.
Result<Curves> CurvesOf(const std::string& name, const Json& receipt);
Json ToJson(const Curves& curves);
// Six panels; the runs lie over each other. Readable in light and dark.
std::string CurvesSvg(std::span<const Curves> runs, const std::string& title);

// One-sided lower 95 % bound of the mean of `values` (Student's t; at least two, at most 31 of
// them).
double LowerBound95(std::span<const double> values);

}  // namespace tare::rl
