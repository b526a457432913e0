#pragma once

// MINI: a generated checkpoint, the same bytes on every machine, small enough that a demonstration
// takes seconds, with the kinds that real models have: GQA with q/k norm, sliding windows with sink
// logits, mixture of experts with planted router ties, and a byte-level BPE tokenizer.
// docs/formats/mini.md describes version `mini-1`; a changed byte is a new version.
//
// Values come from Philox through integers alone (18-bit sums times a small integer, a power of
// two, one rounding to bf16), so no floating-point operation of a machine can move one.

#include <string>
#include <utility>
#include <vector>

#include "base/env.h"
#include "models/config.h"
#include "models/model.h"
#include "models/tokenizer.h"

namespace tare::models {

inline constexpr char kMiniVersion[] = "mini-1";

// The text files of the checkpoint.
std::string MiniConfigJson();
std::string MiniGenerationConfigJson();
std::string MiniTokenizerJson();
std::string MiniTokenizerConfigJson();

// bf16, Hugging Face names, sorted.
Result<std::vector<std::pair<std::string, Tensor>>> MiniTensors();
// The tensors that another configuration of the same family would have, by the same rules (tests
// vary one feature at a time). `config.architecture` is TareMiniForCausalLM.
Result<std::vector<std::pair<std::string, Tensor>>> MiniTensorsFor(const ModelConfig& config);

ModelConfig MiniConfig();
Result<Model> MiniModel(ThreadPool* pool, const ModelOptions& options = {});
Result<Tokenizer> MiniTokenizer();

// Writes config.json, generation_config.json, tokenizer.json, tokenizer_config.json and
// model.safetensors into `dir`, which is made if need be. kAlreadyExists when one of them is there
// with other bytes.
Status WriteMini(Env* env, const std::string& dir);

}  // namespace tare::models
