#pragma once

// Verdict: what a comparison, a gate or a test *showed*. One enum everywhere; only kPass opens a
// gate. A non-pass verdict carries a stable reason code (docs/reasons.md lists all with a sentence
// for people and the next cheapest action).

#include <optional>
#include <string>
#include <string_view>

namespace tare {

enum class Verdict {
  kPass,
  kFail,
  kInconclusive,
  kRefused,
  kWaitingHuman,
  kNotCovered,
  kDiagnosticOnly,
};

// "pass", "fail", "inconclusive", "refused", "waiting-human", "not-covered", "diagnostic-only".
std::string_view VerdictName(Verdict verdict);
std::optional<Verdict> ParseVerdict(std::string_view name);

// Exit status of a command that ends with this verdict: 0 pass, 1 fail, 2 inconclusive, 3 refused,
// 4 waiting-human, 5 not-covered, 6 diagnostic-only. Usage and environment errors are 64 and up.
int ExitCode(Verdict verdict);
inline constexpr int kExitUsage = 64;        // the command line is wrong (sysexits EX_USAGE)
inline constexpr int kExitData = 65;         // an input file is malformed (EX_DATAERR)
inline constexpr int kExitNoInput = 66;      // an input file is missing (EX_NOINPUT)
inline constexpr int kExitUnavailable = 69;  // not supported on this machine (EX_UNAVAILABLE)
inline constexpr int kExitSoftware = 70;     // a bug of ours (EX_SOFTWARE)
inline constexpr int kExitIo = 74;           // reading or writing failed (EX_IOERR)

}  // namespace tare
