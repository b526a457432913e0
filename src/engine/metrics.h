#pragma once

// The counters and histograms of /metrics, under vLLM's names, in Prometheus' text format.

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"

namespace tare::engine {

class Histogram {
 public:
  explicit Histogram(std::vector<double> bounds);  // ascending upper bounds; +Inf is implied
  void Observe(double value);
  // Lines of `name` with `labels` ("a=\"b\"", may be empty).
  void Print(std::string_view name, std::string_view help, std::string_view labels,
             std::string* out) const;

 private:
  std::vector<double> bounds_;
  std::vector<int64_t> counts_;  // one more than bounds
  double sum_ = 0;
};

// What the API layer observes per request. Thread-safe.
class Metrics {
 public:
  Metrics();
  struct Finished {
    double e2e_seconds = 0;
    int64_t prompt_tokens = 0, generated_tokens = 0, max_tokens = 0, n = 1;
  };
  void FirstToken(double seconds);
  void NextToken(double seconds);
  void Done(const Finished& finished);

  std::string Print(const Stats& stats, std::string_view model_name, bool batch_invariant);

 private:
  std::mutex mutex_;
  Histogram ttft_, itl_, e2e_, prompt_tokens_, generated_tokens_, max_tokens_, n_;
};

}  // namespace tare::engine
