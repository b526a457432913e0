// GEN-11: hardware descriptors times kernel paths; the choice is in both sets or "none".

#include "workflow/precision.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace tare::workflow {
namespace {

TEST(Precision, TheChoiceIsAlwaysInBothSetsOrNone) {
  const std::vector<std::string> all = {"nvfp4", "mxfp8", "fp8-block", "int8", "unheard-of"};
  for (const std::string hardware : {"sm80", "sm90", "sm100", "cpu", "sm777", ""}) {
    const auto offered = PrecisionsOf(hardware);
    for (unsigned mask = 0; mask < 32; ++mask) {
      std::vector<std::string> paths;
      bool any = false;
      for (unsigned i = 0; i < 5; ++i) {
        if (mask >> i & 1) {
          paths.push_back(all[i]);
          any = any || std::find(offered.begin(), offered.end(), all[i]) != offered.end();
        }
      }
      for (const std::string wanted : {"", "fp8-block", "unheard-of"}) {
        const PrecisionChoice c = ChooseLowPrecision(hardware, paths, wanted);
        EXPECT_FALSE(c.rationale.empty());
        if (wanted.empty()) {
          EXPECT_EQ(c.recipe != "none", any);
        }
        if (c.recipe == "none") continue;
        EXPECT_NE(std::find(offered.begin(), offered.end(), c.recipe), offered.end());
        EXPECT_NE(std::find(paths.begin(), paths.end(), c.recipe), paths.end());
        if (!wanted.empty()) {
          EXPECT_EQ(c.recipe, wanted);
        }
      }
    }
  }
}

}  // namespace
}  // namespace tare::workflow
