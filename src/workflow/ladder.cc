#include "workflow/ladder.h"

#include <fmt/format.h>

#include <cstdlib>
#include <ctime>

#include "base/check.h"
#include "base/reasons.h"

namespace tare::workflow {
namespace {

// Seconds since the epoch of "2026-11-29T10:00:00.000000001Z"; 0 for what is no such time.
double SecondsOf(const std::string& time) {
  std::tm tm = {};
  if (time.size() < 20 || ::strptime(time.c_str(), "%Y-%m-%dT%H:%M:%S", &tm) == nullptr) return 0;
  const double fraction =
      time[19] == '.' ? std::strtod(("0" + time.substr(19)).c_str(), nullptr) : 0;
  return static_cast<double>(::timegm(&tm)) + fraction;
}

}  // namespace

int LevelOf(EvidenceKind kind) {
  switch (kind) {
    case EvidenceKind::kE1:
      return 0;
    case EvidenceKind::kE2:
      return 1;
    case EvidenceKind::kE3:
      return 2;
    case EvidenceKind::kE4:
      return 3;
    case EvidenceKind::kE5:
    case EvidenceKind::kE6:
      return 4;
    case EvidenceKind::kE7:
    case EvidenceKind::kE8:
      return 5;
    case EvidenceKind::kE9:
    case EvidenceKind::kE10:
      return 6;
  }
  return 0;
}

std::string_view LadderStateName(LadderLevel::State state) {
  switch (state) {
    case LadderLevel::State::kUnrun:
      return "unrun";
    case LadderLevel::State::kPassed:
      return "passed";
    case LadderLevel::State::kFailed:
      return "failed";
    case LadderLevel::State::kExcused:
      return "unrun, with a reason";
  }
  return "";
}

std::string ExcuseName(int level) { return fmt::format("ladder-unrun-{}.json", level); }

std::vector<LadderLevel> LadderOf(const State& state, Staleness* staleness,
                                  const std::string& candidate) {
  std::vector<LadderLevel> out(kLadderLevels);
  for (int i = 0; i < kLadderLevels; ++i) out[static_cast<size_t>(i)].level = i + 1;
  for (const RunRecord& run : state.runs) {
    if (run.candidate != candidate || !run.ended) continue;
    for (const size_t index : run.artifacts) {
      for (LadderLevel& level : out) {
        if (run.step != "task" || level.state != LadderLevel::State::kUnrun ||
            !state.artifacts[index].path.ends_with("/" + ExcuseName(level.level))) {
          continue;
        }
        level.state = LadderLevel::State::kExcused;
        level.detail = "reason in run " + run.id;
      }
    }
    if (!run.kind || LevelOf(*run.kind) == 0) continue;
    LadderLevel& level = out[static_cast<size_t>(LevelOf(*run.kind)) - 1];
    ++level.runs;
    level.cost_s += SecondsOf(run.finished) - SecondsOf(run.started);
    const EvidenceStatus status = AssessRun(state, staleness, run);
    // The latest word counts; a run that came to none changes nothing.
    if (status.verdict == Verdict::kPass) {
      level.state = LadderLevel::State::kPassed;
      level.detail = "run " + run.id;
    } else if (status.verdict == Verdict::kFail) {
      level.state = LadderLevel::State::kFailed;
      level.detail = fmt::format("run {}: {}", run.id, status.reason);
    }
  }
  return out;
}

int LowestOpen(const std::vector<LadderLevel>& ladder) {
  for (const LadderLevel& level : ladder) {
    if (level.state == LadderLevel::State::kUnrun || level.state == LadderLevel::State::kFailed)
      return level.level;
  }
  return 0;
}

EvidenceStatus MaySchedule(const State& state, Staleness* staleness, const std::string& candidate,
                           EvidenceKind kind, bool excuse) {
  const int wanted = LevelOf(kind);
  for (const LadderLevel& level : LadderOf(state, staleness, candidate)) {
    if (level.level >= wanted) break;
    const bool failed = level.state == LadderLevel::State::kFailed;
    if (!failed && (level.state != LadderLevel::State::kUnrun || excuse)) continue;
    return {Verdict::kRefused, std::string(reason::kLevelSkipped),
            fmt::format("level {} ({}) of candidate {} is {}{}; level {} comes after it",
                        level.level, failed ? level.detail : "no run", Printable(candidate),
                        LadderStateName(level.state), failed ? "" : " and no reason is recorded",
                        wanted)};
  }
  return {Verdict::kPass, "", ""};
}

}  // namespace tare::workflow
