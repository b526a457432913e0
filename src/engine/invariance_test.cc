// The invariance matrix on MINI: it passes on the invariant arm, and it fails on the native arm and
// on each planted fault; a matrix that cannot fail would prove nothing.

#include "engine/invariance.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>

#include "base/env.h"
#include "base/fault.h"
#include "base/reasons.h"
#include "models/mini.h"

namespace tare::engine {
namespace {

class EngineInvariance : public ::testing::Test {
 public:
  static void SetUpTestSuite() {
    root_ = new std::string(std::filesystem::temp_directory_path() /
                            fmt::format("tare-invariance-{}", ::getpid()));
    ASSERT_TRUE(models::WriteMini(Env::Real(), *root_).ok());
  }
  static void TearDownTestSuite() {
    std::filesystem::remove_all(*root_);
    delete root_;
  }
  static InvarianceReport Run(ops::BatchInvariance arm = ops::BatchInvariance::kOn,
                              std::set<std::string, std::less<>> only = {}, int max_batch = 8,
                              int generated = 8) {
    InvarianceOptions o{.model_path = *root_, .arm = arm, .threads = 1};
    o.max_batch = max_batch;
    o.generated = generated;
    o.boundaries = only.contains("prefill against decode");
    o.only = std::move(only);
    o.program = TARE_BINARY_DIR "/tare";
    const auto r = RunInvariance(o);
    EXPECT_TRUE(r.ok()) << r.status().ToString();
    return r.ok() ? *r : InvarianceReport{};
  }
  static std::set<std::string> Failed(const InvarianceReport& report) {
    std::set<std::string> axes;
    for (const InvarianceCell& c : report.cells) {
      if (c.verdict == Verdict::kFail) axes.insert(c.axis);
    }
    return axes;
  }
  static std::string* root_;
};
std::string* EngineInvariance::root_ = nullptr;

// C3-02 to C3-06, C3-09: every cell passes with something compared.
TEST_F(EngineInvariance, InvariantArmPasses) {
  const InvarianceReport report = Run();
  EXPECT_EQ(report.verdict, Verdict::kPass) << report.reason;
  EXPECT_GT(report.cells.size(), 30u);
  for (const InvarianceCell& c : report.cells) {
    EXPECT_EQ(c.verdict, Verdict::kPass)
        << c.axis << " " << c.condition << " " << c.first << " " << c.proof.dump();
    EXPECT_GT(c.compared, 0) << c.axis << " " << c.condition;
  }
}

// C3-02: every size is played, from the first place of arrival to the last, and all of a cell's
// requests stand in one step; a size that no cell has would be a gap that nobody sees.
TEST_F(EngineInvariance, EveryBatchSizeMeetsInOneStep) {
  const InvarianceReport report = Run(ops::BatchInvariance::kOn, {"batch"}, 64);
  std::map<int, int> cells;
  for (const InvarianceCell& c : report.cells) {
    if (c.axis != "batch") continue;
    const int size = std::atoi(c.condition.c_str());
    ++cells[size];
    EXPECT_EQ(c.verdict, Verdict::kPass) << c.condition << " " << c.proof.dump();
    EXPECT_EQ(c.proof.value("widest_step", 0), size) << c.condition;
  }
  const std::map<int, int> want = {{2, 1}, {3, 1}, {4, 2}, {8, 3}, {16, 3}, {32, 3}, {64, 3}};
  EXPECT_EQ(cells, want);
}

// H07: the native arm follows the batch.
TEST_F(EngineInvariance, NativeArmFails) {
  const InvarianceReport report = Run(ops::BatchInvariance::kOff);
  EXPECT_EQ(report.verdict, Verdict::kFail);
  EXPECT_EQ(report.reason, reason::kBitMismatch);
  EXPECT_TRUE(Failed(report).contains("batch"));
}

void ExpectCaught(const char* fault, const char* axis, int max_batch = 4, int generated = 8) {
  const fault::Scoped scoped(std::string(fault) + "@rollout");
  const InvarianceReport report =
      EngineInvariance::Run(ops::BatchInvariance::kOn, {axis}, max_batch, generated);
  EXPECT_EQ(report.verdict, Verdict::kFail) << fault;
  EXPECT_TRUE(EngineInvariance::Failed(report).contains(axis)) << fault;
}

// C3-02 to C3-06: each planted fault of the runtime is caught on the axis where it acts.
TEST_F(EngineInvariance, PlantedFaultsAreCaught) {
  ExpectCaught("engine.partial_block_hit", "cache");
  ExpectCaught("sampling.seed_by_batch_row", "batch");
}

// H07: so are those of attention; prompts shorter than a split, or one batch size, would miss them.
// (Faulty operators run their plain loops.) A cut of the keys moves the last bits of a sum that is
// rounded to bf16 then, so that few tokens show it. attention.tile_by_rows moves the denominator
// alone: no token here shows it, attention's own tests do.
TEST_F(EngineInvariance, SlowFaultsOfAttentionAreCaught) {
  ExpectCaught("attention.split_by_batch", "batch");
  ExpectCaught("attention.decode_other_split", "prefill against decode", 4, 64);
}

// A part of the matrix is never a pass: what was left out is not covered.
TEST_F(EngineInvariance, APartIsNotCovered) {
  const InvarianceReport report = Run(ops::BatchInvariance::kOn, {"page"});
  EXPECT_EQ(report.verdict, Verdict::kNotCovered);
  EXPECT_TRUE(Failed(report).empty());
  EXPECT_FALSE(RunInvariance({.model_path = *root_, .only = {"pages"}}).ok());
}

// C3-02: K split for calls of at most four rows is caught on the batch axis, by a batch of more.
TEST_F(EngineInvariance, SlowPlantedFaultIsCaught) {
  ExpectCaught("linear.split_by_rows", "batch", 8);
}

}  // namespace
}  // namespace tare::engine
