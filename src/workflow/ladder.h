#pragma once

// The ladder: six levels, cheapest first (workflow.json, "ladder"). For one candidate a level is
// run only after the cheaper ones have passed, or have a recorded reason why they were not run
// (CHEAP-01). Everything is read from the log, so a level's state, cost and reason are the
// record's.

#include <string>
#include <vector>

#include "workflow/staleness.h"
#include "workflow/state.h"

namespace tare::workflow {

inline constexpr int kLadderLevels = 6;

// The level at which evidence of a kind is made: E2 1, E3 2, E4 3, E5 and E6 4, E7 and E8 5, E9 and
// E10 6. 0 for E1: reading costs nothing and proves nothing that runs.
int LevelOf(EvidenceKind kind);

struct LadderLevel {
  int level = 0;
  enum class State { kUnrun, kPassed, kFailed, kExcused } state = State::kUnrun;
  std::string detail;  // run, reason of a failure, or the recorded excuse's run
  int runs = 0;        // ended runs at this level, whatever came out
  double cost_s = 0;   // wall time of these runs
};
std::string_view LadderStateName(LadderLevel::State state);

// Levels 1 to 6 of a candidate, in order.
std::vector<LadderLevel> LadderOf(const State& state, Staleness* staleness,
                                  const std::string& candidate);
// The lowest level that is open: failed or unrun. 0 when all six have passed or are excused.
int LowestOpen(const std::vector<LadderLevel>& ladder);
// May a run of this kind be scheduled for the candidate now? kPass, or kRefused `level-skipped`
// naming the cheaper level that is in the way. `excuse`: a reason for unrun levels is given with
// the request (it will be recorded); a failed level no reason excuses.
EvidenceStatus MaySchedule(const State& state, Staleness* staleness, const std::string& candidate,
                           EvidenceKind kind, bool excuse);

// Artifact of a run of step `task` that excuses an unrun level of its candidate.
std::string ExcuseName(int level);  // "ladder-unrun-2.json"

}  // namespace tare::workflow
