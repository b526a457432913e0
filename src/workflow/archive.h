#pragma once

// Archiving a task (GEN-19, DOC-30): a copy that moves with all links intact, because every path in
// it is relative to the task, and a check of the layout beyond what verification needs: no orphan,
// no misplaced file, nothing added late.

#include <string>
#include <vector>

#include "workflow/verify.h"

namespace tare::workflow {

// Layout findings: unrecorded-file (an orphan), misplaced-file, late-file, run-open; all of them
// fail here. Empty when the layout is as docs/formats/task.md says. Verification is separate.
Result<std::vector<Finding>> CheckArchive(Env* env, const std::string& dir);

struct ArchiveReport {
  uint64_t files = 0;
  uint64_t bytes = 0;
  Checkpoint checkpoint;
};
// Copies a task that verifies and whose layout is clean to `target`, which must not exist, then
// verifies the copy. The copy holds recorded files and generated pages only. The source is not
// changed; its writer lock is held meanwhile.
Result<ArchiveReport> ArchiveTask(Env* env, const std::string& dir, const std::string& target,
                                  const std::string& actor);

}  // namespace tare::workflow
