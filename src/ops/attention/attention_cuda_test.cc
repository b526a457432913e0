// attention on a Hopper GPU: the bits of the CPU, for every kernel, shape, option and layout of
// keys.
//
// Every test is skipped on a machine without such a device.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "ops/attention/attention.h"
#include "ops/attention/attention_gpu.h"
#include "ops/cuda/fresh_process.h"
#include "ops/trace.h"
#include "tensor/convert.h"
#include "tensor/device_memory.h"
#include "tensor/tensor.h"

namespace tare::ops::attention {
namespace {

class AttentionCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!CudaDeviceReady()) GTEST_SKIP() << "no CUDA device of compute capability 9.0";
  }
};

Tensor Make(DType dtype, Shape shape) {
  auto t = Tensor::Allocate(dtype, std::move(shape));
  EXPECT_TRUE(t.ok()) << t.status().ToString();
  return *std::move(t);
}

Tensor To(const Tensor& t, Device device) {
  auto copy = t.To(device);
  EXPECT_TRUE(copy.ok()) << copy.status().ToString();
  return *std::move(copy);
}

void Put(Tensor& t, int64_t i, float v) {
  if (t.dtype() == DType::kF32) {
    t.mutable_as<float>()[i] = v;
  } else {
    t.mutable_as<uint16_t>()[i] = t.dtype() == DType::kBF16 ? F32ToBf16(v) : F32ToF16(v);
  }
}

// Mostly normal values, then zeros of both signs, subnormals and some large ones.
Tensor Random(DType dtype, Shape shape, std::mt19937& rng, float scale = 1.0f) {
  Tensor t = Make(dtype, std::move(shape));
  std::normal_distribution<float> normal(0.0f, scale);
  for (int64_t i = 0; i < t.elements(); ++i) {
    float v = normal(rng);
    switch (rng() % 256) {
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
        v *= 30.0f;
        break;
      default:
        break;
    }
    Put(t, i, v);
  }
  return t;
}

// Not a number everywhere: what no run may read or write.
Tensor Poisoned(DType dtype, Shape shape) {
  Tensor t = Make(dtype, std::move(shape));
  std::memset(t.mutable_data(), 0xff, static_cast<size_t>(t.size_bytes()));
  return t;
}

std::string FirstDifference(const Tensor& a, const Tensor& b) {
  const auto size = static_cast<size_t>(SizeOf(a.dtype()));
  const auto* pa = static_cast<const uint8_t*>(a.data());
  const auto* pb = static_cast<const uint8_t*>(b.data());
  if (std::memcmp(pa, pb, static_cast<size_t>(a.size_bytes())) == 0) return "";
  int64_t first = -1, count = 0;
  for (int64_t i = 0; i < a.elements(); ++i) {
    if (std::memcmp(pa + static_cast<size_t>(i) * size, pb + static_cast<size_t>(i) * size, size) ==
        0)
      continue;
    if (first < 0) first = i;
    ++count;
  }
  uint32_t va = 0, vb = 0;
  std::memcpy(&va, pa + static_cast<size_t>(first) * size, size);
  std::memcpy(&vb, pb + static_cast<size_t>(first) * size, size);
  return fmt::format("{} of {} elements, first {}: {:#x} against {:#x}", count, a.elements(), first,
                     va, vb);
}

Ctx Context(ThreadPool& pool, Device device, Profile profile) {
  return {.pool = &pool, .profile = profile, .device = device};
}

// A ragged call. K and V packed, or in pages of `page_size` when that is not 0.
struct Call {
  Params params;
  int64_t tokens = 0, kv_rows = 0, page_size = 0, max_pages = 0;
  std::vector<Run> runs;
  Tensor q, k, v, sink, table;
  std::string ToString() const {
    std::string s = fmt::format(
        "{}/{} heads d={} {} window={} sink={} cap={} tile={} split={} page={}", params.q_heads,
        params.kv_heads, params.head_dim, DTypeName(params.dtype), params.window, params.sink,
        params.softcap, params.kv_tile, params.kv_split, page_size);
    for (const Run& r : runs) s += fmt::format(" [{}+{} at {}]", r.q_begin, r.q_rows, r.position);
    return s;
  }
};

struct Output {
  Tensor out, lse2;
  std::string kernel;
};

Output RunForward(Ctx ctx, const Call& c) {
  const Params& p = c.params;
  const Tensor q = To(c.q, ctx.device), k = To(c.k, ctx.device), v = To(c.v, ctx.device);
  Tensor sink, table;
  if (p.sink) sink = To(c.sink, ctx.device);
  if (c.page_size != 0) table = To(c.table, ctx.device);
  Tensor out = To(Poisoned(p.dtype, {c.tokens, p.q_heads * p.head_dim}), ctx.device);
  Tensor lse2 = To(Poisoned(DType::kF32, {c.tokens, p.q_heads}), ctx.device);
  Args a;
  a.tokens = c.tokens;
  a.q = q.data();
  a.kv.k = k.data();
  a.kv.v = v.data();
  if (c.page_size == 0) {
    a.kv.rows = c.kv_rows;
  } else {
    a.kv.block_table = static_cast<const int32_t*>(table.data());
    a.kv.table_rows = static_cast<int64_t>(c.runs.size());
    a.kv.max_pages = c.max_pages;
    a.kv.num_pages = c.kv_rows / c.page_size;
    a.kv.page_size = c.page_size;
  }
  if (p.sink) a.sink = static_cast<const float*>(sink.data());
  a.runs = c.runs;
  a.out = out.mutable_data();
  a.lse2 = static_cast<float*>(lse2.mutable_data());
  int64_t most = 1;
  for (const Run& r : c.runs) most = std::max(most, r.position + r.q_rows);
  const auto bytes = static_cast<int64_t>(
      WorkspaceBytes(ctx, p, c.tokens, static_cast<int64_t>(c.runs.size()), most));
  Tensor workspace = To(Poisoned(DType::kU8, {bytes + 1}), ctx.device);
  ctx.workspace = workspace.mutable_data();
  ctx.workspace_bytes = static_cast<size_t>(bytes);
  LaunchTrace trace;
  ctx.trace = &trace;
  const Status status = Forward(ctx, p, a);
  EXPECT_TRUE(status.ok()) << status.ToString();
  if (ctx.device == Device::kCuda) {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  const auto launches = trace.Take();
  return {To(out, Device::kCpu), To(lse2, Device::kCpu),
          launches.empty() ? "" : launches[0].kernel};
}

// Runs of lengths on and around every boundary; rows of q between them that belong to none.
// `decodes`: that many runs of few rows instead of a few runs of any length.
Call RandomCall(std::mt19937& rng, bool fast, int64_t decodes = 0) {
  Call c;
  Params& p = c.params;
  static constexpr int64_t kGroups[] = {1, 1, 2, 3, 4, 4, 5, 8, 12};
  const auto pick = [&](auto... v) {
    const int64_t values[] = {v...};
    return values[rng() % sizeof...(v)];
  };
  p.kv_heads = 1 + static_cast<int64_t>(rng() % 2);
  p.q_heads = p.kv_heads * kGroups[rng() % std::size(kGroups)];
  p.head_dim = fast ? pick(64, 128) : pick(16, 48, 64, 80, 128, 256);
  p.dtype = fast || rng() % 2 ? DType::kBF16 : rng() % 2 ? DType::kF16 : DType::kF32;
  p.scale = 1.0f / std::sqrt(static_cast<float>(p.head_dim));
  p.window = rng() % 3 == 0 ? pick(1, 17, 64, 127, 128, 129, 255, 256, 400, 513) : 0;
  p.sink = rng() % 3 == 0;
  if (!fast && rng() % 3 == 0) p.softcap = 4.0f;
  p.kv_tile = fast ? 128 : pick(64, 128);
  p.kv_split = pick(256, 256, 512, 1024);
  c.page_size = rng() % 2 == 0 ? 0 : fast ? pick(8, 16, 16, 32, 64, 128, 256) : pick(1, 3, 16, 40);
  const int64_t count = decodes != 0 ? decodes : 1 + static_cast<int64_t>(rng() % 4);
  std::vector<int64_t> keys;
  int64_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    static constexpr int64_t kEdges[] = {1, 16, 64, 128, 256, 384, 512, 640};
    int64_t n = rng() % 2 == 0
                    ? kEdges[rng() % std::size(kEdges)] + static_cast<int64_t>(rng() % 3) - 1
                    : 1 + static_cast<int64_t>(rng() % 700);
    n = std::max<int64_t>(n, 1);
    Run run;
    run.q_rows = rng() % 2 == 0 ? std::min<int64_t>(n, pick(1, 1, 2, 3, 8))
                                : std::min<int64_t>(n, 1 + static_cast<int64_t>(rng() % 160));
    if (decodes != 0) run.q_rows = std::min<int64_t>(n, 1 + static_cast<int64_t>(rng() % 2));
    if (rng() % 16 == 0) run.q_rows = 0;
    run.position = n - run.q_rows;
    run.q_begin = c.tokens + static_cast<int64_t>(rng() % 3);
    c.tokens = run.q_begin + run.q_rows;
    run.block_row = static_cast<int32_t>(i);
    c.runs.push_back(run);
    keys.push_back(n);
    most = std::max(most, n);
  }
  c.tokens += static_cast<int64_t>(rng() % 2);
  const int64_t width = p.kv_heads * p.head_dim;
  if (c.page_size == 0) {
    for (size_t i = 0; i < keys.size(); ++i) {
      c.runs[i].kv_begin = c.kv_rows + static_cast<int64_t>(rng() % 5);
      c.kv_rows = c.runs[i].kv_begin + keys[i];
    }
    c.kv_rows += static_cast<int64_t>(rng() % 5);
  } else {
    c.max_pages = (most + c.page_size - 1) / c.page_size;
    const int64_t pages = count * c.max_pages + 2;
    c.kv_rows = pages * c.page_size;
    std::vector<int32_t> order(static_cast<size_t>(pages));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::shuffle(order.begin(), order.end(), rng);
    c.table = Make(DType::kI32, {count, c.max_pages});
    for (int64_t i = 0; i < c.table.elements(); ++i)
      c.table.mutable_as<int32_t>()[i] = order[static_cast<size_t>(i)];
  }
  const float sharp = rng() % 4 == 0 ? 3.0f : 1.0f;
  c.q = Random(p.dtype, {c.tokens, p.q_heads * p.head_dim}, rng, sharp);
  // Where no key is stored there is a NaN.
  c.k = Poisoned(p.dtype, {c.kv_rows, width});
  c.v = Poisoned(p.dtype, {c.kv_rows, width});
  for (size_t i = 0; i < keys.size(); ++i) {
    const Tensor k = Random(p.dtype, {keys[i], width}, rng),
                 v = Random(p.dtype, {keys[i], width}, rng);
    const int64_t bytes = width * SizeOf(p.dtype);
    for (int64_t j = 0; j < keys[i]; ++j) {
      const int64_t row =
          c.page_size == 0
              ? c.runs[i].kv_begin + j
              : c.table.as<int32_t>()[static_cast<int64_t>(i) * c.max_pages + j / c.page_size] *
                        c.page_size +
                    j % c.page_size;
      std::memcpy(static_cast<char*>(c.k.mutable_data()) + row * bytes,
                  static_cast<const char*>(k.data()) + j * bytes, static_cast<size_t>(bytes));
      std::memcpy(static_cast<char*>(c.v.mutable_data()) + row * bytes,
                  static_cast<const char*>(v.data()) + j * bytes, static_cast<size_t>(bytes));
    }
  }
  if (p.sink) c.sink = Random(DType::kF32, {p.q_heads}, rng);
  return c;
}

void ForwardEqualsCpu(int cases, uint32_t seed) {
  ThreadPool pool(16);
  std::mt19937 rng(seed);
  std::map<std::string, int> kernels;
  for (int i = 0; i < cases; ++i) {
    const Call c = RandomCall(rng, i % 3 != 0);
    if (!Check(c.params).ok()) continue;
    for (Profile profile : {Profile::kSm90Mma, Profile::kIeeeF32}) {
      if (profile == Profile::kIeeeF32 && i % 3 == 1) continue;  // the generic kernel alone
      const Output gpu = RunForward(Context(pool, Device::kCuda, profile), c);
      const Output cpu = RunForward(Context(pool, Device::kCpu, profile), c);
      ++kernels[gpu.kernel];
      ASSERT_EQ(FirstDifference(gpu.out, cpu.out), "")
          << "out, case " << i << " " << ProfileName(profile) << " " << gpu.kernel << " "
          << c.ToString();
      ASSERT_EQ(FirstDifference(gpu.lse2, cpu.lse2), "")
          << "lse2, case " << i << " " << ProfileName(profile) << " " << gpu.kernel << " "
          << c.ToString();
    }
  }
  for (const auto& [kernel, count] : kernels)
    std::printf("%s: %d calls equal\n", kernel.c_str(), count);
  for (const char* kernel :
       {"attention_fwd_wgmma", "attention_fwd_decode", "attention_fwd_wgmma+decode",
        "attention_fwd_generic_sm90", "attention_fwd_generic_ieee"}) {
    EXPECT_GE(kernels[kernel], cases / 40) << kernel << " was hardly tried";
  }
}

TEST_F(AttentionCuda, CudaForwardHasTheBitsOfTheCpu) { ForwardEqualsCpu(120, 1); }
TEST_F(AttentionCuda, CudaForwardHasTheBitsOfTheCpuSlow) { ForwardEqualsCpu(1000, 2); }

// From a dozen items of decode to several for each multiprocessor, of all lengths: by clusters of
// every kind and by the kernel that takes item after item.
void ManyDecodesEqualCpu(int cases, uint32_t seed) {
  ThreadPool pool(16);
  std::mt19937 rng(seed);
  static constexpr int64_t kRuns[] = {12, 24, 36, 50, 80, 150};
  const Ctx device = Context(pool, Device::kCuda, Profile::kSm90Mma),
            host = Context(pool, Device::kCpu, Profile::kSm90Mma);
  for (int i = 0; i < cases; ++i) {
    Call c;
    do {  // two tokens of more heads would be prefill's
      c = RandomCall(rng, true, kRuns[static_cast<size_t>(i) % std::size(kRuns)]);
    } while (c.params.q_heads / c.params.kv_heads > 4);
    const Output gpu = RunForward(device, c), cpu = RunForward(host, c);
    ASSERT_EQ(gpu.kernel, "attention_fwd_decode") << c.ToString();
    ASSERT_EQ(FirstDifference(gpu.out, cpu.out), "") << "out, case " << i << " " << c.ToString();
    ASSERT_EQ(FirstDifference(gpu.lse2, cpu.lse2), "") << "lse2, case " << i << " " << c.ToString();
  }
}

TEST_F(AttentionCuda, CudaManyDecodesHaveTheBitsOfTheCpu) { ManyDecodesEqualCpu(30, 8); }
TEST_F(AttentionCuda, CudaManyDecodesHaveTheBitsOfTheCpuSlow) { ManyDecodesEqualCpu(200, 9); }

struct Gradients {
  Tensor dq, dk, dv, dsink;
  std::string kernel;
};

Gradients RunBackward(Ctx ctx, const Call& c, const Output& saved, const Tensor& dout) {
  const Params& p = c.params;
  const Tensor q = To(c.q, ctx.device), k = To(c.k, ctx.device), v = To(c.v, ctx.device),
               out = To(saved.out, ctx.device), lse2 = To(saved.lse2, ctx.device),
               go = To(dout, ctx.device);
  Tensor sink, dsink = Make(DType::kF32, {p.q_heads});
  for (int64_t h = 0; h < p.q_heads; ++h) dsink.mutable_as<float>()[h] = 0.25f;
  dsink = ctx.device == Device::kCpu ? dsink : To(dsink, ctx.device);
  if (p.sink) sink = To(c.sink, ctx.device);
  Tensor dq = To(Poisoned(p.dtype, q.shape()), ctx.device),
         dk = To(Poisoned(p.dtype, k.shape()), ctx.device),
         dv = To(Poisoned(p.dtype, v.shape()), ctx.device);
  BackwardArgs a;
  a.tokens = c.tokens, a.q = q.data(), a.k = k.data(), a.v = v.data(), a.kv_rows = c.kv_rows;
  a.out = out.data(), a.lse2 = static_cast<const float*>(lse2.data()), a.dout = go.data();
  a.runs = c.runs;
  a.dq = dq.mutable_data(), a.dk = dk.mutable_data(), a.dv = dv.mutable_data();
  if (p.sink) {
    a.sink = static_cast<const float*>(sink.data());
    a.dsink = static_cast<float*>(dsink.mutable_data());
  }
  int64_t most = 1;
  for (const Run& r : c.runs) most = std::max(most, r.q_rows);
  const auto bytes = static_cast<int64_t>(
      BackwardWorkspaceBytes(ctx, p, c.tokens, static_cast<int64_t>(c.runs.size()), most));
  Tensor workspace = To(Poisoned(DType::kU8, {bytes + 1}), ctx.device);
  ctx.workspace = workspace.mutable_data();
  ctx.workspace_bytes = static_cast<size_t>(bytes);
  LaunchTrace trace;
  ctx.trace = &trace;
  const Status status = Backward(ctx, p, a);
  EXPECT_TRUE(status.ok()) << status.ToString();
  if (ctx.device == Device::kCuda) {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  const auto launches = trace.Take();
  return {To(dq, Device::kCpu), To(dk, Device::kCpu), To(dv, Device::kCpu), To(dsink, Device::kCpu),
          launches.empty() ? "" : launches[0].kernel};
}

void BackwardEqualsCpu(int cases, uint32_t seed) {
  ThreadPool pool(16);
  std::mt19937 rng(seed);
  std::map<std::string, int> kernels;
  for (int i = 0; i < cases; ++i) {
    Call c = RandomCall(rng, i % 3 != 0);
    if (!Check(c.params).ok()) continue;
    // Whole sequences, packed.
    const Params& p = c.params;
    c.params.unit_rows = rng() % 2 == 0 ? kUnitRows : 16 * (1 + static_cast<int64_t>(rng() % 16));
    c.page_size = c.tokens = c.kv_rows = 0;
    for (Run& r : c.runs) {
      // Short: the emulation of every product on the CPU is what takes the time.
      r.q_rows = rng() % 12 == 0 ? 0 : 1 + (r.position + r.q_rows - 1) % 230;
      r.position = 0;
      r.q_begin = c.tokens + static_cast<int64_t>(rng() % 3);
      c.tokens = r.q_begin + r.q_rows;
      r.kv_begin = c.kv_rows + static_cast<int64_t>(rng() % 3);
      c.kv_rows = r.kv_begin + r.q_rows;
    }
    c.tokens += 1, c.kv_rows += 1;
    c.q = Random(p.dtype, {c.tokens, p.q_heads * p.head_dim}, rng);
    c.k = Random(p.dtype, {c.kv_rows, p.kv_heads * p.head_dim}, rng);
    c.v = Random(p.dtype, {c.kv_rows, p.kv_heads * p.head_dim}, rng);
    const Tensor dout = Random(p.dtype, {c.tokens, p.q_heads * p.head_dim}, rng);
    for (Profile profile : {Profile::kSm90Mma, Profile::kIeeeF32}) {
      if (profile == Profile::kIeeeF32 && i % 3 == 1) continue;
      const Output saved = RunForward(Context(pool, Device::kCuda, profile), c);
      const Gradients gpu = RunBackward(Context(pool, Device::kCuda, profile), c, saved, dout);
      const Gradients cpu = RunBackward(Context(pool, Device::kCpu, profile), c, saved, dout);
      ++kernels[gpu.kernel];
      const std::string what = fmt::format("case {} {} {} unit_rows={} {}", i, ProfileName(profile),
                                           gpu.kernel, p.unit_rows, c.ToString());
      ASSERT_EQ(FirstDifference(gpu.dv, cpu.dv), "") << "dv " << what;
      ASSERT_EQ(FirstDifference(gpu.dk, cpu.dk), "") << "dk " << what;
      ASSERT_EQ(FirstDifference(gpu.dq, cpu.dq), "") << "dq " << what;
      ASSERT_EQ(FirstDifference(gpu.dsink, cpu.dsink), "") << "dsink " << what;
    }
  }
  for (const auto& [kernel, count] : kernels)
    std::printf("%s: %d calls equal\n", kernel.c_str(), count);
}

TEST_F(AttentionCuda, CudaBackwardHasTheBitsOfTheCpu) { BackwardEqualsCpu(60, 3); }
// A thousand calls in four tests, so that they can run side by side: the CPU takes most of the
// time.
TEST_F(AttentionCuda, CudaBackwardHasTheBitsOfTheCpuSlow1) { BackwardEqualsCpu(250, 4); }
TEST_F(AttentionCuda, CudaBackwardHasTheBitsOfTheCpuSlow2) { BackwardEqualsCpu(250, 5); }
TEST_F(AttentionCuda, CudaBackwardHasTheBitsOfTheCpuSlow3) { BackwardEqualsCpu(250, 6); }
TEST_F(AttentionCuda, CudaBackwardHasTheBitsOfTheCpuSlow4) { BackwardEqualsCpu(250, 7); }

// One sequence of `n` tokens whose keys also stand in pages, for cuts of every kind.
struct Sequence {
  Call whole;
  int64_t n;
};
Sequence LongSequence(int64_t n, std::mt19937& rng, DType dtype = DType::kBF16) {
  Sequence s;
  s.n = n;
  Params& p = s.whole.params;
  p.dtype = dtype;
  p.q_heads = 8, p.kv_heads = 2, p.head_dim = 128;
  p.scale = 1.0f / std::sqrt(128.0f);
  s.whole.tokens = s.whole.kv_rows = n;
  s.whole.runs = {{.q_rows = n}};
  s.whole.q = Random(p.dtype, {n, p.q_heads * p.head_dim}, rng);
  s.whole.k = Random(p.dtype, {n, p.kv_heads * p.head_dim}, rng);
  s.whole.v = Random(p.dtype, {n, p.kv_heads * p.head_dim}, rng);
  return s;
}

// Rows [from, to) of the sequence, alone or behind and before `neighbours` other runs of one or
// many rows, with keys packed or in shuffled pages.
Call Cut(const Sequence& s, int64_t from, int64_t to, int64_t page_size, int neighbours,
         std::mt19937& rng) {
  Call c;
  c.params = s.whole.params;
  c.page_size = page_size;
  const int64_t width = c.params.q_heads * c.params.head_dim,
                kv_width = c.params.kv_heads * c.params.head_dim;
  const auto copy_rows = [](Tensor& dst, int64_t at, const Tensor& src, int64_t first, int64_t rows,
                            int64_t w) {
    std::memcpy(dst.mutable_as<uint16_t>() + at * w, src.as<uint16_t>() + first * w,
                static_cast<size_t>(rows * w) * 2);
  };
  std::vector<int64_t> first_row;
  for (int i = 0; i <= neighbours; ++i) {
    Run r;
    r.q_rows = i == neighbours / 2 ? to - from : i % 2 == 0 ? 1 : 40;
    r.position = i == neighbours / 2 ? from : static_cast<int64_t>(rng() % 300);
    r.q_begin = c.tokens;
    r.block_row = i;
    c.tokens += r.q_rows;
    c.runs.push_back(r);
  }
  c.q = Random(DType::kBF16, {c.tokens, width}, rng);
  copy_rows(c.q, c.runs[static_cast<size_t>(neighbours / 2)].q_begin, s.whole.q, from, to - from,
            width);
  if (page_size == 0) {
    for (Run& r : c.runs) r.kv_begin = c.kv_rows, c.kv_rows += r.position + r.q_rows;
    c.k = Random(DType::kBF16, {c.kv_rows, kv_width}, rng);
    c.v = Random(DType::kBF16, {c.kv_rows, kv_width}, rng);
    copy_rows(c.k, c.runs[static_cast<size_t>(neighbours / 2)].kv_begin, s.whole.k, 0, to,
              kv_width);
    copy_rows(c.v, c.runs[static_cast<size_t>(neighbours / 2)].kv_begin, s.whole.v, 0, to,
              kv_width);
    return c;
  }
  const auto count = static_cast<int64_t>(c.runs.size());
  c.max_pages = (std::max<int64_t>(to, 340) + page_size - 1) / page_size;
  const int64_t pages = count * c.max_pages;
  c.kv_rows = pages * page_size;
  c.table = Make(DType::kI32, {count, c.max_pages});
  std::vector<int32_t> order(static_cast<size_t>(pages));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  std::shuffle(order.begin(), order.end(), rng);
  std::copy(order.begin(), order.end(), c.table.mutable_as<int32_t>());
  c.k = Random(DType::kBF16, {c.kv_rows, kv_width}, rng);
  c.v = Random(DType::kBF16, {c.kv_rows, kv_width}, rng);
  for (int64_t j = 0; j < to; ++j) {
    const int64_t row =
        c.table.as<int32_t>()[neighbours / 2 * c.max_pages + j / page_size] * page_size +
        j % page_size;
    copy_rows(c.k, row, s.whole.k, j, 1, kv_width);
    copy_rows(c.v, row, s.whole.v, j, 1, kv_width);
  }
  return c;
}

// C3-03, C5: a row has the same bits alone and among many, in any chunk, first or last in the call,
// from packed keys and from pages of any size in any order, by the prefill kernel and by decode.
TEST_F(AttentionCuda, CudaRowBitsDoNotDependOnCompanyCutsAndPages) {
  ThreadPool pool(4);
  std::mt19937 rng(21);
  const Sequence s = LongSequence(1700, rng);
  const Ctx ctx = Context(pool, Device::kCuda, Profile::kSm90Mma);
  const Output whole = RunForward(ctx, s.whole);
  EXPECT_EQ(whole.kernel, "attention_fwd_wgmma");
  std::map<std::string, int> kernels;
  const auto check = [&](int64_t from, int64_t to, int64_t page, int neighbours) {
    const Call c = Cut(s, from, to, page, neighbours, rng);
    const Output got = RunForward(ctx, c);
    ++kernels[got.kernel];
    const int64_t begin = c.runs[static_cast<size_t>(neighbours / 2)].q_begin;
    ASSERT_EQ(FirstDifference(*got.out.Slice(begin, begin + to - from), *whole.out.Slice(from, to)),
              "")
        << got.kernel << " " << c.ToString();
    ASSERT_EQ(
        FirstDifference(*got.lse2.Slice(begin, begin + to - from), *whole.lse2.Slice(from, to)), "")
        << got.kernel << " " << c.ToString();
  };
  // Decode of every row around the boundaries, alone and among others.
  for (int64_t row : {0, 1, 15, 16, 63, 64, 126, 127, 128, 129, 255, 256, 511, 512, 513, 1023, 1024,
                      1025, 1699}) {
    for (int64_t page : {0, 16, 7}) check(row, row + 1, page, 0);
    check(row, row + 1, 16, 5);
  }
  for (int64_t chunk : {2, 3, 17, 64, 100, 128, 333, 512, 1000}) {
    for (int64_t from = 0; from < s.n; from += chunk) {
      if (chunk < 64 && from % 5 != 0) continue;
      check(from, std::min(s.n, from + chunk), from % 2 == 0 ? 16 : 0, from % 3 == 0 ? 4 : 0);
    }
  }
  for (int64_t page : {8, 16, 32, 64, 128, 256, 24, 1}) check(900, 1400, page, 2);
  EXPECT_GT(kernels["attention_fwd_decode"], 50);
  EXPECT_GT(kernels["attention_fwd_wgmma"], 10);
  EXPECT_GT(kernels["attention_fwd_wgmma+decode"], 10);
}

// The same call many times, on two streams at once.
TEST_F(AttentionCuda, CudaRepeatsAndStreamsGiveTheSameBits) {
  ThreadPool pool(4);
  std::mt19937 rng(23);
  const Sequence s = LongSequence(900, rng);
  Ctx ctx = Context(pool, Device::kCuda, Profile::kSm90Mma);
  for (const Call& c : {s.whole, Cut(s, 899, 900, 16, 6, rng)}) {
    const Output first = RunForward(ctx, c);
    cudaStream_t streams[2];
    for (auto& stream : streams)
      ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    for (int i = 0; i < 20; ++i) {
      ctx.stream = streams[i % 2];
      const Output again = RunForward(ctx, c);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      ASSERT_EQ(FirstDifference(again.out, first.out), "") << i;
    }
    ctx.stream = nullptr;
    for (auto& stream : streams) EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  }
}

// Prefill, decode, generic and backward kernels in this process and in three that are started for
// it.
TEST_F(AttentionCuda, CudaFreshProcessesGiveTheSameBits) {
  ThreadPool pool(4);
  std::mt19937 rng(24);
  const Sequence s = LongSequence(900, rng), f32 = LongSequence(70, rng, DType::kF32);
  const Tensor dout = Random(DType::kBF16, s.whole.q.shape(), rng);
  const Ctx ctx = Context(pool, Device::kCuda, Profile::kSm90Mma);
  cuda::Digest digest;
  for (const Call& c : {s.whole, Cut(s, 899, 900, 16, 6, rng), f32.whole}) {
    const Output o = RunForward(ctx, c);
    digest.Add(o.out), digest.Add(o.lse2);
  }
  const Gradients g = RunBackward(ctx, s.whole, RunForward(ctx, s.whole), dout);
  digest.Add(g.dq), digest.Add(g.dk), digest.Add(g.dv);
  cuda::ExpectSameInFreshProcesses("AttentionCuda.CudaFreshProcessesGiveTheSameBits",
                                   digest.Finish());
}

// Captured once over pages and device runs, replayed as the sequences grow: the eager bits.
TEST_F(AttentionCuda, CudaGraphReplayGivesTheEagerBits) {
  ThreadPool pool(4);
  std::mt19937 rng(25);
  const Sequence s = LongSequence(1200, rng);
  const int64_t n = 1200, page = 16;
  const Call full = Cut(s, n - 1, n, page, 0, rng);
  Call c = full;
  const Params& p = c.params;
  Ctx ctx = Context(pool, Device::kCuda, Profile::kSm90Mma);
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  const Tensor k = To(c.k, Device::kCuda), v = To(c.v, Device::kCuda),
               table = To(c.table, Device::kCuda);
  Tensor q = To(c.q, Device::kCuda), out = To(c.q, Device::kCuda);
  Tensor runs = To(Make(DType::kU8, {static_cast<int64_t>(sizeof(attention::Run))}), Device::kCuda);
  const auto bytes = static_cast<int64_t>(WorkspaceBytes(ctx, p, 1, 1, c.max_pages * page));
  Tensor workspace = To(Poisoned(DType::kU8, {bytes + 1}), Device::kCuda);
  attention::Run at = c.runs[0];
  at.position = 100;
  std::vector<attention::Run> host = {at};
  Args a;
  a.tokens = 1, a.q = q.data(), a.out = out.mutable_data(), a.runs = host;
  a.device_runs = static_cast<const attention::Run*>(runs.data());
  a.kv = {.k = k.data(),
          .v = v.data(),
          .block_table = static_cast<const int32_t*>(table.data()),
          .table_rows = 1,
          .max_pages = c.max_pages,
          .num_pages = c.kv_rows / page,
          .page_size = page};
  ctx.stream = stream;
  ctx.workspace = workspace.mutable_data();
  ctx.workspace_bytes = static_cast<size_t>(bytes);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  const Status status = Forward(ctx, p, a);
  cudaGraph_t graph;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_TRUE(status.ok()) << status.ToString();
  cudaGraphExec_t exec;
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  const Output whole = RunForward(Context(pool, Device::kCuda, Profile::kSm90Mma), s.whole);
  const int64_t width = p.q_heads * p.head_dim;
  for (int64_t position : {0, 100, 127, 128, 511, 512, 700, 1024, 1199}) {
    at.position = position;
    ASSERT_EQ(cudaMemcpy(runs.mutable_data(), &at, sizeof(at), cudaMemcpyHostToDevice),
              cudaSuccess);
    ASSERT_EQ(cudaMemcpy(q.mutable_data(), s.whole.q.as<uint16_t>() + position * width,
                         static_cast<size_t>(width) * 2, cudaMemcpyHostToDevice),
              cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(FirstDifference(To(out, Device::kCpu), *whole.out.Slice(position, position + 1)), "")
        << position;
  }
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

// A score that is no number makes its row the canonical NaN and touches no other, as on the CPU.
TEST_F(AttentionCuda, CudaNanRowsAreTheCpus) {
  ThreadPool pool(8);
  std::mt19937 rng(27);
  for (int kind = 0; kind < 6; ++kind) {
    Sequence s = LongSequence(600, rng);
    const int64_t width = 8 * 128;
    const auto put = [&](int64_t row, float v) {
      for (int64_t x = 0; x < 128; ++x) Put(s.whole.q, row * width + 256 + x, v);
    };
    put(3, NAN), put(200, INFINITY), put(599, kind % 2 ? NAN : -INFINITY);
    if (kind >= 2) put(300, 3e38f), put(301, -3e38f);
    if (kind >= 4) s.whole.params.sink = true, s.whole.sink = Random(DType::kF32, {8}, rng);
    Call last = Cut(s, 599, 600, 16, 0, rng);
    last.sink = s.whole.sink;
    for (const Call& c : {s.whole, last}) {
      const Output gpu = RunForward(Context(pool, Device::kCuda, Profile::kSm90Mma), c);
      const Output cpu = RunForward(Context(pool, Device::kCpu, Profile::kSm90Mma), c);
      EXPECT_EQ(FirstDifference(gpu.out, cpu.out), "") << kind << " " << gpu.kernel;
      EXPECT_EQ(FirstDifference(gpu.lse2, cpu.lse2), "") << kind << " " << gpu.kernel;
    }
  }
}

// The last token of `runs` sequences of n tokens, f32, where every order of sums shows; sequence i
// is the same whatever the number of them.
Call LastTokens(int64_t n, int64_t runs, uint32_t seed) {
  Call c;
  Params& p = c.params;
  p.dtype = DType::kF32;
  p.q_heads = 4, p.kv_heads = 2, p.head_dim = 64;
  p.scale = 0.125f;
  c.tokens = runs, c.kv_rows = runs * n;
  c.q = Make(p.dtype, {runs, 256});
  c.k = Make(p.dtype, {c.kv_rows, 128});
  c.v = Make(p.dtype, {c.kv_rows, 128});
  for (int64_t i = 0; i < runs; ++i) {
    std::mt19937 rng(seed + static_cast<uint32_t>(i));
    for (auto [to, rows, width] : {std::tuple(&c.q, int64_t{1}, int64_t{256}),
                                   {&c.k, n, int64_t{128}},
                                   {&c.v, n, int64_t{128}}}) {
      const Tensor part = Random(p.dtype, {rows, width}, rng);
      std::memcpy(to->mutable_as<float>() + i * rows * width, part.data(),
                  static_cast<size_t>(rows * width) * 4);
    }
    c.runs.push_back({.q_begin = i, .q_rows = 1, .position = n - 1, .kv_begin = i * n});
  }
  return c;
}

// The comparisons above can fail, from both sides: each fault planted on the CPU is seen from the
// device, and each planted on the device from the CPU; without it both agree again.
TEST_F(AttentionCuda, CudaFaultsOnEitherSideAreSeenFromTheOther) {
  ThreadPool pool(8);
  std::mt19937 rng(29);
  struct Planted {
    const char* name;
    int64_t window;
    bool sink;
    float cap;
    int64_t n, from;
    DType dtype = DType::kBF16;
    int neighbours = 0;
    int64_t page = 16;
  };
  for (const Planted& f : std::initializer_list<Planted>{
           {"attention.window_off_by_one", 9, false, 0.0f, 40, 0},
           {"attention.sink_missing", 0, true, 0.0f, 40, 0},
           {"attention.softcap_missing", 0, false, 3.0f, 40, 0},
           {"attention.kv_fp8", 0, false, 0.0f, 40, 0},
           {"attention.decode_other_split", 0, false, 0.0f, 520, 519},
           {"attention.packed_leak", 0, false, 0.0f, 40, 39, DType::kBF16, 2, 0},
           // The reference is an integer: which tile set it shows only where P is not rounded.
           {"attention.tile_by_rows", 0, false, 0.0f, 130, 0, DType::kF32},
           {"attention.scale_q_first", 0, false, 0.0f, 40, 0}}) {
    Sequence s = LongSequence(f.n, rng, f.dtype);
    // Sharp scores: what changes by tile or split shows in many bits.
    s.whole.q = Random(f.dtype, s.whole.q.shape(), rng, 4.0f);
    s.whole.params.window = f.window;
    s.whole.params.softcap = f.cap;
    s.whole.params.sink = f.sink;
    if (f.sink) s.whole.sink = Random(DType::kF32, {8}, rng);
    Call c = f.from == 0 ? s.whole : Cut(s, f.from, f.n, f.page, f.neighbours, rng);
    c.sink = s.whole.sink;
    const Output gpu = RunForward(Context(pool, Device::kCuda, Profile::kSm90Mma), c);
    Ctx cpu = Context(pool, Device::kCpu, Profile::kSm90Mma);
    cpu.side = fault::Side::kRollout;
    Ctx device = Context(pool, Device::kCuda, Profile::kSm90Mma);
    device.side = fault::Side::kRollout;
    const Output clean = RunForward(cpu, c);
    const auto differs = [](const Output& x, const Output& y) {
      return FirstDifference(x.out, y.out) + FirstDifference(x.lse2, y.lse2);
    };
    EXPECT_EQ(differs(gpu, clean), "") << f.name;
    {
      const fault::Scoped planted(fmt::format("{}@rollout", f.name));
      EXPECT_NE(differs(gpu, RunForward(cpu, c)), "") << f.name << " on the CPU";
      EXPECT_NE(differs(RunForward(device, c), clean), "") << f.name << " on the device";
    }
    EXPECT_EQ(differs(RunForward(device, c), clean), "") << f.name << " stayed on";
  }
  {
    const Call c = LastTokens(1700, 2, 35);
    Ctx device = Context(pool, Device::kCuda, Profile::kSm90Mma);
    device.side = fault::Side::kRollout;
    const Output clean = RunForward(Context(pool, Device::kCpu, Profile::kSm90Mma), c);
    EXPECT_EQ(FirstDifference(RunForward(device, c).out, clean.out), "");
    const fault::Scoped planted("attention.split_by_batch@rollout");
    EXPECT_NE(FirstDifference(RunForward(device, c).out, clean.out), "");
  }
  // The sink's gradient, and K and V as the backward reads them.
  Sequence s = LongSequence(70, rng);
  s.whole.params.sink = true;
  s.whole.sink = Random(DType::kF32, {8}, rng);
  const Tensor dout = Random(DType::kBF16, s.whole.q.shape(), rng);
  const auto backward = [&](Device where) {
    const Output saved = RunForward(Context(pool, Device::kCpu, Profile::kSm90Mma), s.whole);
    Ctx ctx = Context(pool, where, Profile::kSm90Mma);
    ctx.side = fault::Side::kRollout;
    return RunBackward(ctx, s.whole, saved, dout);
  };
  const Gradients clean = backward(Device::kCpu);
  EXPECT_EQ(FirstDifference(backward(Device::kCuda).dsink, clean.dsink), "");
  {
    const fault::Scoped planted("attention.sink_gradient_missing@rollout");
    EXPECT_NE(FirstDifference(backward(Device::kCuda).dsink, clean.dsink), "");
  }
  {
    const fault::Scoped planted("attention.kv_fp8@rollout");
    EXPECT_NE(FirstDifference(backward(Device::kCuda).dq, clean.dq), "");
  }
  EXPECT_EQ(FirstDifference(backward(Device::kCuda).dq, clean.dq), "");
}

// The native arm follows the batch: a row alone and among others has other bits there, and the same
// bits with batch invariance. What the switch promises can fail.
TEST_F(AttentionCuda, CudaNativeArmChangesBitsWithTheBatch) {
  ThreadPool pool(4);
  const Call alone = LastTokens(1000, 1, 33), among = LastTokens(1000, 12, 33);
  for (const auto arm : {BatchInvariance::kOn, BatchInvariance::kOff}) {
    Ctx ctx = Context(pool, Device::kCuda, Profile::kSm90Mma);
    ctx.batch_invariance = arm;
    const Output one = RunForward(ctx, alone), many = RunForward(ctx, among);
    EXPECT_EQ(FirstDifference(one.out, *many.out.Slice(0, 1)).empty(), arm == BatchInvariance::kOn);
  }
}

// What cannot run says why.
TEST_F(AttentionCuda, CudaRefusesByName) {
  ThreadPool pool(1);
  std::mt19937 rng(31);
  const Sequence s = LongSequence(600, rng);
  const Tensor q = To(s.whole.q, Device::kCuda);
  Tensor out = To(s.whole.q, Device::kCuda);
  Args a;
  a.tokens = 600, a.q = a.kv.k = a.kv.v = q.data(), a.out = out.mutable_data();
  a.kv.rows = 600;
  a.runs = s.whole.runs;
  const Status status = Forward(Context(pool, Device::kCuda, Profile::kSm90Mma), s.whole.params, a);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("WorkspaceBytes"), std::string::npos) << status.ToString();
}

}  // namespace
}  // namespace tare::ops::attention
