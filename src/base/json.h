#pragma once

// JSON values and hardened parsing. Text from outside goes through ParseJson, never through the
// library's own entry point.

#include <cstddef>
#include <cstdint>
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

// Strict: UTF-8 without a byte order mark, no duplicate keys, no trailing bytes, no integer outside
// 64 bits (which would silently become a double), limits kept. The error names line and column,
// both from 1, the column in bytes. kInvalidArgument, or kExhausted past a limit.
Result<Json> ParseJson(std::string_view text, const JsonLimits& limits = {});

// The same parse as a stream, for input too large for a tree. Each call may refuse by a Status,
// which ends the parse and gets line and column put before it.
class JsonEvents {
 public:
  virtual ~JsonEvents() = default;
  virtual Status Null() = 0;
  virtual Status Bool(bool value) = 0;
  virtual Status Signed(int64_t value) = 0;     // negative integers
  virtual Status Unsigned(uint64_t value) = 0;  // all others
  virtual Status Float(double value) = 0;
  virtual Status String(std::string& value) = 0;  // may be moved from
  virtual Status StartObject() = 0;
  virtual Status Key(std::string& key) = 0;  // unique within its object; may be moved from
  virtual Status EndObject() = 0;
  virtual Status StartArray() = 0;
  virtual Status EndArray() = 0;
};
Status ParseJsonEvents(std::string_view text, JsonEvents* events, const JsonLimits& limits = {});

// One line, keys sorted by bytes, no spaces, integers and strings only as given: equal values give
// equal bytes, so its SHA-256 is an identity. REQUIRES: no floating-point value inside (numbers
// that are bits are hex words); kInvalidArgument otherwise.
Result<std::string> CanonicalJson(const Json& value);

bool IsUtf8(std::string_view text);

// `text` safe for a terminal: control characters (line ends too), invalid UTF-8, and
// characters that reorder or hide text, as \xNN escapes of their bytes.
std::string Printable(std::string_view text);

}  // namespace tare
