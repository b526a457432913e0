#pragma once

// Logprobs of token sequences as JSONL, one line a sequence, values as dtype and hex bits
// (docs/formats/logprobs.md). Decimal text is read too, and marked: its bits are not known to be
// the original ones.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "tensor/dtype.h"

namespace tare {

struct LogprobSequence {
  std::string sequence;  // a name for people; unique in a file
  std::string weights;   // weight version, "theta0"; sequences of different versions never pair
  // What the values mean: "raw" (log-softmax of the logits at temperature 1 over the vocabulary) or
  // "processed" (after temperature and truncation). The two are never compared with each other.
  std::string kind = "raw";
  std::vector<int32_t> prompt;
  std::vector<int32_t> tokens;  // the scored tokens, after the prompt
  DType dtype = DType::kF32;    // a float
  std::vector<uint64_t> words;  // bits, one per token; 0 where not present
  // A logprob of 0.0 is legal, so absence has its own bit. Both empty or one byte per token.
  std::vector<uint8_t> present;
  std::vector<uint8_t> mask;  // 1: enters the loss; empty: all
  bool decimal = false;       // the values came as decimal text
};

// One line without its newline. kDataLoss with what was wrong, where, and what would be right.
Result<LogprobSequence> ParseLogprobLine(std::string_view line);
// Ends with a newline. REQUIRES: words, present and mask of the right lengths, values not decimal.
std::string FormatLogprobLine(const LogprobSequence& sequence);

// A last line without its newline is an error: the file was cut.
Result<std::vector<LogprobSequence>> ParseLogprobs(std::string_view text);
Result<std::vector<LogprobSequence>> ReadLogprobs(Env* env, const std::string& path);
Status WriteLogprobs(Env* env, const std::string& path,
                     const std::vector<LogprobSequence>& sequences);

}  // namespace tare
