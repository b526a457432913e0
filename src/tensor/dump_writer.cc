#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "tensor/convert.h"
#include "tensor/digest.h"
#include "tensor/dump.h"

namespace tare {
namespace {

template <DType kDType>
int64_t CountIn(const void* data, int64_t begin, int64_t end) {
  using F = FloatFormat<kDType>;
  using Bits = typename F::Bits;
  constexpr Bits kFirst = static_cast<Bits>(F::kMaxFinite + 1);
  const Bits* bits = static_cast<const Bits*>(data);
  int64_t count = 0;
  for (int64_t i = begin; i < end; ++i) {
    count += static_cast<Bits>(bits[i] & static_cast<Bits>(F::kSign - 1)) >= kFirst ? 1 : 0;
  }
  return count;
}

Json ShardsJson(const std::vector<TapShard>& shards) {
  Json out = Json::array();
  for (const TapShard& s : shards) {
    out.push_back({{"axis", s.axis},
                   {"dim", s.dim},
                   {"index", s.index},
                   {"count", s.count},
                   {"layout", s.layout}});
  }
  return out;
}

}  // namespace

// A payload waiting for its shard: a copy, because the caller may overwrite its buffer.
struct DumpWriter::Pending {
  size_t line;  // index into lines_
  std::string name;
  Tensor tensor;
};

std::string DumpShardName(int64_t shard) { return fmt::format("tensors-{:05}.safetensors", shard); }

int64_t CountNonFinite(const Tensor& tensor, ThreadPool* pool) {
  if (!IsFloat(tensor.dtype()) || tensor.elements() == 0) return 0;
  std::atomic<int64_t> total{0};
  const auto count = [&](int64_t begin, int64_t end) {
    int64_t n = 0;
    switch (tensor.dtype()) {
      case DType::kF64:
        n = CountIn<DType::kF64>(tensor.data(), begin, end);
        break;
      case DType::kF32:
        n = CountIn<DType::kF32>(tensor.data(), begin, end);
        break;
      case DType::kF16:
        n = CountIn<DType::kF16>(tensor.data(), begin, end);
        break;
      case DType::kBF16:
        n = CountIn<DType::kBF16>(tensor.data(), begin, end);
        break;
      case DType::kE4M3:
        n = CountIn<DType::kE4M3>(tensor.data(), begin, end);
        break;
      case DType::kE5M2:
        n = CountIn<DType::kE5M2>(tensor.data(), begin, end);
        break;
      default:
        break;
    }
    total.fetch_add(n, std::memory_order_relaxed);
  };
  if (pool != nullptr) {
    pool->ParallelRanges(tensor.elements(), int64_t{1} << 18, count);
  } else {
    count(0, tensor.elements());
  }
  return total.load();
}

DumpWriter::DumpWriter(Env* env, std::string path, DumpOptions options)
    : env_(env), path_(std::move(path)), options_(std::move(options)) {}

DumpWriter::~DumpWriter() = default;

Result<std::unique_ptr<DumpWriter>> DumpWriter::Create(Env* env, const std::string& path,
                                                       DumpOptions options) {
  TARE_RETURN_IF_ERROR(env->CreateDir(path));
  std::unique_ptr<DumpWriter> writer(new DumpWriter(env, path, std::move(options)));
  TARE_RETURN_IF_ERROR(writer->WriteManifest(false));
  TARE_ASSIGN_OR_RETURN(writer->records_file_,
                        env->OpenWritable(path + "/records.jsonl", Env::Mode::kExclusive));
  if (writer->options_.sync) TARE_RETURN_IF_ERROR(env->SyncDir(path));
  return writer;
}

void DumpWriter::Line(const Json& fields) {
  Json line;
  line["seq"] = seq_++;
  for (const auto& [key, value] : fields.items()) line[key] = value;
  lines_.push_back(std::move(line));
}

void DumpWriter::BeginFrame(const TapFrame& frame) {
  if (!status_.ok()) return;
  status_ = DoBeginFrame(frame);
}

Status DumpWriter::DoBeginFrame(const TapFrame& frame) {
  if (in_frame_) return Error(Code::kPrecondition, "dump {}: BeginFrame inside a frame", path_);
  Json runs = Json::array();
  std::vector<std::pair<int64_t, int64_t>> rows;
  for (const TapRun& run : frame.runs) {
    const int64_t count = static_cast<int64_t>(run.tokens.size());
    if (run.row < 0 || run.position < 0 || count == 0) {
      return InvalidArgument("dump {}: run of sequence '{}' has row {}, position {} and {} tokens",
                             path_, run.sequence, run.row, run.position, count);
    }
    rows.emplace_back(run.row, run.row + count);
    runs.push_back({{"sequence", run.sequence},
                    {"history", Hex(run.history)},
                    {"position", run.position},
                    {"row", run.row},
                    {"tokens", run.tokens}});
  }
  std::sort(rows.begin(), rows.end());
  for (size_t i = 1; i < rows.size(); ++i) {
    if (rows[i].first < rows[i - 1].second) {
      return InvalidArgument("dump {}: two runs of a frame share row {}", path_, rows[i].first);
    }
  }
  Line({{"kind", "frame"},
        {"frame", frames_},
        {"phase", TapPhaseName(frame.phase)},
        {"side", fault::SideName(frame.side)},
        {"weights", frame.weight_version},
        {"step", frame.step},
        {"runs", std::move(runs)}});
  in_frame_ = true;
  frame_names_.clear();
  return Ok();
}

void DumpWriter::Emit(const TapPoint& point, const Tensor& value) {
  if (!status_.ok() || (options_.record && !options_.record(point))) return;
  status_ = DoEmit(point, value);
}

Status DumpWriter::DoEmit(const TapPoint& point, const Tensor& value) {
  if (!in_frame_)
    return Error(Code::kPrecondition, "dump {}: Emit of {} outside a frame", path_, point.name);
  if (point.name.empty()) return InvalidArgument("dump {}: a point needs a name", path_);
  if (point.per_row && value.rank() < 1) {
    return InvalidArgument("dump {}: {} is a scalar, a per-row tensor has rows", path_, point.name);
  }
  // Sentinel and expected value share a name on purpose.
  const std::string key = point.role == TapRole::kExpected ? "\n" + point.name : point.name;
  const auto at = std::lower_bound(frame_names_.begin(), frame_names_.end(), key);
  if (at != frame_names_.end() && *at == key) {
    return InvalidArgument("dump {}: {} was already emitted in this frame", path_, point.name);
  }
  frame_names_.insert(at, key);

  const bool keep = !options_.keep_payload || options_.keep_payload(point);
  TARE_ASSIGN_OR_RETURN(Tensor host, value.To(Device::kCpu));
  // The caller may overwrite its buffer, and a payload waits for its shard.
  if (keep && value.device() == Device::kCpu) {
    TARE_ASSIGN_OR_RETURN(host, host.Clone());
  }
  Json line = {{"kind", "tensor"},
               {"frame", frames_},
               {"name", point.name},
               {"layer", point.layer},
               {"op", point.op},
               {"role", TapRoleName(point.role)},
               {"inputs", point.inputs},
               {"reads_history", point.reads_history},
               {"per_row", point.per_row},
               {"mask", point.mask},
               {"shards", ShardsJson(point.shards)},
               {"dtype", DTypeName(host.dtype())},
               {"shape", host.shape()},
               {"sha256", Hex(TensorDigest(host, options_.pool))},
               {"non_finite", CountNonFinite(host, options_.pool)}};
  Line(line);
  ++records_;
  if (keep) {
    pending_bytes_ += host.size_bytes();
    pending_.push_back(
        {lines_.size() - 1, fmt::format("{}.{}", seq_ - 1, point.name), std::move(host)});
  }
  if (pending_bytes_ >= options_.shard_bytes || lines_.size() >= 4096) return Flush();
  return Ok();
}

void DumpWriter::EndFrame() {
  if (!status_.ok()) return;
  if (!in_frame_) {
    status_ = Error(Code::kPrecondition, "dump {}: EndFrame outside a frame", path_);
    return;
  }
  Line({{"kind", "end"}, {"frame", frames_}});
  ++frames_;
  in_frame_ = false;
}

// A shard is a plain safetensors file. Payloads are laid out by falling element size, so that each
// is aligned to its element without a gap.
Status DumpWriter::WriteShard() {
  std::stable_sort(pending_.begin(), pending_.end(), [](const Pending& a, const Pending& b) {
    return SizeOf(a.tensor.dtype()) > SizeOf(b.tensor.dtype());
  });
  Json header = Json::object();
  // Keys are unique by their sequence number; pushed without a search, which would be quadratic.
  auto& entries = header.get_ref<Json::object_t&>();
  int64_t offset = 0;
  for (const Pending& p : pending_) {
    const int64_t end = offset + p.tensor.size_bytes();
    entries.Container::emplace_back(p.name, Json{{"dtype", SafetensorsName(p.tensor.dtype())},
                                                 {"shape", p.tensor.shape()},
                                                 {"data_offsets", {offset, end}}});
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 8 + 63) / 64 * 64 - 8, ' ');
  const int64_t data_start = static_cast<int64_t>(text.size()) + 8;
  std::string start(8, '\0');
  for (int i = 0; i < 8; ++i)
    start[i] = static_cast<char>(static_cast<uint64_t>(text.size()) >> (8 * i));

  const std::string name = path_ + "/" + DumpShardName(shards_);
  TARE_ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file,
                        env_->OpenWritable(name + ".tmp", Env::Mode::kTruncate));
  TARE_RETURN_IF_ERROR(file->Append(start));
  TARE_RETURN_IF_ERROR(file->Append(text));
  offset = data_start;
  for (const Pending& p : pending_) {
    TARE_RETURN_IF_ERROR(file->Append(
        {static_cast<const char*>(p.tensor.data()), static_cast<size_t>(p.tensor.size_bytes())}));
    lines_[p.line]["payload"] = {{"shard", shards_}, {"offset", offset}};
    offset += p.tensor.size_bytes();
  }
  if (options_.sync) TARE_RETURN_IF_ERROR(file->Sync());
  TARE_RETURN_IF_ERROR(file->Close());
  TARE_RETURN_IF_ERROR(env_->Rename(name + ".tmp", name));
  if (options_.sync) TARE_RETURN_IF_ERROR(env_->SyncDir(path_));
  ++shards_;
  pending_.clear();
  pending_bytes_ = 0;
  return Ok();
}

Status DumpWriter::Flush() {
  if (!status_.ok()) return status_;
  const auto run = [&]() -> Status {
    if (!pending_.empty()) TARE_RETURN_IF_ERROR(WriteShard());
    std::string text;
    for (const Json& line : lines_) {
      text += line.dump(-1, ' ', false, Json::error_handler_t::replace);
      text += '\n';
    }
    lines_.clear();
    if (text.empty()) return Ok();
    TARE_RETURN_IF_ERROR(records_file_->Append(text));
    records_hash_.Update(text);
    records_bytes_ += static_cast<int64_t>(text.size());
    return options_.sync ? records_file_->Sync() : Ok();
  };
  status_ = run();
  return status_;
}

Status DumpWriter::WriteManifest(bool complete) {
  const DumpManifest& m = options_.manifest;
  Json weights = Json::array();
  for (const DumpWeights& w : m.weights)
    weights.push_back({{"version", w.version}, {"sha256", Hex(w.sha256)}});
  Json manifest = {{"schema", "tare.dump/1"},  {"complete", complete},
                   {"side", m.side},           {"weights", std::move(weights)},
                   {"contracts", m.contracts}, {"identity", m.identity}};
  if (complete) {
    manifest["frames"] = frames_;
    manifest["records"] = records_;
    manifest["shards"] = shards_;
    manifest["lines"] = seq_;
    manifest["lines_bytes"] = records_bytes_;
    manifest["lines_sha256"] = Hex(records_hash_.Finish());
  }
  return env_->WriteFileAtomic(path_ + "/manifest.json",
                               manifest.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
}

Status DumpWriter::Finish() {
  TARE_CHECK(!finished_) << "Finish of dump " << path_ << " was called twice";
  finished_ = true;
  if (status_.ok() && in_frame_) {
    status_ = Error(Code::kPrecondition, "dump {}: Finish inside a frame", path_);
  }
  TARE_RETURN_IF_ERROR(Flush());
  status_ = records_file_->Sync();
  if (status_.ok()) status_ = records_file_->Close();
  if (status_.ok()) status_ = WriteManifest(true);
  return status_;
}

}  // namespace tare
