#include "tensor/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>

namespace tare {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string DataPath(const std::string& name) {
  return std::string(TARE_SOURCE_DIR) + "/tests/data/formats/" + name;
}

// A file in memory, 64-byte aligned as a mapping is.
struct Bytes {
  explicit Bytes(std::string_view text)
      : tensor(Tensor::Allocate(DType::kU8, {static_cast<int64_t>(text.size())}).value()) {
    if (!text.empty()) std::memcpy(tensor.mutable_data(), text.data(), text.size());
  }
  Result<SafetensorsFile> Parse() const {
    return SafetensorsFile::Parse(
        {static_cast<const char*>(tensor.data()), static_cast<size_t>(tensor.size_bytes())},
        std::make_shared<Tensor>(tensor), "f");
  }
  Tensor tensor;
};

std::string File(std::string header, size_t data_bytes, bool pad = true) {
  if (pad) header.resize((header.size() + 7) / 8 * 8, ' ');
  std::string out(8, '\0');
  for (int i = 0; i < 8; ++i)
    out[static_cast<size_t>(i)] = static_cast<char>(header.size() >> 8 * i & 255);
  return out + header + std::string(data_bytes, 'd');
}

std::string ErrorOf(const std::string& file) {
  const auto r = Bytes(file).Parse();
  return r.ok() ? "ok" : r.status().ToString();
}
std::string Header(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"a":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}}";
}

// A file of the reference library opens: every dtype, a scalar, an empty tensor, escaped names.
TEST(Safetensors, ReadsTheReferenceLibrary) {
  auto file = SafetensorsFile::Open(Env::Real(), DataPath("all_dtypes.safetensors"));
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  EXPECT_EQ(file->entries().size(), 15u);
  EXPECT_EQ(file->metadata()[0].second, "pt");
  for (int i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    std::string name(DTypeName(dtype));
    if (dtype == DType::kE4M3 || dtype == DType::kE5M2) name = "f8_" + name;
    const auto t = file->Get(name);
    ASSERT_TRUE(t.ok()) << t.status().ToString();
    EXPECT_EQ(t->dtype(), dtype);
    EXPECT_EQ(t->shape(), (Shape{2, 3}));
  }
  EXPECT_EQ(file->Get("scalar")->as<float>()[0], 1.5f);
  EXPECT_EQ(file->Get("scalar")->rank(), 0);
  EXPECT_EQ(file->Get("empty")->elements(), 0);
  EXPECT_EQ(file->Get("na\xc3\xafve \"quoted\"\n")->as<float>()[2], 2.0f);
  EXPECT_THAT(file->Get("absent").status().ToString(), HasSubstr("not-found"));
}

// What the writer writes is byte for byte what the reference library writes.
TEST(Safetensors, WritesTheBytesOfTheReferenceLibrary) {
  const auto file = SafetensorsFile::Open(Env::Real(), DataPath("all_dtypes.safetensors")).value();
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const auto& e : file.entries()) tensors.insert(tensors.begin(), {e.name, file.View(e)});
  const std::string path = ::testing::TempDir() + "safetensors_test_rewrite";
  ASSERT_TRUE(WriteSafetensors(Env::Real(), path, tensors, file.metadata()).ok());
  EXPECT_TRUE(Env::Real()->ReadFile(path).value() ==
              Env::Real()->ReadFile(DataPath("all_dtypes.safetensors")).value());
  ASSERT_TRUE(Env::Real()->Remove(path).ok());
}

// Over an older file, longer or shorter, stand the same bytes.
TEST(Safetensors, OverwritesWithTheBytesOfAFreshFile) {
  const auto file = SafetensorsFile::Open(Env::Real(), DataPath("all_dtypes.safetensors")).value();
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const auto& e : file.entries()) tensors.push_back({e.name, file.View(e)});
  const std::string want = *Env::Real()->ReadFile(DataPath("all_dtypes.safetensors"));
  const std::string path = ::testing::TempDir() + "safetensors_test_over";
  for (const size_t size : {size_t{0}, size_t{100}, want.size(), want.size() + 5000}) {
    ASSERT_TRUE(Env::Real()->WriteFileAtomic(path, std::string(size, 'o')).ok());
    ASSERT_TRUE(OverwriteSafetensors(path, tensors, file.metadata()).ok());
    EXPECT_TRUE(*Env::Real()->ReadFile(path) == want) << size;
  }
  ASSERT_TRUE(Env::Real()->Remove(path).ok());
  EXPECT_EQ(OverwriteSafetensors(path, tensors).code(), Code::kNotFound);
}

// Every malformed header has its own error, which names the tensor and both numbers.
TEST(Safetensors, EachFaultItsOwnError) {
  EXPECT_EQ(ErrorOf(File(Header("\"F32\"", "[2]", "[0,8]"), 8)), "ok");
  EXPECT_EQ(ErrorOf(File("{}", 0)), "ok");
  EXPECT_THAT(ErrorOf("1234567"), HasSubstr("too short for a header length"));
  EXPECT_THAT(ErrorOf(std::string("\x01\xe1\xf5\x05\0\0\0\0", 8)),
              HasSubstr("header length 100000001 exceeds the limit of 100000000"));
  EXPECT_THAT(ErrorOf(std::string("\0\xe1\xf5\x05\0\0\0\0{}", 10)),
              HasSubstr("header ends at byte 100000008, the file at 10"));
  EXPECT_THAT(ErrorOf(std::string(8, '\xff')), HasSubstr("exceeds the limit"));
  EXPECT_THAT(ErrorOf(File("", 0)), HasSubstr("does not start with '{'"));
  EXPECT_THAT(ErrorOf(File(" {}", 0)), HasSubstr("does not start with '{'"));
  EXPECT_THAT(ErrorOf(File("[]", 0)), HasSubstr("does not start with '{'"));
  EXPECT_THAT(ErrorOf(File("{\"a\":", 0)), HasSubstr("line 1 column"));
  EXPECT_THAT(ErrorOf(File("{} {}", 0)), HasSubstr("header: line 1 column 4"));
  EXPECT_THAT(ErrorOf(File(Header("\"F99\"", "[2]", "[0,8]"), 8)),
              AllOf(HasSubstr("data-loss"), HasSubstr("unknown dtype \"F99\"")));
  EXPECT_THAT(ErrorOf(File(Header("\"U32\"", "[2]", "[0,8]"), 8)),
              AllOf(HasSubstr("unsupported"), HasSubstr("\"U32\"; known: F64 F32")));
  EXPECT_THAT(ErrorOf(File(Header("3", "[2]", "[0,8]"), 8)),
              HasSubstr("dtype of tensor \"a\" is a number"));
  EXPECT_THAT(ErrorOf(File(Header("\"F32\"", "2", "[0,8]"), 8)),
              HasSubstr("shape of tensor \"a\""));
  EXPECT_THAT(ErrorOf(File(Header("\"F32\"", "[-2]", "[0,8]"), 8)), HasSubstr("-2"));
  EXPECT_THAT(ErrorOf(File(Header("\"F32\"", "[2.5]", "[0,8]"), 8)), HasSubstr("fraction"));
  EXPECT_THAT(ErrorOf(File(Header("\"F32\"", "[[2]]", "[0,8]"), 8)), HasSubstr("is an array"));
  EXPECT_THAT(ErrorOf(File(Header("\"F32\"", "[3037000500,3037000500]", "[0,8]"), 8)),
              HasSubstr("larger than 2^63"));
  EXPECT_THAT(ErrorOf(File(Header("\"F64\"", "[2305843009213693952]", "[0,8]"), 8)),
              HasSubstr("larger than 2^63"));
  EXPECT_THAT(ErrorOf(File(Header("\"F32\"", "[18446744073709551615]", "[0,8]"), 8)),
              HasSubstr("more than 2^63"));
  EXPECT_THAT(ErrorOf(File(Header("\"F32\"", "[18446744073709551616]", "[0,8]"), 8)),
              HasSubstr("does not fit 64 bits"));
  EXPECT_THAT(ErrorOf(File(Header("\"F32\"", "[2]", "[0]"), 8)), HasSubstr("has 1 numbers"));
  EXPECT_THAT(ErrorOf(File(Header("\"F32\"", "[2]", "[0,8,9]"), 8)), HasSubstr("more than two"));
  EXPECT_THAT(ErrorOf(File(Header("\"F32\"", "[2]", "[8,0]"), 8)), HasSubstr("ends before it"));
  EXPECT_THAT(ErrorOf(File(Header("\"F32\"", "[2]", "[0,8]"), 7)), HasSubstr("past the 7 bytes"));
  EXPECT_THAT(ErrorOf(File(Header("\"F32\"", "[2]", "[0,8]"), 9)), HasSubstr("the file has 9"));
  EXPECT_THAT(ErrorOf(File(Header("\"F32\"", "[3]", "[0,8]"), 8)), HasSubstr("takes 12 bytes"));
  EXPECT_THAT(ErrorOf(File(Header("\"F32\"", "[2]", "[4,12]"), 12)),
              HasSubstr("gap: no tensor holds the bytes [0, 4)"));
  EXPECT_THAT(ErrorOf(File(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                           R"("b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}})",
                           7)),
              HasSubstr("tensor \"b\" begins at 3 and overlaps \"a\", which ends at 4"));
  EXPECT_THAT(ErrorOf(File(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                           R"("a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
                           8)),
              HasSubstr("duplicate key \"a\""));
  EXPECT_THAT(ErrorOf(File(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                           R"("b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})",
                           5)),
              HasSubstr("not aligned to the 4 bytes of f32"));
  std::string odd = Header("\"F32\"", "[2]", "[0,8]");
  while (odd.size() % 4 == 0) odd += ' ';
  EXPECT_THAT(ErrorOf(File(odd, 8, false)), HasSubstr("not aligned"));
  EXPECT_THAT(ErrorOf(File(R"({"a":{"dtype":"F32","shape":[0]}})", 0)),
              HasSubstr("no data_offsets"));
  EXPECT_THAT(ErrorOf(File(R"({"a":{"dtype":"F32","data_offsets":[0,0]}})", 0)),
              HasSubstr("no shape"));
  EXPECT_THAT(ErrorOf(File(R"({"a":{"shape":[0],"data_offsets":[0,0]}})", 0)),
              HasSubstr("no dtype"));
  EXPECT_THAT(ErrorOf(File(R"({"a":{"x":1}})", 0)), HasSubstr("unknown key \"x\""));
  EXPECT_THAT(ErrorOf(File(R"({"a":[]})", 0)), HasSubstr("the value of \"a\" is an array"));
  EXPECT_THAT(ErrorOf(File(R"({"__metadata__":{"k":1}})", 0)),
              HasSubstr("__metadata__ is a number"));
  EXPECT_THAT(ErrorOf(File(R"({"__metadata__":{"k":{}}})", 0)), HasSubstr("is an object"));
  EXPECT_THAT(
      ErrorOf(File(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4],"dtype":"F32"}})", 4)),
      HasSubstr("duplicate key \"dtype\""));
}

// Every sample that the tests hold, cut at every byte of its header (and at some of its data), is
// an error and never a pass.
TEST(Safetensors, EveryTruncationIsAnError) {
  int samples = 0;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(TARE_SOURCE_DIR "/tests/data")) {
    if (entry.path().extension() != ".safetensors") continue;
    const std::string file = Env::Real()->ReadFile(entry.path()).value();
    ASSERT_EQ(ErrorOf(file), "ok") << entry.path();
    uint64_t header = 0;
    std::memcpy(&header, file.data(), 8);
    const size_t step = std::max<size_t>(97, file.size() / 40);
    for (size_t n = 0; n < file.size(); n += n < header + 8 ? 1 : step) {
      ASSERT_THAT(ErrorOf(file.substr(0, n)), HasSubstr("data-loss")) << entry.path() << " " << n;
    }
    ++samples;
  }
  EXPECT_GE(samples, 20);
}

// Every single-bit flip of a header is answered: an error, or a file whose layout still holds.
TEST(Safetensors, BitFlipsNeverCrash) {
  const std::string file = Env::Real()->ReadFile(DataPath("all_dtypes.safetensors")).value();
  size_t refused = 0;
  for (size_t i = 0; i < 1000; ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = file;
      flipped[i] = static_cast<char>(flipped[i] ^ 1 << bit);
      refused += ErrorOf(flipped) != "ok";
    }
  }
  EXPECT_GT(refused, 3000u);
}

// The writer refuses what the reader would.
TEST(Safetensors, WriterChecksItsInput) {
  const std::string path = ::testing::TempDir() + "safetensors_test_refused";
  const Tensor t = Tensor::Allocate(DType::kF32, {2}).value();
  Env* env = Env::Real();
  EXPECT_THAT(WriteSafetensors(env, path, {{"a", t}, {"a", t}}).ToString(),
              HasSubstr("\"a\" twice"));
  EXPECT_FALSE(WriteSafetensors(env, path, {{"__metadata__", t}}).ok());
  EXPECT_FALSE(WriteSafetensors(env, path, {{"\xff", t}}).ok());
  EXPECT_FALSE(WriteSafetensors(env, path, {{"a", t}}, {{"k", "\xff"}}).ok());
  EXPECT_FALSE(WriteSafetensors(env, path, {{"a", DType::kF32, {3}}}, {},
                                [&](const SafetensorsSpec&) -> Result<Tensor> { return t; })
                   .ok());
  EXPECT_THAT(WriteSafetensors(
                  env, path, {{"a", DType::kF32, {2}}}, {},
                  [&](const SafetensorsSpec&) -> Result<Tensor> { return DataLoss("planted"); })
                  .ToString(),
              HasSubstr("planted"));
  EXPECT_FALSE(env->Exists(path));
  EXPECT_FALSE(env->Exists(path + ".tmp-0"));
}

// A hundred thousand tensors: the header is read as a stream.
TEST(Safetensors, ManySmallTensors) {
  const std::string path = ::testing::TempDir() + "safetensors_test_many";
  std::vector<SafetensorsSpec> specs;
  for (int i = 0; i < 100000; ++i) specs.push_back({fmt::format("t.{}", i), DType::kF32, {1}});
  Tensor t = Tensor::Allocate(DType::kF32, {1}).value();
  ASSERT_TRUE(WriteSafetensors(Env::Real(), path, specs, {},
                               [&](const SafetensorsSpec& s) -> Result<Tensor> {
                                 t.mutable_as<float>()[0] =
                                     static_cast<float>(std::atoi(s.name.c_str() + 2));
                                 return t;
                               })
                  .ok());
  const auto file = SafetensorsFile::Open(Env::Real(), path).value();
  ASSERT_EQ(file.entries().size(), 100000u);
  EXPECT_EQ(file.Get("t.77777")->as<float>()[0], 77777.0f);
  ASSERT_TRUE(Env::Real()->Remove(path).ok());
}

}  // namespace
}  // namespace tare
