#pragma once

// The demonstration's report: one HTML file that needs no network, readable in light and dark.

#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "rl/judge.h"
#include "rl/picture.h"

namespace tare::rl {

struct ReportRun {
  std::string title;     // "Both sides as they are"
  std::string expected;  // "pass"
  std::string command;   // that repeats it
  Json receipt;
  Judgement judgement;
  Picture picture;  // empty: none was made, and picture_note says why
  std::string picture_note;
  Json locate = nullptr;  // of `tare locate --json`, or null
  double seconds = 0;
};

struct ReportInput {
  std::string model;  // "MINI (generated)"
  std::string profile;
  std::string started;
  double seconds = 0;
  bool pass = false;  // every run ended as expected
  std::vector<ReportRun> runs;
};

std::string HtmlReport(const ReportInput& input);

}  // namespace tare::rl
