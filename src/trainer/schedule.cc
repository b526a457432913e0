#include "trainer/schedule.h"

#include <algorithm>

namespace tare::trainer {
namespace {

// cos(pi x) for x in [0, 1]. The C library's own may differ in the last bit from machine to
// machine, and a rate is part of every parameter's bits. Taylor's series to x^22 on [0, pi / 2];
// the first term left out is below 1e-18.
double CosPi(double x) {
  if (x > 0.5) return -CosPi(1.0 - x);
  const double t = 3.14159265358979323846 * x, z = t * t;
  double sum = 1.0, term = 1.0;
  for (int k = 1; k <= 11; ++k) {
    term = term * -z / static_cast<double>((2 * k - 1) * (2 * k));
    sum = sum + term;
  }
  return sum;
}

}  // namespace

Result<Schedule> MakeSchedule(const std::string& name, int64_t warmup_steps, int64_t total_steps,
                              double min_ratio) {
  Schedule s;
  if (name == "linear") {
    s.kind = Schedule::Kind::kLinear;
  } else if (name == "cosine") {
    s.kind = Schedule::Kind::kCosine;
  } else if (name != "constant") {
    return InvalidArgument("schedule {}: constant, linear or cosine", name);
  }
  if (warmup_steps < 0) return InvalidArgument("warm-up of {} steps; 0 or more", warmup_steps);
  if (s.kind != Schedule::Kind::kConstant && total_steps < std::max<int64_t>(1, warmup_steps)) {
    return InvalidArgument("a {} schedule over {} steps with {} of warm-up; no fewer than those",
                           name, total_steps, warmup_steps);
  }
  if (!(min_ratio >= 0 && min_ratio <= 1))
    return InvalidArgument("the last rate is {} of the first; 0 to 1", min_ratio);
  s.warmup_steps = warmup_steps;
  s.total_steps = total_steps;
  s.min_ratio = min_ratio;
  return s;
}

float LearningRate(const Schedule& s, double lr, int64_t step) {
  if (step <= s.warmup_steps)
    return static_cast<float>(lr * static_cast<double>(step) / static_cast<double>(s.warmup_steps));
  if (s.kind == Schedule::Kind::kConstant) return static_cast<float>(lr);
  // 0 at the first step after the warm-up; 1 would be the step after the last, so that none is 0.
  const double span = static_cast<double>(std::max<int64_t>(1, s.total_steps - s.warmup_steps));
  const double x = std::clamp(static_cast<double>(step - s.warmup_steps - 1) / span, 0.0, 1.0);
  const double fall = s.kind == Schedule::Kind::kLinear ? 1.0 - x : 0.5 * (1.0 + CosPi(x));
  return static_cast<float>(lr * (s.min_ratio + (1.0 - s.min_ratio) * fall));
}

}  // namespace tare::trainer
