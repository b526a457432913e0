#pragma once

// Provenance sidecar `<artifact>.intoto.jsonl`: one line, an in-toto Statement v1 with a SLSA v1
// provenance predicate, readable by standard tools (docs/formats/sidecar.md). It is written once,
// when the artifact is recorded, and its own SHA-256 is in the event log: a sidecar made up later
// from what lies on disk matches nothing.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "workflow/evidence.h"

namespace tare::workflow {

inline constexpr std::string_view kStatementType = "https://in-toto.io/Statement/v1";
inline constexpr std::string_view kPredicateType = "https://slsa.dev/provenance/v1";
inline constexpr std::string_view kBuildType = "urn:tare:record:v1";

inline constexpr size_t kMaxSidecarBytes = size_t{4} << 20;

struct Sidecar {
  std::string subject;  // path inside the task
  std::string subject_sha256;
  std::string run_id;  // invocationId
  std::string task_id;
  std::string step;
  std::optional<EvidenceKind> kind;  // none for review material, which is no evidence
  Role role = Role::kRaw;
  std::vector<std::string> command;            // empty when the artifact was made elsewhere
  std::string producer;                        // who recorded it: "ann"
  std::string tool_version;                    // "tare 0.1.0"
  std::string config_path, config_sha256;      // the run's role `config`; empty when it has none
  std::string identity_path, identity_sha256;  // the run's execution identity; likewise
  std::vector<Dependency> inputs;              // resolvedDependencies
  std::string started;                         // RFC 3339; startedOn
  std::string finished;                        // finishedOn
};

// One canonical line, ended by a newline; kExhausted when it is longer than a reader takes.
Result<std::string> EncodeSidecar(const Sidecar& sidecar);
// Strict: exactly the keys that EncodeSidecar writes, in its spelling.
Result<Sidecar> ParseSidecar(std::string_view bytes);

}  // namespace tare::workflow
