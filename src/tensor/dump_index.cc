// Lines of records.jsonl: parsed and checked in full, without files.

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <limits>

#include "tensor/dump.h"

namespace tare {
namespace {

constexpr int64_t kMaxInt = int64_t{1} << 53;

// Reads the fields of one JSON object, each by name and type; what is left over is an error.
class Fields {
 public:
  Fields(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  Status CheckKeys(std::initializer_list<std::string_view> known) const {
    if (!object_.is_object()) return DataLoss("{} is not an object", where_);
    for (const auto& [key, value] : object_.items()) {
      if (std::find(known.begin(), known.end(), key) == known.end()) {
        return DataLoss("{} has an unknown key '{}'; known are {}", where_, Printable(key),
                        fmt::join(known, ", "));
      }
    }
    return Ok();
  }
  Result<int64_t> Int(const char* key, int64_t low, int64_t high) const {
    const Json* v = Find(key);
    if (v == nullptr) return Missing(key);
    if (!v->is_number_integer()) return DataLoss("{}: '{}' is not an integer", where_, key);
    const bool fits = v->is_number_unsigned()
                          ? v->get<uint64_t>() <= static_cast<uint64_t>(std::max<int64_t>(high, 0))
                          : true;
    const int64_t n = fits ? v->get<int64_t>() : 0;
    if (!fits || n < low || n > high) {
      return DataLoss("{}: '{}' is {}, allowed is {} to {}", where_, key, v->dump(), low, high);
    }
    return n;
  }
  Result<std::string> String(const char* key) const {
    const Json* v = Find(key);
    if (v == nullptr) return Missing(key);
    if (!v->is_string()) return DataLoss("{}: '{}' is not a string", where_, key);
    return v->get<std::string>();
  }
  Result<bool> Bool(const char* key) const {
    const Json* v = Find(key);
    if (v == nullptr) return Missing(key);
    if (!v->is_boolean()) return DataLoss("{}: '{}' is not true or false", where_, key);
    return v->get<bool>();
  }
  Result<const Json*> Array(const char* key) const {
    const Json* v = Find(key);
    if (v == nullptr) return Missing(key);
    if (!v->is_array()) return DataLoss("{}: '{}' is not an array", where_, key);
    return v;
  }
  Result<Sha256Digest> Digest(const char* key) const {
    TARE_ASSIGN_OR_RETURN(const std::string text, String(key));
    Result<Sha256Digest> digest = ParseSha256(text);
    if (!digest.ok()) return DataLoss("{}: '{}' is not 64 lower-case hex digits", where_, key);
    return digest;
  }
  bool Has(const char* key) const { return Find(key) != nullptr; }
  const Json& at(const char* key) const { return object_.at(key); }
  const std::string& where() const { return where_; }

 private:
  const Json* Find(const char* key) const {
    const auto at = object_.find(key);
    return at == object_.end() ? nullptr : &*at;
  }
  Status Missing(const char* key) const { return DataLoss("{}: '{}' is missing", where_, key); }

  const Json& object_;
  std::string where_;
};

std::optional<fault::Side> ParseSide(std::string_view name) {
  for (const fault::Side side :
       {fault::Side::kNone, fault::Side::kRollout, fault::Side::kTrainer}) {
    if (fault::SideName(side) == name) return side;
  }
  return std::nullopt;
}

Result<TapRun> ParseRun(const Json& json, const std::string& where) {
  const Fields f(json, where);
  TARE_RETURN_IF_ERROR(f.CheckKeys({"sequence", "history", "position", "row", "tokens"}));
  TapRun run;
  TARE_ASSIGN_OR_RETURN(run.sequence, f.String("sequence"));
  TARE_ASSIGN_OR_RETURN(run.history, f.Digest("history"));
  TARE_ASSIGN_OR_RETURN(run.position, f.Int("position", 0, kMaxInt));
  TARE_ASSIGN_OR_RETURN(run.row, f.Int("row", 0, kMaxInt));
  TARE_ASSIGN_OR_RETURN(const Json* tokens, f.Array("tokens"));
  if (tokens->empty()) return DataLoss("{}: a run needs at least one token", where);
  run.tokens.reserve(tokens->size());
  for (const Json& t : *tokens) {
    if (!t.is_number_integer() || t < std::numeric_limits<int32_t>::min() ||
        t > std::numeric_limits<int32_t>::max()) {
      return DataLoss("{}: token {} is not a 32-bit integer", where, t.dump());
    }
    run.tokens.push_back(t.get<int32_t>());
  }
  return run;
}

Result<TapShard> ParseShard(const Json& json, int64_t rank, const std::string& where) {
  const Fields f(json, where);
  TARE_RETURN_IF_ERROR(f.CheckKeys({"axis", "dim", "index", "count", "layout"}));
  TapShard s;
  TARE_ASSIGN_OR_RETURN(s.axis, f.String("axis"));
  TARE_ASSIGN_OR_RETURN(s.dim, f.Int("dim", 0, std::max<int64_t>(rank - 1, 0)));
  TARE_ASSIGN_OR_RETURN(s.count, f.Int("count", 1, kMaxInt));
  TARE_ASSIGN_OR_RETURN(s.index, f.Int("index", 0, s.count - 1));
  TARE_ASSIGN_OR_RETURN(s.layout, f.String("layout"));
  const auto among = [](std::string_view text, std::initializer_list<std::string_view> allowed) {
    return std::find(allowed.begin(), allowed.end(), text) != allowed.end();
  };
  if (!among(s.axis, {"tp", "cp", "ep", "pp", "dp"})) {
    return DataLoss("{}: axis '{}' is none of tp, cp, ep, pp, dp", where, Printable(s.axis));
  }
  if (!among(s.layout, {"contiguous", "zigzag", "interleaved"})) {
    return DataLoss("{}: layout '{}' is none of contiguous, zigzag, interleaved", where,
                    Printable(s.layout));
  }
  return s;
}

}  // namespace

Status DumpIndex::AddLine(std::string_view text) {
  const std::string where = fmt::format("line {}", lines_ + 1);
  Result<Json> parsed = ParseJson(text);
  if (!parsed.ok()) return DataLoss("{}: {}", where, parsed.status().message());
  const Json& line = *parsed;
  if (!line.is_object()) return DataLoss("{} is not an object", where);
  const Fields f(line, where);
  TARE_ASSIGN_OR_RETURN(const int64_t seq, f.Int("seq", 0, kMaxInt));
  if (seq != lines_) {
    return DataLoss("{}: seq is {} where {} must follow: a line was lost, added or moved", where,
                    seq, lines_);
  }
  TARE_ASSIGN_OR_RETURN(const std::string kind, f.String("kind"));
  Status status = kind == "frame"    ? AddFrame(line)
                  : kind == "tensor" ? AddTensor(line)
                  : kind == "end"
                      ? AddEnd(line)
                      : DataLoss("kind '{}' is none of frame, tensor, end", Printable(kind));
  if (!status.ok()) return status.Annotate(where);
  ++lines_;
  return Ok();
}

Status DumpIndex::AddFrame(const Json& line) {
  const Fields f(line, "frame");
  TARE_RETURN_IF_ERROR(
      f.CheckKeys({"seq", "kind", "frame", "phase", "side", "weights", "step", "runs"}));
  if (!frames_.empty() && !frames_.back().ended) {
    return DataLoss("frame {} begins inside frame {}", frames_.size(), frames_.size() - 1);
  }
  const int64_t next = static_cast<int64_t>(frames_.size());
  TARE_RETURN_IF_ERROR(f.Int("frame", next, next).status());
  DumpFrame frame;
  TARE_ASSIGN_OR_RETURN(const std::string phase, f.String("phase"));
  const std::optional<TapPhase> parsed_phase = ParseTapPhase(phase);
  if (!parsed_phase) return DataLoss("phase '{}' is unknown", Printable(phase));
  frame.frame.phase = *parsed_phase;
  TARE_ASSIGN_OR_RETURN(const std::string side, f.String("side"));
  const std::optional<fault::Side> parsed_side = ParseSide(side);
  if (!parsed_side) return DataLoss("side '{}' is none of none, rollout, trainer", Printable(side));
  frame.frame.side = *parsed_side;
  TARE_ASSIGN_OR_RETURN(frame.frame.weight_version, f.String("weights"));
  TARE_ASSIGN_OR_RETURN(frame.frame.step, f.Int("step", -kMaxInt, kMaxInt));
  TARE_ASSIGN_OR_RETURN(const Json* runs, f.Array("runs"));
  std::vector<std::pair<int64_t, int64_t>> rows;
  for (size_t i = 0; i < runs->size(); ++i) {
    TARE_ASSIGN_OR_RETURN(TapRun run, ParseRun((*runs)[i], fmt::format("runs[{}]", i)));
    rows.emplace_back(run.row, run.row + static_cast<int64_t>(run.tokens.size()));
    frame.frame.runs.push_back(std::move(run));
  }
  std::sort(rows.begin(), rows.end());
  for (size_t i = 1; i < rows.size(); ++i) {
    if (rows[i].first < rows[i - 1].second) return DataLoss("two runs share row {}", rows[i].first);
  }
  frames_.push_back(std::move(frame));
  frame_seq_.push_back(lines_);
  names_.clear();
  return Ok();
}

Status DumpIndex::AddTensor(const Json& line) {
  const Fields f(line, "tensor");
  TARE_RETURN_IF_ERROR(f.CheckKeys({"seq", "kind", "frame", "name", "layer", "op", "role", "inputs",
                                    "reads_history", "per_row", "mask", "shards", "dtype", "shape",
                                    "sha256", "non_finite", "payload"}));
  if (frames_.empty() || frames_.back().ended) return DataLoss("a tensor outside a frame");
  const int64_t open = static_cast<int64_t>(frames_.size()) - 1;
  DumpRecord r;
  r.seq = lines_;
  TARE_ASSIGN_OR_RETURN(r.frame, f.Int("frame", open, open));
  TARE_ASSIGN_OR_RETURN(r.point.name, f.String("name"));
  if (r.point.name.empty()) return DataLoss("a tensor without a name");
  TARE_ASSIGN_OR_RETURN(const int64_t layer, f.Int("layer", -1, std::numeric_limits<int>::max()));
  r.point.layer = static_cast<int>(layer);
  TARE_ASSIGN_OR_RETURN(r.point.op, f.String("op"));
  TARE_ASSIGN_OR_RETURN(const std::string role, f.String("role"));
  const std::optional<TapRole> parsed_role = ParseTapRole(role);
  if (!parsed_role) return DataLoss("role '{}' is unknown", Printable(role));
  r.point.role = *parsed_role;
  TARE_ASSIGN_OR_RETURN(const Json* inputs, f.Array("inputs"));
  for (const Json& input : *inputs) {
    if (!input.is_string()) return DataLoss("inputs holds other than names");
    r.point.inputs.push_back(input.get<std::string>());
  }
  TARE_ASSIGN_OR_RETURN(r.point.reads_history, f.Bool("reads_history"));
  TARE_ASSIGN_OR_RETURN(r.point.per_row, f.Bool("per_row"));
  TARE_ASSIGN_OR_RETURN(r.point.mask, f.String("mask"));
  TARE_ASSIGN_OR_RETURN(const std::string dtype, f.String("dtype"));
  const std::optional<DType> parsed_dtype = ParseDType(dtype);
  if (!parsed_dtype) return DataLoss("dtype '{}' is unknown", Printable(dtype));
  r.dtype = *parsed_dtype;
  TARE_ASSIGN_OR_RETURN(const Json* shape, f.Array("shape"));
  for (const Json& d : *shape) {
    if (!d.is_number_unsigned() || d.get<uint64_t>() > static_cast<uint64_t>(kMaxInt)) {
      return DataLoss("shape {} holds other than sizes", shape->dump());
    }
    r.shape.push_back(d.get<int64_t>());
  }
  if (r.shape.size() > 32)
    return DataLoss("shape has {} dimensions, at most 32 are allowed", r.shape.size());
  const Result<int64_t> elements = ElementCount(r.shape);
  int64_t bytes = 0;
  if (!elements.ok() || __builtin_mul_overflow(*elements, SizeOf(r.dtype), &bytes) ||
      bytes > kMaxInt) {
    return DataLoss("shape {} is too large", ShapeToString(r.shape));
  }
  TARE_ASSIGN_OR_RETURN(const Json* shards, f.Array("shards"));
  for (const Json& s : *shards) {
    TARE_ASSIGN_OR_RETURN(TapShard shard,
                          ParseShard(s, static_cast<int64_t>(r.shape.size()), "shards"));
    r.point.shards.push_back(std::move(shard));
  }
  TARE_ASSIGN_OR_RETURN(r.digest, f.Digest("sha256"));
  TARE_ASSIGN_OR_RETURN(r.non_finite, f.Int("non_finite", 0, *elements));
  if (r.non_finite > 0 && !IsFloat(r.dtype))
    return DataLoss("non_finite counts values of a {} tensor", dtype);
  if (f.Has("payload")) {
    const Fields p(f.at("payload"), "payload");
    TARE_RETURN_IF_ERROR(p.CheckKeys({"shard", "offset"}));
    TARE_ASSIGN_OR_RETURN(r.shard, p.Int("shard", 0, 99999));
    TARE_ASSIGN_OR_RETURN(r.offset, p.Int("offset", 8, kMaxInt - bytes));
    if (r.offset % SizeOf(r.dtype) != 0) {
      return DataLoss("payload of a {} tensor at offset {} is not aligned to its element", dtype,
                      r.offset);
    }
  }
  if (r.point.per_row && r.shape.empty()) {
    return DataLoss("{} is a scalar, a per-row tensor has rows", Printable(r.point.name));
  }
  const std::string key = r.point.role == TapRole::kExpected ? "\n" + r.point.name : r.point.name;
  const auto at = std::lower_bound(names_.begin(), names_.end(), key);
  if (at != names_.end() && *at == key)
    return DataLoss("{} is twice in frame {}", Printable(r.point.name), open);
  names_.insert(at, key);
  records_.push_back(std::move(r));
  return Ok();
}

Status DumpIndex::AddEnd(const Json& line) {
  const Fields f(line, "end");
  TARE_RETURN_IF_ERROR(f.CheckKeys({"seq", "kind", "frame"}));
  if (frames_.empty() || frames_.back().ended) return DataLoss("an end outside a frame");
  const int64_t open = static_cast<int64_t>(frames_.size()) - 1;
  TARE_RETURN_IF_ERROR(f.Int("frame", open, open).status());
  frames_.back().ended = true;
  end_seq_.push_back(lines_);
  return Ok();
}

void DumpIndex::CutAt(int64_t seq) {
  while (!records_.empty() && records_.back().seq >= seq) records_.pop_back();
  while (!frames_.empty() && frame_seq_.back() >= seq) {
    frames_.pop_back();
    frame_seq_.pop_back();
  }
  if (!frames_.empty() && end_seq_.size() >= frames_.size()) {
    end_seq_.resize(frames_.size());
    if (end_seq_.back() >= seq) {
      frames_.back().ended = false;
      end_seq_.pop_back();
    }
  }
  lines_ = std::min(lines_, seq);
}

}  // namespace tare
