// The gradient and one-step audit (trainer/audit.h): its witness against differences of another
// float64 forward is in gradient_test.cc; here the trainer against the witness, faults that it must
// catch, and the surrogate arm that stands on the same plain arithmetic.

#include "trainer/audit.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <numeric>

#include "models/mini.h"
#include "trainer/control.h"
#include "trainer/schedule.h"
#include "trainer/trainer.h"

namespace tare::trainer {
namespace {

ThreadPool& Pool() {
  static auto* pool = new ThreadPool(2);
  return *pool;
}

std::vector<AuditReport> Reports(const std::string& faults = "") {
  const fault::Scoped planted(faults);
  const Result<AuditInput> input = MiniAuditInput();
  EXPECT_TRUE(input.ok());
  const Result<std::vector<AuditReport>> reports = Audit(&Pool(), *input);
  EXPECT_TRUE(reports.ok()) << reports.status().ToString();
  return reports.ok() ? *reports : std::vector<AuditReport>();
}

// C7-01 to C7-03, C7-05: every parameter, three losses, two updates.
TEST(Audit, MiniAgreesWithFloat64) {
  const std::vector<AuditReport> reports = Reports();
  ASSERT_EQ(reports.size(), 3u);
  for (const AuditReport& r : reports) {
    EXPECT_TRUE(r.pass()) << r.loss << ": " << r.first_finding();
    EXPECT_EQ(r.gradient.size(), reports[0].gradient.size());
  }
  EXPECT_EQ(reports[2].step.size(), 2 * reports[2].gradient.size());
}

// C7-02, C7-09: faults of loss, backward and optimizer leave every forward bit as it is; the audit
// finds each, and its reference does not move.
TEST(Audit, FaultsOfLossBackwardAndOptimizerAreCaught) {
  const std::string reference = Reports()[0].reference;
  for (const char* fault :
       {"policy_loss.detached_forward", "policy_loss.mask_by_multiply",
        "policy_loss.count_of_the_shard", "gate.detached_forward", "rope.gradient_not_rotated_back",
        "attention.sink_gradient_missing", "linear.dw_without_partial_group",
        "rmsnorm.sum_over_padded_rows", "adamw.no_bias_correction", "adamw.coupled_decay",
        "adamw.eps_inside_root", "grad_norm.clip_by_shard", "router.decision_recomputed"}) {
    const std::vector<AuditReport> reports = Reports(std::string(fault) + "@trainer");
    bool caught = false;
    for (const AuditReport& r : reports) caught |= !r.pass();
    EXPECT_TRUE(caught) << fault;
    ASSERT_FALSE(reports.empty());
    EXPECT_EQ(reports[0].reference, reference) << fault;
  }
}

// What is not finite is the largest error there is: a sum that turns into NaN would compare as
// none.
TEST(Audit, AGradientThatIsNotFiniteIsOff) {
  const std::vector<double> want = {3, 4}, zero = {0, 0};
  EXPECT_DOUBLE_EQ(GradientError(std::vector<float>{3, 9}.data(), want), 1);
  EXPECT_EQ(GradientError(std::vector<float>{3, 4}.data(), want), 0);
  EXPECT_EQ(GradientError(std::vector<float>{0, 1}.data(), zero), 1);
  EXPECT_EQ(GradientError(std::vector<float>{0, 0}.data(), zero), 0);
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(GradientError(std::vector<float>{3, bad}.data(), want),
              std::numeric_limits<double>::infinity());
  }
}

// Two layers of the real model, where it has been fetched.
TEST(Audit, TwoLayersOfSmolLm2AgreeWithFloat64) {
  const char* named = std::getenv("TARE_SMOLLM2");
  const std::string path =
      named != nullptr ? named : std::string(TARE_SOURCE_DIR) + "/models/smollm2";
  if (!std::filesystem::exists(path + "/config.json"))
    GTEST_SKIP() << path << " is not there; scripts/get_model.sh fetches it";
  const Result<AuditInput> input = CheckpointAuditInput(path, 2);
  ASSERT_TRUE(input.ok()) << input.status().ToString();
  const Result<std::vector<AuditReport>> reports = Audit(&Pool(), *input);
  ASSERT_TRUE(reports.ok()) << reports.status().ToString();
  for (const AuditReport& r : *reports)
    EXPECT_TRUE(r.pass()) << r.loss << ": " << r.first_finding();
}

std::unique_ptr<Trainer> Make(bool surrogate) {
  models::ModelOptions model_options;
  model_options.side = fault::Side::kTrainer;
  Options options;
  options.surrogate = surrogate;
  return Trainer::Create(&Pool(), std::move(models::MiniModel(&Pool(), model_options)).value(),
                         options)
      .value();
}

// C7-06: the surrogate's visible forward has production's bits; its gradient is near and other.
TEST(Surrogate, SameForwardBitsOtherBackward) {
  std::vector<Sequence> list(2);
  for (int i = 0; i < 2; ++i) {
    list[static_cast<size_t>(i)].prompt_tokens = 3;
    for (int t = 0; t < 14 + 9 * i; ++t)
      list[static_cast<size_t>(i)].tokens.push_back((t * 37 + i * 11 + 5) % 500);
  }
  const auto a = Make(false), b = Make(true);
  const Result<LossReport> ra = a->Accumulate(list, Loss::kCrossEntropy, {}, "theta0");
  const Result<LossReport> rb = b->Accumulate(list, Loss::kCrossEntropy, {}, "theta0");
  ASSERT_TRUE(ra.ok() && rb.ok()) << rb.status().ToString();
  EXPECT_EQ(std::bit_cast<uint64_t>(ra->loss), std::bit_cast<uint64_t>(rb->loss));
  for (size_t i = 0; i < 2; ++i) {
    const auto &x = ra->logprobs.values[i], &y = rb->logprobs.values[i];
    ASSERT_EQ(x.size(), y.size());
    EXPECT_EQ(std::memcmp(x.data(), y.data(), x.size() * sizeof(float)), 0);
  }
  EXPECT_GT(ra->backward_launches, 0);
  EXPECT_EQ(rb->backward_launches, 0);
  int64_t other = 0;
  for (size_t p = 0; p < a->model().parameters().size(); ++p) {
    const Tensor &x = a->gradient(static_cast<int>(p)), &y = b->gradient(static_cast<int>(p));
    double off = 0, size = 0;
    for (int64_t k = 0; k < x.elements(); ++k) {
      const double d =
          static_cast<double>(x.as<float>()[k]) - static_cast<double>(y.as<float>()[k]);
      off += d * d;
      size += static_cast<double>(y.as<float>()[k]) * static_cast<double>(y.as<float>()[k]);
    }
    EXPECT_LE(std::sqrt(off), kBf16Tolerance * std::sqrt(size)) << a->model().parameters()[p].name;
    other += off > 0;
  }
  EXPECT_GT(other, 0);
  const std::string before = *b->MasterHash();
  ASSERT_TRUE(b->Apply(1e-3f).ok());
  EXPECT_NE(*b->MasterHash(), before);
}

Json Record(const std::string& arm, const std::string& forward, int64_t kernels) {
  Json step{{"forward_sha256", forward},
            {"backward_kernels", kernels},
            {"tokens", 9},
            {"forward_ns", 1},
            {"loss_ns", 1},
            {"backward_ns", 1},
            {"optimizer_ns", 1}};
  return Json{{"schema", arm == "native" ? kBaselineSchema : kTrainSchema},
              {"arm", arm},
              {"profile", "ieee-f32"},
              {"faults", ""},
              {"initial_weights", std::string(64, 'a')},
              {"data_sha256", std::string(64, 'd')},
              {"first_sequence", 0},
              {"batch", 8},
              {"lr", 1e-4},
              {"lr_schedule", "constant"},
              {"warmup_steps", 0},
              {"total_steps", 1},
              {"held_out_before", 2.0},
              {"held_out_after", 1.5},
              {"steps", Json::array({step})}};
}

// C7-06: a missing arm, other data, another forward, and an arm that is not what it says.
TEST(Control, JudgesThreeArms) {
  const std::vector<Json> good = {Record("production", "f", 40), Record("surrogate", "f", 0),
                                  Record("native", "g", 40)};
  EXPECT_EQ(JudgeControl(good).verdict, Verdict::kPass);
  EXPECT_EQ(JudgeControl(std::span(good).first(2)).reason, "arms-differ");
  const auto with = [&](size_t arm, const char* pointer, const Json& value) {
    std::vector<Json> bad = good;
    bad[arm][Json::json_pointer(pointer)] = value;
    return JudgeControl(bad);
  };
  EXPECT_EQ(with(1, "/data_sha256", std::string(64, 'e')).reason, "arms-differ");
  EXPECT_EQ(with(2, "/initial_weights", std::string(64, 'b')).reason, "arms-differ");
  std::vector<Json> unnamed = good;
  for (Json& r : unnamed) r["data_sha256"] = "";
  EXPECT_EQ(JudgeControl(unnamed).reason, "receipt-malformed");
  EXPECT_EQ(with(2, "/initial_weights", std::string(64, 'A')).reason, "receipt-malformed");
  EXPECT_EQ(with(0, "/lr", 2e-4).reason, "arms-differ");
  EXPECT_EQ(with(1, "/steps/0/forward_sha256", "h").reason, "bit-mismatch");
  EXPECT_EQ(with(1, "/steps/0/backward_kernels", 7).reason, "detached-substitute");
  EXPECT_EQ(with(0, "/steps/0/backward_kernels", 0).reason, "detached-substitute");
  EXPECT_EQ(with(2, "/schema", kTrainSchema).reason, "receipt-malformed");
  EXPECT_EQ(with(2, "/steps", Json::array()).reason, "arms-differ");
  EXPECT_EQ(with(0, "/batch", nullptr).verdict, Verdict::kRefused);
}

// Cosine by the C library, to an f32 rounding; the warm-up never starts at 0 (T-07).
TEST(Schedule, RatesFollowTheirFormula) {
  const Schedule cosine = *MakeSchedule("cosine", 3, 23, 0.1);
  EXPECT_EQ(LearningRate(cosine, 3e-3, 1), 1e-3f);
  EXPECT_EQ(LearningRate(cosine, 3e-3, 3), 3e-3f);
  for (int step = 4; step <= 23; ++step) {
    const double x = (step - 4) / 20.0;
    const double want = 3e-3 * (0.1 + 0.9 * 0.5 * (1 + std::cos(3.14159265358979323846 * x)));
    EXPECT_NEAR(LearningRate(cosine, 3e-3, step), want, 1e-9) << step;
  }
  EXPECT_EQ(LearningRate(cosine, 3e-3, 99), 3e-4f);
  const Schedule linear = *MakeSchedule("linear", 0, 10, 0);
  EXPECT_EQ(LearningRate(linear, 1, 1), 1.0f);
  EXPECT_EQ(LearningRate(linear, 1, 6), 0.5f);
  EXPECT_GT(LearningRate(linear, 1, 10), 0.0f);
  EXPECT_EQ(LearningRate(linear, 1, 11), 0.0f);
  EXPECT_EQ(LearningRate(*MakeSchedule("constant", 0, 0, 0), 1e-4, 1000), 1e-4f);
  EXPECT_FALSE(MakeSchedule("step", 0, 10, 0).ok());
  EXPECT_FALSE(MakeSchedule("cosine", 20, 10, 0).ok());
  EXPECT_FALSE(MakeSchedule("linear", 0, 10, 1.5).ok());
  EXPECT_FALSE(MakeSchedule("constant", -1, 10, 0).ok());
}

}  // namespace
}  // namespace tare::trainer
