#include "workflow/recover.h"

#include <toml++/toml.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "workflow/layout.h"

namespace tare::workflow {
namespace {

constexpr size_t kMaxSourceBytes = size_t{16} << 20;
constexpr uint64_t kMaxHeaderBytes = uint64_t{100} << 20;

struct Found {
  Json value;
  std::string where;  // "rollout.tensor_model_parallel_size"
};

void Search(const Json& json, std::string_view name, const std::string& at, int depth,
            std::vector<Found>* out) {
  if (depth > 32) return;
  if (json.is_object()) {
    for (const auto& [key, value] : json.items()) {
      const std::string here = at.empty() ? key : at + "." + key;
      if (key == name && !value.is_object() && !value.is_null()) {
        out->push_back({value, here});
      } else {
        Search(value, name, here, depth + 1, out);
      }
    }
  } else if (json.is_array()) {
    for (size_t i = 0; i < json.size(); ++i) {
      Search(json[i], name, fmt::format("{}[{}]", at, i), depth + 1, out);
    }
  }
}

// Spellings of other systems in Tare's own: one-element lists, dtype names.
Json Normalize(const KeySpec& spec, Json value) {
  if (spec.type == ValueType::kString && value.is_array() && value.size() == 1) {
    Json only = value[0];
    value = only;
  }
  const bool dtype = spec.key.starts_with("precision.") || spec.key == "weights.dtype";
  if (dtype && value.is_string()) {
    std::string text = value.get<std::string>();
    if (text.starts_with("torch.")) text = text.substr(6);
    std::transform(text.begin(), text.end(), text.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    for (const auto& [from, to] :
         std::vector<std::pair<std::string_view, std::string_view>>{{"bfloat16", "bf16"},
                                                                    {"float16", "f16"},
                                                                    {"half", "f16"},
                                                                    {"fp16", "f16"},
                                                                    {"float32", "f32"},
                                                                    {"float", "f32"},
                                                                    {"fp32", "f32"},
                                                                    {"f8_e4m3", "e4m3"},
                                                                    {"float8_e4m3fn", "e4m3"},
                                                                    {"fp8", "e4m3"},
                                                                    {"fp8_e4m3", "e4m3"}}) {
      if (text == from) text = to;
    }
    value = text;
  }
  return value;
}

class Recoverer {
 public:
  explicit Recoverer(Recovery* out) : out_(out) {}

  // Fills every key that `json` answers; what was found before holds.
  void Take(const Json& json, const std::string& file) {
    for (const KeySpec& spec : AllKeys()) {
      const std::string key(spec.key);
      if (spec.sources.empty()) continue;
      std::string_view rest = spec.sources;
      while (!rest.empty()) {
        const size_t bar = std::min(rest.find('|'), rest.size());
        const std::string_view name = rest.substr(0, bar);
        rest.remove_prefix(std::min(bar + 1, rest.size()));
        std::vector<Found> found;
        Search(json, name, "", 0, &found);
        if (found.empty()) continue;
        std::set<std::string> texts;
        for (const Found& f : found) {
          auto text = CanonicalValue(spec, Normalize(spec, f.value));
          if (text.ok() && !(key == "precision.kv_cache" && *text == "\"auto\""))
            texts.insert(*text);
        }
        if (texts.size() > 1) {
          std::string list;
          for (const Found& f : found) list += fmt::format(" {}={}", f.where, f.value.dump());
          out_->notes.push_back(fmt::format("{}: {} holds several values, none is taken:{}", key,
                                            file, Printable(list)));
          break;
        }
        if (texts.size() == 1) {
          Set(key, *texts.begin(), fmt::format("{} {}", file, found[0].where));
          break;
        }
      }
    }
  }

  void Set(const std::string& key, const std::string& text, const std::string& from) {
    const ConfigValue value{text, "recovered: " + Printable(from)};
    const auto [at, first] = out_->config.values.emplace(key, value);
    if (!first && at->second.text != text) out_->dropped.emplace_back(key, value);
  }

 private:
  Recovery* out_;
};

// As it stands in notes and origins.
std::string BaseName(const std::string& path) {
  return Printable(path.substr(path.find_last_of('/') + 1));
}

Result<Json> ReadJsonFile(Env* env, const std::string& path) {
  TARE_ASSIGN_OR_RETURN(const FileInfo info, env->Stat(path));
  if (info.size_bytes > kMaxSourceBytes) {
    return InvalidArgument("{}: {} bytes are too many for a configuration", Printable(path),
                           info.size_bytes);
  }
  TARE_ASSIGN_OR_RETURN(const std::string bytes, env->ReadFile(path));
  auto json = ParseJson(bytes);
  if (!json.ok()) return json.status().Annotate(path);
  return json;
}

// The dtype that every floating-point tensor of the file shares; nothing when they differ.
Status TakeSafetensors(Env* env, const std::string& path, Recoverer* out, Recovery* recovery) {
  TARE_ASSIGN_OR_RETURN(const auto file, env->OpenReadable(path));
  const std::string_view bytes = file->bytes();
  uint64_t size = 0;
  if (bytes.size() < 8) return DataLoss("{}: too short for a safetensors header", path);
  std::memcpy(&size, bytes.data(), 8);
  if (size > kMaxHeaderBytes || size > bytes.size() - 8) {
    return DataLoss("{}: the safetensors header says {} bytes, which the file does not have", path,
                    size);
  }
  auto header = ParseJson(bytes.substr(8, size));
  if (!header.ok()) return header.status().Annotate(path);
  std::set<std::string> dtypes;
  for (const auto& [name, tensor] : header->items()) {
    if (name == "__metadata__" || !tensor.is_object() || !tensor.contains("dtype") ||
        !tensor.at("dtype").is_string()) {
      continue;
    }
    const std::string dtype = tensor.at("dtype").get<std::string>();
    if (dtype.find('F') != std::string::npos) dtypes.insert(dtype);
  }
  const std::string from = BaseName(path) + " header";
  out->Set("weights.format", "\"safetensors\"", from);
  if (dtypes.size() == 1) {
    const KeySpec& spec = *FindKey("weights.dtype");
    auto text = CanonicalValue(spec, Normalize(spec, *dtypes.begin()));
    if (text.ok()) out->Set("weights.dtype", *text, from + " dtype");
  } else if (dtypes.size() > 1) {
    recovery->notes.push_back(
        fmt::format("weights.dtype: {} holds several dtypes", BaseName(path)));
  }
  return Ok();
}

// Keys that do not matter to this task.
bool IsIrrelevant(const TaskConfig& config, std::string_view key) {
  const bool no_training =
      config.String("task.scope") == "inference-only" || config.String("training.route") == "none";
  return no_training && key.starts_with("training.");
}

}  // namespace

Result<Recovery> RecoverConfig(Env* env, const std::string& model_path,
                               const std::vector<std::string>& config_files) {
  Recovery out;
  Recoverer recoverer(&out);
  // The checkpoint's own bytes say more about its dtype than any configuration.
  std::vector<std::string> shards;
  std::string model_config;
  if (!model_path.empty()) {
    TARE_ASSIGN_OR_RETURN(const FileInfo info, env->Stat(model_path));
    if (info.kind == FileInfo::Kind::kDirectory) {
      TARE_ASSIGN_OR_RETURN(const auto names, env->List(model_path));
      for (const std::string& name : names) {
        if (name.ends_with(".safetensors")) shards.push_back(JoinPath(model_path, name));
        if (name == "config.json") model_config = JoinPath(model_path, name);
      }
    } else if (model_path.ends_with(".safetensors")) {
      shards.push_back(model_path);
    } else {
      return Unsupported("{}: a model folder or a .safetensors file is needed",
                         Printable(model_path));
    }
    if (!IsUtf8(model_path))
      return InvalidArgument("{}: a path in UTF-8 is needed", Printable(model_path));
    recoverer.Set("weights.path", Json(model_path).dump(), "command line");
  }
  if (!shards.empty()) {
    TARE_RETURN_IF_ERROR(TakeSafetensors(env, shards[0], &recoverer, &out));
    out.notes.push_back("read " + BaseName(shards[0]) + " header");
  }
  for (const std::string& path : config_files) {
    Json json;
    if (path.ends_with(".toml")) {
      TARE_ASSIGN_OR_RETURN(const std::string bytes, env->ReadFile(path));
      if (bytes.size() > kMaxTaskFileBytes)
        return InvalidArgument("{}: too large", Printable(path));
      TARE_ASSIGN_OR_RETURN(const TaskConfig recipe, ParseRecipe(bytes, BaseName(path)));
      for (const auto& [key, value] : recipe.values) {
        recoverer.Set(key, value.text, value.origin.substr(value.origin.find(' ') + 1));
      }
    } else if (path.ends_with(".json")) {
      TARE_ASSIGN_OR_RETURN(json, ReadJsonFile(env, path));
      recoverer.Take(json, BaseName(path));
    } else {
      return Unsupported("{}: a configuration in .json or .toml is needed; convert it first",
                         Printable(path));
    }
    out.notes.push_back("read " + BaseName(path));
  }
  if (!model_config.empty()) {
    TARE_ASSIGN_OR_RETURN(const Json json, ReadJsonFile(env, model_config));
    recoverer.Take(json, "config.json");
    out.notes.push_back("read config.json");
    if (out.config.values.count("model.head_dim") == 0) {
      const uint64_t hidden =
          std::strtoull(std::string(out.config.Text("model.hidden_size")).c_str(), nullptr, 10);
      const uint64_t heads = std::strtoull(
          std::string(out.config.Text("model.num_attention_heads")).c_str(), nullptr, 10);
      if (heads != 0 && hidden % heads == 0) {
        recoverer.Set("model.head_dim", fmt::format("{}", hidden / heads),
                      "config.json hidden_size / num_attention_heads");
      }
    }
  }
  // One device has nothing to split.
  if (out.config.Text("hardware.count") == "1") {
    for (const char* axis : {"tp", "pp", "cp", "ep", "dp"}) {
      recoverer.Set(fmt::format("parallelism.{}", axis), "1",
                    "hardware.count = 1 (" + out.config.values["hardware.count"].origin + ")");
    }
  }
  return out;
}

std::vector<Question> OpenQuestions(const TaskConfig& config) {
  std::vector<Question> out;
  for (const KeySpec& spec : AllKeys()) {
    const std::string key(spec.key);
    if (spec.needed_by.empty() || config.values.count(key) != 0 || IsIrrelevant(config, key))
      continue;
    std::string looked;
    if (!spec.sources.empty()) {
      looked = fmt::format(" No file given holds {}.", spec.sources);
      std::replace(looked.begin(), looked.end(), '|', ',');
    }
    out.push_back(
        {key,
         fmt::format("What is {}? {}{} {} cannot start without it. Set it in task.toml (as "
                     "in `{}`), then `tare init --amend \"why\"`.",
                     key, spec.doc, looked, spec.needed_by, spec.example),
         std::string(spec.needed_by)});
  }
  return out;
}

}  // namespace tare::workflow
