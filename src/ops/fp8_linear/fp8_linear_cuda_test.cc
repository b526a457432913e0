// fp8_linear on a Hopper GPU: the bits of the CPU for random shapes, segments and output dtypes;
// the Hopper kernel and the generic one. Skipped on a machine without such a device.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "ops/fp8_linear/fp8_gemm.h"
#include "ops/fp8_linear/fp8_linear.h"
#include "ops/trace.h"
#include "tensor/convert.h"
#include "tensor/device_memory.h"
#include "tensor/tensor.h"

namespace tare::ops::fp8_linear {
namespace {

class Fp8LinearCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!CudaDeviceReady()) GTEST_SKIP() << "no CUDA device of compute capability 9.0";
  }
};

Tensor Make(DType dtype, Shape shape, Device device = Device::kCpu) {
  auto t = Tensor::Allocate(dtype, std::move(shape), device);
  TARE_CHECK(t.ok()) << t.status().ToString();
  return *t;
}
Tensor To(const Tensor& t, Device device) {
  auto copy = t.To(device);
  TARE_CHECK(copy.ok()) << copy.status().ToString();
  return *copy;
}

struct Outcome {
  std::string difference, kernel;
};

std::string FirstDifference(const Tensor& want, const Tensor& got, int64_t n) {
  const auto size = static_cast<size_t>(SizeOf(want.dtype()));
  const auto *a = static_cast<const uint8_t*>(want.data()),
             *b = static_cast<const uint8_t*>(got.data());
  for (int64_t i = 0; i < want.elements(); ++i) {
    const size_t at = static_cast<size_t>(i) * size;
    if (std::memcmp(a + at, b + at, size) == 0) continue;
    uint32_t x = 0, y = 0;
    std::memcpy(&x, a + at, size);
    std::memcpy(&y, b + at, size);
    return fmt::format("[{}, {}]: CPU {:#x}, CUDA {:#x}", i / n, i % n, x, y);
  }
  return "";
}

// One shape on both; codes of every kind, NaN codes when `specials`. Where the Hopper kernel runs,
// each of its tiles does, whichever the call would have picked.
Outcome RunBoth(int64_t m, int64_t n, int64_t k, int32_t segments, DType y_dtype, bool bias,
                Profile profile, bool specials, uint32_t seed, const char* fault = "") {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  const int64_t blocks = (k + kBlock - 1) / kBlock;
  Tensor x = Make(DType::kE4M3, {m, k}), w = Make(DType::kE4M3, {n, k});
  for (Tensor* t : {&x, &w}) {
    for (int64_t i = 0; i < t->elements(); ++i) {
      uint8_t code = F32ToE4m3(std::ldexp(normal(rng), static_cast<int>(rng() % 12) - 3));
      if (rng() % 40 == 0) code = static_cast<uint8_t>(rng() % 2 * 0x80);
      if (specials && rng() % 2000 == 0) code = 0x7f;
      t->mutable_as<uint8_t>()[i] = code;
    }
  }
  Tensor xs = Make(DType::kF32, {m, blocks}), ws = Make(DType::kF32, {(n + 127) / 128, blocks});
  for (Tensor* t : {&xs, &ws}) {
    for (int64_t i = 0; i < t->elements(); ++i)
      t->mutable_as<float>()[i] = std::fabs(normal(rng)) * 0.01f + 1e-4f;
  }
  Tensor b = Make(DType::kBF16, {n});
  for (int64_t i = 0; i < n; ++i) b.mutable_as<uint16_t>()[i] = F32ToBf16(normal(rng));
  Params p;
  p.n = n, p.k = k, p.segments = segments, p.y_dtype = y_dtype, p.bias = bias;
  const auto args = [&](Device device, Tensor& y, std::vector<Tensor>& keep) {
    keep = {To(x, device), To(xs, device), To(w, device), To(ws, device), To(b, device)};
    Args a;
    a.m = m;
    a.x = keep[0].data();
    a.x_scale = static_cast<const float*>(keep[1].data());
    a.w = keep[2].data();
    a.w_scale = static_cast<const float*>(keep[3].data());
    if (bias) a.bias = keep[4].data();
    a.y = y.mutable_data();
    return a;
  };
  ThreadPool pool(2);
  LaunchTrace trace;
  Ctx cpu;
  cpu.pool = &pool, cpu.profile = profile, cpu.side = fault::Side::kTrainer;
  Ctx there_ctx = cpu;
  there_ctx.device = Device::kCuda, there_ctx.trace = &trace;
  there_ctx.side = fault::Side::kRollout;
  const fault::Scoped planted(fault[0] == '\0' ? "" : fmt::format("{}@rollout", fault));
  Tensor y = Make(y_dtype, {m, n}), there = Make(y_dtype, {m, n}, Device::kCuda);
  std::vector<Tensor> keep, keep_there;
  const Args on_cpu = args(Device::kCpu, y, keep);
  const Args on_gpu = args(Device::kCuda, there, keep_there);
  Tensor workspace = Make(
      DType::kU8, {std::max<int64_t>(256, static_cast<int64_t>(WorkspaceBytes(there_ctx, p, m)))},
      Device::kCuda);
  there_ctx.workspace = workspace.mutable_data();
  there_ctx.workspace_bytes = static_cast<size_t>(workspace.size_bytes());
  Status s = Forward(cpu, p, on_cpu);
  if (s.ok()) s = Forward(there_ctx, p, on_gpu);
  if (!s.ok()) return {s.ToString(), ""};
  const auto launches = trace.Take();
  const std::string kernel = launches.empty() ? "" : launches.back().kernel;
  const std::string difference = FirstDifference(y, To(there, Device::kCpu), n);
  if (!difference.empty() || segments > 1 || kernel.find("wgmma") == std::string::npos)
    return {difference, kernel};
  for (const int groups : {2, 3}) {
    Tensor again = Make(y_dtype, {m, n}, Device::kCuda);
    std::vector<Tensor> keep_again;
    gpu::Problem problem;
    problem.params = p;
    problem.args = args(Device::kCuda, again, keep_again);
    problem.last = blocks;
    std::string config;
    s = gpu::Launch(problem, nullptr, &config, groups);
    if (!s.ok()) return {s.ToString(), config};
    const std::string d = FirstDifference(y, To(again, Device::kCpu), n);
    if (!d.empty()) return {d, config};
  }
  return {"", kernel};
}

TEST_F(Fp8LinearCuda, AThousandRandomShapesGiveTheCpusBits) {
  std::mt19937 rng(5);
  int hopper = 0;
  for (uint32_t i = 0; i < 1000; ++i) {
    const auto near = [&](std::initializer_list<int64_t> at, int64_t most) {
      const int64_t v =
          rng() % 2 == 0 ? *(at.begin() + rng() % at.size()) + static_cast<int64_t>(rng() % 3) - 1
                         : 1 + static_cast<int64_t>(rng() % static_cast<uint32_t>(most));
      return std::clamp<int64_t>(v, 1, most);
    };
    const int64_t m = near({1, 8, 64, 128, 192, 256}, 420), n = near({8, 64, 128, 256}, 300);
    int64_t k = near({16, 32, 128, 256, 384}, 600);
    int32_t segments = 1;
    if (rng() % 5 == 0) {
      segments = 2 << (rng() % 3);
      k = 128 * segments * (1 + static_cast<int64_t>(rng() % 2));
    } else if (rng() % 3 != 0) {
      k = std::max<int64_t>(16, k / 16 * 16);
    }
    const DType y = rng() % 3 == 0 ? DType::kF32 : rng() % 3 == 0 ? DType::kF16 : DType::kBF16;
    const Profile profile = rng() % 8 == 0 ? Profile::kIeeeF32 : Profile::kSm90Mma;
    const Outcome o =
        RunBoth(m, n, k, segments, y, rng() % 2 == 0, profile, rng() % 16 == 0, 100 + i);
    ASSERT_EQ(o.difference, "") << "shape " << i << ": m " << m << " n " << n << " k " << k
                                << " segments " << segments << " " << DTypeName(y) << " "
                                << ProfileName(profile) << " by " << o.kernel;
    hopper += o.kernel.find("wgmma") != std::string::npos ? 1 : 0;
  }
  EXPECT_GT(hopper, 500) << "the Hopper kernel hardly ran";
}

// The operator's planted faults on the device are seen from the CPU, in both profiles.
TEST_F(Fp8LinearCuda, CudaFaultsOnTheDeviceAreSeenFromTheCpu) {
  for (const Profile profile : {Profile::kSm90Mma, Profile::kIeeeF32}) {
    for (const char* fault : {"fp8_linear.one_chain", "fp8_linear.scales_in_turn"}) {
      for (const char* planted : {"", fault, ""}) {
        const Outcome o = RunBoth(20, 72, 384, 1, DType::kF32, true, profile, false, 9, planted);
        EXPECT_EQ(o.difference.empty(), planted[0] == '\0')
            << fault << " " << ProfileName(profile) << ": " << o.difference;
      }
    }
  }
}

}  // namespace
}  // namespace tare::ops::fp8_linear
