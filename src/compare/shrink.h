#pragma once

// Shrinks what a bundle replays on: first the other sequences of the batch, then tokens before the
// row, as long as the same operator is still the first to differ. What is computed, this file does
// not know: `Replay` runs both sides' recorded commands and gives their dumps.
//
// The result is minimal in this sense: without any one of the remaining other sequences, or without
// the first remaining token, the site no longer differs. That says nothing about inputs that no
// single removal leads to.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "compare/bundle.h"
#include "compare/locate.h"
#include "compare/replay_input.h"

namespace tare::compare {

// Dumps of both sides over these inputs. `keep` holds whatever must outlive them (a directory).
struct Replayed {
  std::unique_ptr<Dump> a, b;
  std::shared_ptr<void> keep;
};
using Replay = std::function<Result<Replayed>(const ReplayBatch& a, const ReplayBatch& b)>;

struct ShrinkOptions {
  int max_runs = 200;          // of both sides' commands together as one
  ThreadPool* pool = nullptr;  // REQUIRES: not null
};

struct ShrinkStep {
  std::string what;  // "without 3 of 4 other sequences", "without the first 8 tokens"
  bool kept = false;
};

struct ShrinkReport {
  Verdict verdict = Verdict::kInconclusive;
  std::string_view reason;
  std::string why;
  std::vector<ShrinkStep> steps;
  int runs = 0;
  bool minimal = false;                               // false: `max_runs` ended the search
  int64_t sequences_before = 0, sequences_after = 0;  // both sides together
  int64_t tokens_before = 0, tokens_after = 0;        // both sides together
  ReplayBatch a, b;
  Replayed last;         // over a and b; null unless the verdict is pass
  LocateReport located;  // of `last`
};

// pass when the smallest input found still shows the site; fail with replay-differs when even the
// whole input does not; inconclusive with missing-capture when a side has no command or no input.
Result<ShrinkReport> Shrink(Env* env, const Bundle& bundle, const ShrinkOptions& options,
                            const Replay& replay);

std::string ShrinkTable(const ShrinkReport& report);
Json ShrinkJson(const ShrinkReport& report);

}  // namespace tare::compare
