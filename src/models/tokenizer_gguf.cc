#include <string>
#include <utility>

#include "models/tokenizer_impl.h"

namespace tare::models {
namespace {

constexpr int32_t kControl = 3, kUserDefined = 4, kUnused = 5, kNormal = 1;

struct Pre {
  const char* name;
  std::vector<SplitRule> rules;
  bool nfc, ignore_merges;
};

const std::vector<Pre>& KnownPre() {
  static const auto* known = new std::vector<Pre>{
      {"gpt-2", {SplitRule::kGpt2}, false, false},
      {"smollm", {SplitRule::kDigits, SplitRule::kGpt2}, false, false},
      {"llama-bpe", {SplitRule::kLlama3}, false, true},
      {"llama3", {SplitRule::kLlama3}, false, true},
      {"qwen2", {SplitRule::kQwen2}, true, false},
  };
  return *known;
}

}  // namespace

Result<Tokenizer> Tokenizer::FromGguf(const GgufVocabulary& v) {
  if (v.model != "gpt2") {
    return Unsupported("tokenizer.ggml.model is \"{}\"; byte-level BPE (\"gpt2\") is known",
                       v.model);
  }
  const Pre* pre = nullptr;
  std::string names;
  for (const Pre& p : KnownPre()) {
    if (v.pre == p.name) pre = &p;
    names += std::string(names.empty() ? "" : ", ") + p.name;
  }
  if (pre == nullptr) {
    return Unsupported("tokenizer.ggml.pre is \"{}\"; known split rules: {}", v.pre, names);
  }
  if (v.tokens.empty() || v.tokens.size() > kMaxVocabulary) {
    return InvalidArgument("tokenizer.ggml.tokens has {} entries; 1 to {} are possible",
                           v.tokens.size(), kMaxVocabulary);
  }
  if (v.token_type.size() != v.tokens.size()) {
    return InvalidArgument("tokenizer.ggml.token_type has {} entries, tokens has {}",
                           v.token_type.size(), v.tokens.size());
  }
  Impl impl;
  impl.nfc = pre->nfc;
  TARE_ASSIGN_OR_RETURN(impl.splitter, Splitter::Create(pre->rules));
  impl.bytes_of.resize(v.tokens.size());
  impl.special.resize(v.tokens.size());
  std::vector<std::string> plain(v.tokens.size());
  for (size_t id = 0; id < v.tokens.size(); ++id) {
    const int32_t type = v.token_type[id];
    if (type == kControl || type == kUserDefined) {
      impl.bytes_of[id] = v.tokens[id];
      impl.special[id] = type == kControl;
      impl.added.push_back({static_cast<int32_t>(id), v.tokens[id], type == kControl, false});
    } else if (type == kNormal) {
      auto bytes = ByteLevelToBytes(v.tokens[id]);
      if (!bytes.ok())
        return bytes.status().Annotate("tokenizer.ggml.tokens[" + std::to_string(id) + "]");
      if (bytes->empty()) return InvalidArgument("tokenizer.ggml.tokens[{}] is empty", id);
      plain[id] = *bytes;
      impl.bytes_of[id] = std::move(*bytes);
    } else if (type != kUnused) {
      return Unsupported(
          "tokenizer.ggml.token_type[{}] is {}; known are 1 (normal), 3 (control), 4 "
          "(user-defined) and 5 (unused)",
          id, type);
    }
  }
  std::unordered_map<std::string, int32_t> ids;
  for (size_t id = 0; id < plain.size(); ++id) {
    if (!plain[id].empty()) ids.emplace(plain[id], static_cast<int32_t>(id));
  }
  std::vector<Bpe::Merge> merges;
  merges.reserve(v.merges.size());
  for (size_t i = 0; i < v.merges.size(); ++i) {
    const std::string& text = v.merges[i];
    const size_t space = text.find(' ');
    const auto error = [&](const char* why) {
      return InvalidArgument("tokenizer.ggml.merges[{}] \"{}\" {}", i, text, why);
    };
    if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
      return error("is not two tokens with one space between");
    }
    const auto left = ByteLevelToBytes(std::string_view(text).substr(0, space));
    const auto right = ByteLevelToBytes(std::string_view(text).substr(space + 1));
    if (!left.ok() || !right.ok()) return error("leaves the byte-level alphabet");
    const auto l = ids.find(*left), r = ids.find(*right), joined = ids.find(*left + *right);
    if (l == ids.end() || r == ids.end() || joined == ids.end()) {
      return error("names a token that the vocabulary lacks");
    }
    merges.push_back({l->second, r->second, joined->second});
  }
  TARE_ASSIGN_OR_RETURN(impl.bpe, Bpe::Create(plain, merges, pre->ignore_merges));
  const auto check_id = [&](const char* key, std::optional<int32_t> id) -> Status {
    if (id && (*id < 0 || static_cast<size_t>(*id) >= v.tokens.size())) {
      return InvalidArgument("tokenizer.ggml.{} is {}; the vocabulary has {} tokens", key, *id,
                             v.tokens.size());
    }
    return Ok();
  };
  TARE_RETURN_IF_ERROR(check_id("bos_token_id", v.bos));
  TARE_RETURN_IF_ERROR(check_id("eos_token_id", v.eos));
  impl.bos = v.bos;
  impl.eos = v.eos;
  if (v.add_bos && v.bos) impl.prefix = {*v.bos};
  return Impl::Finish(std::move(impl));
}

}  // namespace tare::models
