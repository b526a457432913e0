#include "workflow/gates/loop_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>

namespace tare::workflow {
namespace {

constexpr int64_t kMax = int64_t{1} << 40;

LoopVersion ReadVersion(const Field& item) {
  LoopVersion v;
  v.version = item.At("version").Int(0, kMax);
  v.rollout_pid = item.At("rollout_pid").Int(1, kMax);
  v.engine_version = item.At("engine_version").Int(0, kMax);
  v.trainer_deployed = item.At("trainer_deployed").Hash();
  v.trainer_master = item.At("trainer_master").Hash();
  v.engine_held = item.At("engine_held").Hash();
  v.sampled_versions = item.At("sampled_versions").Ints(0, kMax, 1);
  for (const Field& q : item.At("questions").Items()) {
    LoopQuestion question;
    question.name = q.At("question").Str();
    for (const Field& r : q.At("rewards").Items(1)) question.rewards.push_back(r.Real(-1e9, 1e9));
    for (const Field& a : q.At("advantages").Items(1)) question.advantages.push_back(a.Bits32());
    v.questions.push_back(std::move(question));
  }
  for (const auto& [name, path] : item.At("paths").Members()) {
    v.paths[name] = ReadLogprobPath(path, name);
    v.sources[name] = path.At("source").OneOf({"forward", "copied"});
    v.recorded[name] = path.At("recorded").Bool();
    v.labels[name] = path.At("version").Int(0, kMax);
  }
  return v;
}

LoopParameter ReadParameter(const Field& p) {
  LoopParameter out;
  out.elements = p.At("elements").Int(1, kMax);
  out.nonzero = p.At("gradient_nonzero").Int(0, kMax);
  out.non_finite = p.At("gradient_non_finite").Int(0, kMax);
  out.master_changed = p.At("master_changed").Int(0, kMax);
  out.deployed_changed = p.At("deployed_changed").Int(0, kMax);
  return out;
}

LoopUpdate ReadUpdate(const Field& item, bool moments) {
  LoopUpdate u;
  u.from = item.At("from").Int(0, kMax);
  u.to = item.At("to").Int(0, kMax);
  u.trainer_pid = item.At("trainer_pid").Int(1, kMax);
  u.ratio_not_one = item.At("ratio_not_one").Int(0, kMax);
  u.kl = item.At("kl_coefficient").Real(0, 1e9);
  u.entropy = item.At("entropy_coefficient").Real(0, 1e9);
  u.lr = item.At("lr").Bits32();
  u.skipped = item.At("skipped").Bool();
  u.cache_reset = item.At("cache_reset").Bool();
  u.master_before = item.At("master_before").Hash();
  u.master_after = item.At("master_after").Hash();
  u.deployed_before = item.At("deployed_before").Hash();
  u.deployed_after = item.At("deployed_after").Hash();
  if (moments) {
    u.moments_before = item.At("moments_before").Hash();
    u.moments_after = item.At("moments_after").Hash();
  }
  const Field published = item.At("published");
  u.published_version = published.At("version").Int(0, kMax);
  u.published = published.At("sent").Hash();
  u.held = published.At("held").Hash();
  for (const Field& p : item.At("parameters").Items(1)) {
    LoopParameter parameter = ReadParameter(p);
    parameter.name = p.At("name").Str();
    u.parameters.push_back(std::move(parameter));
  }
  u.totals = ReadParameter(item.At("totals"));
  return u;
}

}  // namespace

Loop ReadLoop(const Field& field) {
  Loop l;
  l.entry = field.At("entry").Str();
  l.mode = field.At("mode").OneOf({"live", "offline-replay", "cold-start", "separate-images"});
  l.recipe = ReadRecipe(field.At("recipe"));
  const Field prior = field.At("prior_receipt");
  if (!prior.IsNull()) l.prior_receipt = prior.Hash();
  l.moments_recorded = field.At("moments_recorded").Bool();
  for (const Field& item : field.At("processes").Items()) {
    LoopProcess p;
    p.name = item.At("name").Str();
    p.pid = item.At("pid").Int(1, kMax);
    p.ended = item.At("ended").Bool();
    p.code = item.At("code").Int(-1, 255);
    p.signal = item.At("signal").Int(0, 64);
    p.flushed = item.At("flushed").Bool();
    l.processes.push_back(std::move(p));
  }
  l.rollout = ReadIdentity(field.At("identities").At("rollout"), "rollout");
  l.trainer = ReadIdentity(field.At("identities").At("trainer"), "trainer");
  for (const Field& item : field.At("events").Items()) {
    l.events.push_back({item.At("event").Str(), item.At("version").Int(0, kMax)});
  }
  for (const Field& item : field.At("versions").Items()) l.versions.push_back(ReadVersion(item));
  for (const Field& item : field.At("updates").Items()) {
    l.updates.push_back(ReadUpdate(item, l.moments_recorded));
  }
  return l;
}

namespace {

class LoopJudge {
 public:
  LoopJudge(Judging* judging, const Subject& subject, const Loop& loop)
      : j_(*judging), subject_(subject), l_(loop) {}

  void Run() {
    Frame();
    Sequence();
    for (const LoopVersion& v : l_.versions) Version(v);
    for (size_t i = 0; i < l_.updates.size(); ++i) Update(i);
    if (!l_.moments_recorded)
      j_.NotCovered("BWD-06", "the optimizer's moments were not recorded per update",
                    "C7 compares them over one step");
  }

 private:
  std::string Value(const std::string& key) const {
    const auto it = l_.recipe.find(key);
    return it == l_.recipe.end() ? "" : it->second;
  }

  // C8-02, C8-05, RL-01 to RL-05, RL-09: what ran.
  void Frame() {
    static const std::set<std::string> kEntries = {"tare rl run", "verl.trainer.main_ppo"};
    j_.Require("C8-02", kEntries.contains(l_.entry), reason::kHelperEntry,
               fmt::format("{} is no framework entry ({})", l_.entry, fmt::join(kEntries, ", ")));
    j_.Require("RL-09", l_.mode == "live", reason::kOfflineReplay,
               fmt::format("the weights came to the rollout by {}", l_.mode));
    std::set<std::string> names;
    for (const LoopProcess& p : l_.processes) {
      names.insert(p.name);
      j_.Require("C8-05", p.ended && p.code == 0 && p.signal == 0 && p.flushed,
                 reason::kProcessExit,
                 fmt::format("{}: {}, exit {}, signal {}, {}", p.name,
                             p.ended ? "ended by itself" : "was killed", p.code, p.signal,
                             p.flushed ? "files flushed" : "files not flushed"));
    }
    j_.Require("C8-05",
               names == std::set<std::string>{"rollout", "trainer"} && l_.processes.size() == 2,
               reason::kProcessExit, "one rollout and one trainer process are wanted");
    CheckIdentities(&j_, "C5-09", subject_, l_.rollout, l_.trainer);
    const std::string caching = l_.rollout.prefix_caching ? "true" : "false";
    j_.Require("SYS-30",
               Value("prefix_caching") == caching &&
                   l_.rollout.prefix_caching == l_.trainer.prefix_caching,
               reason::kConfigDiffers,
               fmt::format("prefix caching: the recipe says {}, the engine ran {}",
                           Value("prefix_caching"), caching));
    j_.Require(
        "C5-09", Value("profile") == l_.rollout.profile, reason::kConfigDiffers,
        fmt::format("profile: the recipe says {}, {} ran", Value("profile"), l_.rollout.profile));
  }

  // C8-01, C8-10, RL-05.
  void Sequence() {
    const int64_t steps = static_cast<int64_t>(l_.updates.size());
    j_.Require("RL-05", steps >= 2, reason::kLoopIncomplete,
               fmt::format("{} updates; at least two are wanted", steps));
    j_.Require("C8-01", Value("steps") == std::to_string(steps), reason::kLoopIncomplete,
               fmt::format("{} updates; the recipe says {}", steps, Value("steps")));
    j_.Require("C8-10", (steps > 2) == !l_.prior_receipt.empty(), reason::kOrderOfWork,
               steps > 2 ? "more than two steps without a two-step receipt before"
                         : "a two-step loop names a receipt before it");
    std::vector<LoopEvent> want;
    for (int64_t v = 0; v <= steps; ++v) {
      want.push_back({"rollout", v});
      want.push_back({"compare", v});
      if (v == steps) break;
      want.push_back({"update", v});
      want.push_back({"publish", v + 1});
    }
    want.push_back({"end", steps});
    for (size_t i = 0; i < std::max(want.size(), l_.events.size()); ++i) {
      const bool both = i < want.size() && i < l_.events.size();
      if (!j_.Require("C8-01",
                      both && want[i].event == l_.events[i].event &&
                          want[i].version == l_.events[i].version,
                      reason::kLoopIncomplete,
                      fmt::format("event {}: {} theta{}; {} theta{} belongs there", i,
                                  i < l_.events.size() ? l_.events[i].event : "nothing",
                                  i < l_.events.size() ? l_.events[i].version : 0,
                                  i < want.size() ? want[i].event : "nothing",
                                  i < want.size() ? want[i].version : 0))) {
        break;
      }
    }
    j_.Require("C8-01", static_cast<int64_t>(l_.versions.size()) == steps + 1,
               reason::kLoopIncomplete,
               fmt::format("{} versions were compared; {} updates want {}", l_.versions.size(),
                           steps, steps + 1));
    for (size_t i = 0; i < l_.versions.size(); ++i) {
      j_.Require("C8-06", l_.versions[i].version == static_cast<int64_t>(i),
                 reason::kVersionContradiction,
                 fmt::format("version {} stands at place {}", l_.versions[i].version, i));
    }
    if (!l_.versions.empty()) {
      j_.Require("C5-11", l_.versions[0].trainer_deployed == subject_.weights,
                 reason::kWeightHashMismatch, "theta0 is not the subject's weights");
    }
  }

  void Version(const LoopVersion& v) {
    const std::string where = fmt::format("theta{}", v.version);
    // C8-06, RL-08: weights before values.
    j_.Require("C8-06", v.engine_version == v.version, reason::kVersionContradiction,
               fmt::format("{}: the engine says it holds version {}", where, v.engine_version));
    j_.Require("C8-06", v.sampled_versions == std::vector<int64_t>{v.version},
               reason::kVersionContradiction,
               fmt::format("{}: tokens were sampled with versions {}", where,
                           fmt::join(v.sampled_versions, ", ")));
    j_.Require("RL-08", v.engine_held == v.trainer_deployed, reason::kWeightHashMismatch,
               fmt::format("{}: the engine holds {}, the trainer {}", where,
                           v.engine_held.substr(0, 12), v.trainer_deployed.substr(0, 12)));
    for (const LoopProcess& p : l_.processes) {
      if (p.name != "rollout") continue;
      j_.Require(
          "RL-09", p.pid == v.rollout_pid, reason::kOfflineReplay,
          fmt::format("{}: sampled by process {}, the rollout is {}", where, v.rollout_pid, p.pid));
    }
    const LogprobPath* paths[3] = {};
    const char* names[3] = {"rollout", "old_logprob", "actor"};
    for (int i = 0; i < 3; ++i) {
      const auto it = v.paths.find(names[i]);
      if (!j_.Require(i == 0   ? "RL-06"
                      : i == 1 ? "C5-05"
                               : "C5-06",
                      it != v.paths.end(), reason::kPathMissing,
                      fmt::format("{}: no {}", where, names[i]))) {
        continue;
      }
      paths[i] = &it->second;
      const std::string at = fmt::format("{} {}", where, names[i]);
      j_.Require("C8-07", v.sources.at(names[i]) == "forward", reason::kPathUnexecuted,
                 at + ": its values were copied, not computed");
      j_.Require("C5-06", v.recorded.at(names[i]) == (i == 2), reason::kPathUnexecuted,
                 at + ": gradients were " + (v.recorded.at(names[i]) ? "" : "not ") + "recorded");
      j_.Require("C8-06", v.labels.at(names[i]) == v.version, reason::kVersionContradiction,
                 fmt::format("{}: labelled theta{}", at, v.labels.at(names[i])));
      CheckOriginal(&j_, "C5-07", at, it->second);
    }
    j_.Require("RL-06", v.paths.size() == 3, reason::kPathMissing,
               fmt::format("{}: {} paths; rollout, old_logprob and actor", where, v.paths.size()));
    for (const auto& [a, b] : {std::pair(0, 1), std::pair(0, 2), std::pair(1, 2)}) {
      if (paths[a] == nullptr || paths[b] == nullptr) continue;
      const std::string text = fmt::format("{} {} against {}", where, names[a], names[b]);
      const LogprobCounts c = CompareLogprobs(&j_, "RL-06", "C5-08", text, *paths[a], *paths[b]);
      if (c.compared == 0) continue;
      j_.Pass("RL-06",
              fmt::format("{}: {} valid tokens, {} differ", text, c.compared, c.mismatches));
      if (a != 0) continue;
      ScopeBox box;
      box.shape = {fmt::format("sequences={},tokens={}", paths[a]->lines.size(), c.compared)};
      box.topology = {l_.trainer.topology};
      box.dtype = {paths[a]->dtype};
      box.model = {v.trainer_deployed};
      box.path = {names[b]};
      box.contracts = {subject_.contracts};
      j_.Cover(std::move(box));
    }
    if (paths[0] != nullptr) Questions(where, v, *paths[0]);
  }

  // SYS-36, H16: rewards, advantages and samples belong together.
  void Questions(const std::string& where, const LoopVersion& v, const LogprobPath& rollout) {
    std::map<std::string, std::vector<const LogprobLine*>> samples;
    for (const LogprobLine& line : rollout.lines) {
      samples[line.sequence.substr(0, line.sequence.rfind('/'))].push_back(&line);
    }
    size_t cloned = 0;
    for (const auto& [name, lines] : samples) {
      std::set<std::vector<int64_t>> unique;
      for (const LogprobLine* line : lines) unique.insert(line->tokens);
      cloned += lines.size() > 1 && unique.size() == 1;
    }
    j_.Require("FIND-18", samples.empty() || cloned < samples.size(), reason::kIdenticalSamples,
               where + ": all samples of every question are identical");
    std::vector<std::string> names;
    for (const LoopQuestion& q : v.questions) {
      names.push_back(q.name);
      const std::string at = fmt::format("{} {}", where, q.name);
      const auto it = samples.find(q.name);
      const size_t n = q.rewards.size();
      if (!j_.Require(
              "SYS-36", it != samples.end() && it->second.size() == n && q.advantages.size() == n,
              reason::kReceiptContradicted,
              fmt::format("{}: {} rewards, {} advantages, {} samples", at, n, q.advantages.size(),
                          it == samples.end() ? 0 : it->second.size()))) {
        continue;
      }
      j_.Require("SYS-36", AdvantagesFollow(q), reason::kReceiptContradicted,
                 at + ": the advantages do not follow from the rewards");
    }
    // The last version is compared and not trained on: its rewards are optional.
    const bool last = v.version == static_cast<int64_t>(l_.updates.size());
    j_.Require("SYS-36",
               AllDifferent(names) && (names.size() == samples.size() || (last && names.empty())),
               reason::kReceiptContradicted,
               fmt::format("{}: rewards of {} questions, samples of {}", where, names.size(),
                           samples.size()));
  }

  // (r - mean) / deviation, the deviation over n or n - 1, within 1 %.
  static bool AdvantagesFollow(const LoopQuestion& q) {
    const double n = static_cast<double>(q.rewards.size());
    double mean = 0, square = 0;
    for (const double r : q.rewards) mean += r / n;
    for (const double r : q.rewards) square += (r - mean) * (r - mean);
    for (const double divisor : {n, n - 1}) {
      if (divisor <= 0) continue;
      const double deviation = std::sqrt(square / divisor);
      bool all = true;
      for (size_t i = 0; i < q.rewards.size(); ++i) {
        const double a = static_cast<double>(std::bit_cast<float>(q.advantages[i]));
        const double want = deviation == 0 ? 0 : (q.rewards[i] - mean) / deviation;
        all = all && std::isfinite(a) && std::fabs(a - want) <= 0.01 * std::fabs(want) + 1e-6;
      }
      if (all) return true;
    }
    return false;
  }

  // C8-03, C8-04, C8-07, CHEAP-09, BWD-06, RL-07.
  void Update(size_t i) {
    const LoopUpdate& u = l_.updates[i];
    const std::string where = fmt::format("update {} (theta{} to theta{})", i + 1, i, i + 1);
    const auto at = static_cast<int64_t>(i);
    j_.Require("C8-01", u.from == at && u.to == at + 1 && u.published_version == at + 1,
               reason::kVersionContradiction,
               fmt::format("{}: it says theta{} to theta{}, published as {}", where, u.from, u.to,
                           u.published_version));
    for (const LoopProcess& p : l_.processes) {
      if (p.name != "trainer") continue;
      j_.Require(
          "RL-05", p.pid == u.trainer_pid, reason::kReceiptContradicted,
          fmt::format("{}: made by process {}, the trainer is {}", where, u.trainer_pid, p.pid));
    }
    const LoopVersion* before = i < l_.versions.size() ? &l_.versions[i] : nullptr;
    const LoopVersion* after = i + 1 < l_.versions.size() ? &l_.versions[i + 1] : nullptr;
    bool signal = false;
    if (before != nullptr) {
      for (const LoopQuestion& q : before->questions) {
        for (const double r : q.rewards) signal = signal || r != q.rewards[0];
      }
    }
    j_.Require("C8-07", signal, reason::kDegenerateAdvantage,
               where + ": all rewards of each group are equal");
    j_.Require("C8-04", !u.skipped && u.master_before != u.master_after, reason::kMasterUnchanged,
               fmt::format("{}: the step {} and the master's hash {}", where,
                           u.skipped ? "was skipped" : "ran",
                           u.master_before == u.master_after ? "is the same" : "changed"));
    j_.Require("RL-07", (u.lr & 0x7fffffffu) != 0, reason::kMasterUnchanged,
               where + ": the learning rate is 0");
    const std::string lr = Value("lr");
    j_.Require("C8-01", std::bit_cast<float>(u.lr) == std::strtof(lr.c_str(), nullptr),
               reason::kConfigDiffers,
               fmt::format("{}: learning rate {}, the recipe says {}", where,
                           std::bit_cast<float>(u.lr), lr));
    j_.Require("SYS-28", u.master_before == u.master_after || u.deployed_before != u.deployed_after,
               reason::kDeployedUnchanged, where + ": no deployed byte changed");
    if (l_.moments_recorded) {
      j_.Require("BWD-06", u.moments_before != u.moments_after, reason::kMomentsUnchanged, where);
      j_.Require("BWD-06", i == 0 || u.moments_before == l_.updates[i - 1].moments_after,
                 reason::kReceiptContradicted,
                 where + ": its moments are not those that the update before left");
    }
    Gradients(where, i);
    j_.Require("C8-03", u.kl == 0 && u.entropy == 0, reason::kGradientNotMeaningful,
               where + ": auxiliary losses take part, so the gradient may be theirs");
    Ratio(where, u, before);
    if (before != nullptr) {
      j_.Require("RL-07",
                 u.master_before == before->trainer_master &&
                     u.deployed_before == before->trainer_deployed,
                 reason::kWeightHashMismatch,
                 fmt::format("{}: it did not start from theta{}", where, i));
    }
    if (after != nullptr) {
      j_.Require(
          "RL-07",
          u.master_after == after->trainer_master && u.deployed_after == after->trainer_deployed,
          reason::kWeightHashMismatch,
          fmt::format("{}: theta{} is not what it gave", where, i + 1));
    }
    j_.Require("RL-08", u.published == u.deployed_after && u.held == u.deployed_after,
               reason::kWeightHashMismatch,
               fmt::format("{}: deployed {}, sent {}, the engine answered {}", where,
                           u.deployed_after.substr(0, 12), u.published.substr(0, 12),
                           u.held.substr(0, 12)));
    j_.Require("SYS-30", u.cache_reset == l_.rollout.prefix_caching, reason::kConfigDiffers,
               fmt::format("{}: prefix caching {}, blocks of the old weights {}", where,
                           l_.rollout.prefix_caching ? "on" : "off",
                           u.cache_reset ? "dropped" : "not dropped"));
  }

  void Gradients(const std::string& where, size_t i) {
    const LoopUpdate& u = l_.updates[i];
    LoopParameter sum;
    std::string zero, non_finite, still;
    std::vector<std::string> names;
    for (size_t k = 0; k < u.parameters.size(); ++k) {
      const LoopParameter& p = u.parameters[k];
      names.push_back(p.name);
      sum.elements += p.elements;
      sum.nonzero += p.nonzero;
      sum.non_finite += p.non_finite;
      sum.master_changed += p.master_changed;
      sum.deployed_changed += p.deployed_changed;
      if (p.nonzero == 0) zero = p.name;
      if (p.non_finite != 0) non_finite = p.name;
      if (p.master_changed == 0) still = p.name;
      const LoopUpdate& first = l_.updates[0];
      j_.Require("BWD-02",
                 u.parameters.size() == first.parameters.size() &&
                     p.name == first.parameters[k].name &&
                     p.elements == first.parameters[k].elements,
                 reason::kReceiptContradicted,
                 fmt::format("{}: parameter {} is not that of the first update", where, p.name));
      j_.Require("BWD-02",
                 p.nonzero <= p.elements && p.master_changed <= p.elements &&
                     p.deployed_changed <= p.elements,
                 reason::kReceiptContradicted,
                 fmt::format("{}: {} has more changes than elements", where, p.name));
    }
    const LoopParameter& t = u.totals;
    j_.Require(
        "BWD-02",
        t.elements == sum.elements && t.nonzero == sum.nonzero && t.non_finite == sum.non_finite &&
            t.master_changed == sum.master_changed && t.deployed_changed == sum.deployed_changed,
        reason::kReceiptContradicted, where + ": the totals are not the sums over the parameters");
    j_.Require("BWD-02", AllDifferent(names), reason::kReceiptContradicted,
               where + ": a parameter stands in it twice");
    j_.Require("C8-03", non_finite.empty(), reason::kGradientNotMeaningful,
               fmt::format("{}: {} has a non-finite gradient", where, non_finite));
    j_.Require("C8-03", zero.empty(), reason::kGradientNotMeaningful,
               fmt::format("{}: {} has no gradient at all", where, zero));
    j_.Require("C8-04", still.empty(), reason::kMasterUnchanged,
               fmt::format("{}: no element of {} changed", where, still));
    j_.Require("SYS-28", u.deployed_before == u.deployed_after || sum.deployed_changed > 0,
               reason::kReceiptContradicted,
               where + ": the deployed hash changed and no element did");
  }

  // On policy, with equal bits, the ratio is exp(0): exactly 1 at every token.
  void Ratio(const std::string& where, const LoopUpdate& u, const LoopVersion* before) {
    j_.Require("SYS-36", u.ratio_not_one == 0, reason::kRatioNotOne,
               fmt::format("{}: not exactly 1 at {} tokens", where, u.ratio_not_one));
    if (before == nullptr || !before->paths.contains("old_logprob") ||
        !before->paths.contains("actor")) {
      return;
    }
    const LogprobPath &a = before->paths.at("old_logprob"), &b = before->paths.at("actor");
    int64_t differ = 0;
    for (size_t s = 0; s < std::min(a.lines.size(), b.lines.size()); ++s) {
      const LogprobLine &x = a.lines[s], &y = b.lines[s];
      for (size_t t = 0; t < std::min(x.bits.size(), y.bits.size()); ++t)
        differ += x.mask[t] == 1 && x.bits[t] != y.bits[t];
    }
    j_.Require("SYS-36", differ == u.ratio_not_one, reason::kReceiptContradicted,
               fmt::format("{}: {} tokens have another ratio than 1, it says {}", where, differ,
                           u.ratio_not_one));
  }

  Judging& j_;
  const Subject& subject_;
  const Loop& l_;
};

}  // namespace

void CheckLoop(Judging* judging, const Subject& subject, const Loop& loop) {
  LoopJudge(judging, subject, loop).Run();
}

}  // namespace tare::workflow
