#include "models/load_tokenizer.h"

#include "base/json.h"

namespace tare::models {

Result<Tokenizer> LoadTokenizer(Env* env, const Checkpoint& checkpoint) {
  const TokenizerSource& source = checkpoint.tokenizer();
  if (!source.tokenizer_json_path.empty()) {
    TARE_ASSIGN_OR_RETURN(const auto file, env->OpenReadable(source.tokenizer_json_path));
    auto tokenizer = Tokenizer::FromJson(file->bytes());
    if (!tokenizer.ok()) return tokenizer.status().Annotate(source.tokenizer_json_path);
    return tokenizer;
  }
  if (source.gguf_model.empty()) {
    return Error(Code::kNotFound, "{} has no tokenizer.json; pass token IDs", checkpoint.path());
  }
  GgufVocabulary vocabulary;
  vocabulary.model = source.gguf_model;
  vocabulary.pre = source.gguf_pre;
  vocabulary.tokens = source.tokens;
  vocabulary.token_type = source.token_types;
  vocabulary.merges = source.merges;
  vocabulary.bos = source.bos;
  vocabulary.eos = source.eos;
  vocabulary.add_bos = source.add_bos;
  auto tokenizer = Tokenizer::FromGguf(vocabulary);
  if (!tokenizer.ok()) return tokenizer.status().Annotate(checkpoint.path());
  return tokenizer;
}

Result<std::string> LoadChatTemplate(Env* env, const Checkpoint& checkpoint) {
  const TokenizerSource& source = checkpoint.tokenizer();
  if (!source.chat_template.empty() || source.tokenizer_config_json_path.empty())
    return source.chat_template;
  TARE_ASSIGN_OR_RETURN(const std::string text, env->ReadFile(source.tokenizer_config_json_path));
  auto config = ParseJson(text);
  if (!config.ok()) return config.status().Annotate(source.tokenizer_config_json_path);
  const auto it = config->find("chat_template");
  if (!config->is_object() || it == config->end() || it->is_null()) return std::string();
  if (it->is_string()) return it->get<std::string>();
  // A list of named templates: the one called "default" is for chats.
  if (it->is_array()) {
    for (const Json& item : *it) {
      if (item.is_object() && item.value("name", "") == "default" && item.contains("template") &&
          item["template"].is_string()) {
        return item["template"].get<std::string>();
      }
    }
  }
  return InvalidArgument("{}: chat_template is neither a string nor a list with a default",
                         source.tokenizer_config_json_path);
}

}  // namespace tare::models
