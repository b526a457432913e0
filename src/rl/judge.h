#pragma once

// The verdict on a loop, a pure function of its receipt and the files beside it. It shares no code
// with the loop: every count and every mismatch is computed again from the dumped logprobs, and a
// receipt that says otherwise is refused. docs/formats/receipt.md lists the questions in order; the
// first that is not answered well decides.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/env.h"
#include "base/json.h"
#include "base/status.h"
#include "base/verdict.h"

namespace tare::rl {

struct Judgement {
  struct Finding {
    Verdict verdict = Verdict::kRefused;
    std::string_view reason;
    std::string text;
  };
  struct Comparison {
    int64_t version = 0;
    std::string a, b;      // "rollout", "score", "train"
    int64_t compared = 0;  // valid tokens on both sides
    int64_t masked = 0;
    int64_t mismatches = 0;    // bits differ
    int64_t sign_of_zero = 0;  // of these
    int64_t non_finite = 0;
    std::string first;   // where and both words, or empty
    double max_abs = 0;  // for people
    // The metric that training logs show, in f32: 0 says nothing about the bits (T-03).
    float max_abs_probability = 0;
  };
  Verdict verdict = Verdict::kInconclusive;
  std::string_view reason;        // empty on a pass
  std::vector<Finding> findings;  // all of them, in the order of the questions
  std::vector<Comparison> comparisons;
  Json ToJson() const;
};

// `directory` holds the files that the receipt names. A receipt that cannot be read as one is a
// refused judgement, not an error.
Judgement Judge(Env* env, const Json& receipt, const std::string& directory);

}  // namespace tare::rl
