#pragma once

// A task directory: the log, its state, and the files that the log names. The only writer of both.
// Nothing is ever written outside the directory, and no link inside it is followed.
//
// A file counts as evidence only after its event: artifact and sidecar are on the device before the
// event that names them is appended, so a crash leaves at most files that prove nothing.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "workflow/event_log.h"
#include "workflow/recover.h"
#include "workflow/sidecar.h"
#include "workflow/state.h"

namespace tare::workflow {

inline constexpr std::string_view kToolVersion = "tare 0.1.0";

// A task read without writing or locking.
struct TaskView {
  std::string dir;
  LogView log;
  State state;
};
Result<TaskView> ReadTask(Env* env, const std::string& dir);

struct InitOptions {
  std::string model_path;                 // for recovery, may be empty
  std::vector<std::string> config_files;  // resolved configurations of other systems
  std::string recipe;                     // a recipe in task.toml's keys, may be empty
  std::string user_toml;                  // the user's own file in task.toml's format, may be empty
  std::vector<std::pair<std::string, std::string>> user_values;  // key, TOML text
};
struct InitReport {
  std::vector<ConfigConflict> conflicts;
  std::vector<Question> questions;
  std::vector<std::string> notes;
};

struct RunStart {
  std::string step;
  std::optional<EvidenceKind> kind;
  std::string parent;
  std::vector<std::string> command;
  std::string candidate;
  std::string content_id;  // 64 hex digits, or empty when the run has no configuration
  int64_t heartbeat_s = 5;
  std::vector<Dependency> dependencies;
};
struct RunEnd {
  std::optional<int64_t> exit_code;
  int64_t signal = 0;
  std::optional<Conclusion> conclusion;
  std::vector<Dependency> dependencies;  // found while it ran
};

class Task {
 public:
  // Makes `dir` (whose parent must exist) a task. kAlreadyExists when it is one; a directory with
  // files that are not Tare's is refused, so that two things never share a folder.
  static Result<std::unique_ptr<Task>> Init(Env* env, const std::string& dir,
                                            const std::string& actor, const InitOptions& options,
                                            InitReport* report);
  // Opens for writing; holds the writer lock until destroyed.
  static Result<std::unique_ptr<Task>> Open(Env* env, const std::string& dir,
                                            const std::string& actor);

  const State& state() const { return state_; }
  const std::string& dir() const { return dir_; }
  Env* env() const { return env_; }
  const EventLog& log() const { return *log_; }

  // Appends, then applies. The error of an event that contradicts the state comes before anything
  // is written.
  Result<Event> Append(const EventDraft& draft);

  // Takes task.toml as it is now into the log and asks or closes questions. kInvalidArgument when
  // it is malformed; kPrecondition when nothing changed.
  Result<InitReport> Amend(const std::string& reason);

  // Starts a run and returns its ID; its folder exists afterwards. kExhausted when command and
  // dependencies are too long for the sidecars of its artifacts.
  Result<std::string> StartRun(const RunStart& start);
  // Writes bytes, or takes a file by path (copied in, or in place when it lies in the run's folder
  // already), as an artifact with sidecar and event. Raw results, configurations, identities and
  // conclusions that are empty are refused, as is a name whose sidecar's place is taken.
  Status AddBytes(const std::string& run_id, const std::string& name, Role role,
                  std::string_view bytes);
  Status AddFile(const std::string& run_id, const std::string& name, Role role,
                 const std::string& source);
  Status EndRun(const std::string& run_id, const RunEnd& end);
  // Records every open run whose process is gone as lost; returns their IDs.
  Result<std::vector<std::string>> MarkLostRuns();

  // One event per refusal, so that it stays visible.
  Status Refuse(const std::string& what, std::string_view reason, const std::string& detail);

  // Renews index.md and the step indices where they differ.
  Status WriteIndexes();

  std::string RunDir(const RunRecord& run) const;

 private:
  Task() = default;
  Status RecordConfig(const TaskConfig& config, std::string_view bytes, const std::string& reason,
                      InitReport* report);
  Status Record(const RunRecord& run, const std::string& path, Role role, std::string_view bytes);
  Result<std::string> SidecarFor(const RunRecord& run, const std::string& path, Role role,
                                 const std::string& sha256) const;
  Status CheckArtifact(const RunRecord& run, const std::string& name, Role role,
                       std::string_view bytes) const;
  void RemoveHeartbeat(const RunRecord& run);

  Env* env_ = nullptr;
  std::string dir_;
  std::string actor_;
  std::unique_ptr<EventLog> log_;
  State state_;
};

// Makes `path` a real directory if it is not there; a link or file in its place is refused.
Status EnsurePlainDir(Env* env, const std::string& path);
bool IsPlainDir(Env* env, const std::string& path);
// kOk only for a plain file (no link, no device).
Status CheckPlainFile(Env* env, const std::string& path);

}  // namespace tare::workflow
