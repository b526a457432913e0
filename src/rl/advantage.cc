#include "rl/advantage.h"

#include <cmath>

namespace tare::rl {

bool HasSignal(std::span<const float> rewards) {
  for (const float r : rewards) {
    if (r != rewards[0]) return true;
  }
  return false;
}

std::vector<float> GroupAdvantages(std::span<const float> rewards, bool by_std) {
  std::vector<float> advantages(rewards.size(), 0.0f);
  // Equal rewards: their mean need not be exact, and a rounding must not become a signal.
  if (!HasSignal(rewards)) return advantages;
  const double count = static_cast<double>(rewards.size());
  double sum = 0, squares = 0;
  for (const float r : rewards) sum += r;
  const double mean = sum / count;
  for (const float r : rewards) squares += (r - mean) * (r - mean);
  const double scale = by_std ? std::sqrt(squares / count) + 1e-6 : 1.0;
  for (size_t i = 0; i < rewards.size(); ++i)
    advantages[i] = static_cast<float>((rewards[i] - mean) / scale);
  return advantages;
}

}  // namespace tare::rl
