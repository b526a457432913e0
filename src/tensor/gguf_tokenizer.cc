// tokenizer.json out of the vocabulary of a GGUF file. GGUF names its split rule by one word; here
// each word stands for the pre-tokenizer, normaliser and merge rule that the original
// tokenizer.json has.

#include <algorithm>
#include <set>

#include "tensor/import.h"

namespace tare {
namespace {

constexpr const char* kLlama3Split =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kQwen2Split =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

Json ByteLevel(bool use_regex) {
  return Json{{"type", "ByteLevel"},
              {"add_prefix_space", false},
              {"trim_offsets", true},
              {"use_regex", use_regex}};
}

Json Sequence(Json first, bool use_regex) {
  Json out = Json{{"type", "Sequence"}};
  out["pretokenizers"] = Json::array({std::move(first), ByteLevel(use_regex)});
  return out;
}

Json Split(const char* pattern) {
  Json out = Json{{"type", "Split"}};
  out["pattern"] = Json{{"Regex", pattern}};
  out["behavior"] = "Isolated";
  out["invert"] = false;
  return out;
}

enum TokenType {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6
};

}  // namespace

Result<Json> TokenizerJsonFromGguf(const TokenizerSource& t) {
  if (t.gguf_model != "gpt2") {
    return Unsupported("tokenizer.ggml.model is \"{}\"; byte-level BPE (\"gpt2\") is known",
                       Printable(t.gguf_model));
  }
  Json pre;
  Json normalizer = nullptr;
  bool ignore_merges = false;
  if (t.gguf_pre == "gpt-2") {
    pre = ByteLevel(true);
  } else if (t.gguf_pre == "smollm") {
    pre = Sequence(Json{{"type", "Digits"}, {"individual_digits", true}}, true);
  } else if (t.gguf_pre == "llama-bpe" || t.gguf_pre == "llama3") {
    pre = Sequence(Split(kLlama3Split), false);
    ignore_merges = true;
  } else if (t.gguf_pre == "qwen2") {
    pre = Sequence(Split(kQwen2Split), false);
    normalizer = Json{{"type", "NFC"}};
  } else {
    return Unsupported(
        "tokenizer.ggml.pre is \"{}\"; known are gpt-2, smollm, llama-bpe, llama3, qwen2",
        Printable(t.gguf_pre));
  }
  if (t.tokens.empty() || t.token_types.size() != t.tokens.size()) {
    return DataLoss("a vocabulary of {} tokens with {} types", t.tokens.size(),
                    t.token_types.size());
  }
  Json vocab = Json::object();
  Json added = Json::array();
  auto& entries = static_cast<Json::object_t::Container&>(vocab.get_ref<Json::object_t&>());
  std::set<std::string_view> seen;
  for (size_t id = 0; id < t.tokens.size(); ++id) {
    const std::string& text = t.tokens[id];
    const int32_t type = t.token_types[id];
    if (!IsUtf8(text)) return DataLoss("token {} \"{}\" is not UTF-8", id, Printable(text));
    if (type < kNormal || type > kByte)
      return DataLoss("token {} has type {}; 1 to 6 expected", id, type);
    if (type == kUnused) continue;  // padding of the embedding, no token
    if (!seen.insert(text).second)
      return DataLoss("token {} \"{}\" is there twice", id, Printable(text));
    entries.emplace_back(text, id);
    if (type == kControl || type == kUserDefined || type == kUnknown) {
      Json a = Json::object();
      a["id"] = id;
      a["content"] = text;
      a["single_word"] = false;
      a["lstrip"] = false;
      a["rstrip"] = false;
      a["normalized"] = false;
      a["special"] = type != kUserDefined;
      added.push_back(std::move(a));
    }
  }
  Json merges = Json::array();
  for (size_t i = 0; i < t.merges.size(); ++i) {
    const std::string& merge = t.merges[i];
    const size_t space = merge.find(' ');
    if (space == std::string::npos || space == 0 || space + 1 == merge.size() ||
        merge.find(' ', space + 1) != std::string::npos || !IsUtf8(merge)) {
      return DataLoss("merge {} \"{}\" is not two tokens with one space between", i,
                      Printable(merge));
    }
    merges.push_back(merge);
  }
  Json out = Json::object();
  out["version"] = "1.0";
  out["truncation"] = nullptr;
  out["padding"] = nullptr;
  out["added_tokens"] = std::move(added);
  out["normalizer"] = std::move(normalizer);
  out["pre_tokenizer"] = std::move(pre);
  out["post_processor"] = nullptr;
  out["decoder"] = Json{{"type", "ByteLevel"},
                        {"add_prefix_space", true},
                        {"trim_offsets", true},
                        {"use_regex", true}};
  Json model = Json::object();
  model["type"] = "BPE";
  model["dropout"] = nullptr;
  model["unk_token"] = nullptr;
  model["continuing_subword_prefix"] = nullptr;
  model["end_of_word_suffix"] = nullptr;
  model["fuse_unk"] = false;
  model["byte_fallback"] = false;
  model["ignore_merges"] = ignore_merges;
  model["vocab"] = std::move(vocab);
  model["merges"] = std::move(merges);
  out["model"] = std::move(model);
  return out;
}

}  // namespace tare
