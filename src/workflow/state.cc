#include "workflow/state.h"

#include <algorithm>
#include <array>

#include "base/sha256.h"
#include "workflow/layout.h"
#include "workflow/uuid.h"

namespace tare::workflow {
namespace {

constexpr std::array<std::string_view, 15> kTypes = {
    "task-created", "config",   "run-started", "artifact",  "run-ended",
    "run-lost",     "observed", "superseded",  "candidate", "review-requested",
    "signoff",      "refused",  "recovered",   "question",  "gate"};

// Fields of an event's data; the first that is missing or malformed is the error.
class Fields {
 public:
  explicit Fields(const Json& data) : data_(data) {}

  std::string Text(const char* key) {
    ++asked_;
    const Json* v = Find(key);
    if (v == nullptr || !v->is_string()) return Fail<std::string>(key, "a string");
    return v->get<std::string>();
  }
  int64_t Int(const char* key) {
    ++asked_;
    const Json* v = Find(key);
    if (v == nullptr || !v->is_number_integer()) return Fail<int64_t>(key, "a whole number");
    return v->get<int64_t>();
  }
  std::optional<int64_t> MaybeInt(const char* key) {
    ++asked_;
    const Json* v = Find(key);
    if (v != nullptr && v->is_null()) return std::nullopt;
    if (v == nullptr || !v->is_number_integer()) {
      return Fail<std::optional<int64_t>>(key, "a whole number or null");
    }
    return v->get<int64_t>();
  }
  bool Bool(const char* key) {
    ++asked_;
    const Json* v = Find(key);
    if (v == nullptr || !v->is_boolean()) return Fail<bool>(key, "true or false");
    return v->get<bool>();
  }
  std::string Digest(const char* key) {
    std::string text = Text(key);
    if (status_.ok() && !ParseSha256(text).ok()) return Fail<std::string>(key, "64 hex digits");
    return text;
  }
  std::vector<std::string> Texts(const char* key) {
    ++asked_;
    const Json* v = Find(key);
    std::vector<std::string> out;
    if (v == nullptr || !v->is_array()) return Fail<std::vector<std::string>>(key, "a list");
    for (const Json& item : *v) {
      if (!item.is_string()) return Fail<std::vector<std::string>>(key, "a list of strings");
      out.push_back(item.get<std::string>());
    }
    return out;
  }
  std::vector<Dependency> Dependencies(const char* key) {
    ++asked_;
    const Json* v = Find(key);
    if (v == nullptr) return Fail<std::vector<Dependency>>(key, "a list");
    auto out = DependenciesFromJson(*v);
    if (!out.ok()) {
      if (status_.ok()) status_ = out.status();
      return {};
    }
    return *std::move(out);
  }
  const Json* Any(const char* key) {
    ++asked_;
    const Json* v = Find(key);
    if (v == nullptr) return Fail<const Json*>(key, "a value");
    return v;
  }
  // ok when every field asked for was there and no other is.
  Status Done() {
    if (status_.ok() && data_.size() != asked_) {
      status_ = InvalidArgument("data has {} fields, {} are known", data_.size(), asked_);
    }
    return status_;
  }

 private:
  const Json* Find(const char* key) const {
    const auto at = data_.find(key);
    return at == data_.end() ? nullptr : &*at;
  }
  template <typename T>
  T Fail(const char* key, const char* what) {
    if (status_.ok()) status_ = InvalidArgument("`{}`: {} is needed", key, what);
    return T();
  }

  const Json& data_;
  size_t asked_ = 0;
  Status status_;
};

}  // namespace

std::span<const std::string_view> AllEventTypes() { return kTypes; }

const RunRecord* State::FindRun(const std::string& id) const {
  const auto at = run_index_.find(id);
  return at == run_index_.end() ? nullptr : &runs[at->second];
}

const ArtifactRecord* State::FindArtifact(const std::string& path) const {
  const auto at = artifact_index_.find(path);
  return at == artifact_index_.end() ? nullptr : &artifacts[at->second];
}

const ArtifactRecord* State::ArtifactOf(const RunRecord& run, Role role) const {
  for (const size_t i : run.artifacts) {
    if (artifacts[i].role == role) return &artifacts[i];
  }
  return nullptr;
}

std::vector<std::string> State::MissingLinks(const RunRecord& run) const {
  std::vector<std::string> missing;
  const auto has = [&](Role role) {
    return std::any_of(run.artifacts.begin(), run.artifacts.end(), [&](size_t i) {
      return artifacts[i].role == role && artifacts[i].bytes > 0;
    });
  };
  if (!has(Role::kConfig)) missing.push_back("config");
  if (!has(Role::kIdentity)) missing.push_back("identity");
  if (!has(Role::kRaw)) missing.push_back("raw");
  if (!has(Role::kConclusion) || !run.conclusion) missing.push_back("conclusion");
  if (!run.ended) missing.push_back("end");
  return missing;
}

const CandidateRecord* State::FindCandidate(const std::string& name,
                                            const std::string& step) const {
  for (auto c = candidates.rbegin(); c != candidates.rend(); ++c) {
    if (c->name == name && c->step == step) return &*c;
  }
  return nullptr;
}

const Observation* State::Current(const std::string& dependency_id,
                                  const std::string& candidate) const {
  const auto at = observations_.find(dependency_id);
  if (at == observations_.end()) return nullptr;
  for (auto o = at->second.rbegin(); o != at->second.rend(); ++o) {
    if (o->candidate.empty() || o->candidate == candidate) return &*o;
  }
  return nullptr;
}

void State::Observe(const std::vector<Dependency>& dependencies, const std::string& candidate,
                    uint64_t seq) {
  for (const Dependency& d : dependencies) {
    // Configuration and artifacts are known from the log itself.
    if (d.type == DependencyType::kConfig || d.type == DependencyType::kArtifact) continue;
    auto& list = observations_[DependencyId(d.type, d.name)];
    if (!list.empty() && list.back().digest == d.digest && list.back().candidate == candidate) {
      list.back().seq = seq;  // a million equal observations are one
    } else {
      list.push_back({seq, candidate, d.digest});
    }
  }
}

void State::Apply(const Event& event) {
  ++events;
  latest_time = std::max(latest_time, event.time);
  Status status = TryApply(event);
  if (!status.ok()) {
    problems.push_back({event.seq, fmt::format("event {} ({}): {}", event.seq, event.type,
                                               Printable(status.message()))});
  }
}

Status State::Accept(const Event& event) {
  const std::string before = latest_time;
  latest_time = std::max(latest_time, event.time);
  Status status = TryApply(event);
  if (status.ok()) {
    ++events;
  } else {
    latest_time = before;
  }
  return status;
}

Status State::TryApply(const Event& e) {
  Fields f(e.data);
  const auto run_of = [&]() -> RunRecord* {
    const auto at = run_index_.find(e.run_id);
    return at == run_index_.end() ? nullptr : &runs[at->second];
  };
  if (task_id.empty() && e.type != "task-created" && e.type != "recovered") {
    return DataLoss("comes before the task was created");
  }
  if (e.type == "task-created") {
    const std::string schema = f.Text("schema");
    (void)f.Text("tool");
    TARE_RETURN_IF_ERROR(f.Done());
    if (!task_id.empty()) return DataLoss("the task was created before");
    if (schema != "tare-task-1") return Unsupported("schema {}", schema);
    task_id = e.run_id;
    created = e.time;
    return Ok();
  }
  if (e.type == "config") {
    ConfigRecord record;
    record.seq = e.seq;
    record.sha256 = f.Digest("sha256");
    record.reason = f.Text("reason");
    for (const char* key : {"values", "origins", "reviewers", "authority"}) (void)f.Any(key);
    TARE_RETURN_IF_ERROR(f.Done());
    TARE_ASSIGN_OR_RETURN(record.config, ConfigFromJson(e.data));
    if (e.data.at("authority") != record.config.AuthorityDigest()) {
      return DataLoss("the digest of requester and reviewers does not match them");
    }
    configs.push_back(std::move(record));
    return Ok();
  }
  if (e.type == "run-started") {
    RunRecord run;
    run.id = e.run_id;
    run.actor = e.actor;
    run.start_seq = e.seq;
    run.started = e.time;
    run.known_time = latest_time;
    run.step = f.Text("step");
    const std::string kind = f.Text("kind");
    run.kind = ParseEvidenceKind(kind);
    run.parent = f.Text("parent");
    run.command = f.Texts("command");
    run.candidate = f.Text("candidate");
    run.content_id = f.Text("content_id");
    run.host = f.Text("host");
    run.boot_id = f.Text("boot_id");
    run.pid = f.Int("pid");
    run.pid_start = static_cast<uint64_t>(f.Int("pid_start"));
    run.heartbeat_s = f.Int("heartbeat_s");
    run.dependencies = f.Dependencies("dependencies");
    TARE_RETURN_IF_ERROR(f.Done());
    if (!IsStep(run.step)) return InvalidArgument("step {} is unknown", run.step);
    if (!run.kind && kind != "none") return InvalidArgument("evidence kind {} is unknown", kind);
    if (run_index_.count(run.id) != 0) return DataLoss("run {} was started before", run.id);
    if (!run.parent.empty() && FindRun(run.parent) == nullptr) {
      return DataLoss("its parent {} is not in the log", run.parent);
    }
    Observe(run.dependencies, run.candidate, e.seq);
    run_index_[run.id] = runs.size();
    runs.push_back(std::move(run));
    return Ok();
  }
  if (e.type == "artifact") {
    ArtifactRecord artifact;
    artifact.seq = e.seq;
    artifact.path = f.Text("path");
    artifact.sha256 = f.Digest("sha256");
    artifact.sidecar_sha256 = f.Digest("sidecar");
    const int64_t bytes = f.Int("bytes");
    const auto role = ParseRole(f.Text("role"));
    TARE_RETURN_IF_ERROR(f.Done());
    if (!role) return InvalidArgument("role is unknown");
    if (bytes < 0) return InvalidArgument("`bytes` is negative");
    artifact.bytes = static_cast<uint64_t>(bytes);
    artifact.role = *role;
    TARE_ASSIGN_OR_RETURN(const ArtifactPath path, ParseArtifactPath(artifact.path));
    RunRecord* run = run_of();
    if (run == nullptr) return DataLoss("its run {} is not in the log", e.run_id);
    if (path.run_id != run->id || path.step != run->step) {
      return DataLoss("{} does not lie in the folder of its run", artifact.path);
    }
    if (run->ended || run->lost)
      return DataLoss("{} was recorded after its run ended", artifact.path);
    if (artifact_index_.count(artifact.path) != 0) {
      return DataLoss("{} was recorded before", artifact.path);
    }
    artifact_index_[artifact.path] = artifacts.size();
    run->artifacts.push_back(artifacts.size());
    artifacts.push_back(std::move(artifact));
    return Ok();
  }
  if (e.type == "run-ended") {
    RunRecord* run = run_of();
    if (run == nullptr) return DataLoss("run {} is not in the log", e.run_id);
    const auto exit_code = f.MaybeInt("exit");
    const int64_t signal = f.Int("signal");
    const Json* conclusion = f.Any("conclusion");
    std::vector<Dependency> dependencies = f.Dependencies("dependencies");
    TARE_RETURN_IF_ERROR(f.Done());
    if (run->ended) return DataLoss("run {} ended before", e.run_id);
    std::optional<Conclusion> parsed;
    if (!conclusion->is_null()) {
      TARE_ASSIGN_OR_RETURN(parsed, Conclusion::FromJson(*conclusion));
    }
    run->ended = true;
    run->lost = false;  // it was slow, not lost: its own word counts
    run->end_seq = e.seq;
    run->finished = e.time;
    run->exit_code = exit_code;
    run->signal = signal;
    run->conclusion = std::move(parsed);
    Observe(dependencies, run->candidate, e.seq);
    for (Dependency& d : dependencies) run->dependencies.push_back(std::move(d));
    return Ok();
  }
  if (e.type == "run-lost") {
    RunRecord* run = run_of();
    (void)f.Text("why");
    TARE_RETURN_IF_ERROR(f.Done());
    if (run == nullptr) return DataLoss("run {} is not in the log", e.run_id);
    if (run->ended || run->lost) return DataLoss("run {} was closed before", e.run_id);
    run->lost = true;
    run->end_seq = e.seq;
    run->finished = e.time;
    return Ok();
  }
  if (e.type == "observed") {
    const std::string candidate = f.Text("candidate");
    const auto dependencies = f.Dependencies("dependencies");
    const auto unknown = f.Texts("unknown");
    TARE_RETURN_IF_ERROR(f.Done());
    Observe(dependencies, candidate, e.seq);
    for (const std::string& id : unknown) observations_[id].push_back({e.seq, candidate, ""});
    return Ok();
  }
  if (e.type == "superseded") {
    RunRecord* run = run_of();
    const std::string by = f.Text("by");
    (void)f.Text("reason");
    TARE_RETURN_IF_ERROR(f.Done());
    if (run == nullptr) return DataLoss("run {} is not in the log", e.run_id);
    if (FindRun(by) == nullptr) return DataLoss("the superseding run {} is not in the log", by);
    run->superseded_by = by;
    return Ok();
  }
  if (e.type == "candidate") {
    CandidateRecord c;
    c.seq = e.seq;
    c.name = f.Text("name");
    c.step = f.Text("step");
    c.state = f.Text("state");
    c.reason = f.Text("reason");
    c.previous = f.Text("previous");
    c.identity = f.Dependencies("identity");
    if (const Json* ledger = f.Any("ledger")) c.ledger = *ledger;
    TARE_RETURN_IF_ERROR(f.Done());
    if (!IsStep(c.step)) return InvalidArgument("step {} is unknown", c.step);
    if (c.state != "proposed" && c.state != "excluded") {
      return InvalidArgument("candidate state {} is unknown", c.state);
    }
    Observe(c.identity, c.name, e.seq);
    candidates.push_back(std::move(c));
    return Ok();
  }
  if (e.type == "review-requested") {
    ReviewRequest r;
    r.seq = e.seq;
    r.run_id = e.run_id;
    r.step = f.Text("step");
    r.bundle_sha256 = f.Digest("bundle");
    r.bundle_path = f.Text("path");
    r.requester = f.Text("requester");
    r.requester_keys = f.Texts("requester_keys");
    r.dependencies = f.Dependencies("dependencies");
    r.runs = f.Texts("runs");
    TARE_RETURN_IF_ERROR(f.Done());
    const ArtifactRecord* bundle = FindArtifact(r.bundle_path);
    if (bundle == nullptr || bundle->sha256 != r.bundle_sha256) {
      return DataLoss("its bundle {} is not a recorded artifact", r.bundle_path);
    }
    TARE_ASSIGN_OR_RETURN(const ArtifactPath path, ParseArtifactPath(r.bundle_path));
    if (path.run_id != e.run_id || path.step != r.step) {
      return DataLoss("its bundle {} is of another run or step", r.bundle_path);
    }
    for (const ReviewRequest& before : reviews) {
      if (before.bundle_sha256 == r.bundle_sha256) {
        return DataLoss("its bundle was put up before, by event {}", before.seq);
      }
    }
    reviews.push_back(std::move(r));
    return Ok();
  }
  if (e.type == "signoff") {
    SignOffRecord s;
    s.seq = e.seq;
    const RunRecord* run = run_of();
    s.time = run == nullptr ? latest_time : run->known_time;
    s.run_id = e.run_id;
    s.step = f.Text("step");
    s.bundle_sha256 = f.Digest("bundle");
    s.statement_path = f.Text("statement");
    s.signature_path = f.Text("signature");
    s.person = f.Text("person");
    s.key = f.Text("key");
    const std::string decision = f.Text("decision");
    TARE_RETURN_IF_ERROR(f.Done());
    if (decision != "approve" && decision != "reject") {
      return InvalidArgument("decision {} is unknown", decision);
    }
    s.approves = decision == "approve";
    if (FindArtifact(s.statement_path) == nullptr || FindArtifact(s.signature_path) == nullptr) {
      return DataLoss("its statement or signature is not a recorded artifact");
    }
    signoffs.push_back(std::move(s));
    return Ok();
  }
  if (e.type == "refused") {
    RefusalRecord r;
    r.seq = e.seq;
    r.what = f.Text("what");
    r.reason = f.Text("reason");
    r.detail = f.Text("detail");
    TARE_RETURN_IF_ERROR(f.Done());
    refusals.push_back(std::move(r));
    return Ok();
  }
  if (e.type == "recovered") {
    const std::string path = f.Text("path");
    const std::string digest = f.Digest("sha256");
    (void)f.Int("bytes");
    TARE_RETURN_IF_ERROR(f.Done());
    if (!path.starts_with(kTornPrefix) || path.find('/') != std::string::npos) {
      return InvalidArgument("{} is no name for a torn line", path);
    }
    set_aside.emplace_back(path, digest);
    return Ok();
  }
  if (e.type == "question") {
    const std::string key = f.Text("key");
    const std::string text = f.Text("text");
    (void)f.Text("blocks");
    const bool open = f.Bool("open");
    TARE_RETURN_IF_ERROR(f.Done());
    if (open) {
      questions[key] = text;
    } else {
      questions.erase(key);
    }
    return Ok();
  }
  if (e.type == "gate") {
    GateRecord g;
    g.seq = e.seq;
    g.gate = f.Text("gate");
    const auto verdict = ParseVerdict(f.Text("verdict"));
    g.reason = f.Text("reason");
    g.detail = f.Text("detail");
    TARE_RETURN_IF_ERROR(f.Done());
    if (!verdict) return InvalidArgument("verdict is unknown");
    g.verdict = *verdict;
    gates[g.gate] = std::move(g);
    return Ok();
  }
  return Unsupported("type {} is unknown to this version", e.type);
}

Json State::ToJson() const {
  Json out = {{"task", task_id}, {"created", created}, {"events", events}, {"latest", latest_time}};
  for (const ConfigRecord& c : configs) {
    out["configs"].push_back({c.seq, c.sha256, c.reason, ConfigToJson(c.config)});
  }
  for (const RunRecord& r : runs) {
    Json names = Json::array();
    for (const size_t i : r.artifacts) {
      const ArtifactRecord& a = artifacts[i];
      names.push_back({a.seq, a.path, a.sha256, a.sidecar_sha256, a.bytes, RoleName(a.role)});
    }
    out["runs"].push_back({r.id,
                           r.step,
                           r.kind ? EvidenceKindName(*r.kind) : "none",
                           r.parent,
                           r.command,
                           r.candidate,
                           r.content_id,
                           r.actor,
                           r.host,
                           r.boot_id,
                           r.pid,
                           r.pid_start,
                           r.start_seq,
                           r.started,
                           r.ended,
                           r.lost,
                           r.end_seq,
                           r.finished,
                           r.exit_code ? Json(*r.exit_code) : Json(),
                           r.signal,
                           r.conclusion ? r.conclusion->ToJson() : Json(),
                           DependenciesToJson(r.dependencies),
                           names,
                           r.superseded_by});
  }
  for (const auto& [path, digest] : set_aside) out["set_aside"].push_back({path, digest});
  for (const ReviewRequest& r : reviews) {
    out["reviews"].push_back({r.seq, r.run_id, r.step, r.bundle_sha256, r.bundle_path, r.requester,
                              r.requester_keys, DependenciesToJson(r.dependencies), r.runs});
  }
  for (const SignOffRecord& s : signoffs) {
    out["signoffs"].push_back({s.seq, s.run_id, s.step, s.bundle_sha256, s.statement_path,
                               s.signature_path, s.person, s.key, s.approves, s.time});
  }
  for (const CandidateRecord& c : candidates) {
    out["candidates"].push_back({c.seq, c.name, c.step, c.state, c.reason,
                                 DependenciesToJson(c.identity), c.previous, c.ledger});
  }
  for (const RefusalRecord& r : refusals)
    out["refusals"].push_back({r.seq, r.what, r.reason, r.detail});
  for (const auto& [name, g] : gates) {
    out["gates"][name] = {g.seq, VerdictName(g.verdict), g.reason, g.detail};
  }
  for (const auto& [key, text] : questions) out["questions"][key] = text;
  for (const LogProblem& p : problems) out["problems"].push_back({p.seq, p.message});
  return out;
}

}  // namespace tare::workflow
