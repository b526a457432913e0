#include "tensor/checkpoint_config.h"

namespace tare {
namespace {

Result<Json> ParseObject(std::string_view text, const char* file) {
  JsonLimits limits;
  limits.max_bytes = size_t{16} << 20;
  auto json = ParseJson(text, limits);
  if (!json.ok()) return DataLoss("{}: {}", file, json.status().message());
  if (!json->is_object()) return DataLoss("{}: is no JSON object", file);
  return json;
}

// A present key that is not null.
const Json* Find(const Json& object, const char* key) {
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

Status Wrong(const char* file, const char* key, const Json& value, const char* expected) {
  return DataLoss("{}: {} is {}; {} expected", file, key, Printable(value.dump().substr(0, 80)),
                  expected);
}

bool IsTokenId(const Json& v) {
  return v.is_number_integer() && (!v.is_number_unsigned() || v.get<uint64_t>() <= INT32_MAX) &&
         v.get<int64_t>() >= 0;
}

Status ReadEos(const Json& object, const char* file, std::vector<int64_t>* out) {
  const Json* v = Find(object, "eos_token_id");
  if (v == nullptr) return Ok();
  std::vector<int64_t> ids;
  const Json list = v->is_array() ? *v : Json::array({*v});
  for (const Json& id : list) {
    if (!IsTokenId(id)) return Wrong(file, "eos_token_id", *v, "a token ID or a list of them");
    ids.push_back(id.get<int64_t>());
  }
  *out = std::move(ids);
  return Ok();
}

std::optional<DType> TorchDType(const std::string& name) {
  if (name == "float64") return DType::kF64;
  if (name == "float32") return DType::kF32;
  if (name == "float16") return DType::kF16;
  if (name == "bfloat16") return DType::kBF16;
  return std::nullopt;
}

}  // namespace

Result<CheckpointConfig> ParseCheckpointConfig(std::string_view config_json,
                                               std::string_view generation_json) {
  constexpr const char* kFile = "config.json";
  CheckpointConfig c;
  TARE_ASSIGN_OR_RETURN(c.raw, ParseObject(config_json, kFile));
  if (const Json* v = Find(c.raw, "model_type")) {
    if (!v->is_string()) return Wrong(kFile, "model_type", *v, "a string");
    c.model_type = v->get<std::string>();
  }
  if (const Json* v = Find(c.raw, "architectures")) {
    if (!v->is_array()) return Wrong(kFile, "architectures", *v, "a list of strings");
    for (const Json& item : *v) {
      if (!item.is_string()) return Wrong(kFile, "architectures", *v, "a list of strings");
      c.architectures.push_back(item.get<std::string>());
    }
  }
  if (const Json* v = Find(c.raw, "tie_word_embeddings")) {
    if (!v->is_boolean()) return Wrong(kFile, "tie_word_embeddings", *v, "true or false");
    c.tie_word_embeddings = v->get<bool>();
  }
  for (const char* key : {"torch_dtype", "dtype"}) {
    if (const Json* v = Find(c.raw, key)) {
      if (!v->is_string()) return Wrong(kFile, key, *v, "a string");
      c.dtype = TorchDType(v->get<std::string>());
    }
  }
  TARE_RETURN_IF_ERROR(ReadEos(c.raw, kFile, &c.eos_token_ids));
  if (!generation_json.empty()) {
    TARE_ASSIGN_OR_RETURN(c.generation, ParseObject(generation_json, "generation_config.json"));
    TARE_RETURN_IF_ERROR(ReadEos(c.generation, "generation_config.json", &c.eos_token_ids));
  }
  return c;
}

}  // namespace tare
