// The tokenizer: the same IDs as the `tokenizers` package on 10,000 strings, decode(encode(x)) = x,
// streaming, and refusal of what it does not know.

#include "models/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "base/env.h"
#include "base/json.h"
#include "base/sha256.h"
#include "models/testing_strings.h"
#include "models/utf8.h"

namespace tare::models {
namespace {

using ::testing::HasSubstr;

std::string Data(const std::string& name) {
  auto text = Env::Real()->ReadFile(std::string(TARE_SOURCE_DIR) + "/tests/data/tokenizer/" + name);
  TARE_CHECK(text.ok()) << text.status().ToString();
  return *text;
}

constexpr char kLlama3[] =
    R"re((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)re";
constexpr char kQwen2[] =
    R"re((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)re";

// small.json with the pre-tokenizer and normaliser of the four families, in golden.bin's order.
Json Variant(int index) {
  auto root = ParseJson(Data("small.json"));
  TARE_CHECK(root.ok()) << root.status().ToString();
  const auto byte_level = [](bool regex) {
    return Json{{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", regex}};
  };
  const auto split = [](const char* regex) {
    return Json{{"type", "Split"},
                {"pattern", {{"Regex", regex}}},
                {"behavior", "Isolated"},
                {"invert", false}};
  };
  const auto sequence = [](Json a, Json b) {
    Json list = Json::array();
    list.push_back(std::move(a));
    list.push_back(std::move(b));
    return Json{{"type", "Sequence"}, {"pretokenizers", std::move(list)}};
  };
  Json& pre = (*root)["pre_tokenizer"];
  switch (index) {
    case 0:
      pre = byte_level(true);
      break;
    case 1:
      pre = sequence(Json{{"type", "Digits"}, {"individual_digits", true}}, byte_level(true));
      break;
    case 2:
      pre = sequence(split(kLlama3), byte_level(false));
      (*root)["model"]["ignore_merges"] = true;
      break;
    default:
      pre = sequence(split(kQwen2), byte_level(false));
      (*root)["normalizer"] = Json{{"type", "NFC"}};
  }
  return *root;
}

Tokenizer Make(int variant) {
  auto tokenizer = Tokenizer::FromJson(Variant(variant).dump());
  TARE_CHECK(tokenizer.ok()) << tokenizer.status().ToString();
  return *tokenizer;
}

constexpr int kStrings = 10000;
constexpr size_t kHeader = 44;

TEST(TokenizerTest, SameIdsAsTheTokenizersPackageOnTenThousandStrings) {
  const std::string golden = Data("golden.bin");
  ASSERT_EQ(golden.size(), kHeader + 4 * 4 * kStrings);
  ASSERT_EQ(golden.substr(0, 8), "TKGOLD01");
  std::vector<std::string> strings;
  Sha256 all;
  for (int i = 0; i < kStrings; ++i) {
    strings.push_back(testing::GoldenString(i));
    all.Update(strings.back() + "\n");
  }
  const Sha256Digest digest = all.Finish();
  ASSERT_EQ(std::memcmp(digest.data(), golden.data() + 12, 32), 0)
      << "the strings are other strings";
  for (int variant = 0; variant < 4; ++variant) {
    const Tokenizer tokenizer = Make(variant);
    int wrong = 0;
    for (int i = 0; i < kStrings; ++i) {
      auto ids = tokenizer.Encode(strings[i]);
      ASSERT_TRUE(ids.ok()) << ids.status().ToString();
      const Sha256Digest got = Sha256Of(ids->data(), ids->size() * 4);
      if (std::memcmp(got.data(), golden.data() + kHeader + 4 * (variant * kStrings + i), 4) != 0) {
        if (++wrong <= 5)
          ADD_FAILURE() << "variant " << variant << " string " << i << ": "
                        << Printable(strings[i]);
      }
      if (variant != 3) {
        auto back = tokenizer.Decode(*ids);
        ASSERT_TRUE(back.ok());
        ASSERT_EQ(*back, strings[i]);
      }
    }
    EXPECT_EQ(wrong, 0) << "variant " << variant;
  }
}

// Negative control: with another family's rule the same golden values are missed.
TEST(TokenizerTest, AnotherSplitRuleIsNoticed) {
  const std::string golden = Data("golden.bin");
  const Tokenizer llama = Make(2);
  int wrong = 0;
  for (int i = 0; i < kStrings; ++i) {
    auto ids = llama.Encode(testing::GoldenString(i));
    const Sha256Digest got = Sha256Of(ids->data(), ids->size() * 4);
    wrong += std::memcmp(got.data(), golden.data() + kHeader + 4 * i, 4) != 0;
  }
  EXPECT_GT(wrong, 1000);
}

// decode(encode(x)) = x for arbitrary UTF-8: random scalar values from the whole range.
TEST(TokenizerTest, RoundTripOfArbitraryUtf8AndStreaming) {
  testing::SplitMix random(7);
  for (int i = 0; i < 3000; ++i) {
    std::string text;
    for (uint64_t n = random.Below(40); n > 0; --n) {
      const uint64_t limit =
          std::array<uint64_t, 4>{0x80, 0x800, 0x10000, 0x110000}[random.Below(4)];
      uint32_t c = static_cast<uint32_t>(random.Below(limit));
      if (c >= 0xD800 && c < 0xE000) c = 0x20AC;
      testing::AppendUtf8(c, &text);
    }
    for (int variant = 0; variant < 3; ++variant) {
      static const std::vector<Tokenizer> tokenizers = {Make(0), Make(1), Make(2)};
      auto ids = tokenizers[variant].Encode(text);
      ASSERT_TRUE(ids.ok()) << ids.status().ToString();
      StreamDecoder stream(tokenizers[variant]);
      std::string joined;
      for (int32_t id : *ids) {
        auto piece = stream.Push(id);
        ASSERT_TRUE(piece.ok());
        ASSERT_TRUE(CheckUtf8(*piece).ok()) << "a streamed piece is not whole UTF-8";
        ASSERT_LE(stream.held_bytes(), 3u);
        joined += *piece;
      }
      joined += stream.Finish();
      ASSERT_EQ(joined, text);
    }
  }
}

// Any ids, also such that their bytes are no UTF-8: the stream joins to what Decode gives, and what
// was streamed is never taken back.
TEST(TokenizerTest, StreamOfRandomIdsEqualsDecode) {
  const Tokenizer tokenizer = Make(0);
  testing::SplitMix random(11);
  for (int i = 0; i < 2000; ++i) {
    std::vector<int32_t> ids;
    std::string bytes;
    for (uint64_t n = random.Below(30); n > 0; --n) {
      ids.push_back(
          static_cast<int32_t>(random.Below(random.Below(2) == 0 ? 260 : tokenizer.vocab_size())));
      bytes += tokenizer.TokenBytes(ids.back());
    }
    StreamDecoder stream(tokenizer);
    std::string joined;
    for (int32_t id : ids) joined += *stream.Push(id);
    joined += stream.Finish();
    std::string whole;
    AppendLossyUtf8(bytes, true, &whole);
    ASSERT_EQ(joined, whole);
    ASSERT_EQ(joined, *tokenizer.Decode(ids));
  }
}

TEST(TokenizerTest, HoldsBackIncompleteUtf8) {
  const Tokenizer tokenizer = Make(0);
  const auto byte = [&](const char* b) { return *tokenizer.Find(b); };
  StreamDecoder stream(tokenizer);
  EXPECT_EQ(*stream.Push(byte("\xF0")), "");
  EXPECT_EQ(*stream.Push(byte("\x9F")), "");
  EXPECT_EQ(*stream.Push(byte("\x98")), "");
  EXPECT_EQ(stream.held_bytes(), 3u);
  EXPECT_EQ(*stream.Push(byte("\x80")), "\U0001F600");
  EXPECT_EQ(*stream.Push(byte("\xE2")), "");
  EXPECT_EQ(*stream.Push(byte("A")),
            "\uFFFD"
            "A");
  EXPECT_EQ(*stream.Push(byte("\xC3")), "");
  EXPECT_EQ(stream.Finish(), "\uFFFD");
  EXPECT_EQ(stream.Finish(), "");
  EXPECT_EQ(stream.Push(-1).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(stream.Push(tokenizer.vocab_size()).status().code(), Code::kInvalidArgument);
}

TEST(TokenizerTest, SpecialTokensAreParsedOrPlainAsAsked) {
  const Tokenizer tokenizer = Make(0);
  const int32_t end = *tokenizer.Find("<|im_end|>");
  EXPECT_TRUE(tokenizer.IsSpecial(end));
  auto ids = tokenizer.Encode("a<|im_end|>b");
  ASSERT_EQ(ids->size(), 3u);
  EXPECT_EQ((*ids)[1], end);
  EXPECT_EQ(*tokenizer.Decode(*ids), "a<|im_end|>b");
  EXPECT_EQ(*tokenizer.Decode(*ids, true), "ab");
  auto plain = tokenizer.Encode("a<|im_end|>b", {.parse_special = false});
  EXPECT_EQ(std::count(plain->begin(), plain->end(), end), 0);
  EXPECT_EQ(*tokenizer.Decode(*plain, true), "a<|im_end|>b");
}

TEST(TokenizerTest, RefusesTextThatIsNotUtf8) {
  const Tokenizer tokenizer = Make(0);
  for (const char* bad :
       {"ab\xFF", "ab\xC0\x80", "ab\xED\xA0\x80", "ab\xF4\x90\x80\x80", "ab\xE2\x82"}) {
    auto ids = tokenizer.Encode(bad);
    ASSERT_FALSE(ids.ok());
    EXPECT_EQ(ids.status().code(), Code::kInvalidArgument);
    EXPECT_THAT(ids.status().message(), HasSubstr("byte 2"));
  }
}

// A hostile word of 256 KiB costs time in proportion to n log n; with a quadratic merge loop this
// test would run for many minutes.
TEST(TokenizerTest, HugeWordsAndRunsOfSpaces) {
  for (int variant = 0; variant < 4; ++variant) {
    const Tokenizer tokenizer = Make(variant);
    for (const std::string& unit : {std::string("a"), std::string(" "), std::string("\n"),
                                    std::string("'"), std::string("\u0301"), std::string("1")}) {
      std::string text;
      while (text.size() < (1 << 18)) text += unit;
      auto ids = tokenizer.Encode(text);
      ASSERT_TRUE(ids.ok()) << ids.status().ToString();
      if (variant != 3) {
        ASSERT_EQ(*tokenizer.Decode(*ids), text);
      }
    }
  }
}

TEST(TokenizerTest, PostProcessorPutsSpecialsAround) {
  Json root = Variant(2);
  root["post_processor"] =
      Json{{"type", "TemplateProcessing"},
           {"single", Json::array({Json{{"SpecialToken", {{"id", "<|im_start|>"}, {"type_id", 0}}}},
                                   Json{{"Sequence", {{"id", "A"}, {"type_id", 0}}}}})},
           {"special_tokens", {{"<|im_start|>", {{"id", "<|im_start|>"}, {"ids", {1501}}}}}}};
  auto tokenizer = Tokenizer::FromJson(root.dump());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().ToString();
  EXPECT_EQ(tokenizer->Encode("hi", {.add_special = true})->front(), 1501);
  EXPECT_NE(tokenizer->Encode("hi")->front(), 1501);
}

// Every refusal names the key at fault.
TEST(TokenizerTest, RefusesWhatItDoesNotKnow) {
  const auto refused = [](auto change, Code code, const char* key) {
    Json root = Variant(1);
    change(root);
    auto tokenizer = Tokenizer::FromJson(root.dump());
    ASSERT_FALSE(tokenizer.ok()) << key;
    EXPECT_EQ(tokenizer.status().code(), code) << tokenizer.status().ToString();
    EXPECT_THAT(tokenizer.status().message(), HasSubstr(key));
  };
  const Code kBad = Code::kInvalidArgument, kNo = Code::kUnsupported;
  refused([](Json& r) { r["model"]["type"] = "Unigram"; }, kNo, "Unigram");
  refused([](Json& r) { r["model"]["byte_fallback"] = true; }, kNo, "byte_fallback");
  refused([](Json& r) { r["model"]["dropout"] = 0.1; }, kNo, "dropout");
  refused([](Json& r) { r["model"]["unk_token"] = "<unk>"; }, kNo, "unk_token");
  refused([](Json& r) { r["normalizer"] = Json{{"type", "Lowercase"}}; }, kNo, "Lowercase");
  refused([](Json& r) { r["pre_tokenizer"] = Json{{"type", "Whitespace"}}; }, kNo, "Whitespace");
  refused([](Json& r) { r["pre_tokenizer"] = nullptr; }, kNo, "pre_tokenizer");
  refused([](Json& r) { r["decoder"] = Json{{"type", "WordPiece"}}; }, kNo, "WordPiece");
  refused([](Json& r) { r["added_tokens"][0]["lstrip"] = true; }, kNo, "added_tokens[0].lstrip");
  refused([](Json& r) { r["added_tokens"][0]["id"] = -1; }, kBad, "added_tokens[0].id");
  refused([](Json& r) { r["added_tokens"][1]["content"] = r["added_tokens"][0]["content"]; }, kBad,
          "same content");
  refused([](Json& r) { r["model"]["vocab"]["zzzzzz"] = 5; }, kBad, "id 5 twice");
  refused([](Json& r) { r["model"]["vocab"]["a"] = "x"; }, kBad, "model.vocab");
  refused([](Json& r) { r["model"]["merges"][3] = "only"; }, kBad, "merges[3]");
  refused([](Json& r) { r["model"]["merges"][3] = "\u00e5\u00a5\u00bd qqq"; }, kBad, "merges[3]");
  refused([](Json& r) { r["model"].erase("merges"); }, kBad, "model.merges");
  refused([](Json& r) { r.erase("model"); }, kBad, "model");
  refused([](Json& r) { r["truncation"] = Json{{"max_length", 5}}; }, kNo, "truncation");
  refused(
      [](Json& r) {
        r["post_processor"] = Json{{"type", "BertProcessing"}};
      },
      kNo, "BertProcessing");
  Json near = Variant(2);
  near["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = std::string(kLlama3) + "|x";
  EXPECT_EQ(Tokenizer::FromJson(near.dump()).status().code(), kNo);
  EXPECT_FALSE(Tokenizer::FromJson("[]").ok());
  EXPECT_FALSE(Tokenizer::FromJson("{").ok());
}

// From GGUF metadata the same tokenizer results; a byte that a vocabulary lacks is an error.
TEST(TokenizerTest, GgufVocabularyGivesTheSameTokenizer) {
  const Json root = Variant(1);
  GgufVocabulary v;
  v.model = "gpt2";
  v.pre = "smollm";
  v.tokens.resize(1503);
  v.token_type.assign(1503, 1);
  for (const auto& [text, id] : root["model"]["vocab"].items()) v.tokens[id.get<int>()] = text;
  for (const Json& token : root["added_tokens"]) {
    v.tokens[token["id"].get<int>()] = token["content"].get<std::string>();
    v.token_type[token["id"].get<int>()] = 3;
  }
  for (const Json& merge : root["model"]["merges"]) v.merges.push_back(merge.get<std::string>());
  auto gguf = Tokenizer::FromGguf(v);
  ASSERT_TRUE(gguf.ok()) << gguf.status().ToString();
  const Tokenizer json = Make(1);
  for (int i = 0; i < 500; ++i) {
    const std::string text = testing::GoldenString(i);
    ASSERT_EQ(*gguf->Encode(text), *json.Encode(text));
  }
  const auto code = [&](auto change) {
    GgufVocabulary changed = v;
    change(changed);
    return Tokenizer::FromGguf(changed).status().code();
  };
  EXPECT_EQ(code([](auto& g) { g.pre = "tekken"; }), Code::kUnsupported);
  EXPECT_EQ(code([](auto& g) { g.model = "llama"; }), Code::kUnsupported);
  EXPECT_EQ(code([](auto& g) { g.token_type.pop_back(); }), Code::kInvalidArgument);
  EXPECT_EQ(code([](auto& g) { g.merges[0] = "x"; }), Code::kInvalidArgument);
  EXPECT_EQ(code([](auto& g) { g.tokens[5] = g.tokens[6]; }), Code::kInvalidArgument);
  EXPECT_EQ(code([](auto& g) { g.bos = 1503; }), Code::kInvalidArgument);
  EXPECT_EQ(code([](auto& g) { g.token_type[9] = 6; }), Code::kUnsupported);

  const int32_t digit_id = *json.Find("7");
  v.token_type[digit_id] = 5;  // unused: the byte '7' has no token now
  std::erase_if(v.merges, [](const std::string& m) { return m.find('7') != std::string::npos; });
  auto without = Tokenizer::FromGguf(v);
  ASSERT_TRUE(without.ok()) << without.status().ToString();
  EXPECT_EQ(without->MissingBytes(), std::vector<uint8_t>{'7'});
  auto ids = without->Encode("x 7");
  EXPECT_EQ(ids.status().code(), Code::kNotFound);
  EXPECT_THAT(ids.status().message(), HasSubstr("0x37"));
  EXPECT_EQ(*without->Decode(*without->Encode("x7y", {.skip_missing_bytes = true})), "xy");
}

}  // namespace
}  // namespace tare::models
