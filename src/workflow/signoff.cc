#include "workflow/signoff.h"

#include <algorithm>
#include <functional>

#include "base/reasons.h"
#include "base/sha256.h"
#include "workflow/layout.h"
#include "workflow/process.h"

namespace tare::workflow {
namespace {

constexpr std::string_view kStatementSchema = "tare-statement-1";

std::string Folded(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto is_space = [](char c) { return c == ' ' || c == '\t'; };
  while (!text.empty() && is_space(text.back())) text.pop_back();
  while (!text.empty() && is_space(text.front())) text.erase(text.begin());
  return text;
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
  const bool same_person =
      Folded(found->person) == Folded(request.requester) ||
      Folded(found->person) == Folded(config->config.String("requester.person"));
  if (same_person || std::find(asking.begin(), asking.end(), fingerprint) != asking.end()) {
    return {No(reason::kSelfApproval, fmt::format("{} asked for this review", found->person)),
            nullptr};
  }
  if (found->revoked) return {No(reason::kKeyRevoked, "key " + fingerprint), nullptr};
  // Seconds compare as text; the log's latest time stands in when the clock was set back.
  const std::string now = now_time.substr(0, 19) + "Z";
  if ((!found->valid_from.empty() && now < found->valid_from) ||
      (!found->valid_until.empty() && now > found->valid_until)) {
    return {No(reason::kKeyExpired,
               fmt::format("valid from {} until {}, now {}",
                           found->valid_from.empty() ? "ever" : found->valid_from,
                           found->valid_until.empty() ? "ever" : found->valid_until, now)),
            nullptr};
  }
  if (statement.step == "task" && authority != nullptr) {
    const auto& before = authority->config.reviewers;
    const bool member = std::any_of(before.begin(), before.end(), [&](const Reviewer& r) {
      return r.public_key == found->public_key && !r.revoked &&
             std::find(r.steps.begin(), r.steps.end(), "task") != r.steps.end();
    });
    if (!member) {
      return {No(reason::kReviewerNotAllowed,
                 "a changed list must be signed by a member of the list before it"),
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
    if (s.seq >= seq || s.step != "task") continue;
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
  TARE_ASSIGN_OR_RETURN(const std::vector<std::string> key_files,
                        KeyFilesIn(task->env(), task->dir(), reviewer.public_key));
  if (!key_files.empty()) return refuse(No(reason::kKeyInTask, key_files[0]));
  if (!context.agent_socket.empty() && !context.person_at_terminal) {
    auto keys = AgentKeys(context.agent_socket);
    if (keys.ok() && std::find(keys->begin(), keys->end(), reviewer.public_key) != keys->end()) {
      return refuse(No(reason::kAgentUnattended, Fingerprint(reviewer.public_key)));
    }
  }
  // What was signed must still be what there is.
  auto bundle = task->env()->ReadFile(JoinPath(task->dir(), request->bundle_path));
  if (!bundle.ok() || Hex(Sha256Of(*bundle)) != request->bundle_sha256) {
    return refuse(No(reason::kWrongDigest, "the bundle's file was changed or is gone"));
  }
  Staleness staleness(state);
  if (auto why = ChangedSince(state, &staleness, *request)) {
    return refuse(No(reason::kSignoffVoid, *why));
  }
  const std::string bundle_sha256 = request->bundle_sha256;
  RunStart start;
  start.step = statement->step;
  TARE_ASSIGN_OR_RETURN(const std::string run_id, task->StartRun(start));
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
  if (!latest->approves) {
    return {Verdict::kFail, std::string(reason::kSignoffRejected), "by " + latest->person,
            latest->person, out.request};
  }
  if (pending != nullptr && pending->bundle_sha256 != latest->bundle_sha256) {
    out.detail =
        fmt::format("a newer bundle {} waits for a reviewer", pending->bundle_sha256.substr(0, 12));
    return out;
  }
  const auto voided = [&](std::string detail) {
    out.reason = reason::kSignoffVoid;
    out.detail = std::move(detail);
    return out;
  };
  if (out.request == nullptr) return voided("its request is not in the log");
  if (state.config() != nullptr) {
    for (const Reviewer& r : state.config()->config.reviewers) {
      if (r.revoked && Fingerprint(r.public_key) == latest->key) {
        return voided("key " + latest->key + " is revoked");
      }
    }
  }
  if (auto why = ChangedSince(state, staleness, *out.request)) return voided(*why);
  out.verdict = Verdict::kPass;
  out.reason.clear();
  return out;
}

Result<std::vector<std::string>> KeyFilesIn(Env* env, const std::string& dir,
                                            const PublicKey& key) {
  constexpr uint64_t kMaxKeyFile = 64 << 10;
  std::vector<std::string> found;
  Status failed;
  const std::function<void(const std::string&, int)> walk = [&](const std::string& relative,
                                                                int depth) {
    auto names = env->List(JoinPath(dir, relative));
    if (!names.ok() || depth > 32) {
      failed = names.ok() ? Error(Code::kExhausted, "{}: too deep", relative) : names.status();
      return;
    }
    for (const std::string& name : *names) {
      const std::string path = relative.empty() ? name : JoinPath(relative, name);
      auto info = env->Stat(JoinPath(dir, path));
      if (!info.ok()) continue;
      if (info->kind == FileInfo::Kind::kDirectory) {
        walk(path, depth + 1);
      } else if (info->kind == FileInfo::Kind::kFile && info->size_bytes <= kMaxKeyFile &&
                 info->size_bytes >= 32) {
        auto bytes = env->ReadFile(JoinPath(dir, path));
        if (!bytes.ok()) continue;
        const PrivateKeyScan scan = FindPrivateKeys(*bytes);
        if (scan.opaque || std::find(scan.keys.begin(), scan.keys.end(), key) != scan.keys.end()) {
          found.push_back(Printable(path));
        }
      }
    }
  };
  walk("", 0);
  if (!failed.ok()) return failed;
  return found;
}

}  // namespace tare::workflow
