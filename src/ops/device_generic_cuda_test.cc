// The generic suite on a device: one driver for every registered operator that has a CUDA part.
// What the device computes is compared byte by byte with what the CPU computes from the same
// operands. Meets OPS rows CHEAP-03 (boundaries) and CHEAP-06 (repeat) for the CUDA kernels.
//
// Every test is skipped on a machine without such a device.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <set>

#include "ops/cuda/fresh_process.h"
#include "ops/cuda/graph_facts.h"
#include "ops/cuda/refusal.h"
#include "ops/fault_cases.h"
#include "ops/grad_norm/grad_norm.h"
#include "tensor/device_memory.h"

namespace tare::ops {
namespace {

constexpr int64_t kWorkspaceBytes = int64_t{64} << 20;
// Operands that a registry entry reads on the host, to make arguments of them: a call that is
// captured is given them there, because a copy back would have to wait.
struct OnHostToo {
  std::set<size_t> in, dout;
};
OnHostToo ReadOnHost(const std::string& op) {
  if (op == "sampling") return {{3, 4, 5}, {}};
  if (op == "policy_loss") return {{6}, {1}};
  if (op == "cross_entropy") return {{}, {1}};
  return {};
}
// Their entries make plans or results on the host: their own tests capture the operator itself
// (grouped_linear_cuda_test.cc and GradNormCuda below).
const std::set<std::string> kCapturedElsewhere = {"grad_norm", "grouped_linear"};

std::vector<std::string> DeviceOps() {
  std::vector<std::string> names;
  for (const OpInfo* op : AllOps()) {
    if (std::find(op->devices.begin(), op->devices.end(), Device::kCuda) != op->devices.end())
      names.push_back(op->name);
  }
  return names;
}

Tensor To(const Tensor& t, Device device) {
  if (t.data() == nullptr) return t;
  auto copy = t.To(device);
  TARE_CHECK(copy.ok()) << copy.status().ToString();
  return *copy;
}

Tensor Workspace() {
  static Tensor* const workspace = [] {
    auto t = Tensor::Allocate(DType::kU8, {kWorkspaceBytes}, Device::kCuda);
    TARE_CHECK(t.ok()) << t.status().ToString();
    return new Tensor(*t);
  }();
  return *workspace;
}

// A case's operands on the device, and its calls there.
struct OnCuda {
  const Case& host;
  cudaStream_t stream = nullptr;
  fault::Side side = fault::Side::kNone;
  std::vector<Tensor> in, out, dout, din;

  explicit OnCuda(const Case& c, cudaStream_t stream = nullptr) : host(c), stream(stream) {
    for (const Tensor& t : c.in) in.push_back(To(t, Device::kCuda));
    for (const Tensor& t : c.dout) dout.push_back(To(t, Device::kCuda));
  }
  Ctx MakeCtx() const {
    Ctx ctx;
    ctx.profile = host.key.profile;
    ctx.device = Device::kCuda;
    ctx.side = side;
    ctx.stream = stream;
    Tensor workspace = Workspace();
    ctx.workspace = workspace.mutable_data();
    ctx.workspace_bytes = kWorkspaceBytes;
    return ctx;
  }
  void NewOutputs() {
    out.clear();
    for (const Operand& o : host.sig.outputs) {
      Tensor t = GuardedTensor(o.dtype, o.shape);
      if (o.role == Role::kRows && t.size_bytes() > 0)
        std::memset(t.mutable_data(), 0x5b, static_cast<size_t>(t.size_bytes()));
      out.push_back(To(t, Device::kCuda));
    }
  }
  void NewGradients() {
    Case gradients = host;
    gradients.NewGradients();
    din.clear();
    for (const Tensor& t : gradients.din) din.push_back(To(t, Device::kCuda));
  }
  Status CallForward() {
    return host.op->forward(MakeCtx(), host.key, ForwardCall{host.rows, in, out});
  }
  Status CallBackward() {
    return host.op->backward(MakeCtx(), host.key,
                             BackwardCall{host.rows, in, out, dout, din, host.units});
  }
  Status Forward() {
    NewOutputs();
    TARE_RETURN_IF_ERROR(CallForward());
    return cuda::TakeRefusal(stream);
  }
  Status Backward() {
    NewGradients();
    TARE_RETURN_IF_ERROR(CallBackward());
    return cuda::TakeRefusal(stream);
  }
};

// The first difference as text, or "".
std::string Difference(const std::string& name, const Tensor& want, const Tensor& got) {
  if (want.data() == nullptr || want.size_bytes() == 0) return "";
  const Tensor there = To(got, Device::kCpu);
  const int64_t size = SizeOf(want.dtype());
  for (int64_t i = 0; i < want.elements(); ++i) {
    const auto* a = static_cast<const uint8_t*>(want.data()) + i * size;
    const auto* b = static_cast<const uint8_t*>(there.data()) + i * size;
    if (std::memcmp(a, b, static_cast<size_t>(size)) == 0) continue;
    uint64_t bits_a = 0, bits_b = 0;
    std::memcpy(&bits_a, a, static_cast<size_t>(size));
    std::memcpy(&bits_b, b, static_cast<size_t>(size));
    return fmt::format("{} {} element {}: CPU {:#x} ({}), CUDA {:#x} ({})", name,
                       ShapeToString(want.shape()), i, bits_a, Get(want, i), bits_b, Get(there, i));
  }
  return "";
}
std::string Differences(const Case& want, const OnCuda& got, bool backward) {
  for (size_t i = 0; i < want.out.size(); ++i) {
    const std::string d = Difference(want.sig.outputs[i].name, want.out[i], got.out[i]);
    if (!d.empty()) return d;
  }
  for (size_t i = 0; backward && i < want.din.size(); ++i) {
    if (!want.sig.inputs[i].grad) continue;
    const std::string d =
        Difference("gradient of " + want.sig.inputs[i].name, want.din[i], got.din[i]);
    if (!d.empty()) return d;
  }
  return "";
}

// The whole of one case on both; "" when all bits agree.
std::string RunBoth(Case& c, cudaStream_t stream = nullptr) {
  c.Forward();
  OnCuda there(c, stream);
  if (const Status s = there.Forward(); !s.ok()) return "forward: " + s.ToString();
  const bool backward = c.op->backward != nullptr;
  if (backward) {
    const std::string forward = Differences(c, there, false);
    if (!forward.empty()) return forward;
    c.Backward();
    if (const Status s = there.Backward(); !s.ok()) return "backward: " + s.ToString();
  }
  return Differences(c, there, backward);
}

class DeviceGenericCuda : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!CudaDeviceReady()) GTEST_SKIP() << "no CUDA device of compute capability 9.0";
    op_ = FindOp(GetParam());
    ASSERT_NE(op_, nullptr);
  }
  const OpInfo* op_ = nullptr;
};

TEST_P(DeviceGenericCuda, EveryKeyGivesTheCpusBits) {
  for (const OpKey& key : op_->keys) {
    for (int64_t rows : {int64_t{1}, int64_t{2}, kRows, int64_t{131}}) {
      Case c(op_, key, rows, 7);
      EXPECT_EQ(RunBoth(c), "") << key.ToString() << " rows " << rows;
    }
  }
}

// Rows and widths near the boundaries that the kernels cut at (a warp's lanes, four elements, 128
// and 1,024 element chunks, token lanes, units), others in between.
int64_t NearBoundary(Random& random, int64_t most) {
  static constexpr int64_t kAt[] = {1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048};
  int64_t value;
  if (random.Next() % 2 == 0) {
    value = kAt[random.Next() % std::size(kAt)] + static_cast<int64_t>(random.Next() % 5) - 2;
  } else {
    value = 1 + static_cast<int64_t>(random.Next() % static_cast<uint64_t>(most));
  }
  return std::clamp<int64_t>(value, 1, most);
}

TEST_P(DeviceGenericCuda, AThousandRandomShapesGiveTheCpusBitsSlow) {
  Random random(0x7a5e);
  for (int i = 0; i < 1000; ++i) {
    OpKey key = op_->keys[random.Next() % op_->keys.size()];
    int64_t width = 64;
    for (auto& [name, value] : key.dims) {
      if (name != op_->width_dim) continue;
      width = NearBoundary(random, 2200);
      value = RoundUp(width, op_->width_step);
      width = value;
    }
    const int64_t rows =
        NearBoundary(random, std::max<int64_t>(3, std::min<int64_t>(300, 40000 / width)));
    Case c(op_, key, rows, 1000 + static_cast<uint64_t>(i) * 16);
    // Units of any length, with padding rows between some.
    c.units.clear();
    for (int64_t at = 0; at < rows;) {
      at += static_cast<int64_t>(random.Next() % 4 == 0 ? random.Next() % 3 : 0);
      if (at >= rows) break;
      const int64_t n = std::min(rows - at, NearBoundary(random, rows));
      c.units.push_back({at, n});
      at += n;
    }
    const std::string difference = RunBoth(c);
    ASSERT_EQ(difference, "") << "shape " << i << ": " << key.ToString() << " rows " << rows;
  }
}

TEST_P(DeviceGenericCuda, AloneInManyAndTurnedGivesTheSameRows) {
  if (!op_->rows_independent) GTEST_SKIP() << "rows of " << op_->name << " read each other";
  for (const OpKey& key : op_->keys) {
    Case whole(op_, key, kRows, 3);
    whole.Forward();
    std::vector<std::vector<int64_t>> subsets = {
        {0}, {kRows / 2}, {kRows - 1}, Range(0, 16), Range(16, kRows)};
    subsets.emplace_back();
    for (int64_t i = 0; i < kRows; ++i) subsets.back().push_back((i * 5 + 3) % kRows);
    for (const std::vector<int64_t>& rows : subsets) {
      const Case part = whole.Rows(rows);
      OnCuda there(part);
      ASSERT_TRUE(there.Forward().ok());
      for (size_t i = 0; i < whole.out.size(); ++i) {
        const Operand& o = whole.sig.outputs[i];
        if (o.role != Role::kRows) continue;
        EXPECT_EQ(Difference(o.name, TakeRows(o, whole.out[i], rows), there.out[i]), "")
            << key.ToString();
      }
    }
  }
}

TEST_P(DeviceGenericCuda, RepeatsStreamsAndGraphsGiveTheSameBits) {
  cudaStream_t streams[2];
  for (cudaStream_t& s : streams)
    ASSERT_EQ(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), cudaSuccess);
  for (const OpKey& key : op_->keys) {
    Case c(op_, key, 131, 11);
    c.Forward();
    const bool backward = op_->backward != nullptr;
    if (backward) c.Backward();
    // Three times in a row, on both streams at once.
    OnCuda one(c, streams[0]), two(c, streams[1]);
    // Backward in turn: the two share a workspace.
    for (int i = 0; i < 3; ++i) {
      one.NewOutputs(), two.NewOutputs();
      ASSERT_TRUE(one.CallForward().ok());
      ASSERT_TRUE(two.CallForward().ok());
      ASSERT_TRUE(cuda::TakeRefusal(streams[0]).ok());
      ASSERT_TRUE(cuda::TakeRefusal(streams[1]).ok());
      if (backward) {
        ASSERT_TRUE(one.Backward().ok());
        ASSERT_TRUE(two.Backward().ok());
      }
      EXPECT_EQ(Differences(c, one, backward), "") << key.ToString();
      EXPECT_EQ(Differences(c, two, backward), "") << key.ToString();
    }
    if (kCapturedElsewhere.contains(op_->name)) continue;
    // Captured once and replayed into poisoned outputs.
    OnCuda replayed(c, streams[0]);
    const OnHostToo host = ReadOnHost(op_->name);
    for (const size_t i : host.in) replayed.in[i] = c.in[i];
    for (const size_t i : host.dout) replayed.dout[i] = c.dout[i];
    replayed.NewOutputs();
    if (backward) replayed.NewGradients();
    const auto launches = cuda::CaptureAndReplay(
        streams[0],
        [&]() -> Status {
          TARE_RETURN_IF_ERROR(replayed.CallForward());
          return backward ? replayed.CallBackward() : Ok();
        },
        1);
    ASSERT_TRUE(cuda::TakeRefusal(streams[0]).ok());
    EXPECT_EQ(Differences(c, replayed, backward), "") << "graph, " << key.ToString();
    if (&key == &op_->keys.front()) {
      for (const std::string& launch : launches)
        std::printf("launch %s: %s\n", op_->name.c_str(), launch.c_str());
    }
  }
  for (cudaStream_t s : streams) (void)cudaStreamDestroy(s);
}

// A value that the CPU refuses, the device refuses with the same row, and the next call is clean.
TEST_P(DeviceGenericCuda, WhatTheCpuRefusesTheDeviceRefusesByTheSameRow) {
  int refused = 0;
  for (const OpKey& key : op_->keys) {
    Case good(op_, key, kRows, 5);
    for (size_t input = 0; input < good.in.size(); ++input) {
      const Operand& o = good.sig.inputs[input];
      if (o.role != Role::kRows) continue;
      Case bad = good.Rows(Range(0, kRows));
      bad.units = good.units;
      const int64_t width = bad.in[input].elements() / kRows, victim = 17;
      Put(bad.in[input], victim * width, IsFloat(o.dtype) ? std::nan("") : 1e9);
      if (o.dtype == DType::kU8) Put(bad.in[input], victim * width, 9);
      const Status on_cpu = bad.TryForward();
      OnCuda there(bad);
      const Status on_cuda = there.Forward();
      if (on_cpu.ok()) {
        EXPECT_TRUE(on_cuda.ok()) << o.name << ": " << on_cuda.ToString();
        EXPECT_EQ(Differences(bad, there, false), "") << o.name;
        continue;
      }
      ++refused;
      EXPECT_FALSE(on_cuda.ok()) << o.name << " " << key.ToString() << ": " << on_cpu.ToString();
      EXPECT_NE(on_cuda.message().find("17"), std::string::npos)
          << on_cuda.ToString() << " against " << on_cpu.ToString();
    }
    OnCuda clean(good);
    const Status status = clean.Forward();
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  RecordProperty("refused", refused);
}

TEST_P(DeviceGenericCuda, AFaultPlantedOnTheDeviceIsSeenFromTheCpu) {
  int planted = 0;
  for (const FaultCase& f : FaultCases()) {
    if (op_->name != f.op) continue;
    SCOPED_TRACE(f.fault);
    const OpKey& key = KeyOf(*op_, f);
    Case c(op_, key, kRows, 3);
    c.side = fault::Side::kTrainer;
    if (f.prepare) f.prepare(c);
    c.Forward();
    if (f.backward) c.Backward();
    const std::string spec = std::string(f.fault) + "@rollout";
    for (const bool active : {false, true}) {
      const fault::Scoped scoped(active ? spec : "");
      OnCuda there(c);
      there.side = fault::Side::kRollout;
      ASSERT_TRUE(there.Forward().ok());
      if (f.backward) {
        ASSERT_TRUE(there.Backward().ok());
      }
      const std::vector<Operand>& operands = f.backward ? c.sig.inputs : c.sig.outputs;
      for (size_t i = 0; i < operands.size(); ++i) {
        if (operands[i].name != f.operand) continue;
        const std::string d = f.backward ? Difference(f.operand, c.din[i], there.din[i])
                                         : Difference(f.operand, c.out[i], there.out[i]);
        if (active) {
          EXPECT_NE(d, "") << "the CPU does not see it";
        } else {
          EXPECT_EQ(d, "") << "differs without the fault";
        }
      }
    }
    ++planted;
  }
  if (planted == 0) GTEST_SKIP() << op_->name << " has no row-operator fault";
}

// Every key of every operator with a CUDA part, forward and backward, in this process and in three
// that are started for it.
TEST(FreshProcessCuda, EveryOperatorGivesTheSameBits) {
  if (!CudaDeviceReady()) GTEST_SKIP() << "no CUDA device of compute capability 9.0";
  cuda::Digest digest;
  for (const std::string& name : DeviceOps()) {
    const OpInfo* op = FindOp(name);
    for (const OpKey& key : op->keys) {
      Case c(op, key, 131, 17);
      c.Forward();  // what the backward starts from
      OnCuda there(c);
      ASSERT_TRUE(there.Forward().ok()) << key.ToString();
      for (const Tensor& t : there.out) digest.Add(To(t, Device::kCpu));
      if (op->backward == nullptr) continue;
      ASSERT_TRUE(there.Backward().ok()) << key.ToString();
      for (size_t i = 0; i < there.din.size(); ++i) {
        if (c.sig.inputs[i].grad) digest.Add(To(there.din[i], Device::kCpu));
      }
    }
  }
  cuda::ExpectSameInFreshProcesses("FreshProcessCuda.EveryOperatorGivesTheSameBits",
                                   digest.Finish());
}

// The norm that stays on the device: the bits of the one that is waited for, eager and from a graph
// whose gradients change under it, and a refusal that names the leaf.
TEST(GradNormCuda, ComputeOnDeviceIsCapturableAndGivesTheBitsOfCompute) {
  if (!CudaDeviceReady()) GTEST_SKIP() << "no CUDA device of compute capability 9.0";
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  constexpr int64_t kRowsOf[] = {3, 1, 2100}, kColsOf[] = {1030, 5, 64};
  std::vector<Tensor> host, there;
  std::vector<grad_norm::Entry> entries, on_host;
  Random random(4);
  for (int i = 0; i < 3; ++i) {
    host.push_back(GuardedTensor(DType::kF32, {kRowsOf[i], kColsOf[i]}));
    there.push_back(To(host[static_cast<size_t>(i)], Device::kCuda));
    const std::string name = "w" + std::to_string(i);
    entries.push_back(
        {name, static_cast<const float*>(there.back().data()), kRowsOf[i], kColsOf[i]});
    on_host.push_back(
        {name, static_cast<const float*>(host.back().data()), kRowsOf[i], kColsOf[i]});
  }
  const auto fill = [&](double scale) {
    for (size_t i = 0; i < host.size(); ++i) {
      for (int64_t j = 0; j < host[i].elements(); ++j) Put(host[i], j, random.Normal() * scale);
      ASSERT_EQ(cudaMemcpy(there[i].mutable_data(), host[i].data(),
                           static_cast<size_t>(host[i].size_bytes()), cudaMemcpyHostToDevice),
                cudaSuccess);
    }
  };
  Tensor workspace = Workspace();
  Ctx ctx;
  ctx.device = Device::kCuda, ctx.stream = stream;
  ctx.workspace = workspace.mutable_data(), ctx.workspace_bytes = kWorkspaceBytes;
  ThreadPool pool(1);
  Ctx cpu;
  cpu.pool = &pool;
  Tensor result = To(GuardedTensor(DType::kF32, {2}), Device::kCuda);
  auto* const out = static_cast<float*>(result.mutable_data());
  const auto expect = [&](float max_norm, const char* how) {
    const auto want = grad_norm::Compute(cpu, on_host, max_norm);
    ASSERT_TRUE(want.ok()) << want.status().ToString();
    const Tensor got = To(result, Device::kCpu);
    EXPECT_EQ(got.as<float>()[0], want->norm) << how;
    EXPECT_EQ(got.as<float>()[1], want->factor) << how;
  };
  for (const float max_norm : {0.0f, 1.0f, 1e9f}) {
    fill(0.3);
    ASSERT_TRUE(grad_norm::ComputeOnDevice(ctx, entries, max_norm, out).ok());
    ASSERT_TRUE(cuda::TakeRefusal(stream).ok());
    expect(max_norm, "eager");
    fill(1.7);
    const auto launches = cuda::CaptureAndReplay(
        stream, [&] { return grad_norm::ComputeOnDevice(ctx, entries, max_norm, out); });
    ASSERT_TRUE(cuda::TakeRefusal(stream).ok());
    expect(max_norm, "replayed");
    if (max_norm == 0.0f) {
      for (const std::string& launch : launches)
        std::printf("launch grad_norm: %s\n", launch.c_str());
    }
  }
  // Row 2 of the first entry: its second block is leaf 5.
  Put(host[0], 2 * 1030 + 1029, std::nan(""));
  ASSERT_EQ(cudaMemcpy(there[0].mutable_data(), host[0].data(),
                       static_cast<size_t>(host[0].size_bytes()), cudaMemcpyHostToDevice),
            cudaSuccess);
  ASSERT_TRUE(grad_norm::ComputeOnDevice(ctx, entries, 1.0f, out).ok());
  const Status refused = cuda::TakeRefusal(stream);
  EXPECT_FALSE(refused.ok());
  EXPECT_NE(refused.message().find("leaf 5 "), std::string::npos) << refused.ToString();
  (void)cudaStreamDestroy(stream);
}

INSTANTIATE_TEST_SUITE_P(AllOperators, DeviceGenericCuda, ::testing::ValuesIn(DeviceOps()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace tare::ops
