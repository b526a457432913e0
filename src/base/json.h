#pragma once

// JSON values and hardened parsing. Text from outside goes through ParseJson, never through the
// library's own entry point.

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/status.h"

namespace tare {

// Objects keep the order in which keys were added; CanonicalJson sorts them.
using Json = nlohmann::ordered_json;

struct JsonLimits {
  size_t max_bytes = size_t{256} << 20;
  int max_depth = 64;
};

// Strict: UTF-8, no duplicate keys, no trailing bytes, limits kept. The error names line and
// column.
Result<Json> ParseJson(std::string_view text, const JsonLimits& limits = {});

// One line, keys sorted by bytes, no spaces, integers and strings only as given: equal values give
// equal bytes, so its SHA-256 is an identity. REQUIRES: no floating-point value inside (numbers
// that are bits are hex words); kInvalidArgument otherwise.
Result<std::string> CanonicalJson(const Json& value);

// `text` safe for a terminal: control characters, invalid UTF-8 and bidi overrides as \xNN escapes.
std::string Printable(std::string_view text);

}  // namespace tare
