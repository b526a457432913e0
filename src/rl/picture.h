#pragma once

// Which token in which layer agrees: the values of one sequence in two dumps, counted by layer and
// position. For looking at; verdicts come from `tare diff` and `tare locate`.

#include <cstdint>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"

namespace tare::rl {

struct Picture {
  std::vector<std::string> rows;                // "embedding", "layer 0", ..., "head"
  std::vector<int32_t> tokens;                  // by position
  std::vector<std::vector<int64_t>> compared;   // [rows][positions], elements on both sides
  std::vector<std::vector<int64_t>> differing;  // of these, other bits
};

// Dumps of one sequence each, in any number of frames. Rows pair by position; a position whose
// token differs is kInvalidArgument. Tensors on one side only are not counted.
Result<Picture> DrawPicture(Env* env, const std::string& a, const std::string& b);

}  // namespace tare::rl
