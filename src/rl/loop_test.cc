// The loop with its real processes on MINI: one true pass, and the false passes that must not pass
// (requirements T-01 to T-12 as far as they are about the loop, C5, C8 and RL rows named beside
// each).

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <functional>

#include "base/env.h"
#include "base/reasons.h"
#include "base/sha256.h"
#include "models/mini.h"
#include "rl/curves.h"
#include "rl/launch.h"
#include "rl/process.h"

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
      {"/updates/0/backward_kernels", 0, reason::kDetachedSubstitute},        // T-20
      {"/identities/trainer/arm", "surrogate", reason::kDetachedSubstitute},  // T-20
      {"/rounds/0/rollout/tokens", 1000, reason::kCountMismatch},             // T-01
      {"/processes/0/loaded_files", Json::object(), reason::kIdentityDiffers},
      {"/updates/0/kl_coef", 1, reason::kGradientNotMeaningful},
      {"/updates/0/ratio_not_one", 1, reason::kRatioNotOne},
      {"/updates/1/deployed_after", "0", reason::kWeightHashMismatch},
      {"/updates/0/publish/engine/sha256", "0", reason::kWeightHashMismatch},
      {"/updates/0/deployed_before", "0", reason::kReceiptContradicted},
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
  // An update and its publish that agree, on weights that the next round did not have.
  {
    Json forged = r.receipt;
    forged["updates"][0]["deployed_after"] = forged["updates"][0]["publish"]["engine"]["sha256"] =
        "0";
    const Judgement j = judge(forged);
    EXPECT_EQ(j.reason, reason::kReceiptContradicted) << j.ToJson().dump(1);
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
                  reason::kVersionContradiction},  // C8-06
        FalsePass{"rl.snapshot_of_theta0@trainer", Verdict::kRefused,
                  reason::kVersionContradiction},  // T-10, C8-06
        FalsePass{"rl.stale_tensor@trainer", Verdict::kRefused,
                  reason::kWeightHashMismatch},  // H14
        FalsePass{"engine.stale_weights@rollout", Verdict::kRefused,
                  reason::kWeightHashMismatch},  // H14, T-10
        FalsePass{"rl.cut_to_shorter@trainer", Verdict::kInconclusive,
                  reason::kCountMismatch},  // T-01, C5-08
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

// T-01: a mask without a valid token: there is no loss and no step, and what was compared is
// nothing.
TEST_F(LoopTest, EmptyMaskIsInconclusive) {
  const LaunchResult r = Run(Config("rl.empty_mask@trainer"), Options("empty-mask"));
  Expect(r, "empty-mask", Verdict::kInconclusive, reason::kNoValidTokens);
  EXPECT_EQ(r.judgement.reason, reason::kNoValidTokens);
}

// T-03: logprobs that differ in their last bit where the probabilities do not: the bits decide, the
// metric of training logs is a diagnosis.
TEST_F(LoopTest, EqualProbabilitiesDoNotHideBits) {
  LoopConfig c = Config("rl.last_bit@trainer");
  c.temperature = 0.02;  // so that some tokens are nearly certain
  const LaunchResult r = Run(c, Options("last-bit"));
  Expect(r, "last-bit", Verdict::kFail, reason::kBitMismatch);
  int64_t mismatches = 0;
  for (const auto& x : r.judgement.comparisons) {
    mismatches += x.mismatches;
    EXPECT_LT(x.max_abs_probability, 1e-6f);
  }
  EXPECT_GT(mismatches, 0);
}

// H01: temperature on one side. The engine's own tempered logprobs have the trainer's bits, so the
// contract is named and not arithmetic. Without the fault, temperature passes.
TEST_F(LoopTest, TemperatureOnOneSideIsAContract) {
  LoopConfig c = Config("rl.raw_logprobs@trainer");
  c.temperature = 0.5;
  Expect(Run(c, Options("raw")), "raw", Verdict::kFail, reason::kLogprobKind);
  c.faults.clear();
  Expect(Run(c, Options("tempered")), "tempered", Verdict::kPass, "");
}

// H02: normalised over the kept set on one side.
TEST_F(LoopTest, TruncationOnOneSideIsAContract) {
  LoopConfig c = Config("rl.processed_logprobs@trainer");
  c.top_p = 0.9;
  Expect(Run(c, Options("kept-set")), "kept-set", Verdict::kFail, reason::kLogprobKind);
  c.faults.clear();
  Expect(Run(c, Options("top-p")), "top-p", Verdict::kPass, "");
}

// T-14: each process agrees with itself, the two do not: one chose other kernels.
TEST_F(LoopTest, AgreementInsideAProcessIsNotEnough) {
  const LaunchResult r = Run(Config("linear.reversed_k@trainer"), Options("cross-process"));
  Expect(r, "cross-process", Verdict::kFail, reason::kBitMismatch);
  for (const auto& c : r.judgement.comparisons) {
    if (c.a == "score") {
      EXPECT_EQ(c.mismatches, 0) << c.b;
    } else {
      EXPECT_GT(c.mismatches, 0) << c.b;
    }
  }
}

// T-20: the surrogate arm has the same forward and finite gradients, of another function.
TEST_F(LoopTest, SurrogateArmIsADetachedSubstitute) {
  LoopConfig c = Config();
  c.arm = "surrogate";
  const LaunchResult r = Run(c, Options("surrogate"));
  Expect(r, "surrogate", Verdict::kRefused, reason::kDetachedSubstitute);
  for (const auto& x : r.judgement.comparisons) EXPECT_EQ(x.mismatches, 0);
}

// T-22, RL-04: one of the processes has another library in it.
TEST_F(LoopTest, AnotherLibraryInOneProcessIsRefused) {
  const char* library = "/lib/x86_64-linux-gnu/libresolv.so.2";
  if (!fs::exists(library)) GTEST_SKIP() << library << " is not there";
  LaunchOptions o = Options("library");
  o.trainer_environment.emplace_back("LD_PRELOAD", library);
  Expect(Run(Config(), o), "library", Verdict::kRefused, reason::kIdentityDiffers);
}

// T-12: the switch in one process' environment only.
TEST_F(LoopTest, SwitchInOneProcessOnlyIsRefused) {
  LaunchOptions o = Options("switch");
  o.trainer_environment = {{"VLLM_BATCH_INVARIANT", ""}};
  Expect(Run(Config(), o), "switch", Verdict::kRefused, reason::kSwitchNotEffective);
}

// T-12, SYS-03: the switch in the launcher's environment and in no worker's.
TEST_F(LoopTest, SwitchInTheLauncherOnlyIsRefused) {
  ::setenv("VLLM_BATCH_INVARIANT", "1", 1);
  LaunchOptions o = Options("switch-launcher");
  o.trainer_environment = {{"VLLM_BATCH_INVARIANT", ""}};
  o.rollout_environment = {{"VLLM_BATCH_INVARIANT", ""}};
  const LaunchResult r = Run(Config(), o);
  ::unsetenv("VLLM_BATCH_INVARIANT");
  Expect(r, "switch-launcher", Verdict::kRefused, reason::kSwitchNotEffective);
}

// C8-05: either process killed in every phase of the loop; a trainer that hangs at its end.
TEST_F(LoopTest, AKilledProcessIsRefusedInEveryPhase) {
  const int64_t phases = 4 * Config().steps + 3;
  for (int64_t at = 0; at < phases; ++at) {
    for (const bool trainer : {false, true}) {
      const std::string name = fmt::format("killed-{}-{}", trainer ? "trainer" : "rollout", at);
      LaunchOptions o = Options(name);
      (trainer ? o.kill_trainer_at_event : o.kill_rollout_at_event) = at;
      const LaunchResult r = Run(Config(), o);
      Expect(r, name, Verdict::kRefused, reason::kProcessExit);
      EXPECT_EQ(r.judgement.reason, reason::kProcessExit) << name;
    }
  }
}

TEST_F(LoopTest, AHangAtTheEndIsRefused) {
  LaunchOptions o = Options("hang");
  o.stop_seconds = 1;
  Expect(Run(Config("rl.hang_at_exit@trainer"), o), "hang", Verdict::kRefused,
         reason::kProcessExit);
}

// C8-10: more than two steps want a passing receipt of two with the same recipe.
TEST_F(LoopTest, ALongRunWantsTwoStepsFirst) {
  LoopConfig c = Config();
  c.steps = 3;
  LaunchOptions o = Options("long");
  EXPECT_EQ(RunLoop(c, o).status().code(), Code::kPrecondition);
  LoopConfig two = c;
  two.steps = 2;
  Expect(Run(two, Options("two")), "two", Verdict::kPass, "");
  o.after = (*root_ / "two" / "receipt.json").string();
  LoopConfig other = c;
  other.lr = 2e-3;
  EXPECT_EQ(RunLoop(other, o).status().code(), Code::kPrecondition);
  c.seed = 5;
  c.held_out = 2;
  c.lr_schedule = "cosine";
  EXPECT_EQ(RunLoop(c, o).status().code(), Code::kPrecondition);  // the schedule is of the recipe
  c.lr_schedule = "constant";
  const LaunchResult r = Run(c, o);
  Expect(r, "long", Verdict::kPass, "");
  const Result<Curves> curves = CurvesOf("long", r.receipt);
  ASSERT_TRUE(curves.ok()) << curves.status().ToString();
  EXPECT_EQ(curves->steps.size(), 3u);
  EXPECT_EQ(curves->held_out.size(), 2u);
  for (const auto& s : curves->steps) EXPECT_EQ(s.ratio_max, 1.0);
  const std::string svg = CurvesSvg(std::vector<Curves>{*curves}, "a < b");
  EXPECT_EQ(svg.find("http"), svg.find("http://www.w3.org/2000/svg"));
  EXPECT_NE(svg.find("a &lt; b"), std::string::npos);
}

// SYS-36: three seeds on MINI; the lower 95 % bound of the held-out gain is above zero.
TEST_F(LoopTest, SlowThreeSeedsRaiseTheHeldOutReward) {
  const std::string out = (*root_ / "study").string();
  Result<Process> p = Process::Start(
      "study",
      {Options("").executable, "rl", "study", Config().model, "--out", out, "--steps", "24",
       "--group", "8", "--loss", "dapo", "--new-questions", "--held-out", "32", "--lr", "2e-3"},
      {}, (*root_ / "study.log").string());
  ASSERT_TRUE(p.ok()) << p.status().ToString();
  const Exit exit = p->Wait(7000);
  EXPECT_TRUE(exit.normal()) << *Env::Real()->ReadFile((*root_ / "study.log").string());
  const Json curves = *ParseJson(*Env::Real()->ReadFile(out + "/curves.json"));
  EXPECT_EQ(curves.at("runs").size(), 3u);
  EXPECT_GT(curves.at("gain_lower_bound_95").get<double>(), 0);
}

// The launcher answers before anything starts.
TEST_F(LoopTest, RefusesConfigurations) {
  for (const auto& change : std::vector<std::function<void(LoopConfig&)>>{
           [](LoopConfig& c) { c.group = 1; }, [](LoopConfig& c) { c.temperature = 0; },
           [](LoopConfig& c) { c.steps = 0; }, [](LoopConfig& c) { c.loss = "sft"; },
           [](LoopConfig& c) { c.loss_agg_mode = "sum"; }, [](LoopConfig& c) { c.top_p = 0; },
           [](LoopConfig& c) { c.clip_ratio_c = 0.5; }, [](LoopConfig& c) { c.arm = "other"; },
           [](LoopConfig& c) { c.lr_schedule = "step"; }, [](LoopConfig& c) { c.warmup_steps = 9; },
           [](LoopConfig& c) { c.held_out = -1; }, [](LoopConfig& c) { c.prompt_tokens = 0; }}) {
    LoopConfig c = Config();
    change(c);
    EXPECT_EQ(RunLoop(c, Options("refused")).status().code(), Code::kInvalidArgument);
  }
  EXPECT_FALSE(LoopConfig::FromJson(Json{{"stepz", 1}}).ok());
  EXPECT_FALSE(LoopConfig::FromJson(Json{{"steps", "two"}}).ok());
  EXPECT_FALSE(LoopConfig::FromJson(Json{{"steps", 2.5}}).ok());
  EXPECT_FALSE(LoopConfig::FromJson(Json::array()).ok());
  const Result<LoopConfig> round_trip = LoopConfig::FromJson(Config().ToJson());
  ASSERT_TRUE(round_trip.ok());
  EXPECT_EQ(round_trip->ToJson(), Config().ToJson());
}

}  // namespace
}  // namespace tare::rl
