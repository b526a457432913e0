#pragma once

// From a symptom in the user's own words to the rows of the problem index. A ranking, not a
// diagnosis: it says what to read and which probe is cheapest, never what is wrong.

#include <string_view>
#include <vector>

#include "workflow/gates/table.h"

namespace tare::workflow {

struct Match {
  const Problem* problem = nullptr;
  double score = 0;                  // comparable within one answer only
  std::vector<std::string> matched;  // the words that counted, as reduced
};

// Best first, at most `limit`; empty when no word of `symptom` is in the index, which is an answer
// too. Equal scores keep the order of the index. Words are compared in lower case with English
// endings taken off; common words count for nothing, rare ones for more, two neighbours that are
// neighbours in the index for more still.
std::vector<Match> FindProblems(const WorkflowTable& table, std::string_view symptom,
                                size_t limit = 3);

}  // namespace tare::workflow
