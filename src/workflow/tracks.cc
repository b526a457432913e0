#include "workflow/tracks.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/reasons.h"
#include "base/sha256.h"
#include "workflow/archive.h"
#include "workflow/index.h"
#include "workflow/layout.h"
#include "workflow/signoff.h"
#include "workflow/task.h"

namespace tare::workflow {
namespace {

constexpr std::string_view kEvidence = "/evidence.json";
constexpr const char* kHandoverSchema = "tare.handover/1";

// The evidence document of a run, or nullptr.
const ArtifactRecord* EvidenceOf(const State& state, const RunRecord& run) {
  for (const size_t i : run.artifacts) {
    if (state.artifacts[i].path.ends_with(kEvidence)) return &state.artifacts[i];
  }
  return nullptr;
}

// The latest run of a step whose evidence a judge concluded.
const RunRecord* LatestJudged(const State& state, std::string_view step, bool passed_only) {
  const RunRecord* latest = nullptr;
  for (const RunRecord& run : state.runs) {
    if (run.step != step || !run.ended || !run.conclusion || EvidenceOf(state, run) == nullptr)
      continue;
    if (passed_only && run.conclusion->verdict != Verdict::kPass) continue;
    latest = &run;
  }
  return latest;
}

std::vector<std::string> WaitingStops(const State& state, Staleness* staleness) {
  std::vector<std::string> out;
  for (const BoardLine& line : Board(state, staleness)) {
    if (line.verdict == Verdict::kWaitingHuman)
      out.push_back(fmt::format("{}: {} {}", line.step, line.reason, line.detail));
  }
  return out;
}

}  // namespace

Json BaselineTrack::ToJson() const {
  return {{"state", state}, {"candidate", candidate}, {"table", table}, {"audit", audit}};
}

Json ConsistencyTrack::ToJson() const { return {{"gates", gates}, {"next", next}}; }

BaselineTrack BaselineOf(const State& state, Staleness* staleness) {
  BaselineTrack track;
  const bool ran = std::any_of(state.runs.begin(), state.runs.end(), [](const RunRecord& run) {
    return run.step == "C1" && run.kind.has_value();
  });
  const RunRecord* frozen = LatestJudged(state, "C1", /*passed_only=*/true);
  if (frozen == nullptr) {
    track.state = ran ? "tuning" : "untuned";
    return track;
  }
  track.candidate = frozen->id;
  track.table = EvidenceOf(state, *frozen)->sha256;
  if (const auto mark = staleness->Of(*frozen)) {
    track.state = "stale";
    track.audit = mark->ToString();
    return track;
  }
  const SignOffRecord* last = nullptr;
  for (const SignOffRecord& s : state.signoffs) {
    if (s.step == "C1" && s.seq > frozen->end_seq) last = &s;
  }
  if (last != nullptr && !last->approves) {
    track.state = "reopened";
    track.audit = "rejected by " + last->person;
    return track;
  }
  const SignOffStatus signoff = StatusOfSignOff(state, staleness, "C1");
  const bool confirmed = last != nullptr && signoff.verdict == Verdict::kPass;
  track.state = confirmed ? "confirmed" : "waiting-human";
  track.audit = confirmed ? "approved by " + signoff.person
                          : fmt::format("{} {}", signoff.reason, signoff.detail);
  return track;
}

ConsistencyTrack ConsistencyOf(const State& state, Staleness* staleness) {
  ConsistencyTrack track;
  for (const BoardLine& line : Board(state, staleness)) {
    if (line.step < "C2" || line.step > "C8" || line.step.size() != 2) continue;
    track.gates[line.step] = VerdictName(line.verdict);
    if (track.next.empty() && line.verdict != Verdict::kPass) track.next = line.step;
  }
  return track;
}

EvidenceStatus MayTune(const State& state, Staleness* staleness) {
  const BaselineTrack track = BaselineOf(state, staleness);
  if (track.state != "waiting-human" && track.state != "confirmed") return {Verdict::kPass, "", ""};
  return {Verdict::kRefused, std::string(reason::kTuningFrozen),
          fmt::format("the baseline of run {} is {} ({})", track.candidate,
                      track.state == "confirmed" ? "confirmed" : "frozen", track.audit)};
}

TrackContract ContractOf(const State& state, const RunRecord& run) {
  const ConfigRecord* config = nullptr;
  for (const ConfigRecord& c : state.configs) {
    if (c.seq <= run.start_seq) config = &c;
  }
  const auto join = [&](std::initializer_list<const char*> keys) {
    std::string out;
    for (const char* key : keys) {
      const std::string_view text =
          config == nullptr ? std::string_view() : config->config.Text(key);
      out += fmt::format("{}{}={}", out.empty() ? "" : ";", key, text.empty() ? "unset" : text);
    }
    return out;
  };
  TrackContract c = {
      {"model", join({"model.name", "model.architecture", "weights.sha256"})},
      {"precision", join({"precision.weights", "precision.activations", "precision.kv_cache"})},
      {"hardware", join({"hardware.device", "hardware.count", "hardware.nodes"})},
      {"image", join({"image.digest"})}};
  for (const Dependency& d : run.dependencies) {
    if (d.type == DependencyType::kWeights) c["model"] += ";" + d.name + "=" + d.digest;
    if (d.type == DependencyType::kImage) c["image"] += ";" + d.name + "=" + d.digest;
    if (d.type == DependencyType::kHardware) c["hardware"] += ";" + d.name + "=" + d.digest;
  }
  return c;
}

std::string ContractHash(const TrackContract& contract) {
  std::string text;
  for (const auto& [part, value] : contract) text += part + "=" + value + "\n";
  return Hex(Sha256Of(text));
}

EvidenceStatus CompareTracks(const TrackContract& baseline, const TrackContract& consistency) {
  if (ContractHash(baseline) == ContractHash(consistency)) return {Verdict::kPass, "", ""};
  std::string parts;
  for (const char* part : {"model", "precision", "hardware", "image"}) {
    const auto a = baseline.find(part), b = consistency.find(part);
    const std::string left = a == baseline.end() ? "nothing" : a->second,
                      right = b == consistency.end() ? "nothing" : b->second;
    if (left == right) continue;
    parts += fmt::format("{}{}: {} on the baseline's track, {} on the other",
                         parts.empty() ? "" : "; ", part, left, right);
  }
  return {Verdict::kRefused, std::string(reason::kTrackContract), parts};
}

EvidenceStatus TracksShareContract(const State& state) {
  const RunRecord* baseline = LatestJudged(state, "C1", true);
  const RunRecord* consistency = LatestJudged(state, "C5", true);
  if (baseline == nullptr || consistency == nullptr) {
    return {Verdict::kNotCovered, std::string(reason::kOutsideScope),
            fmt::format("no contract was compared: {} has not passed yet",
                        baseline == nullptr ? "C1" : "C5")};
  }
  return CompareTracks(ContractOf(state, *baseline), ContractOf(state, *consistency));
}

Result<Handover> WriteHandover(Env* env, const std::string& task, const std::string& package,
                               const std::string& actor, const std::vector<std::string>& leases) {
  Handover out;
  {
    TARE_ASSIGN_OR_RETURN(const TaskView view, ReadTask(env, task));
    Staleness staleness(view.state);
    out.waiting = WaitingStops(view.state, &staleness);
  }
  if (out.waiting.empty()) {
    return Error(Code::kPrecondition,
                 "{}: no stop waits for a person, so there is nothing to hand "
                 "over",
                 Printable(task));
  }
  if (env->Stat(package).ok()) {
    return Error(Code::kAlreadyExists, "{} exists; a package is made once", Printable(package));
  }
  TARE_RETURN_IF_ERROR(env->CreateDir(package));
  TARE_ASSIGN_OR_RETURN(const ArchiveReport copy,
                        ArchiveTask(env, task, JoinPath(package, "task"), actor));
  out.files = copy.files;
  out.checkpoint = EncodeCheckpoint(copy.checkpoint);
  // Written last: a package without it was never finished.
  const Json json = {{"schema", kHandoverSchema},
                     {"by", actor},
                     {"waiting", out.waiting},
                     {"checkpoint", out.checkpoint},
                     {"files", out.files},
                     {"give_back", leases},
                     {"resume", "tare handover --resume PACKAGE TASK"}};
  TARE_RETURN_IF_ERROR(
      env->WriteFileAtomic(JoinPath(package, "handover.json"), json.dump(1) + "\n"));
  return out;
}

Result<Handover> ResumeHandover(Env* env, const std::string& package, const std::string& task,
                                const std::string& actor) {
  TARE_ASSIGN_OR_RETURN(const std::string text, env->ReadFile(JoinPath(package, "handover.json")));
  TARE_ASSIGN_OR_RETURN(const Json json, ParseJson(text));
  Handover out;
  if (!json.is_object() || json.value("schema", Json()) != kHandoverSchema ||
      !json.value("checkpoint", Json()).is_string() || !json.value("waiting", Json()).is_array()) {
    return DataLoss("{}/handover.json is no {}", Printable(package), kHandoverSchema);
  }
  for (const Json& line : json["waiting"]) {
    if (!line.is_string())
      return DataLoss("handover.json: `waiting` holds something else than text");
    out.waiting.push_back(line.get<std::string>());
  }
  out.checkpoint = json["checkpoint"].get<std::string>();
  TARE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, ParseCheckpoint(out.checkpoint));
  VerifyOptions options;
  options.checkpoint = checkpoint;
  const std::string from = JoinPath(package, "task");
  TARE_ASSIGN_OR_RETURN(const VerifyReport verified, VerifyTask(env, from, options));
  if (verified.verdict != Verdict::kPass) {
    return DataLoss("the package does not verify: {} {}: {}", verified.findings[0].reason,
                    verified.findings[0].where, verified.findings[0].message);
  }
  TARE_ASSIGN_OR_RETURN(const ArchiveReport copy, ArchiveTask(env, from, task, actor));
  out.files = copy.files;
  return out;
}

}  // namespace tare::workflow
