// Gate C4: structural performance. Not how fast, but what is built wrong: launches that grow with
// tokens inside one step, chains of tiny kernels, the host in the way, work done twice, workspaces
// above their formula, graphs that were never shown to replay. A repair counts only with the
// consistency checks run again on the repaired binary.

#include <fmt/format.h>

#include <algorithm>

#include "workflow/gates/judge.h"

namespace tare::workflow {
namespace {

struct Site {
  std::string site, op;
  int64_t count = 0;
};

struct Workspace {
  std::string op;
  int64_t peak = 0, formula = 0, budget = 0;
};

struct Profile {
  std::string id, phase, device, raw_sha256, weights, time;
  int64_t tokens = 0, chunks = 0, layers = 0, hidden = 0;
  std::vector<Site> launches;
  std::vector<std::pair<std::string, double>> gaps;       // where, microseconds
  std::vector<std::string> syncs;                         // where
  std::vector<std::pair<std::string, int64_t>> repeated;  // "quantise k_proj", times in one step
  int64_t steady_allocations = 0;
  std::vector<Workspace> workspaces;
  bool host_measured = false;
};

Profile ReadProfile(const Field& f) {
  Profile p;
  p.id = f.At("id").Str();
  p.phase = f.At("phase").OneOf({"prefill", "decode", "train-forward", "train-step", "mixed"});
  p.device = f.At("device").Str();
  p.time = f.At("time").Time();
  p.raw_sha256 = f.At("raw_sha256").Text();
  p.weights = f.At("weights_sha256").Hash();
  p.tokens = f.At("tokens").Int(1, INT64_MAX);
  p.chunks = f.At("chunks").Int(1, INT64_MAX);
  p.layers = f.At("layers").Int(1, 1 << 20);
  p.hidden = f.At("hidden").Int(1, 1 << 30);
  for (const Field& s : f.At("launches").Items(1)) {
    p.launches.push_back({s.At("site").Str(), s.At("op").Str(), s.At("count").Int(1, INT64_MAX)});
  }
  p.host_measured = f.At("host_measured").Bool();
  for (const Field& g : f.At("host_gaps").Items()) {
    p.gaps.emplace_back(g.At("where").Str(), g.At("us").Real(0, 1e12));
  }
  p.syncs = f.At("synchronisations").Strings();
  for (const Field& r : f.At("repeated").Items()) {
    const std::string what =
        fmt::format("{} of {}", r.At("kind").OneOf({"quantise", "copy"}), r.At("tensor").Str());
    p.repeated.emplace_back(what, r.At("times").Int(1, INT64_MAX));
  }
  p.steady_allocations = f.At("steady_allocations").Int(0, INT64_MAX);
  for (const Field& w : f.At("workspaces").Items()) {
    p.workspaces.push_back({w.At("op").Str(), w.At("peak_bytes").Int(0, INT64_MAX),
                            w.At("formula_bytes").Int(0, INT64_MAX),
                            w.At("budget_bytes").Int(0, INT64_MAX)});
  }
  return p;
}

struct Limits {
  double gap_us = 0;
  int64_t launches_per_layer = 0;
  std::string fixed;
};

struct Graph {
  std::string used, reason, eager_bits, replay_bits;
  bool captured = false, inputs_changed = false, fallback = false, stale_pointers = false;
  int64_t replays = 0;
};

struct Retest {
  std::string gate, binary, verdict;
};

struct Defect {
  std::string id, evidence, owner, state, fixed_binary;
  std::vector<Retest> retests;
};

void JudgeProfile(Judging* j, const Profile& p, const Limits& limits, int64_t hidden,
                  const Subject& subject) {
  j->Require("C4-01", p.phase != "mixed", reason::kProfileUnreal,
             fmt::format("{}: prefill and decode in one profile", p.id));
  j->Require("C4-01", p.hidden == hidden && p.weights == subject.weights, reason::kProfileUnreal,
             fmt::format("{}: hidden size {} (the model's is {}), weights {}", p.id, p.hidden,
                         hidden, p.weights.substr(0, 12)));
  j->Require("C4-10", p.raw_sha256.size() == 64, reason::kProfileMissing,
             fmt::format("{}: the raw profile was not kept", p.id));
  j->Require("C4-04", p.time >= limits.fixed, reason::kCriterionLate,
             fmt::format("{} is of {}, the limits of {}", p.id, p.time, limits.fixed));
  if (p.host_measured) {
    for (const auto& [where, us] : p.gaps) {
      j->Require("C4-04", us <= limits.gap_us, reason::kHostGap,
                 fmt::format("{}: a gap of {} us at {}", p.id, us, where));
    }
    for (const std::string& where : p.syncs) {
      j->Require("C4-04", false, reason::kHostGap,
                 fmt::format("{}: the device is waited for at {}", p.id, where));
    }
  } else {
    j->NotCovered("C4-04", fmt::format("{}: host gaps and synchronisation on {}", p.id, p.device),
                  "profile on a device with a timeline");
  }
  for (const auto& [what, times] : p.repeated) {
    j->Require("C4-05", times <= 1, reason::kRepeatedWork,
               fmt::format("{}: {} {} times in one step", p.id, what, times));
  }
  j->Require("C4-05", p.steady_allocations == 0, reason::kRepeatedWork,
             fmt::format("{}: {} allocations in steady state", p.id, p.steady_allocations));
  for (const Workspace& w : p.workspaces) {
    j->Require("C4-06", w.peak <= w.formula && w.peak <= w.budget, reason::kWorkspaceAbnormal,
               fmt::format("{}: {} peaks at {} bytes; its formula gives {}, its budget {}", p.id,
                           w.op, w.peak, w.formula, w.budget));
  }
  int64_t total = 0;
  for (const Site& s : p.launches) total += s.count;
  // A chunk is a pass over the layers, so its launches are counted apart.
  const int64_t per_layer = total / (p.layers * p.chunks);
  j->Require("C4-08", per_layer <= limits.launches_per_layer, reason::kTinyKernels,
             fmt::format("{}: {} launches per layer, the limit is {}", p.id, per_layer,
                         limits.launches_per_layer));
}

// Within one phase: the same site at N, 2N and 4N tokens, per chunk.
void JudgeGrowth(Judging* j, const std::string& phase, std::vector<const Profile*> points) {
  std::sort(points.begin(), points.end(), [](const Profile* a, const Profile* b) {
    return a->tokens * b->chunks < b->tokens * a->chunks;  // tokens of one chunk
  });
  bool ladder = false;
  for (const Profile* a : points) {
    for (const Profile* b : points) {
      for (const Profile* c : points) {
        ladder |= b->tokens == 2 * a->tokens && c->tokens == 4 * a->tokens;
      }
    }
  }
  if (!j->Require("C4-03", ladder, reason::kProfileMissing,
                  fmt::format("{}: no profiles at N, 2N and 4N tokens", phase))) {
    return;
  }
  std::set<std::string> sites;
  for (const Profile* p : points) {
    for (const Site& s : p->launches) sites.insert(s.site);
  }
  for (const std::string& site : sites) {
    const auto per_chunk = [&](const Profile* p) {
      int64_t count = 0;
      for (const Site& s : p->launches) count += s.site == site ? s.count : 0;
      return static_cast<double>(count) / static_cast<double>(p->chunks);
    };
    const double first = per_chunk(points.front()), last = per_chunk(points.back());
    // A quarter of proportional growth is growth: a loop over pairs or groups of tokens too.
    const double tokens =
        static_cast<double>(points.back()->tokens) / static_cast<double>(points.front()->tokens);
    const bool grows = last > first && last - first >= 0.25 * (tokens - 1) * std::max(first, 1.0);
    const std::string_view row = phase == "prefill" ? "C4-08" : "C4-03";
    j->Require(row, !grows, reason::kPerTokenLoop,
               fmt::format("{}: {} launches {} times a chunk at {} tokens and {} at {}", phase,
                           site, first, points.front()->tokens, last, points.back()->tokens));
  }
}

void JudgeGraph(Judging* j, const Graph& g) {
  if (g.used == "no") {
    j->Require("C4-07", !g.reason.empty(), reason::kGraphUnproven,
               "no graph is used and no reason is given");
    j->NotCovered("C4-07", "capture and replay: " + g.reason, "profile the graph path on a device");
    return;
  }
  j->Require("C4-07", g.captured && g.replays > 0 && !g.fallback, reason::kGraphUnproven,
             fmt::format("captured {}, replays {}, fell back to eager {}", g.captured, g.replays,
                         g.fallback));
  j->Require("C4-07", g.inputs_changed, reason::kGraphUnproven,
             "it was replayed on the captured inputs only, which stale pointers survive");
  j->Require("C4-07", !g.stale_pointers, reason::kGraphUnproven, "a pointer of the graph is stale");
  j->Require("C4-07", g.eager_bits == g.replay_bits, reason::kGraphUnproven,
             "the replay has other bits than eager on the same inputs");
}

}  // namespace

GateJudgement JudgeC4(const Json& evidence) {
  Judging j("C4", evidence);
  const Field root = j.root();
  const Subject subject = ReadSubject(root);
  const int64_t hidden = root.At("model").At("hidden").Int(1, 1 << 30);
  const std::string dtype = root.At("model").At("dtype").Str();
  const std::string topology = root.At("model").At("topology").Str();
  const bool wired = root.At("training_wired").Bool();
  const Field limit_field = root.At("limits");
  const Limits limits{limit_field.At("host_gap_us").Real(0, 1e12),
                      limit_field.At("launches_per_layer").Int(1, 1 << 20),
                      limit_field.At("fixed").Time()};
  std::vector<Profile> profiles;
  for (const Field& p : root.At("profiles").Items(1)) profiles.push_back(ReadProfile(p));
  const Field g = root.At("graph");
  const Graph graph{g.At("used").OneOf({"yes", "no"}), g.At("reason").Text(),
                    g.At("eager_sha256").Text(),       g.At("replay_sha256").Text(),
                    g.At("captured").Bool(),           g.At("inputs_changed").Bool(),
                    g.At("fallback").Bool(),           g.At("stale_pointers").Bool(),
                    g.At("replays").Int(0, INT64_MAX)};
  const std::string binary = root.At("binary_sha256").Hash();
  std::vector<Defect> defects;
  for (const Field& d : root.At("defects").Items()) {
    Defect x{d.At("id").Str(),
             d.At("evidence").Text(),
             d.At("owner").Text(),
             d.At("state").OneOf({"open", "closed"}),
             d.At("fixed_binary_sha256").Text(),
             {}};
    for (const Field& r : d.At("retests").Items()) {
      x.retests.push_back(
          {r.At("gate").OneOf({"C3", "C5"}), r.At("binary_sha256").Hash(), r.At("verdict").Str()});
    }
    defects.push_back(std::move(x));
  }
  if (!j.WellFormed()) return j.Finish();

  std::map<std::string, std::vector<const Profile*>> by_phase;
  for (const Profile& p : profiles) {
    JudgeProfile(&j, p, limits, hidden, subject);
    by_phase[p.phase].push_back(&p);
  }
  for (const char* phase : {"prefill", "decode"}) {
    j.Require("C4-01", by_phase.contains(phase), reason::kProfileMissing,
              fmt::format("no profile of {}", phase));
  }
  for (const char* phase : {"train-forward", "train-step"}) {
    if (wired) {
      j.Require("C4-02", by_phase.contains(phase), reason::kProfileMissing,
                fmt::format("training is wired and there is no profile of {}", phase));
    } else if (!by_phase.contains(phase)) {
      j.NotCovered("C4-02", phase, "profile it once C6 has wired the backward");
    }
  }
  // Decode steps grow with their sequences by design: what counts is one step (C4-08).
  for (const auto& [phase, points] : by_phase) JudgeGrowth(&j, phase, points);
  JudgeGraph(&j, graph);
  for (const Defect& d : defects) {
    j.Require("C4-10", !d.evidence.empty() && !d.owner.empty(), reason::kMaterialMissing,
              fmt::format("defect {} lacks evidence or owner", d.id));
    if (d.state == "open") {
      j.Find(Verdict::kFail, "C4-10", reason::kRetestMissing,
             fmt::format("defect {} is open", d.id),
             "repair it, then run C3 and C5 on the repaired binary");
      continue;
    }
    for (const char* gate : {"C3", "C5"}) {
      if (gate == std::string("C5") && !wired) continue;
      const bool tested = std::any_of(d.retests.begin(), d.retests.end(), [&](const Retest& r) {
        return r.gate == gate && r.verdict == "pass" && r.binary == d.fixed_binary;
      });
      j.Require("C4-09", tested && !d.fixed_binary.empty(), reason::kRetestMissing,
                fmt::format("defect {} was closed without {} on binary {}", d.id, gate,
                            d.fixed_binary.empty() ? "unknown" : d.fixed_binary.substr(0, 12)));
    }
  }
  if (defects.empty()) j.Pass("C4-10", "no defect is listed");

  // Not every token count ran in every phase: a box per profile says what was run.
  for (const Profile& p : profiles) {
    j.Cover({.shape = {fmt::format("tokens={}", p.tokens)},
             .topology = {topology},
             .dtype = {dtype},
             .model = {subject.weights},
             .path = {p.phase},
             .contracts = {subject.contracts}});
  }
  j.Note(fmt::format("binary {}", binary));
  return j.Finish();
}

}  // namespace tare::workflow
