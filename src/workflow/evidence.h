#pragma once

// What counts as evidence: ten kinds that never stand in for each other (DOC-07), the roles that a
// run's artifacts play, typed dependencies, and the conclusion of a run.

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "base/verdict.h"
#include "workflow/scope.h"

namespace tare::workflow {

enum class EvidenceKind : uint8_t {
  kE1 = 1,  // source or config reading
  kE2,      // host arithmetic
  kE3,      // single operator
  kE4,      // frozen or offline replay
  kE5,      // inference batch invariance, prefill against decode
  kE6,      // train-inference dual path
  kE7,      // gradient conformance
  kE8,      // real update loop; needs a normal exit
  kE9,      // quality evaluation
  kE10,     // performance; needs a normal exit
};
std::span<const EvidenceKind> AllEvidenceKinds();
std::string_view EvidenceKindName(EvidenceKind kind);  // "E1" ... "E10"
std::string_view EvidenceKindText(EvidenceKind kind);  // "source or config reading"
std::optional<EvidenceKind> ParseEvidenceKind(std::string_view name);
bool NeedsNormalExit(EvidenceKind kind);

// What an artifact is to its run. A run lacking one of the first four is incomplete (GEN-16).
enum class Role : uint8_t {
  kConfig,      // resolved configuration, command and script hashes
  kIdentity,    // execution identity: what decided which arithmetic ran
  kRaw,         // raw results; at least one, not empty
  kConclusion,  // verdict, reason, scope (Conclusion below)
  kMaterial,    // anything else worth keeping
  kReview,      // review bundle, statement or signature
};
std::string_view RoleName(
    Role role);  // "config", "identity", "raw", "conclusion", "material", "review"
std::optional<Role> ParseRole(std::string_view name);

// A typed input of a run. `name` says which one ("src/ops/attention.cu", "precision.kv_cache",
// "C2/proxy.json"); `digest` is 64 hex digits. `artifact` is the only transitive type: its name is
// the logical name of another run's artifact.
enum class DependencyType : uint8_t {
  kCode,
  kContract,
  kConfig,
  kImage,
  kWeights,
  kTokens,
  kHardware,
  kTool,
  kThreshold,
  kArtifact,
};
std::string_view DependencyTypeName(DependencyType type);
std::optional<DependencyType> ParseDependencyType(std::string_view name);

struct Dependency {
  DependencyType type = DependencyType::kCode;
  std::string name;
  std::string digest;
  friend bool operator==(const Dependency&, const Dependency&) = default;
};
std::string DependencyId(DependencyType type, std::string_view name);  // "code:src/x.cc"
Json DependenciesToJson(const std::vector<Dependency>& dependencies);
Result<std::vector<Dependency>> DependenciesFromJson(const Json& json);

// A claim that rests on evidence and falls with it (DOC-11).
struct Inference {
  std::string id;
  std::string text;
};

// `conclusion.json` of a run: {"schema":"tare-conclusion-1","verdict":..,"reason":..,"scope":[..],
// "inferences":[{"id":..,"text":..}]}. A pass needs a scope and no reason; every other verdict
// needs a reason code. docs/formats/run.md.
struct Conclusion {
  Verdict verdict = Verdict::kInconclusive;
  std::string reason;  // empty for a pass
  Scope scope;
  std::vector<Inference> inferences;

  static Result<Conclusion> FromJson(const Json& json);
  static Result<Conclusion> Parse(std::string_view bytes);
  Json ToJson() const;
};

// Why these bytes cannot be a raw result (CHEAP-13), or nothing: empty, a header without data, one
// value throughout, every mask position off. Looks inside safetensors; other formats by their
// bytes.
std::optional<std::string> EmptinessOf(std::string_view name, std::string_view bytes);

}  // namespace tare::workflow
