#include "compare/dump_diff.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <unordered_map>

#include "base/json.h"
#include "base/reasons.h"
#include "compare/discrete.h"
#include "compare/runner.h"

namespace tare::compare {
namespace {

// Records of one name on one side, by frame.
struct Named {
  std::vector<int64_t> frames;
  std::unordered_map<int64_t, const DumpRecord*> at;
  const DumpRecord* first = nullptr;
};

struct Side {
  const Dump* dump = nullptr;
  std::unordered_map<std::string, Named> rows;    // per-row records
  std::unordered_map<std::string, Named> wholes;  // one value a frame
  std::vector<std::string> order;                 // names of both kinds, by first appearance
  std::map<std::pair<int64_t, std::string>, std::vector<uint8_t>> masks;

  explicit Side(const Dump& d) : dump(&d) {
    std::set<std::string> seen;
    for (const DumpRecord& r : d.records()) {
      if (r.point.role == TapRole::kExpected) continue;
      Named& named = (r.point.per_row ? rows : wholes)[r.point.name];
      if (named.first == nullptr) named.first = &r;
      named.frames.push_back(r.frame);
      named.at[r.frame] = &r;
      if (seen.insert(r.point.name).second) order.push_back(r.point.name);
    }
  }
};

// What a unit still needs to say where an element lies: its pairs in order.
struct Placed {
  int64_t base = 0;
  Shape shape;  // of the pair, rows first when paired by row
  const RowRange* range = nullptr;
  int64_t frame = 0;
};

class Differ {
 public:
  Differ(const Dump& a, const Dump& b, const DiffOptions& options)
      : a_(a), b_(b), options_(options), runner_(options.pool, options.tiers, false, &results_) {}

  Result<Report> Run(const Tensor* embedding);

 private:
  Status DiffRows(const std::string& name);
  Status DiffWholes(const std::string& name);
  Status AddRange(const RowRange& range, const RowPairing& pairing, const DumpRecord& ra,
                  const DumpRecord& rb, Unit* unit);
  Status AddDiscrete(const RowRange& range, int64_t rows, const DumpRecord& ra, const Tensor& ta,
                     const Tensor& tb, Unit* unit);
  Result<std::shared_ptr<const std::vector<uint8_t>>> MaskOf(const RowRange& range, int64_t rows,
                                                             const std::string& name);
  // Null when the mask record is absent.
  Result<const std::vector<uint8_t>*> SideMask(Side* side, int64_t frame, const std::string& name);
  const RowPairing& Pairing(const Named& na, const Named& nb);
  void Locate();

  Side a_, b_;
  const DiffOptions& options_;
  Report report_;
  std::deque<UnitCounts> results_;
  Runner runner_;
  std::vector<std::vector<Placed>> placed_;  // by unit
  std::vector<int64_t> next_base_;
  std::map<std::pair<std::vector<int64_t>, std::vector<int64_t>>, RowPairing> pairings_;
  std::set<std::tuple<bool, std::string, std::string, int64_t>> unpaired_;
  int64_t first_discrete_seq_ = -1;  // of the first decision that differs, on side A
  std::vector<int64_t> unit_seq_;
  bool refused_ = false;
};

const RowPairing& Differ::Pairing(const Named& na, const Named& nb) {
  const auto key = std::make_pair(na.frames, nb.frames);
  const auto at = pairings_.find(key);
  if (at != pairings_.end()) return at->second;
  const RowPairing& p =
      pairings_.emplace(key, PairRows(*a_.dump, na.frames, *b_.dump, nb.frames)).first->second;
  int64_t rows = 0;
  for (const RowRange& r : p.ranges) rows += r.rows;
  report_.paired_tokens = std::max(report_.paired_tokens, rows);
  report_.tokens_a = std::max(report_.tokens_a, p.tokens_a);
  report_.tokens_b = std::max(report_.tokens_b, p.tokens_b);
  for (const TokenPlace& t : p.unpaired) {
    if (unpaired_.emplace(t.on_a, t.weights, t.sequence, t.position).second)
      report_.unpaired.push_back(t);
  }
  return p;
}

Result<const std::vector<uint8_t>*> Differ::SideMask(Side* side, int64_t frame,
                                                     const std::string& name) {
  const auto key = std::make_pair(frame, name);
  const auto cached = side->masks.find(key);
  if (cached != side->masks.end()) return &cached->second;
  const auto named = side->rows.find(name);
  const auto record = named == side->rows.end()
                          ? std::unordered_map<int64_t, const DumpRecord*>::const_iterator()
                          : named->second.at.find(frame);
  if (named == side->rows.end() || record == named->second.at.end() || record->second->shard < 0) {
    return static_cast<const std::vector<uint8_t>*>(nullptr);
  }
  TARE_ASSIGN_OR_RETURN(const Tensor t, side->dump->Payload(*record->second));
  TARE_ASSIGN_OR_RETURN(std::vector<uint8_t> bytes, MaskBytes(t, name));
  return &side->masks.emplace(key, std::move(bytes)).first->second;
}

Result<std::shared_ptr<const std::vector<uint8_t>>> Differ::MaskOf(const RowRange& range,
                                                                   int64_t rows,
                                                                   const std::string& name) {
  std::shared_ptr<std::vector<uint8_t>> out;
  if (name.empty()) return std::shared_ptr<const std::vector<uint8_t>>(out);
  for (const bool first : {true, false}) {
    const int64_t frame = first ? range.frame_a : range.frame_b;
    const int64_t row = first ? range.row_a : range.row_b;
    const Result<const std::vector<uint8_t>*> mask = SideMask(first ? &a_ : &b_, frame, name);
    if (!mask.ok()) {
      Refuse(&report_, reason::kMaskMalformed, mask.status().message());
      refused_ = true;
      return std::shared_ptr<const std::vector<uint8_t>>();
    }
    if (*mask == nullptr) {
      Refuse(&report_, reason::kMaskMissing,
             fmt::format("{} is not in frame {} of {}, or was kept without payload",
                         Printable(name), frame, first ? report_.a : report_.b));
      refused_ = true;
      return std::shared_ptr<const std::vector<uint8_t>>();
    }
    if (row + rows > static_cast<int64_t>((*mask)->size())) {
      Refuse(&report_, reason::kMaskMalformed,
             fmt::format("{} holds {} rows in frame {} of {}, expected one value for each row",
                         Printable(name), (*mask)->size(), frame, first ? report_.a : report_.b));
      refused_ = true;
      return std::shared_ptr<const std::vector<uint8_t>>();
    }
    if (out == nullptr)
      out = std::make_shared<std::vector<uint8_t>>(static_cast<size_t>(rows), uint8_t{1});
    for (int64_t i = 0; i < rows; ++i) {
      (*out)[static_cast<size_t>(i)] &= (**mask)[static_cast<size_t>(row + i)];
    }
  }
  return std::shared_ptr<const std::vector<uint8_t>>(out);
}

Status Differ::AddDiscrete(const RowRange& range, int64_t rows, const DumpRecord& ra,
                           const Tensor& ta, const Tensor& tb, Unit* unit) {
  for (int64_t i = 0; i < rows; ++i) {
    const std::vector<int64_t> x = IntegerRow(ta, range.row_a + i),
                               y = IntegerRow(tb, range.row_b + i);
    const Choice choice = CompareChoice(x, y);
    unit->set_differs += choice == Choice::kSet;
    unit->order_differs += choice == Choice::kOrder;
    unit->duplicates += choice == Choice::kDuplicate;
    if (choice == Choice::kEqual || !unit->note.empty()) continue;
    unit->note = fmt::format("layer {}, sequence {} position {}: A chose [{}], B chose [{}] ({})",
                             ra.point.layer, Printable(range.sequence), range.position + i,
                             fmt::join(x, ", "), fmt::join(y, ", "), ChoiceName(choice));
    // The scores are an input of the decision: they say how near the cutoff was.
    for (const std::string& input : ra.point.inputs) {
      const auto named = a_.rows.find(input);
      if (named == a_.rows.end()) continue;
      const auto at = named->second.at.find(range.frame_a);
      if (at == named->second.at.end() || at->second->shard < 0 || !IsFloat(at->second->dtype))
        continue;
      TARE_ASSIGN_OR_RETURN(const Tensor scores, a_.dump->Payload(*at->second));
      if (range.row_a + i >= scores.dim(0)) continue;
      const int64_t n = scores.elements() / scores.dim(0);
      const char* row =
          static_cast<const char*>(scores.data()) + (range.row_a + i) * n * SizeOf(scores.dtype());
      if (const auto margin =
              CutoffMargin(scores.dtype(), row, n, static_cast<int64_t>(x.size()))) {
        unit->note +=
            fmt::format(", margin at the cutoff {:g}{}", *margin, *margin == 0 ? " (tie)" : "");
      }
      const Result<std::vector<int64_t>> want =
          TopKByContract(scores.dtype(), row, n, static_cast<int64_t>(x.size()));
      if (want.ok()) unit->note += fmt::format("; by contract [{}]", fmt::join(*want, ", "));
      break;
    }
  }
  return Ok();
}

Status Differ::AddRange(const RowRange& range, const RowPairing& pairing, const DumpRecord& ra,
                        const DumpRecord& rb, Unit* unit) {
  int64_t rows = range.rows;
  for (const bool first : {true, false}) {
    const int64_t have = (first ? ra : rb).shape[0] - (first ? range.row_a : range.row_b);
    if (have < rows && unit->reason.empty()) {
      unit->verdict = Verdict::kFail;
      unit->reason = reason::kLengthContract;
      unit->note = fmt::format(
          "{} has {} rows in frame {} of {}: no row for sequence {} position {}", unit->name,
          (first ? ra : rb).shape[0], first ? ra.frame : rb.frame, first ? "A" : "B",
          Printable(range.sequence), range.position + std::max<int64_t>(have, 0));
    }
    rows = std::clamp<int64_t>(have, 0, rows);
  }
  if (rows == 0) return Ok();
  Shape tail(ra.shape.begin() + 1, ra.shape.end());
  const int64_t width = ElementCount(tail).value();
  const std::string& mask_name =
      options_.mask.empty() || unit->role == TapRole::kMask || unit->role == TapRole::kSentinel
          ? ra.point.mask
          : options_.mask;
  TARE_ASSIGN_OR_RETURN(const auto mask, MaskOf(range, rows, mask_name));
  if (refused_) return Ok();
  const size_t u = report_.units.size();
  const int64_t base = next_base_[u];
  Shape shape = {rows};
  shape.insert(shape.end(), tail.begin(), tail.end());
  placed_[u].push_back({base, shape, &range, range.frame_a});
  next_base_[u] += rows * width;
  unit->elements += rows * width;
  unit->rows += rows;

  const bool same_place = pairing.displaced.count({range.frame_a, range.frame_b}) == 0;
  const bool digest_equal =
      same_place && ra.digest == rb.digest && ra.shape == rb.shape && ra.dtype == rb.dtype;
  const bool payloads = ra.shard >= 0 && rb.shard >= 0;
  // A digest stands for the bits. Non-finite values must be seen to know whether they are valid.
  // Without a payload there is nothing to verify: the digest is all that was kept.
  if (digest_equal && (!payloads || (!options_.verify && ra.non_finite == 0))) {
    BitCounts c;
    for (int64_t i = 0; i < rows; ++i) {
      (mask == nullptr || (*mask)[static_cast<size_t>(i)] ? c.compared : c.masked) += width;
    }
    if (ra.non_finite > 0) c.non_finite = c.non_finite_equal = ra.non_finite;
    results_.resize(std::max(results_.size(), u + 1));
    results_[u].counts.Merge(c);
    unit->by_digest = true;
    if (ra.non_finite > 0)
      unit->note = "non-finite values counted at recording; without a payload all count as valid";
    return Ok();
  }
  if (!payloads) {
    if (unit->reason.empty()) {
      const bool known = same_place && ra.shape == rb.shape;
      unit->verdict = known ? Verdict::kFail : Verdict::kInconclusive;
      unit->reason = reason::kPayloadMissing;
      unit->note =
          known ? fmt::format("digests differ in frame {} of A and {} of B", ra.frame, rb.frame)
                : "rows lie at different places, and no payload was kept to compare them";
    }
    return Ok();
  }
  TARE_ASSIGN_OR_RETURN(const Tensor ta, a_.dump->Payload(ra));
  TARE_ASSIGN_OR_RETURN(const Tensor tb, b_.dump->Payload(rb));
  if (unit->role == TapRole::kDiscrete && !IsFloat(ra.dtype)) {
    TARE_RETURN_IF_ERROR(AddDiscrete(range, rows, ra, ta, tb, unit));
    const bool differs = unit->set_differs + unit->order_differs + unit->duplicates > 0;
    if (differs && (first_discrete_seq_ < 0 || ra.seq < first_discrete_seq_))
      first_discrete_seq_ = ra.seq;
  }
  Pair pair;
  pair.unit = static_cast<int64_t>(u);
  pair.base = base;
  TARE_ASSIGN_OR_RETURN(pair.a, ta.Slice(range.row_a, range.row_a + rows));
  TARE_ASSIGN_OR_RETURN(pair.b, tb.Slice(range.row_b, range.row_b + rows));
  pair.mask = mask;
  pair.mask_repeat = std::max<int64_t>(width, 1);
  runner_.Add(std::move(pair));
  return Ok();
}

Status Differ::DiffRows(const std::string& name) {
  const auto in_a = a_.rows.find(name), in_b = b_.rows.find(name);
  Unit unit;
  unit.name = name;
  unit.on_a = in_a != a_.rows.end();
  unit.on_b = in_b != b_.rows.end();
  if (!unit.on_a && !unit.on_b) return Ok();
  const DumpRecord& first = unit.on_a ? *in_a->second.first : *in_b->second.first;
  unit.role = first.point.role;
  placed_.emplace_back();
  next_base_.push_back(0);
  unit_seq_.push_back(first.seq);
  const auto trailing = [](const DumpRecord& r) {
    Shape s = r.shape;
    s[0] = -1;  // rows pair by token, their number is no part of the shape
    return s;
  };
  if (unit.on_a) {
    unit.dtype_a = in_a->second.first->dtype;
    unit.shape_a = in_a->second.first->shape;
  }
  if (unit.on_b) {
    unit.dtype_b = in_b->second.first->dtype;
    unit.shape_b = in_b->second.first->shape;
  }
  if (unit.on_a && unit.on_b) {
    const RowPairing& pairing = Pairing(in_a->second, in_b->second);
    bool comparable = true;
    for (const Named* named : {&in_a->second, &in_b->second}) {
      for (const auto& [frame, r] : named->at) {
        if (trailing(*r) != trailing(*in_a->second.first)) comparable = false;
        if (r->dtype != unit.dtype_a) unit.dtype_b = r->dtype;
      }
    }
    if (comparable) unit.shape_a = unit.shape_b;
    if (comparable && unit.dtype_a == unit.dtype_b) {
      for (const RowRange& range : pairing.ranges) {
        TARE_RETURN_IF_ERROR(AddRange(range, pairing, *in_a->second.at.at(range.frame_a),
                                      *in_b->second.at.at(range.frame_b), &unit));
        if (refused_) return Ok();
      }
      unit.shape_a[0] = unit.shape_b[0] = unit.rows;
      for (const Named* named : {&in_a->second, &in_b->second}) {
        for (const auto& [frame, r] : named->at) {
          const Dump& dump = named == &in_a->second ? *a_.dump : *b_.dump;
          int64_t real = 0;
          for (const TapRun& run : dump.frames()[static_cast<size_t>(frame)].frame.runs) {
            real += std::clamp<int64_t>(r->shape[0] - run.row, 0,
                                        static_cast<int64_t>(run.tokens.size()));
          }
          unit.padding_dropped += r->shape[0] - real;
        }
      }
    }
    // Nothing paired: the tokens say why, not this tensor.
    if (unit.elements == 0 && unit.reason.empty() && pairing.ranges.empty()) {
      unit.verdict = Verdict::kInconclusive;
      unit.reason = reason::kUnpairedTokens;
    }
  }
  report_.units.push_back(std::move(unit));
  return Ok();
}

Status Differ::DiffWholes(const std::string& name) {
  const auto in_a = a_.wholes.find(name), in_b = b_.wholes.find(name);
  // (weights, step) to the records of each side, in order.
  std::map<std::pair<std::string, int64_t>,
           std::pair<std::vector<const DumpRecord*>, std::vector<const DumpRecord*>>>
      groups;
  const auto collect = [&](const Side& side, const auto& named, bool first) {
    if (named == side.wholes.end()) return;
    for (const int64_t f : named->second.frames) {
      const TapFrame& frame = side.dump->frames()[static_cast<size_t>(f)].frame;
      auto& group = groups[{frame.weight_version, frame.step}];
      (first ? group.first : group.second).push_back(named->second.at.at(f));
    }
  };
  collect(a_, in_a, true);
  collect(b_, in_b, false);
  for (const auto& [key, group] : groups) {
    const size_t n = std::max(group.first.size(), group.second.size());
    for (size_t i = 0; i < n; ++i) {
      const DumpRecord* ra = i < group.first.size() ? group.first[i] : nullptr;
      const DumpRecord* rb = i < group.second.size() ? group.second[i] : nullptr;
      Unit unit;
      unit.name = groups.size() == 1 && n == 1 ? name
                  : n == 1 ? fmt::format("{} @ {} step {}", name, key.first, key.second)
                           : fmt::format("{} @ {} step {} #{}", name, key.first, key.second, i);
      unit.on_a = ra != nullptr;
      unit.on_b = rb != nullptr;
      unit.role = (ra != nullptr ? ra : rb)->point.role;
      placed_.emplace_back();
      next_base_.push_back(0);
      unit_seq_.push_back((ra != nullptr ? ra : rb)->seq);
      if (ra != nullptr) {
        unit.dtype_a = ra->dtype;
        unit.shape_a = ra->shape;
        unit.elements = ElementCount(ra->shape).value();
      }
      if (rb != nullptr) {
        unit.dtype_b = rb->dtype;
        unit.shape_b = rb->shape;
      }
      if (ra != nullptr && rb != nullptr && ra->dtype == rb->dtype && ra->shape == rb->shape) {
        const size_t u = report_.units.size();
        placed_[u].push_back({0, ra->shape, nullptr, ra->frame});
        unit.digest_a = ra->digest;
        unit.digest_b = rb->digest;
        const bool payloads = ra->shard >= 0 && rb->shard >= 0;
        if (ra->digest == rb->digest && (!payloads || (!options_.verify && ra->non_finite == 0))) {
          results_.resize(std::max(results_.size(), u + 1));
          results_[u].counts.compared = unit.elements;
          results_[u].counts.non_finite = results_[u].counts.non_finite_equal = ra->non_finite;
          unit.by_digest = true;
        } else if (!payloads) {
          unit.verdict = Verdict::kFail;
          unit.reason = reason::kPayloadMissing;
        } else {
          Pair pair;
          pair.unit = static_cast<int64_t>(u);
          TARE_ASSIGN_OR_RETURN(pair.a, a_.dump->Payload(*ra));
          TARE_ASSIGN_OR_RETURN(pair.b, b_.dump->Payload(*rb));
          runner_.Add(std::move(pair));
        }
      }
      report_.units.push_back(std::move(unit));
    }
  }
  return Ok();
}

void Differ::Locate() {
  for (size_t u = 0; u < report_.units.size() && u < results_.size(); ++u) {
    Unit& unit = report_.units[u];
    unit.counts = results_[u].counts;
    const Mismatch& m =
        unit.counts.first.index >= 0 ? unit.counts.first : unit.counts.first_non_finite;
    if (m.index < 0 || placed_[u].empty()) continue;
    const auto at = std::upper_bound(placed_[u].begin(), placed_[u].end(), m.index,
                                     [](int64_t index, const Placed& p) { return index < p.base; });
    const Placed& p = *std::prev(at);
    unit.first_coordinate = Coordinate(p.shape, m.index - p.base);
    if (p.range == nullptr) {
      unit.first_at = CoordinateText(unit.first_coordinate);
      continue;
    }
    unit.first_sequence = p.range->sequence;
    unit.first_position = p.range->position + unit.first_coordinate[0];
    unit.first_coordinate.erase(unit.first_coordinate.begin());
    unit.first_at = fmt::format("{}@{} {}", p.range->sequence, unit.first_position,
                                CoordinateText(unit.first_coordinate));
  }
}

Result<Report> Differ::Run(const Tensor* embedding) {
  report_.kind = "dumps";
  report_.ordered = true;
  report_.a = a_.dump->path();
  report_.b = b_.dump->path();
  report_.tiers = options_.tiers;
  report_.scope.only = options_.only;
  report_.scope.ignore = options_.ignore;
  report_.scope.mask = options_.mask;
  report_.scope.paired_only = options_.paired_only;
  for (const Side* side : {&a_, &b_}) {
    if (side->dump->cut().empty()) continue;
    report_.cut = true;
    report_.notes.push_back(fmt::format("{} is cut: {}", side->dump->path(), side->dump->cut()));
  }
  for (const DumpWeights& x : a_.dump->manifest().weights) {
    for (const DumpWeights& y : b_.dump->manifest().weights) {
      if (x.version == y.version && x.sha256 != y.sha256) {
        Refuse(&report_, reason::kWeightHashMismatch,
               fmt::format("{} is {} on A and {} on B", Printable(x.version), Hex(x.sha256),
                           Hex(y.sha256)));
        return std::move(report_);
      }
    }
  }
  if (options_.verify) {
    for (const Side* side : {&a_, &b_}) {
      for (const DumpRecord& r : side->dump->records()) {
        if (r.shard < 0) continue;
        if (const Status s = side->dump->Verify(r, options_.pool); !s.ok()) {
          Refuse(&report_, reason::kDigestMismatch, s.message());
          return std::move(report_);
        }
      }
    }
  }
  bool stale = false;
  for (const Side* side : {&a_, &b_}) {
    TARE_ASSIGN_OR_RETURN(const std::vector<StaleFrame> frames,
                          FindStaleFrames(*side->dump, embedding, nullptr));
    for (const StaleFrame& f : frames) {
      stale = true;
      report_.notes.push_back(fmt::format("stale frame {} of {}: {} {}", f.frame,
                                          side->dump->path(), f.name, f.detail));
    }
  }
  if (stale) {
    // Everything captured in such a step is void, equal or not.
    report_.verdict = Verdict::kInconclusive;
    report_.reason = reason::kStaleCapture;
    report_.why =
        fmt::format("nothing was compared: {}", FindReason(reason::kStaleCapture)->sentence);
    return std::move(report_);
  }

  std::vector<std::string> names = a_.order;
  std::set<std::string> known(names.begin(), names.end());
  for (const std::string& name : b_.order) {
    if (known.insert(name).second) names.push_back(name);
  }
  for (const std::string& name : names) {
    if (!InScope(name, options_)) {
      report_.scope.excluded.push_back(name);
      continue;
    }
    TARE_RETURN_IF_ERROR(DiffRows(name));
    if (refused_) return std::move(report_);
    TARE_RETURN_IF_ERROR(DiffWholes(name));
  }
  runner_.Finish();
  Locate();
  // Values after a decision that differs cannot agree: they are shown, but are not the finding.
  if (first_discrete_seq_ >= 0) {
    for (size_t u = 0; u < report_.units.size(); ++u) {
      Unit& unit = report_.units[u];
      if (unit.role == TapRole::kValue && unit_seq_[u] > first_discrete_seq_ &&
          unit.reason.empty() && unit.counts.mismatches > 0) {
        unit.verdict = Verdict::kFail;
        unit.reason = reason::kDecisionsDiffer;
      }
    }
  }
  int64_t padding = 0;
  for (const Unit& unit : report_.units) padding = std::max(padding, unit.padding_dropped);
  if (padding > 0)
    report_.notes.push_back(
        fmt::format("{} padding rows dropped (per tensor, both sides together)", padding));
  Conclude(&report_, !options_.mask.empty());
  return std::move(report_);
}

}  // namespace

Result<Report> DiffDumps(const Dump& a, const Dump& b, const DiffOptions& options,
                         const Tensor* embedding) {
  TARE_RETURN_IF_ERROR(CheckOptions(options));
  return Differ(a, b, options).Run(embedding);
}

}  // namespace tare::compare
