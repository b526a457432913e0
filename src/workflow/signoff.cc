#include "workflow/signoff.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>

#include "base/reasons.h"
#include "base/sha256.h"
#include "workflow/layout.h"
#include "workflow/process.h"

namespace tare::workflow {
namespace {

constexpr std::string_view kStatementSchema = "tare-statement-1";

// A person's name without what the eye does not tell apart: case, compatibility forms, invisible
// characters, spaces beyond one. Letters of another script that look the same stay others.
std::string Folded(const std::string& text) {
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> folded(
      utf8proc_NFKC_Casefold(reinterpret_cast<const utf8proc_uint8_t*>(text.c_str())), &std::free);
  std::string out;
  bool gap = false;
  for (const char c :
       std::string_view(folded == nullptr ? text.c_str() : reinterpret_cast<char*>(folded.get()))) {
    if (c == ' ' || c == '\t') {
      gap = !out.empty();
      continue;
    }
    if (gap) out += ' ';
    gap = false;
    out += c;
  }
  return out;
}

// Seconds compare as text.
bool IsValidAt(const Reviewer& r, const std::string& time) {
  const std::string now = time.substr(0, 19) + "Z";
  return (r.valid_from.empty() || now >= r.valid_from) &&
         (r.valid_until.empty() || now <= r.valid_until);
}

// The bytes of a recorded file of the task, reached through plain folders alone.
Result<std::string> ReadRecorded(Env* env, const std::string& dir, const ArtifactRecord& artifact) {
  for (size_t slash = artifact.path.find('/'); slash != std::string::npos;
       slash = artifact.path.find('/', slash + 1)) {
    const std::string folder = artifact.path.substr(0, slash);
    TARE_ASSIGN_OR_RETURN(const FileInfo info, env->Stat(JoinPath(dir, folder)));
    if (info.kind != FileInfo::Kind::kDirectory)
      return Error(Code::kPrecondition, "{}: not a folder; links are never followed", folder);
  }
  TARE_RETURN_IF_ERROR(CheckPlainFile(env, JoinPath(dir, artifact.path)));
  TARE_ASSIGN_OR_RETURN(std::string bytes, env->ReadFile(JoinPath(dir, artifact.path)));
  if (Hex(Sha256Of(bytes)) != artifact.sha256)
    return DataLoss("{}: not the bytes that were recorded", artifact.path);
  return bytes;
}

const ReviewRequest* LatestRequest(const State& state, const std::string& step) {
  for (auto r = state.reviews.rbegin(); r != state.reviews.rend(); ++r) {
    if (r->step == step) return &*r;
  }
  return nullptr;
}

const ReviewRequest* RequestOf(const State& state, const SignOffRecord& s) {
  const ReviewRequest* found = nullptr;
  for (const ReviewRequest& r : state.reviews) {
    if (r.seq < s.seq && r.step == s.step && r.bundle_sha256 == s.bundle_sha256) found = &r;
  }
  return found;
}

const ConfigRecord* ConfigAt(const State& state, uint64_t seq) {
  const ConfigRecord* found = nullptr;
  for (const ConfigRecord& c : state.configs) {
    if (c.seq < seq) found = &c;
  }
  return found;
}

// What a review covers and has changed since it was asked for, or nothing.
std::optional<std::string> ChangedSince(const State& state, Staleness* staleness,
                                        const ReviewRequest& request) {
  if (auto mark = staleness->OfDependencies(request.dependencies, "")) return mark->ToString();
  for (const std::string& id : request.runs) {
    const RunRecord* run = state.FindRun(id);
    if (run == nullptr) return "run " + id + " is gone";
    const EvidenceStatus status = AssessRun(state, staleness, *run);
    if (status.verdict != Verdict::kPass) return fmt::format("run {}: {}", id, status.detail);
  }
  return std::nullopt;
}

AcceptResult No(std::string_view code, std::string detail) {
  return {Verdict::kRefused, std::string(code), std::move(detail)};
}

// The checks that depend on nothing but log and files: shared by acceptance and verification.
struct Judged {
  std::optional<AcceptResult> refusal;
  const Reviewer* reviewer = nullptr;
};
Judged Judge(const State& state, uint64_t seq, const std::string& now_time,
             const ReviewRequest& request, const Statement& statement,
             std::string_view statement_bytes, const Signature& signature) {
  const ConfigRecord* config = ConfigAt(state, seq);
  if (config == nullptr) return {No(reason::kConfigUnsigned, "there is no configuration"), nullptr};
  const ConfigRecord* authority = AuthorityInForce(state, seq);
  if (statement.step != "task") {
    if (authority == nullptr) {
      return {No(reason::kConfigUnsigned, "no list of reviewers has been signed"), nullptr};
    }
    if (authority->config.AuthorityDigest() != config->config.AuthorityDigest()) {
      return {No(reason::kConfigUnsigned, "the list was changed after it was signed"), nullptr};
    }
  }
  const Reviewer* found = nullptr;
  bool person_known = false;
  for (const Reviewer& r : config->config.reviewers) {
    if (r.person != statement.person) continue;
    person_known = true;
    if (VerifySignature(r.public_key, signature, statement_bytes).ok()) found = &r;
  }
  if (!person_known) {
    return {No(reason::kReviewerNotAllowed, statement.person + " is not on the list"), nullptr};
  }
  if (found == nullptr) {
    const bool another_key =
        signature.form == SignatureForm::kSsh &&
        std::none_of(config->config.reviewers.begin(), config->config.reviewers.end(),
                     [&](const Reviewer& r) {
                       return r.person == statement.person && r.public_key == signature.key;
                     });
    if (another_key) {
      return {No(reason::kReviewerNotAllowed,
                 fmt::format("key {} is not {}'s", Fingerprint(signature.key), statement.person)),
              nullptr};
    }
    return {No(reason::kSignatureInvalid, "no key of " + statement.person + " verifies it"),
            nullptr};
  }
  if (std::find(found->steps.begin(), found->steps.end(), statement.step) == found->steps.end()) {
    return {No(reason::kReviewerNotAllowed,
               fmt::format("{} may not sign off {}", found->person, statement.step)),
            nullptr};
  }
  // Whoever asked: as a name, as a key of the configuration, as a key noted with the request.
  const std::string fingerprint = Fingerprint(found->public_key);
  std::vector<std::string> asking = request.requester_keys;
  for (const std::string& text : config->config.StringList("requester.keys")) {
    auto key = ParsePublicKey(text);
    if (key.ok()) asking.push_back(Fingerprint(*key));
  }
  bool same_person = Folded(found->person) == Folded(request.requester) ||
                     Folded(found->person) == Folded(config->config.String("requester.person"));
  // A new list, whatever it calls the requester, is asked for by the one of the list before.
  if (statement.step == "task" && authority != nullptr) {
    same_person = same_person ||
                  Folded(found->person) == Folded(authority->config.String("requester.person"));
    for (const std::string& text : authority->config.StringList("requester.keys")) {
      auto key = ParsePublicKey(text);
      if (key.ok()) asking.push_back(Fingerprint(*key));
    }
  }
  if (same_person || std::find(asking.begin(), asking.end(), fingerprint) != asking.end()) {
    return {No(reason::kSelfApproval, fmt::format("{} asked for this review", found->person)),
            nullptr};
  }
  if (found->revoked) return {No(reason::kKeyRevoked, "key " + fingerprint), nullptr};
  // The log's latest time stands in when the clock was set back.
  if (!IsValidAt(*found, now_time)) {
    return {No(reason::kKeyExpired,
               fmt::format("valid from {} until {}, now {}",
                           found->valid_from.empty() ? "ever" : found->valid_from,
                           found->valid_until.empty() ? "ever" : found->valid_until, now_time)),
            nullptr};
  }
  if (statement.step == "task" && authority != nullptr) {
    const auto& before = authority->config.reviewers;
    const bool member = std::any_of(before.begin(), before.end(), [&](const Reviewer& r) {
      return r.public_key == found->public_key && !r.revoked && IsValidAt(r, now_time) &&
             std::find(r.steps.begin(), r.steps.end(), "task") != r.steps.end();
    });
    if (!member) {
      return {No(reason::kReviewerNotAllowed,
                 "a changed list must be signed by a member of the list before it"),
              nullptr};
    }
  }
  // A word given before a later one does not come back after it.
  const std::string statement_sha256 = Hex(Sha256Of(statement_bytes));
  for (const SignOffRecord& p : state.signoffs) {
    if (p.seq >= seq || p.step != statement.step || p.bundle_sha256 != statement.bundle_sha256)
      continue;
    const ArtifactRecord* taken = state.FindArtifact(p.statement_path);
    if (taken != nullptr && taken->sha256 == statement_sha256) {
      return {No(reason::kWrongDigest, fmt::format("this statement was taken by event {}", p.seq)),
              nullptr};
    }
    if (statement.decision == "approve" && !p.approves && statement.time < p.time) {
      return {No(reason::kWrongDigest,
                 fmt::format("signed before {} rejected the same bundle", p.person)),
              nullptr};
    }
  }
  return {std::nullopt, found};
}

}  // namespace

Result<std::string> EncodeStatement(const Statement& s) {
  TARE_ASSIGN_OR_RETURN(std::string text, CanonicalJson({{"schema", kStatementSchema},
                                                         {"task", s.task_id},
                                                         {"step", s.step},
                                                         {"bundle", s.bundle_sha256},
                                                         {"person", s.person},
                                                         {"decision", s.decision},
                                                         {"time", s.time}}));
  return text + "\n";
}

Result<Statement> ParseStatement(std::string_view bytes) {
  if (bytes.size() > 65536 || !bytes.ends_with('\n')) {
    return InvalidArgument("statement: one line of JSON, ended by a newline, is needed");
  }
  TARE_ASSIGN_OR_RETURN(const Json json, ParseJson(bytes.substr(0, bytes.size() - 1)));
  Statement s;
  if (!json.is_object()) return InvalidArgument("statement: an object is needed");
  for (const auto& [key, value] : json.items()) {
    if (!value.is_string()) return InvalidArgument("statement: {} is not a string", Printable(key));
    const auto& text = value.get_ref<const std::string&>();
    if (Printable(text) != text) {
      return InvalidArgument("statement: {} holds control characters", Printable(key));
    }
    if (key == "task") s.task_id = text;
    if (key == "step") s.step = text;
    if (key == "bundle") s.bundle_sha256 = text;
    if (key == "person") s.person = text;
    if (key == "decision") s.decision = text;
    if (key == "time") s.time = text;
  }
  auto again = EncodeStatement(s);
  if (!again.ok() || *again != bytes) {
    return InvalidArgument("statement: not in the spelling that `tare approve --statement` prints");
  }
  if (s.decision != "approve" && s.decision != "reject") {
    return InvalidArgument("statement: decision must be approve or reject");
  }
  if (s.time.size() != 30 || s.time.back() != 'Z') {
    return InvalidArgument("statement: time must be RFC 3339 UTC with nine decimals");
  }
  return s;
}

const ConfigRecord* AuthorityInForce(const State& state, uint64_t seq) {
  const ConfigRecord* found = nullptr;
  for (const SignOffRecord& s : state.signoffs) {
    if (s.seq >= seq || s.step != "task" || !s.void_because.empty()) continue;
    const ReviewRequest* request = RequestOf(state, s);
    if (request == nullptr) continue;
    const ConfigRecord* config = ConfigAt(state, s.seq);
    if (config == nullptr) continue;
    const bool same = std::any_of(
        request->dependencies.begin(), request->dependencies.end(), [&](const Dependency& d) {
          return d.type == DependencyType::kConfig && d.name == "authority" &&
                 d.digest == config->config.AuthorityDigest();
        });
    if (!same) continue;
    if (s.approves) found = config;
  }
  return found;
}

Result<BundleHead> CheckBundle(const State& state, const ReviewRequest& request,
                               std::string_view bundle) {
  if (!bundle.ends_with('\n')) return DataLoss("its bundle is not one line of JSON");
  TARE_ASSIGN_OR_RETURN(const Json json, ParseJson(bundle.substr(0, bundle.size() - 1)));
  const auto at = [&](const Json& object, const char* key) {
    return object.is_object() && object.contains(key) ? object.at(key) : Json();
  };
  const ConfigRecord* config = ConfigAt(state, request.seq);
  const std::pair<const char*, Json> wanted[] = {
      {"schema", "tare-review-1"},
      {"task", state.task_id},
      {"step", request.step},
      {"requester",
       Json::object({{"person", request.requester}, {"keys", request.requester_keys}})},
      {"config", config == nullptr ? "" : config->sha256},
      {"dependencies", DependenciesToJson(request.dependencies)}};
  for (const auto& [key, value] : wanted) {
    // Compared as canonical text: a bundle's members are in order, the log's as they were written.
    TARE_ASSIGN_OR_RETURN(const std::string said, CanonicalJson(at(json, key)));
    TARE_ASSIGN_OR_RETURN(const std::string meant, CanonicalJson(value));
    if (said != meant)
      return DataLoss("its bundle and the event that put it up differ in `{}`", key);
  }
  std::vector<std::string> passed;
  const Json runs = at(json, "runs");
  if (!runs.is_array()) return DataLoss("its bundle lists no runs");
  for (const Json& entry : runs) {
    const Json id = at(entry, "run"), artifacts = at(entry, "artifacts");
    const RunRecord* run = id.is_string() ? state.FindRun(id.get<std::string>()) : nullptr;
    if (run == nullptr || run->step != request.step || !artifacts.is_array())
      return DataLoss("its bundle lists a run that is not in the log");
    for (const Json& file : artifacts) {
      const Json path = at(file, "path");
      const ArtifactRecord* artifact =
          path.is_string() ? state.FindArtifact(path.get<std::string>()) : nullptr;
      if (artifact == nullptr || at(file, "sha256") != artifact->sha256)
        return DataLoss("its bundle lists an artifact that is not in the log");
    }
    if (at(entry, "verdict") == VerdictName(Verdict::kPass)) passed.push_back(run->id);
  }
  if (passed != request.runs)
    return DataLoss("its bundle and the event that put it up differ in the runs that passed");
  const Json head = at(json, "head");
  if (!at(head, "events").is_number_unsigned() || !at(head, "sha256").is_string())
    return DataLoss("its bundle names no head of the log");
  return BundleHead{head.at("events").get<uint64_t>(), head.at("sha256").get<std::string>()};
}

Result<ReviewRequest> PrepareReview(Task* task, const std::string& step,
                                    const std::vector<Dependency>& extra,
                                    const std::vector<std::string>& notes) {
  const State& state = task->state();
  if (!IsStep(step)) return InvalidArgument("{} is not a step (C0 to C10, task)", Printable(step));
  const ConfigRecord* config = state.config();
  if (config == nullptr) return Error(Code::kPrecondition, "the task has no configuration");
  const std::string requester = config->config.String("requester.person");
  if (requester.empty()) {
    return Error(
        Code::kPrecondition,
        "requester.person is not set in task.toml: whoever asks must be known, because the "
        "same person cannot approve");
  }
  std::vector<std::string> fingerprints;
  for (const std::string& text : config->config.StringList("requester.keys")) {
    TARE_ASSIGN_OR_RETURN(const PublicKey key, ParsePublicKey(text));
    fingerprints.push_back(Fingerprint(key));
  }
  std::vector<Dependency> dependencies = extra;
  const auto depend = [&](const Dependency& d) {
    if (std::find(dependencies.begin(), dependencies.end(), d) == dependencies.end()) {
      dependencies.push_back(d);
    }
  };
  Json runs = Json::array(), reviewers = Json::array(), open = Json::array();
  std::vector<std::string> run_ids;
  if (step == "task") {
    depend({DependencyType::kConfig, "authority", config->config.AuthorityDigest()});
    for (const Reviewer& r : config->config.reviewers) {
      reviewers.push_back({{"person", r.person},
                           {"key", Fingerprint(r.public_key)},
                           {"steps", r.steps},
                           {"revoked", r.revoked}});
    }
    if (config->config.reviewers.empty()) {
      return Error(Code::kPrecondition, "task.toml names no reviewer; add a [[reviewer]] table");
    }
  } else {
    for (const Dependency& d : config->config.SemanticDependencies()) depend(d);
    Staleness staleness(state);
    for (const RunRecord& run : state.runs) {
      if (run.step != step || !run.kind || !(run.ended || run.lost)) continue;
      const EvidenceStatus status = AssessRun(state, &staleness, run);
      Json files = Json::array();
      for (const size_t i : run.artifacts) {
        const ArtifactRecord& a = state.artifacts[i];
        files.push_back({{"path", a.path}, {"sha256", a.sha256}, {"role", RoleName(a.role)}});
      }
      runs.push_back({{"run", run.id},
                      {"kind", EvidenceKindName(*run.kind)},
                      {"candidate", run.candidate},
                      {"verdict", VerdictName(status.verdict)},
                      {"reason", status.reason},
                      {"scope", run.conclusion ? run.conclusion->scope.ToJson() : Json::array()},
                      {"artifacts", std::move(files)}});
      if (status.verdict == Verdict::kPass) run_ids.push_back(run.id);
    }
  }
  for (const auto& [key, text] : state.questions) open.push_back({{"key", key}, {"text", text}});
  const Json bundle = {{"schema", "tare-review-1"},
                       {"task", state.task_id},
                       {"step", step},
                       {"requester", {{"person", requester}, {"keys", fingerprints}}},
                       {"config", config->sha256},
                       {"head", {{"events", task->log().size()}, {"sha256", task->log().head()}}},
                       {"runs", std::move(runs)},
                       {"reviewers", std::move(reviewers)},
                       {"dependencies", DependenciesToJson(dependencies)},
                       {"notes", notes},
                       {"open_questions", std::move(open)}};
  TARE_ASSIGN_OR_RETURN(std::string bytes, CanonicalJson(bundle));
  bytes += '\n';
  RunStart start;
  start.step = step;
  TARE_ASSIGN_OR_RETURN(const std::string run_id, task->StartRun(start));
  TARE_RETURN_IF_ERROR(task->AddBytes(run_id, "bundle.json", Role::kReview, bytes));
  TARE_RETURN_IF_ERROR(task->EndRun(run_id, {0, 0, std::nullopt, {}}));
  EventDraft draft;
  draft.run_id = run_id;
  draft.type = "review-requested";
  draft.data = {{"step", step},
                {"bundle", Hex(Sha256Of(bytes))},
                {"path", fmt::format("{}/{}/bundle.json", step, run_id)},
                {"requester", requester},
                {"requester_keys", fingerprints},
                {"dependencies", DependenciesToJson(dependencies)},
                {"runs", run_ids}};
  TARE_RETURN_IF_ERROR(task->Append(draft).status());
  return task->state().reviews.back();
}

Result<AcceptResult> AcceptSignOff(Task* task, std::string_view statement_bytes,
                                   std::string_view signature_bytes, const AcceptContext& context) {
  std::string step = "?";
  const auto refuse = [&](const AcceptResult& result) -> Result<AcceptResult> {
    TARE_RETURN_IF_ERROR(task->Refuse("approve " + step, result.reason, result.detail));
    return result;
  };
  if (!context.force_words.empty()) {
    return refuse(No(reason::kForceRefused, Printable(context.force_words[0])));
  }
  auto statement = ParseStatement(statement_bytes);
  if (!statement.ok()) return refuse(No(reason::kStatementMalformed, statement.status().message()));
  if (IsStep(statement->step)) step = statement->step;
  auto signature = ParseSignature(signature_bytes);
  if (!signature.ok()) return refuse(No(reason::kSignatureInvalid, signature.status().message()));
  const State& state = task->state();
  if (statement->task_id != state.task_id) {
    return refuse(No(reason::kWrongDigest, "the statement is about another task"));
  }
  const ReviewRequest* request = LatestRequest(state, statement->step);
  if (request == nullptr) {
    return refuse(No(reason::kWrongDigest, "no review of this step was requested"));
  }
  if (request->bundle_sha256 != statement->bundle_sha256) {
    return refuse(
        No(reason::kWrongDigest,
           fmt::format("under review is {}, signed was {}", request->bundle_sha256.substr(0, 12),
                       Printable(statement->bundle_sha256.substr(0, 12)))));
  }
  const std::string now = std::max(FormatUtc(task->env()->NowNs()), state.latest_time);
  const RunRecord* asked = state.FindRun(request->run_id);
  if (asked != nullptr && statement->time < asked->started) {
    return refuse(No(reason::kWrongDigest, "the statement's time is before the request"));
  }
  // Five minutes for clocks that disagree.
  if (statement->time >
      std::max(FormatUtc(task->env()->NowNs() + 300'000'000'000), state.latest_time)) {
    return refuse(No(reason::kWrongDigest, "the statement's time is in the future"));
  }
  const Judged judged =
      Judge(state, task->log().size(), now, *request, *statement, statement_bytes, *signature);
  if (judged.refusal) return refuse(*judged.refusal);
  const Reviewer reviewer = *judged.reviewer;
  TARE_ASSIGN_OR_RETURN(const std::vector<TreeEntry> tree, ListTree(task->env(), task->dir()));
  const std::vector<KeyFile> key_files = KeyFilesAmong(task->env(), task->dir(), tree);
  if (const std::string* file = KeyFileOf(key_files, reviewer.public_key))
    return refuse(No(reason::kKeyInTask, *file));
  if (!context.agent_socket.empty() && !context.person_at_terminal) {
    auto keys = AgentKeys(context.agent_socket);
    if (!keys.ok() && keys.status().code() != Code::kNotFound)
      return refuse(No(reason::kAgentUnattended, keys.status().message()));
    if (keys.ok() && std::find(keys->begin(), keys->end(), reviewer.public_key) != keys->end()) {
      return refuse(No(reason::kAgentUnattended, Fingerprint(reviewer.public_key)));
    }
  }
  // What was signed must still be what there is.
  auto bundle = ReadRecorded(task->env(), task->dir(), *state.FindArtifact(request->bundle_path));
  if (!bundle.ok()) {
    return refuse(No(reason::kWrongDigest,
                     "the bundle's file was changed or is gone: " + bundle.status().message()));
  }
  if (auto head = CheckBundle(state, *request, *bundle); !head.ok())
    return refuse(No(reason::kWrongDigest, head.status().message()));
  Staleness staleness(state);
  if (auto why = ChangedSince(state, &staleness, *request)) {
    return refuse(No(reason::kSignoffVoid, *why));
  }
  const std::string bundle_sha256 = request->bundle_sha256;
  RunStart start;
  start.step = statement->step;
  TARE_ASSIGN_OR_RETURN(const std::string run_id, task->StartRun(start));
  // Held against the time of this very run, which is what stays in the log: validity may have
  // ended a moment ago.
  const Judged again =
      Judge(state, task->log().size(), state.FindRun(run_id)->known_time,
            *LatestRequest(state, statement->step), *statement, statement_bytes, *signature);
  if (again.refusal) {
    TARE_RETURN_IF_ERROR(task->EndRun(run_id, {0, 0, std::nullopt, {}}));
    return refuse(*again.refusal);
  }
  TARE_RETURN_IF_ERROR(task->AddBytes(run_id, "statement.json", Role::kReview, statement_bytes));
  TARE_RETURN_IF_ERROR(task->AddBytes(run_id, "statement.sig", Role::kReview, signature_bytes));
  TARE_RETURN_IF_ERROR(task->EndRun(run_id, {0, 0, std::nullopt, {}}));
  EventDraft draft;
  draft.run_id = run_id;
  draft.type = "signoff";
  draft.data = {{"step", statement->step},
                {"bundle", bundle_sha256},
                {"statement", fmt::format("{}/{}/statement.json", statement->step, run_id)},
                {"signature", fmt::format("{}/{}/statement.sig", statement->step, run_id)},
                {"person", reviewer.person},
                {"key", Fingerprint(reviewer.public_key)},
                {"decision", statement->decision}};
  TARE_RETURN_IF_ERROR(task->Append(draft).status());
  if (statement->decision == "reject") {
    return AcceptResult{Verdict::kFail, std::string(reason::kSignoffRejected), reviewer.person};
  }
  return AcceptResult{Verdict::kPass, "", reviewer.person};
}

Status RecheckSignOff(const State& state, const SignOffRecord& s, std::string_view statement_bytes,
                      std::string_view signature_bytes) {
  TARE_ASSIGN_OR_RETURN(const Statement statement, ParseStatement(statement_bytes));
  TARE_ASSIGN_OR_RETURN(const Signature signature, ParseSignature(signature_bytes));
  if (statement.task_id != state.task_id || statement.step != s.step ||
      statement.bundle_sha256 != s.bundle_sha256 || statement.person != s.person ||
      (statement.decision == "approve") != s.approves) {
    return DataLoss("the statement says something else than the event");
  }
  const ReviewRequest* request = RequestOf(state, s);
  if (request == nullptr) return DataLoss("no review of this bundle was requested before it");
  const Judged judged =
      Judge(state, s.seq, s.time, *request, statement, statement_bytes, signature);
  if (judged.refusal) return DataLoss("{}: {}", judged.refusal->reason, judged.refusal->detail);
  if (Fingerprint(judged.reviewer->public_key) != s.key) {
    return DataLoss("the event names another key than the one that signed");
  }
  return Ok();
}

void MarkSignOffs(Env* env, const std::string& dir, State* state) {
  for (SignOffRecord& s : state->signoffs) {
    const ArtifactRecord* statement = state->FindArtifact(s.statement_path);
    const ArtifactRecord* signature = state->FindArtifact(s.signature_path);
    if (statement == nullptr || signature == nullptr) continue;  // refused when it was applied
    auto said = ReadRecorded(env, dir, *statement), by = ReadRecorded(env, dir, *signature);
    const Status status = !said.ok() ? said.status()
                          : !by.ok() ? by.status()
                                     : RecheckSignOff(*state, s, *said, *by);
    if (!status.ok()) s.void_because = status.message();
  }
}

SignOffStatus StatusOfSignOff(const State& state, Staleness* staleness, const std::string& step) {
  SignOffStatus out;
  out.reason = reason::kNoSignoff;
  const SignOffRecord* latest = nullptr;
  for (const SignOffRecord& s : state.signoffs) {
    if (s.step == step) latest = &s;
  }
  const ReviewRequest* pending = LatestRequest(state, step);
  if (latest == nullptr) {
    out.detail =
        pending == nullptr
            ? fmt::format("no review was requested; `tare approve {}`", step)
            : fmt::format("bundle {} waits for a reviewer", pending->bundle_sha256.substr(0, 12));
    return out;
  }
  out.person = latest->person;
  out.request = RequestOf(state, *latest);
  const auto voided = [&](std::string detail) {
    out.reason = reason::kSignoffVoid;
    out.detail = std::move(detail);
    return out;
  };
  if (!latest->void_because.empty()) return voided(latest->void_because);
  if (!latest->approves) {
    return {Verdict::kFail, std::string(reason::kSignoffRejected), "by " + latest->person,
            latest->person, out.request};
  }
  if (pending != nullptr && pending->bundle_sha256 != latest->bundle_sha256) {
    out.detail =
        fmt::format("a newer bundle {} waits for a reviewer", pending->bundle_sha256.substr(0, 12));
    return out;
  }
  if (out.request == nullptr) return voided("its request is not in the log");
  // Whoever revoked a key said that its words are not to be trusted; taking that back by an edit
  // does not bring them back.
  for (const ConfigRecord& c : state.configs) {
    if (c.seq < latest->seq) continue;
    for (const Reviewer& r : c.config.reviewers) {
      if (r.revoked && Fingerprint(r.public_key) == latest->key) {
        return voided(fmt::format("key {} was revoked by event {}", latest->key, c.seq));
      }
    }
  }
  if (auto why = ChangedSince(state, staleness, *out.request)) return voided(*why);
  out.verdict = Verdict::kPass;
  out.reason.clear();
  return out;
}

std::vector<KeyFile> KeyFilesAmong(Env* env, const std::string& dir,
                                   const std::vector<TreeEntry>& tree) {
  constexpr uint64_t kMaxKeyFile = 64 << 10;
  std::vector<KeyFile> found;
  for (const TreeEntry& e : tree) {
    if (e.info.kind != FileInfo::Kind::kFile || e.info.size_bytes > kMaxKeyFile ||
        e.info.size_bytes < 32) {
      continue;
    }
    auto bytes = env->ReadFile(JoinPath(dir, e.path));
    if (!bytes.ok()) continue;
    PrivateKeyScan scan = FindPrivateKeys(*bytes);
    if (scan.opaque || !scan.keys.empty()) found.push_back({Printable(e.path), std::move(scan)});
  }
  return found;
}

const std::string* KeyFileOf(const std::vector<KeyFile>& files, const PublicKey& key) {
  for (const KeyFile& f : files) {
    const auto& keys = f.scan.keys;
    if (f.scan.opaque || std::find(keys.begin(), keys.end(), key) != keys.end()) return &f.path;
  }
  return nullptr;
}

}  // namespace tare::workflow
