#pragma once

// The two-step loop as evidence: what C8 judges on the proxy and C10 on the delivery image. A
// second judge of a loop's receipt beside rl/judge.h, with which it shares no code; it judges the
// normalised form that LoopFromReceipt makes of a receipt and the logprob files beside it.

#include <map>
#include <string>
#include <vector>

#include "workflow/gates/evidence_parts.h"

namespace tare::workflow {

struct LoopEvent {
  std::string event;
  int64_t version = 0;
};
struct LoopProcess {
  std::string name;
  int64_t pid = 0, code = 0, signal = 0;
  bool ended = false, flushed = false;
};
struct LoopQuestion {
  std::string name;
  std::vector<double> rewards;
  std::vector<uint32_t> advantages;  // f32 words
};
struct LoopVersion {
  int64_t version = 0, rollout_pid = 0, engine_version = 0;
  std::string trainer_deployed, trainer_master, engine_held;
  std::vector<int64_t> sampled_versions;
  std::vector<LoopQuestion> questions;
  std::map<std::string, LogprobPath> paths;
  std::map<std::string, std::string> sources;
  std::map<std::string, bool> recorded;
  std::map<std::string, int64_t> labels;
};
struct LoopParameter {
  std::string name;
  int64_t elements = 0, nonzero = 0, non_finite = 0, master_changed = 0, deployed_changed = 0;
};
struct LoopUpdate {
  int64_t from = 0, to = 0, ratio_not_one = 0, published_version = 0, trainer_pid = 0;
  double kl = 0, entropy = 0;
  uint32_t lr = 0;  // f32 word
  bool skipped = false, cache_reset = false;
  std::string master_before, master_after, deployed_before, deployed_after;
  std::string moments_before, moments_after;  // empty when not recorded
  std::string published, held;
  std::vector<LoopParameter> parameters;
  LoopParameter totals;
};
struct Loop {
  std::string entry, mode;
  Recipe recipe;
  std::string prior_receipt;  // empty: none
  bool moments_recorded = false;
  std::vector<LoopProcess> processes;
  SideIdentity rollout, trainer;
  std::vector<LoopEvent> events;
  std::vector<LoopVersion> versions;
  std::vector<LoopUpdate> updates;
};

Loop ReadLoop(const Field& field);
// Every question of docs/formats/gate_evidence_c5_c10.md, "The loop". Adds the scope that a pass
// covers.
void CheckLoop(Judging* judging, const Subject& subject, const Loop& loop);

// The document's "loop" from `receipt` (tare.receipt/1) and the text of the files that it names, by
// name. kInvalidArgument when it cannot be read as a receipt; what it says is not judged.
// `runtime` is put into both identities:
// {"interpreter","packages","libraries","driver","topology","contracts","vocabulary"} and, where
// known, "images": executable's SHA-256 -> digest of the image that holds it.
Result<Json> LoopFromReceipt(const Json& receipt, const std::map<std::string, std::string>& files,
                             const Json& runtime);

}  // namespace tare::workflow
