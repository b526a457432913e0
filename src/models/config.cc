#include "models/config.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <string_view>

namespace tare::models {
namespace {

// Reads keys, remembers which were read, and refuses the rest.
class Reader {
 public:
  Reader(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  const Json* Find(const char* key) {
    read_.insert(key);
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  Status Bad(std::string_view key, std::string_view what) const {
    return InvalidArgument("{}: {} {}", where_, key, what);
  }

  Result<int64_t> Int(const char* key, int64_t low, int64_t high,
                      std::optional<int64_t> fallback = {}) {
    const Json* value = Find(key);
    if (value == nullptr) {
      if (fallback) return *fallback;
      return Bad(key, fmt::format("is missing; an integer from {} to {} is expected", low, high));
    }
    if (!value->is_number_integer() ||
        (value->is_number_unsigned() && value->get<uint64_t>() > INT64_MAX) ||
        value->get<int64_t>() < low || value->get<int64_t>() > high) {
      return Bad(key, fmt::format("is {}; an integer from {} to {} is expected",
                                  Printable(value->dump()), low, high));
    }
    return value->get<int64_t>();
  }
  Result<double> Number(const char* key, double low, double high,
                        std::optional<double> fallback = {}) {
    const Json* value = Find(key);
    if (value == nullptr) {
      if (fallback) return *fallback;
      return Bad(key, fmt::format("is missing; a number from {} to {} is expected", low, high));
    }
    if (!value->is_number() || !(value->get<double>() >= low && value->get<double>() <= high)) {
      return Bad(key, fmt::format("is {}; a number from {} to {} is expected",
                                  Printable(value->dump()), low, high));
    }
    return value->get<double>();
  }
  Result<bool> Bool(const char* key, bool fallback) {
    const Json* value = Find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean())
      return Bad(key, fmt::format("is {}; true or false is expected", Printable(value->dump())));
    return value->get<bool>();
  }
  Result<std::string> Text(const char* key, std::optional<std::string> fallback = {}) {
    const Json* value = Find(key);
    if (value == nullptr) {
      if (fallback) return *fallback;
      return Bad(key, "is missing");
    }
    if (!value->is_string())
      return Bad(key, fmt::format("is {}; a string is expected", Printable(value->dump())));
    return value->get<std::string>();
  }
  // A key that would change values unless it has this one.
  Status Must(const char* key, const Json& expected) {
    const Json* value = Find(key);
    if (value == nullptr || *value == expected) return Ok();
    return Unsupported("{}: {} is {}; only {} is built", where_, key, Printable(value->dump()),
                       expected.dump());
  }

  // Keys that were neither read nor known to be without effect on a value.
  Status RefuseTheRest() const {
    static const auto* harmless = new std::set<std::string_view>{"_name_or_path",
                                                                 "architectures",
                                                                 "model_type",
                                                                 "use_cache",
                                                                 "initializer_range",
                                                                 "pad_token_id",
                                                                 "unk_token_id",
                                                                 "attention_dropout",
                                                                 "resid_pdrop",
                                                                 "router_aux_loss_coef",
                                                                 "output_router_logits",
                                                                 "router_jitter_noise",
                                                                 "pretraining_tp",
                                                                 "output_attentions",
                                                                 "output_hidden_states",
                                                                 "return_dict",
                                                                 "use_bfloat16",
                                                                 "torchscript",
                                                                 "is_llama_config",
                                                                 "license",
                                                                 "chat_template",
                                                                 "tokenizer_class",
                                                                 "auto_map",
                                                                 "task_specific_params",
                                                                 "decoder_start_token_id",
                                                                 "max_length",
                                                                 "min_length",
                                                                 "do_sample",
                                                                 "temperature",
                                                                 "top_k",
                                                                 "top_p",
                                                                 "num_return_sequences",
                                                                 "problem_type"};
    for (const auto& [key, value] : object_.items()) {
      if (read_.contains(key) || harmless->contains(key) || key.starts_with("transformers") ||
          key.starts_with("_") || value.is_null()) {
        continue;
      }
      return Unsupported("{}: key \"{}\" is not understood; it may change the model's values",
                         where_, Printable(key));
    }
    return Ok();
  }

 private:
  const Json& object_;
  std::string where_;
  std::set<std::string, std::less<>> read_;
};

Status ReadTokenIds(Reader& reader, const char* key, int64_t vocab, std::vector<int32_t>* out) {
  const Json* value = reader.Find(key);
  if (value == nullptr) return Ok();
  const Json list = value->is_array() ? *value : Json::array({*value});
  for (const Json& id : list) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= vocab) {
      return reader.Bad(key, fmt::format("is {}; token ids below {} are expected",
                                         Printable(value->dump()), vocab));
    }
    out->push_back(static_cast<int32_t>(id.get<int64_t>()));
  }
  return Ok();
}

// rope_theta and rope_scaling at the top level, or both inside rope_parameters (transformers 5).
Status ReadRope(Reader& top, ModelConfig* config) {
  ops::rope::Params& rope = config->rope;
  rope.head_dim = config->head_dim;
  rope.dtype = config->dtype;
  rope.layout = ops::rope::Layout::kHalfSplit;
  const Json* parameters = top.Find("rope_parameters");
  const Json* scaling = top.Find("rope_scaling");
  if (parameters != nullptr && scaling != nullptr && *parameters != *scaling) {
    return top.Bad("rope_scaling", "is given beside rope_parameters; one of them is expected");
  }
  if (parameters != nullptr) scaling = parameters;
  TARE_ASSIGN_OR_RETURN(rope.theta, top.Number("rope_theta", 1.0, 1e12, 10000.0));
  double partial = 1.0;
  TARE_ASSIGN_OR_RETURN(partial, top.Number("partial_rotary_factor", 0.0, 1.0, 1.0));
  TARE_RETURN_IF_ERROR(top.Must("rope_interleaved", false));
  if (scaling != nullptr) {
    if (!scaling->is_object()) return top.Bad("rope_scaling", "is not an object");
    Reader r(*scaling, "config.json: rope_scaling");
    TARE_ASSIGN_OR_RETURN(const std::string legacy, r.Text("type", "default"));
    TARE_ASSIGN_OR_RETURN(const std::string type, r.Text("rope_type", legacy));
    TARE_ASSIGN_OR_RETURN(rope.theta, r.Number("rope_theta", 1.0, 1e12, rope.theta));
    TARE_ASSIGN_OR_RETURN(partial, r.Number("partial_rotary_factor", 0.0, 1.0, partial));
    if (type != "default") {
      TARE_ASSIGN_OR_RETURN(rope.factor, r.Number("factor", 1.0, 1e6));
    }
    const int64_t far = int64_t{1} << 40;
    if (type == "default") {
      rope.scaling = ops::rope::Scaling::kNone;
    } else if (type == "linear") {
      rope.scaling = ops::rope::Scaling::kLinear;
    } else if (type == "llama3") {
      rope.scaling = ops::rope::Scaling::kLlama3;
      TARE_ASSIGN_OR_RETURN(rope.low_freq_factor, r.Number("low_freq_factor", 1e-3, 1e6));
      TARE_ASSIGN_OR_RETURN(rope.high_freq_factor, r.Number("high_freq_factor", 1e-3, 1e6));
      TARE_ASSIGN_OR_RETURN(rope.original_max_position,
                            r.Int("original_max_position_embeddings", 1, far));
      if (rope.high_freq_factor <= rope.low_freq_factor) {
        return r.Bad("high_freq_factor", "is not above low_freq_factor");
      }
    } else if (type == "yarn") {
      rope.scaling = ops::rope::Scaling::kYarn;
      TARE_ASSIGN_OR_RETURN(rope.original_max_position, r.Int("original_max_position_embeddings", 1,
                                                              far, config->max_positions));
      TARE_ASSIGN_OR_RETURN(rope.beta_fast, r.Number("beta_fast", 1e-3, 1e6, 32.0));
      TARE_ASSIGN_OR_RETURN(rope.beta_slow, r.Number("beta_slow", 1e-3, 1e6, 1.0));
      TARE_ASSIGN_OR_RETURN(rope.attention_factor, r.Number("attention_factor", 0.0, 1e3, 0.0));
      TARE_RETURN_IF_ERROR(r.Must("truncate", true));
    } else {
      return Unsupported(
          "config.json: rope type \"{}\"; default, linear, llama3 and yarn are built",
          Printable(type));
    }
    TARE_RETURN_IF_ERROR(r.RefuseTheRest());
  }
  rope.rotary_dim = static_cast<int64_t>(partial * static_cast<double>(config->head_dim));
  if (rope.rotary_dim < 2 || rope.rotary_dim % 2 != 0) {
    return top.Bad(
        "partial_rotary_factor",
        fmt::format("gives {} rotary dimensions; an even number is expected", rope.rotary_dim));
  }
  return Ok();
}

Status ReadWindows(Reader& r, ModelConfig* config) {
  const int64_t far = int64_t{1} << 40;
  const bool qwen = config->architecture.starts_with("Qwen");
  const bool llama = config->architecture == "LlamaForCausalLM";
  int64_t window = 0;
  if (const Json* value = r.Find("sliding_window"); value != nullptr && !llama) {
    TARE_ASSIGN_OR_RETURN(window, r.Int("sliding_window", 1, far));
  }
  TARE_ASSIGN_OR_RETURN(const bool use, r.Bool("use_sliding_window", !qwen));
  TARE_ASSIGN_OR_RETURN(const int64_t first, r.Int("max_window_layers", 0, far, qwen ? far : 0));
  const int64_t layers = static_cast<int64_t>(config->layers.size());
  if (const Json* types = r.Find("layer_types")) {
    if (!types->is_array() || static_cast<int64_t>(types->size()) != layers) {
      return r.Bad("layer_types", fmt::format("is not a list of {} entries", layers));
    }
    for (int64_t l = 0; l < layers; ++l) {
      if ((*types)[l] == "sliding_attention") {
        if (window == 0)
          return r.Bad("sliding_window", "is missing, though layer_types has sliding_attention");
        config->layers[l].window = window;
      } else if ((*types)[l] != "full_attention") {
        return Unsupported(
            "config.json: layer_types[{}] is {}; full_attention and sliding_attention are built", l,
            Printable((*types)[l].dump()));
      }
    }
    return Ok();
  }
  if (window != 0 && use) {
    for (int64_t l = first; l < layers; ++l) config->layers[l].window = window;
  }
  return Ok();
}

Status ReadExperts(Reader& r, ModelConfig* config) {
  const bool mixtral = config->architecture == "MixtralForCausalLM";
  const bool optional = config->architecture == "TareMiniForCausalLM";
  const char* count = mixtral ? "num_local_experts" : "num_experts";
  if (optional && r.Find(count) == nullptr) return Ok();
  TARE_ASSIGN_OR_RETURN(config->experts, r.Int(count, 1, 4096));
  TARE_ASSIGN_OR_RETURN(config->top_k, r.Int("num_experts_per_tok", 1, config->experts));
  const int64_t wide = int64_t{1} << 24;
  if (mixtral) {
    config->expert_intermediate = config->intermediate;
    config->renormalise = true;  // its softmax runs over the chosen experts, which is the same
  } else {
    TARE_ASSIGN_OR_RETURN(config->expert_intermediate, r.Int("moe_intermediate_size", 1, wide));
    TARE_ASSIGN_OR_RETURN(config->renormalise, r.Bool("norm_topk_prob", false));
  }
  TARE_ASSIGN_OR_RETURN(const int64_t step, r.Int("decoder_sparse_step", 1, wide, 1));
  for (size_t l = 0; l < config->layers.size(); ++l) config->layers[l].moe = (l + 1) % step == 0;
  if (const Json* dense = r.Find("mlp_only_layers")) {
    if (!dense->is_array()) return r.Bad("mlp_only_layers", "is not a list");
    for (const Json& l : *dense) {
      if (!l.is_number_integer() || l.get<int64_t>() < 0 ||
          l.get<int64_t>() >= static_cast<int64_t>(config->layers.size())) {
        return r.Bad("mlp_only_layers",
                     fmt::format("holds {}; layer numbers are expected", Printable(l.dump())));
      }
      config->layers[l.get<int64_t>()].moe = false;
    }
  }
  for (const char* key :
       {"shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts"}) {
    TARE_RETURN_IF_ERROR(r.Must(key, 0));
  }
  return Ok();
}

}  // namespace

Result<ModelConfig> ParseConfig(const Json& json) {
  if (!json.is_object()) return InvalidArgument("config.json: the top level is not an object");
  Reader r(json, "config.json");
  ModelConfig c;
  const Json* names = r.Find("architectures");
  if (names == nullptr || !names->is_array() || names->size() != 1 || !(*names)[0].is_string()) {
    return r.Bad("architectures", "is not a list with one name");
  }
  c.architecture = (*names)[0].get<std::string>();
  const auto is = [&](const char* name) { return c.architecture == name; };
  const bool mini = is("TareMiniForCausalLM");
  const bool qwen2 = is("Qwen2ForCausalLM"), qwen3 = is("Qwen3ForCausalLM"),
             qwen3_moe = is("Qwen3MoeForCausalLM");
  const bool mixtral = is("MixtralForCausalLM");
  if (!mini && !qwen2 && !qwen3 && !qwen3_moe && !mixtral && !is("LlamaForCausalLM") &&
      !is("MistralForCausalLM")) {
    return Unsupported(
        "config.json: architecture \"{}\"; built are LlamaForCausalLM, MistralForCausalLM, "
        "MixtralForCausalLM, "
        "Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM and TareMiniForCausalLM",
        Printable(c.architecture));
  }
  TARE_ASSIGN_OR_RETURN(const std::string dtype_name, r.Text("torch_dtype", "bfloat16"));
  TARE_ASSIGN_OR_RETURN(const std::string dtype, r.Text("dtype", dtype_name));
  if (dtype == "bfloat16") {
    c.dtype = DType::kBF16;
  } else if (dtype == "float32") {
    c.dtype = DType::kF32;
  } else if (dtype == "float16") {
    c.dtype = DType::kF16;
  } else {
    return Unsupported("config.json: dtype \"{}\"; bfloat16, float16 and float32 are built",
                       Printable(dtype));
  }
  c.residual_dtype = c.dtype;
  const int64_t wide = int64_t{1} << 24;
  TARE_ASSIGN_OR_RETURN(c.vocab, r.Int("vocab_size", 8, int64_t{1} << 24));
  TARE_ASSIGN_OR_RETURN(c.hidden, r.Int("hidden_size", 16, wide));
  TARE_ASSIGN_OR_RETURN(const int64_t layers, r.Int("num_hidden_layers", 1, 4096));
  c.layers.resize(layers);
  TARE_ASSIGN_OR_RETURN(c.q_heads, r.Int("num_attention_heads", 1, 4096));
  TARE_ASSIGN_OR_RETURN(c.kv_heads, r.Int("num_key_value_heads", 1, c.q_heads, c.q_heads));
  if (c.q_heads % c.kv_heads != 0) {
    return r.Bad("num_key_value_heads",
                 fmt::format("is {}, which does not divide {} query heads", c.kv_heads, c.q_heads));
  }
  const bool divides = c.hidden % c.q_heads == 0;
  if (divides) {
    TARE_ASSIGN_OR_RETURN(c.head_dim, r.Int("head_dim", 16, 256, c.hidden / c.q_heads));
  } else {
    TARE_ASSIGN_OR_RETURN(c.head_dim, r.Int("head_dim", 16, 256));
  }
  if (c.head_dim % 16 != 0 || c.head_dim < 16 || c.head_dim > 256) {
    return r.Bad("head_dim", fmt::format("is {}; a multiple of 16 up to 256 is built", c.head_dim));
  }
  TARE_ASSIGN_OR_RETURN(c.max_positions, r.Int("max_position_embeddings", 1, int64_t{1} << 20));
  TARE_ASSIGN_OR_RETURN(const double eps, r.Number("rms_norm_eps", 1e-12, 1.0));
  c.norm_eps = static_cast<float>(eps);
  TARE_ASSIGN_OR_RETURN(c.tied, r.Bool("tie_word_embeddings", false));
  TARE_ASSIGN_OR_RETURN(const std::string act, r.Text("hidden_act", "silu"));
  if (act != "silu")
    return Unsupported("config.json: hidden_act \"{}\"; silu is built for these models",
                       Printable(act));
  TARE_ASSIGN_OR_RETURN(c.intermediate, r.Int("intermediate_size", 1, wide));

  TARE_ASSIGN_OR_RETURN(const bool attention_bias, r.Bool("attention_bias", false));
  c.qkv_bias = qwen2 || attention_bias;
  // Llama and Qwen3 put the bias on the output projection too; Qwen2 never has one there.
  c.o_bias = attention_bias && !qwen2;
  TARE_ASSIGN_OR_RETURN(c.mlp_bias, r.Bool("mlp_bias", false));
  if (c.mlp_bias && !is("LlamaForCausalLM"))
    return Unsupported("config.json: mlp_bias with {}", c.architecture);
  c.qk_norm = qwen3 || qwen3_moe || mini;

  if (mini) {
    if (const Json* sinks = r.Find("attention_sinks")) {
      if (!sinks->is_array() || static_cast<int64_t>(sinks->size()) != layers) {
        return r.Bad("attention_sinks", fmt::format("is not a list of {} entries", layers));
      }
      for (int64_t l = 0; l < layers; ++l) {
        if (!(*sinks)[l].is_boolean())
          return r.Bad("attention_sinks", "holds something else than true and false");
        c.layers[l].sink = (*sinks)[l].get<bool>();
      }
    }
    TARE_ASSIGN_OR_RETURN(const int64_t segments, r.Int("tare_segments", 1, 8, 1));
    if (segments != 1 && segments != 2 && segments != 4 && segments != 8) {
      return r.Bad("tare_segments", "is not 1, 2, 4 or 8");
    }
    c.segments = static_cast<int32_t>(segments);
    TARE_ASSIGN_OR_RETURN(const std::string version, r.Text("tare_mini_version", ""));
    if (version != "mini-1")
      return Unsupported("config.json: tare_mini_version \"{}\"; mini-1 is built",
                         Printable(version));
  }
  TARE_RETURN_IF_ERROR(ReadRope(r, &c));
  TARE_RETURN_IF_ERROR(ReadWindows(r, &c));
  if (mini || mixtral || qwen3_moe) TARE_RETURN_IF_ERROR(ReadExperts(r, &c));
  TARE_RETURN_IF_ERROR(ReadTokenIds(r, "bos_token_id", c.vocab, &c.bos));
  TARE_RETURN_IF_ERROR(ReadTokenIds(r, "eos_token_id", c.vocab, &c.eos));
  TARE_RETURN_IF_ERROR(r.RefuseTheRest());
  return c;
}

}  // namespace tare::models
