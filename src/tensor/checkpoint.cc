#include "tensor/checkpoint.h"

#include <algorithm>
#include <cstring>

#include "tensor/convert.h"
#include "tensor/gguf_checkpoint.h"
#include "tensor/safetensors.h"

namespace tare {
namespace {

constexpr std::string_view kHead = "lm_head.weight";
constexpr std::string_view kEmbedding = "model.embed_tokens.weight";
constexpr const char* kIndexName = "model.safetensors.index.json";

// The weight map of an index: tensor name to file name, as it stands.
Result<std::vector<std::pair<std::string, std::string>>> ReadIndex(Env* env,
                                                                   const std::string& path) {
  TARE_ASSIGN_OR_RETURN(const std::string text, env->ReadFile(path));
  const auto index = ParseJson(text);
  if (!index.ok()) return DataLoss("{}: {}", Printable(path), index.status().message());
  const auto map = index->is_object() ? index->find("weight_map") : index->end();
  if (!index->is_object() || map == index->end() || !map->is_object()) {
    return DataLoss("{}: has no object weight_map", Printable(path));
  }
  std::vector<std::pair<std::string, std::string>> out;
  for (const auto& [name, file] : map->items()) {
    const bool text_value = file.is_string();
    const std::string shard = text_value ? file.get<std::string>() : "";
    // A shard lies beside its index: a path could lead anywhere.
    if (!text_value || !shard.ends_with(".safetensors") || shard.find('/') != std::string::npos ||
        shard.find('\0') != std::string::npos) {
      return DataLoss(
          "{}: weight_map[\"{}\"] is {}; a file name NAME.safetensors in the same directory "
          "expected",
          Printable(path), Printable(name), Printable(file.dump().substr(0, 200)));
    }
    out.emplace_back(name, shard);
  }
  return out;
}

}  // namespace

struct Checkpoint::State {
  struct Item {
    Info info;
    size_t shard = 0;  // safetensors
    GgufMapped gguf;   // GGUF
  };

  CheckpointOptions options;
  Format format = Format::kSafetensors;
  std::string path;
  CheckpointConfig config;
  TokenizerSource tokenizer;
  std::vector<SafetensorsFile> shards;
  std::optional<GgufFile> gguf;
  std::vector<Item> items;  // sorted by name
  std::vector<std::string> names;

  Status OpenSafetensors(const std::string& file) {
    TARE_ASSIGN_OR_RETURN(auto shard, SafetensorsFile::Open(options.env, file));
    for (const SafetensorsEntry& e : shard.entries()) {
      Item item;
      item.info = {e.name, e.dtype, e.shape, std::string(SafetensorsName(e.dtype)), file};
      item.shard = shards.size();
      items.push_back(std::move(item));
    }
    shards.push_back(std::move(shard));
    return Ok();
  }

  Status OpenSharded(const std::string& dir) {
    const std::string index = dir + "/" + kIndexName;
    TARE_ASSIGN_OR_RETURN(auto map, ReadIndex(options.env, index));
    std::vector<std::string> files;
    files.reserve(map.size());
    for (const auto& entry : map) files.push_back(entry.second);
    std::sort(files.begin(), files.end());
    files.erase(std::unique(files.begin(), files.end()), files.end());
    for (const std::string& file : files) {
      if (Status s = OpenSafetensors(fmt::format("{}/{}", dir, file)); !s.ok()) {
        return s.code() == Code::kNotFound ? DataLoss("{} names the shard {}, which is absent",
                                                      Printable(index), Printable(file))
                                           : s;
      }
    }
    // The index and the shards must say the same, both ways.
    std::sort(map.begin(), map.end());
    for (const Item& item : items) {
      const auto it =
          std::lower_bound(map.begin(), map.end(), item.info.name,
                           [](const auto& a, const std::string& n) { return a.first < n; });
      if (it == map.end() || it->first != item.info.name) {
        return DataLoss("{}: {} holds tensor \"{}\", which the index forgets", Printable(index),
                        Printable(item.info.file), Printable(item.info.name));
      }
      if (dir + "/" + it->second != item.info.file) {
        return DataLoss("{}: tensor \"{}\" is said to be in {}, and is also in {}",
                        Printable(index), Printable(item.info.name), Printable(it->second),
                        Printable(item.info.file));
      }
    }
    if (items.size() != map.size()) {
      for (const auto& entry : map) {
        const bool found = std::any_of(items.begin(), items.end(),
                                       [&](const Item& i) { return i.info.name == entry.first; });
        if (!found) {
          return DataLoss("{}: tensor \"{}\" is said to be in {}, and is not", Printable(index),
                          Printable(entry.first), Printable(entry.second));
        }
      }
    }
    return Ok();
  }

  Status OpenDirectory() {
    format = Format::kHuggingFace;
    Env* env = options.env;
    const auto read_if_there = [&](const char* name, std::string* out) -> Status {
      auto text = env->ReadFile(path + "/" + name);
      if (!text.ok()) return text.status().code() == Code::kNotFound ? Ok() : text.status();
      *out = std::move(text).value();
      return Ok();
    };
    TARE_ASSIGN_OR_RETURN(const std::string config_json, env->ReadFile(path + "/config.json"));
    std::string generation_json;
    TARE_RETURN_IF_ERROR(read_if_there("generation_config.json", &generation_json));
    auto parsed = ParseCheckpointConfig(config_json, generation_json);
    if (!parsed.ok()) return parsed.status().Annotate(Printable(path));
    config = std::move(parsed).value();
    for (const auto& [name, out] :
         {std::pair{"tokenizer.json", &tokenizer.tokenizer_json_path},
          std::pair{"tokenizer_config.json", &tokenizer.tokenizer_config_json_path}}) {
      if (env->Exists(path + "/" + name)) *out = path + "/" + name;
    }
    const std::string single = path + "/model.safetensors";
    const bool has_single = env->Exists(single);
    const bool has_index = env->Exists(path + "/" + kIndexName);
    if (has_single && has_index) {
      return DataLoss(
          "{} has both model.safetensors and {}; which one is meant is unknown: remove one",
          Printable(path), kIndexName);
    }
    if (has_single) return OpenSafetensors(single);
    if (has_index) return OpenSharded(path);
    if (env->Exists(path + "/pytorch_model.bin") ||
        env->Exists(path + "/pytorch_model.bin.index.json")) {
      return Unsupported(
          "{}: pytorch_model.bin is a pickle, which runs code when read; save the model "
          "as safetensors",
          Printable(path));
    }
    return Error(Code::kNotFound, "{}: neither model.safetensors nor {} is there", Printable(path),
                 kIndexName);
  }

  Status OpenGguf() {
    format = Format::kGguf;
    TARE_ASSIGN_OR_RETURN(gguf, GgufFile::Open(options.env, path));
    TARE_ASSIGN_OR_RETURN(const Json config_json, GgufConfig(*gguf));
    TARE_ASSIGN_OR_RETURN(config, ParseCheckpointConfig(config_json.dump(), ""));
    config.dtype = options.gguf_dtype;
    config.raw["torch_dtype"] = options.gguf_dtype == DType::kBF16 ? "bfloat16" : "float32";
    TARE_ASSIGN_OR_RETURN(tokenizer, GgufTokenizer(*gguf));
    // Mapped from the file's final place: entries point into it.
    TARE_ASSIGN_OR_RETURN(auto mapped, MapGgufTensors(*gguf));
    for (GgufMapped& m : mapped) {
      Item item;
      item.info = {m.name, options.gguf_dtype, m.shape, std::string(m.entry->type->name), path};
      item.gguf = std::move(m);
      items.push_back(std::move(item));
    }
    return Ok();
  }

  Status Open() {
    if (options.gguf_dtype != DType::kBF16 && options.gguf_dtype != DType::kF32) {
      return InvalidArgument("GGUF tensors become bf16 or f32, not {}",
                             DTypeName(options.gguf_dtype));
    }
    if (options.env->List(path).ok()) {
      TARE_RETURN_IF_ERROR(OpenDirectory());
    } else {
      TARE_ASSIGN_OR_RETURN(const auto file, options.env->OpenReadable(path));
      const bool is_gguf = file->bytes().substr(0, 4) == "GGUF" || path.ends_with(".gguf");
      TARE_RETURN_IF_ERROR(is_gguf ? OpenGguf() : OpenSafetensors(path));
    }
    std::sort(items.begin(), items.end(),
              [](const Item& a, const Item& b) { return a.info.name < b.info.name; });
    for (const Item& item : items) {
      if (!names.empty() && names.back() == item.info.name) {
        return DataLoss("{}: two tensors are named \"{}\"", Printable(path),
                        Printable(item.info.name));
      }
      names.push_back(item.info.name);
    }
    return Ok();
  }

  const Item* Find(std::string_view name) const {
    const auto it =
        std::lower_bound(items.begin(), items.end(), name,
                         [](const Item& a, std::string_view n) { return a.info.name < n; });
    return it == items.end() || it->info.name != name ? nullptr : &*it;
  }

  Result<Tensor> Get(const Item& item) const {
    if (format != Format::kGguf) return shards[item.shard].Get(item.info.name);
    TARE_ASSIGN_OR_RETURN(const Tensor f32, ReadGgufMapped(*gguf, item.gguf));
    return Convert(f32, options.gguf_dtype);
  }
};

Checkpoint::Checkpoint(std::shared_ptr<State> state) : state_(std::move(state)) {}

Result<Checkpoint> Checkpoint::Open(const std::string& path, const CheckpointOptions& options) {
  auto state = std::make_shared<State>();
  state->options = options;
  state->path = path;
  while (state->path.size() > 1 && state->path.back() == '/') state->path.pop_back();
  TARE_RETURN_IF_ERROR(state->Open());
  return Checkpoint(std::move(state));
}

Checkpoint::Format Checkpoint::format() const { return state_->format; }
const std::string& Checkpoint::path() const { return state_->path; }
const CheckpointConfig& Checkpoint::config() const { return state_->config; }
const TokenizerSource& Checkpoint::tokenizer() const { return state_->tokenizer; }
const std::vector<std::string>& Checkpoint::names() const { return state_->names; }

const Checkpoint::Info* Checkpoint::Find(std::string_view name) const {
  const State::Item* item = state_->Find(name);
  return item == nullptr ? nullptr : &item->info;
}

Result<Tensor> Checkpoint::Get(std::string_view name) const {
  const State::Item* item = state_->Find(name);
  if (item == nullptr && name == kHead && state_->config.tie_word_embeddings) {
    item = state_->Find(kEmbedding);
  }
  if (item == nullptr) {
    return Error(Code::kNotFound, "{} has no tensor \"{}\"", Printable(state_->path),
                 Printable(name));
  }
  return state_->Get(*item);
}

Result<std::vector<std::string>> Checkpoint::CanonicalNames() const {
  std::vector<std::string> names = state_->names;
  const State::Item* head = state_->Find(kHead);
  const State::Item* embedding = state_->Find(kEmbedding);
  if (!state_->config.tie_word_embeddings || head == nullptr || embedding == nullptr) return names;
  TARE_ASSIGN_OR_RETURN(const Tensor h, state_->Get(*head));
  TARE_ASSIGN_OR_RETURN(const Tensor e, state_->Get(*embedding));
  if (h.dtype() != e.dtype() || h.shape() != e.shape() ||
      (h.size_bytes() > 0 &&
       std::memcmp(h.data(), e.data(), static_cast<size_t>(h.size_bytes())) != 0)) {
    return DataLoss(
        "{}: the config ties lm_head.weight to model.embed_tokens.weight, but both are stored "
        "and differ",
        Printable(state_->path));
  }
  names.erase(std::find(names.begin(), names.end(), kHead));
  return names;
}

std::string_view CheckpointFormatName(Checkpoint::Format format) {
  switch (format) {
    case Checkpoint::Format::kHuggingFace:
      return "hugging-face";
    case Checkpoint::Format::kSafetensors:
      return "safetensors";
    case Checkpoint::Format::kGguf:
      return "gguf";
  }
  return "unknown";
}

}  // namespace tare
