// linear on a Hopper GPU: the bits of the CPU, for every kernel, shape and row count.
//
// Every test is skipped on a machine without such a device.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>

#include "base/env.h"
#include "ops/cuda/cublas_peer.h"
#include "ops/cuda/sm90_oracle.h"
#include "ops/linear/linear.h"
#include "ops/linear/linear_cuda.h"
#include "ops/trace.h"
#include "tensor/convert.h"
#include "tensor/device_memory.h"
#include "tensor/safetensors.h"
#include "tensor/tensor.h"

namespace tare::ops::linear {
namespace {

class LinearCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!CudaDeviceReady()) GTEST_SKIP() << "no CUDA device of compute capability 9.0";
  }
};

// Bits drawn so that every class meets every other: mostly normal values, then zeros of both signs,
// subnormals, wide exponents, and with `specials` infinities and NaN.
void Fill(Tensor& t, std::mt19937& rng, bool specials, float scale = 1.0f) {
  std::normal_distribution<float> normal(0.0f, scale);
  for (int64_t i = 0; i < t.elements(); ++i) {
    float v = normal(rng);
    switch (rng() % (specials ? 300 : 64)) {
      case 0:
        v = 0.0f;
        break;
      case 1:
        v = -0.0f;
        break;
      case 2:
        v *= 1e-39f;
        break;
      case 3:
        v *= 4096.0f;
        break;
      case 64:
        v = specials ? INFINITY : v;
        break;
      case 65:
        v = specials ? -INFINITY : v;
        break;
      case 66:
        v = specials ? NAN : v;
        break;
      default:
        break;
    }
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    switch (t.dtype()) {
      case DType::kF32:
        std::memcpy(static_cast<char*>(t.mutable_data()) + 4 * i, &bits, 4);
        break;
      case DType::kBF16:
        t.mutable_as<uint16_t>()[i] = cuda::OracleRoundBf16(bits);
        break;
      default: {  // f16: by a wide-range shortcut, any bit pattern will do
        const auto h = static_cast<uint16_t>(rng());
        t.mutable_as<uint16_t>()[i] =
            (h & 0x7C00) == 0x7C00 && !specials ? static_cast<uint16_t>(h & 0x3FFF) : h;
      }
    }
  }
}

Tensor Make(DType dtype, Shape shape) {
  auto t = Tensor::Allocate(dtype, std::move(shape));
  EXPECT_TRUE(t.ok()) << t.status().ToString();
  return *std::move(t);
}

Tensor Random(DType dtype, Shape shape, std::mt19937& rng, bool specials = false,
              float scale = 1.0f) {
  Tensor t = Make(dtype, std::move(shape));
  Fill(t, rng, specials, scale);
  return t;
}

Tensor To(const Tensor& t, Device device) {
  auto copy = t.To(device);
  EXPECT_TRUE(copy.ok()) << copy.status().ToString();
  return *std::move(copy);
}

// The first differing element as text, empty when the bytes are equal.
std::string FirstDifference(const Tensor& a, const Tensor& b) {
  const auto size = static_cast<size_t>(SizeOf(a.dtype()));
  const auto* pa = static_cast<const uint8_t*>(a.data());
  const auto* pb = static_cast<const uint8_t*>(b.data());
  for (int64_t i = 0; i < a.elements(); ++i) {
    if (std::memcmp(pa + static_cast<size_t>(i) * size, pb + static_cast<size_t>(i) * size, size) ==
        0)
      continue;
    uint32_t va = 0, vb = 0;
    std::memcpy(&va, pa + static_cast<size_t>(i) * size, size);
    std::memcpy(&vb, pb + static_cast<size_t>(i) * size, size);
    return fmt::format("element {}: {:#x} against {:#x}", i, va, vb);
  }
  return "";
}

Ctx Context(ThreadPool& pool, Device device, Profile profile) {
  return {.pool = &pool, .profile = profile, .device = device};
}

struct Forwarded {
  Params params;
  int64_t m;
  Tensor x, w, bias;
};

Tensor RunForward(const Ctx& ctx, const Forwarded& f) {
  const Tensor x = To(f.x, ctx.device), w = To(f.w, ctx.device);
  Tensor bias;
  if (f.params.bias) bias = To(f.bias, ctx.device);
  // Guard bands of 64 elements around y, and a poison that no result equals by chance.
  Tensor host = Make(f.params.y_dtype, {f.m * f.params.n + 128});
  std::memset(host.mutable_data(), 0x5a, static_cast<size_t>(host.size_bytes()));
  Tensor y = ctx.device == Device::kCpu ? host : To(host, ctx.device);
  const int64_t element = SizeOf(f.params.y_dtype);
  const Args args{.m = f.m,
                  .x = x.data(),
                  .w = w.data(),
                  .bias = f.params.bias ? bias.data() : nullptr,
                  .y = static_cast<char*>(y.mutable_data()) + 64 * element};
  const Status status = Forward(ctx, f.params, args);
  EXPECT_TRUE(status.ok()) << status.ToString();
  Tensor back = To(y, Device::kCpu);
  const auto* bytes = static_cast<const uint8_t*>(back.data());
  for (int64_t i = 0; i < 64 * element; ++i) {
    EXPECT_EQ(bytes[i], 0x5a) << "guard before y";
    EXPECT_EQ(bytes[back.size_bytes() - 1 - i], 0x5a) << "guard after y";
  }
  return back;
}

// Shapes on and around every boundary of the tiles, and odd ones that only the generic kernel
// takes.
int64_t Dimension(std::mt19937& rng, int64_t limit, int64_t multiple) {
  static constexpr int64_t kEdges[] = {8, 16, 32, 48, 64, 96, 128, 192, 256, 384};
  int64_t v = rng() % 3 == 0
                  ? kEdges[rng() % std::size(kEdges)] + static_cast<int64_t>(rng() % 3) - 1
                  : static_cast<int64_t>(rng() % static_cast<uint64_t>(limit)) + 1;
  v = std::min(v, limit);
  return std::max<int64_t>(multiple, (v + multiple - 1) / multiple * multiple);
}

Forwarded RandomForward(std::mt19937& rng) {
  Forwarded f;
  Params& p = f.params;
  p.n = Dimension(rng, 400, rng() % 4 == 0 ? 1 : 8);
  p.k = Dimension(rng, 600, rng() % 4 == 0 ? 1 : 8);
  f.m = Dimension(rng, 300, 1);
  if (rng() % 8 == 0) p.x_dtype = p.w_dtype = DType::kF16;
  if (rng() % 8 == 0) p.x_dtype = DType::kF32;
  if (rng() % 3 == 0) p.y_dtype = DType::kF32;
  p.bias = rng() % 3 == 0;
  if (rng() % 3 == 0) {
    p.segments = 2 << rng() % 3;
    p.k = (p.k + 16 * p.segments - 1) / (16 * p.segments) * 16 * p.segments;
  }
  const bool specials = rng() % 6 == 0;
  f.x = Random(p.x_dtype, {f.m, p.k}, rng, specials);
  f.w = Random(p.w_dtype, {p.n, p.k}, rng, specials, 0.1f);
  f.bias = Random(p.bias_dtype, {p.n}, rng);
  return f;
}

void ForwardEqualsCpu(int cases, uint32_t seed) {
  ThreadPool pool(4);
  std::mt19937 rng(seed);
  int wgmma = 0;
  for (int i = 0; i < cases; ++i) {
    const Forwarded f = RandomForward(rng);
    for (Profile profile : {Profile::kSm90Mma, Profile::kIeeeF32}) {
      LaunchTrace trace;
      Ctx gpu_ctx = Context(pool, Device::kCuda, profile);
      gpu_ctx.trace = &trace;
      const Tensor gpu = RunForward(gpu_ctx, f);
      const Tensor cpu = RunForward(Context(pool, Device::kCpu, profile), f);
      const auto launches = trace.Take();
      ASSERT_EQ(launches.size(), 1u);
      wgmma += launches[0].kernel.find("wgmma") != std::string::npos;
      ASSERT_EQ(FirstDifference(gpu, cpu), "")
          << "case " << i << " " << ProfileName(profile) << " m=" << f.m << " n=" << f.params.n
          << " k=" << f.params.k << " S=" << f.params.segments << " " << launches[0].kernel << " "
          << launches[0].config;
    }
  }
  EXPECT_GT(wgmma, cases / 4) << "the Hopper kernels were hardly tried";
}

TEST_F(LinearCuda, CudaForwardHasTheBitsOfTheCpu) { ForwardEqualsCpu(120, 1); }
TEST_F(LinearCuda, CudaForwardHasTheBitsOfTheCpuSlow) { ForwardEqualsCpu(1000, 2); }

// The comparison above can fail: a fault planted on the CPU is seen.
TEST_F(LinearCuda, CudaComparisonSeesAPlantedFault) {
  ThreadPool pool(2);
  std::mt19937 rng(5);
  Forwarded f;
  f.params.n = 64;
  f.params.k = 256;
  f.m = 16;
  f.x = Random(DType::kBF16, {f.m, 256}, rng);
  f.w = Random(DType::kBF16, {64, 256}, rng);
  const Tensor gpu = RunForward(Context(pool, Device::kCuda, Profile::kSm90Mma), f);
  EXPECT_EQ(FirstDifference(gpu, RunForward(Context(pool, Device::kCpu, Profile::kSm90Mma), f)),
            "");
  fault::Scoped planted("linear.accumulate_bf16@both");
  Ctx cpu = Context(pool, Device::kCpu, Profile::kSm90Mma);
  cpu.side = fault::Side::kRollout;
  EXPECT_NE(FirstDifference(gpu, RunForward(cpu, f)), "");
}

// Every planted fault of the operator, on the device: the CPU without it sees it, and the device is
// clean again without it.
TEST_F(LinearCuda, CudaFaultsOnTheDeviceAreSeenFromTheCpu) {
  ThreadPool pool(2);
  struct Planted {
    const char* fault;
    int64_t m;
    DType x, y;
    bool bias;
  };
  const DType b = DType::kBF16, f32 = DType::kF32;
  for (const Planted& t : {Planted{"linear.accumulate_bf16", 3, b, f32, false},
                           Planted{"linear.reversed_k", 3, b, f32, false},
                           Planted{"linear.split_by_rows", 3, b, f32, false},
                           Planted{"linear.segments_by_rows", 20, b, f32, false},
                           Planted{"linear.bias_after_cast", 3, b, b, true},
                           Planted{"linear.split_fma", 3, f32, f32, false}}) {
    for (const Profile profile : {Profile::kSm90Mma, Profile::kIeeeF32}) {
      SCOPED_TRACE(fmt::format("{} {}", t.fault, ProfileName(profile)));
      std::mt19937 rng(5);
      Forwarded f;
      f.params.n = 40;
      f.params.k = 256;
      f.params.x_dtype = f.params.w_dtype = t.x;
      f.params.y_dtype = t.y;
      f.params.bias = t.bias;
      f.m = t.m;
      f.x = Random(t.x, {f.m, 256}, rng);
      f.w = Random(t.x, {40, 256}, rng);
      f.bias = Random(DType::kBF16, {40}, rng);
      Ctx cpu = Context(pool, Device::kCpu, profile);
      cpu.side = fault::Side::kTrainer;
      Ctx device = Context(pool, Device::kCuda, profile);
      device.side = fault::Side::kRollout;
      const Tensor want = RunForward(cpu, f);
      EXPECT_EQ(FirstDifference(want, RunForward(device, f)), "");
      {
        const fault::Scoped planted(std::string(t.fault) + "@rollout");
        EXPECT_EQ(FirstDifference(want, RunForward(cpu, f)), "");
        EXPECT_NE(FirstDifference(want, RunForward(device, f)), "") << "not seen";
      }
      EXPECT_EQ(FirstDifference(want, RunForward(device, f)), "") << "the fault stayed on";
    }
  }
  // dW without the last, partial group of a unit.
  std::mt19937 rng(6);
  Params p;
  p.n = p.k = 24;
  const Tensor dy = Random(b, {37, 24}, rng), x = Random(b, {37, 24}, rng);
  const TokenUnit unit = {0, 37};
  const auto run = [&](Device where, fault::Side side) {
    Ctx ctx = Context(pool, where, Profile::kSm90Mma);
    ctx.side = side;
    const Tensor d_dy = To(dy, where), d_x = To(x, where);
    Tensor dw = To(Make(f32, {24, 24}), where);
    const Status status = Backward(ctx, p,
                                   {.m = 37,
                                    .dy = d_dy.data(),
                                    .x = d_x.data(),
                                    .units = {&unit, 1},
                                    .dw = static_cast<float*>(dw.mutable_data())});
    EXPECT_TRUE(status.ok()) << status.ToString();
    return To(dw, Device::kCpu);
  };
  const Tensor want = run(Device::kCpu, fault::Side::kTrainer);
  EXPECT_EQ(FirstDifference(want, run(Device::kCuda, fault::Side::kRollout)), "");
  const fault::Scoped planted("linear.dw_without_partial_group@rollout");
  EXPECT_NE(FirstDifference(want, run(Device::kCuda, fault::Side::kRollout)), "");
}

void BackwardEqualsCpu(int cases, uint32_t seed) {
  ThreadPool pool(4);
  std::mt19937 rng(seed);
  for (int i = 0; i < cases; ++i) {
    Params p;
    p.n = Dimension(rng, 300, rng() % 4 == 0 ? 1 : 8);
    p.k = Dimension(rng, 400, rng() % 4 == 0 ? 1 : 8);
    const int64_t m = Dimension(rng, 300, 1);
    p.bias = true;
    p.bias_dtype = DType::kBF16;
    if (rng() % 4 == 0) p.dy_dtype = DType::kF32;
    if (rng() % 4 == 0) p.dx_dtype = DType::kF32;
    if (rng() % 8 == 0) p.backward_operand = DType::kF32;
    const int kind = static_cast<int>(rng() % 4);
    if (kind == 0) {  // fused parts, segment-major
      p.dx_segments = 2 << rng() % 3;
      const int64_t unit = p.dx_segments * (rng() % 2 == 0 ? 16 : 8);
      p.parts = {unit * (2 + static_cast<int64_t>(rng() % 3)), unit * 2, unit * 2};
      p.n = p.parts[0] + p.parts[1] + p.parts[2];
      if (p.n % (p.dx_segments * 16) != 0) p.parts[0] += unit, p.n += unit;
    } else if (kind == 1) {
      p.dx_vocabulary_leaves = true;
      p.dx_segments = 8;
    }
    if (!Check(p).ok()) continue;
    const Tensor dy = Random(p.dy_dtype, {m, p.n}, rng), x = Random(p.x_dtype, {m, p.k}, rng);
    const Tensor w = Random(p.w_dtype, {p.n, p.k}, rng, false, 0.1f);
    const Tensor dw = Random(DType::kF32, {p.n, p.k}, rng), dbias = Random(DType::kF32, {p.n}, rng);
    // Units that begin and end anywhere, with rows between that belong to none.
    std::vector<TokenUnit> units;
    for (int64_t begin = static_cast<int64_t>(rng() % 4); begin < m;) {
      const int64_t rows = std::min<int64_t>(m - begin, 1 + static_cast<int64_t>(rng() % 120));
      units.push_back({begin, rows});
      begin += rows + static_cast<int64_t>(rng() % 3 == 0 ? rng() % 20 : 0);
    }
    for (Profile profile : {Profile::kSm90Mma, Profile::kIeeeF32}) {
      Tensor out[2][3];
      for (Device device : {Device::kCpu, Device::kCuda}) {
        Ctx ctx = Context(pool, device, profile);
        const Tensor d_dy = To(dy, device), d_x = To(x, device), d_w = To(w, device);
        Tensor d_dx = To(Make(p.dx_dtype, {m, p.k}), device);
        Tensor d_dw = To(*dw.Clone(), device), d_dbias = To(*dbias.Clone(), device);
        Tensor workspace =
            Make(DType::kU8, {static_cast<int64_t>(BackwardWorkspaceBytes(ctx, p, m, 1)) + 1});
        workspace = To(workspace, device);
        ctx.workspace = workspace.mutable_data();
        ctx.workspace_bytes = static_cast<size_t>(workspace.size_bytes());
        const Status status = Backward(ctx, p,
                                       {.m = m,
                                        .dy = d_dy.data(),
                                        .x = d_x.data(),
                                        .w = d_w.data(),
                                        .units = units,
                                        .dx = d_dx.mutable_data(),
                                        .dw = static_cast<float*>(d_dw.mutable_data()),
                                        .dbias = static_cast<float*>(d_dbias.mutable_data())});
        ASSERT_TRUE(status.ok()) << status.ToString();
        const int at = device == Device::kCuda;
        out[at][0] = To(d_dx, Device::kCpu);
        out[at][1] = To(d_dw, Device::kCpu);
        out[at][2] = To(d_dbias, Device::kCpu);
      }
      const char* names[] = {"dx", "dw", "dbias"};
      for (int o = 0; o < 3; ++o) {
        ASSERT_EQ(FirstDifference(out[1][o], out[0][o]), "")
            << names[o] << " case " << i << " " << ProfileName(profile) << " m=" << m
            << " n=" << p.n << " k=" << p.k << " dx_segments=" << p.dx_segments << " kind=" << kind
            << " units=" << units.size();
      }
    }
  }
}

TEST_F(LinearCuda, CudaBackwardHasTheBitsOfTheCpu) { BackwardEqualsCpu(60, 3); }
TEST_F(LinearCuda, CudaBackwardHasTheBitsOfTheCpuSlow) { BackwardEqualsCpu(1000, 4); }

// A contraction of device tensors run by one schedule; y starts poisoned, or at zero for dW.
Tensor RunSchedule(const gpu::Contraction& problem, const gpu::Schedule& schedule, Status* status) {
  gpu::Contraction c = problem;
  Tensor y = To(Make(c.y_dtype, {c.m, c.n}), Device::kCuda);
  if (c.pass != gpu::Pass::kDw) {
    EXPECT_EQ(cudaMemset(y.mutable_data(), 0x5a, static_cast<size_t>(y.size_bytes())), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  c.y = y.mutable_data();
  c.y_stride = c.n;
  *status = gpu::Launch(c, schedule, nullptr, nullptr);
  return To(y, Device::kCpu);
}

int ConfigCount(gpu::Pass pass) {
  return static_cast<int>(pass == gpu::Pass::kForward ? std::size(gpu::kForwardConfigs)
                          : pass == gpu::Pass::kDx    ? std::size(gpu::kDxConfigs)
                                                      : std::size(gpu::kDwConfigs));
}

// Tile, ring, cluster, staging and order of tiles are schedule: every kernel gives one row's bits.
TEST_F(LinearCuda, CudaEveryScheduleGivesTheSameBits) {
  std::mt19937 rng(9);
  const int64_t shapes[][3] = {{1, 8, 16},       {3, 40, 64},      {64, 72, 48},
                               {65, 200, 136},   {130, 264, 1000}, {257, 520, 528},
                               {700, 1032, 320}, {1500, 2056, 64}};
  int compared = 0;
  for (const auto& s : shapes) {
    const Tensor a = To(Random(DType::kBF16, {s[0], std::max(s[1], s[2])}, rng), Device::kCuda);
    const Tensor b = To(Random(DType::kBF16, {std::max(s[0], s[1]), s[2]}, rng), Device::kCuda);
    for (gpu::Pass pass : {gpu::Pass::kForward, gpu::Pass::kDx, gpu::Pass::kDw}) {
      for (int chains : {1, 2, 4, 8}) {
        gpu::Contraction c;
        c.pass = pass;
        c.a = a.data();
        c.b = b.data();
        c.m = pass == gpu::Pass::kDw ? s[1] : s[0];
        c.n = pass == gpu::Pass::kForward ? s[1] : s[2];
        c.k = pass == gpu::Pass::kForward ? s[2] : pass == gpu::Pass::kDx ? s[1] : s[0];
        c.a_stride = pass == gpu::Pass::kForward ? s[2] : s[1];
        c.b_stride = s[2];
        if (pass == gpu::Pass::kDw) c.y_dtype = DType::kF32;
        if (pass != gpu::Pass::kDw && chains > 1 && c.k % (16 * chains) != 0) continue;
        for (int i = 0; i < chains; ++i) {
          const int begin = static_cast<int>(c.k * i / chains),
                    end = static_cast<int>(c.k * (i + 1) / chains);
          if (end > begin) c.runs.push_back({begin, end - begin});
        }
        ASSERT_TRUE(gpu::CanUseGemm(c));
        Status status;
        const Tensor reference = RunSchedule(c, {.pass = pass}, &status);
        ASSERT_TRUE(status.ok()) << status.ToString();
        for (int config = 0; config < ConfigCount(pass); ++config) {
          for (int group : {1, 8}) {
            const gpu::Schedule schedule{.pass = pass, .config = config, .group_m = group};
            if (pass != gpu::Pass::kDw && c.chains() > 1 << schedule.gemm().levels) continue;
            const Tensor got = RunSchedule(c, schedule, &status);
            ASSERT_TRUE(status.ok()) << status.ToString();
            ++compared;
            ASSERT_EQ(FirstDifference(got, reference), "")
                << schedule.Kernel() << " " << schedule.ToString() << " m=" << c.m << " n=" << c.n
                << " k=" << c.k << " chains=" << chains;
          }
        }
      }
    }
  }
  EXPECT_GT(compared, 500);
}

double Relative(const Tensor& want, const Tensor& got) {
  double difference = 0, size = 0;
  for (int64_t i = 0; i < want.elements(); ++i) {
    const auto value = [&](const Tensor& t) {
      return t.dtype() == DType::kF32 ? t.as<float>()[i] : Bf16ToF32(t.as<uint16_t>()[i]);
    };
    const double a = value(want), b = value(got);
    difference += (a - b) * (a - b), size += a * a;
  }
  return std::sqrt(difference / size);
}

// The switch proves something: with batch invariance off the three products are cuBLAS's, the same
// to a few roundings, and a row's bits change with its company; dW is one sum over all tokens.
// One shape with a long sum in the forward, one with a long sum in dx.
TEST_F(LinearCuda, CudaNativeArmsChangeBitsWithTheBatch) {
  if (const auto peer = cuda::NativePeer(); !peer.ok()) GTEST_SKIP() << peer.status().ToString();
  ThreadPool pool(2);
  constexpr int64_t kMost = 4608;
  const std::vector<TokenUnit> units = {{0, 4096}, {4096, 512}};
  struct Results {
    Tensor y, dx, dw;
    std::vector<std::string> kernels;
  };
  for (const bool long_dx : {false, true}) {
    std::mt19937 rng(12);
    Params p;
    p.n = long_dx ? 8192 : 1024, p.k = long_dx ? 1024 : 4096;
    p.y_dtype = p.dx_dtype = DType::kF32;
    const Tensor x = To(Random(DType::kBF16, {kMost, p.k}, rng), Device::kCuda);
    const Tensor dy = To(Random(DType::kBF16, {kMost, p.n}, rng), Device::kCuda);
    const Tensor w = To(Random(DType::kBF16, {p.n, p.k}, rng), Device::kCuda);
    const auto run = [&](BatchInvariance invariance, int64_t m) {
      LaunchTrace trace;
      Ctx ctx = Context(pool, Device::kCuda, Profile::kSm90Mma);
      ctx.batch_invariance = invariance, ctx.trace = &trace;
      Tensor y = To(Make(DType::kF32, {m, p.n}), Device::kCuda);
      Tensor dx = To(Make(DType::kF32, {m, p.k}), Device::kCuda);
      Tensor dw = To(Make(DType::kF32, {p.n, p.k}), Device::kCuda);
      const Args f{.m = m, .x = x.data(), .w = w.data(), .y = y.mutable_data()};
      BackwardArgs b{.m = m,
                     .dy = dy.data(),
                     .x = x.data(),
                     .w = w.data(),
                     .units = units,
                     .dx = dx.mutable_data(),
                     .dw = static_cast<float*>(dw.mutable_data())};
      if (m < kMost) b.dw = nullptr, b.units = {};
      Status s = Forward(ctx, p, f);
      if (s.ok()) s = Backward(ctx, p, b);
      EXPECT_TRUE(s.ok()) << s.ToString();
      Results r = {To(y, Device::kCpu), To(dx, Device::kCpu), To(dw, Device::kCpu), {}};
      for (const Launch& launch : trace.Take()) r.kernels.push_back(launch.kernel);
      return r;
    };
    using Kernels = std::vector<std::string>;
    const Results on = run(BatchInvariance::kOn, kMost), off = run(BatchInvariance::kOff, kMost);
    EXPECT_EQ(off.kernels,
              (Kernels{"linear_fwd_cublas", "linear_bwd_dx_cublas", "linear_bwd_dw_cublas"}));
    EXPECT_LT(Relative(on.y, off.y), 1e-4);
    EXPECT_LT(Relative(on.dx, off.dx), 1e-4);
    EXPECT_LT(Relative(on.dw, off.dw), 1e-4);
    EXPECT_NE(FirstDifference(on.dw, off.dw), "") << "one sum over both units gave the units' bits";
    bool moved = false;
    for (const int64_t m : {1, 7, 16, 64, 256}) {
      const Results few = run(BatchInvariance::kOff, m), same = run(BatchInvariance::kOn, m);
      EXPECT_EQ(FirstDifference(same.y, *on.y.Slice(0, m)), "") << m;
      EXPECT_EQ(FirstDifference(same.dx, *on.dx.Slice(0, m)), "") << m;
      moved = moved ||
              !FirstDifference(long_dx ? few.dx : few.y, *(long_dx ? off.dx : off.y).Slice(0, m))
                   .empty();
    }
    EXPECT_TRUE(moved) << "no row count moved a bit of the " << (long_dx ? "dx" : "forward");
  }
}

// C5: the bits of a row do not know how many rows there are, nor where it stands among them.
TEST_F(LinearCuda, CudaRowBitsDoNotDependOnRowCountOrPosition) {
  ThreadPool pool(2);
  std::mt19937 rng(11);
  Params p;
  p.n = 1536;
  p.k = 576;
  const int64_t most = 1100;
  const Tensor x = To(Random(DType::kBF16, {most, p.k}, rng), Device::kCuda);
  const Tensor w = To(Random(DType::kBF16, {p.n, p.k}, rng), Device::kCuda);
  const Ctx ctx = Context(pool, Device::kCuda, Profile::kSm90Mma);
  Tensor all = To(Make(DType::kBF16, {most, p.n}), Device::kCuda);
  ASSERT_TRUE(
      Forward(ctx, p, {.m = most, .x = x.data(), .w = w.data(), .y = all.mutable_data()}).ok());
  const Tensor all_host = To(all, Device::kCpu);
  for (int64_t rows : {1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000}) {
    for (int64_t first : {int64_t{0}, most - rows}) {
      Tensor y = To(Make(DType::kBF16, {rows, p.n}), Device::kCuda);
      ASSERT_TRUE(Forward(ctx, p,
                          {.m = rows,
                           .x = x.Slice(first, first + rows)->data(),
                           .w = w.data(),
                           .y = y.mutable_data()})
                      .ok());
      ASSERT_EQ(FirstDifference(To(y, Device::kCpu), *all_host.Slice(first, first + rows)), "")
          << rows << " rows";
    }
  }
}

// Two rows of 16 bf16 whose products add, in one step from +0, to exactly the f32 `bits`: three
// pieces of 8 bits, each times a power of two. False for a pattern that no products give.
bool BuildAccumulator(uint32_t bits, uint16_t* left, uint16_t* right) {
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const int raw = static_cast<int>(bits >> 23 & 0xFF);
  uint32_t mantissa = bits & 0x7FFFFF;
  if (raw == 255) {
    left[0] = static_cast<uint16_t>(mantissa != 0 ? 0x7FC0 : 0x7F80 | sign);
    right[0] = 0x3F80;
    return true;
  }
  if (raw == 0 && mantissa == 0) return true;  // a zero of either sign takes no part
  int exponent = raw == 0 ? -126 : raw - 127;  // of the bit 2^23 of the significand
  if (raw != 0) mantissa |= 0x800000;
  while ((mantissa & 0x800000) == 0) mantissa <<= 1, --exponent;
  for (int piece = 0; piece < 3; ++piece) {
    uint32_t byte = mantissa >> (16 - 8 * piece) & 0xFF;
    int e = exponent - 8 * piece;  // of the byte's bit 2^7
    if (byte == 0) continue;
    while ((byte & 0x80) == 0) byte <<= 1, --e;
    // 2^e as a product of two normal bf16 exponents.
    const int half = e / 2;
    left[piece] = static_cast<uint16_t>(sign | (half + 127) << 7 | (byte & 0x7F));
    right[piece] = static_cast<uint16_t>((e - half + 127) << 7);
  }
  return true;
}

// The recorded steps of the tensor core itself, through every forward kernel. A step with an
// incoming accumulator c becomes K = 32: the first group builds c exactly (three bf16 pieces of its
// 24 bits, times a power of two), the second is the recorded one. Only the diagonal of each product
// is a recorded step; the rest is other rows' data.
TEST_F(LinearCuda, CudaGoldenTilesThroughEveryKernel) {
  std::string path =
      std::string(TARE_SOURCE_DIR) + "/tests/data/golden/sm90_mma_bfloat16.safetensors";
  if (!std::ifstream(path).good()) path = "tests/data/golden/sm90_mma_bfloat16.safetensors";
  auto file = SafetensorsFile::Open(Env::Real(), path);
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  std::vector<uint16_t> x, w;
  std::vector<uint32_t> expected;
  int skipped = 0;
  for (const SafetensorsEntry& entry : file->entries()) {
    if (!entry.name.ends_with(".a")) continue;
    const std::string family = entry.name.substr(0, entry.name.size() - 2);
    const Tensor a = *file->Get(family + ".a"), b = *file->Get(family + ".b");
    const Tensor c = *file->Get(family + ".c_bits"), d = *file->Get(family + ".d_bits");
    for (int64_t t = 0; t < 12; ++t) {
      for (int64_t m = 0; m < 64; ++m) {
        for (int64_t n = 0; n < 8; ++n) {
          const auto c_bits = static_cast<uint32_t>(c.as<int32_t>()[(t * 64 + m) * 8 + n]);
          uint16_t left[16] = {}, right[16] = {};
          if (!BuildAccumulator(c_bits, left, right)) {
            ++skipped;
            continue;
          }
          const auto* pa = reinterpret_cast<const uint16_t*>(a.as<int16_t>()) + (t * 64 + m) * 16;
          const auto* pb = reinterpret_cast<const uint16_t*>(b.as<int16_t>()) + (t * 8 + n) * 16;
          x.insert(x.end(), left, left + 16);
          x.insert(x.end(), pa, pa + 16);
          w.insert(w.end(), right, right + 16);
          w.insert(w.end(), pb, pb + 16);
          expected.push_back(static_cast<uint32_t>(d.as<int32_t>()[(t * 64 + m) * 8 + n]));
        }
      }
    }
  }
  ASSERT_GT(expected.size(), 50000u);
  EXPECT_EQ(skipped, 0);
  const auto steps = static_cast<int64_t>(expected.size());
  constexpr int64_t kBatch = 1024;
  for (int config = -1; config < ConfigCount(gpu::Pass::kForward); ++config) {
    int64_t wrong = 0;
    for (int64_t first = 0; first < steps; first += kBatch) {
      const int64_t rows = std::min(kBatch, steps - first);
      Tensor tx = Make(DType::kBF16, {rows, 32}), tw = Make(DType::kBF16, {rows, 32});
      std::memcpy(tx.mutable_data(), &x[static_cast<size_t>(first * 32)],
                  static_cast<size_t>(rows) * 64);
      std::memcpy(tw.mutable_data(), &w[static_cast<size_t>(first * 32)],
                  static_cast<size_t>(rows) * 64);
      const Tensor dx = To(tx, Device::kCuda), dw = To(tw, Device::kCuda);
      gpu::Contraction c;
      c.m = c.n = rows;
      c.k = 32;
      c.a = dx.data();
      c.b = dw.data();
      c.a_stride = c.b_stride = 32;
      c.y_dtype = DType::kF32;
      c.runs = {{0, 32}};
      Status status;
      const Tensor y = RunSchedule(c, {.pass = gpu::Pass::kForward, .config = config}, &status);
      ASSERT_TRUE(status.ok()) << status.ToString();
      for (int64_t i = 0; i < rows; ++i) {
        uint32_t bits;
        std::memcpy(&bits, static_cast<const char*>(y.data()) + 4 * (i * rows + i), 4);
        wrong += bits != expected[static_cast<size_t>(first + i)];
      }
    }
    EXPECT_EQ(wrong, 0) << "config " << config << " of " << steps << " steps";
  }
  std::printf("golden steps per kernel: %lld\n", static_cast<long long>(steps));
}

// Captured once, replayed on new data: the graph gives the eager bits, and the call allocates
// nothing.
TEST_F(LinearCuda, CudaGraphReplayGivesTheEagerBits) {
  ThreadPool pool(2);
  std::mt19937 rng(13);
  Params p;
  p.n = 1024;
  p.k = 512;
  const int64_t m = 77;
  Tensor x = To(Random(DType::kBF16, {m, p.k}, rng), Device::kCuda);
  const Tensor w = To(Random(DType::kBF16, {p.n, p.k}, rng), Device::kCuda);
  Tensor y = To(Make(DType::kBF16, {m, p.n}), Device::kCuda);
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  Ctx ctx = Context(pool, Device::kCuda, Profile::kSm90Mma);
  ctx.stream = stream;
  const Args args{.m = m, .x = x.data(), .w = w.data(), .y = y.mutable_data()};
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  ASSERT_TRUE(Forward(ctx, p, args).ok());
  cudaGraph_t graph;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  cudaGraphExec_t exec;
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (int round = 0; round < 3; ++round) {
    const Tensor fresh = Random(DType::kBF16, {m, p.k}, rng);
    ASSERT_EQ(cudaMemcpy(x.mutable_data(), fresh.data(), static_cast<size_t>(x.size_bytes()),
                         cudaMemcpyHostToDevice),
              cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    const Tensor replayed = To(y, Device::kCpu);
    ASSERT_TRUE(Forward(ctx, p, args).ok());
    EXPECT_EQ(FirstDifference(replayed, To(y, Device::kCpu)), "");
  }
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

// What cannot run says why, and writes nothing.
TEST_F(LinearCuda, CudaRefusesByName) {
  ThreadPool pool(1);
  Params p;
  p.n = 64;
  p.k = 64;
  Ctx ctx = Context(pool, Device::kCuda, Profile::kSm90Mma);
  Tensor y = To(Make(DType::kBF16, {8, 64}), Device::kCuda);
  EXPECT_TRUE(Forward(ctx, p, {.m = 0}).ok());
  p.dy_dtype = DType::kF32;  // must be rounded first, into the workspace that is not there
  const Tensor dy = To(Make(DType::kF32, {8, 64}), Device::kCuda);
  const Tensor w = To(Make(DType::kBF16, {64, 64}), Device::kCuda);
  const Status status = Backward(
      ctx, p, {.m = 8, .dy = dy.data(), .w = w.data(), .units = {}, .dx = y.mutable_data()});
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("workspace"), std::string::npos) << status.ToString();
}

}  // namespace
}  // namespace tare::ops::linear
