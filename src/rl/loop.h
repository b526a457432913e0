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

#include "base/json.h"
#include "base/status.h"
#include "numerics/profile.h"

namespace tare::rl {

struct LoopConfig {
  std::string model;  // a Hugging Face directory
  std::string task = "pattern";
  int64_t steps = 2;    // updates
  int64_t prompts = 4;  // questions a step
  int64_t group = 4;    // samples a question (GRPO's group)
  int64_t max_tokens = 16;
  double temperature = 1.0;
  double lr = 1e-3;
  std::string loss = "grpo";               // grpo, dapo, ppo-clip
  double clip_low = 0.2, clip_high = 0.2;  // dapo: 0.2, 0.28
  uint64_t seed = 1;
  std::string profile = "ieee-f32";
  int threads = 0;
  bool recompute = false;
  bool prefix_caching = true;  // of the engine; part of the recipe
  bool same_questions = true;  // every step asks the same ones, so that a stale prefix cache is met
  std::string faults;          // planted, name@side,...; handed to both processes
  bool probe = false;          // one request more at theta0, both sides dumped, for `tare locate`
  Json ToJson() const;
  // kInvalidArgument for an unknown key or a wrong type.
  static Result<LoopConfig> FromJson(const Json& json);
};

// kInvalidArgument names the field.
Status CheckConfig(const LoopConfig& config);

// Runs in the trainer's process. `port` is the engine's on loopback.
Status RunWorker(const LoopConfig& config, uint16_t port, const std::string& out);

// SHA-256 of this executable's bytes, 64 hex digits: both processes must run the same.
Result<std::string> ExecutableDigest();

// The command that computes the trainer's probe again (identity.replay of its dump).
Json ProbeReplay(const LoopConfig& config, bool batch_invariant);

}  // namespace tare::rl
