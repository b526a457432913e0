#include "engine/metrics.h"

#include <algorithm>

#include "base/check.h"

namespace tare::engine {
namespace {

const std::vector<double> kSeconds = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08,
                                      0.1,   0.25,  0.5,  0.75, 1.0,  2.5,  5.0,
                                      7.5,   10.0,  20.0, 40.0, 80.0, 160.0};
const std::vector<double> kTokens = {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000};

std::string Escape(std::string_view value) {
  std::string out;
  for (const char c : value) {
    if (c == '\\' || c == '"') out += '\\';
    if (c == '\n') {
      out += "\\n";
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace

Histogram::Histogram(std::vector<double> bounds)
    : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {
  TARE_CHECK(std::is_sorted(bounds_.begin(), bounds_.end()));
}

void Histogram::Observe(double value) {
  const auto it = std::lower_bound(bounds_.begin(), bounds_.end(), value);
  counts_[static_cast<size_t>(it - bounds_.begin())]++;
  sum_ += value;
}

void Histogram::Print(std::string_view name, std::string_view help, std::string_view labels,
                      std::string* out) const {
  *out += fmt::format("# HELP {} {}\n# TYPE {} histogram\n", name, help, name);
  int64_t count = 0;
  for (size_t i = 0; i < bounds_.size(); ++i) {
    count += counts_[i];
    *out += fmt::format("{}_bucket{{le=\"{}\",{}}} {}\n", name, bounds_[i], labels, count);
  }
  count += counts_.back();
  *out += fmt::format("{}_bucket{{le=\"+Inf\",{}}} {}\n", name, labels, count);
  *out +=
      fmt::format("{}_count{{{}}} {}\n{}_sum{{{}}} {}\n", name, labels, count, name, labels, sum_);
}

Metrics::Metrics()
    : ttft_(kSeconds),
      itl_(kSeconds),
      e2e_(kSeconds),
      prompt_tokens_(kTokens),
      generated_tokens_(kTokens),
      max_tokens_(kTokens),
      n_({1, 2, 5, 10, 20}) {}

void Metrics::FirstToken(double seconds) {
  std::lock_guard lock(mutex_);
  ttft_.Observe(seconds);
}

void Metrics::NextToken(double seconds) {
  std::lock_guard lock(mutex_);
  itl_.Observe(seconds);
}

void Metrics::Done(const Finished& f) {
  std::lock_guard lock(mutex_);
  e2e_.Observe(f.e2e_seconds);
  prompt_tokens_.Observe(static_cast<double>(f.prompt_tokens));
  generated_tokens_.Observe(static_cast<double>(f.generated_tokens));
  max_tokens_.Observe(static_cast<double>(f.max_tokens));
  n_.Observe(static_cast<double>(f.n));
}

std::string Metrics::Print(const Stats& s, std::string_view model_name, bool batch_invariant) {
  const std::string labels = fmt::format("engine=\"0\",model_name=\"{}\"", Escape(model_name));
  std::string out;
  const auto one = [&](std::string_view name, std::string_view type, std::string_view help,
                       auto value) {
    out += fmt::format("# HELP {} {}\n# TYPE {} {}\n{}{{{}}} {}\n", name, help, name, type, name,
                       labels, value);
  };
  one("vllm:num_requests_running", "gauge", "Sequences in execution batches.", s.running);
  one("vllm:num_requests_waiting", "gauge", "Sequences waiting to be processed.", s.waiting);
  const double used = s.num_blocks == 0 ? 0.0
                                        : static_cast<double>(s.num_blocks - s.free_blocks) /
                                              static_cast<double>(s.num_blocks);
  one("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", used);
  one("vllm:prefix_cache_queries_total", "counter",
      "Prefix cache queries, in terms of number of queried tokens.", s.scheduler.prefix_queries);
  one("vllm:prefix_cache_hits_total", "counter",
      "Prefix cache hits, in terms of number of cached tokens.", s.scheduler.prefix_hits);
  one("vllm:num_preemptions_total", "counter", "Preemptions, each computed again later.",
      s.scheduler.preemptions);
  one("vllm:prompt_tokens_total", "counter", "Number of prefill tokens processed.",
      s.prompt_tokens);
  one("vllm:prompt_tokens_cached_total", "counter",
      "Prompt tokens that came from the prefix cache.", s.scheduler.prefix_hits);
  one("vllm:generation_tokens_total", "counter", "Number of generation tokens processed.",
      s.generated_tokens);
  out +=
      "# HELP vllm:request_success_total Count of finished sequences by reason.\n# TYPE "
      "vllm:request_success_total counter\n";
  for (const auto& [reason, count] : {std::pair{"stop", s.finished_stop},
                                      {"length", s.finished_length},
                                      {"abort", s.finished_abort},
                                      {"error", s.finished_error}}) {
    out += fmt::format("vllm:request_success_total{{finished_reason=\"{}\",{}}} {}\n", reason,
                       labels, count);
  }
  one("vllm:iteration_steps_total", "counter", "Engine steps.", s.scheduler.steps);
  out += fmt::format(
      "# HELP vllm:cache_config_info Information of the cache configuration.\n# TYPE "
      "vllm:cache_config_info gauge\n"
      "vllm:cache_config_info{{block_size=\"{}\",num_gpu_blocks=\"{}\",{}}} 1\n",
      s.block_size, s.num_blocks, labels);
  one("tare:mixed_steps_total", "counter", "Steps that held prefill and decode together.",
      s.scheduler.mixed_steps);
  one("tare:chunked_runs_total", "counter", "Prefill runs that were cut into chunks.",
      s.scheduler.chunked_runs);
  one("tare:batch_invariant", "gauge", "1: the batch-invariant arm runs; 0: the native arm.",
      batch_invariant ? 1 : 0);
  one("tare:weight_version", "gauge", "Version of the weights that serve.", s.weight_version);
  one("tare:weight_updates_total", "counter", "Weight updates since the start.", s.weight_updates);
  std::lock_guard lock(mutex_);
  ttft_.Print("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.",
              labels, &out);
  itl_.Print("vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.",
             labels, &out);
  e2e_.Print("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.",
             labels, &out);
  prompt_tokens_.Print("vllm:request_prompt_tokens", "Number of prefill tokens per request.",
                       labels, &out);
  generated_tokens_.Print("vllm:request_generation_tokens",
                          "Number of generation tokens per request.", labels, &out);
  max_tokens_.Print("vllm:request_params_max_tokens",
                    "Histogram of the max_tokens request parameter.", labels, &out);
  n_.Print("vllm:request_params_n", "Histogram of the n request parameter.", labels, &out);
  return out;
}

}  // namespace tare::engine
