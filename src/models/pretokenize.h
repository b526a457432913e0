#pragma once

// The split rules in front of byte-level BPE, as data: GPT-2, Llama 3, Qwen2/3 and SmolLM. A rule
// is known by the exact regular expression that a tokenizer.json states; another one is refused,
// since a near miss gives other token IDs without any sign. `\s` follows Unicode's White_Space
// property (as the reference implementations do), \p{L} and \p{N} the Unicode version of PCRE2 (14
// in 10.42): characters assigned later may split elsewhere than in a newer implementation.

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace tare::models {

enum class SplitRule : uint8_t {
  kGpt2,    // contractions, letters, numbers, the rest, each with one leading space
  kLlama3,  // as Qwen2 with runs of at most three digits
  kQwen2,   // case-insensitive contractions, single digits, newlines kept with punctuation
  kDigits,  // every numeric character alone (SmolLM applies it before kGpt2)
};
std::string_view SplitRuleName(SplitRule rule);
// The rule whose published expression is exactly `regex`.
std::optional<SplitRule> FindSplitRule(std::string_view regex);

// Cuts text into pieces by one or more rules, one after the other. Thread-safe.
class Splitter {
 public:
  static Result<Splitter> Create(std::vector<SplitRule> rules);

  const std::vector<SplitRule>& rules() const { return rules_; }
  // Pieces of `text` in order; they join to `text`. Every match and every gap between matches is a
  // piece. REQUIRES: text is UTF-8 (CheckUtf8).
  Result<std::vector<std::string_view>> Split(std::string_view text) const;

 private:
  struct Compiled;
  std::vector<SplitRule> rules_;
  std::vector<std::shared_ptr<const Compiled>> compiled_;
};

}  // namespace tare::models
