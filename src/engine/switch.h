#pragma once

// VLLM_BATCH_INVARIANT: the switch between the two arms, read once at start.
//
// "1" turns batch invariance on; unset and "0" leave the native arm. Everything else ("", "true",
// "false", "2", " 1") is refused with what would be right: engines that test for presence take "0"
// for on, engines that test for truth take "false" for on, and nobody notices. A value set after
// the start, or only in a parent's environment, changes nothing and is seen: Recheck compares what
// the process would read now with what it runs.

#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"
#include "ops/op.h"

namespace tare::engine {

inline constexpr char kSwitchName[] = "VLLM_BATCH_INVARIANT";

struct Switch {
  std::optional<std::string> raw;  // as the environment had it at start
  ops::BatchInvariance effective = ops::BatchInvariance::kOff;
};

// `raw`: the value, or nullopt for unset. kInvalidArgument as above.
Result<Switch> ParseSwitch(std::optional<std::string> raw);
// From this process's environment.
Result<Switch> ReadSwitch();
// Ok when the environment still says what `start` read; kPrecondition with both values otherwise.
Status Recheck(const Switch& start);

}  // namespace tare::engine
