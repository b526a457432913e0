#include "base/verdict.h"

#include <array>

#include "base/check.h"

namespace tare {
namespace {

struct Entry {
  Verdict verdict;
  std::string_view name;
  int exit_code;
};

constexpr std::array<Entry, 7> kEntries = {{
    {Verdict::kPass, "pass", 0},
    {Verdict::kFail, "fail", 1},
    {Verdict::kInconclusive, "inconclusive", 2},
    {Verdict::kRefused, "refused", 3},
    {Verdict::kWaitingHuman, "waiting-human", 4},
    {Verdict::kNotCovered, "not-covered", 5},
    {Verdict::kDiagnosticOnly, "diagnostic-only", 6},
}};

const Entry& Find(Verdict verdict) {
  for (const Entry& e : kEntries) {
    if (e.verdict == verdict) return e;
  }
  TARE_CHECK(false) << "no such verdict";
  __builtin_unreachable();
}

}  // namespace

std::string_view VerdictName(Verdict verdict) { return Find(verdict).name; }

std::optional<Verdict> ParseVerdict(std::string_view name) {
  for (const Entry& e : kEntries) {
    if (e.name == name) return e.verdict;
  }
  return std::nullopt;
}

int ExitCode(Verdict verdict) { return Find(verdict).exit_code; }

}  // namespace tare
