#include "tensor/logprobs.h"

#include <gtest/gtest.h>

namespace tare {
namespace {

const char kLine[] =
    R"({"schema":"tare.logprobs/1","sequence":"0","weights":"theta0","kind":"raw","prompt":[1,42],"tokens":[7,9],"dtype":"f32","bits":["bf8ccccd",null],"mask":[1,0]})";

TEST(Logprobs, LineRoundTrips) {
  const LogprobSequence s = ParseLogprobLine(kLine).value();
  EXPECT_EQ(s.sequence, "0");
  EXPECT_EQ(s.prompt, (std::vector<int32_t>{1, 42}));
  EXPECT_EQ(s.words, (std::vector<uint64_t>{0xbf8ccccd, 0}));
  EXPECT_EQ(s.present, (std::vector<uint8_t>{1, 0}));
  EXPECT_EQ(s.mask, (std::vector<uint8_t>{1, 0}));
  EXPECT_FALSE(s.decimal);
  EXPECT_EQ(FormatLogprobLine(s), std::string(kLine) + "\n");
}

TEST(Logprobs, DecimalsAreMarked) {
  std::string line = kLine;
  line.replace(line.find(R"("bits":["bf8ccccd",null])"), 24, R"("logprobs":[-1.1,0])");
  const LogprobSequence s = ParseLogprobLine(line).value();
  EXPECT_TRUE(s.decimal);
  EXPECT_EQ(s.words[0], 0xbf8ccccdu);
  EXPECT_EQ(s.present, (std::vector<uint8_t>{1, 1}));  // 0 is a value
}

TEST(Logprobs, HostileLinesGetTheirOwnError) {
  const auto with = [](const std::string& from, const std::string& to) {
    std::string text = kLine;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  };
  const std::pair<std::string, std::string> cases[] = {
      {"", "line 1"},
      {"[1]", "not an object"},
      {with("logprobs/1", "logprobs/2"), "'schema' is not"},
      {with("\"mask\"", "\"masks\""), "unknown key 'masks'"},
      {with("raw", "rawer"), "allowed are raw and processed"},
      {with("[7,9]", "[7,4294967296]"), "32-bit"},
      {with("[7,9]", "[7,1.0]"), "32-bit"},
      {with("[7,9]", "[7]"), "1 values, one per token"},
      {with("f32", "i32"), "not a float dtype"},
      {with("bf8ccccd", "BF8CCCCD"), "8 lower-case hex digits"},
      {with("bf8ccccd", "0xbf8ccccd"), "8 lower-case hex digits"},
      {with("bf8ccccd", "bf8ccc"), "8 lower-case hex digits"},
      {with("[1,0]", "[1,2]"), "allowed are 0 and 1"},
      {with("[1,0]", "[1]"), "'mask' is not an array of 2"},
      {with("\"bits\"", "\"logprobs\""), "neither a number nor null"},
      {with("\"mask\":[1,0]", "\"logprobs\":[1,0]"), "exactly one of"},
      {with("\"weights\":\"theta0\",", ""), "'weights' is not a string"}};
  for (const auto& [line, want] : cases) {
    const Status status = ParseLogprobs(line + "\n").status();
    EXPECT_EQ(status.code(), Code::kDataLoss) << line;
    EXPECT_NE(status.message().find(want), std::string::npos)
        << status.message() << " wanted " << want;
  }
}

// Every cut of a file of two lines is an error, except between whole lines, where it is a shorter
// file.
TEST(Logprobs, CutFilesAreErrors) {
  std::string two = kLine;
  two.replace(two.find("\"0\""), 3, "\"1\"");
  const std::string text = std::string(kLine) + "\n" + two + "\n";
  ASSERT_EQ(ParseLogprobs(text)->size(), 2u);
  const size_t border = sizeof(kLine);
  for (size_t keep = 1; keep < text.size(); ++keep) {
    EXPECT_EQ(ParseLogprobs(text.substr(0, keep)).ok(), keep == border) << keep;
  }
  EXPECT_NE(
      ParseLogprobs(std::string(kLine) + "\n" + kLine + "\n").status().message().find("twice"),
      std::string::npos);
}

}  // namespace
}  // namespace tare
