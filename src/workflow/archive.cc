#include "workflow/archive.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/reasons.h"
#include "workflow/layout.h"
#include "workflow/task.h"

namespace tare::workflow {
namespace {

bool IsGenerated(const std::string& path) {
  if (path == kIndexFile) return true;
  const size_t slash = path.find('/');
  return slash != std::string::npos && IsStep(path.substr(0, slash)) &&
         path.substr(slash + 1) == kIndexFile;
}

// Every file that an archive may hold.
std::set<std::string> Expected(const State& state) {
  std::set<std::string> out = {std::string(kTaskFile), std::string(kLogFile),
                               std::string(kLockFile)};
  for (const ArtifactRecord& a : state.artifacts) {
    out.insert(a.path);
    out.insert(a.path + std::string(kSidecarSuffix));
  }
  for (const auto& [path, digest] : state.set_aside) out.insert(path);
  return out;
}

// An error when `target` would lie inside `dir`, by whatever way its path leads there: the folders
// above it are told by device and inode.
Status CheckOutside(Env* env, const std::string& dir, const std::string& target) {
  TARE_ASSIGN_OR_RETURN(const FileInfo task, env->Stat(JoinPath(dir, ".")));
  const std::string trimmed = target.substr(0, target.find_last_not_of('/') + 1);
  const size_t slash = trimmed.find_last_of('/');
  std::string above = slash == std::string::npos ? "." : trimmed.substr(0, slash + 1) + ".";
  const auto same = [](const FileInfo& a, const FileInfo& b) {
    return a.device == b.device && a.inode == b.inode;
  };
  for (FileInfo below; true; above += "/..") {
    TARE_ASSIGN_OR_RETURN(const FileInfo here, env->Stat(above));
    if (same(here, task)) {
      return InvalidArgument("{} lies inside {}; an archive is a folder apart", Printable(target),
                             Printable(dir));
    }
    if (same(here, below)) return Ok();  // the root
    below = here;
  }
}

}  // namespace

Result<std::vector<Finding>> CheckArchive(Env* env, const std::string& dir) {
  TARE_ASSIGN_OR_RETURN(const TaskView view, ReadTask(env, dir));
  const State& state = view.state;
  std::vector<Finding> out;
  for (const LogProblem& p : state.problems) {
    // The state refuses an artifact after its run's end, or outside of its folder; here is its
    // name.
    if (p.message.find("after its run ended") != std::string::npos) {
      out.push_back({std::string(reason::kLateFile), fmt::format("event {}", p.seq), p.message});
    } else if (p.message.find("folder of its run") != std::string::npos ||
               p.message.find("an artifact lies at") != std::string::npos) {
      out.push_back(
          {std::string(reason::kMisplacedFile), fmt::format("event {}", p.seq), p.message});
    }
  }
  for (const RunRecord& run : state.runs) {
    if (!run.ended && !run.lost) {
      out.push_back({std::string(reason::kRunOpen), run.step + "/" + run.id,
                     "an archive is made of ended runs"});
    }
  }
  const std::set<std::string> expected = Expected(state);
  // Digest by content would need all bytes; a misplaced file is known by its name and size.
  std::multimap<std::pair<std::string, uint64_t>, std::string> by_name;
  for (const ArtifactRecord& a : state.artifacts) {
    auto path = ParseArtifactPath(a.path);
    if (path.ok()) by_name.emplace(std::make_pair(path->name, a.bytes), a.path);
  }
  const auto listed = ListTree(env, dir);
  if (!listed.ok()) {
    out.push_back({std::string(reason::kUnreadable), "", Printable(listed.status().message())});
    return out;
  }
  const std::vector<TreeEntry>& tree = *listed;
  std::set<std::string> present;
  for (const TreeEntry& e : tree) present.insert(e.path);
  for (const TreeEntry& e : tree) {
    if (expected.count(e.path) != 0 || IsGenerated(e.path)) continue;
    const std::string name = e.path.substr(e.path.find_last_of('/') + 1);
    const auto [first, last] = by_name.equal_range({name, e.info.size_bytes});
    const auto home = std::find_if(
        first, last, [&](const auto& entry) { return present.count(entry.second) == 0; });
    if (home != last) {
      out.push_back({std::string(reason::kMisplacedFile), Printable(e.path),
                     "it was recorded at " + home->second});
      continue;
    }
    // Inside the folder of a run that has ended: it came after.
    auto path = ParseArtifactPath(e.path);
    const RunRecord* run = path.ok() ? state.FindRun(path->run_id) : nullptr;
    if (run != nullptr && run->ended && !e.path.ends_with(kSidecarSuffix)) {
      out.push_back({std::string(reason::kLateFile), Printable(e.path),
                     "it lies in the folder of a run that ended without it"});
    } else {
      out.push_back({std::string(reason::kUnrecordedFile), Printable(e.path),
                     "an orphan: no event names it"});
    }
  }
  for (const std::string& path : expected) {
    if (path != kLockFile && present.count(path) == 0) {
      out.push_back({std::string(reason::kArtifactMissing), path, "it is recorded and not there"});
    }
  }
  return out;
}

Result<ArchiveReport> ArchiveTask(Env* env, const std::string& dir, const std::string& target,
                                  const std::string& actor) {
  TARE_RETURN_IF_ERROR(CheckOutside(env, dir, target));
  TARE_ASSIGN_OR_RETURN(const auto task, Task::Open(env, dir, actor));
  TARE_RETURN_IF_ERROR(task->WriteIndexes());
  TARE_ASSIGN_OR_RETURN(const auto layout, CheckArchive(env, dir));
  if (!layout.empty()) {
    return Error(Code::kPrecondition, "{} findings about the layout, the first: {} {}: {}",
                 layout.size(), layout[0].reason, layout[0].where, layout[0].message);
  }
  TARE_ASSIGN_OR_RETURN(const VerifyReport before, VerifyTask(env, dir));
  if (before.verdict != Verdict::kPass) {
    return Error(Code::kPrecondition, "the task does not verify: {} {}", before.findings[0].reason,
                 before.findings[0].where);
  }
  if (env->Stat(target).ok()) {
    return Error(Code::kAlreadyExists, "{} exists; an archive is made once", Printable(target));
  }
  TARE_RETURN_IF_ERROR(env->CreateDir(target));
  ArchiveReport report;
  TARE_ASSIGN_OR_RETURN(const auto tree, ListTree(env, dir));
  for (const TreeEntry& e : tree) {
    if (e.path == kLockFile) continue;
    const size_t slash = e.path.find_last_of('/');
    if (slash != std::string::npos) {
      TARE_RETURN_IF_ERROR(env->CreateDirs(JoinPath(target, e.path.substr(0, slash))));
    }
    TARE_ASSIGN_OR_RETURN(const auto file, env->OpenReadable(JoinPath(dir, e.path)));
    TARE_RETURN_IF_ERROR(env->WriteFileAtomic(JoinPath(target, e.path), file->bytes()));
    ++report.files;
    report.bytes += file->bytes().size();
  }
  VerifyOptions options;
  options.checkpoint = before.head;
  TARE_ASSIGN_OR_RETURN(const VerifyReport after, VerifyTask(env, target, options));
  if (after.verdict != Verdict::kPass) {
    return DataLoss("the copy does not verify: {} {}", after.findings[0].reason,
                    after.findings[0].where);
  }
  report.checkpoint = after.head;
  return report;
}

}  // namespace tare::workflow
