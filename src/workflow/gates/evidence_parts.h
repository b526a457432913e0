#pragma once

// Parts that the evidence documents of C5 to C10 share: recipes, logprobs as bits with their
// comparison, execution identities, series of measurements. Readers only read;
// everything they find wrong is a finding of the judging at hand.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "workflow/gates/judge.h"

namespace tare::workflow {

// A flat resolved configuration: key to value as text.
using Recipe = std::map<std::string, std::string>;
Recipe ReadRecipe(const Field& field, size_t min = 1);
// SHA-256 of "key=value\n" in the order of the keys.
std::string RecipeId(const Recipe& recipe);

// Logprobs of one path. `bits` of a token is absent when the path gave it none: 0.0 is legal.
struct LogprobLine {
  std::string sequence;
  std::vector<int64_t> prompt, tokens;
  std::vector<int64_t> mask;                  // 1: enters the loss
  std::vector<std::optional<uint32_t>> bits;  // f32
};
struct LogprobPath {
  std::string name;  // "rollout", "old_logprob", "actor"
  std::string dtype, kind, temperature;
  int64_t vocabulary = 0;
  int64_t rows = 0;  // token rows that the model computed for it
  std::vector<LogprobLine> lines;
};
// {"dtype","kind","temperature","vocabulary","rows","sequences":[{"sequence","prompt","tokens",
//  "mask","bits"}]}; bits are "0x........" or null.
LogprobPath ReadLogprobPath(const Field& field, std::string name);
std::vector<LogprobLine> ReadLogprobLines(const Field& field);

struct LogprobCounts {
  int64_t tokens = 0, valid = 0, compared = 0, mismatches = 0, sign_of_zero = 0, non_finite = 0;
};
// Asks in the order of docs/formats/gate_evidence_c5_c10.md: same sequences and tokens, same mask,
// all present, at least one valid token, finite, equal bits. `row` is the row that bits are judged
// under ("C5-07"), `count_row` that of the counts ("C5-08").
LogprobCounts CompareLogprobs(Judging* judging, std::string_view row, std::string_view count_row,
                              std::string_view where, const LogprobPath& a, const LogprobPath& b);
// What one path alone shows: not bf16 or decimal text in f32 words, not one value throughout, dtype
// f32. `rows` is checked too: every token but the last of each sequence was computed.
void CheckOriginal(Judging* judging, std::string_view row, std::string_view where,
                   const LogprobPath& path);
int64_t ValidTokens(const LogprobPath& path);

// What one process was, as it says itself.
struct SideIdentity {
  std::string side;  // "rollout", "trainer"
  std::string image, executable, interpreter, packages;
  std::map<std::string, std::string> libraries;  // loaded file -> SHA-256
  std::vector<std::string> overlay;              // files changed over the image
  std::string switch_name, switch_at_start;
  int64_t switch_effective = 0;
  std::vector<int64_t> workers;  // effective value in each worker
  std::string profile, device, driver, topology;
  std::string contracts;  // RecipeId of operator -> contract ID, as in force in this process
  bool prefix_caching = false;
  std::string faults;
};
SideIdentity ReadIdentity(const Field& field, std::string side);
// C5-09, RL-01, RL-02, RL-04, SYS-03: both say what they ran, and it is one image, one environment,
// with the switch in effect in every worker. `subject` names the image.
void CheckIdentities(Judging* judging, std::string_view row, const Subject& subject,
                     const SideIdentity& rollout, const SideIdentity& trainer);

// Repeated measurements with their summary: {"values":[..],"median":..,"sum":..}, whole numbers.
// The summary must follow from the values, so that neither is altered alone. The lower median.
struct Series {
  std::vector<int64_t> values;
  int64_t median = 0, sum = 0;
};
Series ReadSeries(const Field& field, size_t min);
bool SeriesFollows(const Series& series);

// What C1 agreed, as text by key ("throughput_ratio_ppm", "main_topologies", "pairs"); empty while
// no person has decided. All documents of a task that carry one must agree (JudgeTask).
Recipe ReadAgreement(const Field& field);  // an object, or null for none yet
// The value as a whole number of at least `min`; nullopt when it is missing or no such number.
std::optional<int64_t> Agreed(const Recipe& agreement, const std::string& key, int64_t min = 1);
std::vector<std::string> AgreedList(const Recipe& agreement, const std::string& key);  // "a|b"

// A list of names with each name once.
bool AllDifferent(const std::vector<std::string>& names);

}  // namespace tare::workflow
