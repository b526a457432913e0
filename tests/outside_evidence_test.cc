// Files that other systems wrote enter a task as recorded runs and get the verdict that their own
// page (tests/data/real/README.md) states as true: layers of an engine and of two trainer
// attentions at C3 and C5, gradients with and without sharding at C7. A fail stays visible beside
// what passes, and nothing of it opens a gate: no judge gave it.

#include "base/json.h"
#include "tool.h"

namespace tare {
namespace {

const std::string kReal = TARE_SOURCE_DIR "/tests/data/real/";

class OutsideEvidence : public ToolTest {
 protected:
  void SetUp() override {
    ToolTest::SetUp();
    ASSERT_EQ(Tare("model mini " + In("mini")).status, 0);
    ASSERT_EQ(Tare("init " + In("task") + " --model " + In("mini")).status, 0);
  }
  // `tare diff A B` as a run of `step`; its exit status is the verdict that is concluded.
  ToolRun Enter(const std::string& step, const std::string& kind, const std::string& candidate,
                const std::string& a, const std::string& b) {
    return Tare("record --task " + In("task") + " --step " + step + " --kind " + kind +
                " --candidate " + candidate +
                " --skip-levels 'files of another system' --quiet --conclude exit-status --scope "
                "'shape=as recorded;topology=as "
                "recorded;dtype=bf16;model=smollm2;path=outside' -- sh -c '" +
                Program() + " diff " + kReal + a + ".safetensors " + kReal + b +
                ".safetensors >\"$TARE_OUT/diff.txt\"'");
  }
  std::string Index(const std::string& step) {
    return Env::Real()->ReadFile(In("task/" + step + "/index.md")).value();
  }
};

TEST_F(OutsideEvidence, LayersOfAnEngineAndTwoTrainers) {
  // One-row decode moves a bit inside the engine: C3, with the layer named.
  EXPECT_EQ(
      Enter("C3", "E5", "one-row", "layers/vllm.ctx_prefill_last", "layers/vllm.ctx_decode_last")
          .status,
      1);
  // Rollout against trainer: C5, whichever attention the trainer has.
  EXPECT_EQ(Enter("C5", "E6", "sdpa", "layers/hf.bf16_sdpa", "layers/vllm.prefill").status, 1);
  EXPECT_EQ(Enter("C5", "E6", "eager", "layers/hf.bf16_eager", "layers/vllm.prefill").status, 1);
  // Other dtypes are no comparison of bits.
  EXPECT_EQ(Enter("C5", "E6", "f32", "layers/hf.bf16_sdpa", "layers/hf.fp32_sdpa").status, 2);
  for (const char* candidate : {"sdpa", "eager", "f32"})
    EXPECT_NE(Index("C5").find(candidate), std::string::npos) << candidate;
  EXPECT_NE(Index("C3").find("one-row"), std::string::npos);
  bool named = false;
  for (const auto& e : std::filesystem::recursive_directory_iterator(In("task/C3"))) {
    if (e.path().filename() != "diff.txt") continue;
    named =
        Env::Real()
            ->ReadFile(e.path().string())
            .value()
            .find("first in order of execution: layers.2.mlp.down_proj.out") != std::string::npos;
  }
  EXPECT_TRUE(named);
  EXPECT_EQ(Tare("verify " + In("task")).status, 0);
}

TEST_F(OutsideEvidence, ShardedGradients) {
  // Two micro-batches on one process and the same on two: sharding as such moves nothing.
  EXPECT_EQ(Enter("C7", "E7", "sharded", "fsdp/grad1.accum_2x2", "fsdp/grad1.fsdp2_fp32").status,
            0);
  // Another cut of the batch does, and is not called noise.
  const ToolRun cut =
      Enter("C7", "E7", "one-batch", "fsdp/grad1.one_batch", "fsdp/grad1.fsdp2_fp32");
  EXPECT_EQ(cut.status, 1);
  EXPECT_EQ((cut.out + cut.err).find("tolerance"), std::string::npos);
  EXPECT_NE(Index("C7").find("one-batch"), std::string::npos);
  // A pass that no judge gave opens no later gate.
  const ToolRun later = Tare("run C8 --task " + In("task") + " --model " + In("mini"));
  EXPECT_EQ(later.status, 3);
  EXPECT_NE(later.out.find("prerequisite-open"), std::string::npos);
}

}  // namespace
}  // namespace tare
