#pragma once

// Results of `vllm bench serve` (the Python client and the Rust one write the same keys) with the
// server's own counters, judged: were the requests what the point asks for, does the summary follow
// from the requests, was the cache cold, are two arms a pair. Pure functions over given files. What
// they do not see: the client's own timing error, and anything outside the files.

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/reasons.h"
#include "base/status.h"
#include "base/verdict.h"

namespace tare::workflow {

// The keys that are judged; others in the file are left alone.
struct BenchResult {
  std::string name;  // for messages; the reader does not set it
  std::string backend, model_id;
  int64_t max_concurrency = 0;  // 0: none given (open loop)
  int64_t num_prompts = 0, completed = 0, failed = 0;
  int64_t total_input_tokens = 0, total_output_tokens = 0;
  double duration_s = 0, output_throughput = 0;  // tokens a second
  double mean_ttft_ms = 0, mean_e2el_ms = -1;    // -1: the file has none
  // Per request, empty without --save-detailed. Seconds.
  std::vector<int64_t> input_lens, output_lens;
  std::vector<double> ttfts, latencies, start_times;
  int64_t errors = 0;  // non-empty entries of `errors`
};

// kInvalidArgument naming the key that is missing, of another type, negative or not finite.
Result<BenchResult> ParseBenchResult(std::string_view json);

// Prefix-cache counters of a vLLM server's /metrics, summed over engines and models, in tokens.
struct CacheCounters {
  int64_t queries = 0, hits = 0;
};

// kInvalidArgument when a counter is missing, twice under one label set, or no whole number >= 0.
Result<CacheCounters> ParseCacheCounters(std::string_view metrics);

struct BenchRequirement {
  int64_t input_len = 0;   // exact tokens of each prompt; 0: any
  int64_t output_len = 0;  // exact tokens of each output, end-of-sequence ignored; 0: any
  std::vector<int64_t> concurrencies;  // every one needs a result; empty: none planned
  // The Python client warms up with its first measured prompt, so that many copies of it are hits
  // of its own making. Both 0: any hit voids the run.
  int64_t warmups = 0;     // --num-warmups of each result
  int64_t block_size = 0;  // tokens of a cache block of the server
};

struct BenchFinding {
  Verdict verdict = Verdict::kPass;
  std::string_view reason;  // of base/reasons.h
  std::string detail;
};

struct BenchVerdict {
  Verdict verdict = Verdict::kPass;  // the gravest of the findings
  std::string_view reason;           // its first; empty for a pass
  std::vector<BenchFinding> findings;
  std::vector<std::string> notes;  // true of a pass as well
  std::optional<double> ratio;     // of a valid pair only: output throughput b / a
  Json ToJson() const;
};

// `results` are all the runs between the two snapshots, in any order. REQUIRES: results not empty.
BenchVerdict JudgeBench(std::span<const BenchResult> results,
                        const std::optional<CacheCounters>& before,
                        const std::optional<CacheCounters>& after,
                        const BenchRequirement& requirement);

// What an arm resolved to, from the live server (docs/formats/arm.md).
struct ArmRecord {
  std::string label;
  std::string switch_name, switch_value;  // as effective in the worker
  std::vector<std::string> kernels;       // executed, sorted, unique
  std::string image;                      // digest
  std::map<std::string, std::string> commits;
  std::string workload;  // digest of the prompts
};

// kInvalidArgument naming the key that is missing, empty, unknown or of another type.
Result<ArmRecord> ParseArmRecord(std::string_view json);

// A pass says that the two are a pair: another value of the same switch, other kernels, all else
// equal. It is one pair: no statement about a margin.
BenchVerdict JudgePair(const ArmRecord& arm_a, const BenchResult& a, const ArmRecord& arm_b,
                       const BenchResult& b);

}  // namespace tare::workflow
