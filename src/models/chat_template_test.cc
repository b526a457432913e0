// Chat templates against Jinja2's renderings of the published templates, and refusals.

#include "models/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "base/env.h"
#include "base/json.h"
#include "models/mini.h"

namespace tare::models {
namespace {

using ::testing::HasSubstr;

TEST(ChatTemplateTest, SameTextAsJinja) {
  auto text = Env::Real()->ReadFile(std::string(TARE_SOURCE_DIR) + "/tests/data/chat/golden.json");
  ASSERT_TRUE(text.ok());
  auto golden = ParseJson(*text);
  ASSERT_TRUE(golden.ok()) << golden.status().ToString();
  std::set<std::string> formats;
  for (const Json& item : *golden) {
    const std::string name = item["template"].get<std::string>();
    // Every rendering says which template it came from; the hash table must know that one.
    ChatFormat format = ChatFormat::kChatMl;
    bool found = false;
    for (int f = 0; f <= static_cast<int>(ChatFormat::kLlama32); ++f) {
      if (name.starts_with(ChatFormatName(static_cast<ChatFormat>(f))) &&
          ChatFormatName(static_cast<ChatFormat>(f)).size() >=
              (found ? ChatFormatName(format).size() : 0)) {
        format = static_cast<ChatFormat>(f);
        found = true;
      }
    }
    ASSERT_TRUE(found) << name;
    formats.insert(name);
    std::vector<ChatMessage> messages;
    for (const Json& m : item["messages"])
      messages.push_back({m["role"].get<std::string>(), m["content"].get<std::string>()});
    ChatOptions options;
    options.add_generation_prompt = item["add_generation_prompt"].get<bool>();
    if (item.contains("enable_thinking"))
      options.enable_thinking = item["enable_thinking"].get<bool>();
    if (item.contains("date_string")) options.date = item["date_string"].get<std::string>();
    auto rendered = RenderChat(format, messages, options);
    ASSERT_TRUE(rendered.ok());
    EXPECT_EQ(*rendered, item["rendered"].get<std::string>())
        << name << " " << item["messages"].dump();
  }
  EXPECT_EQ(formats.size(), 9u);
}

TEST(ChatTemplateTest, KnownByHashAndUnknownRefused) {
  auto config = ParseJson(MiniTokenizerConfigJson());
  ASSERT_TRUE(config.ok());
  const std::string text = (*config)["chat_template"].get<std::string>();
  auto format = FindChatFormat(text);
  ASSERT_TRUE(format.ok()) << format.status().ToString();
  EXPECT_EQ(*format, ChatFormat::kChatMl);
  // One changed byte is another template.
  auto other = FindChatFormat(text + " ");
  EXPECT_EQ(other.status().code(), Code::kUnsupported);
  EXPECT_THAT(other.status().message(), HasSubstr("token IDs"));
}

TEST(ChatTemplateTest, RefusesBadMessages) {
  EXPECT_FALSE(RenderChat(ChatFormat::kChatMl, {}).ok());
  auto role = RenderChat(ChatFormat::kQwen3, {{"user", "a"}, {"tool", "b"}});
  EXPECT_THAT(role.status().message(), HasSubstr("messages[1].role"));
  auto bytes = RenderChat(ChatFormat::kLlama3, {{"user", "a\xff"}});
  EXPECT_THAT(bytes.status().message(), HasSubstr("messages[0].content"));
}

}  // namespace
}  // namespace tare::models
