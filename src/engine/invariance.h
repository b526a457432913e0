#pragma once

// The invariance matrix of `tare invariance`: victims whose tokens and logprob bits are computed
// alone once, and then again under every condition that must not move a bit. Each cell says how
// many tokens it compared, and carries the counters that prove that its condition really occurred;
// without that proof it is inconclusive, however equal the bits.
//
// It proves consistency inside inference (C3) and nothing about a trainer.

#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/verdict.h"
#include "engine/engine.h"

namespace tare::engine {

inline constexpr std::string_view kInvarianceAxes[] = {
    "batch", "chunk", "page", "cache", "schedule", "prefill against decode", "process"};

struct InvarianceOptions {
  std::string model_path{};
  ops::BatchInvariance arm = ops::BatchInvariance::kOn;
  Profile profile = Profile::kIeeeF32;
  int threads = 0;         // of the reference; 0: the CPUs of the affinity mask
  int max_batch = 64;      // batch sizes are the powers of two up to here, and 3
  int generated = 16;      // tokens a victim
  bool boundaries = true;  // prompts around every contract constant (kv_split: some hundred tokens)
  // Axes to run; empty: all. Those left out are cells that say not-covered.
  std::set<std::string, std::less<>> only{};
  // The tare program, for the cell of a fresh process; empty: that cell is not covered.
  std::string program{};
};

struct InvarianceCell {
  std::string axis;       // "batch", "chunk", ...
  std::string condition;  // "64", "block + 1", ...
  Verdict verdict = Verdict::kInconclusive;
  std::string_view reason{};  // base/reasons.h; empty with pass
  int64_t compared = 0;       // tokens
  int64_t mismatches = 0;     // tokens whose id or bits differ, up to the first other id
  std::string first{};        // the first mismatch, for people
  Json proof = Json::object();
};

struct InvarianceReport {
  std::string model, weights_sha256;
  std::vector<InvarianceCell> cells;
  // Fail before inconclusive before not-covered before pass.
  Verdict verdict = Verdict::kInconclusive;
  std::string_view reason;
};

// Errors: the model cannot be loaded, or a request fails.
Result<InvarianceReport> RunInvariance(
    const InvarianceOptions& options,
    const std::function<void(const InvarianceCell& cell)>& progress = nullptr);

Json ToJson(const InvarianceOptions& options, const InvarianceReport& report);

}  // namespace tare::engine
