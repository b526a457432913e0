#pragma once

// Writing a large file where one of about the same size is no longer needed: over its bytes. The
// kernel then has the pages and the disk the blocks already; fresh ones cost several times the copy
// where memory that lies idle is given back to a host (docs/results/trainer-2026-11-29.md).
//
// Real file system only, and never atomic: the file must have a name that nobody takes for whole,
// and gets its own by a rename after Sync.

#include <memory>
#include <string>

#include "base/env.h"

namespace tare {

// Of an existing regular file that nobody else reads or maps. What is appended goes from its start,
// and to the disk from the first megabytes on; Sync cuts the file where the writing ended.
Result<std::unique_ptr<WritableFile>> OpenToOverwrite(const std::string& path);

}  // namespace tare
