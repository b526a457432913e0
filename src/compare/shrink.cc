#include "compare/shrink.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "base/reasons.h"

namespace tare::compare {
namespace {

// The input of one side: the row's sequence, and the others around it in their order.
struct SideInput {
  ReplaySequence own;
  std::vector<ReplaySequence> before, after;

  ReplayBatch Batch() const {
    ReplayBatch out = before;
    out.push_back(own);
    out.insert(out.end(), after.begin(), after.end());
    return out;
  }
  size_t others() const { return before.size() + after.size(); }
  void Erase(size_t begin, size_t count) {
    std::vector<ReplaySequence> kept_before, kept_after;
    for (size_t i = 0; i < others(); ++i) {
      if (i >= begin && i < begin + count) continue;
      const bool front = i < before.size();
      (front ? kept_before : kept_after).push_back(front ? before[i] : after[i - before.size()]);
    }
    before = std::move(kept_before);
    after = std::move(kept_after);
  }
};

SideInput Split(const ReplayBatch& batch, size_t own) {
  SideInput s;
  s.before.assign(batch.begin(), batch.begin() + static_cast<int64_t>(own));
  s.own = batch[own];
  s.after.assign(batch.begin() + static_cast<int64_t>(own) + 1, batch.end());
  return s;
}

int64_t TokensOf(const ReplayBatch& batch) {
  int64_t n = 0;
  for (const ReplaySequence& s : batch) n += static_cast<int64_t>(s.tokens.size());
  return n;
}

class Shrinker {
 public:
  Shrinker(const Bundle& bundle, const ShrinkOptions& options, const Replay& replay,
           ShrinkReport* report)
      : options_(options), replay_(replay), report_(report) {
    const Json& site = bundle.description["site"];
    name_ = site["name"].get<std::string>();
  }

  // Both sides over these inputs: does the site still differ first? Keeps the dumps when it does.
  Result<bool> Shows(const SideInput& a, const SideInput& b) {
    ++report_->runs;
    TARE_ASSIGN_OR_RETURN(Replayed dumps, replay_(a.Batch(), b.Batch()));
    DiffOptions options;
    options.pool = options_.pool;
    TARE_ASSIGN_OR_RETURN(LocateReport located, Locate(*dumps.a, *dumps.b, options, nullptr));
    const Site& site = located.site;
    if (!located.found || site.name != name_ || site.position < 0 || site.sequence != a.own.name)
      return false;
    report_->last = std::move(dumps);
    report_->located = std::move(located);
    return true;
  }

  bool Spent() const { return report_->runs >= options_.max_runs; }

  // Tries a smaller pair of inputs and takes it when it still shows the site.
  Result<bool> Try(const std::string& what, const SideInput& a, const SideInput& b) {
    TARE_ASSIGN_OR_RETURN(const bool shows, Shows(a, b));
    report_->steps.push_back({what, shows});
    if (shows) {
      a_ = a;
      b_ = b;
    }
    return shows;
  }

  Status Run(SideInput a, SideInput b) {
    a_ = std::move(a);
    b_ = std::move(b);
    // All others at once: most differences need none.
    if (a_.others() + b_.others() > 0) {
      SideInput x = a_, y = b_;
      x.before = x.after = y.before = y.after = {};
      TARE_RETURN_IF_ERROR(Try("without any other sequence", x, y).status());
    }
    for (bool changed = true; changed && !Spent();) {
      TARE_ASSIGN_OR_RETURN(const bool fewer, DropOthers());
      TARE_ASSIGN_OR_RETURN(const bool shorter, DropTokens());
      changed = fewer || shorter;
      report_->minimal = !changed && !Spent();
    }
    report_->a = a_.Batch();
    report_->b = b_.Batch();
    return Ok();
  }

 private:
  // Halves first, then quarters, down to single sequences, on one side at a time.
  Result<bool> DropOthers() {
    bool any = false;
    for (const bool first : {true, false}) {
      size_t step = std::max<size_t>(1, (first ? a_ : b_).others() / 2);
      for (;; step /= 2) {
        for (size_t at = 0; at < (first ? a_ : b_).others() && !Spent();) {
          SideInput x = a_, y = b_;
          SideInput& mine = first ? x : y;
          const size_t count = std::min(step, mine.others() - at);
          mine.Erase(at, count);
          TARE_ASSIGN_OR_RETURN(
              const bool kept,
              Try(fmt::format("side {} without {} of {} other sequences", first ? "a" : "b", count,
                              (first ? a_ : b_).others()),
                  x, y));
          any = any || kept;
          if (!kept) at += count;
        }
        if (step == 1) break;
      }
    }
    return any;
  }

  // The tail after the row goes without a question: a row knows nothing of it. Then the front, in
  // halves of what is left, down to one token.
  Result<bool> DropTokens() {
    bool any = false;
    const int64_t rows = report_->located.site.position + 1;
    for (SideInput* side : {&a_, &b_}) {
      if (static_cast<int64_t>(side->own.tokens.size()) <= rows + 1) continue;
      SideInput x = a_, y = b_;
      for (SideInput* cut : {&x, &y}) {
        const auto size = static_cast<size_t>(rows) + 1;
        if (cut->own.tokens.size() > size) cut->own.tokens.resize(size);
        cut->own.first = std::min(cut->own.first, rows);
      }
      if (Spent()) return any;
      TARE_ASSIGN_OR_RETURN(const bool kept, Try("without the tokens after the row", x, y));
      any = any || kept;
      break;
    }
    for (int64_t step = std::max<int64_t>(1, (Rows() - 1) / 2);; step /= 2) {
      while (Rows() > step && !Spent()) {
        SideInput x = a_, y = b_;
        for (SideInput* cut : {&x, &y}) {
          cut->own.tokens.erase(cut->own.tokens.begin(), cut->own.tokens.begin() + step);
          cut->own.first = std::max<int64_t>(1, cut->own.first - step);
        }
        TARE_ASSIGN_OR_RETURN(
            const bool kept,
            Try(fmt::format("without the first {} of {} tokens", step, Rows()), x, y));
        any = any || kept;
        if (!kept) break;
      }
      if (step <= 1) break;
    }
    return any;
  }

  // Rows of the own sequence up to the site's.
  int64_t Rows() const {
    return std::min(report_->located.site.position + 1,
                    static_cast<int64_t>(std::min(a_.own.tokens.size(), b_.own.tokens.size())) - 1);
  }

  const ShrinkOptions& options_;
  const Replay& replay_;
  ShrinkReport* report_;
  std::string name_;
  SideInput a_, b_;
};

}  // namespace

Result<ShrinkReport> Shrink(Env* env, const Bundle& bundle, const ShrinkOptions& options,
                            const Replay& replay) {
  TARE_CHECK(options.pool != nullptr);
  ShrinkReport report;
  const auto say = [&](Verdict verdict, std::string_view code, std::string why) {
    report.verdict = verdict;
    report.reason = code;
    report.why = std::move(why);
  };
  SideInput sides[2];
  for (const bool first : {true, false}) {
    const std::string side = first ? "a" : "b";
    if (ReplayCommand(bundle, side).empty()) {
      say(Verdict::kInconclusive, reason::kMissingCapture,
          fmt::format("side {} recorded no command (identity.replay of its dump's manifest)",
                      side));
      return report;
    }
    Result<ReplayBatch> batch = ReplayInput(env, bundle, side);
    if (!batch.ok() && batch.status().code() == Code::kNotFound) {
      say(Verdict::kInconclusive, reason::kMissingCapture,
          fmt::format("side {} has no input: its dump does not name the tokens from position 0",
                      side));
      return report;
    }
    TARE_RETURN_IF_ERROR(batch.status());
    report.sequences_before += static_cast<int64_t>(batch->size());
    report.tokens_before += TokensOf(*batch);
    const int64_t own = SequenceOfRow(*batch, bundle.history, bundle.position);
    sides[first ? 0 : 1] = Split(*batch, static_cast<size_t>(own));
  }
  Shrinker shrinker(bundle, options, replay, &report);
  TARE_ASSIGN_OR_RETURN(const bool shows, shrinker.Shows(sides[0], sides[1]));
  const std::string name = bundle.description["site"]["name"];
  if (!shows) {
    say(Verdict::kFail, reason::kReplayDiffers,
        fmt::format("over the recorded input {} is not the first to differ", Printable(name)));
    return report;
  }
  TARE_RETURN_IF_ERROR(shrinker.Run(sides[0], sides[1]));
  report.sequences_after = static_cast<int64_t>(report.a.size() + report.b.size());
  report.tokens_after = TokensOf(report.a) + TokensOf(report.b);
  say(Verdict::kPass, {},
      fmt::format("{} still differs first, at position {}", Printable(name),
                  report.located.site.position));
  return report;
}

std::string ShrinkTable(const ShrinkReport& r) {
  std::string out;
  for (const ShrinkStep& s : r.steps)
    out += fmt::format("  {}  {}\n", s.kept ? "still differs" : "gone         ", s.what);
  if (r.verdict == Verdict::kPass) {
    out +=
        fmt::format("sequences {} -> {}, tokens {} -> {} (both sides), {} runs, {}\n",
                    r.sequences_before, r.sequences_after, r.tokens_before, r.tokens_after, r.runs,
                    r.minimal ? "minimal: nothing more can be left out"
                              : "not minimal: the number of runs was used up");
  }
  std::string verdict(VerdictName(r.verdict));
  std::transform(verdict.begin(), verdict.end(), verdict.begin(), [](char c) {
    return static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  });
  return out + verdict + ": " + r.why + (r.reason.empty() ? "" : fmt::format(" ({})", r.reason)) +
         "\n";
}

Json ShrinkJson(const ShrinkReport& r) {
  Json steps = Json::array();
  for (const ShrinkStep& s : r.steps) steps.push_back({{"what", s.what}, {"kept", s.kept}});
  Json j = {{"schema", "tare.shrink/1"},
            {"verdict", VerdictName(r.verdict)},
            {"why", r.why},
            {"runs", r.runs},
            {"minimal", r.minimal},
            {"sequences_before", r.sequences_before},
            {"sequences_after", r.sequences_after},
            {"tokens_before", r.tokens_before},
            {"tokens_after", r.tokens_after},
            {"steps", std::move(steps)}};
  j["reason"] = r.reason.empty() ? Json(nullptr) : Json(r.reason);
  if (r.verdict == Verdict::kPass) j["site"] = LocateJson(r.located)["site"];
  return j;
}

}  // namespace tare::compare
