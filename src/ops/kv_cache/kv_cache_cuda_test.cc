// kv_cache on a GPU: random runs, pages and dtypes give the CPU's pages byte for byte, and a value
// that is not finite sets the flag. Skipped on a machine without a Hopper GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "ops/kv_cache/kv_cache.h"
#include "tensor/device_memory.h"
#include "tensor/tensor.h"

namespace tare::ops::kv_cache {
namespace {

class KvCacheCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!CudaDeviceReady()) GTEST_SKIP() << "no CUDA device of compute capability 9.0";
  }
};

Tensor To(const Tensor& t, Device device) {
  auto copy = t.To(device);
  TARE_CHECK(copy.ok()) << copy.status().ToString();
  return *copy;
}
Tensor Bytes(int64_t count, std::mt19937& rng, DType dtype) {
  auto t = Tensor::Allocate(DType::kU8, {std::max<int64_t>(1, count)});
  TARE_CHECK(t.ok());
  for (int64_t i = 0; i < t->elements(); ++i)
    t->mutable_as<uint8_t>()[i] = static_cast<uint8_t>(rng());
  // No exponent of all ones: the top byte of every element loses a bit of it.
  const int64_t size = SizeOf(dtype);
  for (int64_t i = size - 1; i < t->elements(); i += size) t->mutable_as<uint8_t>()[i] &= 0xbf;
  return *t;
}

TEST_F(KvCacheCuda, RandomRunsGiveTheCpusPages) {
  std::mt19937 rng(3);
  ThreadPool pool(1);
  for (int round = 0; round < 1000; ++round) {
    Params p;
    p.kv_heads = 1 + static_cast<int64_t>(rng() % 4);
    p.head_dim = rng() % 2 == 0 ? 64 : 1 + static_cast<int64_t>(rng() % 70);
    p.dtype = rng() % 3 == 0 ? DType::kF32 : rng() % 2 == 0 ? DType::kBF16 : DType::kF16;
    const int64_t row = p.kv_heads * p.head_dim, size = SizeOf(p.dtype);
    Args a;
    a.page_size = 1 + static_cast<int64_t>(rng() % 20);
    a.table_rows = 1 + static_cast<int64_t>(rng() % 150);
    a.max_pages = 1 + static_cast<int64_t>(rng() % 5);
    a.num_pages = a.table_rows * a.max_pages + 2;
    std::vector<int32_t> table(static_cast<size_t>(a.num_pages));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), rng);
    auto host_table = Tensor::Allocate(DType::kI32, {a.table_rows * a.max_pages});
    ASSERT_TRUE(host_table.ok());
    std::copy_n(table.begin(), a.table_rows * a.max_pages, host_table->mutable_as<int32_t>());
    std::vector<attention::Run> runs;
    for (int64_t b = 0; b < a.table_rows; ++b) {
      const int64_t room = a.max_pages * a.page_size;
      const auto rows =
          static_cast<int64_t>(rng() % static_cast<uint32_t>(std::min<int64_t>(room, 9) + 1));
      attention::Run r;
      r.q_begin = a.tokens + static_cast<int64_t>(rng() % 2);
      r.q_rows = rows;
      r.position = static_cast<int64_t>(rng() % static_cast<uint32_t>(room - rows + 1));
      r.block_row = static_cast<int32_t>(b);
      a.tokens = r.q_begin + rows;
      runs.push_back(r);
    }
    a.runs = runs;
    a.k_stride = row + static_cast<int64_t>(rng() % 2) * 8;
    a.v_stride = row;
    const Tensor k = Bytes(a.tokens * a.k_stride * size, rng, p.dtype);
    const Tensor v = Bytes(a.tokens * a.v_stride * size, rng, p.dtype);
    const Tensor pages = Bytes(a.num_pages * a.page_size * row * size, rng, p.dtype);
    Tensor k_pages = *pages.Clone(), v_pages = *pages.Clone();
    Tensor k_there = To(pages, Device::kCuda), v_there = To(pages, Device::kCuda);
    const Tensor k_in = To(k, Device::kCuda), v_in = To(v, Device::kCuda),
                 table_in = To(*host_table, Device::kCuda);
    Args cpu = a;
    cpu.k = k.data(), cpu.v = v.data();
    cpu.block_table = host_table->as<int32_t>();
    cpu.k_pages = k_pages.mutable_data(), cpu.v_pages = v_pages.mutable_data();
    const Status on_cpu = Forward({.pool = &pool}, p, cpu);
    ASSERT_TRUE(on_cpu.ok()) << on_cpu.ToString();
    Args gpu = a;
    gpu.k = k_in.data(), gpu.v = v_in.data();
    gpu.block_table = static_cast<const int32_t*>(table_in.data());
    gpu.k_pages = k_there.mutable_data(), gpu.v_pages = v_there.mutable_data();
    Tensor flag = To(*Tensor::Allocate(DType::kI32, {1}), Device::kCuda);
    gpu.nonfinite_flag = static_cast<int32_t*>(flag.mutable_data());
    const Status on_gpu = Forward({.device = Device::kCuda}, p, gpu);
    ASSERT_TRUE(on_gpu.ok()) << on_gpu.ToString();
    const auto bytes = static_cast<size_t>(pages.size_bytes());
    EXPECT_EQ(std::memcmp(To(k_there, Device::kCpu).data(), k_pages.data(), bytes), 0) << round;
    EXPECT_EQ(std::memcmp(To(v_there, Device::kCpu).data(), v_pages.data(), bytes), 0) << round;
    EXPECT_EQ(To(flag, Device::kCpu).as<int32_t>()[0], 0) << round;
    std::vector<const attention::Run*> busy;
    for (const attention::Run& r : runs) {
      if (r.q_rows > 0) busy.push_back(&r);
    }
    if (busy.empty()) continue;
    // One value that is not finite, anywhere in K or in V.
    const bool in_v = rng() % 2 == 0;
    const attention::Run& r = *busy[rng() % busy.size()];
    const int64_t token = r.q_begin + static_cast<int64_t>(rng() % static_cast<uint32_t>(r.q_rows));
    const int64_t at = token * (in_v ? a.v_stride : a.k_stride) +
                       static_cast<int64_t>(rng() % static_cast<uint32_t>(row));
    uint32_t value = p.dtype == DType::kF32    ? 0x7f800000u
                     : p.dtype == DType::kBF16 ? 0x7f80u
                                               : 0x7c00u;
    value |= rng() % 2 << (8 * size - 1);       // of either sign
    value |= static_cast<uint32_t>(rng() % 2);  // an infinity or a NaN
    Tensor bad = *(in_v ? v : k).Clone();
    std::memcpy(static_cast<char*>(bad.mutable_data()) + at * size, &value,
                static_cast<size_t>(size));
    const Tensor bad_in = To(bad, Device::kCuda);
    (in_v ? gpu.v : gpu.k) = bad_in.data();
    ASSERT_TRUE(Forward({.device = Device::kCuda}, p, gpu).ok());
    EXPECT_EQ(To(flag, Device::kCpu).as<int32_t>()[0], 1)
        << round << (in_v ? " v" : " k") << " element " << at;
  }
}

// The operator's planted faults on the device are seen in its pages from the CPU.
TEST_F(KvCacheCuda, CudaFaultsOnTheDeviceAreSeenFromTheCpu) {
  ThreadPool pool(1);
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    std::mt19937 rng(11);
    Params p;
    p.kv_heads = 2, p.head_dim = 64, p.dtype = dtype;
    const int64_t row = 128, size = SizeOf(dtype);
    Args a;
    a.page_size = 4, a.table_rows = 1, a.max_pages = 5, a.num_pages = 5, a.tokens = 7;
    const attention::Run run{.q_rows = 7, .position = 9};
    a.runs = {&run, 1};
    auto table = Tensor::Allocate(DType::kI32, {5});
    ASSERT_TRUE(table.ok());
    for (int i = 0; i < 5; ++i) table->mutable_as<int32_t>()[i] = 4 - i;
    const Tensor k = Bytes(a.tokens * row * size, rng, dtype),
                 v = Bytes(a.tokens * row * size, rng, dtype),
                 pages = Bytes(a.num_pages * a.page_size * row * size, rng, dtype);
    const auto pages_of = [&](Device where) {
      const Tensor k_in = To(k, where), v_in = To(v, where), table_in = To(*table, where);
      Tensor k_pages = To(*pages.Clone(), where), v_pages = To(*pages.Clone(), where);
      Args call = a;
      call.k = k_in.data(), call.v = v_in.data();
      call.block_table = static_cast<const int32_t*>(table_in.data());
      call.k_pages = k_pages.mutable_data(), call.v_pages = v_pages.mutable_data();
      const Status s =
          Forward({.pool = &pool, .device = where, .side = fault::Side::kRollout}, p, call);
      EXPECT_TRUE(s.ok()) << s.ToString();
      const Tensor k_out = To(k_pages, Device::kCpu), v_out = To(v_pages, Device::kCpu);
      const auto text = [](const Tensor& t) {
        return std::string(static_cast<const char*>(t.data()), static_cast<size_t>(t.size_bytes()));
      };
      return text(k_out) + text(v_out);
    };
    const std::string clean = pages_of(Device::kCpu);
    EXPECT_EQ(pages_of(Device::kCuda), clean);
    for (const char* name : {"kv_cache.write_fp8", "kv_cache.chunk_local_position"}) {
      const fault::Scoped planted(std::string(name) + "@rollout");
      const std::string faulty = pages_of(Device::kCuda);
      EXPECT_NE(faulty, clean) << name;
      // The same defect on the CPU: the device plants what the catalogue means.
      EXPECT_EQ(faulty, pages_of(Device::kCpu)) << name;
    }
    EXPECT_EQ(pages_of(Device::kCuda), clean);
  }
}

}  // namespace
}  // namespace tare::ops::kv_cache
