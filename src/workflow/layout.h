#pragma once

// Where things lie in a task directory, and which names are allowed there (docs/formats/task.md):
//
//   task.toml                      the user's configuration
//   events.jsonl                   the log; events.lock its writer lock, always empty
//   events.torn-<seq>-<8 hex>      a torn last line that a recovery set aside
//   index.md, <step>/index.md      generated
//   <step>/<run id>/<name>         an artifact of a run, with <name>.intoto.jsonl beside it
//   <step>/<run id>/heartbeat      only while the run is open
//
// A step is one of C0 to C10, or `task` for what concerns the whole task.

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace tare::workflow {

inline constexpr std::string_view kTaskFile = "task.toml";
inline constexpr std::string_view kLogFile = "events.jsonl";
inline constexpr std::string_view kLockFile = "events.lock";
inline constexpr std::string_view kTornPrefix = "events.torn-";
inline constexpr std::string_view kIndexFile = "index.md";
inline constexpr std::string_view kHeartbeatFile = "heartbeat";
inline constexpr std::string_view kSidecarSuffix = ".intoto.jsonl";

// "C0" ... "C10", then "task".
std::span<const std::string_view> AllSteps();
bool IsStep(std::string_view name);

// A path inside the task: relative, UTF-8, no empty, `.` or `..` component, no backslash, control
// character or direction override, components of at most 200 bytes, 1,000 bytes in all.
Status CheckRelativePath(std::string_view path);

// The parts of `<step>/<run id>/<name>`; kInvalidArgument when the path is not of that form or the
// name is one that Tare keeps for itself (sidecar suffix, heartbeat, index.md).
struct ArtifactPath {
  std::string step;
  std::string run_id;
  std::string name;  // may hold folders
};
Result<ArtifactPath> ParseArtifactPath(std::string_view path);
// The same for an artifact that is about to be recorded, which has at most kMaxPathParts parts:
// what walks a task, this program or another, may count on that. Older logs may hold deeper ones.
inline constexpr size_t kMaxPathParts = 32;
Result<ArtifactPath> CheckRecordable(std::string_view path);
// The path of `name` in some run of the step, to check a name before there is a run.
std::string SomeArtifactPath(std::string_view step, std::string_view name);
// `<step>/<name>`: what a later run depends on, whichever run made it.
std::string LogicalName(const ArtifactPath& path);

std::string JoinPath(std::string_view a, std::string_view b);

}  // namespace tare::workflow
