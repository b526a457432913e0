#pragma once

// `tare verify`: everything an outsider can check about a task, offline and without writing: the
// chain, every recorded file and sidecar, every signature, generated pages, and what is not proven.

#include <optional>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/verdict.h"
#include "workflow/event.h"

namespace tare::workflow {

struct Finding {
  std::string reason;  // code of base/reasons.h; its usual verdict says how bad it is
  std::string where;   // path or event, printable
  std::string message;
};

struct VerifyOptions {
  std::optional<Checkpoint> checkpoint;
  int threads = 0;     // 0: one per CPU
  bool quick = false;  // leave artifact bytes unread (status); says so in `not_proven`
};

struct VerifyReport {
  Verdict verdict = Verdict::kInconclusive;  // pass, fail, inconclusive (a torn tail)
  std::vector<Finding> findings;             // worst first, then by path
  std::vector<std::string> not_proven;       // always some: what this cannot show
  std::string task_id;
  Checkpoint head;  // what a checkpoint of the log as it stands would say
  uint64_t events = 0, runs = 0, artifacts = 0, signoffs = 0, stale_runs = 0;
  uint64_t bytes_hashed = 0;
};

// Status errors only when there is no log to read at all.
Result<VerifyReport> VerifyTask(Env* env, const std::string& dir,
                                const VerifyOptions& options = {});

// Every file below `dir`, links and devices included, relative and sorted; links are not followed.
// A folder that cannot be read is the error, or goes to `unread` with its path, where that is
// given.
struct TreeEntry {
  std::string path;
  FileInfo info;
};
struct UnreadFolder {
  std::string path;
  Status status;
};
Result<std::vector<TreeEntry>> ListTree(Env* env, const std::string& dir,
                                        std::vector<UnreadFolder>* unread = nullptr);

}  // namespace tare::workflow
