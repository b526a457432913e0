#pragma once

// What a checkpoint says about its model: `config.json` and `generation_config.json` of a Hugging
// Face directory, or the metadata of a GGUF file, as one struct. A key that is present is checked
// for type and range; a key that is absent leaves its field empty, and `Require` names all that are
// missing. Keys that no field reads stay in `raw`: whoever knows more about an architecture reads
// them there. Nothing here decides whether an architecture is supported.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "tensor/dtype.h"

namespace tare {

struct ModelConfig {
  std::string model_type;                  // "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", ...
  std::vector<std::string> architectures;  // "LlamaForCausalLM"
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_layers = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;  // num_heads when absent
  int64_t head_dim = 0;      // hidden_size / num_heads when absent
  int64_t max_positions = 0;
  double rms_norm_eps = 0;
  double rope_theta = 10000.0;  // the field's default when absent
  std::string rope_type;  // "default" unless the file scales positions ("llama3", "yarn", ...)
  std::string hidden_act = "silu";
  bool tie_word_embeddings = false;
  bool attention_bias = false;  // q, k, v (qwen2: always)
  bool mlp_bias = false;
  bool qk_norm = false;                   // qwen3 kinds
  std::optional<int64_t> sliding_window;  // empty when absent, null or switched off
  std::optional<DType> dtype;             // `torch_dtype` or `dtype`
  std::optional<int64_t> bos_token_id;
  std::vector<int64_t> eos_token_ids;  // generation_config.json wins over config.json
  // Mixture of experts; 0 experts is none.
  int64_t num_experts = 0;
  int64_t num_experts_per_token = 0;
  int64_t moe_intermediate_size = 0;
  bool norm_topk_prob = false;

  Json raw = Json::object();         // config.json as it stands (made from the metadata for GGUF)
  Json generation = Json::object();  // generation_config.json, empty when absent

  // ok, or kInvalidArgument that lists every dense field above (vocab_size to rms_norm_eps) that is
  // missing.
  Status Require() const;
};

// kDataLoss for malformed JSON, a wrong type or a value out of range; the message names the key.
// `generation_json` may be empty.
Result<ModelConfig> ParseModelConfig(std::string_view config_json,
                                     std::string_view generation_json);

}  // namespace tare
