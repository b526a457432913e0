// Arms that real systems recorded (tests/data/real), judged by `tare arms`: the verdicts that their
// own page states.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <string>

#include "base/json.h"

namespace tare {
namespace {

const std::string kReal = TARE_SOURCE_DIR "/tests/data/real/";

struct Answer {
  int exit = -1;
  Json json;
  std::string reason() const { return json.value("reason", "none"); }
  std::string verdict() const { return json.value("verdict", "none"); }
};

Answer Arms(const std::string& a, const std::string& b, const std::string& rest) {
  const std::string command = std::string(TARE_BINARY_DIR "/tare arms ") + kReal + a +
                              ".safetensors " + kReal + b + ".safetensors " + rest +
                              " --json 2>/dev/null";
  std::FILE* pipe = ::popen(command.c_str(), "r");
  EXPECT_NE(pipe, nullptr);
  std::string text;
  char buffer[4096];
  for (size_t n = 0; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) text.append(buffer, n);
  const int status = ::pclose(pipe);
  Answer out{WIFEXITED(status) ? WEXITSTATUS(status) : -1, Json()};
  auto json = ParseJson(text);
  EXPECT_TRUE(json.ok()) << command << "\n" << text;
  if (json.ok()) out.json = *json;
  return out;
}

TEST(RealArms, InsideTheRolloutEngine) {
  for (const char* same :
       {"batched_again", "decode_batched", "prefill_batched", "prefill_batch1"}) {
    const Answer r =
        Arms("rollouts/bi0.batched", std::string("rollouts/bi0.") + same, "--question C3");
    EXPECT_EQ(r.verdict(), "pass") << same << r.json.dump(1);
    EXPECT_EQ(r.exit, 0);
  }
  const Answer one_row =
      Arms("rollouts/bi0.batched", "rollouts/bi0.decode_batch1", "--question C3");
  EXPECT_EQ(one_row.exit, 1);
  EXPECT_EQ(one_row.reason(), "bit-mismatch");
  EXPECT_NE(one_row.json.dump().find("665 of 701"), std::string::npos) << one_row.json.dump(1);
  // One token of 701, two ulp: a fail as well.
  const Answer near =
      Arms("rollouts/bi0.batched", "rollouts/bi0_chunk32.decode_batched", "--question C3");
  EXPECT_EQ(near.reason(), "bit-mismatch");
  EXPECT_NE(near.json.dump().find("1 of 701"), std::string::npos);
  // Sampled tokens parted: another question (C3-01).
  EXPECT_EQ(Arms("rollouts/bi0.batched", "rollouts/bi0.batch1", "--question C3").verdict(), "fail");
  // The batch-invariant arm was never recorded: it does not run there.
  const Answer none = Arms("rollouts/bi0.batched", "rollouts/bi1.batched", "--question C3");
  EXPECT_EQ(none.exit, 5);
  EXPECT_EQ(none.verdict(), "not-covered");
  EXPECT_EQ(none.reason(), "not-implemented");
}

TEST(RealArms, RolloutAgainstEveryTrainerFails) {
  for (const char* arm : {"hf.bf16_eager.single.lse_fp32", "hf.bf16_eager.single.lsm_fp32",
                          "hf.bf16_sdpa.packed.lsm_fp32", "hf.bf16_sdpa.packed_leaky.lsm_fp32",
                          "hf.bf16_sdpa.padded.lse_fp32", "hf.bf16_sdpa.padded.lsm_fp32",
                          "hf.bf16_sdpa.single.fp32_lm_head", "hf.bf16_sdpa.single.lse_fp32",
                          "hf.bf16_sdpa.single.lsm_fp32", "hf.fp32_sdpa.single.lse_fp32",
                          "hf.fp32_sdpa.single.lsm_fp32"}) {
    const Answer r = Arms("rollouts/bi0.batched", std::string("trainer/") + arm, "");
    EXPECT_EQ(r.verdict(), "fail") << arm;
    EXPECT_EQ(r.reason(), "bit-mismatch") << arm;
    for (const char* excuse : {"tolerance", "acceptable", "within"}) {
      EXPECT_EQ(r.json.dump().find(excuse), std::string::npos) << arm;
    }
  }
  // Log-probs that are bf16 values cannot be compared with f32 ones; the upcast is a diagnosis.
  for (const char* arm : {"verl.fsdp2", "hf.bf16_sdpa.padded.lsm_bf16",
                          "hf.bf16_sdpa.single.lsm_bf16", "hf.bf16_eager.single.lsm_bf16"}) {
    const Answer r = Arms("rollouts/bi0.batched", std::string("trainer/") + arm, "");
    EXPECT_EQ(r.verdict(), "inconclusive") << arm;
    EXPECT_EQ(r.reason(), "dtype-differs") << arm;
    EXPECT_NE(r.json.dump().find("diagnosis by exact upcast"), std::string::npos) << arm;
  }
}

// C5-04, C5-07.
TEST(RealArms, LayoutAndMeaningAreToldApart) {
  for (const char* layout : {"padded", "packed"}) {
    const Answer r =
        Arms("trainer/hf.bf16_sdpa.single.lsm_fp32",
             std::string("trainer/hf.bf16_sdpa.") + layout + ".lsm_fp32", "--question C3");
    EXPECT_EQ(r.verdict(), "fail");
    EXPECT_EQ(r.reason(), "layout-moves-bits") << layout;
  }
  const std::string control =
      "--question C3 --isolated " + kReal + "trainer/hf.bf16_sdpa.packed.lsm_fp32.safetensors";
  const Answer leaky = Arms("trainer/hf.bf16_sdpa.single.lsm_fp32",
                            "trainer/hf.bf16_sdpa.packed_leaky.lsm_fp32", control);
  EXPECT_EQ(leaky.verdict(), "fail");
  EXPECT_EQ(leaky.reason(), "context-leak") << leaky.json.dump(1);
  // The honest packing under the same control is layout, not meaning.
  const Answer packed =
      Arms("trainer/hf.bf16_sdpa.single.lsm_fp32", "trainer/hf.bf16_sdpa.packed.lsm_fp32", control);
  EXPECT_EQ(packed.reason(), "layout-moves-bits");
  // Another formula for the same logits is neither.
  EXPECT_EQ(Arms("trainer/hf.bf16_sdpa.single.lsm_fp32", "trainer/hf.bf16_sdpa.single.lse_fp32",
                 "--question C3")
                .reason(),
            "bit-mismatch");
  // Two trainers are no answer to C5, and two rollouts neither.
  EXPECT_EQ(Arms("trainer/verl.fsdp2", "trainer/hf.bf16_sdpa.padded.lsm_bf16", "").reason(),
            "inference-internal");
}

TEST(RealArms, OtherMetricsAreShownAndDecideNothing) {
  const std::string metrics = "--metrics " + kReal + "trainer/verl_metrics.json";
  const Answer r = Arms("rollouts/bi0.batched", "trainer/hf.bf16_sdpa.single.lsm_fp32", metrics);
  EXPECT_EQ(r.reason(), "bit-mismatch");
  EXPECT_NE(r.json.dump().find("diagnostic-only, of the other system: kl"), std::string::npos);
}

}  // namespace
}  // namespace tare
