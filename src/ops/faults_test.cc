// Planted faults of the row operators: each test first shows that two runs agree bit by bit, then
// that the fault flips bits on data chosen to expose it, on its own side alone. Each is known by
// the operator that it sits in. Among them: where a cast stands (NUM-02: before or after an add or
// a scale; the accumulator's dtype in linear/linear_test.cc), the epilogue (NUM-06: residual and
// activation before or after the cast; the bias in linear/linear_test.cc), what enters the
// log-softmax (NUM-07), and experts combined in another order than the contract's (DISC-03).

#include <gtest/gtest.h>

#include <set>

#include "ops/fault_cases.h"

namespace tare::ops {
namespace {

TEST(Faults, EachFlipsBitsOnlyWhereItIsActive) {
  for (const FaultCase& f : FaultCases()) {
    SCOPED_TRACE(f.fault);
    const OpInfo* op = FindOp(f.op);
    ASSERT_NE(op, nullptr);
    const OpKey& key = KeyOf(*op, f);
    const auto run = [&](fault::Side side, const std::string& spec) {
      const fault::Scoped scoped(spec);
      Case c(op, key, kRows, 3);
      c.side = side;
      if (f.prepare) f.prepare(c);
      c.Forward();
      if (f.backward) c.Backward();
      const std::vector<Operand>& operands = f.backward ? c.sig.inputs : c.sig.outputs;
      for (size_t i = 0; i < operands.size(); ++i) {
        if (operands[i].name == f.operand) return f.backward ? c.din[i] : c.out[i];
      }
      ADD_FAILURE() << "no operand " << f.operand;
      return Tensor();
    };
    const Tensor clean = run(fault::Side::kTrainer, "");
    EXPECT_EQ(Differences(clean, run(fault::Side::kRollout, "")), 0)
        << "the two sides differ without a fault";
    const std::string on_rollout = std::string(f.fault) + "@rollout";
    EXPECT_EQ(Differences(clean, run(fault::Side::kTrainer, on_rollout)), 0)
        << "active on the wrong side";
    EXPECT_GT(Differences(clean, run(fault::Side::kRollout, on_rollout)), 0)
        << "the fault flips nothing";
    EXPECT_EQ(Differences(clean, run(fault::Side::kRollout, "")), 0) << "the fault stayed on";
  }
}

// Every declared fault of a row operator is in the table above, so none is listed that nothing
// proves.
TEST(Faults, TheTableCoversEveryRowOperatorsFault) {
  std::set<std::string> proved, sites;
  for (const FaultCase& f : FaultCases()) {
    proved.insert(f.fault);
    sites.insert(f.op);
  }
  int counted = 0;
  for (const fault::Fault* f : fault::All()) {
    if (!sites.contains(f->site)) continue;
    EXPECT_TRUE(proved.contains(f->name)) << f->name;
    EXPECT_STRNE(f->text, "");
    EXPECT_STRNE(f->gates, "");
    ++counted;
  }
  EXPECT_GE(counted, 38);
}

}  // namespace
}  // namespace tare::ops
