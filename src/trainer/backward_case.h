#pragma once

// A failed backward, kept so that it can be run again alone (CHEAP-15). A forward replay shows
// nothing of a fault that only acts behind it; what shows it is the gradient, from the same
// checkpoint, batch, random numbers and optimizer state. A case is a directory of these four:
//
//   weights/     the deployed weights, a Hugging Face directory
//   state/       masters, both moments, step, data position and Philox seed (trainer/checkpoint.h)
//   case.json    the batch (tokens, prompt, mask), the planted faults that were on, and what failed
//
// It is judged against float64 (trainer/plain_model.h) with the tolerances of trainer/audit.h,
// under cross-entropy: the policy losses have their own audit, and differ in what arrives, not in
// what is walked.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/json.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "trainer/checkpoint.h"
#include "trainer/trainer.h"

namespace tare::trainer {

// What one backward of a batch showed.
struct BackwardFinding {
  bool forward_equal = false;  // the path that records and the one that does not give equal bits
  bool within = false;         // every parameter's gradient lies inside its tolerance
  std::string parameter;       // the one furthest outside; of all when within
  double error = 0;            // |g - G| / |G|, 2-norms
  double tolerance = 0;
  std::vector<std::string> outside;  // every parameter outside its tolerance, in the model's order
  int64_t tokens = 0;                // rows of the batch
  // SHA-256 over all gradients' words: a repeat gives the same.
  std::string gradient_sha256;
  Json ToJson() const;
};

// Accumulates the batch and holds the gradient of every parameter against float64. The trainer's
// gradients are left as they came; nothing is applied.
Result<BackwardFinding> TryBackward(ThreadPool* pool, Trainer* trainer,
                                    const std::vector<Sequence>& batch);

// kAlreadyExists when `dir` is there; kInvalidArgument for a batch that is no cross-entropy batch.
// `source`: the Hugging Face directory that the model came from.
Status SaveBackwardCase(Env* env, Trainer* trainer, const std::string& source,
                        const std::vector<Sequence>& batch, const Progress& progress,
                        const BackwardFinding& finding, const std::string& dir);

struct BackwardCase {
  std::vector<Sequence> batch;
  std::string faults;  // as for --fault
  Progress progress;
  BackwardFinding found;  // when it was kept
};
// Reads a case and brings `trainer`, made from its weights/, to the kept state. kNotFound,
// kDataLoss.
Result<BackwardCase> OpenBackwardCase(Env* env, const std::string& dir, Trainer* trainer);
// case.json alone: what a command needs before it can make the trainer.
Result<BackwardCase> ReadBackwardCase(Env* env, const std::string& dir);

// The smallest batch, by dropping sequences and then tokens, in which the gradient of `parameter`
// (empty: the one furthest outside in the whole batch) still lies outside its tolerance; another
// that fails instead does not count. kPrecondition when that gradient lies inside to begin with.
struct Shrunk {
  std::vector<Sequence> batch;
  BackwardFinding finding;
  std::string parameter;
  int tries = 0;
};
Result<Shrunk> ShrinkBackwardCase(ThreadPool* pool, Trainer* trainer,
                                  const std::vector<Sequence>& batch, std::string parameter = {},
                                  int max_tries = 200);
// The same over any way to try a batch.
using BackwardTry = std::function<Result<BackwardFinding>(const std::vector<Sequence>&)>;
Result<Shrunk> ShrinkBatch(const BackwardTry& attempt, const std::vector<Sequence>& batch,
                           std::string parameter, int max_tries);

}  // namespace tare::trainer
