// tare bench ops: operators against a named peer, in one run.

#include <cstdio>
#include <memory>

#include "base/json.h"
#include "ops/bench.h"
#include "tools/command.h"

namespace tare {
namespace {

struct Options {
  std::string filter;
  int threads = 0;
  int rounds = 9;
  bool cpu_time = false;
  bool json = false;
};

int Run(const Options& options) {
  if (options.cpu_time && options.threads != 1) {
    return ReportError(InvalidArgument("--cpu-time needs --threads 1"));
  }
  ThreadPool pool(options.threads);
  Json list = Json::array();
  if (!options.json) {
    fmt::print(
        "{} threads, {}, best of {} rounds, ours and peer in turn; ratio = peer time / our time\n",
        pool.threads(), options.cpu_time ? "CPU time" : "wall time", options.rounds);
    fmt::print("{:<10} {:<17} {:<26} {:>10} {:>9} {:>7} {:>10} {:>6}\n", "op", "what", "shape",
               "ours us", "GB/s", "peer", "peer us", "ratio");
  }
  int ran = 0;
  for (const ops::BenchCase& bench : ops::AllBenches().cases()) {
    if (bench.Name().find(options.filter) == std::string::npos) continue;
    ++ran;
    const ops::BenchResult r = ops::RunBench(bench, pool, options.rounds, options.cpu_time);
    if (options.json) {
      list.push_back({{"op", bench.op},
                      {"what", bench.what},
                      {"shape", bench.shape},
                      {"peer", bench.peer},
                      {"bytes", bench.bytes},
                      {"ours_us", r.ours_us},
                      {"peer_us", r.peer_us},
                      {"ours_median_us", r.ours_median_us},
                      {"peer_median_us", r.peer_median_us},
                      {"ratio", r.ratio()}});
    } else {
      fmt::print("{:<10} {:<17} {:<26} {:>10.1f} {:>9.2f} {:>7} {:>10.1f} {:>6.2f}\n", bench.op,
                 bench.what, bench.shape, r.ours_us,
                 static_cast<double>(bench.bytes) / r.ours_us * 1e-3, bench.peer, r.peer_us,
                 r.ratio());
      std::fflush(stdout);
    }
  }
  if (ran == 0) {
    std::string names;
    for (const ops::BenchCase& bench : ops::AllBenches().cases()) names += "\n  " + bench.Name();
    return ReportError(Error(Code::kNotFound, "no bench has '{}' in its name; there are:{}",
                             Printable(options.filter), names));
  }
  if (options.json)
    fmt::print("{}\n", Json({{"threads", pool.threads()},
                             {"cpu_time", options.cpu_time},
                             {"rounds", options.rounds},
                             {"benches", list}})
                           .dump());
  return 0;
}

TARE_COMMAND(bench_ops, [](CLI::App& root) {
  // `bench` is shared by several files: whoever comes first makes it.
  const auto groups =
      root.get_subcommands([](CLI::App* app) { return app->get_name() == "bench"; });
  CLI::App* bench = groups.empty()
                        ? root.add_subcommand("bench", "measure this build on this machine")
                        : groups.front();
  CLI::App* app = bench->add_subcommand("ops", "operators against a named peer in the same run");
  auto options = std::make_shared<Options>();
  app->add_option("--filter", options->filter, "only benches with this text in op/what/shape");
  app->add_option("--threads", options->threads, "0: all CPUs of this process")
      ->check(CLI::Range(0, 1024));
  app->add_option("--rounds", options->rounds, "timed rounds of each")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app->add_flag("--cpu-time", options->cpu_time,
                "count CPU time instead of wall time (one thread)");
  app->add_flag("--json", options->json, "for machines");
  app->callback([options] { SetExit(Run(*options)); });
});

}  // namespace
}  // namespace tare
