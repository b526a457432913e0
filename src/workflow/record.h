#pragma once

// `tare record -- COMMAND`: runs any command as a run of the task and keeps what it said, wrote and
// was. The writer lock is held only for the moments of writing, so that many runs go on at once.
//
// The command finds its run in the environment: TARE_TASK, TARE_STEP, TARE_RUN_ID and TARE_OUT, a
// folder of its own inside the task; every file it leaves there becomes an artifact. It may leave
// `conclusion.json` there (docs/formats/run.md). The recorder dies: the command is killed with it.

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "workflow/identity.h"
#include "workflow/inputs.h"
#include "workflow/staleness.h"
#include "workflow/task.h"

namespace tare::workflow {

struct RecordOptions {
  std::string step;
  EvidenceKind kind = EvidenceKind::kE1;
  std::vector<std::string> command;
  std::string parent;
  std::string candidate;
  std::vector<std::string> inputs;   // "code:PATH" or "code:NAME=PATH": file or folder, hashed
  std::vector<std::string> depends;  // "weights:NAME=<64 hex>" and "artifact:C2/x.json"
  std::vector<std::string>
      config_keys;                     // configuration that it depends on; empty: all with meaning
  std::vector<std::string> materials;  // files of TARE_OUT that are no raw results, by name
  std::string conclude;  // "", "exit-status" (Tare's exit codes) or a path to a conclusion.json
  Scope scope;           // for "exit-status"
  int64_t heartbeat_s = 5;
  bool quiet = false;  // do not pass the output on
  // With a candidate: why cheaper levels of the ladder that never ran are passed over (CHEAP-01).
  std::string skip_levels;
  bool expand_out = false;  // `{out}` in a word of the command is the path of TARE_OUT
};
struct RecordReport {
  std::string run_id;
  std::optional<int64_t> exit_code;
  int64_t signal = 0;
  EvidenceStatus status;  // what the run may be used for
  std::vector<std::string> artifacts;
  // What was not taken as an artifact or conclusion, each with its reason; an event `refused` each.
  std::vector<std::string> refused;
};
// Once the command runs, the run ends in the log with its exit status, whatever it did to its
// folder: what cannot be kept is refused by name, and then the run is no pass. For the end it waits
// for the writer's lock as long as it takes.
Result<RecordReport> RecordCommand(Env* env, const std::string& dir, const std::string& actor,
                                   const RecordOptions& options);

// Files made elsewhere, as one run that starts and ends now.
struct AddOptions {
  std::string step;
  EvidenceKind kind = EvidenceKind::kE1;
  std::string parent;
  std::string candidate;
  std::vector<std::string> raw;  // at least one
  std::vector<std::string> materials;
  std::string config, identity, conclusion;  // paths; what lacks makes the run incomplete
  std::optional<int64_t> exit_code;          // of the process that made them, where known
  std::vector<std::string> inputs, depends, config_keys;
};
Result<RecordReport> AddArtifacts(Env* env, const std::string& dir, const std::string& actor,
                                  const AddOptions& options);

// Opens the task, waiting up to `wait_s` for another writer to finish.
Result<std::unique_ptr<Task>> OpenWaiting(Env* env, const std::string& dir,
                                          const std::string& actor, int64_t wait_s = 60);

}  // namespace tare::workflow
