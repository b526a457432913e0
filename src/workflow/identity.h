#pragma once

// Execution identity: what decided which arithmetic ran on this machine.

#include <string>
#include <vector>

#include "base/env.h"
#include "base/json.h"

namespace tare::workflow {

// Host, CPU and its features, kernel, devices, executable and its hash, `libraries` with their
// hashes, environment. All text in it is UTF-8: other bytes stand as \xNN.
Json ExecutionIdentity(Env* env, const std::vector<std::string>& command,
                       const std::vector<std::string>& libraries);

}  // namespace tare::workflow
