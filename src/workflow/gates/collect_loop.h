#pragma once

// Shared by the collectors of C5 to C10: one recorded `tare rl run`, read back, and what a person
// agreed at C1.

#include <map>
#include <string>

#include "workflow/gates/collect.h"
#include "workflow/gates/evidence_parts.h"

namespace tare::workflow {

struct LoopRun {
  std::string folder;   // of the receipt, inside the task
  std::string verdict;  // as `tare rl run` ended
  Json receipt;
  std::map<std::string, std::string> files;  // name -> text of each file that the receipt names
  Json runtime;                              // for LoopFromReceipt
  Recipe contracts;                          // operator -> digest of its contract IDs
};
// Learning rate of a model that was trained already. AdamW's first steps move every weight by it:
// at 1e-4, which MINI's random weights need, SmolLM2 is blown up within four steps and its arms
// with it.
inline constexpr const char* kTrainedModelRate = "2e-5";
// The generated checkpoint: it was trained on no text, so its questions are patterns of tokens and
// its rate is the commands' own.
Result<bool> IsMini(Collecting* c);

// Runs the two-step loop on the collection's model: `pattern` with MINI, else
// `arithmetic`. kDataLoss when its receipt cannot be read.
// `more`: further options of `tare rl run`, which win over the usual ones.
Result<LoopRun> RecordLoop(Collecting* collecting, const std::vector<std::string>& more = {});

// What C1 agreed, as `agreement` of the evidence of C6, C9 and C10: null until the baseline of C1
// stands signed.
Result<Json> AgreementOf(Collecting* collecting);
Recipe RecipeFromJson(const Json& object);

// The newest evidence document of a gate, as the ledger has it.
struct RecordedEvidence {
  std::string sha256, owner, time, verdict;
  Json document;
};
Result<RecordedEvidence> RecordedEvidenceOf(Collecting* collecting, const std::string& gate);

}  // namespace tare::workflow
