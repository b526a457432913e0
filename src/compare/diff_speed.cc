#include "compare/diff_speed.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "base/sha256.h"
#include "compare/open.h"
#include "tensor/digest.h"
#include "tensor/safetensors.h"

namespace tare::compare {
namespace {

constexpr int64_t kPiece = int64_t{2} << 20;

struct Time {
  double wall = 0, cpu = 0;
};

double ProcessCpuSeconds() {
  timespec t = {};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

template <typename F>
Time Seconds(F f) {
  const auto begin = std::chrono::steady_clock::now();
  const double cpu = ProcessCpuSeconds();
  f();
  return {std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(),
          ProcessCpuSeconds() - cpu};
}

uint64_t SumOf(const char* data, int64_t bytes) {
  uint64_t sum = 0;
  for (int64_t i = 0; i + 8 <= bytes; i += 8) {
    uint64_t word;
    std::memcpy(&word, data + i, 8);
    sum += word;
  }
  return sum;
}

int64_t AnonymousBytes(Env* env) {
  const Result<std::string> text = env->ReadFile("/proc/self/status");
  if (!text.ok()) return 0;
  const size_t at = text->find("RssAnon:");
  return at == std::string::npos ? 0 : std::strtoll(text->c_str() + at + 8, nullptr, 10) * 1024;
}

// Finite bf16 bits without a pattern.
Result<Tensor> Noise(Shape shape, uint64_t seed, uint16_t flip) {
  TARE_ASSIGN_OR_RETURN(Tensor t, Tensor::Allocate(DType::kBF16, std::move(shape)));
  uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
  uint16_t* out = t.mutable_as<uint16_t>();
  for (int64_t i = 0; i < t.elements(); ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    out[i] = static_cast<uint16_t>(((state >> 48) & 0xbfff) ^ flip);
  }
  return t;
}

Status WriteSet(Env* env, const std::string& path, int64_t tensors, const Shape& shape,
                uint16_t flip) {
  std::vector<SafetensorsSpec> specs;
  specs.reserve(static_cast<size_t>(tensors));
  for (int64_t i = 0; i < tensors; ++i) {
    specs.push_back({fmt::format("layers.{:06}.weight", i), DType::kBF16, shape});
  }
  uint64_t seed = 0;
  return WriteSafetensors(env, path, std::move(specs), {}, [&](const SafetensorsSpec& spec) {
    return Noise(spec.shape, ++seed, flip);
  });
}

Result<Verdict> OpenAndDiff(Env* env, const std::string& a, const std::string& b,
                            const DiffOptions& options) {
  TARE_ASSIGN_OR_RETURN(const Input x, OpenInput(env, a));
  TARE_ASSIGN_OR_RETURN(const Input y, OpenInput(env, b));
  TARE_ASSIGN_OR_RETURN(const Report r, DiffInputs(x, y, options));
  return r.verdict;
}

Result<Speed> Measure(Env* env, const SpeedOptions& o, const std::string& root) {
  const std::string a = root + "/a.safetensors", b = root + "/b.safetensors",
                    c = root + "/c.safetensors";
  const int64_t tensor_bytes = int64_t{32} << 20;
  const int64_t tensors = std::max<int64_t>(1, o.set_bytes / tensor_bytes);
  const Shape shape = {4096, tensor_bytes / 2 / 4096};
  TARE_RETURN_IF_ERROR(WriteSet(env, a, tensors, shape, 0));
  TARE_RETURN_IF_ERROR(WriteSet(env, b, tensors, shape, 0));
  const int64_t differing = std::min<int64_t>(tensors, 4);
  TARE_RETURN_IF_ERROR(WriteSet(env, c, differing, shape, 1));
  DiffOptions options;
  options.pool = o.pool;
  DiffOptions with_digests = options;
  with_digests.digests = true;
  DiffOptions few = options;
  for (int64_t i = 0; i < differing; ++i) few.only.push_back(fmt::format("layers.{:06}.weight", i));

  TARE_ASSIGN_OR_RETURN(const Input x, OpenInput(env, a));
  TARE_ASSIGN_OR_RETURN(const Input y, OpenInput(env, b));
  TARE_ASSIGN_OR_RETURN(const Input z, OpenInput(env, c));
  std::vector<std::pair<const char*, const char*>> pieces;
  std::vector<Tensor> keep;
  for (size_t i = 0; i < x.tensors->entries().size(); ++i) {
    TARE_ASSIGN_OR_RETURN(Tensor ta, x.tensors->Load(i));
    TARE_ASSIGN_OR_RETURN(Tensor tb, y.tensors->Load(i));
    for (int64_t at = 0; at < ta.size_bytes(); at += kPiece) {
      pieces.emplace_back(static_cast<const char*>(ta.data()) + at,
                          static_cast<const char*>(tb.data()) + at);
    }
    keep.push_back(std::move(ta));
    keep.push_back(std::move(tb));
  }
  const int64_t n = static_cast<int64_t>(pieces.size());
  const double both = 2.0 * static_cast<double>(n * kPiece) / 1e9;

  Speed best;
  std::atomic<uint64_t> sink{0};
  Status failed;
  const auto expect = [&](const Result<Verdict>& verdict, Verdict want) {
    if (!verdict.ok()) {
      failed = verdict.status();
    } else if (*verdict != want) {
      failed =
          Error(Code::kInternal, "the bench's own sets gave the verdict {}", VerdictName(*verdict));
    }
  };
  const auto verdict_of = [&](const Input& p, const Input& q,
                              const DiffOptions& with) -> Result<Verdict> {
    TARE_ASSIGN_OR_RETURN(const Report r, DiffInputs(p, q, with));
    return r.verdict;
  };
  std::atomic<bool> stop{false};
  std::atomic<int64_t> peak{0};
  std::thread sampler([&] {
    while (!stop.load()) {
      peak.store(std::max(peak.load(), AnonymousBytes(env)));
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
  const auto keep_best = [](double gigabytes, const Time& time, double* wall, double* cpu) {
    *wall = std::max(*wall, gigabytes / time.wall);
    if (cpu != nullptr) *cpu = std::max(*cpu, gigabytes / time.cpu);
  };
  for (int round = 0; round < o.rounds && failed.ok(); ++round) {
    keep_best(both, Seconds([&] {
                o.pool->ParallelFor(n, [&](int64_t i) {
                  const auto& [p, q] = pieces[static_cast<size_t>(i)];
                  sink.fetch_add(SumOf(p, kPiece) + SumOf(q, kPiece), std::memory_order_relaxed);
                });
              }),
              &best.sum, &best.cpu.sum);
    keep_best(both, Seconds([&] { expect(verdict_of(x, y, options), Verdict::kPass); }), &best.diff,
              &best.cpu.diff);
    keep_best(both / 2, Seconds([&] {
                o.pool->ParallelFor(n, [&](int64_t i) {
                  for (int64_t at = 0; at < kPiece; at += kDigestChunkBytes) {
                    sink.fetch_add(
                        Sha256Of(pieces[static_cast<size_t>(i)].first + at, kDigestChunkBytes)[0]);
                  }
                });
              }),
              &best.sha256, &best.cpu.sha256);
    keep_best(both, Seconds([&] { expect(verdict_of(x, y, with_digests), Verdict::kPass); }),
              &best.diff_digests, &best.cpu.diff_digests);
    keep_best(both, Seconds([&] { expect(OpenAndDiff(env, a, b, options), Verdict::kPass); }),
              &best.diff_fresh, &best.cpu.diff_fresh);
    keep_best(2.0 * static_cast<double>(differing * tensor_bytes) / 1e9,
              Seconds([&] { expect(verdict_of(x, z, few), Verdict::kFail); }), &best.worst_case,
              nullptr);
  }
  stop.store(true);
  sampler.join();
  TARE_RETURN_IF_ERROR(failed);
  best.peak_anonymous_bytes = peak.load();
  return best;
}

}  // namespace

Result<Speed> MeasureDiff(Env* env, const SpeedOptions& options) {
  TARE_CHECK(options.pool != nullptr);
  const std::string root = options.dir + "/tare_bench_diff";
  TARE_RETURN_IF_ERROR(env->CreateDir(root));
  Result<Speed> speed = Measure(env, options, root);
  if (speed.ok() && options.small_tensors > 0) {
    const Status wrote = [&]() -> Status {
      TARE_RETURN_IF_ERROR(
          WriteSet(env, root + "/small_a.safetensors", options.small_tensors, {16}, 0));
      return WriteSet(env, root + "/small_b.safetensors", options.small_tensors, {16}, 0);
    }();
    if (!wrote.ok()) speed = wrote;
    for (int round = 0; round < options.rounds && speed.ok(); ++round) {
      DiffOptions diff;
      diff.pool = options.pool;
      Status failed;
      const Time seconds = Seconds([&] {
        const Result<Verdict> verdict =
            OpenAndDiff(env, root + "/small_a.safetensors", root + "/small_b.safetensors", diff);
        if (!verdict.ok()) failed = verdict.status();
      });
      if (!failed.ok()) {
        speed = failed;
      } else {
        const auto lower = [&](double value, double* into) {
          if (round == 0 || value < *into) *into = value;
        };
        lower(seconds.wall, &speed->small_seconds);
        lower(seconds.cpu, &speed->small_cpu_seconds);
      }
    }
  }
  for (const char* name : {"a", "b", "c", "small_a", "small_b"}) {
    const std::string path = fmt::format("{}/{}.safetensors", root, name);
    if (env->Exists(path)) (void)env->Remove(path).ok();
  }
  (void)env->Remove(root).ok();
  return speed;
}

}  // namespace tare::compare
