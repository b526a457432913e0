#pragma once

// Run IDs: UUIDv7 (RFC 9562): 48 bits of milliseconds, then a counter and random bits, so that IDs
// made by one process sort in the order of making, also when the clock steps back.

#include <string>
#include <string_view>

#include "base/env.h"

namespace tare::workflow {

// "0199c2f0-7d3c-7abc-8def-0123456789ab", lower case. Random bits come from the system.
std::string NewRunId(Env* env);
// True for a lower-case UUID of version 7 and variant 10.
bool IsRunId(std::string_view text);

}  // namespace tare::workflow
