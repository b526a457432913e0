// grouped_linear on a Hopper GPU beside what the generic device suite checks: its planted fault,
// the captured call, the native arm. Skipped on a machine without such a device.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>

#include "ops/cuda/cublas_peer.h"
#include "ops/cuda/graph_facts.h"
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

// Forward and both gradients of one routed batch with everything on the device, as a model calls
// them.
struct OnDevice {
  Routed r;
  Tensor x, w, dy, tokens, workspace, y, dx, dw;
  std::vector<TokenUnit> units;

  static Tensor Zeros(DType dtype, Shape shape) {
    auto t = Tensor::Allocate(dtype, std::move(shape), Device::kCuda);
    TARE_CHECK(t.ok()) << t.status().ToString();
    return *t;
  }
  OnDevice(Routed routed, int64_t token_count, BatchInvariance invariance) : r(std::move(routed)) {
    std::mt19937 rng(4);
    const linear::Params& l = r.p.linear;
    const auto rows = static_cast<int64_t>(r.plan.row_token.size());
    auto host = Tensor::Allocate(DType::kI32, {rows});
    TARE_CHECK(host.ok());
    std::copy(r.plan.row_token.begin(), r.plan.row_token.end(), host->mutable_as<int32_t>());
    tokens = To(*host, Device::kCuda);
    x = To(r.x, Device::kCuda), w = To(r.w, Device::kCuda);
    dy = To(Random({rows, l.n}, rng), Device::kCuda);
    y = Zeros(l.y_dtype, {rows, l.n}), dx = Zeros(l.dx_dtype, {rows, l.k});
    dw = Zeros(DType::kF32, {r.p.experts * l.n, l.k});
    units = {{0, token_count / 2}, {token_count / 2, token_count - token_count / 2}};
    Ctx ctx = MakeCtx(invariance, nullptr);
    const size_t bytes =
        std::max(WorkspaceBytes(ctx, r.p, rows), BackwardWorkspaceBytes(ctx, r.p, rows, 2));
    workspace = Zeros(DType::kU8, {static_cast<int64_t>(bytes) + 1});
  }
  Ctx MakeCtx(BatchInvariance invariance, cudaStream_t stream) {
    Ctx ctx{.profile = Profile::kSm90Mma, .batch_invariance = invariance, .device = Device::kCuda};
    ctx.stream = stream;
    if (workspace.data() != nullptr) {
      ctx.workspace = workspace.mutable_data();
      ctx.workspace_bytes = static_cast<size_t>(workspace.size_bytes());
    }
    return ctx;
  }
  Status Call(const Ctx& ctx) {
    const auto rows = static_cast<int64_t>(r.plan.row_token.size());
    const auto* of = static_cast<const int32_t*>(tokens.data());
    Args a;
    a.rows = rows, a.offsets = r.plan.offsets, a.x_rows = r.x.shape()[0], a.token_of = of;
    a.x = x.data(), a.w = w.data(), a.y = y.mutable_data();
    TARE_RETURN_IF_ERROR(Forward(ctx, r.p, a));
    BackwardArgs b;
    b.rows = rows, b.offsets = r.plan.offsets, b.x_rows = a.x_rows, b.token_of = of;
    b.host_token_of = r.plan.row_token.data(), b.dy = dy.data(), b.x = x.data(), b.w = w.data();
    b.units = units, b.dx = dx.mutable_data(), b.dw = static_cast<float*>(dw.mutable_data());
    return Backward(ctx, r.p, b);
  }
  void Clear() {
    for (Tensor* t : {&y, &dx, &dw})
      ASSERT_EQ(cudaMemset(t->mutable_data(), 0, static_cast<size_t>(t->size_bytes())),
                cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  std::vector<Tensor> Results() const {
    return {To(y, Device::kCpu), To(dx, Device::kCpu), To(dw, Device::kCpu)};
  }
};

// The operator itself, both arms: a captured call allocates nothing and gives the eager call's
// bits.
TEST_F(GroupedLinearCuda, CudaGraphReplayGivesTheEagerBits) {
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  for (const BatchInvariance arm : {BatchInvariance::kOn, BatchInvariance::kOff}) {
    if (arm == BatchInvariance::kOff && !cuda::NativePeer().ok()) continue;
    OnDevice call(MakeRouted(), kTokens, arm);
    const Ctx ctx = call.MakeCtx(arm, stream);
    call.Clear();
    ASSERT_TRUE(call.Call(ctx).ok());
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    const std::vector<Tensor> eager = call.Results();
    call.Clear();
    const auto launches = cuda::CaptureAndReplay(
        stream, [&] { return call.Call(ctx); }, 1);
    const std::vector<Tensor> replayed = call.Results();
    for (size_t i = 0; i < eager.size(); ++i)
      EXPECT_TRUE(Same(eager[i], replayed[i])) << "output " << i;
    for (const std::string& launch : launches) {
      if (arm == BatchInvariance::kOn) std::printf("launch grouped_linear: %s\n", launch.c_str());
    }
  }
  (void)cudaStreamDestroy(stream);
}

// With batch invariance off it is cuBLAS: grouped for few rows an expert, expert by expert for
// many, near the invariant arm's values and not its bits.
TEST_F(GroupedLinearCuda, CudaNativeArmIsNearAndNotTheSame) {
  if (const auto peer = cuda::NativePeer(); !peer.ok()) GTEST_SKIP() << peer.status().ToString();
  for (const int64_t tokens : {int64_t{60}, int64_t{1200}}) {
    std::mt19937 rng(8);
    Routed r;
    r.p.experts = 4;
    r.p.linear.n = 256, r.p.linear.k = 1024;
    r.p.linear.dx_dtype = DType::kF32;
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < tokens; ++t) {
      const auto first = static_cast<int32_t>(rng() % 3);  // expert 3 follows the third alone
      ids.push_back(first), ids.push_back(first + 1);
    }
    auto plan = dispatch::BuildPlan(tokens, 2, 4, ids.data());
    ASSERT_TRUE(plan.ok()) << plan.status().ToString();
    r.plan = *plan;
    r.x = Random({tokens, 1024}, rng), r.w = Random({4 * 256, 1024}, rng);
    std::vector<Tensor> results[2];
    std::vector<Launch> launches;
    for (const BatchInvariance arm : {BatchInvariance::kOn, BatchInvariance::kOff}) {
      OnDevice call(r, tokens, arm);
      LaunchTrace trace;
      Ctx ctx = call.MakeCtx(arm, nullptr);
      ctx.trace = &trace;
      const Status s = call.Call(ctx);
      ASSERT_TRUE(s.ok()) << s.ToString();
      results[arm == BatchInvariance::kOff] = call.Results();
      launches = trace.Take();
    }
    ASSERT_EQ(launches.size(), 3u);
    for (const Launch& l : launches)
      EXPECT_NE(l.kernel.find("cublas"), std::string::npos) << l.op << " " << l.kernel;
    bool differ = false;
    for (size_t i = 0; i < 3; ++i) {
      const Tensor &want = results[0][i], &got = results[1][i];
      differ = differ || !Same(want, got);
      double difference = 0, size = 0;
      for (int64_t j = 0; j < want.elements(); ++j) {
        const auto value = [&](const Tensor& t) {
          return t.dtype() == DType::kF32 ? t.as<float>()[j] : Bf16ToF32(t.as<uint16_t>()[j]);
        };
        const double a = value(want), b = value(got);
        difference += (a - b) * (a - b), size += a * a;
      }
      EXPECT_LT(std::sqrt(difference / size), want.dtype() == DType::kF32 ? 1e-4 : 4e-3)
          << "output " << i << " of " << tokens << " tokens";
      EXPECT_GT(size, 0.0);
    }
    EXPECT_TRUE(differ) << tokens << " tokens: the arms gave the same bits";
  }
}

}  // namespace
}  // namespace tare::ops::grouped_linear
