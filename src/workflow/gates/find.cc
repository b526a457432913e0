#include "workflow/gates/find.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>

namespace tare::workflow {
namespace {

const std::set<std::string, std::less<>>& CommonWords() {
  static const std::set<std::string, std::less<>> words = {
      "a",    "an",   "and",   "are",  "as",   "at",   "be",    "been", "but",  "by",   "can",
      "did",  "do",   "does",  "for",  "from", "get",  "gets",  "had",  "has",  "have", "how",
      "i",    "if",   "in",    "is",   "it",   "its",  "just",  "me",   "my",   "no",   "not",
      "now",  "of",   "on",    "or",   "our",  "s",    "so",    "t",    "that", "the",  "their",
      "them", "then", "there", "they", "this", "to",   "too",   "us",   "was",  "we",   "were",
      "what", "when", "where", "why",  "will", "with", "would", "you",  "your", "only", "should"};
  return words;
}

// "gradients" and "gradient", "packed" and "packing" meet; not a linguist's stem, only the same one
// on both sides.
std::string Reduced(std::string word) {
  const auto ends = [&word](std::string_view tail) {
    return word.size() >= tail.size() + 3 && word.ends_with(tail);
  };
  if (ends("ies")) {
    word.replace(word.size() - 3, 3, "y");
  } else if (ends("s") && !ends("ss") && !ends("us")) {
    word.pop_back();
  }
  for (std::string_view tail : {"ization", "izing", "ized", "ize", "ing", "ation", "ed", "ly"}) {
    if (ends(tail)) {
      word.resize(word.size() - tail.size());
      break;
    }
  }
  if (ends("e")) word.pop_back();
  return word;
}

std::vector<std::string> Words(std::string_view text) {
  std::vector<std::string> out;
  std::string word;
  const auto flush = [&] {
    if (!word.empty() && !CommonWords().contains(word)) out.push_back(Reduced(word));
    word.clear();
  };
  for (char c : text) {
    const bool upper = c >= 'A' && c <= 'Z';
    if (upper || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9')) {
      word += upper ? static_cast<char>(c - 'A' + 'a') : c;
    } else {
      flush();
    }
  }
  flush();
  return out;
}

struct Row {
  std::map<std::string, int> words;
  std::set<std::pair<std::string, std::string>> pairs;
};

}  // namespace

std::vector<Match> FindProblems(const WorkflowTable& table, std::string_view symptom,
                                size_t limit) {
  std::vector<Row> rows;
  std::map<std::string, int> rows_with;
  for (const Problem& p : table.problems) {
    Row row;
    for (const std::string* text : {&p.problem, &p.words}) {
      const auto words = Words(*text);
      for (size_t i = 0; i < words.size(); ++i) {
        ++row.words[words[i]];
        if (i > 0) row.pairs.insert({words[i - 1], words[i]});
      }
    }
    for (const auto& [word, count] : row.words) ++rows_with[word];
    rows.push_back(std::move(row));
  }
  const auto asked = Words(symptom.substr(0, 4096));
  const double n = static_cast<double>(rows.size());
  std::vector<Match> out;
  for (size_t r = 0; r < rows.size(); ++r) {
    Match match{&table.problems[r], 0, {}};
    std::set<std::string> counted;
    for (size_t i = 0; i < asked.size(); ++i) {
      const auto it = rows[r].words.find(asked[i]);
      if (it == rows[r].words.end()) continue;
      // A word in every row weighs little, a word in one row most. Plain ratios: no logarithm, so
      // that the order is the same on every machine.
      const double weight = n / rows_with[asked[i]];
      if (counted.insert(asked[i]).second) {
        match.score += weight * (it->second > 1 ? 1.5 : 1.0);
        match.matched.push_back(asked[i]);
      }
      if (i > 0 && rows[r].pairs.contains({asked[i - 1], asked[i]})) match.score += n / 2;
    }
    if (match.score > 0) out.push_back(std::move(match));
  }
  std::stable_sort(out.begin(), out.end(),
                   [](const Match& a, const Match& b) { return a.score > b.score; });
  if (out.size() > limit) out.resize(limit);
  return out;
}

}  // namespace tare::workflow
