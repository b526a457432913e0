#pragma once

// The one table of reason codes: why a verdict is not a pass. Codes are stable and machine-readable
// (JSON key "reason", last word on stderr); people read the sentence and what to do next. Rooms use
// these constants by name, so a misspelt code does not compile:
//
//   finding.reason = reason::kNoValidTokens;
//
// A new reason is one line of reasons.inc; docs/reasons.md is generated from the table by
// `tare reasons --markdown` and a test compares them.

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/verdict.h"

namespace tare {

struct Reason {
  std::string_view code;      // "no-valid-tokens"
  Verdict verdict;            // the verdict that it usually comes with
  std::string_view sentence;  // what it means, for people
  std::string_view next;      // the next cheapest action
};

std::span<const Reason> AllReasons();  // by code
// nullptr for an unknown code.
const Reason* FindReason(std::string_view code);
std::string ReasonsMarkdown();

namespace reason {
#define TARE_REASON(constant, code, verdict, sentence, next) \
  inline constexpr std::string_view constant = code;
#include "base/reasons.inc"
#undef TARE_REASON
}  // namespace reason

}  // namespace tare
