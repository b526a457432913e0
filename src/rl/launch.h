#pragma once

// `tare rl` itself: starts `tare serve` (the rollout) and `tare rl-worker` (the trainer) as
// processes on loopback, waits for both, writes `out`/receipt.json and `out`/verdict.json. Whatever
// goes wrong, there is a receipt that says how each process ended.

#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "rl/judge.h"
#include "rl/loop.h"

namespace tare::rl {

struct LaunchOptions {
  std::string executable;  // of `tare`; empty: this process's own
  std::string out;         // a new directory
  double limit_seconds = 3600;
  // Put over the environment of each process; for tests of a switch that reached one only.
  std::vector<std::pair<std::string, std::string>> rollout_environment = {
      {"VLLM_BATCH_INVARIANT", "1"}};
  std::vector<std::pair<std::string, std::string>> trainer_environment = {
      {"VLLM_BATCH_INVARIANT", "1"}};
  // More arguments for `tare serve`.
  std::vector<std::string> serve_arguments;
  // Planted from outside: the rollout process is killed once this many rounds are written (-1:
  // never).
  int64_t kill_rollout_after_rounds = -1;
  bool quiet = false;  // no progress on stderr
};

struct LaunchResult {
  Json receipt;
  Judgement judgement;
  double seconds = 0;
};

// Errors are those of the environment (a directory that exists, a program that does not start);
// everything else is in the judgement.
Result<LaunchResult> RunLoop(const LoopConfig& config, const LaunchOptions& options);

}  // namespace tare::rl
