// The audit of a device over ragged batches of MINI: q/k norm, windows, sinks and mixture of
// experts, runs with rows of padding between them. SmolLM2 and a Qwen3 layer are `tare audit`'s.
// Skipped on a machine without a Hopper GPU.

#include <gtest/gtest.h>

#include "base/fault.h"
#include "models/audit.h"
#include "models/mini.h"
#include "numerics/philox.h"
#include "tensor/device_memory.h"

namespace tare::models {
namespace {

Result<AuditReport> AuditMini(ThreadPool* pool, Profile profile) {
  const ModelConfig config = MiniConfig();
  std::vector<std::vector<int32_t>> sequences;
  for (const int64_t length : {100, 37, 2, 64}) {
    sequences.emplace_back();
    for (int64_t i = 0; i < length; ++i) {
      const auto word =
          numerics::RandomAt(3, static_cast<uint32_t>(i), numerics::RandomPurpose::kTest,
                             static_cast<uint32_t>(sequences.size()));
      sequences.back().push_back(
          static_cast<int32_t>(word.Low64() % static_cast<uint64_t>(config.vocab)));
    }
  }
  return Audit(pool, [pool](const ModelOptions& options) { return MiniModel(pool, options); },
               sequences, {.profile = profile});
}

TEST(AuditCuda, CudaRaggedMiniHasTheBitsOfTheCpu) {
  if (!CudaDeviceReady()) GTEST_SKIP() << "no CUDA device of compute capability 9.0";
  ThreadPool pool(8);
  for (const Profile profile : {Profile::kSm90Mma, Profile::kIeeeF32}) {
    const auto report = AuditMini(&pool, profile);
    ASSERT_TRUE(report.ok()) << report.status().ToString();
    EXPECT_GT(report->forward.tensors, 20);
    EXPECT_GT(report->gradients.tensors, 20);
    for (const AuditDifference& d : report->differences) {
      ADD_FAILURE() << ProfileName(profile) << ": " << d.name << " out of " << d.op << ", "
                    << d.differing << " elements differ";
    }
  }
  // A fault on the device is found, and at its operator first.
  const fault::Scoped planted("attention.window_off_by_one@rollout");
  const auto faulty = AuditMini(&pool, Profile::kSm90Mma);
  ASSERT_TRUE(faulty.ok()) << faulty.status().ToString();
  ASSERT_FALSE(faulty->agrees());
  EXPECT_EQ(faulty->differences.front().op, "attention");
}

}  // namespace
}  // namespace tare::models
