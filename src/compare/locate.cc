#include "compare/locate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <map>
#include <optional>
#include <set>

#include "base/reasons.h"

namespace tare::compare {
namespace {

struct Named {
  std::vector<int64_t> frames;
  std::map<int64_t, const DumpRecord*> at;
};

std::map<std::string, Named> ByName(const Dump& dump) {
  std::map<std::string, Named> out;
  for (const DumpRecord& r : dump.records()) {
    if (r.point.role == TapRole::kExpected || !r.point.per_row) continue;
    out[r.point.name].frames.push_back(r.frame);
    out[r.point.name].at[r.frame] = &r;
  }
  return out;
}

// One differing row of a tensor.
struct RowDifference {
  const RowRange* range = nullptr;
  int64_t offset = 0;  // row within the range
  int64_t position() const { return range->position + offset; }
};

class Locator {
 public:
  Locator(const Dump& a, const Dump& b) : a_(a), b_(b), names_a_(ByName(a)), names_b_(ByName(b)) {}

  // Rows of `name` that differ, in the order of side A. Needs payloads unless digests settle it.
  Result<std::vector<RowDifference>> DifferingRows(const std::string& name);
  const RowPairing& Pairing(const std::string& name);
  // Positions 0..p of the sequence of `row` are all paired for `name`.
  bool CoversHistory(const std::string& name, const RowDifference& row);
  const DumpRecord* OnA(const std::string& name, int64_t frame) const {
    return Find(names_a_, name, frame);
  }
  const DumpRecord* OnB(const std::string& name, int64_t frame) const {
    return Find(names_b_, name, frame);
  }
  bool Both(const std::string& name) const {
    return names_a_.count(name) > 0 && names_b_.count(name) > 0;
  }
  Status FillSite(const RowDifference& row, const std::string& name, Site* site);

 private:
  static const DumpRecord* Find(const std::map<std::string, Named>& names, const std::string& name,
                                int64_t frame) {
    const auto at = names.find(name);
    if (at == names.end()) return nullptr;
    const auto record = at->second.at.find(frame);
    return record == at->second.at.end() ? nullptr : record->second;
  }

  const Dump& a_;
  const Dump& b_;
  std::map<std::string, Named> names_a_, names_b_;
  std::map<std::pair<std::vector<int64_t>, std::vector<int64_t>>, RowPairing> pairings_;
};

const RowPairing& Locator::Pairing(const std::string& name) {
  const Named& na = names_a_.at(name);
  const Named& nb = names_b_.at(name);
  const auto key = std::make_pair(na.frames, nb.frames);
  const auto at = pairings_.find(key);
  if (at != pairings_.end()) return at->second;
  return pairings_.emplace(key, PairRows(a_, na.frames, b_, nb.frames)).first->second;
}

Result<std::vector<RowDifference>> Locator::DifferingRows(const std::string& name) {
  std::vector<RowDifference> out;
  const RowPairing& pairing = Pairing(name);
  for (const RowRange& range : pairing.ranges) {
    const DumpRecord& ra = *OnA(name, range.frame_a);
    const DumpRecord& rb = *OnB(name, range.frame_b);
    const bool same_place = pairing.displaced.count({range.frame_a, range.frame_b}) == 0;
    if (same_place && ra.digest == rb.digest && ra.dtype == rb.dtype && ra.shape == rb.shape)
      continue;
    if (ra.dtype != rb.dtype || ra.shard < 0 || rb.shard < 0) {
      out.push_back({&range, 0});  // somewhere in the range; the bits are not there to say where
      continue;
    }
    TARE_ASSIGN_OR_RETURN(const Tensor ta, a_.Payload(ra));
    TARE_ASSIGN_OR_RETURN(const Tensor tb, b_.Payload(rb));
    const int64_t width_a = ta.dim(0) == 0 ? 0 : ta.size_bytes() / ta.dim(0);
    const int64_t width_b = tb.dim(0) == 0 ? 0 : tb.size_bytes() / tb.dim(0);
    for (int64_t i = 0; i < range.rows; ++i) {
      const int64_t x = range.row_a + i, y = range.row_b + i;
      const bool equal = x < ta.dim(0) && y < tb.dim(0) && width_a == width_b &&
                         std::memcmp(static_cast<const char*>(ta.data()) + x * width_a,
                                     static_cast<const char*>(tb.data()) + y * width_b,
                                     static_cast<size_t>(width_a)) == 0;
      if (!equal) out.push_back({&range, i});
    }
  }
  return out;
}

bool Locator::CoversHistory(const std::string& name, const RowDifference& row) {
  // By history, not by name: the sequence may be called otherwise in another frame.
  const TapFrame& frame = a_.frames()[static_cast<size_t>(row.range->frame_a)].frame;
  std::set<TokenHash> needed;
  const TapRun* run = nullptr;
  for (const TapRun& r : frame.runs) {
    const int64_t at = row.range->row_a + row.offset;
    if (at >= r.row && at < r.row + static_cast<int64_t>(r.tokens.size())) run = &r;
  }
  if (run == nullptr) return false;
  // Walk back through the runs that are paired: position p, then the run that ends where this
  // begins.
  TokenHash want = run->history;
  int64_t position = run->position;
  const auto paired = [&](int64_t frame_a, int64_t first_row, int64_t count) {
    int64_t covered = 0;
    for (const RowRange& r : Pairing(name).ranges) {
      if (r.frame_a != frame_a) continue;
      const int64_t begin = std::max(r.row_a, first_row),
                    end = std::min(r.row_a + r.rows, first_row + count);
      covered += std::max<int64_t>(0, end - begin);
    }
    return covered >= count;
  };
  if (!paired(row.range->frame_a, run->row, row.range->row_a + row.offset - run->row + 1))
    return false;
  while (position > 0) {
    bool stepped = false;
    for (const int64_t f : names_a_.at(name).frames) {
      for (const TapRun& r : a_.frames()[static_cast<size_t>(f)].frame.runs) {
        const int64_t count = static_cast<int64_t>(r.tokens.size());
        // The run holds the token before `position`; any part of it up to there will do.
        if (r.position >= position || r.position + count < position) continue;
        const int64_t take = position - r.position;
        if (ExtendTokenHash(r.history, std::span<const int32_t>(r.tokens).first(
                                           static_cast<size_t>(take))) != want ||
            !paired(f, r.row, take)) {
          continue;
        }
        want = r.history;
        position = r.position;
        stepped = true;
        break;
      }
      if (stepped) break;
    }
    if (!stepped) return false;
  }
  return true;
}

Status Locator::FillSite(const RowDifference& row, const std::string& name, Site* site) {
  const DumpRecord& ra = *OnA(name, row.range->frame_a);
  const DumpRecord& rb = *OnB(name, row.range->frame_b);
  site->name = name;
  site->op = ra.point.op;
  site->layer = ra.point.layer;
  site->phase_a = TapPhaseName(a_.frames()[static_cast<size_t>(ra.frame)].frame.phase);
  site->phase_b = TapPhaseName(b_.frames()[static_cast<size_t>(rb.frame)].frame.phase);
  site->sequence = row.range->sequence;
  site->position = row.position();
  site->dtype = ra.dtype;
  site->inputs = ra.point.inputs;
  site->frame_a = ra.frame;
  site->frame_b = rb.frame;
  for (const TapRun& run : a_.frames()[static_cast<size_t>(ra.frame)].frame.runs) {
    const int64_t at = row.range->row_a + row.offset - run.row;
    if (at >= 0 && at < static_cast<int64_t>(run.tokens.size()))
      site->token = run.tokens[static_cast<size_t>(at)];
  }
  if (ra.shard < 0 || rb.shard < 0 || ra.dtype != rb.dtype) return Ok();
  TARE_ASSIGN_OR_RETURN(const Tensor ta, a_.Payload(ra));
  TARE_ASSIGN_OR_RETURN(const Tensor tb, b_.Payload(rb));
  const int64_t x = row.range->row_a + row.offset, y = row.range->row_b + row.offset;
  if (x >= ta.dim(0) || y >= tb.dim(0) || ta.elements() / ta.dim(0) != tb.elements() / tb.dim(0))
    return Ok();
  const int64_t width = ta.elements() / ta.dim(0);
  for (int64_t i = 0; i < width; ++i) {
    const uint64_t wa = LoadWord(ra.dtype, ta.data(), x * width + i),
                   wb = LoadWord(rb.dtype, tb.data(), y * width + i);
    if (wa == wb) continue;
    site->word_a = wa;
    site->word_b = wb;
    site->words_known = true;
    site->coordinate = Coordinate(Shape(ra.shape.begin() + 1, ra.shape.end()), i);
    break;
  }
  return Ok();
}

// Weight hashes of the versions in use are on both sides (equality was asked before).
bool WeightsProven(const Dump& a, const Dump& b) {
  const auto known = [](const Dump& dump) {
    std::set<std::string> versions;
    for (const DumpWeights& w : dump.manifest().weights) versions.insert(w.version);
    return versions;
  };
  const std::set<std::string> ka = known(a), kb = known(b);
  return std::all_of(a.frames().begin(), a.frames().end(), [&](const DumpFrame& f) {
    return ka.count(f.frame.weight_version) > 0 && kb.count(f.frame.weight_version) > 0;
  });
}

}  // namespace

Result<LocateReport> Locate(const Dump& a, const Dump& b, const DiffOptions& options,
                            const Tensor* embedding) {
  LocateReport out;
  out.a = a.path();
  out.b = b.path();
  TARE_ASSIGN_OR_RETURN(const Report diff, DiffDumps(a, b, options, embedding));
  out.notes = diff.notes;
  const auto say = [&](Verdict verdict, std::string_view code, const std::string& detail) {
    out.verdict = verdict;
    out.reason = code;
    out.why = detail;
    if (const Reason* known = FindReason(code))
      out.why += fmt::format("{}{}", detail.empty() ? "" : ": ", known->sentence);
  };
  if (diff.verdict == Verdict::kRefused || diff.reason == reason::kStaleCapture) {
    out.verdict = diff.verdict;
    out.reason = diff.reason;
    out.why = diff.why;
    return out;
  }
  if (!diff.unpaired.empty()) {
    const TokenPlace& t = diff.unpaired.front();
    out.notes.push_back(fmt::format(
        "{} tokens have no partner, the first on {} at sequence {} position {}; only paired "
        "tokens are located",
        diff.unpaired.size(), t.on_a ? "A" : "B", Printable(t.sequence), t.position));
  }

  Locator locator(a, b);
  std::map<int, LayerRow> layers;
  std::map<int, std::map<std::string, int64_t>> first_tokens;
  const Unit* first = nullptr;
  std::vector<RowDifference> first_rows;
  // Units come in the order of execution.
  std::map<std::string, const DumpRecord*> any;
  for (const DumpRecord& r : a.records()) any.emplace(r.point.name, &r);
  for (const Unit& unit : diff.units) {
    if (!unit.on_a || !unit.on_b || unit.role == TapRole::kMask) continue;
    const auto record = any.find(unit.name);
    const int layer = record == any.end() ? -1 : record->second->point.layer;
    LayerRow& row = layers[layer];
    row.layer = layer;
    ++row.tensors;
    const bool differs = unit.counts.mismatches > 0 || unit.verdict == Verdict::kFail;
    if (!differs) continue;
    ++row.differing;
    if (row.first_tensor.empty()) row.first_tensor = unit.name;
    std::vector<RowDifference> rows;
    if (locator.Both(unit.name)) {
      TARE_ASSIGN_OR_RETURN(rows, locator.DifferingRows(unit.name));
      for (const RowDifference& d : rows) {
        auto [at, fresh] = first_tokens[layer].emplace(d.range->sequence, d.position());
        if (!fresh) at->second = std::min(at->second, d.position());
      }
    }
    if (first == nullptr) {
      first = &unit;
      first_rows = std::move(rows);
    }
  }
  for (auto& [layer, row] : layers) {
    for (const auto& [sequence, position] : first_tokens[layer])
      row.first_tokens.emplace_back(sequence, position);
    out.layers.push_back(std::move(row));
  }
  if (first == nullptr) {
    if (diff.verdict == Verdict::kPass) {
      say(Verdict::kInconclusive, reason::kNoDifference,
          fmt::format("{} elements compared", diff.totals.compared));
    } else {
      out.verdict = diff.verdict;
      out.reason = diff.reason;
      out.why = diff.why;
    }
    return out;
  }

  Site& site = out.site;
  out.found = true;
  site.mismatches = first->counts.mismatches;
  site.rows_differing = static_cast<int64_t>(first_rows.size());
  const DumpRecord& record = *any.at(first->name.substr(0, first->name.find(" @ ")));
  const RowDifference* earliest = nullptr;
  for (const RowDifference& d : first_rows) {
    if (earliest == nullptr || d.position() < earliest->position()) earliest = &d;
  }
  if (earliest != nullptr) {
    TARE_RETURN_IF_ERROR(locator.FillSite(*earliest, first->name, &site));
  } else {
    site.name = first->name;
    site.op = record.point.op;
    site.layer = record.point.layer;
    site.inputs = record.point.inputs;
    site.dtype = first->dtype_a;
    site.coordinate = first->first_coordinate;
    site.words_known = first->counts.first.index >= 0;
    site.word_a = first->counts.first.word_a;
    site.word_b = first->counts.first.word_b;
  }

  // What a claim of cause needs.
  std::string_view weakest = reason::kCandidateOnly;
  if (record.point.inputs.empty() && record.point.role != TapRole::kSentinel) {
    site.unproven.push_back("its inputs are not declared");
    weakest = reason::kMissingCapture;
  }
  for (const std::string& input : record.point.inputs) {
    const auto unit = std::find_if(diff.units.begin(), diff.units.end(),
                                   [&](const Unit& u) { return u.name == input; });
    if (unit == diff.units.end() || !unit->on_a || !unit->on_b) {
      site.unproven.push_back(
          fmt::format("input {} was not captured on both sides", Printable(input)));
      weakest = reason::kMissingCapture;
    } else if (unit->verdict != Verdict::kPass) {
      site.unproven.push_back(fmt::format("input {} is {}", Printable(input), unit->reason));
    } else if (earliest != nullptr && locator.Both(input) &&
               !locator.CoversHistory(input, *earliest)) {
      site.unproven.push_back(
          fmt::format("input {} was not compared at every position from 0 to {} of its sequence: a "
                      "single position only narrows",
                      Printable(input), earliest->position()));
    }
  }
  if (earliest != nullptr && !locator.CoversHistory(first->name, *earliest)) {
    site.unproven.push_back(fmt::format(
        "earlier positions of the sequence were not compared: the first differing token "
        "may lie before {}",
        earliest->position()));
  }
  if (!WeightsProven(a, b)) site.unproven.push_back("weight hashes of both sides are not recorded");
  for (const Dump* dump : {&a, &b}) {
    int64_t checked = 0;
    TARE_RETURN_IF_ERROR(FindStaleFrames(*dump, embedding, &checked).status());
    if (checked > 0) continue;
    site.unproven.push_back(
        fmt::format("no sentinel shows that the frames of {} are fresh", dump->path()));
    if (weakest == reason::kCandidateOnly && site.unproven.size() == 1)
      weakest = reason::kNoSentinel;
  }
  const std::string where =
      site.position >= 0 ? fmt::format("{} ({}), layer {}, sequence {} position {}", site.name,
                                       site.op, site.layer, Printable(site.sequence), site.position)
                         : fmt::format("{} ({}), layer {}", site.name, site.op, site.layer);
  if (site.unproven.empty()) {
    say(Verdict::kFail, reason::kFirstDivergence, where);
  } else {
    say(Verdict::kInconclusive, weakest, "candidate " + where);
  }
  return out;
}

std::string LocateTable(const LocateReport& r) {
  std::string out =
      "layer  tensors  differ  first tensor in execution order              first differing token "
      "(sequence@position)\n";
  for (const LayerRow& row : r.layers) {
    std::string tokens;
    for (size_t i = 0; i < std::min<size_t>(row.first_tokens.size(), 4); ++i) {
      tokens += fmt::format("{}{}@{}", i == 0 ? "" : " ", Printable(row.first_tokens[i].first),
                            row.first_tokens[i].second);
    }
    if (row.first_tokens.size() > 4)
      tokens += fmt::format(" and {} more sequences", row.first_tokens.size() - 4);
    out +=
        fmt::format("{:>5}  {:>7}  {:>6}  {:<43}  {}\n",
                    row.layer < 0 ? "-" : fmt::format("{}", row.layer), row.tensors, row.differing,
                    row.first_tensor.empty() ? "equal" : Printable(row.first_tensor), tokens);
  }
  if (r.found) {
    const Site& s = r.site;
    out += fmt::format("\nfirst divergence: {}\n  operator   {}\n  layer      {}\n",
                       Printable(s.name), Printable(s.op),
                       s.layer < 0 ? "outside the layers" : fmt::format("{}", s.layer));
    if (s.position >= 0) {
      out += fmt::format("  token      sequence {}, position {}, id {} (A: {}, B: {})\n",
                         Printable(s.sequence), s.position, s.token, s.phase_a, s.phase_b);
    }
    if (s.words_known) {
      const auto ulp = UlpDistance(s.dtype, s.word_a, s.word_b);
      out += fmt::format("  element    {}: A {} B {}{}\n", CoordinateText(s.coordinate),
                         WordHex(s.dtype, s.word_a), WordHex(s.dtype, s.word_b),
                         ulp ? fmt::format(", {} ulp", *ulp) : "");
    }
    out += fmt::format("  differing  {} elements in {} rows\n  inputs     {}\n", s.mismatches,
                       s.rows_differing,
                       s.inputs.empty() ? "none declared"
                                        : Printable(fmt::format("{}", fmt::join(s.inputs, ", "))));
    for (const std::string& u : s.unproven) out += "  unproven   " + u + "\n";
  }
  for (const std::string& note : r.notes) out += "note: " + Printable(note) + "\n";
  std::string verdict(VerdictName(r.verdict));
  std::transform(verdict.begin(), verdict.end(), verdict.begin(), [](char c) {
    return static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  });
  return out + verdict + ": " + r.why + (r.reason.empty() ? "" : fmt::format(" ({})", r.reason)) +
         "\n";
}

Json LocateJson(const LocateReport& r) {
  Json j = {
      {"schema", "tare.locate/1"}, {"a", r.a}, {"b", r.b}, {"verdict", VerdictName(r.verdict)}};
  j["reason"] = r.reason.empty() ? Json(nullptr) : Json(r.reason);
  j["why"] = r.why;
  Json layers = Json::array();
  for (const LayerRow& row : r.layers) {
    Json tokens = Json::array();
    for (const auto& [sequence, position] : row.first_tokens)
      tokens.push_back({{"sequence", sequence}, {"position", position}});
    layers.push_back({{"layer", row.layer},
                      {"tensors", row.tensors},
                      {"differing", row.differing},
                      {"first_tensor", row.first_tensor},
                      {"first_tokens", std::move(tokens)}});
  }
  j["layers"] = std::move(layers);
  if (r.found) {
    const Site& s = r.site;
    Json site = {{"name", s.name},
                 {"op", s.op},
                 {"layer", s.layer},
                 {"sequence", s.sequence},
                 {"position", s.position},
                 {"token", s.token},
                 {"phase_a", s.phase_a},
                 {"phase_b", s.phase_b},
                 {"coordinate", s.coordinate},
                 {"dtype", DTypeName(s.dtype)},
                 {"mismatches", s.mismatches},
                 {"rows_differing", s.rows_differing},
                 {"inputs", s.inputs},
                 {"proven", s.unproven.empty()},
                 {"unproven", s.unproven}};
    if (s.words_known) {
      site["a"] = WordHex(s.dtype, s.word_a);
      site["b"] = WordHex(s.dtype, s.word_b);
    }
    j["site"] = std::move(site);
  }
  j["notes"] = r.notes;
  return j;
}

}  // namespace tare::compare
