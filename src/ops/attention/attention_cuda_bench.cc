// attention on CUDA: times and bits.
//
//   attention_cuda_bench bits-small      every Hopper kernel in little memory, for memory checkers
//   attention_cuda_bench table OUT.json  times of all points, ours alone
//   attention_cuda_bench serve           reads lines "prefill N", "decode B N", "backward N" and
//                                        prints one JSON line of times for each: what
//                                        scripts/attention_peer.py takes turns with
//
// Shapes: bf16, head 128, 32 query and 8 KV heads, causal. Prefill and backward: one packed
// sequence of N tokens. Decode: B sequences of N tokens over shuffled pages of 16, cold L2.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/env.h"
#include "ops/attention/attention.h"
#include "ops/cuda/bench.h"
#include "ops/cuda/bench_kernels.h"
#include "ops/trace.h"
#include "tensor/convert.h"
#include "tensor/cuda_status.h"

namespace tare::ops::attention {
namespace {

using cuda::Bench;
using cuda::Timing;

// Device memory that lives as long as its case.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    for (void* p : pieces_) cudaFree(p);
  }
  Result<void*> Take(size_t bytes) {
    void* p = nullptr;
    TARE_CUDA_RETURN_IF_ERROR(cudaMalloc(&p, std::max<size_t>(bytes, 256)));
    pieces_.push_back(p);
    return p;
  }
  template <class T>
  Result<T*> Copy(const std::vector<T>& host) {
    TARE_ASSIGN_OR_RETURN(void* p, Take(host.size() * sizeof(T)));
    TARE_CUDA_RETURN_IF_ERROR(
        cudaMemcpy(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    return static_cast<T*>(p);
  }
  // Normal-like bf16 values: a block of a million of them, again and again.
  Result<void*> Random(size_t count, uint64_t seed) {
    std::vector<uint16_t> block(std::min<size_t>(count, size_t{1} << 20));
    uint64_t s = seed * 0x9E3779B97F4A7C15ull + 1;
    for (uint16_t& value : block) {
      s ^= s << 13, s ^= s >> 7, s ^= s << 17;
      float sum = 0;
      for (int shift = 0; shift < 64; shift += 16)
        sum += static_cast<float>(static_cast<int>(s >> shift & 0xFFFF) - 32768);
      value = F32ToBf16(sum / 37837.0f);
    }
    TARE_ASSIGN_OR_RETURN(void* p, Take(count * 2));
    for (size_t at = 0; at < count; at += block.size()) {
      const size_t part = std::min(block.size(), count - at);
      TARE_CUDA_RETURN_IF_ERROR(cudaMemcpy(static_cast<uint16_t*>(p) + at, block.data(), part * 2,
                                           cudaMemcpyHostToDevice));
    }
    return p;
  }

 private:
  std::vector<void*> pieces_;
};

struct Point {
  std::string kind;  // prefill, decode or backward
  int64_t batch = 1, n = 0;
  int64_t kv_tile = 128, kv_split = 0;  // 0: the default
  float scale = 1.0f;                   // of the scores, beside 1 / sqrt(d)
};

Params ParamsOf(const Point& point) {
  Params p;
  p.q_heads = 32, p.kv_heads = 8, p.head_dim = 128;
  p.scale = point.scale / std::sqrt(128.0f);
  p.kv_tile = point.kv_tile;
  if (point.kv_split != 0) p.kv_split = point.kv_split;
  return p;
}

// One call, ready to be enqueued again and again.
struct Ready {
  Arena arena;
  std::vector<Run> runs;
  std::function<Status()> call;
  double flops = 0, bytes = 0;
  void* out = nullptr;
};

Status Prepare(const Point& point, cudaStream_t stream, Ready& r) {
  const Params p = ParamsOf(point);
  const bool decode = point.kind == "decode";
  const int64_t rows = decode ? point.batch : point.n, width = p.q_heads * p.head_dim,
                kv_width = p.kv_heads * p.head_dim;
  constexpr int64_t kPage = 16;
  const int64_t pages = (point.n + kPage - 1) / kPage;
  const int64_t kv_rows = decode ? point.batch * pages * kPage : point.n;
  Ctx ctx;
  ctx.device = Device::kCuda;
  ctx.profile = Profile::kSm90Mma;
  ctx.stream = stream;
  TARE_ASSIGN_OR_RETURN(void* q, r.arena.Random(static_cast<size_t>(rows * width), 1));
  TARE_ASSIGN_OR_RETURN(void* k, r.arena.Random(static_cast<size_t>(kv_rows * kv_width), 2));
  TARE_ASSIGN_OR_RETURN(void* v, r.arena.Random(static_cast<size_t>(kv_rows * kv_width), 3));
  TARE_ASSIGN_OR_RETURN(r.out, r.arena.Take(static_cast<size_t>(rows * width) * 2));
  TARE_ASSIGN_OR_RETURN(void* lse2, r.arena.Take(static_cast<size_t>(rows * p.q_heads) * 4));
  if (decode) {
    for (int64_t b = 0; b < point.batch; ++b)
      r.runs.push_back({.q_begin = b,
                        .q_rows = 1,
                        .position = point.n - 1,
                        .block_row = static_cast<int32_t>(b)});
  } else {
    r.runs.push_back({.q_rows = point.n});
  }
  TARE_ASSIGN_OR_RETURN(const Run* device_runs, r.arena.Copy(r.runs));
  Args a;
  a.tokens = rows, a.q = q, a.out = r.out, a.lse2 = static_cast<float*>(lse2);
  a.runs = r.runs, a.device_runs = device_runs;
  a.kv.k = k, a.kv.v = v;
  if (decode) {
    std::vector<int32_t> table(static_cast<size_t>(point.batch * pages));
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
    std::mt19937 rng(7);
    std::shuffle(table.begin(), table.end(), rng);
    TARE_ASSIGN_OR_RETURN(a.kv.block_table, r.arena.Copy(table));
    a.kv.table_rows = point.batch, a.kv.max_pages = pages;
    a.kv.num_pages = point.batch * pages, a.kv.page_size = kPage;
  } else {
    a.kv.rows = point.n;
  }
  const size_t bytes =
      std::max(WorkspaceBytes(ctx, p, rows, static_cast<int64_t>(r.runs.size()), point.n),
               BackwardWorkspaceBytes(ctx, p, rows, 1, point.n));
  TARE_ASSIGN_OR_RETURN(ctx.workspace, r.arena.Take(bytes));
  ctx.workspace_bytes = bytes;
  const double pairs = decode ? static_cast<double>(point.batch) * static_cast<double>(point.n)
                              : static_cast<double>(point.n) * static_cast<double>(point.n) / 2;
  r.flops = 4.0 * pairs * static_cast<double>(width);
  r.bytes = static_cast<double>(kv_rows * kv_width) * 4 + static_cast<double>(rows * width) * 4;
  r.call = [ctx, p, a] { return Forward(ctx, p, a); };
  if (point.kind != "backward") return Ok();
  TARE_RETURN_IF_ERROR(r.call());
  TARE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
  BackwardArgs g;
  g.tokens = rows, g.q = q, g.k = k, g.v = v, g.kv_rows = kv_rows, g.out = r.out;
  g.lse2 = a.lse2;
  g.runs = r.runs, g.device_runs = device_runs;
  TARE_ASSIGN_OR_RETURN(g.dout, r.arena.Random(static_cast<size_t>(rows * width), 4));
  TARE_ASSIGN_OR_RETURN(g.dq, r.arena.Take(static_cast<size_t>(rows * width) * 2));
  TARE_ASSIGN_OR_RETURN(g.dk, r.arena.Take(static_cast<size_t>(kv_rows * kv_width) * 2));
  TARE_ASSIGN_OR_RETURN(g.dv, r.arena.Take(static_cast<size_t>(kv_rows * kv_width) * 2));
  r.flops *= 2.5;
  r.call = [ctx, p, g] { return Backward(ctx, p, g); };
  return Ok();
}

// Calls in one graph: enough to run for some milliseconds.
int Calls(const Ready& r) {
  const double us = std::max(r.flops / 5e8, r.bytes / 3e6);
  return static_cast<int>(std::clamp(4000.0 / (us + 5), 2.0, 40.0));
}

Result<Timing> Time(Bench& bench, const Point& point, const Ready& r) {
  const auto flush = point.kind == "decode" ? Bench::Flush::kRead : Bench::Flush::kNone;
  TARE_ASSIGN_OR_RETURN(const auto times, bench.Time({{point.kind, r.call}}, Calls(r), 7, flush));
  return times[0];
}

std::string Name(const Point& p) {
  return p.kind == "decode" ? fmt::format("decode B={} N={}", p.batch, p.n)
                            : fmt::format("{} N={}", p.kind, p.n);
}

std::string Json(const Point& p, const Ready& r, const Timing& t) {
  return fmt::format(
      "{{\"kind\": \"{}\", \"batch\": {}, \"n\": {}, \"kv_split\": {}, \"us\": [{:.3f}, {:.3f}, "
      "{:.3f}], \"flops\": {:.0f}, \"bytes\": {:.0f}}}",
      p.kind, p.batch, p.n, ParamsOf(p).kv_split, t.low_us, t.median_us, t.high_us, r.flops,
      r.bytes);
}

std::vector<Point> Points() {
  std::vector<Point> points;
  for (const int64_t n : {1024, 2048, 4096, 8192, 16384}) points.push_back({"prefill", 1, n});
  for (const int64_t b : {1, 8, 64}) {
    for (const int64_t n : {1024, 4096, 32768}) points.push_back({"decode", b, n});
  }
  for (const int64_t n : {1024, 4096, 8192, 16384}) points.push_back({"backward", 1, n});
  return points;
}

Status Table(Bench& bench, const std::string& facts, const std::string& path) {
  std::string json =
      fmt::format("{{\"schema\": \"tare.attention_cuda_bench.1\", {},\n\"rows\": [", facts);
  std::printf("| point | us, median (low, high) | TFLOP/s | TB/s |\n|---|---|---|---|\n");
  bool first = true;
  for (const Point& point : Points()) {
    Ready r;
    TARE_RETURN_IF_ERROR(Prepare(point, bench.stream(), r));
    TARE_ASSIGN_OR_RETURN(const Timing t, Time(bench, point, r));
    std::printf("| %s | %.1f (%.1f, %.1f) | %.0f | %.2f |\n", Name(point).c_str(), t.median_us,
                t.low_us, t.high_us, r.flops / t.median_us / 1e6, r.bytes / t.median_us / 1e6);
    std::fflush(stdout);
    json += (first ? "\n" : ",\n") + Json(point, r, t);
    first = false;
  }
  json += "\n]}\n";
  return Env::Real()->WriteFileAtomic(path, json);
}

Status Serve(Bench& bench) {
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    Point point;
    words >> point.kind;
    if (point.kind == "decode") words >> point.batch;
    if (!(words >> point.n)) return InvalidArgument("cannot read a point from \"{}\"", line);
    words >> point.kv_split;
    Ready r;
    TARE_RETURN_IF_ERROR(Prepare(point, bench.stream(), r));
    TARE_ASSIGN_OR_RETURN(const Timing t, Time(bench, point, r));
    std::cout << Json(point, r, t) << std::endl;
  }
  return Ok();
}

// Every Hopper kernel at lengths around its tiles; a prefill twice, with equal bits, every other
// one with scores whose references move.
Status Bits(Bench& bench) {
  int64_t differ = 0, compared = 0;
  for (const int64_t n : {1, 100, 128, 300, 513, 640, 813}) {
    Ready prefill, again;
    const Point point{.kind = "prefill", .n = n, .scale = n % 2 == 0 ? 1.0f : 16.0f};
    for (Ready* r : {&prefill, &again}) {
      TARE_RETURN_IF_ERROR(Prepare(point, bench.stream(), *r));
      TARE_RETURN_IF_ERROR(r->call());
    }
    Ready decode, backward;
    TARE_RETURN_IF_ERROR(Prepare({"decode", 2, n}, bench.stream(), decode));
    TARE_RETURN_IF_ERROR(decode.call());
    TARE_RETURN_IF_ERROR(Prepare({"backward", 1, n}, bench.stream(), backward));
    TARE_RETURN_IF_ERROR(backward.call());
    TARE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(bench.stream()));
    std::vector<uint16_t> x(static_cast<size_t>(n) * 4096), y = x;
    TARE_CUDA_RETURN_IF_ERROR(
        cudaMemcpy(x.data(), prefill.out, x.size() * 2, cudaMemcpyDeviceToHost));
    TARE_CUDA_RETURN_IF_ERROR(
        cudaMemcpy(y.data(), again.out, y.size() * 2, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < x.size(); ++i) differ += x[i] != y[i];
    compared += static_cast<int64_t>(x.size());
  }
  // Decode by clusters of every kind, and by the kernel that takes item after item.
  for (const auto& [batch, n] :
       {std::pair<int64_t, int64_t>{3, 640}, {1, 1700}, {5, 600}, {20, 100}}) {
    Ready decode;
    TARE_RETURN_IF_ERROR(Prepare({"decode", batch, n}, bench.stream(), decode));
    TARE_RETURN_IF_ERROR(decode.call());
    TARE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(bench.stream()));
  }
  std::printf("%lld comparisons, %lld differ\n", static_cast<long long>(compared),
              static_cast<long long>(differ));
  if (differ != 0) return Error(Code::kInternal, "bits differ between two runs of one call");
  return Ok();
}

Status Main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  TARE_ASSIGN_OR_RETURN(Bench bench, Bench::Create());
  TARE_ASSIGN_OR_RETURN(const std::string facts, cuda::DeviceFacts());
  if (mode == "serve") return Serve(bench);
  std::printf("{%s}\n", facts.c_str());
  if (mode == "bits-small") return Bits(bench);
  if (mode == "table" && argc > 2) return Table(bench, facts, argv[2]);
  return InvalidArgument("unknown mode \"{}\"; bits-small, table OUT.json or serve", mode);
}

}  // namespace
}  // namespace tare::ops::attention

int main(int argc, char** argv) {
  const tare::Status status = tare::ops::attention::Main(argc, argv);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 70;
}
