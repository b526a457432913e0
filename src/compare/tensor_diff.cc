#include "compare/tensor_diff.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <unordered_map>

#include "base/json.h"
#include "base/reasons.h"
#include "compare/runner.h"
#include "tensor/convert.h"
#include "tensor/digest.h"
#include "tensor/safetensors.h"

namespace tare::compare {
namespace {

bool AnyMatches(const std::vector<std::string>& patterns, const std::string& name) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& p) {
    return ::fnmatch(p.c_str(), name.c_str(), 0) == 0;
  });
}

class SafetensorsSource : public TensorSource {
 public:
  SafetensorsSource(SafetensorsFile file, const std::vector<std::string>& order)
      : file_(std::move(file)) {
    ordered_ = !order.empty();
    std::vector<bool> taken(file_.entries().size(), false);
    const auto take = [&](size_t i) {
      const SafetensorsEntry& e = file_.entries()[i];
      taken[i] = true;
      index_.push_back(static_cast<uint32_t>(i));
      entries_.push_back({e.name, e.dtype, e.shape});
    };
    entries_.reserve(file_.entries().size());
    for (const std::string& name : order) {
      const SafetensorsEntry* e = file_.Find(name);
      if (e != nullptr && !taken[static_cast<size_t>(e - file_.entries().data())]) {
        take(static_cast<size_t>(e - file_.entries().data()));
      }
    }
    for (size_t i = 0; i < taken.size(); ++i) {
      if (!taken[i]) take(i);
    }
  }
  const std::vector<Entry>& entries() const override { return entries_; }
  Result<Tensor> Load(size_t i) const override { return file_.View(file_.entries()[index_.at(i)]); }
  std::string name() const override { return file_.where(); }

  bool ordered() const override { return ordered_; }

 private:
  SafetensorsFile file_;
  std::vector<Entry> entries_;
  std::vector<uint32_t> index_;  // into file_.entries()
  bool ordered_ = false;
};

// A name that the source holds twice, or "". The later one would hide the earlier.
std::string TwiceIn(const TensorSource& source) {
  std::vector<std::string_view> names;
  for (const auto& e : source.entries()) names.push_back(e.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  return twice == names.end() ? ""
                              : fmt::format("{} holds {} twice", source.name(), Printable(*twice));
}

// Finds entries by name. Two recordings mostly hold the same names in the same order, so the place
// of the other side is asked first, and a table is built only when that fails.
class NameIndex {
 public:
  explicit NameIndex(const TensorSource& source) : entries_(source.entries()) {}
  std::optional<size_t> Find(const std::string& name, size_t guess) const {
    if (guess < entries_.size() && entries_[guess].name == name) return guess;
    if (table_.empty()) {
      table_.reserve(entries_.size());
      for (size_t i = 0; i < entries_.size(); ++i) table_.emplace(entries_[i].name, i);
    }
    const auto at = table_.find(name);
    if (at == table_.end()) return std::nullopt;
    return at->second;
  }

 private:
  const std::vector<TensorSource::Entry>& entries_;
  mutable std::unordered_map<std::string_view, size_t> table_;
};

struct LoadedMask {
  std::shared_ptr<const std::vector<uint8_t>> bytes;
  Shape shape;
  bool Fits(const Shape& tensor) const {
    return shape.size() <= tensor.size() && std::equal(shape.begin(), shape.end(), tensor.begin());
  }
};

}  // namespace

bool InScope(const std::string& name, const DiffOptions& options) {
  return (options.only.empty() || AnyMatches(options.only, name)) &&
         !AnyMatches(options.ignore, name);
}

Status CheckOptions(const DiffOptions& options) {
  if (options.tiers.size() > kMaxTiers) {
    return InvalidArgument("{} tiers, at most {} are allowed", options.tiers.size(), kMaxTiers);
  }
  for (size_t i = 0; i < options.tiers.size(); ++i) {
    for (size_t k = 0; k < i; ++k) {
      if (options.tiers[i].name == options.tiers[k].name) {
        return InvalidArgument("tier {} is given twice", Printable(options.tiers[i].name));
      }
    }
  }
  TARE_CHECK(options.pool != nullptr);
  return Ok();
}

MemorySource::MemorySource(std::string name, std::vector<std::pair<std::string, Tensor>> tensors)
    : name_(std::move(name)), tensors_(std::move(tensors)) {
  for (const auto& [n, t] : tensors_) entries_.push_back({n, t.dtype(), t.shape()});
}

std::unique_ptr<TensorSource> MakeSafetensorsSource(SafetensorsFile file,
                                                    const std::vector<std::string>& order) {
  return std::make_unique<SafetensorsSource>(std::move(file), order);
}

std::vector<int64_t> Coordinate(const Shape& shape, int64_t index) {
  std::vector<int64_t> out(shape.size());
  for (size_t i = shape.size(); i-- > 0;) {
    out[i] = shape[i] > 0 ? index % shape[i] : 0;
    index = shape[i] > 0 ? index / shape[i] : 0;
  }
  return out;
}

std::string CoordinateText(const std::vector<int64_t>& coordinate) {
  return fmt::format("[{}]", fmt::join(coordinate, ", "));
}

Result<std::vector<uint8_t>> MaskBytes(const Tensor& mask, const std::string& name) {
  std::vector<uint8_t> bytes(static_cast<size_t>(mask.elements()));
  for (int64_t i = 0; i < mask.elements(); ++i) {
    const uint64_t word = LoadWord(mask.dtype(), mask.data(), i);
    const double value = WordToDouble(mask.dtype(), word);
    const bool negative_zero = IsFloat(mask.dtype()) && value == 0 && word != 0;
    if ((value != 0 && value != 1) || negative_zero) {
      return InvalidArgument("{} holds {} at {}; a mask holds 0 and 1", Printable(name),
                             WordHex(mask.dtype(), word),
                             CoordinateText(Coordinate(mask.shape(), i)));
    }
    bytes[static_cast<size_t>(i)] = value == 1 ? 1 : 0;
  }
  return bytes;
}

void Diagnose(const Tensor& a, const Tensor& b, const DiffOptions& options, Unit* unit) {
  if ((!options.upcast && !options.round) || !IsFloat(a.dtype()) || !IsFloat(b.dtype())) return;
  const bool a_wider = SizeOf(a.dtype()) > SizeOf(b.dtype());
  // Between dtypes of one width (bf16 and f16) neither holds the other: both go to f32.
  DType common = a_wider == (options.round && !options.upcast) ? b.dtype() : a.dtype();
  if (SizeOf(a.dtype()) == SizeOf(b.dtype())) common = DType::kF32;
  const Result<Tensor> x = Convert(a, common), y = Convert(b, common);
  if (!x.ok() || !y.ok()) return;
  unit->diagnosis =
      common == DType::kF32 && SizeOf(a.dtype()) == SizeOf(b.dtype()) ? "both converted to f32"
      : common == a.dtype()
          ? fmt::format("B ({}) converted to {}", DTypeName(b.dtype()), DTypeName(common))
          : fmt::format("A ({}) converted to {}", DTypeName(a.dtype()), DTypeName(common));
  unit->diagnosis_counts =
      CompareRange(common, x->data(), y->data(), 0, x->elements(), {}, options.tiers);
}

Result<Report> DiffTensors(const TensorSource& a, const TensorSource& b,
                           const DiffOptions& options) {
  TARE_RETURN_IF_ERROR(CheckOptions(options));
  Report report;
  report.kind = "tensors";
  report.ordered = a.ordered();
  report.a = a.name();
  report.b = b.name();
  report.tiers = options.tiers;
  report.scope.only = options.only;
  report.scope.ignore = options.ignore;
  report.scope.mask = options.mask;

  for (const TensorSource* side : {&a, &b}) {
    if (const std::string twice = TwiceIn(*side); !twice.empty()) {
      Refuse(&report, reason::kDuplicateName, twice);
      return report;
    }
  }

  const NameIndex in_b(b);

  LoadedMask mask;
  if (!options.mask.empty()) {
    const auto ea = std::find_if(a.entries().begin(), a.entries().end(),
                                 [&](const auto& e) { return e.name == options.mask; });
    const std::optional<size_t> eb = in_b.Find(options.mask, 0);
    if (ea == a.entries().end() || !eb) {
      Refuse(&report, reason::kMaskMissing,
             fmt::format("{} is not in {}", Printable(options.mask),
                         ea == a.entries().end() ? a.name() : b.name()));
      return report;
    }
    TARE_ASSIGN_OR_RETURN(const Tensor mask_a,
                          a.Load(static_cast<size_t>(ea - a.entries().begin())));
    TARE_ASSIGN_OR_RETURN(const Tensor mask_b, b.Load(*eb));
    Result<std::vector<uint8_t>> bytes = MaskBytes(mask_a, options.mask);
    const Status on_b = MaskBytes(mask_b, options.mask).status();
    if (!bytes.ok() || !on_b.ok()) {
      Refuse(&report, reason::kMaskMalformed,
             bytes.ok() ? on_b.message() : bytes.status().message());
      return report;
    }
    mask.shape = mask_a.shape();
    mask.bytes = std::make_shared<const std::vector<uint8_t>>(*std::move(bytes));
  }

  std::deque<UnitCounts> results;
  Runner runner(options.pool, options.tiers, options.digests, &results);
  std::vector<bool> seen_b(b.entries().size(), false);
  report.units.reserve(std::max(a.entries().size(), b.entries().size()));
  bool mask_used = options.mask.empty();
  for (size_t i = 0; i < a.entries().size(); ++i) {
    const TensorSource::Entry& ea = a.entries()[i];
    const std::optional<size_t> found = in_b.Find(ea.name, i);
    const bool is_mask = !options.mask.empty() && ea.name == options.mask;
    if (found) seen_b[*found] = true;
    if (!InScope(ea.name, options) && !is_mask) {
      report.scope.excluded.push_back(ea.name);
      continue;
    }
    Unit unit;
    unit.name = ea.name;
    unit.role = is_mask ? TapRole::kMask : TapRole::kValue;
    unit.dtype_a = ea.dtype;
    unit.shape_a = ea.shape;
    unit.on_b = found.has_value();
    unit.elements = ElementCount(ea.shape).value();
    if (unit.on_b) {
      const TensorSource::Entry& eb = b.entries()[*found];
      unit.dtype_b = eb.dtype;
      unit.shape_b = eb.shape;
      const bool same_shape = ea.shape == eb.shape;
      if (same_shape && (ea.dtype == eb.dtype || options.upcast || options.round)) {
        TARE_ASSIGN_OR_RETURN(Tensor ta, a.Load(i));
        TARE_ASSIGN_OR_RETURN(Tensor tb, b.Load(*found));
        if (ea.dtype == eb.dtype) {
          Pair pair;
          pair.unit = static_cast<int64_t>(report.units.size());
          pair.a = std::move(ta);
          pair.b = std::move(tb);
          if (mask.bytes != nullptr && !is_mask && mask.Fits(ea.shape)) {
            mask_used = true;
            pair.mask = mask.bytes;
            pair.mask_repeat =
                mask.bytes->empty() ? 1 : unit.elements / static_cast<int64_t>(mask.bytes->size());
          }
          runner.Add(std::move(pair));
        } else {
          Diagnose(ta, tb, options, &unit);
        }
      }
    }
    report.units.push_back(std::move(unit));
  }
  for (size_t i = 0; i < b.entries().size(); ++i) {
    if (seen_b[i]) continue;
    const TensorSource::Entry& eb = b.entries()[i];
    if (!InScope(eb.name, options)) {
      report.scope.excluded.push_back(eb.name);
      continue;
    }
    Unit unit;
    unit.name = eb.name;
    unit.on_a = false;
    unit.dtype_b = eb.dtype;
    unit.shape_b = eb.shape;
    unit.elements = ElementCount(eb.shape).value();
    report.units.push_back(std::move(unit));
  }
  if (!mask_used) {
    Refuse(
        &report, reason::kMaskMalformed,
        fmt::format(
            "mask {} of shape {} fits no tensor; its shape must be the leading dimensions of one",
            Printable(options.mask), ShapeToString(mask.shape)));
    return report;
  }
  runner.Finish();
  for (size_t i = 0; i < results.size(); ++i) {
    Unit& unit = report.units[i];
    unit.counts = results[i].counts;
    const Mismatch& m =
        unit.counts.first.index >= 0 ? unit.counts.first : unit.counts.first_non_finite;
    if (m.index >= 0) {
      unit.first_coordinate = Coordinate(unit.shape_a, m.index);
      unit.first_at = CoordinateText(unit.first_coordinate);
    }
    if (options.digests && unit.on_a && unit.on_b && unit.dtype_a == unit.dtype_b &&
        unit.shape_a == unit.shape_b) {
      unit.digest_a = JoinChunkDigests(unit.dtype_a, unit.shape_a, results[i].chunks_a);
      unit.digest_b = JoinChunkDigests(unit.dtype_b, unit.shape_b, results[i].chunks_b);
      results[i] = {};
    }
  }
  Conclude(&report, options.placeholders || !options.mask.empty());
  return report;
}

}  // namespace tare::compare
