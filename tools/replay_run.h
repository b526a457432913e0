#pragma once

// Runs the command that a bundle recorded for one side, in a process of its own, over a batch of
// sequences, and opens the dump that it writes.

#include <memory>
#include <string>
#include <vector>

#include "compare/bundle.h"
#include "compare/replay_input.h"
#include "tensor/dump.h"

namespace tare {

// A directory for the time of this object.
class ScratchDir {
 public:
  static Result<std::shared_ptr<ScratchDir>> Create();
  ~ScratchDir();
  ScratchDir(const ScratchDir&) = delete;
  ScratchDir& operator=(const ScratchDir&) = delete;
  const std::string& path() const { return path_; }

 private:
  explicit ScratchDir(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

// REQUIRES: ReplayCommand(bundle, side) is not empty. Writes below `dir`. What the command prints
// goes to our stderr when `loud`, else nowhere; `extra` is added to it. kAborted when it cannot run
// or ends with a status of 64 or above; a verdict of its own is no error.
Result<Dump> RunRecorded(const compare::Bundle& bundle, const std::string& side,
                         const compare::ReplayBatch& batch, const std::string& dir, bool loud,
                         const std::vector<std::string>& extra = {});

// The exit status for a bundle that does not open: refused (bundle-altered) when a file does not
// match its digest, else as ReportError.
int ReportBundleError(const Status& status);

}  // namespace tare
