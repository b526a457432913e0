// A fault that acts behind the forward is kept, run again alone in a fresh trainer, and cut down.

#include "trainer/backward_case.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "base/fault.h"
#include "models/mini.h"
#include "tensor/checkpoint.h"

namespace tare::trainer {
namespace {

ThreadPool& Pool() {
  static auto* pool = new ThreadPool(2);
  return *pool;
}

class BackwardCaseTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "tare-case-XXXXXX";
    dir_ = ::mkdtemp(pattern.data());
    ASSERT_TRUE(models::WriteMini(Env::Real(), dir_ + "/mini").ok());
  }
  void TearDown() override {
    std::error_code ignored;
    std::filesystem::remove_all(dir_, ignored);
  }
  std::unique_ptr<Trainer> From(const std::string& path) {
    const Checkpoint checkpoint = Checkpoint::Open(path).value();
    models::ModelOptions options;
    options.side = fault::Side::kTrainer;
    return Trainer::Create(&Pool(), models::Model::Load(&Pool(), checkpoint, options).value(), {})
        .value();
  }
  // Three sequences of 37, 21 and 50 tokens.
  static std::vector<Sequence> Batch() {
    std::vector<Sequence> out;
    for (const int length : {37, 21, 50}) {
      Sequence s;
      s.name = std::to_string(length);
      s.prompt_tokens = 2;
      for (int k = 0; k < length; ++k) s.tokens.push_back((k * k * 7 + k * 53 + length) % 500);
      out.push_back(std::move(s));
    }
    return out;
  }

  std::string dir_;
};

// CHEAP-15.
TEST_F(BackwardCaseTest, AFaultBehindTheForwardIsKeptRunAloneAndCutDown) {
  const std::string fault = "linear.dw_without_partial_group@trainer";
  const auto t = From(dir_ + "/mini");
  // Some updates first, so that moments and step are a state of their own.
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(t->Accumulate(Batch(), Loss::kCrossEntropy, {}, "x").ok());
    ASSERT_TRUE(t->Apply(1e-3f).ok());
  }
  const BackwardFinding clean = TryBackward(&Pool(), t.get(), Batch()).value();
  EXPECT_TRUE(clean.within) << clean.parameter << " " << clean.error;
  EXPECT_TRUE(clean.forward_equal);
  Progress progress;
  progress.data_position = 6;
  progress.seed = 77;
  BackwardFinding found;
  {
    const fault::Scoped planted(fault);
    found = TryBackward(&Pool(), t.get(), Batch()).value();
    ASSERT_TRUE(SaveBackwardCase(Env::Real(), t.get(), dir_ + "/mini", Batch(), progress, found,
                                 dir_ + "/case")
                    .ok());
  }
  // The forward shows nothing: both paths agree, and with the values of before.
  EXPECT_TRUE(found.forward_equal);
  EXPECT_FALSE(found.within);
  EXPECT_GT(found.error, found.tolerance);

  // Alone, from the four things that were kept.
  const auto fresh = From(dir_ + "/case/weights");
  const BackwardCase kept = OpenBackwardCase(Env::Real(), dir_ + "/case", fresh.get()).value();
  EXPECT_EQ(kept.faults, fault);
  EXPECT_EQ(kept.progress.data_position, 6);
  EXPECT_EQ(kept.progress.seed, 77u);
  EXPECT_EQ(fresh->step(), 2);
  EXPECT_EQ(fresh->MasterHash().value(), t->MasterHash().value());
  for (size_t i = 0; i < t->first_moments().size(); ++i) {
    const Tensor &a = t->second_moments()[i], &b = fresh->second_moments()[i];
    EXPECT_EQ(std::memcmp(a.data(), b.data(), static_cast<size_t>(a.size_bytes())), 0);
  }
  {
    const fault::Scoped planted(kept.faults);
    const BackwardFinding again = TryBackward(&Pool(), fresh.get(), kept.batch).value();
    EXPECT_EQ(again.gradient_sha256, found.gradient_sha256);
    EXPECT_EQ(again.parameter, found.parameter);
    const Shrunk small = ShrinkBackwardCase(&Pool(), fresh.get(), kept.batch).value();
    EXPECT_EQ(small.batch.size(), 1u);
    EXPECT_LT(small.finding.tokens, 16);  // less than the group that the fault leaves out
    EXPECT_FALSE(small.finding.within);
    EXPECT_EQ(small.parameter, found.parameter);
  }
  // Without the fault the same case is whole, and there is nothing to shrink.
  EXPECT_TRUE(TryBackward(&Pool(), fresh.get(), kept.batch)->within);
  EXPECT_EQ(ShrinkBackwardCase(&Pool(), fresh.get(), kept.batch).status().code(),
            Code::kPrecondition);
}

// CHEAP-15: what is cut down stays the failure that was asked about: of two gradients that fail,
// one in every batch and one by the sequence "21" alone, each is cut down to its own.
TEST_F(BackwardCaseTest, WhatIsLeftFailsAtTheSameParameter) {
  const auto attempt = [](const std::vector<Sequence>& batch) -> Result<BackwardFinding> {
    BackwardFinding out;
    out.within = false;
    out.outside = {"everywhere"};
    for (const Sequence& s : batch) {
      if (s.name == "21" && s.targets() >= 7) out.outside.emplace_back("some");
    }
    out.parameter = out.outside.front();
    return out;
  };
  const Shrunk any = ShrinkBatch(attempt, Batch(), "", 200).value();
  EXPECT_EQ(any.parameter, "everywhere");
  ASSERT_EQ(any.batch.size(), 1u);
  EXPECT_EQ(any.batch[0].targets(), 1);
  const Shrunk some = ShrinkBatch(attempt, Batch(), "some", 200).value();
  EXPECT_EQ(some.parameter, "some");
  ASSERT_EQ(some.batch.size(), 1u);
  EXPECT_EQ(some.batch[0].name, "21");
  EXPECT_EQ(some.batch[0].targets(), 7);
  EXPECT_EQ(ShrinkBatch(attempt, Batch(), "none", 200).status().code(), Code::kPrecondition);
  // No more tries than asked for: what was reached by then.
  const Shrunk cut = ShrinkBatch(attempt, Batch(), "some", 2).value();
  EXPECT_EQ(cut.tries, 2);
  EXPECT_EQ(cut.batch.size(), 2u);
}

TEST_F(BackwardCaseTest, WhatIsNoCaseIsRefused) {
  const auto t = From(dir_ + "/mini");
  std::vector<Sequence> batch = Batch();
  const BackwardFinding none;
  EXPECT_EQ(
      SaveBackwardCase(Env::Real(), t.get(), dir_ + "/mini", {}, {}, none, dir_ + "/a").code(),
      Code::kInvalidArgument);
  batch[0].temperature = 0.5f;
  EXPECT_EQ(TryBackward(&Pool(), t.get(), batch).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(SaveBackwardCase(Env::Real(), t.get(), dir_ + "/mini", Batch(), {}, none, dir_).code(),
            Code::kAlreadyExists);
  EXPECT_EQ(ReadBackwardCase(Env::Real(), dir_).status().code(), Code::kNotFound);
  for (const char* text :
       {"", "[]", "{}", R"({"schema":"tare.backward-case/1"})", R"({"schema":"x","batch":[]})"}) {
    ASSERT_TRUE(Env::Real()->WriteFileAtomic(dir_ + "/case.json", text).ok());
    EXPECT_FALSE(ReadBackwardCase(Env::Real(), dir_).ok()) << text;
  }
}

}  // namespace
}  // namespace tare::trainer
