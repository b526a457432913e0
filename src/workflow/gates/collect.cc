#include "workflow/gates/collect.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "workflow/claims/claim.h"
#include "workflow/gates/contract_check.h"
#include "workflow/gates/table.h"
#include "workflow/index.h"
#include "workflow/layout.h"
#include "workflow/record.h"
#include "workflow/signoff.h"
#include "workflow/tracks.h"

namespace tare::workflow {
namespace {

constexpr std::string_view kEvidenceFile = "evidence.json";
constexpr std::string_view kJudgementFile = "judgement.json";

// Gates that only the training loop asks for (GEN-23).
bool TrainingGate(std::string_view gate) {
  return gate == "C5" || gate == "C6" || gate == "C7" || gate == "C8";
}

EvidenceKind KindOf(const std::string& gate) {
  const GateSpec* spec = TheWorkflow().Find(gate);
  TARE_CHECK(spec != nullptr && !spec->evidence.empty());
  return *ParseEvidenceKind(spec->evidence.front());
}

EvidenceStatus Refused(std::string_view code, std::string detail) {
  const Reason* known = FindReason(code);
  TARE_CHECK(known != nullptr);
  return {known->verdict, std::string(code), std::move(detail)};
}

// task.toml as it is now against the log's: a contract that was changed without saying so runs
// nothing (GEN-04).
EvidenceStatus ContractRecorded(Env* env, const TaskView& view) {
  if (view.state.config() == nullptr) return {Verdict::kPass, "", ""};
  const std::string path = JoinPath(view.dir, std::string(kTaskFile));
  const Status plain = CheckPlainFile(env, path);
  const Result<std::string> text = plain.ok() ? env->ReadFile(path) : Result<std::string>(plain);
  const Result<TaskConfig> now =
      text.ok() ? ParseTaskConfig(*text, kTaskFile) : Result<TaskConfig>(text.status());
  if (!now.ok()) return Refused(reason::kConfigUnrecorded, now.status().message());
  for (const ContractChange& c : UnrecordedChanges(view.state.config()->config, *now)) {
    return Refused(reason::kContractChanged,
                   fmt::format("{} ({}) is {} in task.toml and {} in the log", c.key,
                               ContractPart(c.key), c.evidence, c.user));
  }
  return {Verdict::kPass, "", ""};
}

// Doubles have no canonical JSON, and a document may hold times: two-space text is the artifact.
std::string Text(const Json& json) { return json.dump(1) + "\n"; }

struct Recorded {
  std::string run_id;
  EvidenceStatus status;
};

// Document, judgement and conclusion as one ended run of the step, and the gate event.
Result<Recorded> Record(Env* env, const std::string& dir, const std::string& actor,
                        const std::string& evidence, const GateJudgement& judgement,
                        const std::vector<std::string>& keys,
                        const std::vector<std::string>& depends, std::optional<int64_t> exit_code,
                        const Json& identity) {
  // A person's stop is held by the ledger, which opens C1 and C9 only under a signature: there the
  // machine's part is concluded, so that it can be put before the reviewer.
  const bool stop_only = judgement.WaitsForPersonAlone() && IsHumanStop(judgement.gate);
  Conclusion conclusion;
  conclusion.verdict = stop_only ? Verdict::kPass : judgement.verdict;
  conclusion.reason = stop_only ? "" : judgement.reason;
  TARE_ASSIGN_OR_RETURN(conclusion.scope, Scope::FromJson(judgement.scope.at("covers")));
  if (conclusion.verdict == Verdict::kPass && conclusion.scope.empty()) {
    return Error(Code::kInternal, "gate {}: a pass without scope", judgement.gate);
  }
  TARE_ASSIGN_OR_RETURN(const auto task, OpenWaiting(env, dir, actor));
  RunStart start;
  start.step = judgement.gate;
  start.kind = KindOf(judgement.gate);
  TARE_ASSIGN_OR_RETURN(start.dependencies,
                        ResolveDependencies(env, task->state(), {}, depends, keys));
  TARE_ASSIGN_OR_RETURN(std::string config,
                        CanonicalJson({{"schema", "tare-run-config-1"},
                                       {"command", {"judge", judgement.gate}},
                                       {"scripts", Json::array()},
                                       {"task", Json::object()},
                                       {"dependencies", DependenciesToJson(start.dependencies)}}));
  config += '\n';
  start.content_id = Hex(Sha256Of(config));
  Recorded out;
  TARE_ASSIGN_OR_RETURN(out.run_id, task->StartRun(start));
  TARE_RETURN_IF_ERROR(task->AddBytes(out.run_id, "config.json", Role::kConfig, config));
  TARE_RETURN_IF_ERROR(
      task->AddBytes(out.run_id, "identity.json", Role::kIdentity, Text(identity)));
  TARE_RETURN_IF_ERROR(
      task->AddBytes(out.run_id, std::string(kEvidenceFile), Role::kRaw, evidence));
  TARE_RETURN_IF_ERROR(task->AddBytes(out.run_id, std::string(kJudgementFile), Role::kMaterial,
                                      Text(judgement.ToJson())));
  TARE_ASSIGN_OR_RETURN(const std::string text, CanonicalJson(conclusion.ToJson()));
  TARE_RETURN_IF_ERROR(
      task->AddBytes(out.run_id, "conclusion.json", Role::kConclusion, text + "\n"));
  RunEnd end;
  end.exit_code = exit_code;
  end.conclusion = conclusion;
  TARE_RETURN_IF_ERROR(task->EndRun(out.run_id, end));
  const GateFinding* worst = judgement.Gravest();
  TARE_RETURN_IF_ERROR(
      task->Append({out.run_id,
                    "gate",
                    {{"gate", judgement.gate},
                     {"verdict", VerdictName(conclusion.verdict)},
                     {"reason", conclusion.reason},
                     {"detail", worst == nullptr ? std::string() : worst->detail}}})
          .status());
  TARE_RETURN_IF_ERROR(task->WriteIndexes());
  Staleness staleness(task->state());
  out.status = AssessRun(task->state(), &staleness, *task->state().FindRun(out.run_id));
  return out;
}

// The step as it stands: for a passed judgement the board may still say why it is closed.
void Settle(const State& state, RunGateReport* report) {
  const GateFinding* worst = report->judgement.Gravest();
  report->verdict = report->judgement.verdict;
  report->reason = report->judgement.reason;
  if (worst != nullptr && worst->verdict != Verdict::kPass) {
    report->detail = worst->row + ": " + worst->detail;
    report->next = worst->next;
    if (!report->judgement.WaitsForPersonAlone()) return;
  }
  Staleness staleness(state);
  for (const BoardLine& line : Board(state, &staleness)) {
    if (line.step != report->judgement.gate) continue;
    if (line.verdict == Verdict::kPass) {
      // Signed since: the person's decision is what the document was waiting for.
      report->verdict = Verdict::kPass;
      report->reason.clear();
      report->detail = line.detail;
      report->next.clear();
    } else if (report->verdict == Verdict::kPass) {
      report->verdict = line.verdict;
      report->reason = line.reason;
      report->detail = line.detail;
      const Reason* known = FindReason(line.reason);
      report->next = known == nullptr ? "" : std::string(known->next);
    }
  }
}

}  // namespace

Result<Ran> Collecting::Tare(EvidenceKind kind, const std::vector<std::string>& args) {
  RecordOptions record;
  record.step = options_.gate;
  record.kind = kind;
  record.command = {options_.program};
  record.command.insert(record.command.end(), args.begin(), args.end());
  record.expand_out = true;
  record.quiet = options_.quiet;
  record.config_keys = keys_.empty() ? std::vector<std::string>{"none"} : keys_;
  // Numbers are read from these runs later: under which contracts they were made (BASE-05).
  if (facts_.is_object())
    record.depends = {"contract:all=" + facts_["contracts"].get<std::string>()};
  // No conclusion: a command that ran well is an ingredient, and must open nothing by itself.
  TARE_ASSIGN_OR_RETURN(const RecordReport report,
                        RecordCommand(env_, options_.task, actor_, record));
  Ran ran;
  ran.run_id = report.run_id;
  ran.artifacts = report.artifacts;
  const std::string run_dir =
      JoinPath(options_.task, fmt::format("{}/{}", options_.gate, report.run_id));
  ran.out = run_dir + "/out";
  const std::string what = fmt::format("tare {}", fmt::join(args, " "));
  if (!report.exit_code || report.signal != 0) {
    return Error(Code::kAborted, "`{}` was killed by signal {}; see {}/stderr.txt", what,
                 report.signal, run_dir);
  }
  ran.exit_code = *report.exit_code;
  if (ran.exit_code >= kExitUsage) {
    const auto text = env_->ReadFile(run_dir + "/stderr.txt");
    const std::string last = text.ok() ? *text : std::string();
    return Error(Code::kAborted, "`{}` ended with status {}: {}", what, ran.exit_code,
                 Printable(last.substr(0, 400)));
  }
  const auto text = env_->ReadFile(run_dir + "/stdout.txt");
  if (text.ok()) {
    auto json = ParseJson(*text);
    if (json.ok()) ran.json = *std::move(json);
  }
  return ran;
}

void Collecting::AddFaults(std::string_view side, std::vector<std::string>* args) const {
  std::string wanted;
  for (size_t at = 0; at < options_.faults.size();) {
    const size_t end = std::min(options_.faults.find(',', at), options_.faults.size());
    const std::string one = options_.faults.substr(at, end - at);
    at = end + 1;
    const bool mine = side == "both" || one.ends_with("@both") ||
                      one.ends_with(std::string("@") + std::string(side));
    if (mine) wanted += (wanted.empty() ? "" : ",") + one;
  }
  if (!wanted.empty()) args->insert(args->end(), {"--fault", wanted});
}

Status Collecting::Keep(EvidenceKind kind, const std::string& name, Role role,
                        const Json& document) {
  TARE_ASSIGN_OR_RETURN(const auto task, OpenWaiting(env_, options_.task, actor_));
  RunStart start;
  start.step = options_.gate;
  start.kind = kind;
  TARE_ASSIGN_OR_RETURN(
      start.dependencies,
      ResolveDependencies(env_, task->state(), {}, {},
                          keys_.empty() ? std::vector<std::string>{"none"} : keys_));
  TARE_ASSIGN_OR_RETURN(std::string config,
                        CanonicalJson({{"schema", "tare-run-config-1"},
                                       {"command", {"keep", options_.gate, name}},
                                       {"scripts", Json::array()},
                                       {"task", Json::object()},
                                       {"dependencies", DependenciesToJson(start.dependencies)}}));
  config += '\n';
  start.content_id = Hex(Sha256Of(config));
  TARE_ASSIGN_OR_RETURN(const std::string run, task->StartRun(start));
  TARE_RETURN_IF_ERROR(task->AddBytes(run, "config.json", Role::kConfig, config));
  TARE_RETURN_IF_ERROR(task->AddBytes(run, "identity.json", Role::kIdentity,
                                      Text(ExecutionIdentity(env_, {options_.program}, {}))));
  TARE_RETURN_IF_ERROR(task->AddBytes(run, name, role, Text(document)));
  RunEnd end;
  end.exit_code = 0;
  return task->EndRun(run, end);
}

Result<Json> Collecting::Facts() {
  if (!facts_.is_null()) return facts_;
  TARE_ASSIGN_OR_RETURN(const Ran ran,
                        Tare(EvidenceKind::kE1, {"inventory", model(), "--subject", "--json"}));
  if (!ran.json.is_object()) return DataLoss("tare inventory --subject gave no JSON object");
  TARE_ASSIGN_OR_RETURN(const TaskView view, ReadTask(env_, options_.task));
  facts_ = ran.json;
  std::string recipe;
  if (view.state.config() != nullptr) {
    for (const Dependency& d : view.state.config()->config.SemanticDependencies()) {
      recipe += d.name + "=" + d.digest + "\n";
    }
  }
  facts_["recipe"] = Hex(Sha256Of(recipe));
  for (const char* key : {"model", "weights", "image", "contracts", "executable_sha256"}) {
    if (!facts_.contains(key) || !facts_[key].is_string()) {
      return DataLoss("tare inventory --subject does not say `{}`", key);
    }
  }
  depends_.push_back("weights:model=" + facts_["weights"].get<std::string>());
  depends_.push_back("tool:tare=" + facts_["executable_sha256"].get<std::string>());
  depends_.push_back("contract:all=" + facts_["contracts"].get<std::string>());
  return facts_;
}

Result<Json> Collecting::SubjectOf() {
  TARE_ASSIGN_OR_RETURN(const Json facts, Facts());
  Json out = Json::object();
  for (const char* key : {"model", "weights", "recipe", "image", "contracts"})
    out[key] = facts[key];
  return out;
}

Result<Json> Collecting::EvidenceOf(const std::string& gate) {
  TARE_ASSIGN_OR_RETURN(const TaskView view, ReadTask(env_, options_.task));
  for (auto a = view.state.artifacts.rbegin(); a != view.state.artifacts.rend(); ++a) {
    auto path = ParseArtifactPath(a->path);
    if (!path.ok() || path->step != gate || path->name != kEvidenceFile) continue;
    TARE_ASSIGN_OR_RETURN(const std::string text, env_->ReadFile(JoinPath(options_.task, a->path)));
    const std::string id = fmt::format("artifact:{}/{}", gate, kEvidenceFile);
    if (std::find(depends_.begin(), depends_.end(), id) == depends_.end()) depends_.push_back(id);
    return ParseJson(text);
  }
  return Error(Code::kNotFound, "no evidence of {} is recorded in {}", gate, options_.task);
}

std::string Collecting::Now() const {
  const std::string now = FormatUtc(env_->NowNs());
  return now.substr(0, 19) + "Z";
}

GateCollector FindCollector(std::string_view gate) {
  struct Row {
    std::string_view gate;
    GateCollector collector;
  };
  static constexpr Row kRows[] = {
#define TARE_GATE_COLLECTOR(gate, function) {gate, function},
#include "workflow/gates/collectors.inc"
#undef TARE_GATE_COLLECTOR
  };
  for (const Row& row : kRows) {
    if (row.gate == gate) return row.collector;
  }
  return nullptr;
}

EvidenceStatus MayRun(const State& state, Staleness* staleness, const std::string& gate) {
  const GateSpec* spec = TheWorkflow().Find(gate);
  TARE_CHECK(spec != nullptr) << gate;
  if (TrainingGate(gate) && state.config() != nullptr &&
      state.config()->config.String("task.scope") == "inference-only") {
    return Refused(reason::kOutsideScope,
                   "the task is inference-only: the training loop is not accepted");
  }
  const std::vector<BoardLine> board = Board(state, staleness);
  EvidenceStatus person{Verdict::kPass, "", ""};
  for (const std::string& need : spec->needs) {
    const auto at = std::find_if(board.begin(), board.end(),
                                 [&](const BoardLine& line) { return line.step == need; });
    TARE_CHECK(at != board.end());
    // A pass that no judge gave opens the board for people to read, and no later gate.
    const auto judged = state.gates.find(need);
    if (at->verdict == Verdict::kPass &&
        (judged == state.gates.end() || judged->second.verdict != Verdict::kPass)) {
      return Refused(reason::kPrerequisiteOpen,
                     fmt::format("{} has a recorded pass that no judge of Tare gave", need));
    }
    if (at->verdict == Verdict::kPass) continue;
    // The first stop is not passed yet: the second has nothing else to wait for, so its materials
    // can be made.
    if (spec->stop == "before" && at->verdict == Verdict::kWaitingHuman && IsHumanStop(need)) {
      person = {Verdict::kWaitingHuman, at->reason,
                fmt::format("{} waits for a person too: {}", need, at->detail)};
      continue;
    }
    const std::string why = at->reason.empty() ? at->detail : at->reason + ", " + at->detail;
    return Refused(reason::kPrerequisiteOpen,
                   fmt::format("{} is {} ({})", need, VerdictName(at->verdict), why));
  }
  if (person.verdict != Verdict::kPass) return person;
  if (gate == "C1") {
    if (const EvidenceStatus tune = MayTune(state, staleness); tune.verdict != Verdict::kPass)
      return tune;
  }
  if (gate == "C9" || gate == "C10") {
    // Not compared is no difference; whether C1 and C5 have passed was asked above.
    const EvidenceStatus shared = TracksShareContract(state);
    if (shared.verdict == Verdict::kRefused) return shared;
  }
  if (gate == "C10") {
    const ChangeStatus change = BaselineChangeOf(state, staleness);
    if (change.verdict != Verdict::kPass) return {change.verdict, change.reason, change.detail};
  }
  if (spec->stop == "before") {
    const SignOffStatus signoff = StatusOfSignOff(state, staleness, gate);
    if (signoff.verdict != Verdict::kPass) {
      return {signoff.verdict, signoff.reason, signoff.detail};
    }
  }
  return {Verdict::kPass, "", ""};
}

Result<RunGateReport> RunGate(Env* env, const std::string& actor, const RunGateOptions& given) {
  RunGateOptions options = given;
  const GateSpec* spec = TheWorkflow().Find(options.gate);
  if (spec == nullptr) {
    return InvalidArgument("{} is no gate; C0 to C10 are", Printable(options.gate));
  }
  const GateCollector collect = FindCollector(options.gate);
  const GateJudge judge = FindJudge(options.gate);
  if (collect == nullptr || judge == nullptr) {
    return Unsupported("gate {}: this build does not act for it; `tare judge` takes its evidence",
                       options.gate);
  }
  RunGateReport report;
  report.judgement.gate = options.gate;
  bool provisional = false;
  {
    TARE_ASSIGN_OR_RETURN(const TaskView view, ReadTask(env, options.task));
    Staleness staleness(view.state);
    EvidenceStatus may = ContractRecorded(env, view);
    if (may.verdict == Verdict::kPass) may = MayRun(view.state, &staleness, options.gate);
    if (may.verdict != Verdict::kPass) {
      if (options.model.empty() && view.state.config() != nullptr) {
        options.model = view.state.config()->config.String("weights.path");
      }
      if (may.verdict == Verdict::kWaitingHuman && options.gate == "C9" && !options.model.empty()) {
        Collecting materials(env, options, actor);
        TARE_RETURN_IF_ERROR(PrepareC9(&materials));
      }
      TARE_ASSIGN_OR_RETURN(const auto task, OpenWaiting(env, options.task, actor));
      TARE_RETURN_IF_ERROR(task->Refuse("run " + options.gate, may.reason, may.detail));
      report.judgement.verdict = report.verdict = may.verdict;
      report.judgement.reason = report.reason = may.reason;
      report.detail = may.detail;
      const Reason* known = FindReason(may.reason);
      report.next = known == nullptr ? "" : std::string(known->next);
      return report;
    }
    if (options.model.empty() && view.state.config() != nullptr) {
      options.model = view.state.config()->config.String("weights.path");
    }
    for (const BoardLine& line : Board(view.state, &staleness)) {
      provisional |= line.step == "C1" && line.verdict != Verdict::kPass && options.gate != "C0" &&
                     options.gate != "C1";
    }
  }
  if (options.model.empty()) {
    return InvalidArgument("no model: --model, or weights.path in task.toml");
  }
  Collecting collecting(env, options, actor);
  TARE_ASSIGN_OR_RETURN(Json evidence, collect(&collecting));
  TARE_ASSIGN_OR_RETURN(const Json facts, collecting.Facts());
  report.judgement = judge(evidence);
  {
    TARE_ASSIGN_OR_RETURN(const TaskView view, ReadTask(env, options.task));
    if (view.state.config() != nullptr)
      report.judgement.Add(ContractFindings(view.state.config()->config, evidence));
  }
  if (provisional) {
    report.judgement.scope["provisional"] =
        "C1 is not confirmed: a change of its configuration turns this stale (A-35)";
  }
  std::vector<std::string> depends = collecting.depends();
  // What was judged before it: stale there is stale here (GEN-12). The judgement, not the document:
  // an earlier gate that is run again and says the same turns nothing stale.
  for (const std::string& need : spec->needs) {
    const std::string id = fmt::format("artifact:{}/{}", need, kJudgementFile);
    if (std::find(depends.begin(), depends.end(), id) == depends.end()) depends.push_back(id);
  }
  // Every command of the collection ended normally: an abnormal end was an error above.
  std::vector<std::string> keys = collecting.keys();
  if (keys.empty()) keys = {"none"};
  TARE_ASSIGN_OR_RETURN(
      const Recorded recorded,
      Record(env, options.task, actor, Text(evidence), report.judgement, keys, depends,
             /*exit_code=*/0, ExecutionIdentity(env, {options.program}, {})));
  report.run_id = recorded.run_id;
  TARE_ASSIGN_OR_RETURN(const TaskView view, ReadTask(env, options.task));
  Settle(view.state, &report);
  return report;
}

Result<RunGateReport> JudgeDocument(Env* env, const std::string& actor, const std::string& task,
                                    const std::string& path, std::optional<int64_t> exit_code) {
  TARE_ASSIGN_OR_RETURN(const std::string text, env->ReadFile(path));
  auto parsed = ParseJson(text);
  if (!parsed.ok()) return DataLoss("{}: {}", Printable(path), parsed.status().message());
  const std::string schema =
      parsed->is_object() && parsed->contains("schema") && (*parsed)["schema"].is_string()
          ? (*parsed)["schema"].get<std::string>()
          : std::string();
  constexpr std::string_view kHead = "tare.gate.";
  if (ClaimOfSchema(schema) != nullptr) return JudgeClaimDocument(env, actor, task, *parsed);
  const size_t slash = schema.find('/');
  const std::string gate = schema.starts_with(kHead) && slash != std::string::npos
                               ? schema.substr(kHead.size(), slash - kHead.size())
                               : std::string();
  const GateJudge judge = FindJudge(gate);
  if (judge == nullptr) {
    return DataLoss(
        "{}: schema `{}` is neither that of a gate's evidence (tare.gate.C<N>/v1) nor that of a "
        "claim (tare.claim.<name>/v1)",
        Printable(path), Printable(schema));
  }
  RunGateReport report;
  report.judgement = judge(*parsed);
  if (!task.empty()) {
    {
      TARE_ASSIGN_OR_RETURN(const TaskView view, ReadTask(env, task));
      if (view.state.config() != nullptr)
        report.judgement.Add(ContractFindings(view.state.config()->config, *parsed));
    }
    // Made elsewhere: who made it is not known here, so nothing of this machine is claimed.
    const Json identity = {{"schema", "tare-identity-1"}, {"made", "elsewhere"}};
    const Json subject = parsed->value("subject", Json::object());
    const Json weights = subject.is_object() ? subject.value("weights", Json()) : Json();
    std::vector<std::string> depends;
    if (weights.is_string() && ParseSha256(weights.get<std::string>()).ok()) {
      depends.push_back("weights:model=" + weights.get<std::string>());
    }
    TARE_ASSIGN_OR_RETURN(const Recorded recorded, Record(env, task, actor, text, report.judgement,
                                                          {}, depends, exit_code, identity));
    report.run_id = recorded.run_id;
    TARE_ASSIGN_OR_RETURN(const TaskView view, ReadTask(env, task));
    Settle(view.state, &report);
    return report;
  }
  const GateFinding* worst = report.judgement.Gravest();
  report.verdict = report.judgement.verdict;
  report.reason = report.judgement.reason;
  if (worst != nullptr && worst->verdict != Verdict::kPass) {
    report.detail = worst->row + ": " + worst->detail;
    report.next = worst->next;
  }
  return report;
}

}  // namespace tare::workflow
