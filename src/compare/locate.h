#pragma once

// First divergence of two dumps. First, for every layer, the first differing token over the whole
// prompt batch; then the operators in execution order: the first whose output differs anywhere. All
// that was recorded before it is equal at every row, so growth downstream and history-dependent
// operators at later tokens cannot take the blame.
//
// It is called the *cause* only with proof: its inputs are declared, captured on both sides and
// equal from position 0 of the sequence on, weight hashes are recorded and equal, and a sentinel
// shows that the frames are fresh. Otherwise it is a *candidate*, and the report says what is
// missing.

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/env.h"
#include "base/json.h"
#include "base/status.h"
#include "compare/dump_diff.h"

namespace tare::compare {

struct LayerRow {
  int layer = -1;
  int64_t tensors = 0;       // compared in this layer
  int64_t differing = 0;     // of these
  std::string first_tensor;  // in execution order; empty: the layer is equal
  // Lowest position at which anything in the layer differs, per sequence, by sequence of side A.
  std::vector<std::pair<std::string, int64_t>> first_tokens;
};

struct Site {
  std::string name;
  std::string op;
  int layer = -1;
  std::string phase_a, phase_b;
  std::string sequence;
  int64_t position = -1;  // -1 for a tensor without rows
  int32_t token = 0;
  std::vector<int64_t> coordinate;
  DType dtype = DType::kF32;
  uint64_t word_a = 0, word_b = 0;
  bool words_known = false;  // false when only digests were kept
  int64_t mismatches = 0;
  int64_t rows_differing = 0;
  std::vector<std::string> inputs;
  std::vector<std::string> unproven;  // what keeps it a candidate
  int64_t frame_a = -1, frame_b = -1;
};

struct LocateReport {
  std::string a, b;
  Verdict verdict = Verdict::kInconclusive;
  std::string_view reason;  // first-divergence for a proven cause
  std::string why;
  std::vector<LayerRow> layers;
  bool found = false;  // `site` is set
  Site site;
  std::vector<std::string> notes;
};

// `embedding`: as for FindStaleFrames, or null.
Result<LocateReport> Locate(const Dump& a, const Dump& b, const DiffOptions& options,
                            const Tensor* embedding);

std::string LocateTable(const LocateReport& report);
Json LocateJson(const LocateReport& report);

}  // namespace tare::compare
