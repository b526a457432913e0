#pragma once

// What a replay computes on: the token sequences that shared the batch in which a row was computed.
// Built from a dump alone (every run names its tokens, and earlier frames name those before them),
// kept in a bundle as one JSON line a sequence, `{"sequence", "prompt", "tokens"}`, which is also
// what `tare score --tokens` reads.

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "tensor/dump.h"

namespace tare::compare {

struct ReplaySequence {
  std::string name;
  std::vector<int32_t> tokens;  // from position 0; the last is only ever a target
  int64_t first = 1;            // tokens [first, size) are scored
};
using ReplayBatch = std::vector<ReplaySequence>;

// Tokens 0 .. position-1 whose hash is `history`, as runs of weights `version` in any frame of the
// dump name them. kNotFound when they do not reach back to position 0.
Result<std::vector<int32_t>> HistoryTokens(const Dump& dump, const std::string& version,
                                           const TokenHash& history, int64_t position);

// The sequences of frame `frame` in their order, among them the one that holds the row with key
// (`history`, `position`). `history` covers the row's own token. A sequence whose earlier tokens
// the dump does not name is left out, unless it is the row's own: kNotFound then.
Result<ReplayBatch> BatchOfFrame(const Dump& dump, int64_t frame, const TokenHash& history,
                                 int64_t position);

// Which sequence begins with the row's tokens; -1 for none.
int64_t SequenceOfRow(const ReplayBatch& batch, const TokenHash& history, int64_t position);

std::string FormatReplayBatch(const ReplayBatch& batch);
// kDataLoss with the line.
Result<ReplayBatch> ParseReplayBatch(std::string_view text);

}  // namespace tare::compare
