#pragma once

// Shared by the collectors of C5 and C8: one recorded `tare rl run`, read back.

#include <map>
#include <string>

#include "workflow/gates/collect.h"
#include "workflow/gates/evidence_parts.h"

namespace tare::workflow {

struct LoopRun {
  std::string folder;  // of the receipt, inside the task
  Json receipt;
  std::map<std::string, std::string> files;  // name -> text of each file that the receipt names
  Json runtime;                              // for LoopFromReceipt
  Recipe contracts;                          // operator -> digest of its contract IDs
};
// Runs the two-step loop on the collection's model: `arithmetic` where a tokenizer lies beside the
// weights, else `pattern`. kDataLoss when its receipt cannot be read.
Result<LoopRun> RecordLoop(Collecting* collecting);

}  // namespace tare::workflow
