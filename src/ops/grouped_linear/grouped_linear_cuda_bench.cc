// grouped_linear beside cuBLAS called expert by expert, cuBLAS's grouped call, CUTLASS's grouped
// GEMM (where its headers were found at build time) and the byte limit, cold cache: 128 experts,
// top 8, Qwen3-30B-A3B's gate-up layer (1,536 x 2,048).
//
//   grouped_linear_cuda_bench bits-small      small shapes once: for memory checkers
//   grouped_linear_cuda_bench table OUT.json  64, 1,024 and 8,192 tokens, forward and dx

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "base/env.h"
#include "ops/cuda/bench.h"
#include "ops/cuda/bench_kernels.h"
#include "ops/cuda/cublas_peer.h"
#include "ops/dispatch/dispatch.h"
#include "ops/grouped_linear/grouped_linear.h"
#include "tensor/cuda_status.h"
#ifdef TARE_WITH_CUTLASS
#include "ops/grouped_linear/grouped_linear_cutlass.h"
#endif

namespace tare::ops::grouped_linear {
namespace {

uint64_t g_state = 88172645463325252u;
uint64_t Next() {
  g_state ^= g_state << 13, g_state ^= g_state >> 7, g_state ^= g_state << 17;
  return g_state;
}

Result<uint16_t*> RandomBf16(int64_t count) {
  std::vector<uint16_t> block(static_cast<size_t>(std::min<int64_t>(count, 1 << 22)));
  for (uint16_t& v : block)
    v = static_cast<uint16_t>((Next() & 0x8000) | (0x3c00 + Next() % 0x480));
  void* data = nullptr;
  TARE_CUDA_RETURN_IF_ERROR(cudaMalloc(&data, static_cast<size_t>(count) * 2));
  for (int64_t at = 0; at < count; at += static_cast<int64_t>(block.size())) {
    const auto n = std::min<int64_t>(count - at, static_cast<int64_t>(block.size()));
    TARE_CUDA_RETURN_IF_ERROR(cudaMemcpy(static_cast<uint16_t*>(data) + at, block.data(),
                                         static_cast<size_t>(n) * 2, cudaMemcpyHostToDevice));
  }
  return static_cast<uint16_t*>(data);
}

Status Main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "bits-small";
  const bool small = mode == "bits-small";
  if (!small && (mode != "table" || argc < 3))
    return InvalidArgument("unknown mode {}; bits-small or table OUT.json", mode);
  TARE_ASSIGN_OR_RETURN(cuda::Bench bench, cuda::Bench::Create());
  TARE_ASSIGN_OR_RETURN(const std::string facts, cuda::DeviceFacts());
  std::printf("{%s}\n", facts.c_str());
  const int64_t experts = small ? 7 : 128, top_k = small ? 2 : 8;
  Params p;
  p.experts = experts;
  p.linear.n = small ? 144 : 1536;
  p.linear.k = small ? 176 : 2048;
  const int64_t n = p.linear.n, k = p.linear.k;
  const int64_t most = small ? 100 : 8192;
  TARE_ASSIGN_OR_RETURN(uint16_t* const x, RandomBf16(most * top_k * k));
  TARE_ASSIGN_OR_RETURN(uint16_t* const w, RandomBf16(experts * n * k));
  TARE_ASSIGN_OR_RETURN(uint16_t* const y, RandomBf16(most * top_k * n));
  const size_t workspace_bytes = static_cast<size_t>(most * top_k * k * 2 + 4096);
  void* workspace = nullptr;
  TARE_CUDA_RETURN_IF_ERROR(cudaMalloc(&workspace, workspace_bytes));
  Ctx ctx;
  ctx.device = Device::kCuda;
  ctx.profile = Profile::kSm90Mma;
  ctx.stream = bench.stream();
  ctx.workspace = workspace;
  ctx.workspace_bytes = workspace_bytes;
  double copy = 1;
  Result<cuda::CublasPeer> peer = Unsupported("not asked for");
  if (!small) {
    peer = cuda::CublasPeer::Open();
    TARE_RETURN_IF_ERROR(peer.status());
    constexpr size_t kCopy = size_t{128} << 20;
    TARE_ASSIGN_OR_RETURN(
        const auto t,
        bench.Time({{"copy", [&] { return cuda::LaunchCopy(w, y, kCopy, ctx.stream); }}}, 4, 9));
    copy = 2.0 * static_cast<double>(kCopy) / (t[0].median_us * 1e-6);
    std::printf("copy %.3f TB/s\n", copy * 1e-12);
    std::printf(
        "\n| pass | tokens | rows | cuBLAS by expert us | cuBLAS grouped us | CUTLASS us | tare us "
        "(low-high) | ratio to the fastest | TFLOP/s | share of the byte limit | CUTLASS's tile "
        "|\n|---|---|---|---|---|---|---|---|---|---|---|\n");
  }
  std::string json = fmt::format(
      "{{\"schema\": \"tare.grouped_linear_cuda_bench.1\", {}, \"copy_bytes_per_s\": "
      "{:.4g},\n\"rows\": [",
      facts, copy);
  bool first = true;
  for (const int64_t tokens :
       small ? std::vector<int64_t>{3, 100} : std::vector<int64_t>{64, 1024, 8192}) {
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < tokens; ++t) {
      std::vector<int32_t> chosen;
      while (static_cast<int64_t>(chosen.size()) < top_k) {
        const auto e = static_cast<int32_t>(Next() % static_cast<uint64_t>(experts));
        bool fresh = true;
        for (const int32_t c : chosen) fresh = fresh && c != e;
        if (fresh) chosen.push_back(e);
      }
      ids.insert(ids.end(), chosen.begin(), chosen.end());
    }
    TARE_ASSIGN_OR_RETURN(const dispatch::Plan plan,
                          dispatch::BuildPlan(tokens, top_k, experts, ids.data()));
    const int64_t rows = plan.offsets.back();
    int64_t busy = 0;
    for (int64_t e = 0; e < experts; ++e)
      busy += plan.offsets[static_cast<size_t>(e + 1)] > plan.offsets[static_cast<size_t>(e)];
    for (const bool dx : {false, true}) {
      const auto ours = [&]() -> Status {
        if (!dx) {
          Args a;
          a.rows = a.x_rows = rows, a.offsets = plan.offsets, a.x = x, a.w = w, a.y = y;
          return Forward(ctx, p, a);
        }
        BackwardArgs b;
        b.rows = b.x_rows = rows, b.offsets = plan.offsets, b.dy = y, b.w = w, b.dx = x;
        return Backward(ctx, p, b);
      };
      if (small) {
        TARE_RETURN_IF_ERROR(ours());
        TARE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(bench.stream()));
        continue;
      }
      const auto theirs = [&]() -> Status {
        for (int64_t e = 0; e < experts; ++e) {
          const int64_t begin = plan.offsets[static_cast<size_t>(e)];
          const int64_t m = plan.offsets[static_cast<size_t>(e + 1)] - begin;
          if (m == 0) continue;
          TARE_RETURN_IF_ERROR(dx ? peer->Gemm(bench.stream(), false, true, m, k, n, y + begin * n,
                                               w + e * n * k, x + begin * k, false, false)
                                  : peer->Gemm(bench.stream(), false, false, m, n, k, x + begin * k,
                                               w + e * n * k, y + begin * n, false, false));
        }
        return Ok();
      };
      std::vector<cuda::CublasPeer::Group> groups;
      for (int64_t e = 0; e < experts; ++e) {
        const int64_t begin = plan.offsets[static_cast<size_t>(e)];
        groups.push_back({plan.offsets[static_cast<size_t>(e + 1)] - begin,
                          dx ? y + begin * n : x + begin * k, w + e * n * k,
                          dx ? x + begin * k : y + begin * n});
      }
      TARE_ASSIGN_OR_RETURN(const auto call, peer->MakeGroups(dx, dx ? k : n, dx ? n : k, groups));
      const auto grouped = [&] { return peer->GemmGrouped(bench.stream(), call); };
      std::vector<cuda::Arm> arms = {{"tare", ours}, {"cublas", theirs}, {"grouped", grouped}};
#ifdef TARE_WITH_CUTLASS
      TARE_ASSIGN_OR_RETURN(const auto cutlass,
                            MakeCutlassCalls(dx, dx ? k : n, dx ? n : k, groups));
      for (const CutlassCall& c : cutlass)
        arms.push_back({c.tile, [&bench, &c] { return c.run(bench.stream()); }});
#endif
      // A library that cannot capture its grouped call is left out of the table, not of the JSON.
      auto timed = bench.Time(arms, 4, 7);
      if (!timed.ok()) {
        std::printf("grouped calls: %s\n", timed.status().ToString().c_str());
        arms.resize(2);
        timed = bench.Time(arms, 4, 7);
        TARE_RETURN_IF_ERROR(timed.status());
      }
      const auto& t = *timed;
      cuda::Timing group_time, cutlass_time;
      std::string tile = "-";
      if (t.size() > 2) group_time = t[2];
      double fastest = t[1].median_us;
      if (t.size() > 2) fastest = std::min(fastest, group_time.median_us);
      for (size_t i = 3; i < t.size(); ++i) {
        if (i > 3 && t[i].median_us >= cutlass_time.median_us) continue;
        cutlass_time = t[i], tile = arms[i].name;
      }
      if (t.size() > 3) fastest = std::min(fastest, cutlass_time.median_us);
      const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(n * k);
      const double bytes = 2.0 * static_cast<double>(busy * n * k + rows * (n + k));
      std::printf(
          "| %s | %lld | %lld | %.1f | %.1f | %.1f | %.1f (%.1f-%.1f) | %.2f | %.0f | %.2f | %s "
          "|\n",
          dx ? "dx" : "fwd", (long long)tokens, (long long)rows, t[1].median_us,
          group_time.median_us, cutlass_time.median_us, t[0].median_us, t[0].low_us, t[0].high_us,
          t[0].median_us / fastest, flops / t[0].median_us * 1e-6,
          bytes / (t[0].median_us * 1e-6) / copy, tile.c_str());
      std::fflush(stdout);
      json += fmt::format(
          "{}\n{{\"pass\": \"{}\", \"tokens\": {}, \"rows\": {}, \"us\": {:.3f}, "
          "\"cublas_by_expert_us\": {:.3f}, \"cublas_grouped_us\": {:.3f}, \"cutlass_us\": {:.3f}, "
          "\"cutlass_tile\": \"{}\", \"bytes\": {:.0f}, \"flops\": {:.0f}}}",
          first ? "" : ",", dx ? "dx" : "fwd", tokens, rows, t[0].median_us, t[1].median_us,
          group_time.median_us, cutlass_time.median_us, tile, bytes, flops);
      first = false;
    }
  }
  if (small) {
    std::printf("4 calls ran\n");
    return Ok();
  }
  json += "\n]}\n";
  return Env::Real()->WriteFileAtomic(argv[2], json);
}

}  // namespace
}  // namespace tare::ops::grouped_linear

int main(int argc, char** argv) {
  const tare::Status status = tare::ops::grouped_linear::Main(argc, argv);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 70;
}
