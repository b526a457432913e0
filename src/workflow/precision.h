#pragma once

// Which low-precision recipe a task may use (GEN-11): only one that the hardware executes and for
// which a kernel path exists here; no default. An empty intersection is an answer: "none".

#include <string>
#include <vector>

namespace tare::workflow {

struct PrecisionChoice {
  std::string recipe;     // "nvfp4", "mxfp8", "fp8-block", "int8", or "none"
  std::string rationale;  // what hardware and paths offer and why this one
};

// `hardware`: "sm90", "sm100", "cpu", ... (unknown ones execute nothing). `paths`: recipes with a
// kernel path for this model, in any order. `wanted`: the user's choice, empty when there is none;
// one that does not fit gives "none" with the reason and is never replaced by another.
PrecisionChoice ChooseLowPrecision(const std::string& hardware,
                                   const std::vector<std::string>& paths,
                                   const std::string& wanted = "");
// Recipes that the hardware executes natively, least to most precise.
std::vector<std::string> PrecisionsOf(const std::string& hardware);

}  // namespace tare::workflow
