#pragma once

// Opens whatever `tare diff` is given and compares like with like.

#include <memory>
#include <string>
#include <variant>

#include "base/env.h"
#include "base/status.h"
#include "compare/logprob_diff.h"
#include "compare/shards.h"
#include "compare/tensor_diff.h"
#include "tensor/dump.h"

namespace tare::compare {

enum class InputKind { kTensors, kLogprobs, kDump };
std::string_view InputKindName(InputKind kind);  // "tensors", "logprobs", "dump"

struct Input {
  InputKind kind = InputKind::kTensors;
  std::unique_ptr<TensorSource> tensors;
  LogprobSet logprobs;
  std::unique_ptr<Dump> dump;
  RankReport ranks;            // not empty: the dump was put together from these
  std::shared_ptr<void> keep;  // what `dump` lies in, when it is temporary
};

// A dump is a directory with manifest.json or records.jsonl; a directory of dumps (`*.dump`) holds
// those of the ranks of one run, which are put together (compare/shards.h); a Hugging Face
// directory has config.json or safetensors; files go by their suffix (.safetensors, .gguf, .jsonl).
// A safetensors file in the rollout layout holds logprobs. kInvalidArgument names what is read when
// `path` is none of these.
Result<Input> OpenInput(Env* env, const std::string& path);

// kInvalidArgument when the two inputs are of different kinds.
Result<Report> DiffInputs(const Input& a, const Input& b, const DiffOptions& options);

}  // namespace tare::compare
