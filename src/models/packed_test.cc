// The packed copies that the CPU kernels read: one that no longer holds its parameter is found.

#include "models/packed.h"

#include <gtest/gtest.h>

#include "models/mini.h"
#include "models/testing_batch.h"

namespace tare::models {
namespace {

// H14: every copy is compared; one flipped bit of one expert, of the head or of a sink is named,
// and packing again makes it whole.
TEST(PackedTest, AStaleCopyIsNamed) {
  ThreadPool pool(2);
  auto model = MiniModel(&pool);
  ASSERT_TRUE(model.ok()) << model.status().ToString();
  ASSERT_TRUE(VerifyPacked(&pool, *model, false).ok());
  std::vector<int> changed = {model->head()};
  for (int64_t l = 0; l < std::ssize(model->config().layers); ++l) {
    const LayerParameters& ids = model->layer(l);
    for (const int id : {ids.qkv, ids.o, ids.gate_up, ids.down, ids.router, ids.sink}) {
      if (id >= 0) changed.push_back(id);
    }
  }
  for (const int id : changed) {
    Parameter& p = model->mutable_parameters()[static_cast<size_t>(id)];
    // Somewhere in the middle: not the first row, not the first expert.
    uint16_t& word = p.value.mutable_as<uint16_t>()[p.value.elements() * 5 / 7];
    word ^= 1;
    const Status s = VerifyPacked(&pool, *model, false);
    EXPECT_EQ(s.code(), Code::kDataLoss) << p.name;
    EXPECT_NE(s.message().find(p.name), std::string::npos) << s.message();
    if (p.name.find("experts") != std::string::npos) {
      EXPECT_NE(s.message().find("expert "), std::string::npos) << s.message();
    }
    word ^= 1;
    EXPECT_TRUE(VerifyPacked(&pool, *model, false).ok()) << p.name;
  }
  // What the message says of the place, for the panels and for the codes alone.
  Parameter& head = model->mutable_parameters()[static_cast<size_t>(model->head())];
  const int64_t row = head.value.dim(0) - 3, column = 17;
  uint16_t& word = head.value.mutable_as<uint16_t>()[row * head.value.dim(1) + column];
  word ^= 0x80;
  const std::string place = fmt::format("row {}, column {}", row, column);
  EXPECT_NE(VerifyPacked(&pool, *model, false).message().find(place), std::string::npos)
      << VerifyPacked(&pool, *model, false).message();
  ASSERT_TRUE(model->Repack(&pool).ok());
  EXPECT_TRUE(VerifyPacked(&pool, *model, true).ok());
  // A code that went bad in memory, with sound panels.
  const auto& codes = model->packed(model->head())->mma()->packed();
  auto& half = const_cast<uint16_t&>(codes.halves[5 * numerics::kMmaPanel + 3]);
  half ^= 1;
  EXPECT_TRUE(VerifyPacked(&pool, *model, false).ok());
  EXPECT_NE(VerifyPacked(&pool, *model, true).message().find("row 3, column 5"), std::string::npos)
      << VerifyPacked(&pool, *model, true).message();
}

// Codes made at load give the bits of codes made by the first call.
TEST(PackedTest, CodesMadeEarlyMoveNoBit) {
  const testing::Reference ref("mini");
  std::vector<std::vector<uint32_t>> bits;
  for (const bool early : {false, true}) {
    testing::Context context(2);
    context.ctx.profile = Profile::kSm90Mma;
    auto model = MiniModel(&context.pool);
    ASSERT_TRUE(model.ok());
    if (early) MakeCodes(&context.pool, *model);
    bits.push_back(testing::Bits(context.Run(*model, ref.MakeBatch()).logprob));
    EXPECT_TRUE(VerifyPacked(&context.pool, *model, true).ok());
  }
  EXPECT_EQ(bits[0], bits[1]);
}

}  // namespace
}  // namespace tare::models
