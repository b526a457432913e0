#include "workflow/precision.h"

#include <fmt/format.h>

#include <algorithm>

namespace tare::workflow {
namespace {

std::string Join(const std::vector<std::string>& items) {
  std::string out;
  for (const std::string& item : items) out += (out.empty() ? "" : ", ") + item;
  return out.empty() ? "nothing" : out;
}

bool Has(const std::vector<std::string>& list, const std::string& item) {
  return std::find(list.begin(), list.end(), item) != list.end();
}

}  // namespace

std::vector<std::string> PrecisionsOf(const std::string& hardware) {
  if (hardware == "sm90") return {"int8", "fp8-block"};
  if (hardware == "sm100") return {"nvfp4", "mxfp8", "fp8-block"};
  if (hardware == "sm80") return {"int8"};
  return {};
}

PrecisionChoice ChooseLowPrecision(const std::string& hardware,
                                   const std::vector<std::string>& paths,
                                   const std::string& wanted) {
  const std::vector<std::string> offered = PrecisionsOf(hardware);
  const std::string facts =
      fmt::format("{} executes {}; kernel paths here: {}", hardware, Join(offered), Join(paths));
  if (!wanted.empty()) {
    if (Has(offered, wanted) && Has(paths, wanted)) return {wanted, "the user's choice; " + facts};
    return {"none", fmt::format("the user's choice {} does not fit and is not replaced; {}", wanted,
                                facts)};
  }
  // The most precise of those that fit: a lower one is for the user to choose.
  for (auto r = offered.rbegin(); r != offered.rend(); ++r) {
    if (Has(paths, *r)) return {*r, "the most precise in both sets; " + facts};
  }
  return {"none", "no recipe is in both sets; " + facts};
}

}  // namespace tare::workflow
