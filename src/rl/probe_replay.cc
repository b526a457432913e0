// What the dump of the trainer's probe says about computing it again.

#include "base/fault.h"
#include "rl/loop.h"
#include "tensor/replay_command.h"

namespace tare::rl {

Json ProbeReplay(const LoopConfig& config, bool batch_invariant) {
  return ReplayArguments({.model = config.model,
                          .profile = config.profile,
                          .side = "trainer",
                          .faults = fault::Selected(),
                          .weight_version = "theta0",
                          .native = !batch_invariant});
}

}  // namespace tare::rl
