#include "base/fault.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tare::fault {
namespace {

using ::testing::HasSubstr;

TARE_FAULT(kTestOne, "faulttest.one", "faulttest", "C3", "does one thing wrong");
TARE_FAULT(kTestTwo, "faulttest.two", "faulttest", "C3,C5", "does another thing wrong");

// Off unless selected, and then on the chosen side only.
TEST(Fault, ActiveOnItsSideOnly) {
  EXPECT_FALSE(Active(kTestOne, Side::kRollout));
  {
    const Scoped scoped("faulttest.one@rollout");
    EXPECT_TRUE(Active(kTestOne, Side::kRollout));
    EXPECT_FALSE(Active(kTestOne, Side::kTrainer));
    EXPECT_FALSE(Active(kTestOne, Side::kNone));
    EXPECT_FALSE(Active(kTestTwo, Side::kRollout));
    EXPECT_EQ(Selected(), "faulttest.one@rollout");
    {
      const Scoped inner("faulttest.two@both,faulttest.one@trainer");
      EXPECT_TRUE(Active(kTestTwo, Side::kNone));
      EXPECT_TRUE(Active(kTestTwo, Side::kTrainer));
      EXPECT_FALSE(Active(kTestOne, Side::kRollout));
      EXPECT_EQ(Selected(), "faulttest.one@trainer,faulttest.two@both");
    }
    EXPECT_EQ(Selected(), "faulttest.one@rollout");
  }
  EXPECT_EQ(Selected(), "");
}

// A spec that is wrong anywhere changes nothing and says what is near.
TEST(Fault, WrongSpecsAreRefusedWhole) {
  const Scoped scoped("faulttest.one@trainer");
  const Status unknown = Select("faulttest.two@rollout,faulttest.three@rollout");
  EXPECT_EQ(unknown.code(), Code::kInvalidArgument);
  EXPECT_THAT(unknown.message(), HasSubstr("faulttest.one faulttest.two"));
  EXPECT_THAT(Select("faulttest.one@engine").message(),
              HasSubstr("rollout, trainer, both or none"));
  EXPECT_FALSE(Select("faulttest.one").ok());
  EXPECT_FALSE(Select("faulttest.one@rollout,,").ok());
  EXPECT_EQ(Selected(), "faulttest.one@trainer");
}

TEST(Fault, AllAreListedByName) {
  const auto all = All();
  for (size_t i = 1; i < all.size(); ++i) {
    EXPECT_LT(std::string_view(all[i - 1]->name), std::string_view(all[i]->name));
  }
  EXPECT_THAT(all, ::testing::Contains(&kTestOne));
}

}  // namespace
}  // namespace tare::fault
