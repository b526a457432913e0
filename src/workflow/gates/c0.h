#pragma once

// What the judge of C0 and its collector share: the digest of an inventory and the decision table
// of the route.

#include <cstdint>
#include <set>
#include <string>

#include "base/json.h"

namespace tare::workflow {

// SHA-256 of the rows' canonical JSON; empty when they hold a number that is no integer.
std::string InventoryDigest(const Json& rows);

struct RouteQuestion {
  bool batch_invariance = false;
  int64_t missing_backwards = 0;
  std::set<std::string> unsupported = {};  // of mlite, fsdp2, megatron-bridge
  std::string user = {};                   // the route that the user asks for; empty: no choice
};
// "mlite", "megatron-bridge", "fsdp2" or "none": the same question gives the same route. A choice
// of the user's stands, and is checked, not corrected.
std::string ChooseRoute(const RouteQuestion& question);

}  // namespace tare::workflow
