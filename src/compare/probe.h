#pragma once

// Finds the first operator that differs when a whole dump is too large to keep: bisects over the
// layers with runs that each record one layer's output, then records the operators of the one layer
// whose input is equal and whose output differs. At most ceil(log2(layers + 1)) + 1 runs of both
// sides' recorded commands, whatever the number of operators.
//
// Sound for any number of faults: it ends at a layer whose input was seen equal and whose output
// was seen to differ. Where several such layers exist it finds one of them.

#include <functional>
#include <string>
#include <vector>

#include "compare/bundle.h"
#include "compare/locate.h"
#include "compare/shrink.h"

namespace tare::compare {

// Runs both sides over the bundle's inputs, recording only tensors whose names match one of the
// shell patterns.
using ProbeRun = std::function<Result<Replayed>(const std::vector<std::string>& names)>;

struct ProbeStep {
  std::string name;  // "layers.3.out"
  bool differs = false;
  int64_t mismatches = 0, compared = 0;
};

struct ProbeReport {
  Verdict verdict = Verdict::kInconclusive;
  std::string_view reason;
  std::string why;
  int64_t layers = 0;
  std::vector<ProbeStep> steps;
  int runs = 0;
  Replayed last;         // of the last run
  LocateReport located;  // what it showed: its verdict is the report's
};

// REQUIRES: layers >= 1. fail with first-divergence, or a candidate, as Locate says of the last
// run; inconclusive with no-difference when nothing of it differs.
Result<ProbeReport> Probe(const Bundle& bundle, int64_t layers, ThreadPool* pool,
                          const ProbeRun& run);

std::string ProbeTable(const ProbeReport& report);
Json ProbeJson(const ProbeReport& report);

}  // namespace tare::compare
