#pragma once

// Scoring: the logprob of every token of whole sequences, packed and cut as the caller likes. The
// bits do not depend on how.

#include <cstdint>
#include <string>
#include <vector>

#include "models/forward.h"

namespace tare::models {

struct ScoreSequence {
  std::string name;
  std::vector<int32_t> tokens;  // at least two
  // Tokens [first, size) are scored; at least 1, since the first token has nothing before it.
  int64_t first = 1;
  float temperature = 1.0f;
};

struct ScoreOptions {
  // Sequences are put together up to this many rows, at least one. Order as given, or longest
  // first.
  int64_t batch_tokens = 2048;
  bool longest_first = false;
  int64_t row_align = 1;
  // 0: whole sequences. Else every sequence goes through a paged cache in chunks of this many
  // tokens (1: token by token, as decode does).
  int64_t chunk = 0;
  int64_t page_size = 16;
  bool entropy = false;
  bool tape = false;  // record a tape, as training does, and drop it
  TapPhase phase = TapPhase::kScore;
  std::string weight_version = {};
};

struct ScoreResult {
  // As the sequences: one value for each scored token.
  std::vector<std::vector<float>> logprob, entropy;
  int64_t batches = 0;
  int64_t rows = 0;  // tokens that went through the model
};

// kInvalidArgument names the sequence.
Result<ScoreResult> ScoreSequences(const ops::Ctx& ctx, const Model& model,
                                   const std::vector<ScoreSequence>& sequences,
                                   const ScoreOptions& options, Scratch* scratch,
                                   Tap* tap = nullptr);

}  // namespace tare::models
