#include "compare/report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>

#include "base/json.h"
#include "base/reasons.h"
#include "base/status.h"

namespace tare::compare {
namespace {

// A stand-in that some system writes where it has no logprob. 0.0 is also a legal logprob, so a
// constant alone proves nothing: the other side must be far from it everywhere.
constexpr double kPlaceholders[] = {0.0, 1.0, -1.0, -100.0, -1000.0, -9999.0, -10000.0};
constexpr double kFarNats = 0.5;

bool LooksLikePlaceholder(const Unit& unit) {
  const BitCounts& c = unit.counts;
  if (!IsFloat(unit.dtype_a) || c.mismatches == 0 || c.min_abs < kFarNats) return false;
  const auto stands_in = [&](bool constant, uint64_t word) {
    if (!constant) return false;
    const double value = WordToDouble(unit.dtype_a, word);
    return std::any_of(std::begin(kPlaceholders), std::end(kPlaceholders),
                       [&](double p) { return value == p; });
  };
  return stands_in(c.constant_a, c.first.word_a) || stands_in(c.constant_b, c.first.word_b);
}

void Judge(Unit* unit, bool placeholders) {
  const auto say = [&](Verdict verdict, std::string_view why) {
    unit->verdict = verdict;
    unit->reason = why;
  };
  const BitCounts& c = unit->counts;
  if (!unit->reason.empty()) return;  // decided where it was found
  if (!unit->on_a || !unit->on_b) return say(Verdict::kFail, reason::kMissingTensor);
  if (unit->shape_a != unit->shape_b) return say(Verdict::kFail, reason::kShapeDiffers);
  if (unit->dtype_a != unit->dtype_b) return say(Verdict::kInconclusive, reason::kDtypeDiffers);
  if (unit->duplicates > 0) return say(Verdict::kFail, reason::kDuplicateChoice);
  if (unit->set_differs > 0) return say(Verdict::kFail, reason::kSetDiffers);
  if (unit->order_differs > 0) return say(Verdict::kFail, reason::kOrderDiffers);
  if (unit->elements == 0) return say(Verdict::kInconclusive, reason::kNothingCompared);
  if (c.compared == 0) return say(Verdict::kInconclusive, reason::kNoValidTokens);
  if (c.mismatches > 0 && unit->role == TapRole::kMask)
    return say(Verdict::kFail, reason::kMaskDiffers);
  if (placeholders && LooksLikePlaceholder(*unit))
    return say(Verdict::kFail, reason::kMaskNotLossMask);
  if (c.non_finite > 0) return say(Verdict::kFail, reason::kNonFinite);
  if (c.mismatches > 0 && c.mismatches == c.sign_of_zero)
    return say(Verdict::kFail, reason::kSignOfZero);
  if (c.mismatches > 0) return say(Verdict::kFail, reason::kBitMismatch);
  say(Verdict::kPass, {});
}

// The questions in their order: the first that fails gives the whole its reason.
constexpr std::string_view kOrder[] = {
    reason::kMissingTensor, reason::kUnpairedTokens,  reason::kLengthContract,
    reason::kMaskDiffers,   reason::kMaskNotLossMask, reason::kDuplicateChoice,
    reason::kSetDiffers,    reason::kOrderDiffers,    reason::kDecisionsDiffer,
    reason::kShapeDiffers,  reason::kPayloadMissing,  reason::kNonFinite,
    reason::kBitMismatch,   reason::kSignOfZero};

bool IsEmptyUnit(const Unit& u) {
  return u.verdict == Verdict::kInconclusive && u.reason == reason::kNothingCompared &&
         u.elements == 0;
}

std::string Sentence(const Report& r) {
  std::string out;
  if (r.paired_tokens > 0 || r.tokens_a > 0 || r.tokens_b > 0) {
    out += fmt::format("{} of {} and {} tokens paired; ", r.paired_tokens, r.tokens_a, r.tokens_b);
  }
  out += fmt::format("{} of {} compared elements differ", r.totals.mismatches, r.totals.compared);
  if (r.compared_units != 1 || r.differing_units != 1) {
    out += fmt::format(" in {} of {} compared tensors", r.differing_units, r.compared_units);
  }
  if (r.totals.masked > 0) out += fmt::format("; {} masked", r.totals.masked);
  if (r.totals.non_finite > 0) out += fmt::format("; {} non-finite", r.totals.non_finite);
  return out;
}

}  // namespace

void Conclude(Report* report, bool placeholders) {
  Report& r = *report;
  size_t common = 0, missing = 0;
  for (Unit& u : r.units) {
    Judge(&u, placeholders);
    if (u.on_a && u.on_b) {
      ++common;
    } else {
      ++missing;
    }
    BitCounts c = u.counts;
    c.first = {};  // indices of different units do not compare
    c.first_non_finite = {};
    c.max_ulp_index = -1;
    r.totals.compared += c.compared;
    r.totals.masked += c.masked;
    r.totals.mismatches += c.mismatches;
    r.totals.sign_of_zero += c.sign_of_zero;
    r.totals.non_finite += c.non_finite;
    r.totals.non_finite_equal += c.non_finite_equal;
    r.totals.max_ulp = std::max(r.totals.max_ulp, c.max_ulp);
    r.totals.max_abs = std::max(r.totals.max_abs, c.max_abs);
    r.totals.sum_abs += c.sum_abs;
    for (size_t t = 0; t < kMaxTiers; ++t) r.totals.outside[t] += c.outside[t];
    if (r.ordered && r.first_failing.empty() && u.verdict == Verdict::kFail) {
      r.first_failing = u.name;
    }
    if (c.compared > 0) ++r.compared_units;
    if (c.mismatches > 0 || (u.verdict == Verdict::kFail && c.compared == 0)) ++r.differing_units;
  }
  const auto say = [&](Verdict verdict, std::string_view why) {
    r.verdict = verdict;
    r.reason = why;
    const Reason* known = why.empty() ? nullptr : FindReason(why);
    r.why = Sentence(r) + (known == nullptr ? "" : fmt::format(": {}", known->sentence));
  };
  const bool tokens = r.tokens_a > 0 || r.tokens_b > 0;
  if (r.decimal) return say(Verdict::kDiagnosticOnly, reason::kDecimalOnly);
  if (common == 0 && missing > 0) return say(Verdict::kInconclusive, reason::kNoCommonTensor);
  if (tokens && r.paired_tokens == 0) return say(Verdict::kInconclusive, reason::kNothingCompared);

  for (const std::string_view code : kOrder) {
    if (code == reason::kUnpairedTokens && !r.unpaired.empty() && !r.scope.paired_only) {
      return say(Verdict::kFail, code);
    }
    for (const Unit& u : r.units) {
      if (u.verdict == Verdict::kFail && u.reason == code) return say(Verdict::kFail, code);
    }
  }
  for (const Unit& u : r.units) {
    if (u.verdict == Verdict::kFail) return say(Verdict::kFail, u.reason);
  }
  if (r.cut) return say(Verdict::kInconclusive, reason::kDumpCut);
  for (const Unit& u : r.units) {
    if (u.verdict == Verdict::kInconclusive && !IsEmptyUnit(u))
      return say(Verdict::kInconclusive, u.reason);
  }
  if (r.totals.compared == 0) return say(Verdict::kInconclusive, reason::kNothingCompared);
  say(Verdict::kPass, {});
}

void Refuse(Report* report, std::string_view reason, std::string_view detail) {
  const Reason* known = FindReason(reason);
  TARE_CHECK(known != nullptr) << "reason " << reason << " is in no table";
  report->verdict = Verdict::kRefused;
  report->reason = reason;
  report->why = fmt::format("{}: {}", known->sentence, detail);
}

namespace {

// Worst first: what cannot even be compared, then by kind, then by share of differing elements.
struct Badness {
  int kind;
  double share;
  uint64_t ulp;
  bool operator<(const Badness& o) const {
    if (kind != o.kind) return kind < o.kind;
    if (share != o.share) return share < o.share;
    return ulp < o.ulp;
  }
};

Badness BadnessOf(const Unit& u) {
  const auto at = std::find(std::begin(kOrder), std::end(kOrder), u.reason);
  const int rank = static_cast<int>(std::end(kOrder) - at);
  const int kind = u.verdict == Verdict::kFail           ? 100 + rank
                   : u.verdict == Verdict::kInconclusive ? 50
                                                         : 0;
  const double share = u.counts.compared == 0 ? 0
                                              : static_cast<double>(u.counts.mismatches) /
                                                    static_cast<double>(u.counts.compared);
  return {kind, share, u.counts.max_ulp};
}

std::string Shorten(const std::string& name, size_t width) {
  const size_t keep = (width - 2) / 2;
  return name.size() <= width
             ? name
             : name.substr(0, keep) + ".." + name.substr(name.size() - (width - 2 - keep));
}

std::string DTypeCell(const Unit& u) {
  if (!u.on_a) return std::string(DTypeName(u.dtype_b));
  if (!u.on_b || u.dtype_a == u.dtype_b) return std::string(DTypeName(u.dtype_a));
  return fmt::format("{}|{}", DTypeName(u.dtype_a), DTypeName(u.dtype_b));
}

std::string ShapeCell(const Unit& u) {
  if (!u.on_a) return ShapeToString(u.shape_b);
  if (!u.on_b || u.shape_a == u.shape_b) return ShapeToString(u.shape_a);
  return ShapeToString(u.shape_a) + "|" + ShapeToString(u.shape_b);
}

std::string ReasonCell(const Unit& u) {
  std::string out = u.reason.empty() ? "equal" : std::string(u.reason);
  if (!u.on_a) out += " on A";
  if (!u.on_b) out += " on B";
  if (u.by_digest) out += " (digest)";
  return out;
}

int64_t TokenIndex(const TokenPlace& t) { return t.index >= 0 ? t.index : t.position; }

const Mismatch& Shown(const Unit& u) {
  return u.counts.first.index >= 0 ? u.counts.first : u.counts.first_non_finite;
}

}  // namespace

std::string Table(const Report& report, const TableOptions& options) {
  std::vector<const Unit*> rows;
  size_t equal = 0;
  for (const Unit& u : report.units) {
    if (u.verdict == Verdict::kPass && !options.equal_rows) {
      ++equal;
      continue;
    }
    rows.push_back(&u);
  }
  std::stable_sort(rows.begin(), rows.end(),
                   [](const Unit* a, const Unit* b) { return BadnessOf(*b) < BadnessOf(*a); });
  size_t more = 0;
  if (options.top > 0 && rows.size() > static_cast<size_t>(options.top)) {
    more = rows.size() - static_cast<size_t>(options.top);
    rows.resize(static_cast<size_t>(options.top));
  }
  std::vector<std::vector<std::string>> cells;
  cells.push_back({"tensor", "dtype", "shape", "compared", "differ", "masked", "first at", "A", "B",
                   "ulp", "max ulp", "max abs", "why"});
  for (const Unit* u : rows) {
    const BitCounts& c = u->counts;
    const Mismatch& m = Shown(*u);
    std::vector<std::string> row = {Shorten(Printable(u->name), 44), DTypeCell(*u), ShapeCell(*u)};
    const bool counted = u->on_a && u->on_b && (c.compared > 0 || c.masked > 0);
    row.push_back(counted ? fmt::format("{}", c.compared) : "-");
    row.push_back(counted ? fmt::format("{}", c.mismatches) : "-");
    row.push_back(counted && c.masked > 0 ? fmt::format("{}", c.masked) : "-");
    if (m.index >= 0) {
      const auto ulp = UlpDistance(u->dtype_a, m.word_a, m.word_b);
      row.push_back(Shorten(Printable(u->first_at), 40));
      row.push_back(WordHex(u->dtype_a, m.word_a));
      row.push_back(WordHex(u->dtype_a, m.word_b));
      row.push_back(ulp ? fmt::format("{}", *ulp) : "-");
    } else {
      row.insert(row.end(), 4, "-");
    }
    row.push_back(c.max_ulp_index >= 0 ? fmt::format("{}", c.max_ulp) : "-");
    row.push_back(c.max_ulp_index >= 0 ? fmt::format("{:.4g}", c.max_abs) : "-");
    row.push_back(ReasonCell(*u));
    cells.push_back(std::move(row));
  }
  std::string out;
  if (cells.size() > 1) {
    std::vector<size_t> widths(cells[0].size(), 0);
    for (const auto& row : cells) {
      for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    }
    for (const auto& row : cells) {
      std::string line;
      for (size_t i = 0; i < row.size(); ++i) {
        const bool right = i >= 3 && i <= 11 && i != 6;
        line += i == 0 ? "" : "  ";
        line += i + 1 == row.size() ? row[i]
                : right             ? fmt::format("{:>{}}", row[i], widths[i])
                                    : fmt::format("{:<{}}", row[i], widths[i]);
      }
      out += line + "\n";
    }
  }
  if (more > 0) out += fmt::format("... and {} more (--top 0 shows all)\n", more);
  if (equal > 0) out += fmt::format("{} {} equal\n", equal, equal == 1 ? "tensor" : "tensors");
  for (const Unit* u : rows) {
    if (u->note.empty() && u->diagnosis.empty()) continue;
    out += "  " + Printable(u->name) + ": " + Printable(u->note);
    if (!u->diagnosis.empty()) {
      const BitCounts& d = u->diagnosis_counts;
      out += fmt::format("{}diagnosis, {}: {} of {} differ, max ulp {}, max abs {:.4g}",
                         u->note.empty() ? "" : "; ", u->diagnosis, d.mismatches, d.compared,
                         d.max_ulp, d.max_abs);
    }
    out += "\n";
  }
  if (!report.first_failing.empty() && report.units.size() > 1) {
    out += "first in order of execution: " + Printable(report.first_failing) + "\n";
  }
  if (!report.divergences.empty()) {
    out += fmt::format(
        "{} of {} sequences hold the same tokens; first differing token (sequence, token):",
        report.same_sequences, std::max(report.sequences_a, report.sequences_b));
    const size_t n = std::min<size_t>(report.divergences.size(), 12);
    for (size_t i = 0; i < n; ++i) {
      out += fmt::format(" ({}, {})", Printable(report.divergences[i].sequence),
                         TokenIndex(report.divergences[i]));
    }
    out += n < report.divergences.size() ? " ...\n" : "\n";
  }
  if (!report.unpaired.empty()) {
    size_t on_a = 0;
    for (const TokenPlace& t : report.unpaired) on_a += t.on_a ? 1 : 0;
    out += fmt::format("unpaired tokens: {} on A, {} on B; first:", on_a,
                       report.unpaired.size() - on_a);
    for (size_t i = 0; i < std::min<size_t>(report.unpaired.size(), 6); ++i) {
      const TokenPlace& t = report.unpaired[i];
      out += fmt::format(" {}:({}, {})", t.on_a ? "A" : "B", Printable(t.sequence), TokenIndex(t));
    }
    out += report.unpaired.size() > 6 ? " ...\n" : "\n";
  }
  for (size_t t = 0; t < report.tiers.size(); ++t) {
    const int64_t inside = report.totals.compared - report.totals.outside[t];
    out +=
        fmt::format("tier {}: {} of {} elements inside (beside the verdict, never instead of it)\n",
                    Printable(report.tiers[t].name), inside, report.totals.compared);
  }
  for (const std::string& note : report.notes) out += "note: " + Printable(note) + "\n";
  const Scope& s = report.scope;
  if (!s.only.empty() || !s.ignore.empty()) {
    out += fmt::format("scope: only [{}], ignoring [{}]; {} names left out\n",
                       fmt::join(s.only, ", "), fmt::join(s.ignore, ", "), s.excluded.size());
  }
  if (s.paired_only) out += "scope: paired tokens only\n";
  if (!s.mask.empty()) out += "mask: " + Printable(s.mask) + "\n";
  std::string verdict(VerdictName(report.verdict));
  std::transform(verdict.begin(), verdict.end(), verdict.begin(),
                 [](char c) { return static_cast<char>(std::toupper(c)); });
  out += verdict + ": " + report.why +
         (report.reason.empty() ? "" : fmt::format(" ({})", report.reason)) + "\n";
  return out;
}

}  // namespace tare::compare
