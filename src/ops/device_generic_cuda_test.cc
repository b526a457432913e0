// The generic suite on a device: one driver for every registered operator that has a CUDA part.
// What the device computes is compared byte by byte with what the CPU computes from the same
// operands. Meets OPS rows CHEAP-03 (boundaries) and CHEAP-06 (repeat) for the CUDA kernels.
//
// Every test is skipped on a machine without such a device.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <set>

#include "ops/cuda/fresh_process.h"
#include "ops/cuda/refusal.h"
#include "ops/fault_cases.h"
#include "tensor/device_memory.h"

namespace tare::ops {
namespace {

constexpr int64_t kWorkspaceBytes = int64_t{64} << 20;
// Their registry entries read operands on the host, which waits: such a call cannot be captured.
const std::set<std::string> kReadsOnHost = {"sampling", "policy_loss", "cross_entropy", "grad_norm",
                                            "grouped_linear"};

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
    if (kReadsOnHost.contains(op_->name)) continue;
    // Captured once, replayed twice into poisoned outputs.
    OnCuda replayed(c, streams[0]);
    replayed.NewOutputs();
    if (backward) replayed.NewGradients();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeThreadLocal), cudaSuccess);
    Status status = replayed.CallForward();
    if (status.ok() && backward) status = replayed.CallBackward();
    ASSERT_EQ(cudaStreamEndCapture(streams[0], &graph), cudaSuccess) << status.ToString();
    ASSERT_TRUE(status.ok()) << status.ToString();
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(exec, streams[0]), cudaSuccess);
    ASSERT_TRUE(cuda::TakeRefusal(streams[0]).ok());
    EXPECT_EQ(Differences(c, replayed, backward), "") << "graph, " << key.ToString();
    (void)cudaGraphExecDestroy(exec);
    (void)cudaGraphDestroy(graph);
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

INSTANTIATE_TEST_SUITE_P(AllOperators, DeviceGenericCuda, ::testing::ValuesIn(DeviceOps()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace tare::ops
