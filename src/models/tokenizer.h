#pragma once

// Text to token IDs and back: byte-level BPE as GPT-2, Llama 3, Qwen2/3 and SmolLM use it, read
// from a Hugging Face tokenizer.json or from the metadata of a GGUF file. What a file asks for
// beyond that (another model kind, normaliser, split rule, stripping added tokens) is refused by
// name: a tokenizer that is nearly right gives other tokens without any sign.
//
// Decode(Encode(x)) == x for every UTF-8 text x, if the vocabulary has all 256 bytes and no
// normaliser (Qwen's composes to NFC first: then Decode gives the composed text). A byte that the
// vocabulary lacks is an error that names it; SmolLM's lacks some control characters.
//
// Thread-safe once made; cheap to copy (shared, immutable).

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace tare::models {

// What a GGUF file says of its tokenizer (the keys of the same names under tokenizer.ggml).
struct GgufVocabulary {
  std::string model;                // "gpt2"
  std::string pre;                  // "smollm", "gpt-2", "llama-bpe", "qwen2"
  std::vector<std::string> tokens;  // written in the byte-level alphabet
  std::vector<int32_t> token_type;  // 1 normal, 3 control, 4 user-defined, 5 unused
  std::vector<std::string> merges;  // "left right"
  std::optional<int32_t> bos, eos;
  bool add_bos = false;
};

struct EncodeOptions {
  // Text that spells a special token becomes that token (chat prompts need it). false: it is plain
  // text.
  bool parse_special = true;
  // What the file's post-processor puts in front and behind (Llama 3's <|begin_of_text|>).
  bool add_special = false;
  // Drop bytes that the vocabulary lacks, as other implementations do silently.
  bool skip_missing_bytes = false;
};

class Tokenizer {
 public:
  // Errors: kInvalidArgument (malformed; the key is named), kUnsupported (what is asked for, and
  // what would be known).
  static Result<Tokenizer> FromJson(std::string_view tokenizer_json);
  static Result<Tokenizer> FromGguf(const GgufVocabulary& vocabulary);

  // kInvalidArgument: not UTF-8 (with the offset); kNotFound: a byte without a token.
  Result<std::vector<int32_t>> Encode(std::string_view text,
                                      const EncodeOptions& options = {}) const;
  // UTF-8; bytes that are none become U+FFFD. kInvalidArgument for an id outside [0, vocab_size).
  Result<std::string> Decode(std::span<const int32_t> ids, bool skip_special = false) const;

  // One past the largest id. The model's vocabulary may be larger (padded).
  int32_t vocab_size() const;
  // The raw bytes of a token, perhaps not UTF-8; of a special one its text. Empty for an unused id.
  // REQUIRES: 0 <= id < vocab_size()
  const std::string& TokenBytes(int32_t id) const;
  bool IsSpecial(int32_t id) const;  // false out of range
  // The id of the token that has exactly these bytes (specials by their text).
  std::optional<int32_t> Find(std::string_view bytes) const;
  std::optional<int32_t> bos() const;  // what GGUF states; a tokenizer.json states neither
  std::optional<int32_t> eos() const;
  std::vector<uint8_t> MissingBytes() const;

  struct Impl;

 private:
  explicit Tokenizer(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

// Decodes token by token for streaming: text comes out as soon as its UTF-8 is whole, and what was
// once given out never changes. All pieces joined equal Decode of all ids.
class StreamDecoder {
 public:
  explicit StreamDecoder(Tokenizer tokenizer, bool skip_special = false);

  // The text that `id` completes, perhaps empty. kInvalidArgument for an id out of range.
  Result<std::string> Push(int32_t id);
  // The rest: an incomplete tail as U+FFFD. The decoder then starts anew.
  std::string Finish();
  // Bytes held back so far (0 to 3).
  size_t held_bytes() const { return held_.size(); }

 private:
  Tokenizer tokenizer_;
  bool skip_special_;
  std::string held_;
};

}  // namespace tare::models
