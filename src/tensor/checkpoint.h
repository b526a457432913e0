#pragma once

// Checkpoint: the named tensors of a model and what its files say about it, whatever the format.
//
//   a Hugging Face directory  config.json, generation_config.json, model.safetensors or
//                             model.safetensors.index.json with its shards
//   a .safetensors file       tensors alone; the config is empty
//   a .gguf file              names, row order of q and k, and config translated to Hugging Face's;
//                             quantised blocks dequantised on demand
//
// Tensors of safetensors are views of the mapped file. A checkpoint never changes while it is open,
// as long as nobody overwrites its files in place.

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "tensor/checkpoint_config.h"
#include "tensor/tensor.h"

namespace tare {

struct CheckpointOptions {
  Env* env = Env::Real();
  // What every tensor of a GGUF file becomes: kBF16 (rounded to nearest even from the f32 value) or
  // kF32 (the exact dequantised value).
  DType gguf_dtype = DType::kBF16;
};

// What a tokenizer can be built from. Either a file, or the vocabulary inside a GGUF file.
struct TokenizerSource {
  std::string tokenizer_json_path;         // empty when there is none
  std::string tokenizer_config_json_path;  // empty when there is none
  // From GGUF metadata (`tokenizer.ggml.*`, `tokenizer.chat_template`).
  std::string gguf_model;  // "gpt2" (byte-level BPE), "llama" (SentencePiece), ...; empty: no GGUF
  std::string gguf_pre;    // split rule: "smollm", "llama-bpe", "qwen2", ...
  std::vector<std::string> tokens;   // by id
  std::vector<int32_t> token_types;  // 1 normal, 3 control, 4 user-defined, ...; by id
  std::vector<std::string> merges;   // "left right", by rank
  std::string chat_template;
  std::optional<int32_t> bos, eos;
  bool add_bos = false;
};

class Checkpoint {
 public:
  enum class Format { kHuggingFace, kSafetensors, kGguf };
  struct Info {
    std::string name;
    DType dtype = DType::kF32;
    Shape shape;
    std::string stored_as;  // dtype or block type in the file: "BF16", "Q4_1"
    std::string file;       // path of the file that holds it
  };

  // kNotFound, kDataLoss for malformed files (an index that names an absent shard or tensor, a
  // tensor that the index forgets, ...), kUnsupported for a dtype or block type that is not read,
  // by name.
  static Result<Checkpoint> Open(const std::string& path, const CheckpointOptions& options = {});

  Format format() const;
  const std::string& path() const;
  // Empty for a bare safetensors file.
  const CheckpointConfig& config() const;
  const TokenizerSource& tokenizer() const;

  // Of the tensors that the files hold, sorted by bytes.
  const std::vector<std::string>& names() const;
  // nullptr when there is none.
  const Info* Find(std::string_view name) const;
  // kNotFound names the checkpoint. `lm_head.weight` of a checkpoint with tied embeddings that does
  // not store it is `model.embed_tokens.weight`. Thread-safe.
  Result<Tensor> Get(std::string_view name) const;

  // The canonical tensors: `names()`, without an `lm_head.weight` that the config ties and whose
  // bytes equal the embedding's. Tied, stored and different is kDataLoss: which one is meant is
  // unknown.
  Result<std::vector<std::string>> CanonicalNames() const;

 private:
  struct State;
  explicit Checkpoint(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

// "hugging-face", "safetensors", "gguf".
std::string_view CheckpointFormatName(Checkpoint::Format format);

}  // namespace tare
