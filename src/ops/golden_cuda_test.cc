// Every golden tile through the CUDA build: the device's matrix instruction and numerics::Sm90Step
// as nvcc compiles it, both against the recorded bits. (bf16's go through every linear kernel too:
// LinearCuda.CudaGoldenTilesThroughEveryKernel.) Skipped on a machine without a Hopper GPU.

#include <gtest/gtest.h>

#include <bit>

#include "base/env.h"
#include "ops/cuda/golden_steps.h"
#include "tensor/device_memory.h"
#include "tensor/safetensors.h"
#include "tensor/tensor.h"

namespace tare::ops {
namespace {

Tensor To(const Tensor& t, Device device) {
  auto copy = t.To(device);
  TARE_CHECK(copy.ok()) << copy.status().ToString();
  return *copy;
}

TEST(GoldenCuda, CudaStepsHaveTheRecordedBits) {
  if (!CudaDeviceReady()) GTEST_SKIP() << "no CUDA device of compute capability 9.0";
  int64_t compared = 0;
  for (const auto& [name, type] : {std::pair("bfloat16", numerics::MmaType::kBF16),
                                   {"float16", numerics::MmaType::kF16},
                                   {"float8_e4m3fn", numerics::MmaType::kE4M3},
                                   {"float8_e5m2", numerics::MmaType::kE5M2}}) {
    auto file = SafetensorsFile::Open(
        Env::Real(),
        fmt::format("{}/tests/data/golden/sm90_mma_{}.safetensors", TARE_SOURCE_DIR, name));
    ASSERT_TRUE(file.ok()) << file.status().ToString();
    for (const SafetensorsEntry& entry : file->entries()) {
      if (!entry.name.ends_with(".a")) continue;
      const std::string family = entry.name.substr(0, entry.name.size() - 2);
      const Tensor want = *file->Get(family + ".d_bits");
      const Tensor a = To(*file->Get(family + ".a"), Device::kCuda),
                   b = To(*file->Get(family + ".b"), Device::kCuda),
                   c = To(*file->Get(family + ".c_bits"), Device::kCuda);
      Tensor by_instruction = To(want, Device::kCuda), by_function = To(want, Device::kCuda);
      const Status s = cuda::LaunchGoldenSteps(type, want.dim(0), a.data(), b.data(),
                                               static_cast<const float*>(c.data()),
                                               static_cast<float*>(by_instruction.mutable_data()),
                                               static_cast<float*>(by_function.mutable_data()));
      ASSERT_TRUE(s.ok()) << s.ToString();
      const Tensor instruction = To(by_instruction, Device::kCpu),
                   function = To(by_function, Device::kCpu);
      int64_t wrong = 0;
      for (int64_t i = 0; i < want.elements(); ++i) {
        const int32_t bits = want.as<int32_t>()[i];
        wrong += instruction.as<int32_t>()[i] != bits;
        wrong += function.as<int32_t>()[i] != bits;
      }
      EXPECT_EQ(wrong, 0) << name << " " << family;
      compared += want.elements();
    }
  }
  std::printf("golden steps: %lld\n", static_cast<long long>(compared));
  EXPECT_EQ(compared, 221184);
}

}  // namespace
}  // namespace tare::ops
