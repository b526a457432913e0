#include "base/reasons.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/check.h"

namespace tare {
namespace {

const std::vector<Reason>& Table() {
  static const std::vector<Reason> table = [] {
    std::vector<Reason> reasons = {
#define TARE_REASON(constant, code, verdict, sentence, next) \
  {code, Verdict::verdict, sentence, next},
#include "base/reasons.inc"
#undef TARE_REASON
    };
    std::sort(reasons.begin(), reasons.end(),
              [](const Reason& a, const Reason& b) { return a.code < b.code; });
    for (size_t i = 1; i < reasons.size(); ++i) {
      TARE_CHECK(reasons[i - 1].code != reasons[i].code)
          << "reason " << reasons[i].code << " twice";
    }
    return reasons;
  }();
  return table;
}

}  // namespace

std::span<const Reason> AllReasons() { return Table(); }

const Reason* FindReason(std::string_view code) {
  const std::vector<Reason>& table = Table();
  const auto at = std::lower_bound(table.begin(), table.end(), code,
                                   [](const Reason& r, std::string_view c) { return r.code < c; });
  return at != table.end() && at->code == code ? &*at : nullptr;
}

std::string ReasonsMarkdown() {
  std::string out =
      "# Reason codes\n\n"
      "Every verdict that is not a pass carries one of these codes. The table is generated from\n"
      "`src/base/reasons.inc` by `tare reasons --markdown`; a test keeps the two equal. Codes are\n"
      "never renamed, because artifacts carry them.\n\n"
      "| code | usual verdict | what it means | next cheapest action |\n|---|---|---|---|\n";
  const auto cell = [](std::string_view text) {
    std::string escaped;
    for (const char c : text) {
      if (c == '|') escaped += '\\';
      escaped += c;
    }
    return escaped;
  };
  for (const Reason& r : AllReasons()) {
    out += "| `" + std::string(r.code) + "` | " + std::string(VerdictName(r.verdict)) + " | " +
           cell(r.sentence) + " | " + cell(r.next) + " |\n";
  }
  return out;
}

}  // namespace tare
