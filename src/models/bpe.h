#pragma once

// Byte-level byte-pair encoding: a word's bytes become tokens, then the pair of neighbours with the
// lowest merge rank (the leftmost among equals) is joined until no pair has one. O(n log n) in the
// length of the word, so that a hostile word of a megabyte costs no more than its length.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"

namespace tare::models {

// The byte-level alphabet of GPT-2: each byte stands as one printable character in vocabulary
// files. kInvalidArgument for a character outside it.
Result<std::string> ByteLevelToBytes(std::string_view written);
std::string BytesToByteLevel(std::string_view bytes);

class Bpe {
 public:
  struct Merge {
    int32_t left = 0, right = 0, result = 0;
  };

  // `bytes_of[id]` are the raw bytes of ordinary tokens (empty: not one). Merges come by ascending
  // rank. `ignore_merges`: a whole word that is in the vocabulary becomes that token at once (Llama
  // 3). kInvalidArgument for duplicate tokens or merges and ids out of range.
  static Result<Bpe> Create(const std::vector<std::string>& bytes_of,
                            const std::vector<Merge>& merges, bool ignore_merges);

  // Appends the tokens of one word. kNotFound with the offset of a byte that no token has (some
  // vocabularies lack rare bytes); with `skip_missing` such bytes vanish instead.
  Status Encode(std::string_view word, bool skip_missing, std::vector<int32_t>* out) const;

  std::optional<int32_t> Find(std::string_view bytes) const;
  // Which of the 256 bytes no token stands for.
  std::vector<uint8_t> MissingBytes() const;

 private:
  struct RankedMerge {
    int32_t rank = 0, result = 0;
  };
  static uint64_t Key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }

  std::array<int32_t, 256> byte_token_ = {};
  std::unordered_map<uint64_t, RankedMerge> merges_;
  std::unordered_map<std::string, int32_t> words_;
  bool ignore_merges_ = false;
};

}  // namespace tare::models
