#include "workflow/config_schema.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace tare::workflow {
namespace {

using enum ValueType;
using enum ConfigClass;

constexpr KeySpec kKeys[] = {
    {"task.name", kString, kCosmetic, "", "", "What people call this task.",
     "\"align small model\"", ""},
    {"task.scope", kString, kContract, "", "full|inference-only",
     "`inference-only` leaves C5 to C8 out and the report says that the training loop is not "
     "accepted.",
     "\"full\"", ""},

    {"model.name", kString, kContract, "", "", "Published name of the model.",
     "\"SmolLM2-135M-Instruct\"", "_name_or_path|model_name"},
    {"model.architecture", kString, kContract, "C0", "",
     "Architecture class, as config.json names it.", "\"LlamaForCausalLM\"", "architectures"},
    {"model.hidden_size", kInt, kContract, "C0", "", "Width of the residual stream.", "576",
     "hidden_size"},
    {"model.num_layers", kInt, kContract, "C0", "", "Number of layers.", "30",
     "num_hidden_layers|num_layers"},
    {"model.num_attention_heads", kInt, kContract, "C0", "", "Query heads.", "9",
     "num_attention_heads"},
    {"model.num_key_value_heads", kInt, kContract, "C0", "", "Key and value heads.", "3",
     "num_key_value_heads|num_query_groups"},
    {"model.head_dim", kInt, kContract, "", "", "Width of one head.", "64", "head_dim"},
    {"model.intermediate_size", kInt, kContract, "", "", "Width of the MLP.", "1536",
     "intermediate_size|ffn_hidden_size"},
    {"model.vocab_size", kInt, kContract, "C0", "", "Rows of the embedding.", "49152",
     "vocab_size"},
    {"model.rope_theta", kFloat, kContract, "", "", "Base of the rotary position embedding.",
     "100000.0", "rope_theta|rotary_base"},
    {"model.rms_norm_eps", kFloat, kContract, "", "", "Epsilon of the norms.", "1e-05",
     "rms_norm_eps|norm_epsilon"},
    {"model.tie_embeddings", kBool, kContract, "", "", "Whether the head shares the embedding.",
     "true", "tie_word_embeddings"},
    {"model.sliding_window", kInt, kContract, "", "",
     "Attention window in tokens, where there is one.", "4096", "sliding_window"},
    {"model.num_experts", kInt, kContract, "", "", "Experts per MoE layer, where there are any.",
     "128", "num_experts|num_local_experts|n_routed_experts"},
    {"model.num_experts_per_token", kInt, kContract, "", "", "Experts that a token is sent to.",
     "8", "num_experts_per_tok|moe_router_topk"},

    {"weights.path", kString, kCosmetic, "", "", "Where the checkpoint lies: a folder or a file.",
     "\"models/smollm2\"", ""},
    {"weights.sha256", kString, kContract, "", "", "Canonical weight hash (`tare model hash`).",
     "\"<64 hex>\"", ""},
    {"weights.dtype", kString, kContract, "C0", "", "Dtype of the stored weights.", "\"bf16\"",
     "torch_dtype|dtype"},
    {"weights.format", kString, kContract, "", "", "Container of the stored weights.",
     "\"safetensors\"", ""},
    {"weights.quantization", kString, kContract, "", "",
     "Quantisation method of the stored weights.", "\"none\"", "quant_method"},

    {"inference.implementation", kString, kContract, "C0", "", "Which engine serves the rollouts.",
     "\"tare\"", "inference_implementation|rollout_engine"},
    {"inference.version", kString, kNumeric, "", "", "Its version or commit.", "\"0.1.0\"", ""},
    {"inference.attention_backend", kString, kNumeric, "", "", "Attention kernel family.",
     "\"tare\"", "attention_backend"},
    {"inference.block_size", kInt, kNumeric, "", "", "Tokens per KV cache block.", "16",
     "block_size"},
    {"inference.max_num_batched_tokens", kInt, kNumeric, "", "", "Token budget of one engine step.",
     "2048", "max_num_batched_tokens"},
    {"inference.max_model_len", kInt, kNumeric, "", "", "Longest sequence.", "8192",
     "max_model_len|max_position_embeddings"},
    {"inference.prefix_cache", kBool, kNumeric, "", "",
     "Whether full blocks are shared between requests.", "true", "enable_prefix_caching"},
    {"inference.graph", kString, kNumeric, "", "",
     "Graph mode: `none` or the engine's word for it.", "\"none\"", "cudagraph_mode"},
    {"inference.batch_invariant", kBool, kNumeric, "", "",
     "The arm: batch-invariant path on or off.", "true", "batch_invariant"},

    {"training.route", kString, kContract, "C0", "tare|mlite|fsdp2|megatron-bridge|none",
     "Which trainer updates the weights.", "\"mlite\"", ""},
    {"training.framework", kString, kContract, "", "", "RL framework that drives it.", "\"tare\"",
     ""},
    {"training.optimizer", kString, kUpdate, "C8", "", "Optimizer.", "\"adamw\"", "optimizer"},
    {"training.learning_rate", kFloat, kUpdate, "C8", "", "Learning rate.", "1e-06",
     "lr|learning_rate"},
    {"training.loss", kString, kUpdate, "", "", "Policy loss.", "\"grpo\"",
     "policy_loss|loss_type"},
    {"training.clip", kFloat, kUpdate, "", "", "Clip ratio of the policy loss.", "0.2",
     "clip_ratio|clip_eps"},
    {"training.recompute", kString, kNumeric, "", "",
     "Activation recompute: `none`, `full` or a list's name.", "\"none\"",
     "recompute|recompute_granularity"},

    {"target.consistency", kString, kContract, "C0", "bitwise|tolerance",
     "What the two sides must reach; a tolerance is fixed before results are known.", "\"bitwise\"",
     ""},
    {"target.max_slowdown_percent", kFloat, kContract, "", "",
     "How much slower the consistent arm may be than the confirmed baseline.", "10.0", ""},

    {"hardware.device", kString, kHardware, "C1", "", "Device that the task is about.", "\"cpu\"",
     "device|device_name"},
    {"hardware.count", kInt, kHardware, "C1", "", "Number of devices.", "1",
     "num_gpus|n_gpus_per_node|world_size"},
    {"hardware.nodes", kInt, kHardware, "", "", "Number of nodes.", "1", "nnodes|num_nodes"},
    {"image.digest", kString, kNumeric, "", "", "Digest of the image that both sides run from.",
     "\"sha256:<64 hex>\"", "image_digest"},

    {"workload.dataset", kString, kWorkload, "", "", "Prompts, by name or file.", "\"addition\"",
     "dataset"},
    {"workload.input_tokens", kInt, kWorkload, "C1", "", "Prompt length of the benchmark.", "8192",
     "random_input_len|max_prompt_length"},
    {"workload.output_tokens", kInt, kWorkload, "C1", "", "Response length of the benchmark.",
     "1024", "random_output_len|max_response_length"},
    {"workload.concurrency", kIntList, kWorkload, "C1", "", "Closed-loop concurrency levels.",
     "[1, 2, 4, 8, 16, 32, 64]", "concurrency"},
    {"workload.batch_size", kInt, kWorkload, "", "", "Prompts per training step.", "64",
     "train_batch_size|global_batch_size"},
    {"workload.seed", kInt, kWorkload, "", "", "Seed of data order and sampling.", "1", "seed"},

    {"precision.weights", kString, kContract, "", "", "Dtype in which weights enter the products.",
     "\"bf16\"", ""},
    {"precision.activations", kString, kContract, "C0", "", "Dtype of activations.", "\"bf16\"",
     "torch_dtype|dtype"},
    {"precision.kv_cache", kString, kContract, "C0", "", "Dtype of keys and values in the cache.",
     "\"bf16\"", "kv_cache_dtype"},
    {"precision.gradients", kString, kContract, "", "", "Dtype in which gradients are accumulated.",
     "\"f32\"", "grad_dtype|reduce_dtype"},
    {"precision.master_weights", kString, kContract, "", "", "Dtype of the trainable copy.",
     "\"f32\"", "master_dtype"},

    {"parallelism.tp", kInt, kContract, "C1", "", "Tensor parallel size.", "1",
     "tensor_parallel_size|tensor_model_parallel_size|tp_size|tp"},
    {"parallelism.pp", kInt, kContract, "C1", "", "Pipeline parallel size.", "1",
     "pipeline_parallel_size|pipeline_model_parallel_size|pp_size|pp"},
    {"parallelism.cp", kInt, kContract, "", "", "Context parallel size.", "1",
     "context_parallel_size|cp_size|cp"},
    {"parallelism.ep", kInt, kContract, "", "", "Expert parallel size.", "1",
     "expert_parallel_size|expert_model_parallel_size|ep_size|ep"},
    {"parallelism.dp", kInt, kContract, "", "", "Data parallel size.", "1",
     "data_parallel_size|dp_size|dp"},

    {"paths.output", kString, kCosmetic, "", "", "Where commands of the task put scratch files.",
     "\"out\"", ""},
    {"log.level", kString, kCosmetic, "", "error|warning|info|debug", "How much commands say.",
     "\"info\"", ""},

    {"requester.person", kString, kAuthority, "", "",
     "Who asks for reviews. The same person cannot give them.", "\"ann\"", ""},
    {"requester.keys", kStringList, kAuthority, "", "",
     "Public keys of the requester: `ssh-ed25519 AAAA...` or `ed25519:<64 hex>`. They approve "
     "nothing.",
     "[\"ssh-ed25519 AAAA...\"]", ""},
};

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t next = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
      diagonal = row[j];
      row[j] = next;
    }
  }
  return row[b.size()];
}

Status CheckString(const KeySpec& spec, const std::string& text) {
  if (text.empty() || text.size() > 4096 || Printable(text) != text) {
    return InvalidArgument("{}: a string of 1 to 4,096 printable bytes is needed, not `{}`",
                           spec.key, Printable(text.substr(0, 80)));
  }
  return Ok();
}

}  // namespace

std::string_view ValueTypeName(ValueType type) {
  switch (type) {
    case kString:
      return "a string";
    case kInt:
      return "a whole number, 0 or more";
    case kFloat:
      return "a finite number, 0 or more";
    case kBool:
      return "true or false";
    case kStringList:
      return "a list of strings";
    case kIntList:
      return "a list of whole numbers";
  }
  return "";
}

std::string_view ConfigClassName(ConfigClass c) {
  switch (c) {
    case kContract:
      return "contract";
    case kWorkload:
      return "workload";
    case kNumeric:
      return "numeric";
    case kUpdate:
      return "update";
    case kHardware:
      return "hardware";
    case kAuthority:
      return "authority";
    case kCosmetic:
      return "cosmetic";
  }
  return "";
}

std::span<const KeySpec> AllKeys() { return kKeys; }

const KeySpec* FindKey(std::string_view key) {
  const auto* at = std::find_if(std::begin(kKeys), std::end(kKeys),
                                [&](const KeySpec& spec) { return spec.key == key; });
  return at == std::end(kKeys) ? nullptr : at;
}

std::string_view NearestKey(std::string_view key) {
  key = key.substr(0, 100);
  return std::min_element(std::begin(kKeys), std::end(kKeys),
                          [&](const KeySpec& a, const KeySpec& b) {
                            return EditDistance(a.key, key) < EditDistance(b.key, key);
                          })
      ->key;
}

bool IsSemantic(ConfigClass c) { return c != kCosmetic && c != kAuthority; }

Result<std::string> CanonicalValue(const KeySpec& spec, const Json& value) {
  const auto bad = [&] {
    return InvalidArgument("{}: {} is needed, as in {}", spec.key, ValueTypeName(spec.type),
                           spec.example);
  };
  const auto whole = [](const Json& v) {
    return v.is_number_integer() && (v.is_number_unsigned() || v.get<int64_t>() >= 0) &&
           v.get<uint64_t>() <= (uint64_t{1} << 53);
  };
  switch (spec.type) {
    case kString: {
      if (!value.is_string()) return bad();
      const auto& text = value.get_ref<const std::string&>();
      TARE_RETURN_IF_ERROR(CheckString(spec, text));
      if (!spec.choices.empty()) {
        std::string_view rest = spec.choices;
        bool found = false;
        while (!rest.empty()) {
          const size_t bar = std::min(rest.find('|'), rest.size());
          found = found || rest.substr(0, bar) == text;
          rest.remove_prefix(std::min(bar + 1, rest.size()));
        }
        if (!found) {
          return InvalidArgument("{}: `{}` is not one of {}", spec.key, text, spec.choices);
        }
      }
      break;
    }
    case kInt:
      if (!whole(value)) return bad();
      break;
    case kFloat: {
      if (!value.is_number()) return bad();
      const double number = value.get<double>();
      if (!std::isfinite(number) || number < 0) return bad();
      std::string text = fmt::format("{}", number);
      if (text.find_first_of(".e") == std::string::npos) text += ".0";
      return text;
    }
    case kBool:
      if (!value.is_boolean()) return bad();
      break;
    case kStringList:
    case kIntList:
      if (!value.is_array() || value.size() > 1000) return bad();
      for (const Json& item : value) {
        if (spec.type == kIntList ? !whole(item) : !item.is_string()) return bad();
        if (spec.type == kStringList) {
          TARE_RETURN_IF_ERROR(CheckString(spec, item.get_ref<const std::string&>()));
        }
      }
      break;
  }
  return CanonicalJson(value);
}

}  // namespace tare::workflow
