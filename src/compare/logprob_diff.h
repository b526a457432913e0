#pragma once

// Compares logprobs of two systems token by token. The pairing key is (weight version, hash of all
// tokens up to and including this one, position): never the text, never the row of a batch.

#include <string>
#include <vector>

#include "base/status.h"
#include "compare/tensor_diff.h"
#include "tensor/logprobs.h"
#include "tensor/safetensors.h"

namespace tare::compare {

struct LogprobSet {
  std::string name;
  std::vector<LogprobSequence> sequences;
};

// Refused when raw stands against processed. Decimal values give diagnostic-only.
Result<Report> DiffLogprobs(const LogprobSet& a, const LogprobSet& b, const DiffOptions& options);

// The flat layout that recorders of rollouts use in one safetensors file: `prompt_ids`,
// `prompt_offsets` [n+1], `response_ids`, `response_offsets` [n+1], `logprobs` (one per response
// token) and optionally `mask` (0 or 1 per response token). Sequences are named by index; the
// weight version is `weights_sha256` of the metadata, if it is there.
bool IsRolloutFile(const SafetensorsFile& file);
// kDataLoss for offsets that do not fit.
Result<LogprobSet> ReadRolloutFile(const SafetensorsFile& file);

}  // namespace tare::compare
