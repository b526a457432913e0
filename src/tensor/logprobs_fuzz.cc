// JSONL of logprobs from anywhere: an error or checked sequences, which survive a round trip.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "tensor/logprobs.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto parsed = tare::ParseLogprobs({reinterpret_cast<const char*>(data), size});
  if (!parsed.ok()) return 0;
  for (const tare::LogprobSequence& s : *parsed) {
    if (s.words.size() != s.tokens.size() || s.present.size() != s.tokens.size()) std::abort();
    if (!s.mask.empty() && s.mask.size() != s.tokens.size()) std::abort();
    if (s.decimal) continue;
    std::string line = tare::FormatLogprobLine(s);
    line.pop_back();
    const auto again = tare::ParseLogprobLine(line);
    if (!again.ok() || again->words != s.words || again->present != s.present ||
        again->tokens != s.tokens) {
      std::abort();
    }
  }
  return 0;
}
