// tare bench contractions: linear and attention on this CPU against what the same machine reaches
// in the same run: its read bandwidth, its FMA rate and, where the library is installed, OpenBLAS.

#include <dlfcn.h>
#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <vector>

#include "base/json.h"
#include "base/thread_pool.h"
#include "command.h"
#include "ops/attention/attention.h"
#include "ops/linear/gemm_kernels.h"
#include "ops/linear/linear.h"

namespace tare {
namespace {

struct Options {
  int threads = 1;
  int rounds = 7;
  bool json = false;
  bool cpu_time = false;
  std::string filter;
};

bool Wanted(const Options& o, const std::string& name) {
  return name.find(o.filter) != std::string::npos;
}

// By the process's CPU time a busy machine does not count.
double Seconds(const Options& o) {
  timespec t;
  clock_gettime(o.cpu_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

// The best time of each, taken in turn so that a slow moment of the machine meets all of them.
std::vector<double> Interleaved(const Options& o, int rounds,
                                const std::vector<std::function<void()>>& bodies) {
  std::vector<double> best(bodies.size(), 1e30);
  for (int r = 0; r < rounds; ++r) {
    for (size_t i = 0; i < bodies.size(); ++i) {
      for (int again = 0; again < 2; ++again) {
        const double start = Seconds(o);
        bodies[i]();
        best[i] = std::min(best[i], Seconds(o) - start);
      }
    }
  }
  return best;
}

using Sgemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int,
                       float, float*, int);

// cblas_sgemm of an installed OpenBLAS, or null. Only a bench may look at another library's
// arithmetic.
Sgemm FindSgemm(int threads) {
  void* library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return nullptr;
  if (auto set = reinterpret_cast<void (*)(int)>(dlsym(library, "openblas_set_num_threads")))
    set(threads);
  return reinterpret_cast<Sgemm>(dlsym(library, "cblas_sgemm"));
}

volatile float sink;

// Reads a buffer larger than any cache: the read bandwidth of the threads.
void ReadAll(ThreadPool& pool, const void* data, int64_t bytes) {
  const auto* words = static_cast<const uint64_t*>(data);
  pool.ParallelRanges(bytes / 8, int64_t{1} << 17, [&](int64_t begin, int64_t end) {
    if (ops::gemm::ReadLoop(words + begin, end - begin) == 42) sink = 1.0f;
  });
}

struct Row {
  std::string name;
  std::string value;
  std::string against;
};

void Print(const Options& o, Json& out, const Row& row) {
  out["rows"].push_back(Json{{"name", row.name}, {"value", row.value}, {"against", row.against}});
  if (!o.json)
    std::printf("%-44s %-28s %s\n", row.name.c_str(), row.value.c_str(), row.against.c_str());
}

// An FMA loop on every thread, and its products a second.
constexpr int64_t kFmaRounds = 1 << 16;
void FmaAll(ThreadPool& pool) {
  pool.ParallelFor(pool.threads(), [&](int64_t) { sink = ops::gemm::FmaLoop(kFmaRounds); });
}
double FmaRate(const Options& o, double seconds) {
  return o.threads * static_cast<double>(ops::gemm::FmaLoopProducts(kFmaRounds)) / seconds;
}

void BenchLinear(const Options& o, ThreadPool& pool, Sgemm sgemm, Json& out) {
  for (const auto& shape : {std::pair<int64_t, int64_t>{960, 576},
                            {3072, 576},
                            {576, 1536},
                            {4096, 1024},
                            {1024, 3072},
                            {6144, 4096},
                            {4096, 12288}}) {
    const int64_t n = shape.first, k = shape.second;
    const auto name = [&](std::string_view step, int64_t m) {
      return fmt::format("linear {} bf16 M={} N={} K={}", step, m, n, k);
    };
    constexpr int64_t kRows[] = {1, 4, 8, 64, 256, 512};
    if (std::none_of(std::begin(kRows), std::end(kRows), [&](int64_t m) {
          return Wanted(o, name("ieee", m)) || (m > 8 && Wanted(o, name("sm90", m)));
        })) {
      continue;
    }
    std::vector<uint16_t> w(static_cast<size_t>(n * k));
    uint32_t state = 1;
    for (auto& v : w) {
      state = state * 1664525u + 1013904223u;
      v = static_cast<uint16_t>(0x3c00u + (state >> 24) + (state & 0x8000u));
    }
    std::vector<float> wf(w.size());
    for (size_t i = 0; i < w.size(); ++i)
      wf[i] = __builtin_bit_cast(float, static_cast<uint32_t>(w[i]) << 16);
    // Enough copies of the weight that a decode step never finds it in a cache of its own.
    const int64_t copies = std::clamp<int64_t>((int64_t{1} << 29) / (n * k * 2), 1, 256);
    std::vector<ops::linear::PackedWeight> packed;
    packed.reserve(static_cast<size_t>(copies));
    for (int64_t i = 0; i < copies; ++i) {
      packed.push_back(*ops::linear::PackedWeight::Pack(&pool, w.data(), DType::kBF16, n, k));
    }
    const auto mma =
        *ops::linear::PackedWeight::Pack(&pool, w.data(), DType::kBF16, n, k, Profile::kSm90Mma);
    for (int64_t m : kRows) {
      if (!Wanted(o, name("ieee", m)) && (m <= 8 || !Wanted(o, name("sm90", m)))) continue;
      std::vector<float> x(static_cast<size_t>(m * k)), y(static_cast<size_t>(m * n)), peer(y);
      std::vector<uint16_t> xb(x.size());
      for (size_t i = 0; i < x.size(); ++i) {
        state = state * 1664525u + 1013904223u;
        xb[i] = static_cast<uint16_t>(0x3e80u + (state >> 24) + (state & 0x8000u));
        x[i] = __builtin_bit_cast(float, static_cast<uint32_t>(xb[i]) << 16);
      }
      ops::linear::Params p;
      p.n = n, p.k = k, p.x_dtype = DType::kF32, p.y_dtype = DType::kF32;
      size_t turn = 0;
      const int64_t calls = m <= 8 ? copies : 1;
      std::vector<std::function<void()>> bodies = {
          [&] { FmaAll(pool); },
          [&] {
            for (int64_t i = 0; i < calls; ++i) {
              const ops::linear::Args a{
                  .m = m, .x = x.data(), .packed = &packed[turn++ % packed.size()], .y = y.data()};
              TARE_CHECK(ops::linear::Forward({.pool = &pool}, p, a).ok());
            }
          }};
      ops::linear::Params q = p;
      q.x_dtype = DType::kBF16;
      if (m <= 8) {
        // The same bytes of weight, only read.
        bodies.push_back([&] {
          for (const auto& weight : packed) ReadAll(pool, weight.panels(), weight.size_bytes());
        });
      } else {
        bodies.push_back([&] {
          const ops::linear::Args a{.m = m, .x = xb.data(), .packed = &mma, .y = y.data()};
          TARE_CHECK(
              ops::linear::Forward({.pool = &pool, .profile = Profile::kSm90Mma}, q, a).ok());
        });
        if (sgemm != nullptr) {
          bodies.push_back([&] {
            sgemm(101, 111, 112, static_cast<int>(m), static_cast<int>(n), static_cast<int>(k),
                  1.0f, x.data(), static_cast<int>(k), wf.data(), static_cast<int>(k), 0.0f,
                  peer.data(), static_cast<int>(n));
          });
        }
      }
      const auto t = Interleaved(o, o.rounds, bodies);
      const double products = static_cast<double>(m * n * k);
      const double peak = FmaRate(o, t[0]);
      const double each = t[1] / static_cast<double>(calls);
      if (m <= 8) {
        const double rate = static_cast<double>(n * k * 2) / each;
        Print(o, out,
              {name("ieee", m), fmt::format("{:.1f} GB/s", rate * 1e-9),
               fmt::format("{:.2f} of read bandwidth, {:.2f} of FMA rate", t[2] / t[1],
                           products / each / peak)});
        continue;
      }
      std::string against = fmt::format("{:.2f} of FMA rate", products / each / peak);
      if (sgemm != nullptr) against += fmt::format(", {:.2f} of OpenBLAS sgemm", t[3] / each);
      Print(o, out,
            {name("ieee", m), fmt::format("{:.1f} G products/s", products / each * 1e-9), against});
      Print(o, out,
            {name("sm90", m), fmt::format("{:.2f} G products/s", products / t[2] * 1e-9),
             fmt::format("{:.3f} of FMA rate", products / t[2] / peak)});
    }
  }
}

void BenchAttention(const Options& o, ThreadPool& pool, Json& out) {
  for (auto [qh, kh, d] :
       {std::tuple<int64_t, int64_t, int64_t>{9, 3, 64}, {16, 8, 128}, {32, 8, 128}}) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      for (int64_t n : {256, 1024, 2048}) {
        const std::string name =
            fmt::format("attention {} {}/{} d={} n={}", DTypeName(dtype), qh, kh, d, n);
        if (!Wanted(o, name)) continue;
        const auto size = static_cast<size_t>(SizeOf(dtype));
        const auto wide = static_cast<size_t>(n * qh * d), narrow = static_cast<size_t>(n * kh * d);
        std::vector<uint8_t> q(wide * size, 0x3e), k(narrow * size, 0x3d), v(k), y(q), g(q), dq(q),
            dk(k), dv(k);
        std::vector<float> lse(static_cast<size_t>(n * qh));
        ops::attention::Params p;
        p.q_heads = qh, p.kv_heads = kh, p.head_dim = d, p.dtype = dtype,
        p.scale = 1.0f / std::sqrt(static_cast<float>(d));
        const ops::attention::Run all{.q_rows = n}, last{.q_rows = 1, .position = n - 1};
        ops::attention::Args a;
        a.tokens = n, a.q = q.data(), a.kv = {.k = k.data(), .v = v.data(), .rows = n},
        a.runs = {&all, 1};
        a.out = y.data(), a.lse2 = lse.data();
        ops::attention::Args decode = a;
        decode.tokens = 1, decode.runs = {&last, 1}, decode.lse2 = nullptr;
        std::vector<uint8_t> row(static_cast<size_t>(qh * d) * size);
        decode.out = row.data();
        ops::attention::BackwardArgs b;
        b.tokens = b.kv_rows = n, b.q = q.data(), b.k = k.data(), b.v = v.data(), b.out = y.data(),
        b.lse2 = lse.data();
        b.dout = g.data(), b.runs = {&all, 1}, b.dq = dq.data(), b.dk = dk.data(), b.dv = dv.data();
        const ops::Ctx ctx{.pool = &pool};
        const auto t = Interleaved(
            o, std::max(2, o.rounds / 2),
            {[&] { FmaAll(pool); }, [&] { TARE_CHECK(ops::attention::Forward(ctx, p, a).ok()); },
             [&] { TARE_CHECK(ops::attention::Backward(ctx, p, b).ok()); },
             [&] { TARE_CHECK(ops::attention::Forward(ctx, p, decode).ok()); }});
        const double peak = FmaRate(o, t[0]);
        const double pairs =
            static_cast<double>(n) * static_cast<double>(n + 1) / 2 * static_cast<double>(qh * d);
        Print(o, out,
              {name + " forward", fmt::format("{:.2f} ms", t[1] * 1e3),
               fmt::format("{:.2f} of FMA rate", 2 * pairs / t[1] / peak)});
        Print(o, out,
              {name + " backward", fmt::format("{:.2f} ms", t[2] * 1e3),
               fmt::format("{:.2f} of FMA rate", 5 * pairs / t[2] / peak)});
        Print(o, out,
              {name + " decode", fmt::format("{:.1f} us", t[3] * 1e6),
               fmt::format("{:.2f} GB/s of K and V",
                           static_cast<double>(2 * narrow * size) / t[3] * 1e-9)});
      }
    }
  }
}

void Run(const Options& o) {
  ThreadPool pool(o.threads);
  const Sgemm sgemm = FindSgemm(o.threads);
  std::vector<uint64_t> data(size_t{1} << 26, 1);  // 512 MiB
  const auto bytes = static_cast<int64_t>(data.size() * 8);
  const auto floor =
      Interleaved(o, o.rounds, {[&] { ReadAll(pool, data.data(), bytes); }, [&] { FmaAll(pool); }});
  const double bandwidth = static_cast<double>(bytes) / floor[0];
  const double peak = FmaRate(o, floor[1]);
  data = {};
  Json out{{"threads", o.threads},
           {"simd", ops::gemm::SimdTargetName()},
           {"read_gb_s", fmt::format("{:.1f}", bandwidth * 1e-9)},
           {"fma_g_s", fmt::format("{:.1f}", peak * 1e-9)},
           {"openblas", sgemm != nullptr},
           {"rows", Json::array()}};
  if (!o.json) {
    std::printf("threads %d, %s, %s, read bandwidth %.1f GB/s, FMA rate %.1f G/s, OpenBLAS %s\n",
                o.threads, ops::gemm::SimdTargetName(), o.cpu_time ? "CPU time" : "wall time",
                bandwidth * 1e-9, peak * 1e-9, sgemm ? "found" : "not found");
  }
  BenchLinear(o, pool, sgemm, out);
  BenchAttention(o, pool, out);
  if (o.json) std::printf("%s\n", out.dump(1).c_str());
  SetExit(0);
}

TARE_COMMAND(bench_contractions, [](CLI::App& root) {
  CLI::App* app =
      Group(root, "bench", "measure this build on this machine")
          ->add_subcommand("contractions",
                           "linear and attention against bandwidth, FMA rate and OpenBLAS");
  auto options = std::make_shared<Options>();
  app->add_option("--threads", options->threads, "threads (default 1)")->check(CLI::Range(1, 1024));
  app->add_option("--rounds", options->rounds, "interleaved rounds; the best counts")
      ->check(CLI::Range(1, 1000));
  app->add_option("--filter", options->filter,
                  "only rows with this text in \"linear ieee bf16 M=64 N=960 K=576\" or "
                  "\"attention f32 9/3 d=64 n=256\"");
  app->add_flag("--json", options->json, "machine-readable output");
  app->add_flag("--cpu-time", options->cpu_time,
                "the process's CPU time instead of the wall's (one thread; for a busy machine)");
  app->callback([options] {
    if (options->cpu_time && options->threads != 1) {
      SetExit(ReportError(InvalidArgument("--cpu-time needs --threads 1")));
      return;
    }
    Run(*options);
  });
});

}  // namespace
}  // namespace tare
