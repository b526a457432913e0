#include "tensor/gguf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "tensor/convert.h"
#include "tensor/safetensors.h"
#include "tensor/testing_gguf.h"

namespace tare {
namespace {

using ::testing::HasSubstr;

std::string DataPath(const std::string& name) {
  return std::string(TARE_SOURCE_DIR) + "/tests/data/formats/" + name;
}

std::string ErrorOf(std::string_view file) {
  Tensor copy = Tensor::Allocate(DType::kU8, {static_cast<int64_t>(file.size())}).value();
  if (!file.empty()) std::memcpy(copy.mutable_data(), file.data(), file.size());
  const auto r = GgufFile::Parse({static_cast<const char*>(copy.data()), file.size()},
                                 std::make_shared<Tensor>(copy), "f");
  return r.ok() ? "ok" : r.status().ToString();
}

// Every block type gives the bits of the gguf package, random scales, infinities and subnormals
// included.
TEST(Gguf, DequantisesWithTheBitsOfThePackage) {
  const auto file = GgufFile::Open(Env::Real(), DataPath("types.gguf"));
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  const auto golden =
      SafetensorsFile::Open(Env::Real(), DataPath("types_f32_bits.safetensors")).value();
  ASSERT_EQ(file->entries().size(), 11u);
  for (const GgufEntry& e : file->entries()) {
    const Tensor got = file->DequantizeF32(e).value();
    const Tensor want = golden.Get(e.name).value();
    ASSERT_EQ(got.shape(), want.shape()) << e.name;
    int64_t finite = 0;
    for (int64_t i = 0; i < got.elements(); ++i) {
      const uint32_t w = want.as<uint32_t>()[i];
      const uint32_t g = got.as<uint32_t>()[i];
      if (e.type->name != "F32" && (w & 0x7fffffff) > 0x7f800000) {
        ASSERT_EQ(g, 0x7fffffffu) << e.name << " " << i;  // the package keeps the CPU's NaN
      } else {
        ASSERT_EQ(g, w) << e.name << " " << i;
        finite += (w & 0x7f800000) != 0x7f800000;
      }
    }
    EXPECT_GT(finite, got.elements() / 2) << e.name << ": too few finite values to mean anything";
  }
}

TEST(Gguf, ReadsMetadata) {
  const auto file = GgufFile::Open(Env::Real(), DataPath("types.gguf")).value();
  EXPECT_EQ(file.version(), 3u);
  EXPECT_EQ(file.String("general.architecture").value(), "llama");
  EXPECT_EQ(file.Integer("test.u32").value(), 7);
  EXPECT_EQ(file.Integer("test.i64").value(), -(int64_t{1} << 40));
  EXPECT_EQ(file.Float("test.f32").value(), static_cast<double>(0.1f));
  EXPECT_TRUE(file.Bool("test.bool").value());
  EXPECT_EQ(file.String("test.string").value(), "na\xc3\xafve");
  EXPECT_EQ(file.Find("test.array")->strings, (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(file.Find("test.ints")->integers, (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(file.Integer("absent").status().code(), Code::kNotFound);
  EXPECT_THAT(file.Integer("test.string").status().message(),
              HasSubstr("is string; an integer expected"));
  EXPECT_THAT(file.String("test.array").status().message(), HasSubstr("an array of string"));
}

// Each fault has its own error, with the offset or the name.
TEST(Gguf, EachFaultItsOwnError) {
  EXPECT_EQ(ErrorOf(GgufBuilder().Start(0, 0).Data(0)), "ok");
  EXPECT_EQ(ErrorOf(GgufBuilder().Start(1, 0, 2).Tensor("a", {2}, 0, 0).Data(8)), "ok");
  EXPECT_EQ(ErrorOf(GgufBuilder().Start(1, 0).Tensor("a", {2}, 0, 0).Data(32)), "ok");  // padded
  EXPECT_THAT(ErrorOf(""), HasSubstr("a GGUF file starts with"));
  EXPECT_THAT(ErrorOf("GGML...."), HasSubstr("starts with \"GGML\""));
  EXPECT_THAT(ErrorOf(GgufBuilder().Start(0, 0, 1).Data(0)),
              HasSubstr("unsupported: f: GGUF version 1"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Start(0, 0, 4).Data(0)), HasSubstr("GGUF version 4"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Start(0, 0, 0x03000000).Data(0)), HasSubstr("big-endian"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Start(1000, 0).Data(64)),
              HasSubstr("claims 0 metadata values and 1000"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Start(0, ~uint64_t{0}).Data(64)), HasSubstr("claims"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Start(0, 1).Text("k").Put(13u).Data(64)),
              HasSubstr("a value type is 13"));
  EXPECT_THAT(
      ErrorOf(GgufBuilder().Start(0, 1).Text("k").Put(9u).Put(9u).Put(uint64_t{1}).Data(64)),
      HasSubstr("array of arrays"));
  EXPECT_THAT(
      ErrorOf(GgufBuilder().Start(0, 1).Text("k").Put(9u).Put(4u).Put(uint64_t{1} << 62).Data(64)),
      HasSubstr("claims 4611686018427387904 elements of u32"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Start(0, 1).Text("k").Put(8u).Put(uint64_t{1} << 40).Data(64)),
              HasSubstr("a string claims"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Start(0, 1).Text("k").Put(8u).Put(uint64_t{500}).Data(64)),
              HasSubstr("metadata \"k\": at byte"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Start(0, 1).Text("k").Put(7u).Put(uint8_t{2}).Data(64)),
              HasSubstr("a bool is 2"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Start(0, 1).Text("").Put(0u).Put(uint8_t{2}).Data(64)),
              HasSubstr("empty"));
  EXPECT_THAT(
      ErrorOf(
          GgufBuilder().Start(0, 2).Text("k").Put(4u).Put(1u).Text("k").Put(4u).Put(1u).Data(0)),
      HasSubstr("metadata key \"k\" twice"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Start(1, 0).Tensor("a", {1, 1, 1, 1, 1}, 0, 0).Data(8)),
              HasSubstr("5 dimensions"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Start(1, 0).Tensor("a", {256}, 10, 0).Data(128)),
              HasSubstr("unsupported: f: tensor \"a\" is Q2_K; read are F32 F16"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Start(1, 0).Tensor("a", {2}, 77, 0).Data(8)),
              HasSubstr("has type 77"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Start(1, 0).Tensor("a", {33}, 2, 0).Data(36)),
              HasSubstr("no multiple of the 32 elements of a Q4_0 block"));
  EXPECT_THAT(ErrorOf(GgufBuilder()
                          .Start(1, 0)
                          .Tensor("a", {uint64_t{1} << 40, uint64_t{1} << 40}, 0, 0)
                          .Data(8)),
              HasSubstr("larger than 2^63"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Start(1, 0).Tensor("a", {2}, 0, 4).Data(64)),
              HasSubstr("offset 4 is no multiple of the alignment 32"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Start(1, 0).Tensor("a", {2}, 0, 0).Data(7)),
              HasSubstr("ends past the 7"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Start(1, 0).Tensor("a", {2}, 0, ~uint64_t{31}).Data(8)),
              HasSubstr("ends past"));
  EXPECT_THAT(
      ErrorOf(GgufBuilder().Start(2, 0).Tensor("a", {2}, 0, 0).Tensor("b", {2}, 0, 0).Data(64)),
      HasSubstr("overlaps"));
  EXPECT_THAT(
      ErrorOf(GgufBuilder().Start(2, 0).Tensor("a", {2}, 0, 0).Tensor("b", {2}, 0, 64).Data(128)),
      HasSubstr("gap: tensor \"b\" is at offset 64, the next free one is 32"));
  EXPECT_THAT(
      ErrorOf(GgufBuilder().Start(2, 0).Tensor("a", {2}, 0, 0).Tensor("a", {2}, 0, 32).Data(64)),
      HasSubstr("tensor \"a\" twice"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Start(1, 0).Tensor("a", {2}, 0, 0).Data(65)),
              HasSubstr("tensors end at 8"));
  EXPECT_THAT(ErrorOf(GgufBuilder().Start(0, 1).Text("general.alignment").Put(4u).Put(24u).Data(0)),
              HasSubstr("a power of two"));
  EXPECT_EQ(ErrorOf(GgufBuilder()
                        .Start(1, 1)
                        .Text("general.alignment")
                        .Put(4u)
                        .Put(64u)
                        .Tensor("a", {2}, 0, 0)
                        .Data(8, 64)),
            "ok");
}

// A cut at every byte of header and data is an error. Only the padding after the last tensor, which
// writers may leave out, can go.
TEST(Gguf, EveryTruncationIsAnError) {
  for (const char* name : {"types.gguf", "tiny.gguf"}) {
    const std::string file = Env::Real()->ReadFile(DataPath(name)).value();
    ASSERT_EQ(ErrorOf(file), "ok");
    const auto whole = GgufFile::Open(Env::Real(), DataPath(name)).value();
    const size_t end = whole.entries().back().begin + whole.entries().back().size_bytes;
    ASSERT_LT(file.size() - end, 32u);
    for (size_t n = 0; n < end; n += n < 8192 ? 1 : 101) {
      ASSERT_THAT(ErrorOf(file.substr(0, n)), HasSubstr("data-loss")) << name << " " << n;
    }
  }
}

TEST(Gguf, BitFlipsNeverCrash) {
  const std::string file = Env::Real()->ReadFile(DataPath("types.gguf")).value();
  size_t refused = 0;
  for (size_t i = 0; i < 1200; ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = file;
      flipped[i] = static_cast<char>(flipped[i] ^ 1 << bit);
      refused += ErrorOf(flipped) != "ok";
    }
  }
  EXPECT_GT(refused, 1000u);
}

}  // namespace
}  // namespace tare
