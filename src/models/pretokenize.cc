#include "models/pretokenize.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>
#include <string>
#include <utility>

namespace tare::models {
namespace {

struct Rule {
  SplitRule rule;
  const char* name;
  const char* regex;  // as published in tokenizer.json; "" where it is not stated there
};

constexpr std::array<Rule, 4> kRules = {{
    {SplitRule::kGpt2, "gpt2",
     R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"},
    {SplitRule::kLlama3, "llama3",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
    {SplitRule::kQwen2, "qwen2",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
    {SplitRule::kDigits, "digits", ""},
}};

const Rule& Find(SplitRule rule) {
  for (const Rule& r : kRules) {
    if (r.rule == rule) return r;
  }
  TARE_CHECK(false) << "unknown split rule";
  __builtin_unreachable();
}

// PCRE2's own \s counts U+180E, which Unicode took out of White_Space; so the class is spelled out.
constexpr char kSpace[] =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";

std::string ToPcre2(const Rule& rule) {
  if (rule.rule == SplitRule::kDigits) return R"(\p{N})";
  std::string out;
  bool in_class = false;
  const std::string_view regex = rule.regex;
  for (size_t i = 0; i < regex.size(); ++i) {
    const char c = regex[i];
    if (c == '\\' && i + 1 < regex.size()) {
      const char next = regex[++i];
      if (next == 's') {
        out += in_class ? std::string(kSpace) : "[" + std::string(kSpace) + "]";
      } else if (next == 'S') {
        out += "[^" + std::string(kSpace) + "]";  // never used inside a class
      } else {
        out += c;
        out += next;
      }
      continue;
    }
    if (c == '[') in_class = true;
    if (c == ']') in_class = false;
    out += c;
  }
  return out;
}

struct FreeCode {
  void operator()(pcre2_code* code) const { pcre2_code_free(code); }
};
struct FreeMatch {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};

}  // namespace

struct Splitter::Compiled {
  std::unique_ptr<pcre2_code, FreeCode> code;
};

std::string_view SplitRuleName(SplitRule rule) { return Find(rule).name; }

std::optional<SplitRule> FindSplitRule(std::string_view regex) {
  for (const Rule& r : kRules) {
    if (*r.regex != '\0' && regex == r.regex) return r.rule;
  }
  return std::nullopt;
}

Result<Splitter> Splitter::Create(std::vector<SplitRule> rules) {
  Splitter out;
  for (SplitRule rule : rules) {
    const std::string pattern = ToPcre2(Find(rule));
    int error = 0;
    PCRE2_SIZE offset = 0;
    auto compiled = std::make_shared<Compiled>();
    compiled->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                       PCRE2_UTF | PCRE2_UCP, &error, &offset, nullptr));
    if (compiled->code == nullptr) {
      return Error(Code::kInternal, "split rule {}: PCRE2 error {} at offset {}",
                   SplitRuleName(rule), error, offset);
    }
    // Without JIT (a build or a policy may lack it) the interpreter gives the same matches.
    (void)pcre2_jit_compile(compiled->code.get(), PCRE2_JIT_COMPLETE);
    out.compiled_.push_back(std::move(compiled));
  }
  out.rules_ = std::move(rules);
  return out;
}

Result<std::vector<std::string_view>> Splitter::Split(std::string_view text) const {
  std::vector<std::string_view> pieces;
  if (!text.empty()) pieces.push_back(text);
  for (size_t stage = 0; stage < compiled_.size(); ++stage) {
    const pcre2_code* code = compiled_[stage]->code.get();
    std::unique_ptr<pcre2_match_data, FreeMatch> match(
        pcre2_match_data_create_from_pattern(code, nullptr));
    if (match == nullptr)
      return Error(Code::kExhausted, "no memory for a regular-expression match");
    std::vector<std::string_view> next;
    next.reserve(pieces.size());
    for (std::string_view piece : pieces) {
      size_t at = 0;   // where the search goes on
      size_t gap = 0;  // start of what no match has taken
      while (at < piece.size()) {
        const int rc = pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(piece.data()), piece.size(),
                                   at, PCRE2_NO_UTF_CHECK, match.get(), nullptr);
        if (rc == PCRE2_ERROR_NOMATCH) break;
        if (rc < 0) {
          return Error(Code::kExhausted, "split rule {}: PCRE2 match error {} at byte {} of {}",
                       SplitRuleName(rules_[stage]), rc, at, piece.size());
        }
        const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(match.get());
        TARE_CHECK(ends[1] > ends[0]) << "a split rule matched nothing";
        if (ends[0] > gap) next.push_back(piece.substr(gap, ends[0] - gap));
        next.push_back(piece.substr(ends[0], ends[1] - ends[0]));
        at = gap = ends[1];
      }
      if (gap < piece.size()) next.push_back(piece.substr(gap));
    }
    pieces = std::move(next);
  }
  return pieces;
}

}  // namespace tare::models
