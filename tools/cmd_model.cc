// `tare model import | inspect | hash`: checkpoints of any format (docs/formats/weight_hash.md,
// docs/formats/import.md).

#include <cstdio>
#include <map>
#include <memory>

#include "base/json.h"
#include "tensor/checkpoint.h"
#include "tensor/import.h"
#include "tensor/weight_hash.h"
#include "tools/command.h"

namespace tare {
namespace {

struct Options {
  std::string source;
  std::string target;
  std::string dtype;
  int threads = 0;
  int64_t shard_mib = 5 << 10;
  bool sha256 = false;
  bool tensors = false;
  bool json = false;
};

Result<std::optional<DType>> FloatDType(const std::string& name) {
  if (name.empty()) return std::optional<DType>();
  const auto dtype = ParseDType(name);
  if (!dtype || !IsFloat(*dtype)) {
    return InvalidArgument("--dtype {}: f64, f32, f16, bf16, e4m3 or e5m2 expected",
                           Printable(name));
  }
  return dtype;
}

// GGUF is dequantised straight to the dtype that is asked for, where it can be: no double rounding.
Result<Checkpoint> OpenSource(const Options& options, std::optional<DType> dtype) {
  CheckpointOptions open;
  if (dtype) open.gguf_dtype = *dtype == DType::kBF16 ? DType::kBF16 : DType::kF32;
  return Checkpoint::Open(options.source, open);
}

Json ItemJson(const WeightHashItem& item) {
  Json j = Json::object();
  j["name"] = item.name;
  j["dtype"] = std::string(DTypeName(item.dtype));
  j["shape"] = item.shape;
  j["digest"] = Hex(item.digest);
  if (item.plain_sha256) j["sha256"] = Hex(*item.plain_sha256);
  return j;
}

Status Import(const Options& options) {
  TARE_ASSIGN_OR_RETURN(const auto dtype, FloatDType(options.dtype));
  TARE_ASSIGN_OR_RETURN(const Checkpoint source, OpenSource(options, dtype));
  ThreadPool pool(options.threads);
  ImportOptions import;
  import.pool = &pool;
  import.max_shard_bytes = options.shard_mib << 20;
  if (dtype) import.dtype = dtype;
  TARE_ASSIGN_OR_RETURN(const ImportReport report,
                        ImportCheckpoint(source, options.target, import));
  for (const std::string& note : report.notes)
    std::fprintf(stderr, "note: %s\n", Printable(note).c_str());
  if (options.json) {
    Json j = Json::object();
    j["schema"] = "tare.model.import/1";
    j["weight_hash"] = Hex(report.hash.digest);
    j["tensors"] = report.hash.tensors.size();
    j["bytes"] = report.hash.total_bytes;
    j["files"] = report.files;
    j["notes"] = report.notes;
    fmt::print("{}\n", j.dump(1));
  } else {
    fmt::print("{}: {} tensors, {} bytes, weight hash {}\n", options.target,
               report.hash.tensors.size(), report.hash.total_bytes, Hex(report.hash.digest));
  }
  return Ok();
}

Status Hash(const Options& options) {
  TARE_ASSIGN_OR_RETURN(const auto dtype, FloatDType(options.dtype));
  if (dtype && *dtype != DType::kBF16 && *dtype != DType::kF32) {
    return InvalidArgument("--dtype {}: bf16 or f32 expected (what a GGUF file is read as)",
                           options.dtype);
  }
  TARE_ASSIGN_OR_RETURN(const Checkpoint source, OpenSource(options, dtype));
  ThreadPool pool(options.threads);
  TARE_ASSIGN_OR_RETURN(const WeightHash hash, HashWeights(source, &pool, options.sha256));
  if (options.json) {
    Json j = Json::object();
    j["schema"] = "tare.model.hash/1";
    j["format"] = std::string(CheckpointFormatName(source.format()));
    j["weight_hash"] = Hex(hash.digest);
    j["bytes"] = hash.total_bytes;
    j["tensors"] = Json::array();
    for (const WeightHashItem& item : hash.tensors) j["tensors"].push_back(ItemJson(item));
    fmt::print("{}\n", j.dump(1));
    return Ok();
  }
  if (options.tensors || options.sha256) {
    for (const WeightHashItem& item : hash.tensors) {
      fmt::print("{}  {:5} {:16} {}\n", Hex(item.plain_sha256.value_or(item.digest)),
                 DTypeName(item.dtype), ShapeToString(item.shape), Printable(item.name));
    }
  }
  fmt::print("{}\n", Hex(hash.digest));
  return Ok();
}

Status Inspect(const Options& options) {
  TARE_ASSIGN_OR_RETURN(const Checkpoint source, OpenSource(options, {}));
  std::map<std::string, std::pair<int64_t, int64_t>> kinds;  // stored as: tensors, elements
  int64_t parameters = 0;
  for (const std::string& name : source.names()) {
    const Checkpoint::Info& info = *source.Find(name);
    const int64_t n = ElementCount(info.shape).value();
    kinds[info.stored_as].first += 1;
    kinds[info.stored_as].second += n;
    parameters += n;
  }
  const TokenizerSource& t = source.tokenizer();
  const std::string tokenizer = !t.tokenizer_json_path.empty() ? "tokenizer.json"
                                : !t.gguf_model.empty()
                                    ? fmt::format("{} ({}), {} tokens, {} merges", t.gguf_model,
                                                  t.gguf_pre, t.tokens.size(), t.merges.size())
                                    : "none";
  if (options.json) {
    Json j = Json::object();
    j["schema"] = "tare.model.inspect/1";
    j["format"] = std::string(CheckpointFormatName(source.format()));
    j["parameters"] = parameters;
    j["config"] = source.config().raw;
    j["generation_config"] = source.config().generation;
    j["tokenizer"] = tokenizer;
    j["tensors"] = Json::array();
    for (const std::string& name : source.names()) {
      const Checkpoint::Info& info = *source.Find(name);
      Json item = Json::object();
      item["name"] = name;
      item["dtype"] = std::string(DTypeName(info.dtype));
      item["shape"] = info.shape;
      item["stored_as"] = info.stored_as;
      item["file"] = info.file;
      j["tensors"].push_back(std::move(item));
    }
    fmt::print("{}\n", j.dump(1, ' ', false, Json::error_handler_t::replace));
    return Ok();
  }
  fmt::print("{}: {}, {} tensors, {} parameters\n", Printable(options.source),
             CheckpointFormatName(source.format()), source.names().size(), parameters);
  for (const auto& [kind, count] : kinds) {
    fmt::print("  stored as {:6} {:6} tensors {:14} elements\n", kind, count.first, count.second);
  }
  fmt::print("  model type {}, tied embeddings {}, tokenizer {}\n",
             source.config().model_type.empty() ? "unknown" : Printable(source.config().model_type),
             source.config().tie_word_embeddings ? "yes" : "no", Printable(tokenizer));
  if (options.tensors) {
    for (const std::string& name : source.names()) {
      const Checkpoint::Info& info = *source.Find(name);
      fmt::print("  {:5} {:6} {:16} {}\n", DTypeName(info.dtype), info.stored_as,
                 ShapeToString(info.shape), Printable(name));
    }
  }
  return Ok();
}

void Add(CLI::App* group, const char* name, const char* text, Status (*run)(const Options&),
         const std::function<void(CLI::App*, Options*)>& more) {
  CLI::App* app = group->add_subcommand(name, text);
  auto options = std::make_shared<Options>();
  app->add_option("source", options->source,
                  "a Hugging Face directory, a .safetensors file or a .gguf file")
      ->required();
  app->add_flag("--json", options->json, "for machines");
  more(app, options.get());
  app->callback([options, run] {
    const Status status = run(*options);
    SetExit(status.ok() ? 0 : ReportError(status));
  });
}

}  // namespace
}  // namespace tare

TARE_COMMAND(model, [](CLI::App& root) {
  using tare::Options;
  CLI::App* group = tare::Group(root, "model", "checkpoints: import, inspect, hash");
  tare::Add(
      group, "import", "any checkpoint into a Hugging Face directory that stands alone",
      tare::Import, [](CLI::App* app, Options* o) {
        app->add_option("target", o->target, "a directory that does not exist yet")->required();
        app->add_option("--dtype", o->dtype,
                        "of every float tensor; default: as stored, bf16 for GGUF");
        app->add_option("--shard-mib", o->shard_mib, "start a new shard past this size")
            ->check(CLI::Range(int64_t{1}, int64_t{1} << 30));
        app->add_option("--threads", o->threads, "0: all")->check(CLI::Range(0, 1024));
      });
  tare::Add(group, "inspect", "what a checkpoint holds", tare::Inspect,
            [](CLI::App* app, Options* o) { app->add_flag("--tensors", o->tensors, "list them"); });
  tare::Add(group, "hash", "the canonical weight hash, the same whatever the format or sharding",
            tare::Hash, [](CLI::App* app, Options* o) {
              app->add_option("--dtype", o->dtype,
                              "what a GGUF file is read as: bf16 (default) or f32");
              app->add_flag("--tensors", o->tensors, "the digest of every tensor too");
              app->add_flag("--sha256", o->sha256, "plain SHA-256 of every tensor's bytes too");
              app->add_option("--threads", o->threads, "0: all")->check(CLI::Range(0, 1024));
            });
});
