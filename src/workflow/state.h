#pragma once

// The state of a task: what its event log says, and nothing else. Rebuilding it from the log gives
// the live state. An event that contradicts those before it is kept as a problem and changes
// nothing, so that one bad record never hides the others.

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "workflow/event.h"
#include "workflow/evidence.h"
#include "workflow/task_config.h"

namespace tare::workflow {

struct ArtifactRecord {
  uint64_t seq = 0;
  std::string path;  // <step>/<run id>/<name>
  std::string sha256;
  std::string sidecar_sha256;
  uint64_t bytes = 0;
  Role role = Role::kRaw;
};

struct RunRecord {
  std::string id;
  std::string step;
  std::optional<EvidenceKind> kind;  // none: a review, not evidence
  std::string parent;                // run that this one retries; empty when first
  std::vector<std::string> command;  // empty: artifacts made elsewhere
  std::string candidate;             // empty when not about one
  std::string content_id;            // SHA-256 of the resolved configuration
  std::string actor;
  // Who runs it, to tell a lost run from a running one.
  std::string host, boot_id;
  int64_t pid = 0;
  uint64_t pid_start = 0;  // clock ticks since boot, /proc/PID/stat
  int64_t heartbeat_s = 0;
  uint64_t start_seq = 0;
  std::string started;
  std::string known_time;  // the log's latest time when it started: no clock set back undoes it

  bool ended = false;
  bool lost = false;
  uint64_t end_seq = 0;
  std::string finished;
  std::optional<int64_t> exit_code;  // none: no process, or killed
  int64_t signal = 0;
  std::optional<Conclusion> conclusion;

  std::vector<Dependency> dependencies;
  std::vector<size_t> artifacts;  // indices into State::artifacts
  std::string superseded_by;
};

struct ConfigRecord {
  uint64_t seq = 0;
  std::string sha256;  // of task.toml
  std::string reason;
  TaskConfig config;
};

struct Observation {
  uint64_t seq = 0;
  std::string candidate;  // empty: holds for all
  std::string digest;     // empty: could not be determined, which counts as changed
};

struct ReviewRequest {
  uint64_t seq = 0;
  std::string run_id;
  std::string step;
  std::string bundle_sha256;
  std::string bundle_path;
  std::string requester;
  std::vector<std::string> requester_keys;  // fingerprints
  std::vector<Dependency> dependencies;
  std::vector<std::string> runs;  // evidence under review that passed when it was asked for
};

struct SignOffRecord {
  uint64_t seq = 0;
  std::string time;  // the log's latest time when its run started: what validity is held against
  std::string run_id;
  std::string step;
  std::string bundle_sha256;
  std::string statement_path, signature_path;
  std::string person;
  std::string key;        // fingerprint
  bool approves = false;  // else it rejects
  // Why its files do not bear it out (MarkSignOffs); empty while they do or were not looked at.
  std::string void_because;
};

struct CandidateRecord {
  std::string name;
  std::string step;
  std::string state;  // "proposed", "excluded"
  std::string reason;
  uint64_t seq = 0;
  std::vector<Dependency> identity;
  std::string previous;
  Json ledger;  // kept, lost, withdrawn against `previous`, as recorded
};

struct GateRecord {
  std::string gate;
  Verdict verdict = Verdict::kInconclusive;
  std::string reason;
  std::string detail;
  uint64_t seq = 0;
};

struct RefusalRecord {
  uint64_t seq = 0;
  std::string what, reason, detail;
};

struct LogProblem {
  uint64_t seq = 0;
  std::string message;
};

// Every event type, for docs/formats/task.md and for readers.
std::span<const std::string_view> AllEventTypes();

class State {
 public:
  // What the event says is taken over, or noted in `problems`.
  void Apply(const Event& event);
  // The same for an event that is about to be written: an error leaves the state as it was.
  Status Accept(const Event& event);

  const RunRecord* FindRun(const std::string& id) const;
  const ArtifactRecord* FindArtifact(const std::string& path) const;
  const ConfigRecord* config() const { return configs.empty() ? nullptr : &configs.back(); }
  // The first artifact of a run with this role, or nullptr.
  const ArtifactRecord* ArtifactOf(const RunRecord& run, Role role) const;
  // Which of config, identity, raw, conclusion and end a run lacks; an empty file is none. Nothing
  // when it is complete (GEN-16).
  std::vector<std::string> MissingLinks(const RunRecord& run) const;
  // The latest word on a candidate at a step, or nullptr.
  const CandidateRecord* FindCandidate(const std::string& name, const std::string& step) const;
  // What is known of a dependency now: the latest observation for `candidate` or for all.
  const Observation* Current(const std::string& dependency_id, const std::string& candidate) const;

  // The whole state, for comparing a rebuilt with a live one.
  Json ToJson() const;

  std::string task_id;  // empty before `task-created`
  std::string created;
  uint64_t events = 0;
  std::string latest_time;  // the latest `time` of any event so far: no clock set back undoes it
  std::vector<ConfigRecord> configs;
  std::vector<RunRecord> runs;  // in order of starting
  std::vector<ArtifactRecord> artifacts;
  std::vector<std::pair<std::string, std::string>> set_aside;  // path, SHA-256
  std::vector<ReviewRequest> reviews;
  std::vector<SignOffRecord> signoffs;
  std::vector<CandidateRecord> candidates;
  std::vector<RefusalRecord> refusals;
  std::map<std::string, GateRecord> gates;
  std::map<std::string, std::string> questions;  // open, by key
  std::vector<LogProblem> problems;

 private:
  Status TryApply(const Event& event);
  void Observe(const std::vector<Dependency>& dependencies, const std::string& candidate,
               uint64_t seq);

  std::unordered_map<std::string, size_t> run_index_;
  std::unordered_map<std::string, size_t> artifact_index_;
  std::unordered_map<std::string, std::vector<Observation>> observations_;
};

}  // namespace tare::workflow
