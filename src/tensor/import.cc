#include "tensor/import.h"

#include <algorithm>
#include <map>

#include "tensor/convert.h"
#include "tensor/digest.h"
#include "tensor/safetensors.h"

namespace tare {
namespace {

// Small files that a directory carries beside its weights.
constexpr const char* kCarried[] = {"generation_config.json",
                                    "tokenizer.json",
                                    "tokenizer_config.json",
                                    "special_tokens_map.json",
                                    "added_tokens.json",
                                    "vocab.json",
                                    "merges.txt",
                                    "chat_template.jinja",
                                    "chat_template.json"};

DType TargetDType(DType from, const ImportOptions& options) {
  return options.dtype && IsFloat(from) ? *options.dtype : from;
}

std::string TorchName(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return "float64";
    case DType::kF32:
      return "float32";
    case DType::kF16:
      return "float16";
    case DType::kBF16:
      return "bfloat16";
    default:
      return "";
  }
}

class Importer {
 public:
  Importer(const Checkpoint& source, std::string dir, const ImportOptions& options)
      : source_(source), dir_(std::move(dir)), options_(options) {}

  Status Run() {
    TARE_ASSIGN_OR_RETURN(names_, source_.CanonicalNames());
    TARE_RETURN_IF_ERROR(CheckNames());
    TARE_RETURN_IF_ERROR(options_.env->CreateDir(dir_));
    TARE_RETURN_IF_ERROR(WriteWeights());
    TARE_RETURN_IF_ERROR(WriteConfig());
    if (source_.format() == Checkpoint::Format::kGguf) {
      TARE_RETURN_IF_ERROR(WriteGgufTokenizer());
    } else if (source_.format() == Checkpoint::Format::kHuggingFace) {
      TARE_RETURN_IF_ERROR(CopyFiles());
    } else {
      report_.notes.push_back("no config.json and no tokenizer: the source is weights alone");
    }
    return VerifyAndRecord();
  }

  ImportReport TakeReport() { return std::move(report_); }

 private:
  // Tensors of a GGUF file that have no Hugging Face name would be lost or misread by its users.
  Status CheckNames() const {
    if (source_.format() != Checkpoint::Format::kGguf) return Ok();
    const Json& raw = source_.config().raw;
    if (raw.contains("gguf_architecture")) {
      return Unsupported("{}: architecture {}; imported are llama, qwen2, qwen3, qwen3moe",
                         Printable(source_.path()), Printable(raw["gguf_architecture"].dump()));
    }
    std::string strange;
    for (const std::string& name : names_) {
      if (!name.starts_with("model.") && !name.starts_with("lm_head.")) {
        strange += fmt::format("{}\"{}\"", strange.empty() ? "" : ", ", Printable(name));
      }
    }
    if (strange.empty()) return Ok();
    return Unsupported("{}: no Hugging Face name for {}", Printable(source_.path()), strange);
  }

  Status WriteJson(const std::string& name, const Json& json) {
    report_.files.push_back(name);
    return options_.env->WriteFileAtomic(dir_ + "/" + name, json.dump(2) + "\n");
  }

  Status WriteWeights() {
    std::vector<std::vector<SafetensorsSpec>> shards(1);
    int64_t in_shard = 0;
    int64_t total = 0;
    for (const std::string& name : names_) {
      const Checkpoint::Info* info = source_.Find(name);
      const DType dtype = TargetDType(info->dtype, options_);
      TARE_ASSIGN_OR_RETURN(const int64_t elements, ElementCount(info->shape));
      const int64_t size = elements * SizeOf(dtype);
      if (in_shard > 0 && in_shard + size > options_.max_shard_bytes) {
        shards.emplace_back();
        in_shard = 0;
      }
      in_shard += size;
      total += size;
      shards.back().push_back({name, dtype, info->shape});
    }
    const auto produce = [&](const SafetensorsSpec& spec) -> Result<Tensor> {
      TARE_ASSIGN_OR_RETURN(const Tensor t, source_.Get(spec.name));
      auto converted = Convert(t, spec.dtype, Fp8Overflow::kSaturate, options_.pool);
      if (!converted.ok()) return converted.status().Annotate(Printable(spec.name));
      meant_.push_back(
          {spec.name, spec.dtype, spec.shape, TensorDigest(*converted, options_.pool), {}});
      return converted;
    };
    Json map = Json::object();
    for (size_t i = 0; i < shards.size(); ++i) {
      const std::string file = shards.size() == 1 ? "model.safetensors"
                                                  : fmt::format("model-{:05}-of-{:05}.safetensors",
                                                                i + 1, shards.size());
      for (const SafetensorsSpec& spec : shards[i]) map[spec.name] = file;
      report_.files.push_back(file);
      TARE_RETURN_IF_ERROR(WriteSafetensors(options_.env, dir_ + "/" + file, std::move(shards[i]),
                                            {{"format", "pt"}}, produce));
    }
    if (shards.size() == 1) return Ok();
    Json index = Json::object();
    index["metadata"]["total_size"] = total;
    index["weight_map"] = std::move(map);
    return WriteJson("model.safetensors.index.json", index);
  }

  Status WriteConfig() {
    Json config = source_.config().raw;
    if (options_.dtype && config.is_object()) {
      config.erase("dtype");
      const std::string name = TorchName(*options_.dtype);
      if (!name.empty()) config["torch_dtype"] = name;
    }
    return WriteJson("config.json", config);
  }

  Status WriteGgufTokenizer() {
    const TokenizerSource& t = source_.tokenizer();
    if (t.gguf_model.empty()) {
      report_.notes.push_back("no tokenizer: the file holds none");
      return Ok();
    }
    const auto json = TokenizerJsonFromGguf(t);
    if (!json.ok()) {
      if (json.status().code() != Code::kUnsupported) return json.status();
      report_.notes.push_back("no tokenizer: " + json.status().message());
      return Ok();
    }
    TARE_RETURN_IF_ERROR(WriteJson("tokenizer.json", *json));
    Json config = Json::object();
    config["tokenizer_class"] = "PreTrainedTokenizerFast";
    config["add_bos_token"] = t.add_bos;
    const auto token = [&](const char* key, std::optional<int32_t> id) {
      if (id && static_cast<size_t>(*id) < t.tokens.size())
        config[key] = t.tokens[static_cast<size_t>(*id)];
    };
    token("bos_token", t.bos);
    token("eos_token", t.eos);
    if (!t.chat_template.empty()) config["chat_template"] = t.chat_template;
    return WriteJson("tokenizer_config.json", config);
  }

  Status CopyFiles() {
    for (const char* name : kCarried) {
      const auto bytes = options_.env->ReadFile(source_.path() + "/" + name);
      if (!bytes.ok()) {
        if (bytes.status().code() == Code::kNotFound) continue;
        return bytes.status();
      }
      report_.files.push_back(name);
      TARE_RETURN_IF_ERROR(options_.env->WriteFileAtomic(dir_ + "/" + name, *bytes));
    }
    return Ok();
  }

  // The directory is opened again and hashed from its files; the hash must be that of the values
  // that were to be written.
  Status VerifyAndRecord() {
    CheckpointOptions open;
    open.env = options_.env;
    TARE_ASSIGN_OR_RETURN(const Checkpoint written, Checkpoint::Open(dir_, open));
    TARE_ASSIGN_OR_RETURN(report_.hash, HashWeights(written, options_.pool));
    TARE_ASSIGN_OR_RETURN(const Sha256Digest meant, HashOfItems(std::move(meant_)));
    if (report_.hash.digest != meant) {
      return DataLoss("{}: read back, the weights have hash {}; {} was written", Printable(dir_),
                      Hex(report_.hash.digest), Hex(meant));
    }
    Sha256Digest source_hash = meant;
    if (options_.dtype) {
      TARE_ASSIGN_OR_RETURN(const WeightHash source, HashWeights(source_, options_.pool));
      source_hash = source.digest;
    }
    std::map<std::pair<std::string, std::string>, int64_t> kinds;
    for (const std::string& name : names_) {
      const Checkpoint::Info* info = source_.Find(name);
      ++kinds[{info->stored_as, std::string(DTypeName(written.Find(name)->dtype))}];
    }
    Json record = Json::object();
    record["schema"] = "tare.import/1";
    const size_t slash = source_.path().find_last_of('/');
    record["source"]["name"] =
        Printable(slash == std::string::npos ? source_.path() : source_.path().substr(slash + 1));
    record["source"]["format"] = std::string(CheckpointFormatName(source_.format()));
    record["source"]["weight_hash"] = Hex(source_hash);
    if (source_.format() != Checkpoint::Format::kHuggingFace) {
      TARE_ASSIGN_OR_RETURN(const auto file, options_.env->OpenReadable(source_.path()));
      record["source"]["sha256"] = Hex(Sha256Of(file->bytes()));
    }
    record["conversions"] = Json::array();
    for (const auto& [kind, count] : kinds) {
      Json c = Json::object();
      c["stored_as"] = kind.first;
      c["written_as"] = kind.second;
      c["tensors"] = count;
      record["conversions"].push_back(std::move(c));
    }
    record["rounding"] = "nearest even, once, from the exact f32 value";
    record["weight_hash"] = Hex(report_.hash.digest);
    record["notes"] = report_.notes;
    return WriteJson("import.json", record);
  }

  const Checkpoint& source_;
  std::string dir_;
  const ImportOptions& options_;
  std::vector<std::string> names_;
  std::vector<WeightHashItem> meant_;  // of the values as they were handed to the writer
  ImportReport report_;
};

}  // namespace

Result<ImportReport> ImportCheckpoint(const Checkpoint& source, const std::string& dst,
                                      const ImportOptions& options) {
  std::string target = dst;
  while (target.size() > 1 && target.back() == '/') target.pop_back();
  if (options.env->Exists(target)) {
    return Error(Code::kAlreadyExists, "{} exists; name a directory that does not",
                 Printable(target));
  }
  const std::string partial = target + ".importing";
  if (options.env->Exists(partial)) {
    return Error(Code::kAlreadyExists,
                 "{} is left over from an import that was cut short; remove it",
                 Printable(partial));
  }
  const size_t slash = target.find_last_of('/');
  const std::string parent = slash == std::string::npos ? "."
                             : slash == 0               ? "/"
                                                        : target.substr(0, slash);
  TARE_RETURN_IF_ERROR(options.env->CreateDirs(parent));
  Importer importer(source, partial, options);
  TARE_RETURN_IF_ERROR(importer.Run());
  TARE_RETURN_IF_ERROR(options.env->SyncDir(partial));
  TARE_RETURN_IF_ERROR(options.env->Rename(partial, target));
  TARE_RETURN_IF_ERROR(options.env->SyncDir(parent));
  return importer.TakeReport();
}

}  // namespace tare
