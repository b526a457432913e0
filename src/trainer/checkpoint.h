#pragma once

// What a trainer writes: the weights for an engine (a Hugging Face directory), and its own state to
// go on from (docs/formats/trainer_checkpoint.md). Both appear by one rename: a reader sees the
// whole directory or none. Continuing from a checkpoint gives the bits of the uninterrupted run.

#include <cstdint>
#include <string>

#include "base/env.h"
#include "base/status.h"
#include "trainer/trainer.h"

namespace tare::trainer {

// Where the data stood, for whoever feeds the trainer.
struct Progress {
  int64_t data_position = 0;  // sequences or questions consumed
  uint64_t seed = 0;          // of Philox; counters follow from data_position
};

// model.safetensors from the deployed weights, and the text files of `source` (the Hugging Face
// directory that the model came from) beside it. kAlreadyExists when `dir` is there. `previous`,
// when not empty, is a directory of an earlier call that nobody reads any more: it is given up, and
// its file is written over, which saves most of the time (base/overwrite.h; the real file system
// only).
Status PublishWeights(Env* env, const Trainer& trainer, const std::string& source,
                      const std::string& dir, const std::string& previous = "");

// state.safetensors (master/NAME, m/NAME, v/NAME; f32) and trainer.json (step, progress, optimizer,
// digests). kAlreadyExists when `dir` is there.
Status SaveState(Env* env, Trainer* trainer, const Progress& progress, const std::string& dir);

// Restores into `trainer`, whose model must have the same parameters. kNotFound, kDataLoss (a file
// cut or changed: which, expected and found digest), kInvalidArgument (another model, other
// optimizer settings). All of these leave the trainer as before; masters that do not give the
// recorded deployed weights are kDataLoss after the restore.
Result<Progress> LoadState(Env* env, const std::string& dir, Trainer* trainer);

}  // namespace tare::trainer
