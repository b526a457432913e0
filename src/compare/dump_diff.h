#pragma once

// Compares two dumps. Per-row tensors pair row by row on (weight version, token-history hash,
// position), so a decode step of one row meets the same row of a scoring pass; whole-frame tensors
// (gradients, norms) pair by (name, weight version, step, occurrence). Digests stand for bits where
// both sides hold the same rows; payloads are read where they must be.

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "compare/tensor_diff.h"
#include "tensor/dump.h"

namespace tare::compare {

// Rows of one frame on each side that hold the same tokens, consecutive on both.
struct RowRange {
  int64_t frame_a = 0, row_a = 0;
  int64_t frame_b = 0, row_b = 0;
  int64_t rows = 0;
  std::string sequence;  // of side A, for people
  int64_t position = 0;  // absolute, of the first row
};

// Which rows of two dumps belong together, and which have no partner.
struct RowPairing {
  std::vector<RowRange> ranges;  // in the order of side A
  std::vector<TokenPlace> unpaired;
  int64_t tokens_a = 0, tokens_b = 0;  // occurrences of rows, each frame counted
  int64_t keys = 0;                    // distinct keys on both sides
  // Pairs of frames in which some row changed its place: a digest of all rows says nothing there.
  std::set<std::pair<int64_t, int64_t>> displaced;
};

// A key that occurs in several frames (a prompt row scored again) pairs phase by phase first, then
// in order; what is left over meets the other side's first.
RowPairing PairRows(const Dump& a, const std::vector<int64_t>& frames_a, const Dump& b,
                    const std::vector<int64_t>& frames_b);

// A captured frame whose sentinel does not match its tokens: everything captured in it is void.
struct StaleFrame {
  int64_t frame = 0;
  std::string name;    // of the sentinel
  std::string detail;  // first place that differs, both words
};
// Compares each frame's sentinel with its expected value. With `embedding` [vocabulary, hidden],
// the expected row is looked up there instead, so that it owes nothing to the recorder;
// `with_sentinel`, if given, counts the frames that could be checked.
Result<std::vector<StaleFrame>> FindStaleFrames(const Dump& dump, const Tensor* embedding,
                                                int64_t* with_sentinel);

// `embedding` as for FindStaleFrames, or null.
Result<Report> DiffDumps(const Dump& a, const Dump& b, const DiffOptions& options,
                         const Tensor* embedding = nullptr);

}  // namespace tare::compare
