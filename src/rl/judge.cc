#include "rl/judge.h"

#include <bit>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "base/reasons.h"
#include "base/sha256.h"
#include "tensor/logprobs.h"

namespace tare::rl {
namespace {

using Finding = Judgement::Finding;
using Comparison = Judgement::Comparison;

class Judging {
 public:
  Judging(Env* env, const Json& receipt, const std::string& directory)
      : env_(env), receipt_(receipt), directory_(directory) {}

  Judgement Run() {
    try {
      if (receipt_.at("schema") != "tare.receipt/1") {
        Say(Verdict::kRefused, reason::kReceiptMalformed, "schema is {}; tare.receipt/1",
            receipt_.at("schema").dump());
      } else {
        Processes();
        Identities();
        Sequence();
        for (const Json& round : receipt_.at("rounds")) Round(round);
        Updates();
      }
    } catch (const nlohmann::json::exception& e) {
      Say(Verdict::kRefused, reason::kReceiptMalformed, "{}", e.what());
    }
    out_.verdict = Verdict::kPass;
    if (!out_.findings.empty()) {
      out_.verdict = out_.findings.front().verdict;
      out_.reason = out_.findings.front().reason;
    }
    return std::move(out_);
  }

 private:
  template <typename... Args>
  void Say(Verdict verdict, std::string_view why, fmt::format_string<Args...> format,
           Args&&... args) {
    out_.findings.push_back({verdict, why, fmt::format(format, std::forward<Args>(args)...)});
  }

  // C8-05: every process ended by itself with 0.
  void Processes() {
    std::set<std::string> names;
    for (const Json& p : receipt_.at("processes")) {
      const std::string name = p.at("name");
      names.insert(name);
      if (!p.at("ended").get<bool>()) {
        Say(Verdict::kRefused, reason::kProcessExit, "{} did not end by itself and was killed",
            name);
      } else if (p.at("signal").get<int>() != 0) {
        Say(Verdict::kRefused, reason::kProcessExit, "{} was ended by signal {}", name,
            p.at("signal").get<int>());
      } else if (p.at("code").get<int>() != 0) {
        Say(Verdict::kRefused, reason::kProcessExit, "{} exited with {}", name,
            p.at("code").get<int>());
      }
    }
    if (names != std::set<std::string>{"rollout", "trainer"}) {
      Say(Verdict::kRefused, reason::kReceiptMalformed,
          "processes: wanted one rollout and one trainer");
    }
  }

  // C5-09, T-12, T-22, RL-01: what ran on the two sides, as each process itself says.
  void Identities() {
    const Json& a = receipt_.at("identities").at("rollout");
    const Json& b = receipt_.at("identities").at("trainer");
    if (a.is_null() || b.is_null()) {
      Say(Verdict::kRefused, reason::kIdentityDiffers, "a side has no execution identity");
      return;
    }
    const bool bi_a = a.at("switch").at("effective").get<int>() == 1;
    const bool bi_b = b.at("batch_invariant").get<bool>();
    if (!bi_a || !bi_b) {
      Say(Verdict::kRefused, reason::kSwitchNotEffective,
          "batch invariance: rollout {}, trainer {}; both must run with it", bi_a ? "on" : "off",
          bi_b ? "on" : "off");
    }
    if (!a.at("switch").at("changed_since_start").is_null()) {
      Say(Verdict::kRefused, reason::kSwitchNotEffective, "rollout: {}",
          a.at("switch").at("changed_since_start").dump());
    }
    if (a.at("profile") != b.at("profile")) {
      Say(Verdict::kRefused, reason::kIdentityDiffers, "profile: rollout {}, trainer {}",
          a.at("profile").dump(), b.at("profile").dump());
    }
    if (a.at("binary_sha256") != b.at("binary_sha256")) {
      Say(Verdict::kRefused, reason::kIdentityDiffers,
          "the two processes run different executables");
    }
    if (b.value("arm", "production") == "surrogate") {
      Say(Verdict::kRefused, reason::kDetachedSubstitute,
          "the trainer ran the surrogate arm: its gradient is not that of the forward compared");
    }
    LoadedFiles();
    if (a.at("prefix_caching") != receipt_.at("config").at("prefix_caching")) {
      Say(Verdict::kRefused, reason::kIdentityDiffers,
          "prefix caching: the recipe says {}, the engine ran {}",
          receipt_.at("config").at("prefix_caching").dump(), a.at("prefix_caching").dump());
    }
  }

  // T-22, RL-02, RL-04: the executables and libraries that were mapped into the two processes.
  void LoadedFiles() {
    const Json& processes = receipt_.at("processes");
    const Json& a = processes.at(0).at("loaded_files");
    const Json& b = processes.at(1).at("loaded_files");
    if (a.empty() || b.empty()) {
      Say(Verdict::kRefused, reason::kIdentityDiffers, "what the processes loaded is not recorded");
      return;
    }
    for (const auto& [x, y] : {std::pair(&a, &b), std::pair(&b, &a)}) {
      for (const auto& [path, digest] : x->items()) {
        if (y->value(path, Json()) == digest) continue;
        Say(Verdict::kRefused, reason::kIdentityDiffers, "{} was loaded {}", path,
            y->contains(path) ? "with other bytes by each process" : "by one process only");
        return;
      }
    }
  }

  // C8-01, RL-05: rollout, compare, update, publish, ..., compare, end; times ascending.
  void Sequence() {
    const int64_t steps = receipt_.at("config").at("steps").get<int64_t>();
    std::vector<std::pair<std::string, int64_t>> want;
    for (int64_t v = 0; v <= steps; ++v) {
      want.emplace_back("rollout", v);
      want.emplace_back("compare", v);
      if (v == steps) break;
      want.emplace_back("update", v);
      want.emplace_back("publish", v + 1);
    }
    want.emplace_back("end", steps);
    if (steps < 2)
      Say(Verdict::kRefused, reason::kLoopIncomplete, "{} update; a receipt needs two", steps);
    const Json& events = receipt_.at("events");
    int64_t last = INT64_MIN;
    for (size_t i = 0; i < want.size(); ++i) {
      if (i >= events.size()) {
        Say(Verdict::kRefused, reason::kLoopIncomplete, "after {} events: {} theta{} is missing",
            events.size(), want[i].first, want[i].second);
        return;
      }
      const std::string what = events[i].at("event");
      const int64_t version = events[i].at("version").get<int64_t>();
      const int64_t time = events[i].at("monotonic_ns").get<int64_t>();
      if (what != want[i].first || version != want[i].second) {
        Say(Verdict::kRefused, reason::kLoopIncomplete,
            "event {} is {} theta{}; {} theta{} belongs there", i, what, version, want[i].first,
            want[i].second);
        return;
      }
      if (time < last) {
        Say(Verdict::kRefused, reason::kLoopIncomplete, "event {} is older than the one before it",
            i);
        return;
      }
      last = time;
    }
    if (events.size() != want.size())
      Say(Verdict::kRefused, reason::kLoopIncomplete, "{} events; {}", events.size(), want.size());
    if (static_cast<int64_t>(receipt_.at("rounds").size()) != steps + 1) {
      Say(Verdict::kRefused, reason::kLoopIncomplete, "{} rounds; {} updates want {}",
          receipt_.at("rounds").size(), steps, steps + 1);
    }
  }

  // Reads one path's dump; nullopt after saying why.
  std::optional<std::vector<LogprobSequence>> Path(const Json& round, int64_t version,
                                                   const char* path) {
    const Json& paths = round.at("paths");
    if (!paths.contains(path)) {
      Say(Verdict::kRefused, reason::kPathMissing, "theta{}: no logprobs of the path `{}`", version,
          path);
      return std::nullopt;
    }
    const Json& p = paths.at(path);
    const std::string file = p.at("file");
    if (file.find('/') != std::string::npos) {
      Say(Verdict::kRefused, reason::kReceiptMalformed, "{}: a plain name is wanted", file);
      return std::nullopt;
    }
    const Result<std::string> bytes = env_->ReadFile(directory_ + "/" + file);
    if (!bytes.ok()) {
      Say(Verdict::kRefused, reason::kReceiptContradicted, "{}", bytes.status().message());
      return std::nullopt;
    }
    if (p.at("sha256") != Hex(Sha256Of(*bytes))) {
      Say(Verdict::kRefused, reason::kReceiptContradicted, "{}: its SHA-256 is not the receipt's",
          file);
      return std::nullopt;
    }
    Result<std::vector<LogprobSequence>> lines = ParseLogprobs(*bytes);
    if (!lines.ok()) {
      Say(Verdict::kRefused, reason::kReceiptContradicted, "{}: {}", file,
          lines.status().message());
      return std::nullopt;
    }
    int64_t tokens = 0, valid = 0;
    for (const LogprobSequence& s : *lines) {
      tokens += static_cast<int64_t>(s.tokens.size());
      for (size_t t = 0; t < s.tokens.size(); ++t) valid += s.mask.empty() || s.mask[t];
      if (s.weights != fmt::format("theta{}", version)) {
        Say(Verdict::kRefused, reason::kVersionContradiction, "{}: {} is labelled {}; theta{}",
            file, s.sequence, s.weights, version);
        return std::nullopt;
      }
      if (s.dtype != DType::kF32 || s.decimal) {
        Say(Verdict::kRefused, reason::kNotOriginalDtype, "{}: {} holds {}{}; f32 bits", file,
            s.sequence, DTypeName(s.dtype), s.decimal ? " as decimal text" : "");
        return std::nullopt;
      }
    }
    if (tokens != p.at("tokens") || valid != p.at("valid_tokens")) {
      Say(Verdict::kRefused, reason::kReceiptContradicted,
          "{}: {} tokens, {} valid; the receipt says {} and {}", file, tokens, valid,
          p.at("tokens").dump(), p.at("valid_tokens").dump());
      return std::nullopt;
    }
    // C5-08: every sampled token is accounted for.
    if (const int64_t sampled = round.at("rollout").at("tokens").get<int64_t>();
        tokens != sampled) {
      Say(Verdict::kInconclusive, reason::kCountMismatch,
          "theta{} {}: {} tokens for {} that were sampled", version, path, tokens, sampled);
    }
    if (std::string_view(path) != "rollout") {
      // C5-05, T-02: the trainer's kernels ran, after the rollout had ended.
      if (p.at("forwards").get<int64_t>() < 1 || p.at("launches").get<int64_t>() < 1 ||
          p.at("rows").get<int64_t>() < tokens) {
        Say(Verdict::kRefused, reason::kPathUnexecuted,
            "theta{} {}: {} forwards, {} kernels, {} rows for {} tokens: no trainer forward gave "
            "these values",
            version, path, p.at("forwards").dump(), p.at("launches").dump(), p.at("rows").dump(),
            tokens);
      }
      if (p.at("recorded").get<bool>() != (std::string_view(path) == "train")) {
        Say(Verdict::kRefused, reason::kPathUnexecuted, "theta{} {}: recorded is {}", version, path,
            p.at("recorded").dump());
      }
      if (p.at("started_ns").get<int64_t>() < round.at("rollout").at("ended_ns").get<int64_t>()) {
        Say(Verdict::kRefused, reason::kPathUnexecuted,
            "theta{} {}: started before the rollout ended", version, path);
      }
      // Values that are a few decimals made binary are no logits' log-softmax (T-04).
      if (DecimalOnly(*lines)) {
        Say(Verdict::kRefused, reason::kNotOriginalDtype,
            "theta{} {}: every value is a decimal of at most four digits", version, path);
      }
    }
    return *std::move(lines);
  }

  static bool DecimalOnly(const std::vector<LogprobSequence>& lines) {
    int64_t values = 0;
    for (const LogprobSequence& s : lines) {
      for (const uint64_t w : s.words) {
        const float v = std::bit_cast<float>(static_cast<uint32_t>(w));
        if (!std::isfinite(v) || v == 0.0f) continue;
        const double scaled = std::nearbyint(static_cast<double>(v) * 1e4) / 1e4;
        if (static_cast<float>(scaled) != v) return false;
        ++values;
      }
    }
    return values >= 8;
  }

  void Compare(int64_t version, const char* a_name, const std::vector<LogprobSequence>& a,
               const char* b_name, const std::vector<LogprobSequence>& b) {
    Comparison c;
    c.version = version;
    c.a = a_name;
    c.b = b_name;
    const std::string where = fmt::format("theta{} {} against {}", version, a_name, b_name);
    if (a.size() != b.size()) {
      Say(Verdict::kInconclusive, reason::kTokensDiffer, "{}: {} sequences against {}", where,
          a.size(), b.size());
      return;
    }
    bool all_zero = true;
    for (size_t i = 0; i < a.size(); ++i) {
      const LogprobSequence& x = a[i];
      const LogprobSequence& y = b[i];
      if (x.sequence != y.sequence || x.prompt != y.prompt || x.tokens != y.tokens) {
        Say(Verdict::kInconclusive, reason::kTokensDiffer,
            "{}: {}: the two sides hold different tokens", where, x.sequence);
        return;
      }
      if (x.kind != y.kind) {
        Say(Verdict::kRefused, reason::kLogprobKind, "{}: {}: {} against {}", where, x.sequence,
            x.kind, y.kind);
        return;
      }
      if (x.mask != y.mask) {
        Say(Verdict::kFail, reason::kMaskDiffers,
            "{}: {}: the two sides disagree on which tokens are valid", where, x.sequence);
        return;
      }
      if (x.present != y.present ||
          (!x.present.empty() &&
           std::set<uint8_t>(x.present.begin(), x.present.end()).contains(0))) {
        Say(Verdict::kRefused, reason::kDefaultFilled, "{}: {}: logprobs are missing", where,
            x.sequence);
        return;
      }
      for (size_t t = 0; t < x.tokens.size(); ++t) {
        if (!x.mask.empty() && !x.mask[t]) {
          ++c.masked;
          continue;
        }
        ++c.compared;
        const uint32_t p = static_cast<uint32_t>(x.words[t]), q = static_cast<uint32_t>(y.words[t]);
        const float fp = std::bit_cast<float>(p), fq = std::bit_cast<float>(q);
        all_zero = all_zero && p == 0 && q == 0;
        if (!std::isfinite(fp) || !std::isfinite(fq)) ++c.non_finite;
        if (p == q) continue;
        ++c.mismatches;
        if ((p ^ q) == 0x80000000u && (p << 1) == 0) ++c.sign_of_zero;
        const double d = std::fabs(static_cast<double>(fp) - static_cast<double>(fq));
        if (d > c.max_abs) c.max_abs = d;
        const float dp = std::fabs(std::exp(fp) - std::exp(fq));
        if (dp > c.max_abs_probability) c.max_abs_probability = dp;
        if (c.first.empty())
          c.first = fmt::format("{} token {}: 0x{:08x} against 0x{:08x}", x.sequence, t, p, q);
      }
    }
    if (c.compared == 0) {
      Say(Verdict::kInconclusive, reason::kNoValidTokens,
          "{}: no valid token, so nothing was compared", where);
    } else if (all_zero && c.compared > 1) {
      Say(Verdict::kRefused, reason::kDefaultFilled, "{}: every logprob is 0.0 on both sides",
          where);
    }
    if (c.non_finite > 0)
      Say(Verdict::kFail, reason::kNonFinite, "{}: {} of {} valid tokens", where, c.non_finite,
          c.compared);
    if (c.mismatches > 0) {
      Say(Verdict::kFail,
          c.mismatches == c.sign_of_zero ? reason::kSignOfZero : reason::kBitMismatch,
          "{}: {} of {} valid tokens differ; first {}; largest difference of the probabilities {} "
          "(diagnostic only)",
          where, c.mismatches, c.compared, c.first, c.max_abs_probability);
    }
    out_.comparisons.push_back(std::move(c));
  }

  void Round(const Json& round) {
    const int64_t version = round.at("version").get<int64_t>();
    // C8-06, T-10, H14: weights first. The engine's hash is over what it holds.
    const Json& w = round.at("weights");
    if (w.at("engine_version") != version) {
      Say(Verdict::kRefused, reason::kVersionContradiction,
          "theta{}: the engine says it holds version {}", version, w.at("engine_version").dump());
    }
    for (const Json& v : round.at("rollout").at("weight_versions")) {
      if (v != version)
        Say(Verdict::kRefused, reason::kVersionContradiction,
            "theta{}: tokens were sampled with version {}", version, v.dump());
    }
    if (w.at("engine_held") != w.at("trainer_deployed")) {
      Say(Verdict::kRefused, reason::kWeightHashMismatch,
          "theta{}: the engine holds {}, the trainer {}", version, w.at("engine_held").dump(),
          w.at("trainer_deployed").dump());
    }
    const auto rollout = Path(round, version, "rollout");
    const auto score = Path(round, version, "score");
    const auto train = Path(round, version, "train");
    if (rollout && score) {
      Contract(round, version, *rollout, *score);
      Compare(version, "rollout", *rollout, "score", *score);
    }
    if (rollout && train) Compare(version, "rollout", *rollout, "train", *train);
    if (score && train) Compare(version, "score", *score, "train", *train);
    if (rollout) Samples(version, *rollout);
  }

  // H01, H02: before differing bits are called arithmetic, the engine's other kinds of the same
  // logprobs are asked. One that has the trainer's bits at every token names the contract.
  void Contract(const Json& round, int64_t version, const std::vector<LogprobSequence>& rollout,
                const std::vector<LogprobSequence>& score) {
    if (!round.contains("rollout_kinds") || SameBits(rollout, score)) return;
    for (const auto& [kind, entry] : round.at("rollout_kinds").items()) {
      const std::string file = entry.at("file");
      const Result<std::string> bytes = env_->ReadFile(directory_ + "/" + file);
      if (file.find('/') != std::string::npos || !bytes.ok() ||
          entry.at("sha256") != Hex(Sha256Of(*bytes))) {
        Say(Verdict::kRefused, reason::kReceiptContradicted, "{}: missing or changed", file);
        return;
      }
      const Result<std::vector<LogprobSequence>> lines = ParseLogprobs(*bytes);
      if (!lines.ok() || !SameBits(*lines, score)) continue;
      Say(Verdict::kFail, reason::kLogprobKind,
          "theta{}: the rollout's {} logprobs have the trainer's bits at every token, those handed "
          "over have not: temperature or truncation is applied on one side only",
          version, kind);
      return;
    }
  }

  static bool SameBits(const std::vector<LogprobSequence>& a,
                       const std::vector<LogprobSequence>& b) {
    if (a.size() != b.size()) return false;
    for (size_t i = 0; i < a.size(); ++i) {
      if (a[i].tokens != b[i].tokens || a[i].words != b[i].words) return false;
    }
    return true;
  }

  // H16: samples of one question must not all be clones. Names are question/sample.
  void Samples(int64_t version, const std::vector<LogprobSequence>& lines) {
    std::map<std::string, std::pair<int64_t, std::set<std::vector<int32_t>>>> groups;
    for (const LogprobSequence& s : lines) {
      auto& [count, unique] = groups[s.sequence.substr(0, s.sequence.rfind('/'))];
      ++count;
      unique.insert(s.tokens);
    }
    int64_t cloned = 0;
    for (const auto& [name, group] : groups) cloned += group.first > 1 && group.second.size() == 1;
    if (cloned == static_cast<int64_t>(groups.size())) {
      Say(Verdict::kRefused, reason::kIdenticalSamples,
          "theta{}: all samples of every question are identical (unique 1 of {})", version,
          groups.begin()->second.first);
    }
  }

  void Updates() {
    const Json& updates = receipt_.at("updates");
    const Json& rounds = receipt_.at("rounds");
    const int64_t steps = receipt_.at("config").at("steps").get<int64_t>();
    if (static_cast<int64_t>(updates.size()) != steps) {
      Say(Verdict::kRefused, reason::kLoopIncomplete, "{} updates; {}", updates.size(), steps);
    }
    for (size_t i = 0; i < updates.size(); ++i) {
      const Json& u = updates[i];
      const std::string where = fmt::format("update {} (theta{} to theta{})", i + 1, i, i + 1);
      // C8-07, T-09: an advantage that is zero everywhere trains nothing.
      bool signal = false;
      if (i < rounds.size() && rounds[i].contains("reward")) {
        for (const Json& group : rounds[i].at("reward").at("groups")) {
          const Json& rewards = group.at("rewards");
          for (const Json& r : rewards) signal = signal || r != rewards[0];
        }
      }
      if (!signal)
        Say(Verdict::kRefused, reason::kDegenerateAdvantage,
            "{}: all rewards of each group are equal", where);
      if (u.at("skipped").get<bool>())
        Say(Verdict::kRefused, reason::kMasterUnchanged, "{}: the step was skipped: {}", where,
            u.at("skipped_why").dump());
      if (u.at("master_before") == u.at("master_after")) {
        Say(Verdict::kRefused, reason::kMasterUnchanged,
            "{}: master weights have the same hash before and after (learning rate {})", where,
            u.at("lr").dump());
      } else if (u.at("deployed_before") == u.at("deployed_after")) {
        Say(Verdict::kInconclusive, reason::kDeployedUnchanged,
            "{}: master weights changed, no deployed byte did", where);
      }
      // C8-03: per parameter, finite; every one that the loss reaches is not zero.
      int64_t zero = 0, all = 0, non_finite = 0;
      std::string zero_name;
      for (const Json& p : u.at("parameters")) {
        ++all;
        non_finite += p.at("gradient_non_finite").get<int64_t>() > 0;
        if (p.at("gradient_nonzero").get<int64_t>() == 0) {
          ++zero;
          zero_name = p.at("name");
        }
      }
      if (all > 0 && non_finite > 0)
        Say(Verdict::kRefused, reason::kGradientNotMeaningful,
            "{}: {} of {} parameters have a non-finite gradient", where, non_finite, all);
      if (all > 0 && zero > 0)
        Say(Verdict::kRefused, reason::kGradientNotMeaningful,
            "{}: {} of {} parameters have no gradient at all, {} for one", where, zero, all,
            zero_name);
      if (u.at("kl_coef") != 0 || u.at("entropy_coef") != 0) {
        Say(Verdict::kRefused, reason::kGradientNotMeaningful,
            "{}: auxiliary losses take part, so the gradient may be theirs", where);
      }
      // T-20, BWD-05: the backward walk of the compared forward ran.
      if (!u.at("skipped").get<bool>() && u.at("backward_kernels").get<int64_t>() < 1) {
        Say(Verdict::kRefused, reason::kDetachedSubstitute,
            "{}: no kernel of the backward walk ran: another function stands behind the forward",
            where);
      }
      // On policy, with equal bits, the ratio is exp(0): exactly 1 at every token.
      if (u.at("ratio_not_one").get<int64_t>() != 0) {
        Say(Verdict::kFail, reason::kRatioNotOne,
            "{}: the importance ratio is not exactly 1 at {} of {} tokens", where,
            u.at("ratio_not_one").dump(), u.at("valid_tokens").dump());
      }
      // The chain of hashes: trained, published, held.
      const Json& publish = u.at("publish");
      if (publish.at("engine").is_null()) {
        Say(Verdict::kRefused, reason::kWeightHashMismatch, "{}: nothing was published", where);
      } else if (publish.at("engine").at("sha256") != u.at("deployed_after")) {
        Say(Verdict::kRefused, reason::kWeightHashMismatch,
            "{}: the engine answered {} to a publish of {}", where,
            publish.at("engine").at("sha256").dump(), u.at("deployed_after").dump());
      }
      if (i < rounds.size() &&
          rounds[i].at("weights").at("trainer_deployed") != u.at("deployed_before")) {
        Say(Verdict::kRefused, reason::kReceiptContradicted, "{}: it did not start from theta{}",
            where, i);
      }
      if (i + 1 < rounds.size() &&
          rounds[i + 1].at("weights").at("trainer_deployed") != u.at("deployed_after")) {
        Say(Verdict::kRefused, reason::kReceiptContradicted, "{}: theta{} is not what it gave",
            where, i + 1);
      }
    }
  }

  Env* env_;
  const Json& receipt_;
  const std::string& directory_;
  Judgement out_;
};

}  // namespace

Judgement Judge(Env* env, const Json& receipt, const std::string& directory) {
  return Judging(env, receipt, directory).Run();
}

Json Judgement::ToJson() const {
  Json found = Json::array(), compared = Json::array();
  for (const Finding& f : findings)
    found.push_back(
        Json{{"verdict", VerdictName(f.verdict)}, {"reason", f.reason}, {"text", f.text}});
  for (const Comparison& c : comparisons) {
    compared.push_back(Json{{"version", c.version},
                            {"a", c.a},
                            {"b", c.b},
                            {"compared", c.compared},
                            {"masked", c.masked},
                            {"mismatches", c.mismatches},
                            {"sign_of_zero", c.sign_of_zero},
                            {"non_finite", c.non_finite},
                            {"first", c.first},
                            {"max_abs", c.max_abs},
                            {"max_abs_probability", c.max_abs_probability}});
  }
  return Json{{"schema", "tare.verdict/1"},
              {"verdict", VerdictName(verdict)},
              {"reason", reason},
              {"findings", found},
              {"comparisons", compared}};
}

}  // namespace tare::rl
