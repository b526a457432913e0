// The real model: tokens, template and logprobs of SmolLM2-135M-Instruct. Skipped where the model is
// absent (scripts/get_model.sh fetches it).

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>

#include "base/env.h"
#include "base/json.h"
#include "base/sha256.h"
#include "models/load_tokenizer.h"
#include "models/testing_strings.h"
#include "tensor/safetensors.h"

namespace tare::models {
namespace {

std::string ModelPath() {
  const char* path = std::getenv("TARE_SMOLLM2");
  return path != nullptr ? path : std::string(TARE_SOURCE_DIR) + "/models/smollm2";
}
std::string Data(const std::string& name) { return std::string(TARE_SOURCE_DIR) + "/tests/data/" + name; }

#define REQUIRE_MODEL()                                                                            \
  if (!Env::Real()->Exists(ModelPath() + "/config.json")) {                                        \
    GTEST_SKIP() << ModelPath() << " is absent; scripts/get_model.sh fetches it";                  \
  }

// The eight prompts: the chat template gives the rendered text, the tokenizer its token IDs, exactly.
TEST(SmolLm2Test, PromptsHaveTheReferenceTokens) {
  REQUIRE_MODEL();
  auto checkpoint = Checkpoint::Open(ModelPath());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  auto tokenizer = LoadTokenizer(Env::Real(), *checkpoint);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().ToString();
  auto chat_template = LoadChatTemplate(Env::Real(), *checkpoint);
  ASSERT_TRUE(chat_template.ok()) << chat_template.status().ToString();
  auto format = FindChatFormat(*chat_template);
  ASSERT_TRUE(format.ok()) << format.status().ToString();
  auto text = Env::Real()->ReadFile(Data("reference/smollm2_f64.json"));
  ASSERT_TRUE(text.ok());
  auto prompts = ParseJson(*text);
  ASSERT_TRUE(prompts.ok());
  auto reference = SafetensorsFile::Open(Env::Real(), Data("reference/smollm2_f64.safetensors"));
  ASSERT_TRUE(reference.ok());
  ASSERT_EQ(prompts->size(), 8u);
  for (size_t i = 0; i < prompts->size(); ++i) {
    const Json& p = (*prompts)[i];
    auto rendered = RenderChat(*format, {{"user", p["prompt"].get<std::string>()}});
    ASSERT_TRUE(rendered.ok());
    EXPECT_EQ(*rendered, p["rendered"].get<std::string>());
    auto ids = tokenizer->Encode(*rendered);
    ASSERT_TRUE(ids.ok()) << ids.status().ToString();
    const Tensor tokens = *reference->Get(std::to_string(i) + ".tokens");
    ASSERT_EQ(static_cast<int>(ids->size()), p["prompt_tokens"].get<int>());
    EXPECT_EQ(0, std::memcmp(ids->data(), tokens.data(), ids->size() * 4)) << "prompt " << i;
    // The continuation's text decodes to what the reference says, token by token too.
    std::span<const int32_t> rest(tokens.as<int32_t>() + ids->size(), tokens.elements() - ids->size());
    EXPECT_EQ(*tokenizer->Decode(rest), p["text"].get<std::string>());
    StreamDecoder stream(*tokenizer);
    std::string joined;
    for (int32_t id : rest) joined += *stream.Push(id);
    EXPECT_EQ(joined + stream.Finish(), p["text"].get<std::string>());
  }
}

TEST(SmolLm2Test, TokenizerGivesTheSameIdsOnTenThousandStrings) {
  REQUIRE_MODEL();
  auto checkpoint = Checkpoint::Open(ModelPath());
  ASSERT_TRUE(checkpoint.ok());
  auto tokenizer = LoadTokenizer(Env::Real(), *checkpoint);
  ASSERT_TRUE(tokenizer.ok());
  auto golden = Env::Real()->ReadFile(Data("tokenizer/smollm2_golden.bin"));
  ASSERT_TRUE(golden.ok());
  ASSERT_EQ(golden->size(), 44u + 4 * 10000);
  int wrong = 0;
  for (int i = 0; i < 10000; ++i) {
    const std::string text = testing::GoldenString(i);
    auto ids = tokenizer->Encode(text, {.skip_missing_bytes = true});
    ASSERT_TRUE(ids.ok());
    const Sha256Digest got = Sha256Of(ids->data(), ids->size() * 4);
    if (std::memcmp(got.data(), golden->data() + 44 + 4 * i, 4) != 0 && ++wrong < 4) {
      ADD_FAILURE() << "string " << i << ": " << Printable(text);
    }
    EXPECT_EQ(*tokenizer->Decode(*ids), text);
  }
  EXPECT_EQ(wrong, 0);
  // The vocabulary lacks 21 bytes: an error by default, dropped on demand as other tools do silently.
  EXPECT_EQ(tokenizer->MissingBytes().size(), 21u);
  EXPECT_EQ(tokenizer->Encode("a\x04z").status().code(), Code::kNotFound);
  EXPECT_EQ(*tokenizer->Decode(*tokenizer->Encode("a\x04z", {.skip_missing_bytes = true})), "az");
}

}  // namespace
}  // namespace tare::models
