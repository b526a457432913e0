#pragma once

// The inside of Tokenizer, shared by its readers (tokenizer_json.cc, tokenizer_gguf.cc).

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "models/bpe.h"
#include "models/pretokenize.h"
#include "models/tokenizer.h"

namespace tare::models {

struct Tokenizer::Impl {
  struct AddedToken {
    int32_t id = 0;
    std::string content;
    bool special = false;     // hidden by skip_special; otherwise matched all the same
    bool normalized = false;  // matched after the normaliser, not before
  };

  Bpe bpe;
  Splitter splitter;
  bool nfc = false;
  std::vector<std::string> bytes_of;  // by id; special tokens: their text
  std::vector<bool> special;          // by id
  std::vector<AddedToken> added;
  // Added tokens by first byte, longest first: the leftmost, then longest match wins.
  std::map<char, std::vector<int>> added_by_first;
  std::vector<int32_t> prefix, suffix;  // put around by add_special
  std::optional<int32_t> bos, eos;

  static Result<Tokenizer> Finish(Impl impl);
  Status EncodePlain(std::string_view text, bool skip_missing, std::vector<int32_t>* out) const;
  Status EncodeSplitting(std::string_view text, bool normalized, const EncodeOptions& options,
                         std::vector<int32_t>* out) const;
};

// Limits on what a file may claim.
inline constexpr size_t kMaxVocabulary = size_t{4} << 20;

}  // namespace tare::models
