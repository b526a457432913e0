// Gate C2: does the proxy keep every operator type, adjacent pair, state path and width of the full
// model, is every feature tied to a test that ran on this very proxy, and is every gap listed.

#include "workflow/gates/c2.h"

#include <fmt/format.h>

#include <algorithm>

#include "workflow/gates/judge.h"

namespace tare::workflow {
namespace {

LayerShape ReadLayer(const Field& f) {
  return {f.At("types").Strings(1), f.At("states").Strings(), f.At("shares").Strings()};
}

std::map<std::string, std::string> ReadTexts(const Field& f, size_t min) {
  std::map<std::string, std::string> out;
  for (const auto& [name, value] : f.Members(min)) out[name] = value.Str();
  return out;
}

struct Stack {
  std::vector<LayerShape> layers;
  std::map<std::string, std::string> geometry, shards;
  std::vector<std::string> extra;  // features that no layer shows: "final.softcap"
};
Stack ReadStack(const Field& f) {
  Stack s;
  for (const Field& l : f.At("layers").Items(1)) s.layers.push_back(ReadLayer(l));
  s.geometry = ReadTexts(f.At("geometry"), 1);
  s.shards = ReadTexts(f.At("shards"), 1);
  s.extra = f.At("features").Strings();
  return s;
}

struct Covered {
  std::string feature, module, test, proxy, verdict;
  int64_t layer = 0;
};

std::set<std::string> AllFeatures(const Stack& s) {
  std::set<std::string> out = FeaturesOf(s.layers);
  for (const std::string& f : s.extra) out.insert("feature:" + f);
  return out;
}

const char* RowOf(const std::string& feature) {
  return feature.starts_with("type:")    ? "C2-01"
         : feature.starts_with("pair:")  ? "C2-02"
         : feature.starts_with("share:") ? "C2-02"
         : feature.starts_with("state:") ? "C2-03"
                                         : "C2-07";
}

void CheckGeometry(Judging* j, const char* row, std::string_view reason, const char* what,
                   const std::map<std::string, std::string>& full,
                   const std::map<std::string, std::string>& proxy,
                   const std::map<std::string, std::string>& exceptions) {
  std::set<std::string> names;
  for (const auto& [name, value] : full) names.insert(name);
  for (const auto& [name, value] : proxy) names.insert(name);
  for (const std::string& name : names) {
    const auto a = full.find(name), b = proxy.find(name);
    const std::string left = a == full.end() ? "absent" : a->second;
    const std::string right = b == proxy.end() ? "absent" : b->second;
    const auto excused = exceptions.find(name);
    if (left != right && excused != exceptions.end()) {
      j->NotCovered(row,
                    fmt::format("{} {} of the full model: the proxy has {}; {}", name, left, right,
                                excused->second),
                    "measure at the full value before going full");
      continue;
    }
    j->Require(
        row, left == right, reason,
        fmt::format("{} {}: {} in the full model, {} in the proxy", what, name, left, right));
  }
}

}  // namespace

std::set<std::string> FeaturesOf(const std::vector<LayerShape>& layers) {
  std::set<std::string> out;
  const std::vector<std::string> embedding = {"embedding"}, head = {"head"};
  for (size_t l = 0; l < layers.size(); ++l) {
    for (const std::string& t : layers[l].types) out.insert("type:" + t);
    for (const std::string& s : layers[l].states) out.insert("state:" + s);
    for (const std::string& s : layers[l].shares) out.insert("share:" + s);
    for (const std::string& a : l == 0 ? embedding : layers[l - 1].types) {
      for (const std::string& b : layers[l].types) out.insert(fmt::format("pair:{}>{}", a, b));
    }
  }
  if (!layers.empty()) {
    for (const std::string& a : layers.back().types) out.insert("pair:" + a + ">head");
  }
  return out;
}

std::vector<size_t> ChooseLayers(const std::vector<LayerShape>& layers, size_t min_layers) {
  const std::set<std::string> all = FeaturesOf(layers);
  const auto keeps = [&](const std::vector<size_t>& chosen) {
    std::vector<LayerShape> picked;
    picked.reserve(chosen.size());
    for (const size_t i : chosen) picked.push_back(layers[i]);
    const std::set<std::string> got = FeaturesOf(picked);
    return std::includes(got.begin(), got.end(), all.begin(), all.end());
  };
  std::vector<size_t> everything(layers.size());
  for (size_t i = 0; i < layers.size(); ++i) everything[i] = i;
  min_layers = std::min(std::max<size_t>(min_layers, 1), layers.size());
  if (layers.size() <= 12) {  // all subsets, by size and then by the first
    std::vector<size_t> best = everything;
    for (uint32_t bits = 1; bits < (1u << layers.size()); ++bits) {
      std::vector<size_t> chosen;
      for (size_t i = 0; i < layers.size(); ++i) {
        if ((bits >> i & 1u) != 0) chosen.push_back(i);
      }
      if (chosen.size() < min_layers || chosen.size() > best.size()) continue;
      if (chosen.size() == best.size() && chosen >= best) continue;
      if (keeps(chosen)) best = chosen;
    }
    return best;
  }
  // Drop stretches, the longest first, as long as everything is still kept.
  std::vector<size_t> chosen = everything;
  for (size_t length = chosen.size() - min_layers; length > 0; --length) {
    for (size_t at = 0; at + length <= chosen.size() && chosen.size() - length >= min_layers;) {
      std::vector<size_t> next(chosen.begin(), chosen.begin() + static_cast<std::ptrdiff_t>(at));
      next.insert(next.end(), chosen.begin() + static_cast<std::ptrdiff_t>(at + length),
                  chosen.end());
      if (keeps(next)) {
        chosen = std::move(next);
      } else {
        ++at;
      }
    }
    length = std::min(length, chosen.size());
  }
  return chosen;
}

GateJudgement JudgeC2(const Json& evidence) {
  Judging j("C2", evidence);
  const Field root = j.root();
  const Subject subject = ReadSubject(root);
  const Field full_field = root.At("full"), proxy_field = root.At("proxy");
  full_field.At("name").Str();
  full_field.At("structure_sha256").Hash();
  const Stack full = ReadStack(full_field);
  const Stack proxy = ReadStack(proxy_field);
  const std::string proxy_sha256 = proxy_field.At("weights_sha256").Hash();
  const std::vector<int64_t> source = proxy_field.At("source_layers").Ints(0, 1 << 20, 1);
  const bool real = proxy_field.At("weights_from_checkpoint").Bool();
  const auto exceptions = ReadTexts(proxy_field.At("exceptions"), 0);
  const std::string topology = proxy_field.At("topology").Str();
  const std::string dtype = proxy_field.At("dtype").Str();
  std::vector<Covered> coverage;
  for (const Field& c : root.At("coverage").Items()) {
    coverage.push_back({c.At("feature").Str(), c.At("module").Str(), c.At("test").Str(),
                        c.At("proxy_sha256").Text(),
                        c.At("verdict").OneOf({"pass", "fail", "never-ran"}),
                        c.At("layer").Int(0, 1 << 20)});
  }
  const std::set<std::string> tests = root.At("tests").StringSet();
  const std::set<std::string> uncovered = root.At("uncovered").StringSet();
  std::map<std::string, int64_t> boundaries;
  for (const auto& [state, count] : root.At("state_boundaries_crossed").Members()) {
    boundaries[state] = count.Int(0, INT64_MAX);
  }
  const Field daily = root.At("daily");
  daily.At("command").Str();
  const double seconds = daily.At("seconds").Real(0, 1e9);
  const double limit = daily.At("limit_seconds").Real(0, 1e9);
  const std::string smoke = daily.At("verdict").OneOf({"pass", "fail", "never-ran"});
  const bool needs_full = daily.At("needs_full_weights").Bool();
  if (!j.WellFormed()) return j.Finish();

  const std::set<std::string> want = AllFeatures(full), have = AllFeatures(proxy);
  for (const std::string& feature : want) {
    const bool kept = have.contains(feature);
    const bool listed = uncovered.contains(feature);
    const char* row = RowOf(feature);
    if (!kept && row != std::string("C2-07")) {
      j.Require(row, false, reason::kFeatureUncovered,
                fmt::format("{} is in the full model and not in the proxy", feature));
    } else if (kept) {
      j.Pass(row, {});
    }
    j.Require("C2-07", kept || listed, reason::kGapUnlisted,
              fmt::format("{} is missing and not under `uncovered`", feature));
    if (!kept && listed) {
      j.NotCovered("C2-07", feature, "test it on the full model, or add a layer that has it");
    }
  }
  for (const std::string& feature : uncovered) {
    j.Require("C2-07", want.contains(feature) && !have.contains(feature),
              reason::kAnswerContradicted,
              fmt::format("`uncovered` lists {}, which the proxy {}", feature,
                          have.contains(feature) ? "has" : "need not have"));
  }
  CheckGeometry(&j, "C2-04", reason::kGeometryDiffers, "width", full.geometry, proxy.geometry,
                exceptions);
  CheckGeometry(&j, "C2-05", reason::kShardDiffers, "shard", full.shards, proxy.shards, {});
  j.Require("C2-04", real, reason::kGeometryDiffers,
            "the proxy's weights are not those of the real checkpoint",
            "cut the proxy from the checkpoint");
  bool mapped = source.size() == proxy.layers.size();
  for (size_t i = 0; mapped && i < source.size(); ++i) {
    mapped = static_cast<size_t>(source[i]) < full.layers.size() &&
             (i == 0 || source[i] > source[i - 1]);
    if (!mapped) break;
    const LayerShape& a = full.layers[static_cast<size_t>(source[i])];
    mapped = a.types == proxy.layers[i].types && a.states == proxy.layers[i].states;
  }
  j.Require("C2-01", mapped, reason::kAnswerContradicted,
            "`source_layers` does not lead from the full model's layers to the proxy's");

  // The table: every feature that the proxy has needs a row with a test that ran on this proxy.
  for (const std::string& feature : want) {
    if (!have.contains(feature)) continue;
    const bool found = std::any_of(coverage.begin(), coverage.end(),
                                   [&](const Covered& c) { return c.feature == feature; });
    j.Require("C2-06", found, reason::kTestDangling,
              fmt::format("{} has no row in the coverage table", feature));
  }
  for (const Covered& c : coverage) {
    j.Require("C2-06", have.contains(c.feature), reason::kTestDangling,
              fmt::format("the table covers {}, which the proxy does not have", c.feature));
    j.Require("C2-06", static_cast<size_t>(c.layer) < proxy.layers.size(), reason::kTestDangling,
              fmt::format("{}: the proxy has no layer {}", c.feature, c.layer));
    j.Require("C2-06", tests.contains(c.test), reason::kTestDangling,
              fmt::format("{}: no test is called {}", c.feature, c.test));
    j.Require("C2-06", c.verdict != "never-ran" && c.proxy == proxy_sha256, reason::kTestDangling,
              fmt::format("{}: {} {}", c.feature, c.test,
                          c.verdict == "never-ran" ? "never ran" : "ran on another proxy"));
    if (c.verdict == "fail") {
      j.Find(Verdict::kFail, "C2-06", reason::kTestDangling,
             fmt::format("{}: {} failed on this proxy", c.feature, c.test));
    }
  }
  for (const std::string& feature : have) {
    if (!feature.starts_with("state:")) continue;
    const auto at = boundaries.find(feature.substr(6));
    j.Require("C2-03", at != boundaries.end() && at->second > 0, reason::kConditionUnmet,
              fmt::format("{} was never carried over a chunk boundary", feature),
              "run a prompt longer than one chunk on the proxy");
  }
  j.Require("C2-08", smoke == "pass" && seconds <= limit && !needs_full, reason::kConditionUnmet,
            fmt::format("the daily command {}, took {} s of {} s{}",
                        smoke == "never-ran" ? "never ran" : smoke, seconds, limit,
                        needs_full ? ", and needs the full weights" : ""),
            "make one command build, load and run the proxy in the stated time");
  if (proxy.layers.size() < 3 || proxy.layers.size() > 8) {
    j.Note(fmt::format("the proxy has {} layers; about four is usual, coverage decides",
                       proxy.layers.size()));
  }
  j.Cover({.shape = {fmt::format("{} of {} layers", proxy.layers.size(), full.layers.size())},
           .topology = {topology},
           .dtype = {dtype},
           .model = {proxy_sha256},
           .path = {"proxy"},
           .contracts = {subject.contracts}});
  return j.Finish();
}

}  // namespace tare::workflow
