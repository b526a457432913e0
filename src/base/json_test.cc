#include "base/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tare {
namespace {

using ::testing::HasSubstr;

std::string ErrorOf(std::string_view text, const JsonLimits& limits = {}) {
  const auto r = ParseJson(text, limits);
  return r.ok() ? "ok" : r.status().ToString();
}

// What is right parses, keeps the order of keys, and keeps 64-bit integers exact.
TEST(Json, ParsesWhatIsRight) {
  const auto r = ParseJson(
      "{\"b\": [1, -2, 2.5e0, true, null], \"a\": {\"x\": \"\\u00e9\"}, "
      "\"n\": 18446744073709551615, \"m\": -9223372036854775808}");
  ASSERT_TRUE(r.ok()) << r.status().ToString();
  EXPECT_EQ(r->begin().key(), "b");
  EXPECT_EQ((*r)["a"]["x"], "\xc3\xa9");
  EXPECT_EQ((*r)["n"].get<uint64_t>(), 18446744073709551615u);
  EXPECT_EQ((*r)["m"].get<int64_t>(), INT64_MIN);
  EXPECT_EQ((*r)["b"].size(), 5u);
}

// Every malformed input is an error that says where.
TEST(Json, RefusesWithLineAndColumn) {
  EXPECT_THAT(ErrorOf(""), HasSubstr("line 1 column 1"));
  EXPECT_THAT(ErrorOf("{\"a\": 1,\n \"a\": 2}"), HasSubstr("line 2 column 5: duplicate key \"a\""));
  EXPECT_THAT(ErrorOf("[1,\n2,\n]"), HasSubstr("line 3 column 1"));
  EXPECT_THAT(ErrorOf("{} x"), HasSubstr("line 1 column 4"));
  EXPECT_THAT(ErrorOf("{}{}"), HasSubstr("line 1 column 3"));
  EXPECT_THAT(ErrorOf("\xef\xbb\xbf{}"), HasSubstr("byte order mark"));
  EXPECT_THAT(ErrorOf("[18446744073709551616]"), HasSubstr("does not fit 64 bits"));
  EXPECT_THAT(ErrorOf("[1e999]"), HasSubstr("invalid-argument"));
  EXPECT_THAT(ErrorOf("[NaN]"), HasSubstr("line 1"));
  EXPECT_THAT(ErrorOf("['a']"), HasSubstr("line 1"));
  EXPECT_THAT(ErrorOf("[1] // c"), HasSubstr("line 1"));
  EXPECT_THAT(ErrorOf("[\"\xff\"]"), HasSubstr("line 1"));
  EXPECT_THAT(ErrorOf("[\"\xed\xa0\x80\"]"), HasSubstr("line 1"));
  EXPECT_THAT(ErrorOf("[\"\\ud800\"]"), HasSubstr("line 1"));
  EXPECT_THAT(ErrorOf(std::string_view("[1]\0", 4)), HasSubstr("line 1 column 4"));
  EXPECT_THAT(ErrorOf("[\"a\nb\"]"), HasSubstr("line 1"));
}

// Depth and size are limited, so that hostile input costs what the caller allows.
TEST(Json, KeepsLimits) {
  JsonLimits limits;
  limits.max_depth = 3;
  EXPECT_EQ(ErrorOf("[[[1]]]", limits), "ok");
  EXPECT_THAT(ErrorOf("[[[[1]]]]", limits), HasSubstr("nested deeper than 3"));
  EXPECT_THAT(ErrorOf(std::string(1000000, '[')), HasSubstr("nested deeper than 64"));
  limits.max_bytes = 4;
  EXPECT_THAT(ErrorOf("[1,2]", limits), HasSubstr("exhausted"));
}

// A truncation at any byte is an error.
TEST(Json, EveryTruncationIsAnError) {
  const std::string text = "{\"name\": [1, 2.5, \"\\u00e9x\", true, null], \"b\": {\"c\": -7}}";
  for (size_t n = 0; n < text.size(); ++n) EXPECT_NE(ErrorOf(text.substr(0, n)), "ok") << n;
  EXPECT_EQ(ErrorOf(text), "ok");
}

// An object of 100,000 keys is read in linear time, and a duplicate among them is found.
TEST(Json, LargeObjects) {
  std::string text = "{";
  for (int i = 0; i < 100000; ++i) text += fmt::format("\"key.{}\":{},", i, i);
  EXPECT_EQ(ErrorOf(text + "\"z\":1}"), "ok");
  EXPECT_THAT(ErrorOf(text + "\"key.5\":1}"), HasSubstr("duplicate key \"key.5\""));
}

// Equal values give equal bytes whatever the order of keys; floats have no place in an identity.
TEST(Json, Canonical) {
  const auto canonical = [](std::string_view text) {
    auto r = CanonicalJson(ParseJson(text).value());
    return r.ok() ? *r : r.status().ToString();
  };
  EXPECT_EQ(canonical("{\"b\": 1, \"a\": [true, null, -3], \"B\": \"x\\u0001\\n\\\"\\u00e9\"}"),
            "{\"B\":\"x\\u0001\\n\\\"\xc3\xa9\",\"a\":[true,null,-3],\"b\":1}");
  EXPECT_EQ(canonical("{\"a\":1,\"b\":2}"), canonical("{\"b\":2,\"a\":1}"));
  EXPECT_THAT(canonical("{\"a\":{\"b\":0.5}}"),
              HasSubstr("a: b: canonical JSON holds no floating-point"));
  Json bad = "\xff";
  EXPECT_FALSE(CanonicalJson(bad).ok());
}

// Nothing that a terminal would act on survives; ordinary text does.
TEST(Json, PrintableEscapes) {
  EXPECT_EQ(Printable("plain \xc3\xa9 \xe6\xbc\xa2"), "plain \xc3\xa9 \xe6\xbc\xa2");
  EXPECT_EQ(Printable("a\x1b[31m\n"), "a\\x1b[31m\\x0a");
  EXPECT_EQ(Printable("\xff\xc3"), "\\xff\\xc3");
  EXPECT_EQ(Printable("x\xe2\x80\xaey"), "x\\xe2\\x80\\xaey");
  EXPECT_EQ(Printable("\xc2\x9b"), "\\xc2\\x9b");
}

}  // namespace
}  // namespace tare
