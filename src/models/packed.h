#pragma once

// The copies of the weights that the CPU kernels really read: made at load, and compared with the
// parameters by whoever must vouch for what a forward computes from.

#include "base/sha256.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "models/model.h"

namespace tare::models {

// Makes the codes of the sm90-mma step for every packed weight now, so that no request waits for
// them. They lie beside the ieee-f32 panels.
void MakeCodes(ThreadPool* pool, const Model& model);

// Packs every parameter again and compares each word with the copy that the model holds: the
// panels, the f32 sinks, and with `codes` the codes of the sm90-mma step. kDataLoss names the
// parameter, the expert and the first element that differs.
Status VerifyPacked(ThreadPool* pool, const Model& model, bool codes);

// VerifyPacked and the canonical weight hash over the parameters, in one walk: what a model really
// holds. Of a model on another device the hash alone.
Result<Sha256Digest> HashHeld(ThreadPool* pool, const Model& model, bool codes);

}  // namespace tare::models
