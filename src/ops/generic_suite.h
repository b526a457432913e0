#pragma once

// Test support: what the generic suite needs beside the registry. Linked into tests alone.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "ops/registry.h"

namespace tare::ops {

// An operator's formula in float64, written anew from the mathematics, sharing no code with the
// operator, and without its roundings. Operands in the order of the signature, integers as doubles.
// Outputs marked `saved` may be left empty. Gradients are taken from it by central differences, so
// that the backward is checked against something that does not know the backward's formula.
using Values = std::vector<std::vector<double>>;
using Oracle = std::function<void(const OpKey& key, int64_t rows, const Values& in, Values& out)>;

std::map<std::string, Oracle>& Oracles();

struct OracleRegistration {
  OracleRegistration(const char* op, Oracle oracle) { Oracles().emplace(op, std::move(oracle)); }
};

}  // namespace tare::ops
