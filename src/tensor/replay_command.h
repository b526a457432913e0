#pragma once

// The command that computes a dump's frames again, as it stands in `identity.replay` of the dump's
// manifest: the arguments of `tare score`, in which "{tokens}" stands for the file of token
// sequences and "{dump}" for the dump to write. Whatever program wrote the dump (a server, a
// trainer), scoring the same tokens under the same profile, side, faults and arm must bring the
// same bits; where it does not, that is a finding (`replay-differs`).

#include <string>
#include <vector>

#include "base/json.h"

namespace tare {

struct ScoreCommand {
  std::string model;  // path; made absolute, so that the command runs from anywhere
  std::string profile = "ieee-f32";
  std::string side = "none";
  std::string faults;          // as fault::Selected()
  std::string weight_version;  // label of the frames
  int64_t batch_tokens = 2048;
  int64_t chunk = 0;  // 0: whole sequences; 1: token by token through a paged cache
  int64_t page_size = 16;
  int64_t row_align = 1;
  float temperature = 1.0f;
  bool longest_first = false;
  bool entropy = false;
  bool tape = false;
  bool native = false;
};

Json ReplayArguments(const ScoreCommand& command);

}  // namespace tare
