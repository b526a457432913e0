#pragma once

// Differential fuzzing of a fast kernel of the sm90-mma step against the plain definition, over
// every class of operand pattern. Deterministic from its seed.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "numerics/mma.h"
#include "numerics/sm90_patterns.h"

namespace tare::numerics {

struct MmaFuzzDifference {
  uint64_t seed = 0;  // of the round: the same seed replays it
  Pattern pattern = Pattern::kNormal;
  int64_t m = 0, n = 0, k = 0;
  uint32_t got = 0, want = 0;
};

struct MmaFuzzReport {
  int64_t products = 0;
  int64_t elements = 0;
  int64_t products_by_pattern[kPatternCount] = {};
  std::optional<MmaFuzzDifference> difference;  // the first; the run ends there
};

// Rounds of random size until `products` are done. `progress` (may be null) hears the count.
MmaFuzzReport MmaFuzz(MmaType type, MmaKernel kernel, int64_t products, uint64_t seed,
                      const std::function<void(int64_t)>& progress = nullptr);

}  // namespace tare::numerics
