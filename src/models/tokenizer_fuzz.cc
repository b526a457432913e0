// Any bytes as a tokenizer.json: an error or a tokenizer that gives back what it is given.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "models/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using tare::models::Tokenizer;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto tokenizer = Tokenizer::FromJson(text);
  if (!tokenizer.ok()) return 0;
  const auto ids = tokenizer->Encode("don't 12 \xc3\xa9\n\n <|im_end|> x");
  if (!ids.ok()) return 0;
  for (int32_t id : *ids) {
    if (id < 0 || id >= tokenizer->vocab_size()) __builtin_trap();
  }
  const auto back = tokenizer->Decode(*ids);
  if (!back.ok()) __builtin_trap();
  return 0;
}
