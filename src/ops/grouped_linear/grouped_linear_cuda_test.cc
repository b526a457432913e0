// grouped_linear on a Hopper GPU beside what the generic device suite checks: its planted fault.
// Skipped on a machine without such a device.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "ops/dispatch/dispatch.h"
#include "ops/grouped_linear/grouped_linear.h"
#include "ops/trace.h"
#include "tensor/convert.h"
#include "tensor/device_memory.h"
#include "tensor/tensor.h"

namespace tare::ops::grouped_linear {
namespace {

class GroupedLinearCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!CudaDeviceReady()) GTEST_SKIP() << "no CUDA device of compute capability 9.0";
  }
};

constexpr int64_t kTokens = 40, kExperts = 6, kTopK = 2, kN = 48, kK = 160;

Tensor To(const Tensor& t, Device device) {
  auto copy = t.To(device);
  TARE_CHECK(copy.ok()) << copy.status().ToString();
  return *copy;
}
Tensor Random(Shape shape, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  auto t = Tensor::Allocate(DType::kBF16, std::move(shape));
  TARE_CHECK(t.ok());
  for (int64_t i = 0; i < t->elements(); ++i) t->mutable_as<uint16_t>()[i] = F32ToBf16(normal(rng));
  return *t;
}

struct Routed {
  Params p;
  Tensor x, w;
  dispatch::Plan plan;
};
Routed MakeRouted() {
  std::mt19937 rng(3);
  Routed r;
  r.p.experts = kExperts;
  r.p.linear.n = kN, r.p.linear.k = kK;
  r.p.linear.y_dtype = DType::kF32;
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < kTokens; ++t) {
    const auto first = static_cast<int32_t>(rng() % kExperts);
    ids.push_back(first), ids.push_back((first + 1) % kExperts);
  }
  auto plan = dispatch::BuildPlan(kTokens, kTopK, kExperts, ids.data());
  TARE_CHECK(plan.ok()) << plan.status().ToString();
  r.plan = *plan;
  r.x = Random({kTokens, kK}, rng);
  r.w = Random({kExperts * kN, kK}, rng);
  return r;
}

// y [R, n] of one call, on the CPU.
Tensor RoutedForward(const Routed& r, Ctx ctx, LaunchTrace* trace = nullptr) {
  ThreadPool pool(2);
  ctx.pool = &pool;
  ctx.trace = trace;
  const auto rows = static_cast<int64_t>(r.plan.row_token.size());
  auto tokens = Tensor::Allocate(DType::kI32, {rows});
  auto y = Tensor::Allocate(DType::kF32, {rows, kN});
  TARE_CHECK(tokens.ok() && y.ok());
  std::copy(r.plan.row_token.begin(), r.plan.row_token.end(), tokens->mutable_as<int32_t>());
  const Tensor x = To(r.x, ctx.device), w = To(r.w, ctx.device), of = To(*tokens, ctx.device);
  Tensor out = To(*y, ctx.device);
  const auto bytes = static_cast<int64_t>(WorkspaceBytes(ctx, r.p, rows));
  auto workspace = Tensor::Allocate(DType::kU8, {bytes + 1}, ctx.device);
  TARE_CHECK(workspace.ok());
  ctx.workspace = workspace->mutable_data(), ctx.workspace_bytes = static_cast<size_t>(bytes);
  Args a;
  a.rows = rows, a.offsets = r.plan.offsets, a.x_rows = kTokens;
  a.token_of = static_cast<const int32_t*>(of.data());
  a.x = x.data(), a.w = w.data(), a.y = out.mutable_data();
  const Status s = Forward(ctx, r.p, a);
  TARE_CHECK(s.ok()) << s.ToString();
  return To(out, Device::kCpu);
}

bool Same(const Tensor& a, const Tensor& b) {
  return std::memcmp(a.data(), b.data(), static_cast<size_t>(a.size_bytes())) == 0;
}

TEST_F(GroupedLinearCuda, CudaFaultOnTheDeviceIsSeenFromTheCpu) {
  const Routed r = MakeRouted();
  for (const Profile profile : {Profile::kSm90Mma, Profile::kIeeeF32}) {
    const Ctx cpu{.profile = profile};
    const Ctx device{.profile = profile, .device = Device::kCuda, .side = fault::Side::kRollout};
    const Tensor want = RoutedForward(r, cpu);
    EXPECT_TRUE(Same(RoutedForward(r, device), want));
    {
      const fault::Scoped planted("grouped_linear.split_by_total@rollout");
      EXPECT_FALSE(Same(RoutedForward(r, device), want)) << ProfileName(profile);
    }
    EXPECT_TRUE(Same(RoutedForward(r, device), want));
  }
}

}  // namespace
}  // namespace tare::ops::grouped_linear
