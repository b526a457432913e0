// `tare model proxy SOURCE TARGET --layers 0,5`: a checkpoint of some layers of a real one, in
// their order, everything else as it is: same widths, same embedding, same head, same bytes.

#include <algorithm>
#include <filesystem>
#include <memory>

#include "base/env.h"
#include "tensor/checkpoint.h"
#include "tensor/safetensors.h"
#include "tensor/weight_hash.h"
#include "tools/command.h"

namespace tare {
namespace {

struct Options {
  std::string source, target;
  std::vector<int64_t> layers;
  bool json = false;
};

constexpr std::string_view kPrefix = "model.layers.";

// The layer number in "model.layers.12.mlp.up_proj.weight", and where it ends; -1: no layer's.
int64_t LayerOf(const std::string& name, size_t* end) {
  if (!name.starts_with(kPrefix)) return -1;
  *end = name.find('.', kPrefix.size());
  if (*end == std::string::npos) return -1;
  const std::string digits = name.substr(kPrefix.size(), *end - kPrefix.size());
  if (digits.empty() || digits.size() > 6 ||
      digits.find_first_not_of("0123456789") != std::string::npos) {
    return -1;
  }
  return std::stoll(digits);
}

Result<Json> Cut(const Options& o) {
  Env* env = Env::Real();
  TARE_ASSIGN_OR_RETURN(const Checkpoint source, Checkpoint::Open(o.source));
  Json config = source.config().raw;
  if (!config.is_object() || !config.contains("num_hidden_layers") ||
      !config["num_hidden_layers"].is_number_integer()) {
    return InvalidArgument("{}: a config.json with num_hidden_layers is needed", o.source);
  }
  const int64_t count = config["num_hidden_layers"].get<int64_t>();
  if (o.layers.empty()) return InvalidArgument("--layers: at least one layer");
  for (size_t i = 0; i < o.layers.size(); ++i) {
    if (o.layers[i] < 0 || o.layers[i] >= count || (i > 0 && o.layers[i] <= o.layers[i - 1])) {
      return InvalidArgument("--layers: ascending numbers from 0 to {}, {} is not", count - 1,
                             o.layers[i]);
    }
  }
  if (env->Exists(o.target)) return Error(Code::kAlreadyExists, "{} exists", o.target);
  config["num_hidden_layers"] = o.layers.size();
  // Lists with one entry a layer (layer_types, attention_sinks, ...) are cut alike. Lists of layer
  // numbers would have to be renumbered: they are refused rather than guessed at.
  for (auto& [key, value] : config.items()) {
    if (!value.is_array()) continue;
    if (static_cast<int64_t>(value.size()) == count) {
      Json kept = Json::array();
      for (const int64_t l : o.layers) kept.push_back(value[static_cast<size_t>(l)]);
      value = std::move(kept);
    } else if (key.find("layers") != std::string::npos && !value.empty()) {
      return Unsupported("{}: `{}` lists layers by number; a proxy of it is not built", o.source,
                         key);
    }
  }
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const std::string& name : source.names()) {
    size_t end = 0;
    const int64_t layer = LayerOf(name, &end);
    std::string as = name;
    if (layer >= 0) {
      const auto at = std::find(o.layers.begin(), o.layers.end(), layer);
      if (at == o.layers.end()) continue;
      as = fmt::format("{}{}{}", kPrefix, at - o.layers.begin(), name.substr(end));
    }
    TARE_ASSIGN_OR_RETURN(Tensor t, source.Get(name));
    tensors.emplace_back(std::move(as), std::move(t));
  }
  TARE_RETURN_IF_ERROR(env->CreateDirs(o.target));
  TARE_RETURN_IF_ERROR(
      WriteSafetensors(env, o.target + "/model.safetensors", tensors, {{"format", "pt"}}));
  TARE_RETURN_IF_ERROR(env->WriteFileAtomic(o.target + "/config.json", config.dump(2) + "\n"));
  for (const char* file : {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}) {
    const std::string from = o.source + "/" + file;
    if (!env->Exists(from)) continue;
    TARE_ASSIGN_OR_RETURN(const std::string bytes, env->ReadFile(from));
    TARE_RETURN_IF_ERROR(env->WriteFileAtomic(o.target + "/" + file, bytes));
  }
  TARE_ASSIGN_OR_RETURN(const Checkpoint made, Checkpoint::Open(o.target));
  TARE_ASSIGN_OR_RETURN(const WeightHash hash, HashWeights(made));
  return Json{{"schema", "tare.model.proxy/1"}, {"source_layers", o.layers},
              {"layers", o.layers.size()},      {"tensors", hash.tensors.size()},
              {"bytes", hash.total_bytes},      {"weight_hash", Hex(hash.digest)}};
}

int Run(const Options& o) {
  const Result<Json> made = Cut(o);
  if (!made.ok()) return ReportError(made.status());
  if (o.json) {
    fmt::print("{}\n", made->dump(1));
  } else {
    fmt::print("{}: {} layers, weight hash {}\n", o.target, o.layers.size(),
               made->at("weight_hash").get<std::string>());
  }
  return 0;
}

}  // namespace

TARE_COMMAND(model_proxy, [](CLI::App& root) {
  CLI::App* group = Group(root, "model", "checkpoints: import, inspect, hash");
  CLI::App* app = group->add_subcommand("proxy", "a small checkpoint of some layers of a real one");
  auto o = std::make_shared<Options>();
  app->add_option("source", o->source, "a Hugging Face directory")->required();
  app->add_option("target", o->target, "a directory that does not exist yet")->required();
  app->add_option("--layers", o->layers, "layers to keep, ascending")->required()->delimiter(',');
  app->add_flag("--json", o->json, "for machines");
  app->callback([o] { SetExit(Run(*o)); });
});

}  // namespace tare
