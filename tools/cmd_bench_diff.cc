// `tare bench diff`: the comparison beside the machine's own read bandwidth and SHA-256 rate.

#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <string>

#include "base/json.h"
#include "compare/diff_speed.h"
#include "tools/command.h"

namespace tare {
namespace {

struct Options {
  std::string dir;
  double gib = 1;
  int64_t small = 100'000;
  int rounds = 5;
  int threads = 0;
  bool json = false;
};

int Run(const Options& o) {
  ThreadPool pool(o.threads);
  compare::SpeedOptions options;
  options.dir = o.dir.empty() ? std::filesystem::temp_directory_path().string() : o.dir;
  options.set_bytes = static_cast<int64_t>(o.gib * (int64_t{1} << 30));
  options.small_tensors = o.small;
  options.rounds = o.rounds;
  options.pool = &pool;
  const Result<compare::Speed> speed = compare::MeasureDiff(Env::Real(), options);
  if (!speed.ok()) return ReportError(speed.status());
  const compare::Speed& s = *speed;
  // Digests of both sides: a chunk that is equal on both is hashed once, so one set's bytes are.
  const double digest_rate = s.diff_digests / 2;
  if (o.json) {
    const Json j = {
        {"schema", "tare.bench_diff/1"},
        {"set_gib", o.gib},
        {"threads", pool.threads()},
        {"rounds", o.rounds},
        {"sum_gbps", s.sum},
        {"diff_gbps", s.diff},
        {"diff_over_sum", s.diff / s.sum},
        {"diff_fresh_gbps", s.diff_fresh},
        {"sha256_gbps", s.sha256},
        {"diff_digests_hashed_gbps", digest_rate},
        {"diff_digests_over_sha256", digest_rate / s.sha256},
        {"all_differ_gbps", s.worst_case},
        {"cpu_diff_over_sum", s.cpu.diff / s.cpu.sum},
        {"cpu_diff_fresh_over_sum", s.cpu.diff_fresh / s.cpu.sum},
        {"cpu_diff_digests_over_sha256", s.cpu.diff_digests / 2 / s.cpu.sha256},
        {"small_cpu_seconds", s.small_cpu_seconds},
        {"small_tensors", o.small},
        {"small_seconds", s.small_seconds},
        {"peak_anonymous_mib", static_cast<double>(s.peak_anonymous_bytes) / (1 << 20)}};
    fmt::print("{}\n", j.dump(1));
    return 0;
  }
  fmt::print("two equal sets of {:g} GiB, {} threads, best of {} interleaved rounds\n", o.gib,
             pool.threads(), o.rounds);
  fmt::print("                               wall clock                 processor time\n");
  fmt::print("  plain sum of both            {:7.2f} GB/s               {:7.2f} GB/s\n", s.sum,
             s.cpu.sum);
  const auto line = [](const char* what, double rate, double ratio, double cpu, double cpu_ratio) {
    fmt::print("  {:<28} {:7.2f} GB/s  {:4.2f}         {:7.2f} GB/s  {:4.2f}\n", what, rate, ratio,
               cpu, cpu_ratio);
  };
  line("diff (of the sum, goal 0.90)", s.diff, s.diff / s.sum, s.cpu.diff, s.cpu.diff / s.cpu.sum);
  line("diff, files mapped anew", s.diff_fresh, s.diff_fresh / s.sum, s.cpu.diff_fresh,
       s.cpu.diff_fresh / s.cpu.sum);
  fmt::print("  SHA-256, all threads         {:7.2f} GB/s               {:7.2f} GB/s\n", s.sha256,
             s.cpu.sha256);
  line("with digests (goal 0.90)", digest_rate, digest_rate / s.sha256, s.cpu.diff_digests / 2,
       s.cpu.diff_digests / 2 / s.cpu.sha256);
  fmt::print("  diff, every element differs  {:7.2f} GB/s\n", s.worst_case);
  fmt::print("  {} small tensors        {:7.2f} s (goal 2)           {:7.2f} s\n", o.small,
             s.small_seconds, s.small_cpu_seconds);
  fmt::print("  peak anonymous memory        {:7.1f} MiB (goal 200)\n",
             static_cast<double>(s.peak_anonymous_bytes) / (1 << 20));
  return 0;
}

}  // namespace
}  // namespace tare

TARE_COMMAND(bench_diff, [](CLI::App& root) {
  // `bench` is shared by several files: whoever comes first makes it.
  CLI::App* bench = nullptr;
  for (CLI::App* sub : root.get_subcommands([](CLI::App*) { return true; })) {
    if (sub->get_name() == "bench") bench = sub;
  }
  if (bench == nullptr) {
    bench = root.add_subcommand("bench", "measure this build on this machine");
    bench->require_subcommand(1);
  }
  CLI::App* app = bench->add_subcommand("diff", "tare diff beside read bandwidth and SHA-256");
  auto o = std::make_shared<tare::Options>();
  app->add_option("--size", o->gib, "GiB of each set")->check(CLI::Range(0.0625, 64.0));
  app->add_option("--dir", o->dir, "where to make the files (page cache must hold both sets)");
  app->add_option("--small", o->small, "tensors in the file of small ones; 0: skip")
      ->check(CLI::Range(0, 1'000'000));
  app->add_option("--rounds", o->rounds, "best of")->check(CLI::Range(1, 100));
  app->add_option("--threads", o->threads, "0: all CPUs of the affinity mask")
      ->check(CLI::NonNegativeNumber);
  app->add_flag("--json", o->json, "for machines");
  app->callback([o] { tare::SetExit(tare::Run(*o)); });
});
