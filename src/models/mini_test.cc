// MINI is the same bytes on every machine, loads through every door, and its tokenizer works.

#include "models/mini.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/sha256.h"
#include "models/testing_strings.h"
#include "tensor/convert.h"

namespace tare::models {
namespace {

// Over names, shapes and bytes. A changed value is another MINI and needs another version.
std::string BytesHash() {
  auto tensors = MiniTensors();
  TARE_CHECK(tensors.ok()) << tensors.status().ToString();
  Sha256 hash;
  for (const auto& [name, tensor] : *tensors) {
    hash.Update(name + ShapeToString(tensor.shape()));
    hash.Update(tensor.data(), tensor.size_bytes());
  }
  return Hex(hash.Finish());
}

TEST(MiniTest, TheBytesOfMini1NeverChange) {
  EXPECT_EQ(BytesHash(), "a0fe00879ef85410c31954bbf10f6deec6487c14a3b79989fdd673841caf8e26");
  EXPECT_EQ(Hex(Sha256Of(MiniConfigJson())),
            "7b27bedecbd9b555611654613691cbee5abf158abc5e0b4947e5445ae2ab69d5");
  EXPECT_EQ(Hex(Sha256Of(MiniTokenizerJson())),
            "93ba9c7150075e6e462127f151190b8bde61fdaec8b89eeb8af06f9ebf67d7cd");
  EXPECT_EQ(Hex(Sha256Of(MiniTokenizerConfigJson())),
            "3380762bb597bcf9355d78eb68277b96a432a63fa5f5806460b7a12461b9bac8");
}

TEST(MiniTest, HasTheKindsItPromises) {
  const ModelConfig c = MiniConfig();
  EXPECT_TRUE(c.qk_norm);
  EXPECT_GT(c.q_heads, c.kv_heads);
  int windows = 0, sinks = 0, moe = 0;
  for (const LayerConfig& l : c.layers) {
    windows += l.window > 0;
    sinks += l.sink;
    moe += l.moe;
  }
  EXPECT_EQ(windows, 2);
  EXPECT_EQ(sinks, 2);
  EXPECT_EQ(moe, 2);
}

// Weights are spread as their scales say: neither all zero nor wild.
TEST(MiniTest, WeightsHaveTheirSpread) {
  auto tensors = MiniTensors();
  ASSERT_TRUE(tensors.ok());
  for (const auto& [name, tensor] : *tensors) {
    if (tensor.elements() < 16) continue;  // too few to have a spread
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < tensor.elements(); ++i) {
      const double x = Bf16ToF32(tensor.as<uint16_t>()[i]);
      ASSERT_TRUE(std::isfinite(x)) << name;
      sum += x;
      squares += x * x;
    }
    const double n = static_cast<double>(tensor.elements()), mean = sum / n,
                 sigma = std::sqrt(squares / n - mean * mean);
    const bool norm = name.find("norm") != std::string::npos;
    EXPECT_NEAR(
        mean,
        norm ? (name.find("q_norm") != std::string::npos || name.find("k_norm") != std::string::npos
                    ? 1.5
                    : 1.0)
             : 0.0,
        norm ? 0.1 : 0.05)
        << name;
    EXPECT_GT(sigma, 0.03) << name;
    EXPECT_LT(sigma, 2.5) << name;
  }
}

// The planted tie: two experts whose scores are equal for every token.
TEST(MiniTest, RouterRowsTie) {
  auto tensors = MiniTensors();
  int found = 0;
  for (const auto& [name, tensor] : *tensors) {
    if (!name.ends_with("mlp.gate.weight")) continue;
    ++found;
    const int64_t row = tensor.dim(1);
    EXPECT_EQ(
        0, std::memcmp(tensor.as<uint16_t>() + 2 * row, tensor.as<uint16_t>() + 5 * row, row * 2));
    EXPECT_NE(
        0, std::memcmp(tensor.as<uint16_t>() + 2 * row, tensor.as<uint16_t>() + 3 * row, row * 2));
  }
  EXPECT_EQ(found, 2);
}

TEST(MiniTest, TokenizerRoundTripsAndMerges) {
  auto tokenizer = MiniTokenizer();
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().ToString();
  EXPECT_EQ(tokenizer->vocab_size(), MiniConfig().vocab);
  EXPECT_TRUE(tokenizer->MissingBytes().empty());
  for (int i = 0; i < 2000; ++i) {
    const std::string text = testing::GoldenString(i);
    ASSERT_EQ(*tokenizer->Decode(*tokenizer->Encode(text)), text);
  }
  const std::string prompt = "What is the sum of three and four?";
  EXPECT_LT(tokenizer->Encode(prompt)->size(), prompt.size() / 2);
  EXPECT_EQ(*tokenizer->Find("<|im_end|>"), MiniConfig().eos[0]);
}

}  // namespace
}  // namespace tare::models
