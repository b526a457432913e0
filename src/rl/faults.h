#pragma once

// Planted faults of the loop: the false passes that people have met, each at the one place where it
// would sit. All act on the trainer's side.

#include "base/fault.h"

namespace tare::rl {

TARE_FAULT(kEmptyMask, "rl.empty_mask", "rl.mask", "C5", "the loss mask excludes every token");
TARE_FAULT(kWrongMask, "rl.shifted_mask", "rl.mask", "C5",
           "the trainer's mask is shifted by one token");
TARE_FAULT(kBypass, "rl.bypass_score", "rl.score", "C5",
           "the rollout's own logprobs are handed back as the trainer's, without a forward");
TARE_FAULT(kSkipRecorded, "rl.skip_grad_path", "rl.train", "C5",
           "the grad-enabled forward is not compared");
TARE_FAULT(kDecimal, "rl.decimal_logprobs", "rl.score", "C5",
           "logprobs pass through text with four decimals");
TARE_FAULT(kDefaultFill, "rl.default_fill", "rl.compare", "C5",
           "missing logprobs are 0.0 on both sides");
TARE_FAULT(kRetokenise, "rl.retokenise", "rl.history", "C5",
           "the trainer's tokens are not those that were sampled: a prompt token is another one");
TARE_FAULT(kZeroLr, "rl.zero_learning_rate", "rl.update", "C8",
           "the learning rate is 0, as in a warm-up");
TARE_FAULT(kMasterOnly, "rl.master_only", "rl.update", "C8",
           "masters change but no deployed byte does, as when each step is below half a spacing");
TARE_FAULT(kSkipStep, "rl.skip_step", "rl.update", "C8", "the optimizer step is skipped");
TARE_FAULT(kNoPublish, "rl.no_publish", "rl.publish", "C8",
           "new weights are not sent to the engine");
TARE_FAULT(kStaleLabel, "rl.stale_label", "rl.compare", "C8",
           "the trainer labels its logprobs with the version before");
TARE_FAULT(kSameSeed, "rl.same_seed", "rl.rollout", "C8",
           "every sample of a group has the same seed");
TARE_FAULT(kFlatReward, "rl.flat_reward", "rl.reward", "C8", "every sample gets the same reward");
TARE_FAULT(kDieAtExit, "rl.die_at_exit", "rl.exit", "C8",
           "the trainer dies by a signal after its last line");
TARE_FAULT(kDieInUpdate, "rl.die_in_update", "rl.update", "C8",
           "the trainer dies in its first update");
TARE_FAULT(kSkipLast, "rl.skip_last_compare", "rl.compare", "C8",
           "nothing is compared after the last update");

TARE_FAULT(kCutShort, "rl.cut_to_shorter", "rl.compare", "C5",
           "all arrays are cut by one token, as zip does with lists of unequal length");
TARE_FAULT(kLastBit, "rl.last_bit", "rl.score", "C5",
           "logprobs above -0.125 differ in their last bit: their probabilities do not");
TARE_FAULT(kRawLogprobs, "rl.raw_logprobs", "rl.rollout", "C5",
           "the rollout's logprobs are those of temperature 1, labelled as tempered");
TARE_FAULT(kProcessedLogprobs, "rl.processed_logprobs", "rl.rollout", "C5",
           "the rollout's logprobs are normalised over the kept set alone");
TARE_FAULT(kSnapshot, "rl.snapshot_of_theta0", "rl.score", "C8",
           "rollout and trainer both stay on theta0; the labels say theta1");
TARE_FAULT(kStaleTensor, "rl.stale_tensor", "rl.publish", "C8",
           "one tensor of the published weights holds its old bytes");
TARE_FAULT(kHangAtExit, "rl.hang_at_exit", "rl.exit", "C8",
           "the trainer hangs after its last line");

}  // namespace tare::rl
