#include "compare/shards.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <set>

#include "compare/bits.h"
#include "compare/tensor_diff.h"

namespace tare::compare {
namespace {

// A run of elements that keeps its order: local [from, from + count) lies at global `to`.
struct Segment {
  int64_t from = 0, to = 0, count = 0;
};

// Where the local index `i` of `size` lies in the dimension that `s` cuts.
int64_t Place(const TapShard& s, int64_t size, int64_t i) {
  if (s.layout == "interleaved") return i * s.count + s.index;
  if (s.layout == "zigzag") {
    const int64_t half = size / 2;
    return i < half ? s.index * half + i : (2 * s.count - 1 - s.index) * half + (i - half);
  }
  return s.index * size + i;
}

std::string ShardText(const std::vector<TapShard>& shards) {
  if (shards.empty()) return "whole";
  std::string out;
  for (const TapShard& s : shards) {
    out += fmt::format("{}{} {}/{} of dimension {} {}", out.empty() ? "" : ", ", s.axis, s.index,
                       s.count, s.dim, s.layout);
  }
  return out;
}

// The cut of one record, rows aside: the whole shape and where the local elements go in it.
struct Cut {
  Shape whole;                   // without the row dimension for per-row tensors
  std::vector<Segment> columns;  // of flat indices over `whole`
};

Result<Cut> CutOf(const DumpRecord& r, const std::string& rank) {
  const int64_t first = r.point.per_row ? 1 : 0;
  Cut cut;
  std::vector<std::vector<int64_t>> places;
  for (int64_t d = first; d < static_cast<int64_t>(r.shape.size()); ++d) {
    std::vector<const TapShard*> entries;
    for (const TapShard& s : r.point.shards) {
      if (s.dim == d) entries.push_back(&s);
    }
    int64_t size = r.shape[static_cast<size_t>(d)];
    std::vector<int64_t> at(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; ++i) at[static_cast<size_t>(i)] = i;
    for (auto e = entries.rbegin(); e != entries.rend(); ++e) {  // the innermost first
      if ((*e)->layout == "zigzag" && size % 2 != 0) {
        return DataLoss(
            "{}: {} has {} elements in dimension {}; a zigzag part holds an even number", rank,
            Printable(r.point.name), size, d);
      }
      for (int64_t& i : at) i = Place(**e, size, i);
      if (__builtin_mul_overflow(size, (*e)->count, &size)) {
        return DataLoss("{}: {} is cut into more elements than there are", rank,
                        Printable(r.point.name));
      }
    }
    cut.whole.push_back(size);
    places.push_back(std::move(at));
  }
  const Result<int64_t> total = ElementCount(cut.whole);
  if (!total.ok() || *total > int64_t{1} << 40) {
    return DataLoss("{}: {} is cut into more elements than there are", rank,
                    Printable(r.point.name));
  }
  // Row-major over the local index; segments join where the last dimension runs on.
  int64_t local = 1;
  for (const auto& p : places) local *= static_cast<int64_t>(p.size());
  for (int64_t i = 0; i < local; ++i) {
    int64_t rest = i, to = 0, stride = 1;
    for (size_t d = places.size(); d-- > 0;) {
      const int64_t n = static_cast<int64_t>(places[d].size());
      to += places[d][static_cast<size_t>(rest % n)] * stride;
      rest /= n;
      stride *= cut.whole[d];
    }
    if (!cut.columns.empty() && cut.columns.back().to + cut.columns.back().count == to) {
      ++cut.columns.back().count;
    } else {
      cut.columns.push_back({i, to, 1});
    }
  }
  return cut;
}

struct RowKey {
  std::string sequence;
  TokenHash hash{};
  int64_t position = 0;
  int64_t occurrence = 0;
  auto operator<=>(const RowKey&) const = default;  // NOLINT(modernize-use-nullptr)
};

// The rows of one frame over all ranks.
struct Rows {
  std::vector<RowKey> keys;                                       // by whole row
  std::vector<std::vector<std::pair<int64_t, int64_t>>> of_rank;  // (rank's row, whole row)
  std::vector<TapRun> runs;
};

Rows JoinRows(const std::vector<const TapFrame*>& frames) {
  Rows out;
  std::map<RowKey, int64_t> index;
  for (const TapFrame* frame : frames) {
    out.of_rank.emplace_back();
    std::map<RowKey, int64_t> seen;
    for (const TapRun& run : frame->runs) {
      TokenHash hash = run.history;
      bool continues = false;
      for (size_t i = 0; i < run.tokens.size(); ++i) {
        const TokenHash before = hash;
        hash = ExtendTokenHash(hash, {&run.tokens[i], 1});
        RowKey key{run.sequence, hash, run.position + static_cast<int64_t>(i), 0};
        key.occurrence = seen[key]++;
        const auto [at, fresh] = index.emplace(key, static_cast<int64_t>(out.keys.size()));
        if (fresh) {
          if (!continues) {
            out.runs.push_back(
                {run.sequence, before, key.position, static_cast<int64_t>(out.keys.size()), {}});
          }
          out.runs.back().tokens.push_back(run.tokens[i]);
          out.keys.push_back(std::move(key));
        }
        continues = fresh;
        out.of_rank.back().emplace_back(run.row + static_cast<int64_t>(i), at->second);
      }
    }
  }
  return out;
}

class Assembler {
 public:
  Assembler(std::vector<Dump> ranks, std::vector<std::string> names, RankReport* report)
      : ranks_(std::move(ranks)), names_(std::move(names)), report_(report) {}

  Status Run(Env* env, const std::string& out, ThreadPool* pool);

 private:
  struct Part {
    size_t rank;
    const DumpRecord* record;
  };
  Status Frame(int64_t f, DumpWriter* writer);
  Result<Tensor> Join(const Rows& rows, const std::vector<Part>& parts);
  Status CheckRowLayout(const Rows& rows, const Part& part);
  void NoteReplica(const Part& a, const Part& b, const Rows& rows, int64_t row, int64_t column,
                   const void* x, const void* y);

  std::vector<Dump> ranks_;
  std::vector<std::string> names_;
  RankReport* report_;
};

Status Assembler::Run(Env* env, const std::string& out, ThreadPool* pool) {
  DumpOptions options;
  options.manifest = ranks_[0].manifest();
  options.manifest.identity["ranks"] = ranks_.size();
  options.sync = false;
  options.pool = pool;
  size_t frames = ranks_[0].frames().size();
  bool cut = false;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    const DumpManifest& m = ranks_[r].manifest();
    cut = cut || !ranks_[r].cut().empty();
    bool same = m.side == options.manifest.side && m.contracts == options.manifest.contracts &&
                m.weights.size() == options.manifest.weights.size();
    for (size_t i = 0; same && i < m.weights.size(); ++i) {
      same = m.weights[i].version == options.manifest.weights[i].version &&
             m.weights[i].sha256 == options.manifest.weights[i].sha256;
    }
    if (!same && ranks_[r].cut().empty() && ranks_[0].cut().empty()) {
      return DataLoss("{} and {} are not ranks of one run: side, contracts or weights differ",
                      names_[0], names_[r]);
    }
    frames = std::min(frames, ranks_[r].frames().size());
  }
  for (size_t r = 0; r < ranks_.size() && !cut; ++r) {
    if (ranks_[r].frames().size() != frames) {
      return DataLoss("{} has {} frames, another rank {}", names_[r], ranks_[r].frames().size(),
                      frames);
    }
  }
  TARE_ASSIGN_OR_RETURN(auto writer, DumpWriter::Create(env, out, std::move(options)));
  for (size_t f = 0; f < frames; ++f) {
    TARE_RETURN_IF_ERROR(Frame(static_cast<int64_t>(f), writer.get()));
  }
  return cut ? writer->Flush() : writer->Finish();
}

Status Assembler::Frame(int64_t f, DumpWriter* writer) {
  std::vector<const TapFrame*> frames;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    const TapFrame& frame = ranks_[r].frames()[static_cast<size_t>(f)].frame;
    frames.push_back(&frame);
    const TapFrame& first = *frames[0];
    if (frame.phase != first.phase || frame.side != first.side || frame.step != first.step ||
        frame.weight_version != first.weight_version) {
      return DataLoss("frame {} of {} is {} of {} step {}, of {} {} of {} step {}", f, names_[0],
                      TapPhaseName(first.phase), Printable(first.weight_version), first.step,
                      names_[r], TapPhaseName(frame.phase), Printable(frame.weight_version),
                      frame.step);
    }
  }
  const Rows rows = JoinRows(frames);
  TapFrame whole = *frames[0];
  whole.runs = rows.runs;
  // Names in the order of the first rank that holds them: stages of a pipeline follow each other.
  std::vector<std::pair<std::string, std::vector<Part>>> order;
  std::map<std::string, size_t> index;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    for (const DumpRecord& record : ranks_[r].records()) {
      if (record.frame != f) continue;
      const std::string key =
          (record.point.role == TapRole::kExpected ? "\n" : "") + record.point.name;
      const auto [at, fresh] = index.emplace(key, order.size());
      if (fresh) order.push_back({key, {}});
      order[at->second].second.push_back({r, &record});
    }
  }
  writer->BeginFrame(whole);
  for (const auto& [key, parts] : order) {
    TARE_ASSIGN_OR_RETURN(const Tensor joined, Join(rows, parts));
    TapPoint point = parts[0].record->point;
    point.shards.clear();
    writer->Emit(point, joined);
  }
  writer->EndFrame();
  return writer->status();
}

// Each sequence of an axis cp is cut by itself.
Status Assembler::CheckRowLayout(const Rows& rows, const Part& part) {
  for (const TapShard& s : part.record->point.shards) {
    if (s.dim != 0 || s.axis != "cp") continue;
    std::map<std::string, std::pair<int64_t, int64_t>> extent;  // first position, length
    for (const RowKey& k : rows.keys) {
      const auto [at, fresh] = extent.emplace(k.sequence, std::pair{k.position, int64_t{0}});
      at->second.first = std::min(at->second.first, k.position);
      ++at->second.second;
    }
    for (const auto& [local, whole] : rows.of_rank[part.rank]) {
      const RowKey& k = rows.keys[static_cast<size_t>(whole)];
      const auto& [begin, length] = extent.at(k.sequence);
      const int64_t p = k.position - begin;
      int64_t expected = 0;
      if (s.layout == "interleaved") {
        expected = p % s.count;
      } else {
        const int64_t parts = s.layout == "zigzag" ? 2 * s.count : s.count;
        const int64_t c = p / std::max<int64_t>(1, (length + parts - 1) / parts);
        expected = c < s.count ? c : 2 * s.count - 1 - c;
      }
      if (expected != s.index) {
        return DataLoss(
            "{}: {} says cp {}/{} {}, but holds sequence {} position {}, which lies in part {}",
            names_[part.rank], Printable(part.record->point.name), s.index, s.count, s.layout,
            Printable(k.sequence), k.position, expected);
      }
    }
  }
  return Ok();
}

void Assembler::NoteReplica(const Part& a, const Part& b, const Rows& rows, int64_t row,
                            int64_t column, const void* x, const void* y) {
  if (!report_->replica_difference.empty()) return;
  const DumpRecord& r = *a.record;
  const std::string place =
      r.point.per_row
          ? fmt::format("{}@{} element {}", Printable(rows.keys[static_cast<size_t>(row)].sequence),
                        rows.keys[static_cast<size_t>(row)].position, column)
          : fmt::format("element {}", column);
  report_->replica_difference = fmt::format(
      "{} differs between the replicas {} and {} at {}: {} against {}", Printable(r.point.name),
      names_[a.rank], names_[b.rank], place, WordHex(r.dtype, LoadWord(r.dtype, x, 0)),
      WordHex(r.dtype, LoadWord(r.dtype, y, 0)));
}

Result<Tensor> Assembler::Join(const Rows& rows, const std::vector<Part>& parts) {
  const DumpRecord& first = *parts[0].record;
  const std::string name = Printable(first.point.name);
  const bool per_row = first.point.per_row;
  const int64_t row_count = per_row ? static_cast<int64_t>(rows.keys.size()) : 1;
  std::vector<Cut> cuts;
  std::vector<std::vector<TapShard>> specs;  // distinct, rows aside
  std::vector<uint16_t> spec_of;
  for (const Part& part : parts) {
    const DumpRecord& r = *part.record;
    const TapPoint &p = r.point, &q = first.point;
    if (r.dtype != first.dtype || p.layer != q.layer || p.op != q.op || p.role != q.role ||
        p.inputs != q.inputs || p.per_row != q.per_row || p.mask != q.mask ||
        p.reads_history != q.reads_history) {
      return DataLoss("{} is recorded otherwise by {} than by {} (dtype, layer, op, role, inputs)",
                      name, names_[part.rank], names_[parts[0].rank]);
    }
    if (r.shard < 0) {
      return Unsupported("{}: {} was kept without payload, which ranks cannot be put together from",
                         names_[part.rank], name);
    }
    TARE_RETURN_IF_ERROR(CheckRowLayout(rows, part));
    TARE_ASSIGN_OR_RETURN(Cut cut, CutOf(r, names_[part.rank]));
    if (!cuts.empty() && cut.whole != cuts[0].whole) {
      return DataLoss("{}: {} ({}) makes a whole of {}, {} ({}) one of {}", name,
                      names_[parts[0].rank], ShardText(first.point.shards),
                      ShapeToString(cuts[0].whole), names_[part.rank], ShardText(p.shards),
                      ShapeToString(cut.whole));
    }
    cuts.push_back(std::move(cut));
    std::vector<TapShard> spec;
    for (const TapShard& s : p.shards) {
      if (!per_row || s.dim != 0) spec.push_back(s);
    }
    const auto same = std::find_if(specs.begin(), specs.end(), [&](const auto& other) {
      return ShardText(other) == ShardText(spec);
    });
    spec_of.push_back(static_cast<uint16_t>(same - specs.begin()));
    if (same == specs.end()) specs.push_back(std::move(spec));
  }

  Shape shape = cuts[0].whole;
  const int64_t width = ElementCount(shape).value();
  if (per_row) shape.insert(shape.begin(), row_count);
  TARE_ASSIGN_OR_RETURN(Tensor out, Tensor::Allocate(first.dtype, shape));
  std::vector<uint16_t> owner(static_cast<size_t>(row_count * width), 0);  // part + 1
  const int64_t item = SizeOf(first.dtype);
  char* to = static_cast<char*>(out.mutable_data());
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    TARE_ASSIGN_OR_RETURN(const Tensor t, ranks_[part.rank].Payload(*part.record));
    const char* from = static_cast<const char*>(t.data());
    const int64_t have = per_row ? t.dim(0) : 1;
    const int64_t local_width = have == 0 ? 0 : t.elements() / have;
    static const std::vector<std::pair<int64_t, int64_t>> kOne = {{0, 0}};
    for (const auto& [local, whole] : per_row ? rows.of_rank[part.rank] : kOne) {
      if (local >= have) continue;  // found as a gap below, unless another rank holds it
      for (const Segment& s : cuts[i].columns) {
        const char* x = from + (local * local_width + s.from) * item;
        char* y = to + (whole * width + s.to) * item;
        uint16_t* own = owner.data() + whole * width + s.to;
        const uint16_t before = own[0];
        if (before == 0 && std::all_of(own, own + s.count, [](uint16_t o) { return o == 0; })) {
          std::memcpy(y, x, static_cast<size_t>(s.count * item));
          std::fill(own, own + s.count, static_cast<uint16_t>(i + 1));
          continue;
        }
        for (int64_t k = 0; k < s.count; ++k) {
          if (own[k] == 0) {
            std::memcpy(y + k * item, x + k * item, static_cast<size_t>(item));
            own[k] = static_cast<uint16_t>(i + 1);
            continue;
          }
          const size_t other = static_cast<size_t>(own[k]) - 1;
          if (spec_of[other] != spec_of[i]) {
            return DataLoss("{}: overlap: {} ({}) and {} ({}) both hold element {}", name,
                            names_[parts[other].rank], ShardText(parts[other].record->point.shards),
                            names_[part.rank], ShardText(part.record->point.shards), s.to + k);
          }
          ++report_->replicas_checked;
          if (std::memcmp(y + k * item, x + k * item, static_cast<size_t>(item)) != 0) {
            NoteReplica(parts[other], part, rows, whole, s.to + k, y + k * item, x + k * item);
          }
        }
      }
    }
  }
  const auto gap = std::find(owner.begin(), owner.end(), 0);
  if (gap != owner.end()) {
    const int64_t at = gap - owner.begin();
    const RowKey* key = per_row ? &rows.keys[static_cast<size_t>(at / width)] : nullptr;
    std::vector<std::string> held;
    held.reserve(parts.size());
    for (const Part& part : parts) {
      held.push_back(
          fmt::format("{}: {}", names_[part.rank], ShardText(part.record->point.shards)));
    }
    return DataLoss(
        "{}: gap: no rank holds element {}{} ({})", name, at % std::max<int64_t>(1, width),
        key == nullptr ? "" : fmt::format(" of {}@{}", Printable(key->sequence), key->position),
        fmt::join(held, "; "));
  }
  return out;
}

}  // namespace

Result<RankReport> AssembleRanks(Env* env, const std::vector<std::string>& ranks, Env* out_env,
                                 const std::string& out, ThreadPool* pool) {
  if (ranks.empty()) return InvalidArgument("no ranks");
  if (ranks.size() > 60000) return InvalidArgument("{} ranks, at most 60000", ranks.size());
  RankReport report;
  report.ranks = ranks;
  std::vector<Dump> dumps;
  for (const std::string& path : ranks) {
    TARE_ASSIGN_OR_RETURN(Dump dump, Dump::Open(env, path));
    dumps.push_back(std::move(dump));
  }
  TARE_RETURN_IF_ERROR(Assembler(std::move(dumps), ranks, &report).Run(out_env, out, pool));
  return report;
}

bool IsRankSet(Env* env, const std::string& path) {
  if (Dump::IsDump(env, path)) return false;
  const Result<std::vector<std::string>> names = env->List(path);
  return names.ok() && std::any_of(names->begin(), names->end(), [&](const std::string& n) {
           return n.ends_with(".dump") && Dump::IsDump(env, path + "/" + n);
         });
}

Result<OpenedDump> OpenDumpOrRanks(Env* env, const std::string& path) {
  OpenedDump opened;
  if (!IsRankSet(env, path)) {
    TARE_ASSIGN_OR_RETURN(Dump dump, Dump::Open(env, path));
    opened.dump = std::make_unique<Dump>(std::move(dump));
    return opened;
  }
  std::vector<std::string> ranks;
  TARE_ASSIGN_OR_RETURN(const std::vector<std::string> names, env->List(path));
  for (const std::string& n : names) {
    if (n.ends_with(".dump")) ranks.push_back(fmt::format("{}/{}", path, n));
  }
  std::string root = (std::filesystem::temp_directory_path() / "tare_ranks_XXXXXX").string();
  if (::mkdtemp(root.data()) == nullptr) return Errno("mkdtemp", root, errno);
  opened.keep = std::shared_ptr<void>(new std::string(root), [](void* p) {
    std::error_code ignored;
    std::filesystem::remove_all(*static_cast<std::string*>(p), ignored);
    delete static_cast<std::string*>(p);
  });
  TARE_ASSIGN_OR_RETURN(opened.ranks, AssembleRanks(env, ranks, Env::Real(), root + "/whole.dump"));
  TARE_ASSIGN_OR_RETURN(Dump dump, Dump::Open(Env::Real(), root + "/whole.dump"));
  opened.dump = std::make_unique<Dump>(std::move(dump));
  return opened;
}

}  // namespace tare::compare
