#pragma once

// Planted faults of the serving engine. Each is asked for at the one place where it would sit.

#include "base/fault.h"

namespace tare::engine {

TARE_FAULT(kKeepPrefixCache, "engine.keep_prefix_cache", "engine.update_weights", "C8",
           "the prefix cache is keyed by tokens alone and survives a weight update");
TARE_FAULT(kStaleWeights, "engine.stale_weights", "engine.update_weights", "C8",
           "an update is acknowledged but the old weights go on serving");
TARE_FAULT(kStalePacked, "engine.stale_packed", "engine.update_weights", "C8",
           "an update writes the parameters and leaves the packed copies that the kernels read");
TARE_FAULT(kDirtyPromptLogprobs, "engine.dirty_prompt_logprobs", "engine.prompt_logprobs", "C3",
           "prompt rows skipped by a cache hit keep whatever the buffer held");
TARE_FAULT(kDirtyBlocks, "engine.partial_block_hit", "engine.prefix_cache", "C3",
           "a block that is not yet full is given to the prefix cache");
TARE_FAULT(kDefaultSeed, "engine.default_seed_42", "engine.sampling", "C8",
           "a request without a seed gets seed 42, and all its samples the same index");

}  // namespace tare::engine
