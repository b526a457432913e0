#pragma once

// UTF-8 for the tokenizer: strict validation, and the repair that makes any bytes printable text.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace tare::models {

// What stands at the front of a string.
enum class Utf8Kind {
  kWhole,       // one well-formed scalar value of `size_bytes`
  kIncomplete,  // the string ends inside what may still become one; `size_bytes` are there
  kInvalid,     // `size_bytes` (1 to 3) that no continuation can repair: a maximal subpart
};
struct Utf8Piece {
  Utf8Kind kind = Utf8Kind::kInvalid;
  size_t size_bytes = 0;
  uint32_t code_point = 0;  // of a whole one
};
// REQUIRES: text not empty. Surrogates, overlong forms and values above U+10FFFF are invalid.
Utf8Piece NextUtf8(std::string_view text);

// kInvalidArgument with the offset and the byte where `text` stops being UTF-8.
Status CheckUtf8(std::string_view text);

// Appends `bytes` to *out, each maximal invalid subpart replaced by U+FFFD (the Unicode standard's
// recommended practice, what Python's errors="replace" and Rust's from_utf8_lossy do). Unless
// `at_end`, an incomplete tail is left out. Returns the number of bytes consumed.
size_t AppendLossyUtf8(std::string_view bytes, bool at_end, std::string* out);

}  // namespace tare::models
