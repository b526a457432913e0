#include "rl/task.h"

#include "models/load_tokenizer.h"

namespace tare::rl {
namespace {

constexpr int64_t kPatternPrompt = 40;  // more than two blocks of 16: prefix caching has work

class Pattern : public Task {
 public:
  Pattern(int64_t vocab, uint64_t seed) : vocab_(vocab), seed_(seed) {}
  const char* name() const override { return "pattern"; }
  Result<Question> Ask(int64_t index, bool held_out) const override {
    Question q;
    q.name = fmt::format("{}{}", held_out ? "held" : "q", index);
    for (int64_t i = 0; i < kPatternPrompt; ++i) {
      // The purpose word keeps the two streams apart.
      const uint64_t x = Mix(index * kPatternPrompt + i, held_out);
      q.prompt.push_back(static_cast<int32_t>(x % static_cast<uint64_t>(vocab_)));
    }
    q.answer = index % 2;
    q.text = fmt::format("{} random tokens; wanted: {} ids", kPatternPrompt,
                         q.answer == 0 ? "even" : "odd");
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
    uint64_t z =
        seed_ * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(counter) * 2 + (held_out ? 1 : 0);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int64_t vocab_;
  uint64_t seed_;
};

class Arithmetic : public Task {
 public:
  Arithmetic(models::Tokenizer tokenizer, models::ChatFormat format, uint64_t seed)
      : tokenizer_(std::move(tokenizer)), format_(format), seed_(seed) {}
  const char* name() const override { return "arithmetic"; }
  Result<Question> Ask(int64_t index, bool held_out) const override {
    // 81 sums of 1..9, in an order that the seed turns; every fifth is held out.
    Question q;
    int64_t seen = -1, a = 0, b = 0;
    for (int64_t k = 0; seen < index; ++k) {
      const int64_t at = (k * 37 + static_cast<int64_t>(seed_ % 81)) % 81;
      if ((at % 5 == 0) != held_out) continue;
      ++seen;
      a = at / 9 + 1;
      b = at % 9 + 1;
    }
    q.name = fmt::format("{}{}", held_out ? "held" : "q", index);
    q.answer = a + b;
    q.text = fmt::format("What is {} + {}? Answer with the number only.", a, b);
    TARE_ASSIGN_OR_RETURN(const std::string text, models::RenderChat(format_, {{"user", q.text}}));
    TARE_ASSIGN_OR_RETURN(q.prompt, tokenizer_.Encode(text));
    return q;
  }
  float Reward(const Question& question, std::span<const int32_t> response) const override {
    const std::string text = Show(response);
    const size_t digit = text.find_first_of("0123456789");
    if (digit == std::string::npos) return 0;
    int64_t number = 0;
    for (size_t i = digit;
         i < text.size() && text[i] >= '0' && text[i] <= '9' && number < 1'000'000; ++i) {
      number = number * 10 + (text[i] - '0');
    }
    return number == question.answer ? 1.0f : 0.0f;
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
                                       const models::ModelConfig& config, uint64_t seed) {
  if (name == "pattern") return std::unique_ptr<Task>(new Pattern(config.vocab, seed));
  if (name != "arithmetic") return InvalidArgument("task {}: pattern or arithmetic", name);
  TARE_ASSIGN_OR_RETURN(models::Tokenizer tokenizer, models::LoadTokenizer(env, checkpoint));
  TARE_ASSIGN_OR_RETURN(const std::string text, models::LoadChatTemplate(env, checkpoint));
  TARE_ASSIGN_OR_RETURN(const models::ChatFormat format, models::FindChatFormat(text));
  return std::unique_ptr<Task>(new Arithmetic(std::move(tokenizer), format, seed));
}

}  // namespace tare::rl
