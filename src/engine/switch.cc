#include "engine/switch.h"

#include <cstdlib>

#include "base/json.h"

namespace tare::engine {
namespace {

std::optional<std::string> FromEnvironment() {
  const char* value = std::getenv(kSwitchName);
  if (value == nullptr) return std::nullopt;
  return std::string(value);
}

std::string Show(const std::optional<std::string>& raw) {
  return raw ? fmt::format("'{}'", Printable(*raw)) : "unset";
}

}  // namespace

Result<Switch> ParseSwitch(std::optional<std::string> raw) {
  Switch s;
  if (!raw || *raw == "0") {
    s.effective = ops::BatchInvariance::kOff;
  } else if (*raw == "1") {
    s.effective = ops::BatchInvariance::kOn;
  } else {
    return InvalidArgument(
        "{}={} is neither 0 nor 1; set 1 for the batch-invariant arm, 0 or nothing for the native "
        "arm",
        kSwitchName, Show(raw));
  }
  s.raw = std::move(raw);
  return s;
}

Result<Switch> ReadSwitch() { return ParseSwitch(FromEnvironment()); }

Status Recheck(const Switch& start) {
  const std::optional<std::string> now = FromEnvironment();
  if (now == start.raw) return Ok();
  return Error(Code::kPrecondition,
               "{} was {} at start and is {} now; the process still runs what it read at start",
               kSwitchName, Show(start.raw), Show(now));
}

}  // namespace tare::engine
