#include "models/tokenizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "models/tokenizer_impl.h"
#include "models/utf8.h"

namespace tare::models {
namespace {

Result<std::string> ComposeNfc(std::string_view text) {
  if (std::all_of(text.begin(), text.end(),
                  [](char c) { return static_cast<uint8_t>(c) < 0x80; })) {
    return std::string(text);
  }
  utf8proc_uint8_t* composed = nullptr;
  const utf8proc_ssize_t size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                   static_cast<utf8proc_ssize_t>(text.size()), &composed,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  if (size < 0) return InvalidArgument("text cannot be normalised: {}", utf8proc_errmsg(size));
  std::string out(reinterpret_cast<const char*>(composed), static_cast<size_t>(size));
  std::free(composed);
  return out;
}

}  // namespace

Result<Tokenizer> Tokenizer::Impl::Finish(Impl impl) {
  for (size_t i = 0; i < impl.added.size(); ++i) {
    const AddedToken& token = impl.added[i];
    if (token.content.empty()) return InvalidArgument("added token {} has no content", token.id);
    impl.added_by_first[token.content[0]].push_back(static_cast<int>(i));
  }
  for (auto& [first, list] : impl.added_by_first) {
    std::stable_sort(list.begin(), list.end(), [&](int a, int b) {
      return impl.added[a].content.size() > impl.added[b].content.size();
    });
    for (size_t i = 1; i < list.size(); ++i) {
      if (impl.added[list[i]].content == impl.added[list[i - 1]].content) {
        return InvalidArgument("added tokens {} and {} have the same content \"{}\"",
                               impl.added[list[i - 1]].id, impl.added[list[i]].id,
                               impl.added[list[i]].content);
      }
    }
  }
  return Tokenizer(std::make_shared<const Impl>(std::move(impl)));
}

Status Tokenizer::Impl::EncodePlain(std::string_view text, bool skip_missing,
                                    std::vector<int32_t>* out) const {
  TARE_ASSIGN_OR_RETURN(const auto words, splitter.Split(text));
  for (std::string_view word : words) {
    if (Status s = bpe.Encode(word, skip_missing, out); !s.ok()) {
      return Error(s.code(), "text near byte {}: {}", word.data() - text.data(), s.message());
    }
  }
  return Ok();
}

// Two passes, as the reference does it: tokens matched on the text as given cut it first; what is
// between them is normalised, cut at the tokens matched there, and the rest split and merged.
Status Tokenizer::Impl::EncodeSplitting(std::string_view text, bool normalized,
                                        const EncodeOptions& options,
                                        std::vector<int32_t>* out) const {
  const auto plain = [&](std::string_view piece) -> Status {
    if (piece.empty()) return Ok();
    if (normalized) return EncodePlain(piece, options.skip_missing_bytes, out);
    if (!nfc) return EncodeSplitting(piece, true, options, out);
    TARE_ASSIGN_OR_RETURN(const std::string composed, ComposeNfc(piece));
    return EncodeSplitting(composed, true, options, out);
  };
  size_t gap = 0;
  for (size_t i = 0; i < text.size();) {
    const AddedToken* found = nullptr;
    if (const auto it = added_by_first.find(text[i]); it != added_by_first.end()) {
      for (int index : it->second) {
        const AddedToken& token = added[index];
        if (token.normalized == normalized && (options.parse_special || !token.special) &&
            text.substr(i, token.content.size()) == token.content) {
          found = &token;
          break;
        }
      }
    }
    if (found == nullptr) {
      ++i;
      continue;
    }
    TARE_RETURN_IF_ERROR(plain(text.substr(gap, i - gap)));
    out->push_back(found->id);
    i += found->content.size();
    gap = i;
  }
  return plain(text.substr(gap));
}

Result<std::vector<int32_t>> Tokenizer::Encode(std::string_view text,
                                               const EncodeOptions& options) const {
  TARE_RETURN_IF_ERROR(CheckUtf8(text));
  std::vector<int32_t> out;
  if (options.add_special) out = impl_->prefix;
  TARE_RETURN_IF_ERROR(impl_->EncodeSplitting(text, false, options, &out));
  if (options.add_special) out.insert(out.end(), impl_->suffix.begin(), impl_->suffix.end());
  return out;
}

Result<std::string> Tokenizer::Decode(std::span<const int32_t> ids, bool skip_special) const {
  StreamDecoder decoder(*this, skip_special);
  std::string out;
  for (int32_t id : ids) {
    TARE_ASSIGN_OR_RETURN(const std::string piece, decoder.Push(id));
    out += piece;
  }
  out += decoder.Finish();
  return out;
}

int32_t Tokenizer::vocab_size() const { return static_cast<int32_t>(impl_->bytes_of.size()); }

const std::string& Tokenizer::TokenBytes(int32_t id) const {
  TARE_CHECK(id >= 0 && id < vocab_size()) << "token " << id << " of " << vocab_size();
  return impl_->bytes_of[id];
}

bool Tokenizer::IsSpecial(int32_t id) const {
  return id >= 0 && id < vocab_size() && impl_->special[id];
}

std::optional<int32_t> Tokenizer::Find(std::string_view bytes) const {
  for (const Impl::AddedToken& token : impl_->added) {
    if (token.content == bytes) return token.id;
  }
  return impl_->bpe.Find(bytes);
}

std::optional<int32_t> Tokenizer::bos() const { return impl_->bos; }
std::optional<int32_t> Tokenizer::eos() const { return impl_->eos; }
std::vector<uint8_t> Tokenizer::MissingBytes() const { return impl_->bpe.MissingBytes(); }

StreamDecoder::StreamDecoder(Tokenizer tokenizer, bool skip_special)
    : tokenizer_(std::move(tokenizer)), skip_special_(skip_special) {}

Result<std::string> StreamDecoder::Push(int32_t id) {
  if (id < 0 || id >= tokenizer_.vocab_size()) {
    return InvalidArgument("token id {} is outside [0, {})", id, tokenizer_.vocab_size());
  }
  std::string out;
  if (skip_special_ && tokenizer_.IsSpecial(id)) return out;
  held_ += tokenizer_.TokenBytes(id);
  held_.erase(0, AppendLossyUtf8(held_, false, &out));
  return out;
}

std::string StreamDecoder::Finish() {
  std::string out;
  AppendLossyUtf8(held_, true, &out);
  held_.clear();
  return out;
}

}  // namespace tare::models
