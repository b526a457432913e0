#include "ops/contract_page.h"

#include <gtest/gtest.h>

#include "base/env.h"

namespace tare::ops {
namespace {

// The committed pages equal the generated ones, for every operator and the index.
TEST(ContractPage, CommittedPagesEqualTheGeneratedOnes) {
  const std::string dir = std::string(TARE_SOURCE_DIR) + "/docs/ops/";
  for (const OpInfo* op : AllOps()) {
    const auto page = Env::Real()->ReadFile(dir + op->name + ".md");
    ASSERT_TRUE(page.ok()) << page.status().ToString() << "; `tare contract docs` writes it";
    EXPECT_EQ(*page, ContractPage(*op)) << op->name << ": `tare contract docs` writes it anew";
  }
  const auto index = Env::Real()->ReadFile(dir + "README.md");
  ASSERT_TRUE(index.ok()) << index.status().ToString();
  EXPECT_EQ(*index, ContractIndex());
}

TEST(ContractPage, APageFollowsItsRecord) {
  OpInfo changed = *AllOps().front();
  const std::string before = ContractPage(changed);
  changed.select = [](const OpKey& key) {
    Contract c = AllOps().front()->select(key);
    c.formula.push_back("one more rounding");
    return c;
  };
  const std::string after = ContractPage(changed);
  EXPECT_NE(before, after);
  EXPECT_NE(after.find("one more rounding"), std::string::npos);
}

}  // namespace
}  // namespace tare::ops
