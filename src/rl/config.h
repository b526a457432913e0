#pragma once

// What one run of the loop is asked to do. Names are those of the field (verl's, where it has one).

#include <cstdint>
#include <string>

#include "base/json.h"
#include "base/status.h"

namespace tare::rl {

struct LoopConfig {
  std::string model;  // a Hugging Face directory
  std::string task = "pattern";
  int64_t prompt_tokens = 40;  // of `pattern`
  int64_t steps = 2;           // updates
  int64_t prompts = 4;         // questions a step
  int64_t group = 4;           // samples a question (GRPO's group)
  int64_t max_tokens = 16;
  double temperature = 1.0;
  double top_p = 1.0;  // of sampling; logprobs stay those over the whole vocabulary

  // Learning rate: docs/formats/receipt.md names the schedules.
  double lr = 1e-3;
  std::string lr_schedule = "constant";  // constant, linear, cosine
  int64_t warmup_steps = 0;
  double min_lr_ratio = 0.0;

  // The policy loss. ApplyLoss sets these as the named algorithm has them.
  std::string loss = "grpo";                           // grpo, dapo, ppo-clip
  std::string loss_agg_mode = "seq-mean-token-mean";   // or token-mean
  double clip_ratio_low = 0.2, clip_ratio_high = 0.2;  // ratio clip
  double clip_ratio_c = 0.0;                           // dual clip, above 1; 0: off
  bool norm_adv_by_std = true;                         // divide by the group's spread
  bool filter_groups = false;       // ask again until `prompts` groups have differing rewards
  int64_t max_num_gen_batches = 8;  // of filter_groups: then take what there is

  uint64_t seed = 1;
  std::string profile = "ieee-f32";
  std::string arm = "production";  // of the trainer: production, surrogate, native
  int threads = 0;
  bool recompute = false;
  int64_t micro_batch_tokens = 512;
  bool prefix_caching = true;  // of the engine; part of the recipe
  bool same_questions = true;  // every step asks the same ones, so that a stale prefix cache is met

  // Held-out questions, asked before the first and after every `eval_every`-th and the last update.
  int64_t held_out = 0;          // questions; 0: none are asked
  int64_t held_out_samples = 4;  // of each
  int64_t eval_every = 0;        // 0: before the first and after the last alone

  bool keep_weights = true;    // else a published directory is removed once the next one serves
  std::string faults;          // planted, name@side,...; handed to both processes
  int64_t stop_at_event = -1;  // the worker stops itself there: for tests that kill a process
  bool probe = false;          // one request more at theta0, both sides dumped, for `tare locate`

  Json ToJson() const;  // without `probe`
  // kInvalidArgument for an unknown key or a wrong type.
  static Result<LoopConfig> FromJson(const Json& json);
};

// Sets what belongs to an algorithm. kInvalidArgument for another name.
//   grpo      mean over a sequence, then over sequences; clip 0.2
//   dapo      mean over all tokens; clip 0.2 below and 0.28 above; groups without signal asked
//   again ppo-clip  mean over all tokens; clip 0.2; dual clip 3
Status ApplyLoss(const std::string& loss, LoopConfig* config);

// kInvalidArgument names the field.
Status CheckConfig(const LoopConfig& config);

// The fields that must agree between a two-step receipt and the longer run that it admits (C8-10):
// all but length, seed, held-out questions and where files are kept.
Json Recipe(const LoopConfig& config);

}  // namespace tare::rl
