#pragma once

// What the JSON files beside a checkpoint's weights say, as far as files themselves need it: ties,
// end tokens, dtype. The rest stays in `raw`: what an architecture means is for `models` to read,
// which refuses what it does not understand.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "tensor/dtype.h"

namespace tare {

struct CheckpointConfig {
  std::string model_type;                  // "llama", "qwen3", ...; empty when absent
  std::vector<std::string> architectures;  // "LlamaForCausalLM"
  bool tie_word_embeddings = false;        // false when absent
  std::optional<DType> dtype;          // `dtype` or `torch_dtype`; empty when absent or not ours
  std::vector<int64_t> eos_token_ids;  // generation_config.json wins over config.json

  Json raw = Json::object();         // config.json as it stands (made from the metadata for GGUF)
  Json generation = Json::object();  // generation_config.json, empty when absent
};

// kDataLoss for malformed JSON or a key above of the wrong type; the message names file and key.
// `generation_json` may be empty: there is no such file.
Result<CheckpointConfig> ParseCheckpointConfig(std::string_view config_json,
                                               std::string_view generation_json);

}  // namespace tare
