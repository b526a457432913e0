#include "base/reasons.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

namespace tare {
namespace {

TEST(Reasons, EveryCodeIsWellFormedAndFound) {
  ASSERT_FALSE(AllReasons().empty());
  for (const Reason& r : AllReasons()) {
    EXPECT_EQ(r.code.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-"),
              std::string_view::npos)
        << r.code;
    EXPECT_NE(r.verdict, Verdict::kPass) << r.code;
    EXPECT_GT(r.sentence.size(), 10u) << r.code;
    EXPECT_GT(r.next.size(), 10u) << r.code;
    EXPECT_EQ(FindReason(r.code), &r);
  }
  EXPECT_EQ(FindReason("no-such-code"), nullptr);
  EXPECT_EQ(FindReason(""), nullptr);
  EXPECT_EQ(reason::kNoValidTokens, "no-valid-tokens");
}

// Regenerate with: build/release/tare reasons --markdown > docs/reasons.md
TEST(Reasons, PageMatchesTable) {
  std::ifstream in(TARE_SOURCE_DIR "/docs/reasons.md", std::ios::binary);
  const std::string page((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  EXPECT_EQ(page, ReasonsMarkdown()) << "docs/reasons.md differs from src/base/reasons.inc: run "
                                        "`tare reasons --markdown > docs/reasons.md`";
}

}  // namespace
}  // namespace tare
