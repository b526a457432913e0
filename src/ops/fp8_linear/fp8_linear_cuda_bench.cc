// fp8_linear beside our own bf16 linear and cuBLAS's bf16, in one process, cold cache.
//
//   fp8_linear_cuda_bench bits-small      small shapes of every path once: for memory checkers
//   fp8_linear_cuda_bench table OUT.json  Qwen3-8B's four shapes at 1,024, 4,096 and 8,192 rows

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdio>
#include <vector>

#include "base/env.h"
#include "ops/cuda/bench.h"
#include "ops/cuda/cublas_peer.h"
#include "ops/fp8_linear/fp8_linear.h"
#include "ops/linear/linear.h"
#include "tensor/cuda_status.h"

namespace tare::ops::fp8_linear {
namespace {

uint64_t g_state = 88172645463325252u;
uint64_t Next() {
  g_state ^= g_state << 13, g_state ^= g_state >> 7, g_state ^= g_state << 17;
  return g_state;
}

template <typename T, class Value>
Result<T*> Random(int64_t count, const Value& value) {
  std::vector<T> block(static_cast<size_t>(std::min<int64_t>(count, 1 << 22)));
  for (T& v : block) v = value();
  void* data = nullptr;
  TARE_CUDA_RETURN_IF_ERROR(cudaMalloc(&data, static_cast<size_t>(count) * sizeof(T)));
  for (int64_t at = 0; at < count; at += static_cast<int64_t>(block.size())) {
    const auto n = std::min<int64_t>(count - at, static_cast<int64_t>(block.size()));
    TARE_CUDA_RETURN_IF_ERROR(cudaMemcpy(static_cast<T*>(data) + at, block.data(),
                                         static_cast<size_t>(n) * sizeof(T),
                                         cudaMemcpyHostToDevice));
  }
  return static_cast<T*>(data);
}

struct Buffers {
  uint8_t *x8, *w8;
  uint16_t *x16, *w16, *y;
  float *xs, *ws, *workspace;
};

Result<Buffers> Allocate(int64_t m, int64_t n, int64_t k) {
  Buffers b = {};
  const auto code = [] { return static_cast<uint8_t>((Next() & 0x80) | (0x28 + Next() % 0x28)); };
  const auto half = [] {
    return static_cast<uint16_t>((Next() & 0x8000) | (0x3c00 + Next() % 0x480));
  };
  const auto scale = [] { return 0.01f + static_cast<float>(Next() % 1000) * 1e-5f; };
  TARE_ASSIGN_OR_RETURN(b.x8, Random<uint8_t>(m * k, code));
  TARE_ASSIGN_OR_RETURN(b.w8, Random<uint8_t>(n * k, code));
  TARE_ASSIGN_OR_RETURN(b.x16, Random<uint16_t>(m * k, half));
  TARE_ASSIGN_OR_RETURN(b.w16, Random<uint16_t>(n * k, half));
  TARE_ASSIGN_OR_RETURN(b.y, Random<uint16_t>(2 * m * n, half));
  TARE_ASSIGN_OR_RETURN(b.xs, Random<float>(m * (k / 128 + 1), scale));
  TARE_ASSIGN_OR_RETURN(b.ws, Random<float>((n / 128 + 1) * (k / 128 + 1), scale));
  return b;
}

Status RunFp8(const Buffers& b, cudaStream_t stream, int64_t m, int64_t n, int64_t k,
              int32_t segments = 1, void* workspace = nullptr, size_t workspace_bytes = 0) {
  Ctx ctx;
  ctx.device = Device::kCuda;
  ctx.profile = Profile::kSm90Mma;
  ctx.stream = stream;
  ctx.workspace = workspace;
  ctx.workspace_bytes = workspace_bytes;
  Params p;
  p.n = n, p.k = k, p.segments = segments;
  return Forward(ctx, p,
                 {.m = m, .x = b.x8, .x_scale = b.xs, .w = b.w8, .w_scale = b.ws, .y = b.y});
}

Status Main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "bits-small";
  TARE_ASSIGN_OR_RETURN(cuda::Bench bench, cuda::Bench::Create());
  TARE_ASSIGN_OR_RETURN(const std::string facts, cuda::DeviceFacts());
  std::printf("{%s}\n", facts.c_str());
  const cudaStream_t stream = bench.stream();
  if (mode == "bits-small") {
    TARE_ASSIGN_OR_RETURN(const Buffers b, Allocate(300, 300, 768));
    TARE_ASSIGN_OR_RETURN(float* const workspace,
                          Random<float>(4 * 300 * 300, [] { return 0.0f; }));
    for (const auto& [m, n, k] : {std::tuple(300, 300, 768), {17, 130, 400}, {5, 9, 33}}) {
      TARE_RETURN_IF_ERROR(RunFp8(b, stream, m, n, k));
      TARE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
    }
    TARE_RETURN_IF_ERROR(RunFp8(b, stream, 40, 200, 512, 4, workspace, size_t{4} * 300 * 300 * 4));
    TARE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
    std::printf("4 shapes ran\n");
    return Ok();
  }
  if (mode != "table" || argc < 3)
    return InvalidArgument("unknown mode {}; bits-small or table OUT.json", mode);
  TARE_ASSIGN_OR_RETURN(const auto peer, cuda::CublasPeer::Open());
  TARE_ASSIGN_OR_RETURN(const Buffers b, Allocate(8192, 24576, 12288));
  std::printf(
      "\n| shape | cuBLAS bf16 us | tare bf16 us | tare fp8 us (low-high) | TFLOP/s | fp8 over "
      "tare "
      "bf16 | over cuBLAS bf16 |\n|---|---|---|---|---|---|---|\n");
  std::string json = fmt::format(
      "{{\"schema\": \"tare.fp8_linear_cuda_bench.1\", {}, \"cublas\": \"{}\",\n\"rows\": [", facts,
      peer.version());
  double log_sum = 0, worst = 1e9;
  int count = 0;
  for (const auto& [n, k] :
       {std::pair<int64_t, int64_t>(6144, 4096), {4096, 4096}, {24576, 4096}, {4096, 12288}}) {
    for (const int64_t m : {1024, 4096, 8192}) {
      Ctx ctx;
      ctx.device = Device::kCuda;
      ctx.profile = Profile::kSm90Mma;
      ctx.stream = stream;
      linear::Params p;
      p.n = n, p.k = k;
      const int64_t nn = n, kk = k;
      const std::vector<cuda::Arm> arms = {
          {"fp8", [&, m] { return RunFp8(b, stream, m, nn, kk); }},
          {"bf16",
           [&, m] { return linear::Forward(ctx, p, {.m = m, .x = b.x16, .w = b.w16, .y = b.y}); }},
          {"cublas", [&, m] {
             return peer.Gemm(stream, false, false, m, nn, kk, b.x16, b.w16, b.y, false, false);
           }}};
      TARE_ASSIGN_OR_RETURN(const auto t, bench.Time(arms, 5, 7));
      const double flops = 2.0 * static_cast<double>(m) * static_cast<double>(n * k);
      const double gain = t[1].median_us / t[0].median_us;
      std::printf(
          "| M=%lld N=%lld K=%lld | %.1f | %.1f | %.1f (%.1f-%.1f) | %.0f | %.2f | %.2f |\n",
          (long long)m, (long long)n, (long long)k, t[2].median_us, t[1].median_us, t[0].median_us,
          t[0].low_us, t[0].high_us, flops / t[0].median_us * 1e-6, gain,
          t[2].median_us / t[0].median_us);
      std::fflush(stdout);
      json += fmt::format(
          "{}\n{{\"m\": {}, \"n\": {}, \"k\": {}, \"fp8_us\": {:.3f}, \"bf16_us\": {:.3f}, "
          "\"cublas_bf16_us\": {:.3f}}}",
          count == 0 ? "" : ",", m, n, k, t[0].median_us, t[1].median_us, t[2].median_us);
      log_sum += std::log(gain);
      worst = std::min(worst, gain);
      ++count;
    }
  }
  std::printf("fp8 over bf16: geometric mean %.3f, least %.3f\n", std::exp(log_sum / count), worst);
  json += "\n]}\n";
  return Env::Real()->WriteFileAtomic(argv[2], json);
}

}  // namespace
}  // namespace tare::ops::fp8_linear

int main(int argc, char** argv) {
  const tare::Status status = tare::ops::fp8_linear::Main(argc, argv);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 70;
}
