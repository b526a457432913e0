#pragma once

// The worker of `tare rl`: the trainer's process, which drives the loop against a running engine.
//
//   compare theta0; update; publish; compare theta1; update; publish; compare theta2; ...
//
// What it saw goes to `out`/rounds.json and the logprobs of all three paths to
// `out`/thetaK.{rollout,score,train}.jsonl (docs/formats/receipt.md). It judges nothing: rl/judge.h
// does, from the files alone.

#include <cstdint>
#include <string>

#include "base/status.h"
#include "rl/config.h"

namespace tare::rl {

// Runs in the trainer's process. `port` is the engine's on loopback.
Status RunWorker(const LoopConfig& config, uint16_t port, const std::string& out);

// SHA-256 of this executable's bytes, 64 hex digits: both processes must run the same.
Result<std::string> ExecutableDigest();

// The command that computes the trainer's probe again (identity.replay of its dump).
Json ProbeReplay(const LoopConfig& config, bool batch_invariant);

}  // namespace tare::rl
