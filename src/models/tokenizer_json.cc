// Reads a Hugging Face tokenizer.json: model BPE, pre-tokenizers Split, Digits, ByteLevel and
// Sequence, normaliser none or NFC, decoder ByteLevel, post-processor ByteLevel or a template that
// puts special tokens around. Every other value is refused with its key.

#include <string>
#include <utility>

#include "base/json.h"
#include "models/tokenizer_impl.h"

namespace tare::models {
namespace {

Status Bad(std::string_view key, std::string_view what) {
  return InvalidArgument("tokenizer.json: {} {}", key, what);
}

const Json* Member(const Json& object, const char* key) {
  if (!object.is_object()) return nullptr;
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

std::string TypeOf(const Json& object) {
  const Json* type = Member(object, "type");
  return type != nullptr && type->is_string() ? type->get<std::string>() : std::string();
}

// A boolean that must be there, or may be absent with a default.
Result<bool> Flag(const Json& object, const char* key, bool fallback, std::string_view where) {
  const Json* value = Member(object, key);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) return Bad(fmt::format("{}.{}", where, key), "is not true or false");
  return value->get<bool>();
}

Result<int32_t> TokenId(const Json& value, const std::string& key) {
  if (!value.is_number_integer() || value.get<int64_t>() < 0 ||
      value.get<int64_t>() >= static_cast<int64_t>(kMaxVocabulary)) {
    return Bad(key, fmt::format("is {}; a token id from 0 to {} is expected", value.dump(),
                                kMaxVocabulary - 1));
  }
  return static_cast<int32_t>(value.get<int64_t>());
}

Status ReadNormalizer(const Json& root, Tokenizer::Impl* impl) {
  const Json* normalizer = Member(root, "normalizer");
  if (normalizer == nullptr) return Ok();
  const std::string type = TypeOf(*normalizer);
  if (type == "NFC") {
    impl->nfc = true;
    return Ok();
  }
  if (type == "Sequence") {
    const Json* list = Member(*normalizer, "normalizers");
    if (list != nullptr && list->is_array() && list->empty()) return Ok();
  }
  return Unsupported("tokenizer.json: normalizer \"{}\"; none and NFC are known", type);
}

// Collects split rules and whether ByteLevel came last.
Status ReadPreTokenizer(const Json& node, int depth, std::vector<SplitRule>* rules,
                        bool* byte_level) {
  if (depth > 4) return Bad("pre_tokenizer", "is nested too deeply");
  const std::string type = TypeOf(node);
  if (*byte_level)
    return Unsupported("tokenizer.json: pre_tokenizer has \"{}\" after ByteLevel", type);
  if (type == "Sequence") {
    const Json* list = Member(node, "pretokenizers");
    if (list == nullptr || !list->is_array())
      return Bad("pre_tokenizer.pretokenizers", "is not a list");
    for (const Json& item : *list) {
      TARE_RETURN_IF_ERROR(ReadPreTokenizer(item, depth + 1, rules, byte_level));
    }
    return Ok();
  }
  if (type == "Digits") {
    TARE_ASSIGN_OR_RETURN(const bool individual, Flag(node, "individual_digits", false, "Digits"));
    if (!individual) return Unsupported("tokenizer.json: Digits with individual_digits false");
    rules->push_back(SplitRule::kDigits);
    return Ok();
  }
  if (type == "Split") {
    const Json* pattern = Member(node, "pattern");
    const Json* regex = pattern == nullptr ? nullptr : Member(*pattern, "Regex");
    const Json* behavior = Member(node, "behavior");
    TARE_ASSIGN_OR_RETURN(const bool invert, Flag(node, "invert", false, "Split"));
    if (regex == nullptr || !regex->is_string() || invert || behavior == nullptr ||
        *behavior != "Isolated") {
      return Unsupported(
          "tokenizer.json: Split is known with a Regex pattern, behavior Isolated, invert false");
    }
    const auto rule = FindSplitRule(regex->get_ref<const std::string&>());
    if (!rule) {
      return Unsupported("tokenizer.json: split expression {} is not one of gpt2, llama3, qwen2",
                         Printable(regex->get_ref<const std::string&>()));
    }
    rules->push_back(*rule);
    return Ok();
  }
  if (type == "ByteLevel") {
    TARE_ASSIGN_OR_RETURN(const bool prefix_space,
                          Flag(node, "add_prefix_space", true, "ByteLevel"));
    TARE_ASSIGN_OR_RETURN(const bool use_regex, Flag(node, "use_regex", true, "ByteLevel"));
    if (prefix_space) return Unsupported("tokenizer.json: ByteLevel with add_prefix_space true");
    if (use_regex) rules->push_back(SplitRule::kGpt2);
    *byte_level = true;
    return Ok();
  }
  return Unsupported(
      "tokenizer.json: pre_tokenizer \"{}\"; Sequence, Split, Digits and ByteLevel are known",
      type);
}

Status ReadModel(const Json& root, Tokenizer::Impl* impl) {
  const Json* model = Member(root, "model");
  if (model == nullptr) return Bad("model", "is missing");
  const std::string type = TypeOf(*model);
  // Files of 2019 to 2020 (GPT-2's own) state no type.
  if (!type.empty() && type != "BPE")
    return Unsupported("tokenizer.json: model \"{}\"; BPE is known", type);
  for (const char* key : {"dropout", "unk_token"}) {
    if (Member(*model, key) != nullptr) return Unsupported("tokenizer.json: model.{} is set", key);
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const Json* value = Member(*model, key);
    if (value != nullptr && *value != "")
      return Unsupported("tokenizer.json: model.{} is set", key);
  }
  for (const char* key : {"fuse_unk", "byte_fallback"}) {
    TARE_ASSIGN_OR_RETURN(const bool on, Flag(*model, key, false, "model"));
    if (on) return Unsupported("tokenizer.json: model.{} is true", key);
  }
  TARE_ASSIGN_OR_RETURN(const bool ignore_merges, Flag(*model, "ignore_merges", false, "model"));

  const Json* vocab = Member(*model, "vocab");
  if (vocab == nullptr || !vocab->is_object() || vocab->size() > kMaxVocabulary) {
    return Bad("model.vocab", "is not an object of at most 4,194,304 tokens");
  }
  std::vector<std::string> plain;
  std::unordered_map<std::string, int32_t> ids;  // as written
  for (const auto& [written, value] : vocab->items()) {
    TARE_ASSIGN_OR_RETURN(const int32_t id,
                          TokenId(value, "model.vocab[\"" + Printable(written) + "\"]"));
    if (static_cast<size_t>(id) >= plain.size()) plain.resize(id + 1);
    if (!plain[id].empty()) return Bad("model.vocab", fmt::format("gives id {} twice", id));
    // Special tokens may also stand in the vocabulary, written plainly; they are matched as added
    // tokens, so only what is written in the alphabet can come out of a merge.
    auto bytes = ByteLevelToBytes(written);
    plain[id] = bytes.ok() ? *bytes : written;
    if (plain[id].empty()) return Bad("model.vocab", fmt::format("has an empty token {}", id));
    ids.emplace(written, id);
  }
  if (const Json* added = Member(root, "added_tokens")) {
    if (!added->is_array()) return Bad("added_tokens", "is not a list");
    for (size_t i = 0; i < added->size(); ++i) {
      const Json& token = (*added)[i];
      const std::string where = fmt::format("added_tokens[{}]", i);
      const Json* content = Member(token, "content");
      const Json* id_value = Member(token, "id");
      if (content == nullptr || !content->is_string() || id_value == nullptr) {
        return Bad(where, "needs id and content");
      }
      TARE_ASSIGN_OR_RETURN(const int32_t id, TokenId(*id_value, where + ".id"));
      for (const char* key : {"single_word", "lstrip", "rstrip"}) {
        TARE_ASSIGN_OR_RETURN(const bool on, Flag(token, key, false, where));
        if (on) return Unsupported("tokenizer.json: {}.{} is true", where, key);
      }
      TARE_ASSIGN_OR_RETURN(const bool special, Flag(token, "special", false, where));
      TARE_ASSIGN_OR_RETURN(const bool normalized, Flag(token, "normalized", false, where));
      if (static_cast<size_t>(id) >= plain.size()) plain.resize(id + 1);
      if (static_cast<size_t>(id) >= impl->bytes_of.size()) {
        impl->bytes_of.resize(id + 1);
        impl->special.resize(id + 1);
      }
      if (!impl->bytes_of[id].empty()) return Bad(where, fmt::format("gives id {} twice", id));
      impl->bytes_of[id] = content->get<std::string>();
      impl->special[id] = special;
      plain[id].clear();
      impl->added.push_back({id, content->get<std::string>(), special, normalized});
    }
  }
  impl->bytes_of.resize(plain.size());
  impl->special.resize(plain.size());
  for (size_t id = 0; id < plain.size(); ++id) {
    if (!plain[id].empty()) impl->bytes_of[id] = plain[id];
  }

  const Json* merges = Member(*model, "merges");
  if (merges == nullptr || !merges->is_array()) return Bad("model.merges", "is not a list");
  std::vector<Bpe::Merge> list;
  list.reserve(merges->size());
  for (size_t i = 0; i < merges->size(); ++i) {
    const Json& merge = (*merges)[i];
    std::string left, right;
    if (merge.is_string()) {
      const std::string& text = merge.get_ref<const std::string&>();
      const size_t space = text.find(' ');
      if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
        return Bad(fmt::format("model.merges[{}]", i), "is not two tokens with one space between");
      }
      left = text.substr(0, space);
      right = text.substr(space + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      left = merge[0].get<std::string>();
      right = merge[1].get<std::string>();
    } else {
      return Bad(fmt::format("model.merges[{}]", i), "is neither \"left right\" nor [left, right]");
    }
    const auto l = ids.find(left), r = ids.find(right), joined = ids.find(left + right);
    if (l == ids.end() || r == ids.end() || joined == ids.end()) {
      return Bad(fmt::format("model.merges[{}]", i), "names a token that model.vocab lacks");
    }
    list.push_back({l->second, r->second, joined->second});
  }
  TARE_ASSIGN_OR_RETURN(impl->bpe, Bpe::Create(plain, list, ignore_merges));
  return Ok();
}

Status ReadTemplate(const Json& node, Tokenizer::Impl* impl) {
  const Json* single = Member(node, "single");
  const Json* specials = Member(node, "special_tokens");
  if (single == nullptr || !single->is_array() || specials == nullptr || !specials->is_object()) {
    return Bad("post_processor", "TemplateProcessing needs single and special_tokens");
  }
  bool after = false;
  for (const Json& item : *single) {
    if (Member(item, "Sequence") != nullptr) {
      after = true;
      continue;
    }
    const Json* special = Member(item, "SpecialToken");
    const Json* name = special == nullptr ? nullptr : Member(*special, "id");
    const Json* entry = name == nullptr || !name->is_string()
                            ? nullptr
                            : Member(*specials, name->get_ref<const std::string&>().c_str());
    const Json* ids = entry == nullptr ? nullptr : Member(*entry, "ids");
    if (ids == nullptr || !ids->is_array())
      return Bad("post_processor.single", "names an unknown special token");
    for (const Json& id_value : *ids) {
      TARE_ASSIGN_OR_RETURN(const int32_t id,
                            TokenId(id_value, "post_processor.special_tokens.ids"));
      if (static_cast<size_t>(id) >= impl->bytes_of.size()) {
        return Bad("post_processor.special_tokens.ids",
                   fmt::format("has {}, beyond the vocabulary", id));
      }
      (after ? impl->suffix : impl->prefix).push_back(id);
    }
  }
  return Ok();
}

Status ReadPostProcessor(const Json& node, int depth, Tokenizer::Impl* impl) {
  if (depth > 4) return Bad("post_processor", "is nested too deeply");
  const std::string type = TypeOf(node);
  if (type == "ByteLevel") return Ok();  // moves offsets only
  if (type == "TemplateProcessing") return ReadTemplate(node, impl);
  if (type == "Sequence") {
    const Json* list = Member(node, "processors");
    if (list == nullptr || !list->is_array())
      return Bad("post_processor.processors", "is not a list");
    for (const Json& item : *list) TARE_RETURN_IF_ERROR(ReadPostProcessor(item, depth + 1, impl));
    return Ok();
  }
  return Unsupported(
      "tokenizer.json: post_processor \"{}\"; ByteLevel, TemplateProcessing and Sequence are known",
      type);
}

}  // namespace

Result<Tokenizer> Tokenizer::FromJson(std::string_view text) {
  TARE_ASSIGN_OR_RETURN(const Json root, ParseJson(text));
  if (!root.is_object()) return InvalidArgument("tokenizer.json: the top level is not an object");
  for (const char* key : {"truncation", "padding"}) {
    if (Member(root, key) != nullptr) return Unsupported("tokenizer.json: {} is set", key);
  }
  Impl impl;
  TARE_RETURN_IF_ERROR(ReadNormalizer(root, &impl));
  const Json* pre = Member(root, "pre_tokenizer");
  if (pre == nullptr)
    return Unsupported("tokenizer.json: without pre_tokenizer; ByteLevel is needed");
  std::vector<SplitRule> rules;
  bool byte_level = false;
  TARE_RETURN_IF_ERROR(ReadPreTokenizer(*pre, 0, &rules, &byte_level));
  if (!byte_level) return Unsupported("tokenizer.json: pre_tokenizer without ByteLevel");
  TARE_ASSIGN_OR_RETURN(impl.splitter, Splitter::Create(std::move(rules)));
  const Json* decoder = Member(root, "decoder");
  if (decoder != nullptr && TypeOf(*decoder) != "ByteLevel") {
    return Unsupported("tokenizer.json: decoder \"{}\"; ByteLevel is known", TypeOf(*decoder));
  }
  TARE_RETURN_IF_ERROR(ReadModel(root, &impl));
  if (const Json* post = Member(root, "post_processor")) {
    TARE_RETURN_IF_ERROR(ReadPostProcessor(*post, 0, &impl));
  }
  return Impl::Finish(std::move(impl));
}

}  // namespace tare::models
