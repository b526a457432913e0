#pragma once

// Changes to an honest document, as someone makes them who wants it to look green: consistent in
// every place but the one that matters.

#include <functional>
#include <string>
#include <vector>

#include "workflow/gates/testing_evidence_c0_c4.h"
#include "workflow/gates/testing_evidence_delivery.h"

namespace tare::workflow {

using Bundle = std::map<std::string, Json>;  // gate -> evidence

inline Bundle HonestBundle() {
  return {{"C5", HonestC5()}, {"C6", HonestC6()}, {"C7", HonestC7()},
          {"C8", HonestC8()}, {"C9", HonestC9()}, {"C10", HonestC10()}};
}

// Every logprob path of a C5 document: the named ones, their repeats and their repacked runs.
inline void ForPaths(Json& c5, const std::vector<std::string>& names,
                     const std::function<void(Json&)>& change) {
  for (const std::string& name : names) {
    if (c5["paths"].contains(name)) change(c5["paths"][name]);
    if (name == "rollout") continue;
    for (Json& run : c5["same_packing"][name]) change(run);
    for (auto& [packing, runs] : c5["repacked"].items()) change(runs[name]);
  }
}
inline const std::vector<std::string> kAllPaths = {"rollout", "old_logprob", "actor"};
inline const std::vector<std::string> kTrainerPaths = {"old_logprob", "actor"};

// Sets every word of a path; `word` gets sequence and token.
inline void SetWords(Json& path, const std::function<Json(int sequence, int token)>& word) {
  int s = 0;
  for (Json& line : path["sequences"]) {
    int t = 0;
    for (Json& bits : line["bits"]) bits = word(s, t++);
    ++s;
  }
}
// No token of any path counts.
inline void MaskAll(Json& c5) {
  ForPaths(c5, kAllPaths, [](Json& path) {
    for (Json& line : path["sequences"]) {
      for (Json& bit : line["mask"]) bit = 0;
    }
  });
}
// Flips the lowest bit of one word.
inline void OneUlp(Json& path, int sequence, int token) {
  Json& bits = path["sequences"][static_cast<size_t>(sequence)]["bits"][static_cast<size_t>(token)];
  const auto word =
      static_cast<uint32_t>(std::stoul(bits.get<std::string>().substr(2), nullptr, 16));
  bits = Word(word ^ 1u);
}
// Drops the last token of one sequence, with all that hangs on it.
inline void CutShort(Json& path, int sequence) {
  Json& line = path["sequences"][static_cast<size_t>(sequence)];
  for (const char* key : {"tokens", "mask", "bits"}) line[key].erase(line[key].size() - 1);
  path["rows"] = path["rows"].get<int64_t>() - 1;
}

// Sums of a loop's update again after its parameters were changed.
inline void Total(Json& update) {
  for (auto& [key, sum] : update["totals"].items()) {
    int64_t total = 0;
    for (const Json& p : update["parameters"]) total += p.at(key).get<int64_t>();
    sum = total;
  }
}

// Update `k` gave the very weights that it started from: master, deployed, or both.
inline void KeepWeights(Json& loop, int k, bool master) {
  Json& update = loop["updates"][static_cast<size_t>(k)];
  Json& next = loop["versions"][static_cast<size_t>(k) + 1];
  const Json deployed = update["deployed_before"];
  update["deployed_after"] = deployed;
  update["published"]["sent"] = deployed;
  update["published"]["held"] = deployed;
  next["trainer_deployed"] = deployed;
  next["engine_held"] = deployed;
  for (Json& p : update["parameters"]) p["deployed_changed"] = 0;
  if (master) {
    update["master_after"] = update["master_before"];
    next["trainer_master"] = update["master_before"];
    for (Json& p : update["parameters"]) p["master_changed"] = 0;
  }
  if (loop["updates"].size() > static_cast<size_t>(k) + 1) {
    Json& after = loop["updates"][static_cast<size_t>(k) + 1];
    after["deployed_before"] = deployed;
    if (master) after["master_before"] = update["master_before"];
  }
  Total(update);
}

// One obligation broken in the honest evidence of a gate, and the finding that must say so.
struct Broken {
  const char* row;
  const char* gate;
  std::function<void(Json&)> change;
  std::string_view reason;
  // Part of the finding's detail, or after a '=' all of it, where row and reason are not one
  // check's.
  std::string says = "";
};

inline void ExpectBroken(const std::vector<Broken>& rows) {
  const Bundle honest = HonestBundle();
  for (const Broken& b : rows) {
    SCOPED_TRACE(fmt::format("{} {} {}", b.row, b.gate, b.says));
    const auto at = honest.find(b.gate);
    Json doc = at == honest.end() ? HonestEvidence(b.gate) : at->second;
    b.change(doc);
    const GateJudgement judged = FindJudge(b.gate)(doc);
    EXPECT_NE(judged.verdict, Verdict::kPass);
    bool found = false;
    std::string all;
    for (const GateFinding& f : judged.findings) {
      found |= f.row == b.row && f.reason == b.reason &&
               (b.says.starts_with("=") ? f.detail == b.says.substr(1)
                                        : f.detail.find(b.says) != std::string::npos);
      if (f.verdict != Verdict::kPass) all += fmt::format("{} {}: {}\n", f.row, f.reason, f.detail);
    }
    EXPECT_TRUE(found) << b.reason << " is not among\n" << all;
  }
}

}  // namespace tare::workflow
