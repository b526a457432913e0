#pragma once

// The documentation page of an operator, generated from its contract record, so that page and code
// cannot drift apart (a test compares the committed pages).

#include <string>

#include "ops/registry.h"

namespace tare::ops {

// Markdown: the first key's contract in full, then what the other keys change, with every ID.
std::string ContractPage(const OpInfo& op);
// The list of all operators, as docs/ops/README.md.
std::string ContractIndex();

}  // namespace tare::ops
