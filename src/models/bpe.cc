#include "models/bpe.h"

#include <algorithm>
#include <functional>
#include <queue>

#include "models/utf8.h"

namespace tare::models {
namespace {

// Byte to code point: printable Latin-1 stands for itself, the others follow from U+0100 upward.
constexpr std::array<uint16_t, 256> MakeAlphabet() {
  std::array<uint16_t, 256> out = {};
  uint16_t next = 256;
  for (int b = 0; b < 256; ++b) {
    const bool itself = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || (b >= 174 && b <= 255);
    out[b] = itself ? static_cast<uint16_t>(b) : next++;
  }
  return out;
}
constexpr std::array<uint16_t, 256> kAlphabet = MakeAlphabet();
constexpr int kAlphabetEnd = 256 + 68;

constexpr std::array<int16_t, kAlphabetEnd> MakeInverse() {
  std::array<int16_t, kAlphabetEnd> out = {};
  for (auto& v : out) v = -1;
  for (int b = 0; b < 256; ++b) out[kAlphabet[b]] = static_cast<int16_t>(b);
  return out;
}
constexpr std::array<int16_t, kAlphabetEnd> kInverse = MakeInverse();

}  // namespace

Result<std::string> ByteLevelToBytes(std::string_view written) {
  std::string out;
  out.reserve(written.size());
  for (size_t i = 0; i < written.size();) {
    const Utf8Piece piece = NextUtf8(written.substr(i));
    if (piece.kind != Utf8Kind::kWhole) {
      return InvalidArgument("token is not UTF-8 at byte {}", i);
    }
    if (piece.code_point >= kInverse.size() || kInverse[piece.code_point] < 0) {
      return InvalidArgument(
          "token holds U+{:04X} at byte {}, which is outside the byte-level alphabet",
          piece.code_point, i);
    }
    out.push_back(static_cast<char>(kInverse[piece.code_point]));
    i += piece.size_bytes;
  }
  return out;
}

std::string BytesToByteLevel(std::string_view bytes) {
  std::string out;
  for (char c : bytes) {
    const uint16_t point = kAlphabet[static_cast<uint8_t>(c)];
    if (point < 0x80) {
      out.push_back(static_cast<char>(point));
    } else {
      out.push_back(static_cast<char>(0xC0 | point >> 6));
      out.push_back(static_cast<char>(0x80 | (point & 0x3F)));
    }
  }
  return out;
}

Result<Bpe> Bpe::Create(const std::vector<std::string>& bytes_of, const std::vector<Merge>& merges,
                        bool ignore_merges) {
  Bpe bpe;
  bpe.ignore_merges_ = ignore_merges;
  bpe.byte_token_.fill(-1);
  for (size_t id = 0; id < bytes_of.size(); ++id) {
    const std::string& bytes = bytes_of[id];
    if (bytes.empty()) continue;
    const auto [it, fresh] = bpe.words_.emplace(bytes, static_cast<int32_t>(id));
    if (!fresh) {
      return InvalidArgument("tokens {} and {} are the same bytes", it->second, id);
    }
    if (bytes.size() == 1)
      bpe.byte_token_[static_cast<uint8_t>(bytes[0])] = static_cast<int32_t>(id);
  }
  const auto in_range = [&](int32_t id) {
    return id >= 0 && static_cast<size_t>(id) < bytes_of.size() && !bytes_of[id].empty();
  };
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const Merge& m = merges[rank];
    if (!in_range(m.left) || !in_range(m.right) || !in_range(m.result) ||
        bytes_of[m.result] != bytes_of[m.left] + bytes_of[m.right]) {
      return InvalidArgument("merge {} ({}, {}) does not give the bytes of token {}", rank, m.left,
                             m.right, m.result);
    }
    if (!bpe.merges_
             .emplace(Key(m.left, m.right), RankedMerge{static_cast<int32_t>(rank), m.result})
             .second) {
      return InvalidArgument("merge {} ({}, {}) is given twice", rank, m.left, m.right);
    }
  }
  return bpe;
}

std::optional<int32_t> Bpe::Find(std::string_view bytes) const {
  const auto it = words_.find(std::string(bytes));
  if (it == words_.end()) return std::nullopt;
  return it->second;
}

std::vector<uint8_t> Bpe::MissingBytes() const {
  std::vector<uint8_t> out;
  for (int b = 0; b < 256; ++b) {
    if (byte_token_[b] < 0) out.push_back(static_cast<uint8_t>(b));
  }
  return out;
}

Status Bpe::Encode(std::string_view word, bool skip_missing, std::vector<int32_t>* out) const {
  if (ignore_merges_) {
    if (const auto id = Find(word)) {
      out->push_back(*id);
      return Ok();
    }
  }
  // Symbols in a doubly linked list over an array; a joined-away symbol has token -1.
  struct Symbol {
    int32_t token, previous, next;
  };
  std::vector<Symbol> symbols;
  symbols.reserve(word.size());
  for (size_t i = 0; i < word.size(); ++i) {
    const int32_t token = byte_token_[static_cast<uint8_t>(word[i])];
    if (token < 0) {
      if (skip_missing) continue;
      return Error(Code::kNotFound,
                   "byte 0x{:02x} at offset {} of a word has no token in this vocabulary",
                   static_cast<uint8_t>(word[i]), i);
    }
    const int32_t n = static_cast<int32_t>(symbols.size());
    symbols.push_back({token, n - 1, n + 1});
  }
  if (symbols.empty()) return Ok();
  symbols.back().next = -1;

  struct Candidate {
    int32_t rank, position, left, right, result;
    bool operator>(const Candidate& o) const {
      return rank != o.rank ? rank > o.rank : position > o.position;
    }
  };
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  const auto offer = [&](int32_t position) {
    if (position < 0 || symbols[position].next < 0) return;
    const int32_t left = symbols[position].token;
    const int32_t right = symbols[symbols[position].next].token;
    const auto it = merges_.find(Key(left, right));
    if (it == merges_.end()) return;
    queue.push({it->second.rank, position, left, right, it->second.result});
  };
  for (size_t i = 0; i + 1 < symbols.size(); ++i) offer(static_cast<int32_t>(i));
  while (!queue.empty()) {
    const Candidate c = queue.top();
    queue.pop();
    Symbol& s = symbols[c.position];
    // A candidate is stale when either side has been joined meanwhile.
    if (s.token != c.left || s.next < 0 || symbols[s.next].token != c.right) continue;
    Symbol& gone = symbols[s.next];
    s.token = c.result;
    s.next = gone.next;
    gone.token = -1;
    if (s.next >= 0) symbols[s.next].previous = c.position;
    offer(s.previous);
    offer(c.position);
  }
  for (int32_t i = 0; i >= 0; i = symbols[i].next) out->push_back(symbols[i].token);
  return Ok();
}

}  // namespace tare::models
