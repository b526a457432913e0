#include "tensor/gguf_checkpoint.h"

#include <charconv>
#include <cstring>

namespace tare {
namespace {

struct Architecture {
  std::string_view gguf;
  std::string_view model_type;
  std::string_view class_name;
  // The converter of llama.cpp stores q and k of this architecture with the two halves of each
  // head interleaved, as its rope reads them; the others keep Hugging Face's order.
  bool interleaved_rope;
};
constexpr Architecture kArchitectures[] = {
    {"llama", "llama", "LlamaForCausalLM", true},
    {"qwen2", "qwen2", "Qwen2ForCausalLM", false},
    {"qwen3", "qwen3", "Qwen3ForCausalLM", false},
    {"qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", false},
};

struct Rename {
  std::string_view gguf;
  std::string_view hf;
};
constexpr Rename kTop[] = {{"token_embd.weight", "model.embed_tokens.weight"},
                           {"output_norm.weight", "model.norm.weight"},
                           {"output.weight", "lm_head.weight"}};
constexpr Rename kLayer[] = {
    {"attn_q.weight", "self_attn.q_proj.weight"},
    {"attn_k.weight", "self_attn.k_proj.weight"},
    {"attn_v.weight", "self_attn.v_proj.weight"},
    {"attn_q.bias", "self_attn.q_proj.bias"},
    {"attn_k.bias", "self_attn.k_proj.bias"},
    {"attn_v.bias", "self_attn.v_proj.bias"},
    {"attn_output.weight", "self_attn.o_proj.weight"},
    {"attn_output.bias", "self_attn.o_proj.bias"},
    {"attn_q_norm.weight", "self_attn.q_norm.weight"},
    {"attn_k_norm.weight", "self_attn.k_norm.weight"},
    {"attn_norm.weight", "input_layernorm.weight"},
    {"ffn_norm.weight", "post_attention_layernorm.weight"},
    {"ffn_gate.weight", "mlp.gate_proj.weight"},
    {"ffn_up.weight", "mlp.up_proj.weight"},
    {"ffn_down.weight", "mlp.down_proj.weight"},
    {"ffn_gate_inp.weight", "mlp.gate.weight"},
};
constexpr Rename kExperts[] = {{"ffn_gate_exps.weight", "gate_proj.weight"},
                               {"ffn_up_exps.weight", "up_proj.weight"},
                               {"ffn_down_exps.weight", "down_proj.weight"}};

const Rename* FindRename(std::span<const Rename> table, std::string_view name) {
  for (const Rename& r : table) {
    if (r.gguf == name) return &r;
  }
  return nullptr;
}

Result<const Architecture*> ArchitectureOf(const GgufFile& file) {
  TARE_ASSIGN_OR_RETURN(const std::string name, file.String("general.architecture"));
  for (const Architecture& a : kArchitectures) {
    if (a.gguf == name) return &a;
  }
  return static_cast<const Architecture*>(nullptr);
}

// A count of the architecture, 1 to 2^31 - 1.
Result<int64_t> Count(const GgufFile& file, const Architecture& a, std::string_view key) {
  const std::string full = fmt::format("{}.{}", a.gguf, key);
  TARE_ASSIGN_OR_RETURN(const int64_t v, file.Integer(full));
  if (v < 1 || v > INT32_MAX) {
    return DataLoss("{}: metadata \"{}\" is {}; 1 to {} expected", Printable(file.where()), full, v,
                    INT32_MAX);
  }
  return v;
}

// The heads whose rows are interleaved in a tensor of this layer part, 0 when none are.
Result<int64_t> RopeHeads(const GgufFile& file, const Architecture& a, std::string_view part,
                          const GgufEntry& entry) {
  const bool q = part.starts_with("attn_q.");
  const bool k = part.starts_with("attn_k.");
  if (!a.interleaved_rope || (!q && !k)) return int64_t{0};
  const bool has_kv = file.Find(fmt::format("{}.attention.head_count_kv", a.gguf)) != nullptr;
  TARE_ASSIGN_OR_RETURN(
      const int64_t heads,
      Count(file, a, k && has_kv ? "attention.head_count_kv" : "attention.head_count"));
  if (entry.shape.empty() || entry.shape[0] % heads != 0 || entry.shape[0] / heads % 2 != 0) {
    return DataLoss("{}: tensor \"{}\" of shape {} does not split into {} heads of even size",
                    Printable(file.where()), Printable(entry.name), ShapeToString(entry.shape),
                    heads);
  }
  return heads;
}

// "blk.7.attn_q.weight" into layer and part.
bool SplitLayer(std::string_view name, int64_t* layer, std::string_view* part) {
  if (!name.starts_with("blk.")) return false;
  name.remove_prefix(4);
  const size_t dot = name.find('.');
  if (dot == std::string_view::npos || dot == 0 || dot > 6) return false;
  const auto [end, error] = std::from_chars(name.data(), name.data() + dot, *layer);
  *part = name.substr(dot + 1);
  return error == std::errc() && end == name.data() + dot && (dot == 1 || name[0] != '0');
}

}  // namespace

Result<std::vector<GgufMapped>> MapGgufTensors(const GgufFile& file) {
  TARE_ASSIGN_OR_RETURN(const Architecture* a, ArchitectureOf(file));
  std::vector<GgufMapped> out;
  for (const GgufEntry& e : file.entries()) {
    GgufMapped m;
    m.entry = &e;
    m.name = e.name;
    m.shape = e.shape;
    int64_t layer = 0;
    std::string_view part;
    if (a == nullptr) {
      // keeps its own name
    } else if (const Rename* top = FindRename(kTop, e.name)) {
      m.name = top->hf;
      m.hf = true;
    } else if (SplitLayer(e.name, &layer, &part)) {
      if (const Rename* r = FindRename(kLayer, part)) {
        m.name = fmt::format("model.layers.{}.{}", layer, r->hf);
        m.hf = true;
        TARE_ASSIGN_OR_RETURN(m.rope_heads, RopeHeads(file, *a, part, e));
      } else if (const Rename* x = FindRename(kExperts, part);
                 x != nullptr && e.shape.size() == 3) {
        m.hf = true;
        m.shape.erase(m.shape.begin());
        // A shape may claim more experts than any file has bytes; only those with data are named.
        if (e.shape[0] > 65536) {
          return DataLoss("{}: tensor \"{}\" claims {} experts", Printable(file.where()),
                          Printable(e.name), e.shape[0]);
        }
        for (m.expert = 0; m.expert < e.shape[0]; ++m.expert) {
          m.name = fmt::format("model.layers.{}.mlp.experts.{}.{}", layer, m.expert, x->hf);
          out.push_back(m);
        }
        continue;
      }
    }
    out.push_back(std::move(m));
  }
  return out;
}

Result<Tensor> ReadGgufMapped(const GgufFile& file, const GgufMapped& mapped) {
  GgufEntry entry = *mapped.entry;
  if (mapped.expert >= 0) {
    // Experts are whole blocks one after the other.
    const uint64_t bytes = entry.size_bytes / static_cast<uint64_t>(entry.shape[0]);
    entry.begin += bytes * static_cast<uint64_t>(mapped.expert);
    entry.size_bytes = bytes;
    entry.shape = mapped.shape;
  }
  TARE_ASSIGN_OR_RETURN(Tensor stored, file.DequantizeF32(entry));
  if (mapped.rope_heads == 0 || stored.elements() == 0) return stored;
  // Stored row (head, j, half) is row (head, half, j): j counts inside a half.
  const int64_t rows = entry.shape[0];
  const int64_t half = rows / mapped.rope_heads / 2;
  const size_t row_bytes = static_cast<size_t>(stored.size_bytes() / rows);
  TARE_ASSIGN_OR_RETURN(Tensor out, Tensor::Allocate(DType::kF32, entry.shape));
  const char* from = static_cast<const char*>(stored.data());
  char* to = static_cast<char*>(out.mutable_data());
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t head = r / (2 * half);
    const int64_t j = r % (2 * half) / 2;
    const int64_t target = head * 2 * half + r % 2 * half + j;
    std::memcpy(to + static_cast<size_t>(target) * row_bytes,
                from + static_cast<size_t>(r) * row_bytes, row_bytes);
  }
  return out;
}

Result<Json> GgufConfig(const GgufFile& file) {
  TARE_ASSIGN_OR_RETURN(const Architecture* a, ArchitectureOf(file));
  Json c = Json::object();
  if (a == nullptr) {
    c["gguf_architecture"] = file.String("general.architecture").value();
    return c;
  }
  c["architectures"] = Json::array({std::string(a->class_name)});
  c["model_type"] = std::string(a->model_type);
  const auto key = [&](std::string_view k) { return fmt::format("{}.{}", a->gguf, k); };
  const auto has = [&](std::string_view k) { return file.Find(key(k)) != nullptr; };
  // A file without hyperparameters can be looked at; what is missing is missing in the config too.
  const std::pair<const char*, const char*> counts[] = {
      {"hidden_size", "embedding_length"},
      {"num_hidden_layers", "block_count"},
      {"num_attention_heads", "attention.head_count"},
      {"num_key_value_heads", "attention.head_count_kv"},
      {"head_dim", "attention.key_length"},
      {"intermediate_size", "feed_forward_length"},
      {"max_position_embeddings", "context_length"},
      {"vocab_size", "vocab_size"},
      {"sliding_window", "attention.sliding_window"},
      {"num_experts", "expert_count"},
      {"num_experts_per_tok", "expert_used_count"},
      {"moe_intermediate_size", "expert_feed_forward_length"},
  };
  for (const auto& [hf, gguf] : counts) {
    if (!has(gguf)) continue;
    TARE_ASSIGN_OR_RETURN(const int64_t v, Count(file, *a, gguf));
    c[hf] = v;
  }
  if (!c.contains("num_key_value_heads") && c.contains("num_attention_heads")) {
    c["num_key_value_heads"] = c["num_attention_heads"];
  }
  if (!c.contains("head_dim") && c.contains("hidden_size") && c.contains("num_attention_heads")) {
    const int64_t hidden = c["hidden_size"].get<int64_t>();
    const int64_t heads = c["num_attention_heads"].get<int64_t>();
    if (hidden % heads != 0) {
      return DataLoss("{}: embedding_length {} does not split into {} heads",
                      Printable(file.where()), hidden, heads);
    }
    c["head_dim"] = hidden / heads;
  }
  if (has("rope.dimension_count") && c.contains("head_dim")) {
    TARE_ASSIGN_OR_RETURN(const int64_t rope, Count(file, *a, "rope.dimension_count"));
    if (rope != c["head_dim"].get<int64_t>()) {
      return Unsupported("{}: rope over {} of {} head dimensions", Printable(file.where()), rope,
                         c["head_dim"].get<int64_t>());
    }
  }
  const GgufEntry* embedding = file.FindTensor("token_embd.weight");
  if (embedding != nullptr && embedding->shape.size() == 2 && !c.contains("vocab_size")) {
    c["vocab_size"] = embedding->shape[0];
  }
  // f32 in the file; the shortest decimal that is that f32 again, as the original config has it.
  const auto decimal = [](double v) { return std::stod(fmt::format("{}", static_cast<float>(v))); };
  if (has("attention.layer_norm_rms_epsilon")) {
    TARE_ASSIGN_OR_RETURN(const double eps, file.Float(key("attention.layer_norm_rms_epsilon")));
    if (!(eps > 0 && eps < 1)) {
      return DataLoss("{}: layer_norm_rms_epsilon is {}", Printable(file.where()), eps);
    }
    c["rms_norm_eps"] = decimal(eps);
  }
  if (has("rope.freq_base")) {
    TARE_ASSIGN_OR_RETURN(const double theta, file.Float(key("rope.freq_base")));
    if (!(theta > 0 && theta < 1e15)) {
      return DataLoss("{}: rope.freq_base is {}", Printable(file.where()), theta);
    }
    c["rope_theta"] = decimal(theta);
  } else {
    c["rope_theta"] = 10000.0;  // the default of the format
  }
  c["rope_scaling"] = nullptr;
  if (has("rope.scaling.type")) {
    TARE_ASSIGN_OR_RETURN(const std::string type, file.String(key("rope.scaling.type")));
    if (type != "none") c["rope_scaling"] = Json{{"rope_type", type}};
  }
  if (file.FindTensor("rope_freqs.weight") != nullptr) {
    // Per-frequency factors stand in a tensor; which parameters made them the file does not say.
    c["rope_scaling"] = Json{{"rope_type", "gguf-rope-freqs"}};
  }
  c["hidden_act"] = "silu";
  c["tie_word_embeddings"] = file.FindTensor("output.weight") == nullptr;
  const bool q_bias = file.FindTensor("blk.0.attn_q.bias") != nullptr;
  c["attention_bias"] = q_bias && a->gguf != "qwen2";
  if (a->gguf == "llama") c["mlp_bias"] = false;
  if (a->gguf == "qwen3moe") {
    c["norm_topk_prob"] = true;
    c["decoder_sparse_step"] = 1;
    c["mlp_only_layers"] = Json::array();
  }
  for (const auto& [hf, gguf] : {std::pair{"bos_token_id", "tokenizer.ggml.bos_token_id"},
                                 std::pair{"eos_token_id", "tokenizer.ggml.eos_token_id"}}) {
    if (file.Find(gguf) == nullptr) continue;
    TARE_ASSIGN_OR_RETURN(const int64_t id, file.Integer(gguf));
    if (id < 0 || id > INT32_MAX)
      return DataLoss("{}: {} is {}", Printable(file.where()), gguf, id);
    c[hf] = id;
  }
  return c;
}

Result<TokenizerSource> GgufTokenizer(const GgufFile& file) {
  TokenizerSource t;
  if (file.Find("tokenizer.ggml.model") == nullptr) return t;
  TARE_ASSIGN_OR_RETURN(t.gguf_model, file.String("tokenizer.ggml.model"));
  if (file.Find("tokenizer.ggml.pre") != nullptr) {
    TARE_ASSIGN_OR_RETURN(t.gguf_pre, file.String("tokenizer.ggml.pre"));
  }
  if (file.Find("tokenizer.chat_template") != nullptr) {
    TARE_ASSIGN_OR_RETURN(t.chat_template, file.String("tokenizer.chat_template"));
  }
  if (file.Find("tokenizer.ggml.add_bos_token") != nullptr) {
    TARE_ASSIGN_OR_RETURN(t.add_bos, file.Bool("tokenizer.ggml.add_bos_token"));
  }
  for (const auto& [key, out] : {std::pair{"tokenizer.ggml.bos_token_id", &t.bos},
                                 std::pair{"tokenizer.ggml.eos_token_id", &t.eos}}) {
    if (file.Find(key) == nullptr) continue;
    TARE_ASSIGN_OR_RETURN(const int64_t id, file.Integer(key));
    if (id < 0 || id > INT32_MAX) return DataLoss("{}: {} is {}", Printable(file.where()), key, id);
    *out = static_cast<int32_t>(id);
  }
  const auto strings = [&](const char* key, std::vector<std::string>* out) -> Status {
    const GgufValue* v = file.Find(key);
    if (v == nullptr) return Ok();
    if (!v->is_array || v->type != GgufValue::Type::kString) {
      return DataLoss("{}: metadata \"{}\" is {}; an array of strings expected",
                      Printable(file.where()), key, GgufTypeName(v->type));
    }
    *out = v->strings;
    return Ok();
  };
  TARE_RETURN_IF_ERROR(strings("tokenizer.ggml.tokens", &t.tokens));
  TARE_RETURN_IF_ERROR(strings("tokenizer.ggml.merges", &t.merges));
  if (const GgufValue* v = file.Find("tokenizer.ggml.token_type")) {
    if (!v->is_array || v->type != GgufValue::Type::kI32 || v->integers.size() != t.tokens.size()) {
      return DataLoss("{}: tokenizer.ggml.token_type is an array of {} {}; {} i32 expected",
                      Printable(file.where()), v->integers.size(), GgufTypeName(v->type),
                      t.tokens.size());
    }
    for (const int64_t type : v->integers) t.token_types.push_back(static_cast<int32_t>(type));
  }
  return t;
}

}  // namespace tare
