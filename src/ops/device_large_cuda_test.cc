// Row operators on a device at sizes and data that the generic suite does not reach: the kernels
// that serve prefill alone, over every bf16 value. Byte by byte against the CPU. Meets OPS row
// CHEAP-03 for them. Skipped on a machine without such a device.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "base/thread_pool.h"
#include "ops/cuda/refusal.h"
#include "ops/gate/gate.h"
#include "ops/logprob/logprob.h"
#include "ops/quantize/quantize.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "tensor/convert.h"
#include "tensor/device_memory.h"
#include "tensor/tensor.h"

namespace tare::ops {
namespace {

class DeviceLargeCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!CudaDeviceReady()) GTEST_SKIP() << "no CUDA device of compute capability 9.0";
  }
};

Tensor Make(DType dtype, Shape shape) {
  auto t = Tensor::Allocate(dtype, std::move(shape));
  TARE_CHECK(t.ok()) << t.status().ToString();
  return *t;
}
Tensor To(const Tensor& t, Device device) {
  auto copy = t.To(device);
  TARE_CHECK(copy.ok()) << copy.status().ToString();
  return *copy;
}
// Random bits; `finite`: with no exponent of all ones.
Tensor RandomBits(DType dtype, Shape shape, std::mt19937& rng, bool finite) {
  Tensor t = Make(dtype, std::move(shape));
  const uint32_t exponent = dtype == DType::kF32 ? 0x7f800000u : 0x7f80u;
  for (int64_t i = 0; i < t.elements(); ++i) {
    uint32_t bits = static_cast<uint32_t>(rng());
    if (dtype != DType::kF32) bits &= 0xffffu;
    if (finite && (bits & exponent) == exponent) bits &= ~(exponent / 2 + 1);
    if (dtype == DType::kF32) {
      t.mutable_as<uint32_t>()[i] = bits;
    } else {
      t.mutable_as<uint16_t>()[i] = static_cast<uint16_t>(bits);
    }
  }
  return t;
}
std::string FirstDifference(const Tensor& want, const Tensor& got) {
  const Tensor there = To(got, Device::kCpu);
  const auto size = static_cast<size_t>(SizeOf(want.dtype()));
  const auto *a = static_cast<const char*>(want.data()),
             *b = static_cast<const char*>(there.data());
  for (size_t i = 0; i < static_cast<size_t>(want.elements()); ++i) {
    if (std::memcmp(a + i * size, b + i * size, size) == 0) continue;
    uint32_t x = 0, y = 0;
    std::memcpy(&x, a + i * size, size);
    std::memcpy(&y, b + i * size, size);
    return fmt::format("element {}: CPU {:#x}, CUDA {:#x}", i, x, y);
  }
  return "";
}

// Every bf16 gate against random ups and gradients, in a fused buffer with columns behind.
TEST_F(DeviceLargeCuda, GateOfEveryBf16Value) {
  ThreadPool pool(8);
  std::mt19937 rng(5);
  constexpr int64_t kRows = 1030, kWidth = 4104, kStride = 2 * kWidth + 8;
  Tensor x = RandomBits(DType::kBF16, {kRows, kStride}, rng, true);
  for (int64_t i = 0; i < kRows * kWidth; ++i) {
    x.mutable_as<uint16_t>()[i / kWidth * kStride + i % kWidth] =
        static_cast<uint16_t>(i % 65536 + i / 65536);  // each value meets each column in time
  }
  const Tensor x_there = To(x, Device::kCuda);
  for (const auto activation :
       {gate::Activation::kSilu, gate::Activation::kGeluTanh, gate::Activation::kGeluErf}) {
    for (const DType grad : {DType::kBF16, DType::kF32}) {
      gate::Params p;
      p.width = kWidth, p.activation = activation, p.grad_dtype = grad;
      const Tensor dy = RandomBits(grad, {kRows, kWidth}, rng, true);
      const Tensor dy_there = To(dy, Device::kCuda);
      Tensor y = Make(DType::kBF16, {kRows, kWidth}), dx = Make(grad, {kRows, 2 * kWidth});
      Tensor y_there = To(y, Device::kCuda), dx_there = To(dx, Device::kCuda);
      const auto run = [&](Device device, const Tensor& in, const Tensor& g, Tensor& out,
                           Tensor& gradient) {
        Ctx ctx;
        ctx.pool = &pool, ctx.device = device;
        const auto* gates = static_cast<const uint16_t*>(in.data());
        TARE_RETURN_IF_ERROR(
            gate::Forward(ctx, p, {kRows, gates, gates + kWidth, kStride, out.mutable_data()}));
        auto* dgate = static_cast<char*>(gradient.mutable_data());
        gate::BackwardArgs b;
        b.rows = kRows, b.gate = gates, b.up = gates + kWidth, b.stride = kStride, b.dy = g.data();
        b.dgate = dgate, b.dup = dgate + kWidth * SizeOf(grad), b.dstride = 2 * kWidth;
        return gate::Backward(ctx, p, b);
      };
      const Status cpu = run(Device::kCpu, x, dy, y, dx);
      ASSERT_TRUE(cpu.ok()) << cpu.ToString();
      const Status cuda = run(Device::kCuda, x_there, dy_there, y_there, dx_there);
      ASSERT_TRUE(cuda.ok()) << cuda.ToString();
      const std::string name(gate::ActivationName(activation));
      EXPECT_EQ(FirstDifference(y, y_there), "") << name;
      EXPECT_EQ(FirstDifference(dx, dx_there), "") << name << " gradient " << DTypeName(grad);
    }
  }
}

// Rows of the copy engine's kernel, with and without a residual of either dtype, in place too.
TEST_F(DeviceLargeCuda, RmsnormOfManyRows) {
  ThreadPool pool(8);
  std::mt19937 rng(8);
  for (const int64_t width : {128, 1024, 4096, 5120}) {
    for (const DType residual : {DType::kBF16, DType::kF32}) {
      for (const bool add : {false, true}) {
        constexpr int64_t kRows = 1100;
        std::normal_distribution<float> normal;
        Tensor x = Make(DType::kBF16, {kRows, width}), w = Make(DType::kBF16, {width}),
               r = Make(residual, {kRows, width});
        for (Tensor* t : {&x, &w, &r}) {
          for (int64_t i = 0; i < t->elements(); ++i) {
            const float v = normal(rng) * (i / width % 50 == 7 ? 1e-20f : 1.0f);
            if (t->dtype() == DType::kF32) {
              t->mutable_as<float>()[i] = v;
            } else {
              t->mutable_as<uint16_t>()[i] = F32ToBf16(v);
            }
          }
        }
        x.mutable_as<uint16_t>()[5 * width + 3] = 0x7fc0;  // a NaN in one row
        const Tensor gradient[] = {RandomBits(DType::kBF16, {kRows, width}, rng, true),
                                   RandomBits(DType::kF32, {kRows, width}, rng, true)};
        const auto run = [&](Device device, std::vector<Tensor>& out) {
          const Tensor in = To(x, device), weight = To(w, device);
          out = {To(*x.Clone(), device), To(*r.Clone(), device),
                 To(Make(DType::kF32, {kRows}), device)};
          Ctx ctx;
          ctx.pool = &pool, ctx.device = device;
          rmsnorm::Params p;
          p.hidden = width, p.add_residual = add, p.residual_dtype = residual;
          // The sum over the residual it was made of, as the models call it.
          rmsnorm::Args a;
          a.rows = kRows, a.x = in.data(), a.w = weight.data();
          a.y = out[0].mutable_data(), a.rstd = static_cast<float*>(out[2].mutable_data());
          if (add) a.residual = out[1].data(), a.residual_out = out[1].mutable_data();
          TARE_RETURN_IF_ERROR(rmsnorm::Forward(ctx, p, a));
          // Backward over units of several lengths, the other gradient added in place.
          const Tensor rstd = out[2];
          const Tensor h = add ? out[1] : in;
          for (const DType grad : {DType::kBF16, DType::kF32}) {
            const Tensor dy = To(gradient[grad == DType::kF32], device);
            out.push_back(To(*gradient[grad == DType::kF32].Clone(), device));
            Tensor dx = out.back();
            out.push_back(To(Make(DType::kF32, {width}), device));
            const std::vector<TokenUnit> units = {{0, 517}, {520, 31}, {600, 500}};
            rmsnorm::BackwardArgs b;
            b.rows = kRows, b.h = h.data(), b.w = weight.data(), b.dy = dy.data();
            b.rstd = static_cast<const float*>(rstd.data()), b.units = units;
            b.dx = dx.mutable_data(), b.dw = static_cast<float*>(out.back().mutable_data());
            if (add) b.dresidual_out = dx.data();
            p.grad_dtype = grad;
            TARE_RETURN_IF_ERROR(rmsnorm::Backward(ctx, p, b));
          }
          return Ok();
        };
        std::vector<Tensor> want, got;
        const Status cpu = run(Device::kCpu, want), cuda = run(Device::kCuda, got);
        ASSERT_TRUE(cpu.ok()) << cpu.ToString();
        ASSERT_TRUE(cuda.ok()) << cuda.ToString();
        for (size_t i = 0; i < want.size(); ++i)
          EXPECT_EQ(FirstDifference(want[i], got[i]), "")
              << width << " " << DTypeName(residual) << " " << add << " output " << i;
      }
    }
  }
}

// Blocks of every magnitude: wide random bits, and values a few powers of two apart, where the
// quotients meet every code and many a tie.
TEST_F(DeviceLargeCuda, QuantizeOfRandomBlocks) {
  ThreadPool pool(8);
  std::mt19937 rng(6);
  for (const int64_t width : {2048, 2000, 16}) {
    const int64_t rows = width == 16 ? 3001 : 1000;
    Tensor x = RandomBits(DType::kBF16, {rows, width}, rng, true);
    for (int64_t i = rows / 2 * width; i < rows * width; ++i) {
      const uint32_t exponent = 100 + static_cast<uint32_t>(i / width % 50) + rng() % 6;
      x.mutable_as<uint16_t>()[i] = static_cast<uint16_t>((rng() & 0x807fu) | exponent << 7);
    }
    const int64_t blocks = (width + 127) / 128;
    Tensor q = Make(DType::kU8, {rows, width}), scale = Make(DType::kF32, {rows, blocks});
    const Tensor x_there = To(x, Device::kCuda);
    Tensor q_there = To(q, Device::kCuda), scale_there = To(scale, Device::kCuda);
    Ctx ctx;
    ctx.pool = &pool;
    quantize::Params p;
    p.width = width;
    ASSERT_TRUE(quantize::Forward(ctx, p,
                                  {rows, x.data(), static_cast<uint8_t*>(q.mutable_data()),
                                   static_cast<float*>(scale.mutable_data())})
                    .ok());
    ctx.device = Device::kCuda;
    ASSERT_TRUE(
        quantize::Forward(ctx, p,
                          {rows, x_there.data(), static_cast<uint8_t*>(q_there.mutable_data()),
                           static_cast<float*>(scale_there.mutable_data())})
            .ok());
    EXPECT_TRUE(cuda::TakeRefusal(nullptr).ok());
    EXPECT_EQ(FirstDifference(q, q_there), "") << width;
    EXPECT_EQ(FirstDifference(scale, scale_there), "") << width;
  }
}

// Rows enough for the copy engine's kernel: whole and partial blocks in each leaf, spread and equal
// logits, -inf, NaN, temperatures, a row without a target.
TEST_F(DeviceLargeCuda, LogprobOfManyRows) {
  ThreadPool pool(8);
  std::mt19937 rng(7);
  for (const int64_t vocab : {8 * 1104, 8 * 128, 64 * 8}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      constexpr int64_t kRows = 301;
      Tensor x = Make(dtype, {kRows, vocab}), targets = Make(DType::kI32, {kRows}),
             temperature = Make(DType::kF32, {kRows});
      std::normal_distribution<float> normal;
      for (int64_t t = 0; t < kRows; ++t) {
        const float spread = t % 4 == 0 ? 30.0f : t % 4 == 1 ? 0.0f : 3.0f;
        for (int64_t i = 0; i < vocab; ++i) {
          float v = normal(rng) * spread;
          if (t % 7 == 3 && rng() % 8 == 0) v = -INFINITY;
          if (t == 40 && i / 128 % 2 == 0) v = -INFINITY;  // whole blocks of nothing
          if (t == 50 && i == vocab - 1) v = NAN;
          if (dtype == DType::kF32) {
            x.mutable_as<float>()[t * vocab + i] = v;
          } else {
            x.mutable_as<uint16_t>()[t * vocab + i] = F32ToBf16(v);
          }
        }
        targets.mutable_as<int32_t>()[t] =
            t % 11 == 5 ? -1 : static_cast<int32_t>(rng() % static_cast<uint32_t>(vocab));
        temperature.mutable_as<float>()[t] = t % 3 == 0 ? 1.0f : 0.7f;
      }
      for (const bool full : {false, true}) {
        const auto run = [&](Device device, Tensor& out) {
          const Tensor in = To(x, device), ids = To(targets, device),
                       temp = To(temperature, device);
          Ctx ctx;
          ctx.pool = &pool, ctx.device = device;
          logprob::Params p;
          p.vocab = vocab, p.logits_dtype = dtype;
          logprob::Args a;
          a.rows = kRows, a.logits = in.data(), a.stride = vocab;
          a.targets = static_cast<const int32_t*>(ids.data());
          a.logprob = static_cast<float*>(out.mutable_data());
          a.max = a.logprob + kRows, a.log_sum = a.logprob + 2 * kRows;
          if (full) {
            a.entropy = a.logprob + 3 * kRows;
            a.temperature = static_cast<const float*>(temp.data());
          }
          const Status s = logprob::Forward(ctx, p, a);
          return s.ok() && device == Device::kCuda ? cuda::TakeRefusal(nullptr) : s;
        };
        Tensor want = Make(DType::kF32, {4, kRows}), got = To(want, Device::kCuda);
        const Status cpu = run(Device::kCpu, want), cuda = run(Device::kCuda, got);
        ASSERT_TRUE(cpu.ok()) << cpu.ToString();
        ASSERT_TRUE(cuda.ok()) << cuda.ToString();
        EXPECT_EQ(FirstDifference(want, got), "")
            << vocab << " " << DTypeName(dtype) << " " << full;
      }
    }
  }
}

}  // namespace
}  // namespace tare::ops
