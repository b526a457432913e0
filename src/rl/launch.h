#pragma once

// `tare rl` itself: starts `tare serve` (the rollout) and `tare rl-worker` (the trainer) as
// processes on loopback, waits for both, writes `out`/receipt.json and `out`/verdict.json. Whatever
// goes wrong, there is a receipt that says how each process ended.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "rl/judge.h"
#include "rl/loop.h"

namespace tare::rl {

struct Progress {
  std::string what;  // "compare theta1"; "start", "stop"
  int64_t done = 0, all = 1;
  double seconds = 0;
  double left = -1;
};

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
  // Planted from outside: a process is killed at the beginning of the trainer's phase of this index
  // (-1: never). The worker stops itself there.
  int64_t kill_rollout_at_event = -1;
  int64_t kill_trainer_at_event = -1;
  double stop_seconds = 60;  // for each process to end by itself once it is asked to
  // A receipt of two steps that passes, with the same recipe: more than two steps are refused
  // without one (C8-10).
  std::string after;
  // Called with every phase that begins: "update theta1", phases done and all, seconds so far and a
  // guess of those left (negative: none yet). Null: nothing is shown.
  std::function<void(const Progress&)> progress;
};

struct LaunchResult {
  Json receipt;
  Judgement judgement;
  double seconds = 0;
};

// Errors are those of the environment (a directory that exists, a program that does not start) and
// a configuration that CheckConfig refuses; everything else is in the judgement. C8-10: ok when
// `config` has at most two steps, or options.after passes for its recipe; kPrecondition says what
// is missing.
Status CheckTwoStepsFirst(const LoopConfig& config, const LaunchOptions& options);

Result<LaunchResult> RunLoop(const LoopConfig& config, const LaunchOptions& options);

}  // namespace tare::rl
