// `tare bench result` judges results of `vllm bench serve` with the server's counters; `tare bench
// pair` says whether two results are one pair, and only then gives their ratio.

#include <cstdio>
#include <memory>

#include "base/env.h"
#include "base/json.h"
#include "base/reasons.h"
#include "tools/command.h"
#include "workflow/gates/bench_result.h"

namespace tare {
namespace {

struct ResultOptions {
  std::vector<std::string> results;
  std::string before, after;
  workflow::BenchRequirement requirement;
  bool json = false;
};

struct PairOptions {
  std::string a, b, arm_a, arm_b;
  bool json = false;
};

int Show(const workflow::BenchVerdict& verdict, bool json) {
  if (json) {
    fmt::print("{}\n", verdict.ToJson().dump(1));
    return ExitCode(verdict.verdict);
  }
  fmt::print("{}{}{}\n", VerdictName(verdict.verdict), verdict.reason.empty() ? "" : " ",
             verdict.reason);
  for (const auto& f : verdict.findings) fmt::print("  {}: {}\n", f.reason, f.detail);
  if (const Reason* r = FindReason(verdict.reason)) {
    fmt::print("  {}\n  next: {}\n", r->sentence, r->next);
  }
  for (const std::string& note : verdict.notes) fmt::print("  note: {}\n", note);
  if (verdict.ratio) fmt::print("  output throughput, second over first: {:.6f}\n", *verdict.ratio);
  return ExitCode(verdict.verdict);
}

template <typename T>
Result<T> Load(const std::string& path, Result<T> (*parse)(std::string_view)) {
  TARE_ASSIGN_OR_RETURN(std::string text, Env::Real()->ReadFile(path));
  auto parsed = parse(text);
  if (!parsed.ok()) return parsed.status().Annotate(path);
  return parsed;
}

Result<workflow::BenchVerdict> Judge(const ResultOptions& options) {
  std::vector<workflow::BenchResult> results;
  for (const std::string& path : options.results) {
    TARE_ASSIGN_OR_RETURN(auto r, Load(path, workflow::ParseBenchResult));
    r.name = path;
    results.push_back(std::move(r));
  }
  std::optional<workflow::CacheCounters> before, after;
  if (!options.before.empty()) {
    TARE_ASSIGN_OR_RETURN(before, Load(options.before, workflow::ParseCacheCounters));
  }
  if (!options.after.empty()) {
    TARE_ASSIGN_OR_RETURN(after, Load(options.after, workflow::ParseCacheCounters));
  }
  return workflow::JudgeBench(results, before, after, options.requirement);
}

Result<workflow::BenchVerdict> Judge(const PairOptions& options) {
  TARE_ASSIGN_OR_RETURN(auto a, Load(options.a, workflow::ParseBenchResult));
  TARE_ASSIGN_OR_RETURN(auto b, Load(options.b, workflow::ParseBenchResult));
  TARE_ASSIGN_OR_RETURN(auto arm_a, Load(options.arm_a, workflow::ParseArmRecord));
  TARE_ASSIGN_OR_RETURN(auto arm_b, Load(options.arm_b, workflow::ParseArmRecord));
  a.name = options.a;
  b.name = options.b;
  return workflow::JudgePair(arm_a, a, arm_b, b);
}

template <typename Options>
int Run(const Options& options) {
  auto verdict = Judge(options);
  return verdict.ok() ? Show(*verdict, options.json) : ReportError(verdict.status());
}

}  // namespace
}  // namespace tare

TARE_COMMAND(bench_result, [](CLI::App& root) {
  CLI::App* bench = tare::Group(root, "bench", "measure, and judge what was measured");
  CLI::App* result = bench->add_subcommand("result", "judge results of vllm bench serve");
  auto options = std::make_shared<tare::ResultOptions>();
  auto& need = options->requirement;
  result->add_option("results", options->results, "all runs between the snapshots")->required();
  result->add_option("--before", options->before, "/metrics of the server before them");
  result->add_option("--after", options->after, "/metrics of the server after them");
  result->add_option("--input-len", need.input_len, "tokens of every prompt");
  result->add_option("--output-len", need.output_len, "tokens of every output");
  result->add_option("--concurrency", need.concurrencies, "planned points")->delimiter(',');
  result->add_option("--warmups", need.warmups, "the client's --num-warmups")
      ->check(CLI::Range(0, 1000000));
  result->add_option("--block-size", need.block_size, "tokens of the server's cache block")
      ->check(CLI::Range(0, 1000000));
  result->add_flag("--json", options->json, "for machines");
  result->callback([options] { tare::SetExit(tare::Run(*options)); });

  CLI::App* pair = bench->add_subcommand("pair", "are two results one pair of arms");
  auto two = std::make_shared<tare::PairOptions>();
  pair->add_option("a", two->a, "result of the first arm")->required();
  pair->add_option("b", two->b, "result of the second arm")->required();
  pair->add_option("--arm-a", two->arm_a, "what the first arm resolved to")->required();
  pair->add_option("--arm-b", two->arm_b, "what the second arm resolved to")->required();
  pair->add_flag("--json", two->json, "for machines");
  pair->callback([two] { tare::SetExit(tare::Run(*two)); });
});
