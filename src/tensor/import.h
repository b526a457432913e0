#pragma once

// Import: any checkpoint into a Hugging Face directory that stands alone (weights as safetensors,
// config.json, tokenizer), with a record of what was converted how (docs/formats/import.md).

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/json.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "tensor/checkpoint.h"
#include "tensor/weight_hash.h"

namespace tare {

struct ImportOptions {
  Env* env = Env::Real();
  ThreadPool* pool = nullptr;  // may be null
  // Every float tensor becomes this dtype (rounded once, to nearest even). Empty: as the checkpoint
  // gives it.
  std::optional<DType> dtype;
  // A new shard starts before it would grow past this many bytes of data; one tensor is never cut.
  int64_t max_shard_bytes = int64_t{5} << 30;
};

struct ImportReport {
  WeightHash hash;                 // of the directory as read back
  std::vector<std::string> files;  // written, relative to it
  std::vector<std::string> notes;  // what was left out and why, for people
};

// Writes `dst`, which must not exist: everything goes into `dst`.importing, is read back and
// hashed, and is renamed when it is right. After a crash `dst` is absent; the leftover is refused
// by name at the next try. kUnsupported: tensors without a Hugging Face name, by name.
Result<ImportReport> ImportCheckpoint(const Checkpoint& source, const std::string& dst,
                                      const ImportOptions& options = {});

// tokenizer.json for a byte-level BPE vocabulary out of a GGUF file. kUnsupported for other
// tokenizer models and split rules, by name.
Result<Json> TokenizerJsonFromGguf(const TokenizerSource& source);

}  // namespace tare
