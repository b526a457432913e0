#include "workflow/sidecar.h"

#include "base/sha256.h"
#include "workflow/layout.h"
#include "workflow/uuid.h"

namespace tare::workflow {
namespace {

Json Link(const std::string& path, const std::string& digest) {
  return {{"name", path}, {"digest", {{"sha256", digest}}}};
}

// Reads a sidecar by path through objects; keeps the first error.
class Reader {
 public:
  const Json* At(const Json* from, const char* key) {
    if (from == nullptr || !from->is_object() || !from->contains(key)) {
      Fail(key);
      return nullptr;
    }
    return &from->at(key);
  }
  std::string Text(const Json* from, const char* key) {
    const Json* value = At(from, key);
    if (value == nullptr) return "";
    if (!value->is_string()) {
      Fail(key);
      return "";
    }
    return value->get<std::string>();
  }
  void Fail(std::string_view key) {
    if (status_.ok()) status_ = InvalidArgument("sidecar: `{}` is missing or malformed", key);
  }
  const Status& status() const { return status_; }

 private:
  Status status_;
};

}  // namespace

Result<std::string> EncodeSidecar(const Sidecar& s) {
  Json dependencies = Json::array();
  for (const Dependency& d : s.inputs) {
    dependencies.push_back({{"name", d.name},
                            {"digest", {{"sha256", d.digest}}},
                            {"annotations", {{"type", DependencyTypeName(d.type)}}}});
  }
  Json byproducts = Json::array();
  if (!s.config_path.empty()) byproducts.push_back(Link(s.config_path, s.config_sha256));
  if (!s.identity_path.empty()) byproducts.push_back(Link(s.identity_path, s.identity_sha256));
  const Json statement = {
      {"_type", kStatementType},
      {"subject", Json::array({Link(s.subject, s.subject_sha256)})},
      {"predicateType", kPredicateType},
      {"predicate",
       {{"buildDefinition",
         {{"buildType", kBuildType},
          {"externalParameters",
           {{"command", s.command},
            {"step", s.step},
            {"kind", s.kind ? EvidenceKindName(*s.kind) : "none"},
            {"role", RoleName(s.role)}}},
          {"internalParameters",
           {{"task", s.task_id},
            {"config", s.config_path},
            {"executionIdentity", s.identity_path}}},
          {"resolvedDependencies", std::move(dependencies)}}},
        {"runDetails",
         {{"builder",
           {{"id", "urn:tare:recorder"},
            {"version", {{"tare", s.tool_version}, {"actor", s.producer}}}}},
          {"metadata",
           {{"invocationId", s.run_id}, {"startedOn", s.started}, {"finishedOn", s.finished}}},
          {"byproducts", std::move(byproducts)}}}}}};
  TARE_ASSIGN_OR_RETURN(std::string line, CanonicalJson(statement));
  if (line.size() > kMaxSidecarBytes) {
    return Error(Code::kExhausted, "a sidecar of {} bytes; at most {} are read", line.size(),
                 kMaxSidecarBytes);
  }
  line += '\n';
  return line;
}

Result<Sidecar> ParseSidecar(std::string_view bytes) {
  if (!bytes.ends_with('\n') || bytes.find('\n') != bytes.size() - 1) {
    return InvalidArgument("sidecar: exactly one line, ended by a newline, is needed");
  }
  JsonLimits limits;
  limits.max_bytes = kMaxSidecarBytes;
  TARE_ASSIGN_OR_RETURN(const Json json, ParseJson(bytes.substr(0, bytes.size() - 1), limits));
  Reader r;
  Sidecar s;
  if (r.Text(&json, "_type") != kStatementType) r.Fail("_type");
  if (r.Text(&json, "predicateType") != kPredicateType) r.Fail("predicateType");
  const Json* subjects = r.At(&json, "subject");
  if (subjects != nullptr && (!subjects->is_array() || subjects->size() != 1)) r.Fail("subject");
  if (!r.status().ok()) return r.status();
  const Json& subject = (*subjects)[0];
  s.subject = r.Text(&subject, "name");
  s.subject_sha256 = r.Text(r.At(&subject, "digest"), "sha256");
  const Json* predicate = r.At(&json, "predicate");
  const Json* definition = r.At(predicate, "buildDefinition");
  if (r.Text(definition, "buildType") != kBuildType) r.Fail("buildType");
  const Json* external = r.At(definition, "externalParameters");
  const Json* command = r.At(external, "command");
  if (command != nullptr && command->is_array()) {
    for (const Json& word : *command) {
      if (!word.is_string()) {
        r.Fail("command");
        break;
      }
      s.command.push_back(word.get<std::string>());
    }
  } else {
    r.Fail("command");
  }
  s.step = r.Text(external, "step");
  const std::string kind_name = r.Text(external, "kind");
  s.kind = ParseEvidenceKind(kind_name);
  const auto role = ParseRole(r.Text(external, "role"));
  if (!s.kind && kind_name != "none") r.Fail("kind");
  if (!role) r.Fail("role");
  const Json* internal = r.At(definition, "internalParameters");
  s.task_id = r.Text(internal, "task");
  s.config_path = r.Text(internal, "config");
  s.identity_path = r.Text(internal, "executionIdentity");
  const Json* dependencies = r.At(definition, "resolvedDependencies");
  if (dependencies != nullptr && dependencies->is_array()) {
    for (const Json& d : *dependencies) {
      const auto type = ParseDependencyType(r.Text(r.At(&d, "annotations"), "type"));
      if (!type) {
        r.Fail("type");
        break;
      }
      s.inputs.push_back({*type, r.Text(&d, "name"), r.Text(r.At(&d, "digest"), "sha256")});
    }
  } else {
    r.Fail("resolvedDependencies");
  }
  const Json* details = r.At(predicate, "runDetails");
  const Json* version = r.At(r.At(details, "builder"), "version");
  s.tool_version = r.Text(version, "tare");
  s.producer = r.Text(version, "actor");
  const Json* metadata = r.At(details, "metadata");
  s.run_id = r.Text(metadata, "invocationId");
  s.started = r.Text(metadata, "startedOn");
  s.finished = r.Text(metadata, "finishedOn");
  const Json* byproducts = r.At(details, "byproducts");
  if (byproducts == nullptr || !byproducts->is_array()) {
    r.Fail("byproducts");
  } else {
    for (const Json& link : *byproducts) {
      const std::string path = r.Text(&link, "name");
      const std::string digest = r.Text(r.At(&link, "digest"), "sha256");
      if (path == s.config_path && !path.empty()) s.config_sha256 = digest;
      if (path == s.identity_path && !path.empty()) s.identity_sha256 = digest;
    }
  }
  if (!r.status().ok()) return r.status();
  s.role = *role;
  if (!IsStep(s.step)) return InvalidArgument("sidecar: step {} is unknown", Printable(s.step));
  if (!IsRunId(s.run_id)) return InvalidArgument("sidecar: invocationId is not a UUIDv7");
  TARE_RETURN_IF_ERROR(CheckRelativePath(s.subject));
  TARE_RETURN_IF_ERROR(ParseSha256(s.subject_sha256).status());
  // Whatever this reader did not look at would be unprotected by it: one spelling only.
  auto again = EncodeSidecar(s);
  if (!again.ok()) return again.status();
  if (*again != bytes) return InvalidArgument("sidecar: keys or spelling beside the format");
  return s;
}

}  // namespace tare::workflow
