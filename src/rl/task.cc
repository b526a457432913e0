#include "rl/task.h"

#include "models/load_tokenizer.h"

namespace tare::rl {
namespace {

constexpr char kDigits[] = "0123456789";
constexpr int64_t kMost = 29;  // sums of 1 to 29: SmolLM2-135M gets some right and some wrong

class Pattern : public Task {
 public:
  Pattern(int64_t vocab, uint64_t seed, int64_t prompt_tokens)
      : vocab_(vocab), seed_(seed), prompt_tokens_(prompt_tokens) {}
  const char* name() const override { return "pattern"; }
  Result<Question> Ask(int64_t index, bool held_out) const override {
    Question q;
    q.name = fmt::format("{}{}", held_out ? "held" : "q", index);
    for (int64_t i = 0; i < prompt_tokens_; ++i) {
      // The purpose word keeps the two streams apart.
      const uint64_t x = Mix(index * prompt_tokens_ + i, held_out);
      q.prompt.push_back(static_cast<int32_t>(x % static_cast<uint64_t>(vocab_)));
    }
    q.answer = 0;
    q.text = fmt::format("{} random tokens; wanted: even ids", prompt_tokens_);
    return q;
  }
  float Reward(const Question& question, std::span<const int32_t> response) const override {
    if (response.empty()) return 0;
    int64_t hits = 0;
    for (const int32_t t : response) hits += t % 2 == question.answer;
    return static_cast<float>(hits) / static_cast<float>(response.size());
  }
  std::string Show(std::span<const int32_t> response) const override {
    std::string text;
    for (const int32_t t : response) text += fmt::format("{}{}", text.empty() ? "" : " ", t);
    return text;
  }

 private:
  // splitmix64: no model value, only which tokens a prompt holds.
  uint64_t Mix(int64_t counter, bool held_out) const {
    uint64_t z = (held_out ? 0 : seed_) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(counter) * 2 +
                 (held_out ? 1 : 0);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int64_t vocab_;
  uint64_t seed_;
  int64_t prompt_tokens_;
};

class Arithmetic : public Task {
 public:
  Arithmetic(models::Tokenizer tokenizer, models::ChatFormat format, uint64_t seed)
      : tokenizer_(std::move(tokenizer)), format_(format), seed_(seed) {}
  const char* name() const override { return "arithmetic"; }
  Result<Question> Ask(int64_t index, bool held_out) const override {
    // Every fifth pair is held out. The order is a stride through all pairs, turned by the seed.
    constexpr int64_t kPairs = kMost * kMost;
    Question q;
    int64_t seen = -1, a = 0, b = 0;
    for (int64_t k = 0; seen < index; ++k) {
      const int64_t turn = held_out ? 0 : static_cast<int64_t>(seed_ % kPairs);
      const int64_t at = (k * 317 + turn * 101) % kPairs;
      if ((at % 5 == 0) != held_out) continue;
      ++seen;
      a = at / kMost + 1;
      b = at % kMost + 1;
    }
    q.name = fmt::format("{}{}", held_out ? "held" : "q", index);
    q.answer = a + b;
    q.text = fmt::format("{} + {} = ?", a, b);
    TARE_ASSIGN_OR_RETURN(
        const std::string text,
        models::RenderChat(
            format_, {{"user", "12 + 25 = ?"}, {"assistant", "12 + 25 = 37"}, {"user", q.text}}));
    TARE_ASSIGN_OR_RETURN(q.prompt, tokenizer_.Encode(text));
    return q;
  }
  float Reward(const Question& question, std::span<const int32_t> response) const override {
    const std::string text = Show(response);
    const size_t end = text.find_last_of(kDigits);
    if (end == std::string::npos) return 0;
    const size_t before = text.find_last_not_of(kDigits, end);
    const size_t begin = before == std::string::npos ? 0 : before + 1;
    return text.substr(begin, end + 1 - begin) == fmt::format("{}", question.answer) ? 1.0f : 0.0f;
  }
  std::string Show(std::span<const int32_t> response) const override {
    const Result<std::string> text = tokenizer_.Decode(response, /*skip_special=*/true);
    return text.ok() ? *text : std::string();
  }

 private:
  models::Tokenizer tokenizer_;
  models::ChatFormat format_;
  uint64_t seed_;
};

}  // namespace

Result<std::unique_ptr<Task>> MakeTask(const std::string& name, Env* env,
                                       const Checkpoint& checkpoint,
                                       const models::ModelConfig& config, uint64_t seed,
                                       int64_t prompt_tokens) {
  if (name == "pattern")
    return std::unique_ptr<Task>(new Pattern(config.vocab, seed, prompt_tokens));
  if (name != "arithmetic") return InvalidArgument("task {}: pattern or arithmetic", name);
  TARE_ASSIGN_OR_RETURN(models::Tokenizer tokenizer, models::LoadTokenizer(env, checkpoint));
  TARE_ASSIGN_OR_RETURN(const std::string text, models::LoadChatTemplate(env, checkpoint));
  TARE_ASSIGN_OR_RETURN(const models::ChatFormat format, models::FindChatFormat(text));
  return std::unique_ptr<Task>(new Arithmetic(std::move(tokenizer), format, seed));
}

}  // namespace tare::rl
