#pragma once

// Whether this thread computes as IEEE 754 says: rounding to nearest even, subnormals kept on both
// sides. A loaded library can change either for a thread (one built with -ffast-math does at load
// time), and then every bit after it is another one.

#include "base/status.h"

namespace tare::numerics {

// kPrecondition, naming what is wrong, or ok.
Status CheckFpEnvironment();

// The form a ThreadPool takes as its `check`: a wrong environment ends the process with a message.
void RequireFpEnvironment();

}  // namespace tare::numerics
