#pragma once

// Learning-rate schedules. A function of the step alone, so that a restored run has the rates of
// the uninterrupted one.

#include <cstdint>
#include <string>

#include "base/status.h"

namespace tare::trainer {

struct Schedule {
  enum class Kind : uint8_t { kConstant, kLinear, kCosine };
  Kind kind = Kind::kConstant;
  int64_t warmup_steps = 0;  // the rate rises linearly to its full value at this step
  int64_t total_steps = 0;   // linear, cosine: after this one the rate has fallen to min_ratio
  double min_ratio = 0.0;
};

// kInvalidArgument: an unknown name, negative steps, a decay that ends inside the warm-up, a ratio
// outside [0, 1].
Result<Schedule> MakeSchedule(const std::string& name, int64_t warmup_steps, int64_t total_steps,
                              double min_ratio);

// Of update `step`, 1 for the first: never 0 in the warm-up, as a first step without effect looks
// like a passed one. f64 without the C library's functions, rounded once.
float LearningRate(const Schedule& schedule, double lr, int64_t step);

}  // namespace tare::trainer
