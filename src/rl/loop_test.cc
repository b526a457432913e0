// The loop with its real processes on MINI: one true pass, and the false passes that must not pass
// (requirements T-01 to T-12 as far as they are about the loop, C5, C8 and RL rows named beside
// each).

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <functional>

#include "base/env.h"
#include "base/reasons.h"
#include "base/sha256.h"
#include "models/mini.h"
#include "rl/launch.h"

namespace tare::rl {
namespace {

namespace fs = std::filesystem;

class LoopTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    root_ = new fs::path(fs::temp_directory_path() / fmt::format("tare-loop-{}", ::getpid()));
    fs::remove_all(*root_);
    ASSERT_TRUE(Env::Real()->CreateDirs(root_->string()).ok());
    ASSERT_TRUE(models::WriteMini(Env::Real(), (*root_ / "mini").string()).ok());
  }
  static void TearDownTestSuite() {
    fs::remove_all(*root_);
    delete root_;
  }

  static LoopConfig Config(const std::string& faults = "") {
    LoopConfig c;
    c.model = (*root_ / "mini").string();
    c.prompts = 2;
    c.group = 3;
    c.max_tokens = 6;
    c.faults = faults;
    return c;
  }
  static LaunchOptions Options(const std::string& name) {
    LaunchOptions o;
    o.executable = std::string(TARE_BINARY_DIR) + "/tare";
    o.out = (*root_ / name).string();
    o.quiet = true;
    o.limit_seconds = 120;
    return o;
  }
  static LaunchResult Run(const LoopConfig& config, const LaunchOptions& options) {
    EXPECT_TRUE(fs::exists(options.executable)) << "build the target `tare` first";
    Result<LaunchResult> r = RunLoop(config, options);
    EXPECT_TRUE(r.ok()) << r.status().ToString();
    return r.ok() ? *r : LaunchResult{};
  }
  static std::string Log(const std::string& name) {
    return Env::Real()->ReadFile((*root_ / name / "trainer.log").string()).value() +
           Env::Real()->ReadFile((*root_ / name / "rollout.log").string()).value();
  }
  static void Expect(const LaunchResult& r, const std::string& name, Verdict verdict,
                     std::string_view reason) {
    EXPECT_EQ(VerdictName(r.judgement.verdict), VerdictName(verdict))
        << name << "\n"
        << r.judgement.ToJson().dump(1) << Log(name);
    bool found = false;
    for (const auto& f : r.judgement.findings) found |= f.reason == reason && f.verdict == verdict;
    EXPECT_TRUE(found || reason.empty()) << name << ": wanted " << reason << "\n"
                                         << r.judgement.ToJson().dump(1) << Log(name);
  }

  static fs::path* root_;
};
fs::path* LoopTest::root_ = nullptr;

// C5, C8-01, RL-05 to RL-08: compares at theta0, theta1 and theta2, all three pairs of paths, 0
// diff; the verdict is recomputed from the files, and from a changed file refused (C5-12, C8-11).
TEST_F(LoopTest, TwoStepsPass) {
  const LaunchResult r = Run(Config(), Options("pass"));
  Expect(r, "pass", Verdict::kPass, "");
  ASSERT_EQ(r.judgement.comparisons.size(), 9u);
  for (const auto& c : r.judgement.comparisons) {
    EXPECT_GT(c.compared, 0);
    EXPECT_EQ(c.mismatches, 0);
  }
  const std::string dir = (*root_ / "pass").string();
  const auto judge = [&](const Json& receipt) { return Judge(Env::Real(), receipt, dir); };
  EXPECT_EQ(judge(r.receipt).verdict, Verdict::kPass);

  // Each field of the receipt that carries the verdict is tried on a planted contradiction.
  const auto spoil = [&](const std::string& pointer, const Json& value) {
    Json bad = r.receipt;
    bad[Json::json_pointer(pointer)] = value;
    return judge(bad);
  };
  struct Case {
    const char* pointer;
    Json value;
    std::string_view reason;
  };
  const Case cases[] = {
      {"/schema", "tare.receipt/2", reason::kReceiptMalformed},
      {"/processes/0/code", 1, reason::kProcessExit},  // C8-05
      {"/processes/1/signal", 9, reason::kProcessExit},
      {"/processes/1/ended", false, reason::kProcessExit},
      {"/identities/rollout", nullptr, reason::kIdentityDiffers},  // C5-09
      {"/identities/trainer/profile", "sm90-mma", reason::kIdentityDiffers},
      {"/identities/trainer/binary_sha256", "0", reason::kIdentityDiffers},      // T-22, RL-02
      {"/identities/rollout/switch/effective", 0, reason::kSwitchNotEffective},  // T-12
      {"/events/1/event", "update", reason::kLoopIncomplete},                    // C8-01
      {"/events/5/version", 2, reason::kLoopIncomplete},
      {"/events/3/monotonic_ns", 1, reason::kLoopIncomplete},
      {"/rounds/1/weights/engine_held", "0", reason::kWeightHashMismatch},     // C8-06, H14
      {"/rounds/1/weights/engine_version", 0, reason::kVersionContradiction},  // T-10
      {"/rounds/2/rollout/weight_versions", Json{1, 2}, reason::kVersionContradiction},
      {"/rounds/0/paths/score/sha256", "0", reason::kReceiptContradicted},      // C5-12
      {"/rounds/0/paths/score/valid_tokens", 1, reason::kReceiptContradicted},  // C5-08
      {"/rounds/0/paths/score/launches", 0, reason::kPathUnexecuted},           // T-02
      {"/rounds/0/paths/score/started_ns", 1, reason::kPathUnexecuted},         // C5-05
      {"/rounds/0/paths/train/recorded", false, reason::kPathUnexecuted},       // C5-06
      {"/rounds/0/paths/rollout/file", "../mini/config.json", reason::kReceiptMalformed},
      {"/updates/0/parameters/0/gradient_nonzero", 0, reason::kGradientNotMeaningful},  // C8-03
      {"/updates/1/parameters/2/gradient_non_finite", 1, reason::kGradientNotMeaningful},
      {"/updates/0/kl_coef", 1, reason::kGradientNotMeaningful},
      {"/updates/0/ratio_not_one", 1, reason::kRatioNotOne},
      {"/updates/1/deployed_after", "0", reason::kWeightHashMismatch},
      {"/updates", Json::array(), reason::kLoopIncomplete},
      {"/config/steps", 1, reason::kLoopIncomplete},
      {"/rounds/0/weights", Json(nullptr), reason::kReceiptMalformed},
  };
  for (const Case& c : cases) {
    const Judgement j = spoil(c.pointer, c.value);
    EXPECT_NE(j.verdict, Verdict::kPass) << c.pointer;
    bool found = false;
    for (const auto& f : j.findings) found |= f.reason == c.reason;
    EXPECT_TRUE(found) << c.pointer << "\n" << j.ToJson().dump(1);
  }
  // One ulp in one logprob of one dump, with its digest corrected: the bits decide (C5-07).
  for (const char* path : {"rollout", "score", "train"}) {
    const std::string file = fmt::format("{}/theta1.{}.jsonl", dir, path);
    const std::string good = *Env::Real()->ReadFile(file);
    std::string bad = good;
    const size_t at = bad.find("\"bits\":[\"");
    ASSERT_NE(at, std::string::npos) << bad.substr(0, 300);
    const size_t digit = at + 9 + 7;  // the last hex digit of the first word
    bad[digit] = bad[digit] == '0' ? '1' : '0';
    ASSERT_TRUE(Env::Real()->WriteFileAtomic(file, bad).ok());
    Json receipt = r.receipt;
    receipt["rounds"][1]["paths"][path]["sha256"] = Hex(Sha256Of(bad));
    const Judgement j = judge(receipt);
    EXPECT_EQ(j.reason, reason::kBitMismatch) << path << "\n"
                                              << j.ToJson().dump(1) << good.substr(0, 300);
    ASSERT_TRUE(Env::Real()->WriteFileAtomic(file, good).ok());
  }
}

struct FalsePass {
  const char* fault;
  Verdict verdict;
  std::string_view reason;
};

class FalsePassTest : public LoopTest, public testing::WithParamInterface<FalsePass> {};

TEST_P(FalsePassTest, DoesNotPass) {
  const FalsePass& p = GetParam();
  std::string name = p.fault;
  std::replace(name.begin(), name.end(), '@', '.');
  Expect(Run(Config(p.fault), Options(name)), name, p.verdict, p.reason);
}

INSTANTIATE_TEST_SUITE_P(
    Loop, FalsePassTest,
    testing::Values(
        FalsePass{"rl.bypass_score@trainer", Verdict::kRefused, reason::kPathUnexecuted},  // T-02
        FalsePass{"rl.decimal_logprobs@trainer", Verdict::kRefused,
                  reason::kNotOriginalDtype},                                             // T-04
        FalsePass{"rl.default_fill@trainer", Verdict::kRefused, reason::kDefaultFilled},  // T-05
        FalsePass{"rl.skip_grad_path@trainer", Verdict::kRefused, reason::kPathMissing},  // T-06
        FalsePass{"rl.zero_learning_rate@trainer", Verdict::kRefused,
                  reason::kMasterUnchanged},                                             // T-07
        FalsePass{"rl.skip_step@trainer", Verdict::kRefused, reason::kMasterUnchanged},  // T-07
        FalsePass{"rl.master_only@trainer", Verdict::kInconclusive,
                  reason::kDeployedUnchanged},  // T-08
        FalsePass{"rl.flat_reward@trainer", Verdict::kRefused,
                  reason::kDegenerateAdvantage},                                             // T-09
        FalsePass{"rl.no_publish@trainer", Verdict::kRefused, reason::kWeightHashMismatch},  // T-10
        FalsePass{"rl.stale_label@trainer", Verdict::kRefused,
                  reason::kVersionContradiction},                                           // C8-06
        FalsePass{"rl.same_seed@trainer", Verdict::kRefused, reason::kIdenticalSamples},    // H16
        FalsePass{"rl.shifted_mask@trainer", Verdict::kFail, reason::kMaskDiffers},         // C5-08
        FalsePass{"rl.retokenise@trainer", Verdict::kInconclusive, reason::kTokensDiffer},  // C5-11
        FalsePass{"rl.skip_last_compare@trainer", Verdict::kRefused,
                  reason::kLoopIncomplete},                                              // C8-01
        FalsePass{"rl.die_at_exit@trainer", Verdict::kRefused, reason::kProcessExit},    // C8-05
        FalsePass{"rl.die_in_update@trainer", Verdict::kRefused, reason::kProcessExit},  // C8-05
        FalsePass{"engine.keep_prefix_cache@rollout", Verdict::kFail,
                  reason::kBitMismatch},  // T-11, H13
        FalsePass{"rope.cast_before_rotate@rollout", Verdict::kFail, reason::kBitMismatch},
        FalsePass{"rope.cast_before_rotate@trainer", Verdict::kFail, reason::kBitMismatch}),
    [](const testing::TestParamInfo<FalsePass>& info) {
      std::string name = info.param.fault;
      std::replace_if(
          name.begin(), name.end(),
          [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); }, '_');
      return name;
    });

// T-01: a mask without a valid token. The trainer refuses to train on it, and the compare that was
// made is inconclusive.
TEST_F(LoopTest, EmptyMaskIsInconclusive) {
  const LaunchResult r = Run(Config("rl.empty_mask@trainer"), Options("empty-mask"));
  EXPECT_NE(r.judgement.verdict, Verdict::kPass);
  bool found = false;
  for (const auto& f : r.judgement.findings)
    found |= f.reason == reason::kNoValidTokens && f.verdict == Verdict::kInconclusive;
  EXPECT_TRUE(found) << r.judgement.ToJson().dump(1);
}

// T-12: the switch in one process' environment only.
TEST_F(LoopTest, SwitchInOneProcessOnlyIsRefused) {
  LaunchOptions o = Options("switch");
  o.trainer_environment = {{"VLLM_BATCH_INVARIANT", ""}};
  Expect(Run(Config(), o), "switch", Verdict::kRefused, reason::kSwitchNotEffective);
}

// C8-05: the engine killed between two rounds.
TEST_F(LoopTest, KilledEngineIsRefused) {
  LaunchOptions o = Options("killed");
  o.kill_rollout_after_rounds = 1;
  Expect(Run(Config(), o), "killed", Verdict::kRefused, reason::kProcessExit);
}

// The launcher answers before anything starts.
TEST_F(LoopTest, RefusesConfigurations) {
  for (const auto& change : std::vector<std::function<void(LoopConfig&)>>{
           [](LoopConfig& c) { c.group = 1; }, [](LoopConfig& c) { c.temperature = 0; },
           [](LoopConfig& c) { c.steps = 0; }, [](LoopConfig& c) { c.loss = "sft"; }}) {
    LoopConfig c = Config();
    change(c);
    EXPECT_EQ(RunLoop(c, Options("refused")).status().code(), Code::kInvalidArgument);
  }
  EXPECT_FALSE(LoopConfig::FromJson(Json{{"stepz", 1}}).ok());
  EXPECT_FALSE(LoopConfig::FromJson(Json{{"steps", "two"}}).ok());
  const Result<LoopConfig> round_trip = LoopConfig::FromJson(Config().ToJson());
  ASSERT_TRUE(round_trip.ok());
  EXPECT_EQ(round_trip->ToJson(), Config().ToJson());
}

}  // namespace
}  // namespace tare::rl
