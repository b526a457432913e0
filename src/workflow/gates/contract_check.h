#pragma once

// The user's contract against what an evidence document is about (GEN-04): model, precision,
// parallelism and consistency target are the user's to change. A pass for a fallback (BF16 for FP8,
// one rank for two, a tolerance for equal bits) is no pass for what was asked.

#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "workflow/gates/judge.h"
#include "workflow/task_config.h"

namespace tare::workflow {

struct ContractChange {
  std::string key;       // of task.toml, "precision.kv_cache"
  std::string user;      // as the user's configuration has it
  std::string evidence;  // as the document has it
};
// Where the evidence document of a gate says another thing than a key that the user set. Keys that
// are not set, and documents that say nothing of them, ask nothing.
std::vector<ContractChange> ContractChanges(const TaskConfig& user, const Json& evidence);
// The same as findings of row GEN-04.
std::vector<GateFinding> ContractFindings(const TaskConfig& user, const Json& evidence);

// "model", "precision", "parallelism" or "target" for the keys that make the contract, else "".
std::string_view ContractPart(std::string_view key);
// task.toml as it is now against the configuration in the log: keys of the contract that were
// changed without an amendment.
std::vector<ContractChange> UnrecordedChanges(const TaskConfig& recorded, const TaskConfig& now);

}  // namespace tare::workflow
