#pragma once

// Advantages of groups of samples (GRPO): a sample's reward against its group's mean.

#include <span>
#include <vector>

namespace tare::rl {

// (r - mean) / (spread + 1e-6) with `by_std`, else r - mean; the spread is that of the population,
// as no sample is left out. f64, rounded once. A group without differences has exactly 0
// everywhere.
std::vector<float> GroupAdvantages(std::span<const float> rewards, bool by_std);

// Whether two rewards of the group differ: only then does it teach anything.
bool HasSignal(std::span<const float> rewards);

}  // namespace tare::rl
