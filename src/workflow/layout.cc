#include "workflow/layout.h"

#include <algorithm>
#include <array>

#include "base/json.h"
#include "workflow/uuid.h"

namespace tare::workflow {
namespace {

constexpr std::array<std::string_view, 12> kSteps = {"C0", "C1", "C2", "C3", "C4",  "C5",
                                                     "C6", "C7", "C8", "C9", "C10", "task"};

}  // namespace

std::span<const std::string_view> AllSteps() { return kSteps; }

bool IsStep(std::string_view name) {
  return std::find(kSteps.begin(), kSteps.end(), name) != kSteps.end();
}

Status CheckRelativePath(std::string_view path) {
  if (path.empty()) return InvalidArgument("path: empty; a name inside the task is needed");
  if (path.size() > 1000) {
    return InvalidArgument("path: {} bytes long; at most 1,000 are allowed", path.size());
  }
  const std::string shown = Printable(path);
  if (shown != path) {
    return InvalidArgument(
        "path {}: control characters, invalid UTF-8 or direction overrides are not allowed", shown);
  }
  if (path.find('\\') != std::string_view::npos) {
    return InvalidArgument("path {}: backslashes are not allowed", shown);
  }
  if (path.front() == '/') return InvalidArgument("path {}: must be relative to the task", shown);
  size_t begin = 0;
  while (begin <= path.size()) {
    const size_t end = std::min(path.find('/', begin), path.size());
    const std::string_view part = path.substr(begin, end - begin);
    if (part.empty() || part == "." || part == "..") {
      return InvalidArgument("path {}: empty, `.` and `..` components are not allowed", shown);
    }
    if (part.size() > 200) return InvalidArgument("path {}: a component has over 200 bytes", shown);
    begin = end + 1;
  }
  return Ok();
}

Result<ArtifactPath> ParseArtifactPath(std::string_view path) {
  TARE_RETURN_IF_ERROR(CheckRelativePath(path));
  const size_t a = path.find('/');
  const size_t b = a == std::string_view::npos ? a : path.find('/', a + 1);
  if (b == std::string_view::npos) {
    return InvalidArgument("path {}: an artifact lies at <step>/<run id>/<name>", path);
  }
  ArtifactPath out{std::string(path.substr(0, a)), std::string(path.substr(a + 1, b - a - 1)),
                   std::string(path.substr(b + 1))};
  if (!IsStep(out.step)) {
    return InvalidArgument("path {}: {} is not a step (C0 to C10, task)", path, out.step);
  }
  if (!IsRunId(out.run_id)) return InvalidArgument("path {}: {} is not a run ID", path, out.run_id);
  if (out.name.ends_with(kSidecarSuffix) || out.name == kHeartbeatFile || out.name == kIndexFile) {
    return InvalidArgument("path {}: the name {} is kept for Tare's own files", path, out.name);
  }
  return out;
}

Result<ArtifactPath> CheckRecordable(std::string_view path) {
  TARE_ASSIGN_OR_RETURN(ArtifactPath out, ParseArtifactPath(path));
  const size_t parts = static_cast<size_t>(std::count(path.begin(), path.end(), '/')) + 1;
  if (parts > kMaxPathParts) {
    return InvalidArgument("path {}: {} parts; at most {} are recorded", path, parts,
                           kMaxPathParts);
  }
  return out;
}

std::string SomeArtifactPath(std::string_view step, std::string_view name) {
  return fmt::format("{}/00000000-0000-7000-8000-000000000000/{}", step, name);
}

std::string LogicalName(const ArtifactPath& path) { return path.step + "/" + path.name; }

std::string JoinPath(std::string_view a, std::string_view b) {
  std::string out(a);
  if (!out.empty() && out.back() != '/') out += '/';
  out += b;
  return out;
}

}  // namespace tare::workflow
