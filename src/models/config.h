#pragma once

// ModelConfig: everything about an architecture that decides which operator follows which, read
// from a Hugging Face config.json. Known: Llama (SmolLM2, Llama 3), Mistral, Qwen2, Qwen3,
// Qwen3-MoE, Mixtral, and our own TareMini (docs/formats/mini.md). A key that could change a value
// and is not understood is refused by name: a model that is nearly right gives other logprobs
// without any sign.

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "ops/gate/gate.h"
#include "ops/rope/rope.h"
#include "tensor/dtype.h"

namespace tare::models {

struct LayerConfig {
  int64_t window =
      0;  // 0: full attention; else key j is visible to query i when i - window < j <= i
  bool sink = false;  // one learned sink logit per query head
  bool moe = false;   // experts instead of one MLP
};

struct ModelConfig {
  std::string architecture;  // "LlamaForCausalLM"
  int64_t vocab = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;  // of a dense MLP
  int64_t q_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t max_positions = 0;
  float norm_eps = 1e-5f;
  bool tied = false;  // the head is the embedding table
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  bool qk_norm = false;  // RMSNorm of each query and key head before rope
  ops::gate::Activation activation = ops::gate::Activation::kSilu;
  ops::rope::Params rope;  // rope.dtype is `dtype`
  std::vector<LayerConfig> layers;

  // Mixture of experts, for layers with `moe`.
  int64_t experts = 0;
  int64_t top_k = 0;
  int64_t expert_intermediate = 0;
  bool renormalise = true;  // router weights divide by the sum of the chosen

  // Arithmetic. Weights and activations have `dtype`; the others are part of the contract.
  DType dtype = DType::kBF16;
  DType residual_dtype = DType::kBF16;  // the residual stream between the layers
  DType logits_dtype = DType::kF32;
  DType grad_dtype = DType::kF32;  // the gradient of the residual stream
  int32_t segments = 1;            // S of attention output and MLP down projections

  std::vector<int32_t> bos, eos;  // from config.json; generation_config.json may say more

  int64_t q_width() const { return q_heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t qkv_width() const { return q_width() + 2 * kv_width(); }
};

// Errors: kInvalidArgument (missing, of the wrong type, out of range: the key and what would be
// right), kUnsupported (an architecture or feature that is not built: its name and value).
Result<ModelConfig> ParseConfig(const Json& config_json);

}  // namespace tare::models
