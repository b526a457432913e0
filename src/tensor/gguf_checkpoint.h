#pragma once

// A GGUF file in Hugging Face's terms: tensor names, row order of q and k, config, vocabulary.
//
// Architectures: llama (Llama, Mistral, SmolLM), qwen2, qwen3, qwen3moe. A file of another
// architecture keeps its own names (`hf` false): it can be compared, not run.

#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "tensor/checkpoint.h"
#include "tensor/gguf.h"

namespace tare {

struct GgufMapped {
  std::string name;
  const GgufEntry* entry = nullptr;
  Shape shape;
  bool hf = false;         // the name is Hugging Face's; else it is the file's
  int64_t rope_heads = 0;  // not 0: rows are stored in interleaved rope order, for so many heads
  int64_t expert = -1;     // not -1: this slice of the stacked experts
};

// Every tensor of the file, one item for each expert of a stacked one. `file` must outlive the
// result.
Result<std::vector<GgufMapped>> MapGgufTensors(const GgufFile& file);

// The f32 values of one, rows in Hugging Face's order.
Result<Tensor> ReadGgufMapped(const GgufFile& file, const GgufMapped& mapped);

// A config.json that says the same as the metadata. Of an architecture that is not known it holds
// only `gguf_architecture`.
Result<Json> GgufConfig(const GgufFile& file);

Result<TokenizerSource> GgufTokenizer(const GgufFile& file);

}  // namespace tare
