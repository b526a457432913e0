#pragma once

// The workflow C0 to C10 as data: gates, ladder, delivery rules, tracks, human stops and problem
// index. The one source is workflow.json beside this file, embedded at build; `tare workflow`,
// `tare find` and docs/gates.md are all made from it. What a gate shows is judged elsewhere: this
// table says what is asked.

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace tare::workflow {

inline constexpr std::array<std::string_view, 11> kGateIds = {"C0", "C1", "C2", "C3", "C4", "C5",
                                                              "C6", "C7", "C8", "C9", "C10"};

struct GateSpec {
  std::string id;  // "C5"
  std::string title;
  // The five parts. None may be empty.
  std::vector<std::string> inputs;
  std::string action;
  std::string pass;
  std::vector<std::string> artifacts;
  std::vector<std::string> references;
  // What joins them to the machine.
  std::vector<std::string> needs;     // gates that must have passed; only earlier ones
  std::vector<std::string> evidence;  // kinds E1 to E10 that can open it
  std::string stop;                   // "", or "before" / "after": a person decides there
  std::vector<std::string> commands;  // what Tare does for it today, "tare diff"
  std::string open;                   // what it does not do for it today
};

struct Rung {
  int rung = 0;  // from 1, cheapest first
  std::string level, probe;
};

struct Stop {
  std::string id;    // the gate
  std::string when;  // "after C1"
  std::string title, text;
};

struct Problem {
  std::string id;                     // "FIND-03"
  std::string problem;                // in the workflow's words
  std::string section;                // what to read first
  std::vector<std::string> gates;     // whose checks speak to it
  std::string first;                  // the first probe
  std::vector<std::string> commands;  // runs it
  std::string words;                  // as a user might say it; for search only
};

struct WorkflowTable {
  std::vector<GateSpec> gates;  // all of kGateIds, in order
  std::vector<Rung> ladder;
  std::vector<std::string> rules, delivery, tracks;
  std::vector<Stop> stops;
  std::vector<Problem> problems;

  const GateSpec* Find(std::string_view id) const;  // nullptr: no such gate
};

// kInvalidArgument naming gate and part when a part is missing, empty or of another type, a key is
// unknown, one of the eleven gates is missing or out of order, a gate needs one that is not
// earlier, an evidence kind does not exist, or a stop and its gate disagree.
Result<WorkflowTable> ParseWorkflowTable(std::string_view json);

// The embedded table. A build with a broken one stops at the first use (and its test fails).
const WorkflowTable& TheWorkflow();

std::string GateText(const GateSpec& gate);                // for a terminal
std::string WorkflowText(const WorkflowTable& table);      // for a terminal
std::string WorkflowMarkdown(const WorkflowTable& table);  // docs/gates.md
Json WorkflowJson(const WorkflowTable& table);             // what ParseWorkflowTable reads

}  // namespace tare::workflow
