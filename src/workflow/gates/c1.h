#pragma once

// Parts of the C1 evidence, as read. Internal to the judge of C1 (c1.cc reads and judges the
// recipe, c1_tuning.cc the tuning table and the audit materials).

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "workflow/gates/judge.h"

namespace tare::workflow {

using TextMap = std::map<std::string, std::string>;
TextMap ReadTextMap(const Field& f);

struct TuningRound {
  double throughput = 0;  // output tokens a second
  std::string backend, backend_source;
  std::vector<int64_t> input_tokens, output_tokens;  // counted, per request
  int64_t max_model_len = 0;
  bool ignore_eos = false;
};

struct TuningCell {
  std::string id;
  TextMap axes;
  int64_t concurrency = 0;
  std::string status, failure;
  std::vector<TuningRound> rounds;
};

struct Tuning {
  std::string workload;  // "formal" (8192/1024) or "short"
  int64_t input_tokens = 0, output_tokens = 0, rounds = 0;
  std::vector<int64_t> concurrencies;
  std::map<std::string, std::vector<std::string>> axes;
  std::vector<TuningCell> cells;
  std::vector<std::string> failed_in_log;
  double last_gain_percent = 0, spread_percent = 0;
};

struct Baseline {
  TextMap config, recipe;  // the baseline's and the formal recipe's, key by key
  std::string switch_name, switch_value;
  std::string config_sha256, frozen_sha256, frozen_time;
  std::vector<std::string> patched_symbols, handicaps;
  std::string patched_bits, unpatched_bits;  // of one BI=0 run with and without the patches
};

Tuning ReadTuning(const Field& f);
Baseline ReadBaseline(const Field& f);
// The audit materials that STOP-03 to STOP-07 ask for: names of those that are empty or missing.
std::vector<std::string> ReadMaterials(const Field& f, std::string* image, bool* failed_none);

void JudgeTuning(Judging* j, const Tuning& t, int64_t context_length);
void JudgeBaseline(Judging* j, const Baseline& b);

}  // namespace tare::workflow
