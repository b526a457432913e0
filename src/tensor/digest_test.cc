#include "tensor/digest_many.h"

#include <gtest/gtest.h>

#include <vector>

namespace tare {
namespace {

// Computed by a few lines of Python from the definition in the header.
TEST(Digest, MatchesTheDefinition) {
  const int32_t three[] = {1, 2, 3};
  EXPECT_EQ(Hex(TensorDigest(DType::kI32, {3}, three)),
            "f5b929413e20b0264cda115dea75cdd8c3b1c3ce50fe8d494a86e137b0ed0368");
  std::vector<uint8_t> bytes(70000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 7);
  EXPECT_EQ(Hex(TensorDigest(DType::kU8, {70000}, bytes.data())),
            "7cd6083d9c5483b8c986835891104b75bd031402526aa0c50b3ae210aa2408d4");
  const float one = 1.0f;
  EXPECT_EQ(Hex(TensorDigest(DType::kF32, {}, &one)),
            "748c4eacc61bc9dbf24205c8b636c8aef7c8937a68ee2ea655ddeada78f299da");
  EXPECT_EQ(Hex(TensorDigest(DType::kBF16, {0, 4}, nullptr)),
            "ab2f712228d1f03abba4c707d87491eb28897afcb824430476ddc7084631f0b1");
}

TEST(Digest, ThreadsDoNotMoveIt) {
  std::vector<uint8_t> bytes(1000003);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * i >> 3);
  ThreadPool one(1), four(4);
  const Sha256Digest alone = TensorDigest(DType::kU8, {1000003}, bytes.data());
  EXPECT_EQ(TensorDigest(DType::kU8, {1000003}, bytes.data(), &one), alone);
  EXPECT_EQ(TensorDigest(DType::kU8, {1000003}, bytes.data(), &four), alone);
}

// Whole chunks of many tensors are hashed together; each tensor has the digest that it has alone.
TEST(Digest, ManyTensorsAtOnce) {
  std::vector<Tensor> tensors;
  for (int64_t size : {0, 1, 65535, 65536, 65537, 131072, 1300000, 3, 2 << 20, 70001}) {
    Tensor t = Tensor::Allocate(DType::kU8, {size}).value();
    auto* bytes = t.mutable_as<uint8_t>();
    for (int64_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(i * (size + 3) >> 2);
    tensors.push_back(std::move(t));
  }
  ThreadPool pool(3);
  const std::vector<Sha256Digest> alone = TensorDigests(tensors),
                                  shared = TensorDigests(tensors, &pool);
  ASSERT_EQ(alone.size(), tensors.size());
  EXPECT_EQ(alone, shared);
  for (size_t i = 0; i < tensors.size(); ++i) EXPECT_EQ(alone[i], TensorDigest(tensors[i])) << i;
  tensors[6].mutable_as<uint8_t>()[777777] ^= 1;
  const std::vector<Sha256Digest> changed = TensorDigests(tensors, &pool);
  for (size_t i = 0; i < tensors.size(); ++i) EXPECT_EQ(changed[i] != alone[i], i == 6) << i;
}

TEST(Digest, DtypeShapeAndEveryByteCount) {
  std::vector<uint8_t> bytes(65536 * 2 + 8, 3);
  const auto digest = [&](DType dtype, Shape shape) {
    return TensorDigest(dtype, shape, bytes.data());
  };
  const Sha256Digest base = digest(DType::kF32, {32770});
  EXPECT_NE(digest(DType::kI32, {32770}), base);
  EXPECT_NE(digest(DType::kF32, {2, 16385}), base);
  for (const size_t at : {size_t{0}, size_t{65535}, size_t{65536}, size_t{131079}}) {
    bytes[at] ^= 0x80;
    EXPECT_NE(digest(DType::kF32, {32770}), base) << at;
    bytes[at] ^= 0x80;
  }
  EXPECT_EQ(digest(DType::kF32, {32770}), base);
}

}  // namespace
}  // namespace tare
