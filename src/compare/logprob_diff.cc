#include "compare/logprob_diff.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <unordered_map>

#include "base/json.h"
#include "base/reasons.h"
#include "compare/runner.h"
#include "tensor/tap.h"

namespace tare::compare {
namespace {

struct Ref {
  int32_t sequence;
  int32_t index;  // among the scored tokens
};

struct Group {
  std::vector<Ref> a, b;
  bool done = false;
};

// The history hash covers every token and so the position; the weight version joins it.
struct Key {
  TokenHash hash;
  std::string_view weights;
  bool operator==(const Key& o) const { return hash == o.hash && weights == o.weights; }
};
struct KeyHash {
  size_t operator()(const Key& k) const {
    size_t h;
    std::memcpy(&h, k.hash.data(), sizeof(h));  // already uniform
    return h ^ std::hash<std::string_view>()(k.weights);
  }
};
using Groups = std::unordered_map<Key, Group, KeyHash>;

// Every scored token of a set with its key, in order.
std::vector<std::pair<Key, Ref>> KeysOf(const LogprobSet& set) {
  std::vector<std::pair<Key, Ref>> out;
  for (size_t s = 0; s < set.sequences.size(); ++s) {
    const LogprobSequence& q = set.sequences[s];
    TokenHash hash = ExtendTokenHash({}, q.prompt);
    for (size_t i = 0; i < q.tokens.size(); ++i) {
      hash = ExtendTokenHash(hash, {&q.tokens[i], 1});
      out.push_back({{hash, q.weights}, {static_cast<int32_t>(s), static_cast<int32_t>(i)}});
    }
  }
  return out;
}

bool Present(const LogprobSequence& s, int32_t i) {
  return s.present.empty() || s.present[static_cast<size_t>(i)] != 0;
}

TokenPlace Place(const LogprobSet& set, const Ref& ref, bool on_a) {
  const LogprobSequence& s = set.sequences[static_cast<size_t>(ref.sequence)];
  return {.sequence = s.sequence,
          .position = static_cast<int64_t>(s.prompt.size()) + ref.index,
          .index = ref.index,
          .weights = s.weights,
          .on_a = on_a,
          .token = s.tokens[static_cast<size_t>(ref.index)]};
}

uint64_t Word(const LogprobSet& set, const Ref& r) {
  return set.sequences[static_cast<size_t>(r.sequence)].words[static_cast<size_t>(r.index)];
}

bool Inconsistent(const LogprobSet& set, const std::vector<Ref>& refs) {
  for (size_t i = 1; i < refs.size(); ++i) {
    if (Word(set, refs[i]) != Word(set, refs[0])) return true;
  }
  return false;
}

// Couples the occurrences of one key: sequences of one name first, then in order; what is left over
// on one side meets the other side's first, so that no value goes unseen.
void Couple(const LogprobSet& a, const LogprobSet& b, const Group& g,
            std::vector<std::pair<Ref, Ref>>* out) {
  std::vector<bool> used_a(g.a.size()), used_b(g.b.size());
  const auto take = [&](size_t i, size_t k) {
    used_a[i] = used_b[k] = true;
    out->emplace_back(g.a[i], g.b[k]);
  };
  for (const bool by_name : {true, false}) {
    for (size_t i = 0; i < g.a.size(); ++i) {
      for (size_t k = 0; k < g.b.size() && !used_a[i]; ++k) {
        if (used_b[k]) continue;
        if (!by_name || a.sequences[static_cast<size_t>(g.a[i].sequence)].sequence ==
                            b.sequences[static_cast<size_t>(g.b[k].sequence)].sequence) {
          take(i, k);
        }
      }
    }
  }
  for (size_t i = 0; i < g.a.size(); ++i) {
    if (!used_a[i]) out->emplace_back(g.a[i], g.b[0]);
  }
  for (size_t k = 0; k < g.b.size(); ++k) {
    if (!used_b[k]) out->emplace_back(g.a[0], g.b[k]);
  }
}

// Where sequences of one name and one prompt part.
void FindDivergences(const LogprobSet& a, const LogprobSet& b, Report* report) {
  std::unordered_map<std::string, size_t> in_b;
  for (size_t i = 0; i < b.sequences.size(); ++i) {
    in_b.emplace(b.sequences[i].weights + "\n" + b.sequences[i].sequence, i);
  }
  for (size_t i = 0; i < a.sequences.size(); ++i) {
    const LogprobSequence& x = a.sequences[i];
    const auto at = in_b.find(x.weights + "\n" + x.sequence);
    if (at == in_b.end()) continue;
    const LogprobSequence& y = b.sequences[at->second];
    if (x.prompt != y.prompt) continue;
    if (x.tokens == y.tokens) {
      ++report->same_sequences;
      continue;
    }
    const auto part =
        std::mismatch(x.tokens.begin(), x.tokens.end(), y.tokens.begin(), y.tokens.end());
    if (part.first == x.tokens.end() || part.second == y.tokens.end()) continue;  // one is a prefix
    const Ref ref{static_cast<int32_t>(i), static_cast<int32_t>(part.first - x.tokens.begin())};
    report->divergences.push_back(Place(a, ref, true));
  }
}

std::string KindOf(const LogprobSet& set) {
  std::string kind;
  for (const LogprobSequence& s : set.sequences) {
    if (kind.empty()) kind = s.kind;
    if (s.kind != kind) return "mixed";
  }
  return kind;
}

// Values of one pair of dtypes, gathered from their sequences.
struct Gathered {
  DType dtype_a = DType::kF32;
  DType dtype_b = DType::kF32;
  std::vector<std::pair<Ref, Ref>> pairs;
};

Result<Tensor> Gather(const LogprobSet& set, DType dtype,
                      const std::vector<std::pair<Ref, Ref>>& pairs, bool first) {
  TARE_ASSIGN_OR_RETURN(Tensor t, Tensor::Allocate(dtype, {static_cast<int64_t>(pairs.size())}));
  char* out = static_cast<char*>(t.mutable_data());
  for (const auto& [x, y] : pairs) {
    const uint64_t word = Word(set, first ? x : y);
    std::memcpy(out, &word, static_cast<size_t>(SizeOf(dtype)));  // little-endian
    out += SizeOf(dtype);
  }
  return t;
}

// REQUIRES: a and b are the gathered values of `pairs`, of one dtype; valid has one entry per pair.
std::vector<PositionBucket> CountByPosition(const LogprobSet& set,
                                            const std::vector<std::pair<Ref, Ref>>& pairs,
                                            const Tensor& a, const Tensor& b,
                                            const std::vector<uint8_t>& valid) {
  constexpr int64_t kBuckets = 64;
  std::vector<int64_t> position;
  int64_t longest = 0;
  for (const auto& [x, y] : pairs) {
    const LogprobSequence& s = set.sequences[static_cast<size_t>(x.sequence)];
    position.push_back(static_cast<int64_t>(s.prompt.size()) + x.index);
    longest = std::max(longest, position.back() + 1);
  }
  const int64_t width = std::max<int64_t>(1, (longest + kBuckets - 1) / kBuckets);
  std::vector<PositionBucket> buckets(static_cast<size_t>((longest + width - 1) / width));
  for (size_t i = 0; i < buckets.size(); ++i) {
    buckets[i].begin = static_cast<int64_t>(i) * width;
    buckets[i].end = std::min(buckets[i].begin + width, longest);
  }
  for (size_t i = 0; i < pairs.size(); ++i) {
    if (valid[i] == 0) continue;
    const int64_t at = static_cast<int64_t>(i);
    const BitCounts c = CompareRange(a.dtype(), a.data(), b.data(), at, at + 1);
    PositionBucket& bucket = buckets[static_cast<size_t>(position[i] / width)];
    bucket.compared += c.compared;
    bucket.mismatches += c.mismatches;
    bucket.max_abs = std::max(bucket.max_abs, c.max_abs);
    bucket.sum_abs += c.sum_abs;
  }
  return buckets;
}

}  // namespace

Result<Report> DiffLogprobs(const LogprobSet& a, const LogprobSet& b, const DiffOptions& options) {
  TARE_RETURN_IF_ERROR(CheckOptions(options));
  Report report;
  report.kind = "logprobs";
  report.a = a.name;
  report.b = b.name;
  report.tiers = options.tiers;
  report.scope.paired_only = options.paired_only;
  report.sequences_a = static_cast<int64_t>(a.sequences.size());
  report.sequences_b = static_cast<int64_t>(b.sequences.size());
  const std::string kind_a = KindOf(a), kind_b = KindOf(b);
  if (!kind_a.empty() && !kind_b.empty() && (kind_a != kind_b || kind_a == "mixed")) {
    Refuse(&report, reason::kLogprobKind, fmt::format("A is {}, B is {}", kind_a, kind_b));
    return report;
  }

  Groups groups;
  const std::vector<std::pair<Key, Ref>> keys_a = KeysOf(a), keys_b = KeysOf(b);
  report.tokens_a = static_cast<int64_t>(keys_a.size());
  report.tokens_b = static_cast<int64_t>(keys_b.size());
  for (const auto& [key, ref] : keys_a) groups[key].a.push_back(ref);
  for (const auto& [key, ref] : keys_b) groups[key].b.push_back(ref);
  std::map<std::pair<DType, DType>, Gathered> gathered;
  for (const auto& [key, ref] : keys_a) {
    Group& g = groups.at(key);
    if (g.b.empty()) {
      report.unpaired.push_back(Place(a, ref, true));
      continue;
    }
    if (g.done) continue;
    g.done = true;
    if (Inconsistent(a, g.a)) ++report.self_inconsistent;
    if (Inconsistent(b, g.b)) ++report.self_inconsistent;
    std::vector<std::pair<Ref, Ref>> pairs;
    Couple(a, b, g, &pairs);
    for (const auto& [x, y] : pairs) {
      const DType da = a.sequences[static_cast<size_t>(x.sequence)].dtype;
      const DType db = b.sequences[static_cast<size_t>(y.sequence)].dtype;
      Gathered& into = gathered[{da, db}];
      into.dtype_a = da;
      into.dtype_b = db;
      into.pairs.emplace_back(x, y);
    }
    report.paired_tokens += static_cast<int64_t>(pairs.size());
  }
  for (const auto& [key, ref] : keys_b) {
    if (groups.at(key).a.empty()) report.unpaired.push_back(Place(b, ref, false));
  }
  FindDivergences(a, b, &report);
  for (const LogprobSet* set : {&a, &b}) {
    for (const LogprobSequence& s : set->sequences) report.decimal = report.decimal || s.decimal;
  }
  if (report.self_inconsistent > 0) {
    report.notes.push_back(
        fmt::format("{} keys are on one side more than once with different bits: that side's "
                    "values depend on more "
                    "than weights and tokens",
                    report.self_inconsistent));
  }

  std::deque<UnitCounts> results;
  Runner runner(options.pool, options.tiers, false, &results);
  std::vector<const Gathered*> order;
  int64_t mask_compared = 0, mask_differs = 0;
  Unit mask_unit;
  for (auto& [dtypes, g] : gathered) {
    // In the order of side A, so that the first mismatch is the first token of the first sequence.
    std::stable_sort(g.pairs.begin(), g.pairs.end(), [](const auto& x, const auto& y) {
      return std::tie(x.first.sequence, x.first.index) < std::tie(y.first.sequence, y.first.index);
    });
    Unit unit;
    unit.name = "logprobs";
    unit.dtype_a = g.dtype_a;
    unit.dtype_b = g.dtype_b;
    unit.elements = static_cast<int64_t>(g.pairs.size());
    unit.rows = unit.elements;
    unit.shape_a = unit.shape_b = {unit.elements};
    auto valid = std::make_shared<std::vector<uint8_t>>(g.pairs.size());
    for (size_t i = 0; i < g.pairs.size(); ++i) {
      const auto& [x, y] = g.pairs[i];
      const LogprobSequence& sx = a.sequences[static_cast<size_t>(x.sequence)];
      const LogprobSequence& sy = b.sequences[static_cast<size_t>(y.sequence)];
      const bool mask_x = sx.mask.empty() || sx.mask[static_cast<size_t>(x.index)] != 0;
      const bool mask_y = sy.mask.empty() || sy.mask[static_cast<size_t>(y.index)] != 0;
      if (!sx.mask.empty() && !sy.mask.empty()) {
        if (mask_x != mask_y) {
          if (mask_differs == 0) {
            mask_unit.note = fmt::format("sequence {} token {} is {} on A", sx.sequence, x.index,
                                         mask_x ? "valid" : "masked");
            mask_unit.counts.first = {static_cast<int64_t>(mask_compared), mask_x, mask_y};
            mask_unit.first_at = fmt::format("{} token {}", sx.sequence, x.index);
          }
          ++mask_differs;
        }
        ++mask_compared;
      }
      bool counts = mask_x && mask_y;
      if (counts && (!Present(sx, x.index) || !Present(sy, y.index))) {
        if (unit.reason.empty()) {
          unit.verdict = Verdict::kFail;
          unit.reason = reason::kMaskNotLossMask;
          unit.note = fmt::format("sequence {} token {} is valid but has no logprob on {}",
                                  sx.sequence, x.index, !Present(sx, x.index) ? "A" : "B");
        }
        counts = false;
      }
      (*valid)[i] = counts ? 1 : 0;
    }
    if (g.dtype_a == g.dtype_b) {
      Pair pair;
      pair.unit = static_cast<int64_t>(report.units.size());
      TARE_ASSIGN_OR_RETURN(pair.a, Gather(a, g.dtype_a, g.pairs, true));
      TARE_ASSIGN_OR_RETURN(pair.b, Gather(b, g.dtype_b, g.pairs, false));
      if (gathered.size() == 1) {
        report.by_position = CountByPosition(a, g.pairs, pair.a, pair.b, *valid);
      }
      pair.mask = std::move(valid);
      runner.Add(std::move(pair));
    } else {
      TARE_ASSIGN_OR_RETURN(const Tensor ta, Gather(a, g.dtype_a, g.pairs, true));
      TARE_ASSIGN_OR_RETURN(const Tensor tb, Gather(b, g.dtype_b, g.pairs, false));
      Diagnose(ta, tb, options, &unit);
    }
    order.push_back(&g);
    report.units.push_back(std::move(unit));
  }
  runner.Finish();
  for (size_t i = 0; i < results.size(); ++i) {
    Unit& unit = report.units[i];
    unit.counts = results[i].counts;
    const Mismatch& m =
        unit.counts.first.index >= 0 ? unit.counts.first : unit.counts.first_non_finite;
    if (m.index < 0) continue;
    const Ref& ref = order[i]->pairs[static_cast<size_t>(m.index)].first;
    const TokenPlace place = Place(a, ref, true);
    unit.first_sequence = place.sequence;
    unit.first_position = place.position;
    unit.first_coordinate = {ref.sequence, ref.index};
    unit.first_at = fmt::format("{} token {}", place.sequence, ref.index);
  }
  if (mask_compared > 0) {
    mask_unit.name = "mask";
    mask_unit.role = TapRole::kMask;
    mask_unit.dtype_a = mask_unit.dtype_b = DType::kU8;
    mask_unit.elements = mask_unit.counts.compared = mask_compared;
    mask_unit.shape_a = mask_unit.shape_b = {mask_compared};
    mask_unit.counts.mismatches = mask_differs;
    report.units.push_back(std::move(mask_unit));
  }
  Conclude(&report, true);
  return report;
}

bool IsRolloutFile(const SafetensorsFile& file) {
  for (const char* name :
       {"prompt_ids", "prompt_offsets", "response_ids", "response_offsets", "logprobs"}) {
    if (file.Find(name) == nullptr) return false;
  }
  return true;
}

namespace {

Result<std::vector<int64_t>> Integers(const SafetensorsFile& file, const char* name) {
  TARE_ASSIGN_OR_RETURN(const Tensor t, file.Get(name));
  if (t.rank() != 1 || (t.dtype() != DType::kI32 && t.dtype() != DType::kI64)) {
    return DataLoss("{}: {} is {} {}, expected a vector of i32 or i64", file.where(), name,
                    DTypeName(t.dtype()), ShapeToString(t.shape()));
  }
  std::vector<int64_t> out(static_cast<size_t>(t.elements()));
  for (int64_t i = 0; i < t.elements(); ++i) {
    out[static_cast<size_t>(i)] =
        t.dtype() == DType::kI32 ? t.as<int32_t>()[i] : t.as<int64_t>()[i];
  }
  return out;
}

Status CheckOffsets(const SafetensorsFile& file, const char* name,
                    const std::vector<int64_t>& offsets, size_t size) {
  const bool fits = !offsets.empty() && offsets.front() == 0 &&
                    offsets.back() == static_cast<int64_t>(size) &&
                    std::is_sorted(offsets.begin(), offsets.end());
  if (fits) return Ok();
  return DataLoss("{}: {} does not rise from 0 to {}", file.where(), name, size);
}

}  // namespace

Result<LogprobSet> ReadRolloutFile(const SafetensorsFile& file) {
  TARE_ASSIGN_OR_RETURN(const std::vector<int64_t> prompt_ids, Integers(file, "prompt_ids"));
  TARE_ASSIGN_OR_RETURN(const std::vector<int64_t> prompt_offsets,
                        Integers(file, "prompt_offsets"));
  TARE_ASSIGN_OR_RETURN(const std::vector<int64_t> ids, Integers(file, "response_ids"));
  TARE_ASSIGN_OR_RETURN(const std::vector<int64_t> offsets, Integers(file, "response_offsets"));
  TARE_RETURN_IF_ERROR(CheckOffsets(file, "prompt_offsets", prompt_offsets, prompt_ids.size()));
  TARE_RETURN_IF_ERROR(CheckOffsets(file, "response_offsets", offsets, ids.size()));
  TARE_ASSIGN_OR_RETURN(const Tensor logprobs, file.Get("logprobs"));
  if (prompt_offsets.size() != offsets.size()) {
    return DataLoss("{}: prompt_offsets holds {} sequences, response_offsets {}", file.where(),
                    prompt_offsets.size() - 1, offsets.size() - 1);
  }
  if (!IsFloat(logprobs.dtype()) || logprobs.rank() != 1 ||
      logprobs.elements() != static_cast<int64_t>(ids.size())) {
    return DataLoss("{}: logprobs is {} {}, expected {} floats", file.where(),
                    DTypeName(logprobs.dtype()), ShapeToString(logprobs.shape()), ids.size());
  }
  std::vector<uint8_t> mask;
  if (file.Find("mask") != nullptr) {
    TARE_ASSIGN_OR_RETURN(const Tensor t, file.Get("mask"));
    Result<std::vector<uint8_t>> bytes = MaskBytes(t, "mask");
    if (!bytes.ok()) return DataLoss("{}: {}", file.where(), bytes.status().message());
    mask = *std::move(bytes);
    if (mask.size() != ids.size())
      return DataLoss("{}: mask holds {} values, expected {}", file.where(), mask.size(),
                      ids.size());
  }
  LogprobSet set;
  set.name = file.where();
  std::string weights;
  for (const auto& [key, value] : file.metadata()) {
    if (key == "weights_sha256") weights = value;
  }
  const auto narrow = [&](const std::vector<int64_t>& from, int64_t begin, int64_t end,
                          std::vector<int32_t>* to) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t id = from[static_cast<size_t>(i)];
      if (id != static_cast<int32_t>(id))
        return DataLoss("{}: token ID {} does not fit 32 bits", file.where(), id);
      to->push_back(static_cast<int32_t>(id));
    }
    return Ok();
  };
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    LogprobSequence q;
    q.sequence = fmt::format("{}", s);
    q.weights = weights;
    q.dtype = logprobs.dtype();
    TARE_RETURN_IF_ERROR(narrow(prompt_ids, prompt_offsets[s], prompt_offsets[s + 1], &q.prompt));
    TARE_RETURN_IF_ERROR(narrow(ids, offsets[s], offsets[s + 1], &q.tokens));
    for (int64_t i = offsets[s]; i < offsets[s + 1]; ++i) {
      q.words.push_back(LoadWord(logprobs.dtype(), logprobs.data(), i));
      if (!mask.empty()) q.mask.push_back(mask[static_cast<size_t>(i)]);
    }
    set.sequences.push_back(std::move(q));
  }
  return set;
}

}  // namespace tare::compare
