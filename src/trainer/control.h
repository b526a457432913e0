#pragma once

// The three-way control of finetuning (C7-06): production, surrogate and native from the same
// weights over the same data. What it shows: production and surrogate have the same visible forward
// at the first step, bit for bit, and where the three end. It is no statement about quality (C7-07,
// C7-08): held-out loss falls for a wrong gradient too.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/verdict.h"

namespace tare::trainer {

inline constexpr char kTrainSchema[] = "tare.train/1";
inline constexpr char kBaselineSchema[] = "tare.training-baseline/1";  // of the native arm

struct Control {
  Verdict verdict = Verdict::kRefused;
  std::string_view reason;
  std::vector<std::string> lines;  // for people
  Json ToJson() const;
};

// Refused: an arm that is missing or twice there (arms-differ), other initial weights, data, order
// or settings (arms-differ), a record that cannot be read (receipt-malformed), an arm whose kernels
// contradict its name (detached-substitute). Fail: the surrogate's visible forward differs
// (bit-mismatch).
Control JudgeControl(std::span<const Json> records);

}  // namespace tare::trainer
