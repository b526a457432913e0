#include <fmt/format.h>

#include <algorithm>

#include "tensor/digest.h"
#include "tensor/dump.h"

namespace tare {
namespace {

struct Totals {
  int64_t lines = 0;
  int64_t bytes = 0;
  Sha256Digest sha256{};
};

// The manifest of a cut dump may itself be cut: then `cut` says so and the rest keeps its defaults.
Result<DumpManifest> ParseManifest(std::string_view text, Totals* totals, std::string* cut) {
  DumpManifest m;
  // Only a prefix of a manifest is a cut; anything else that does not parse is damage.
  if (text.empty() || (text.front() == '{' && text.find("\n}\n") == std::string_view::npos)) {
    *cut = fmt::format("manifest.json is cut at byte {}", text.size());
    return m;
  }
  const Result<Json> parsed = ParseJson(text);
  if (!parsed.ok()) return DataLoss("manifest.json: {}", parsed.status().message());
  const Json& j = *parsed;
  const auto wrong = [](const char* what) { return DataLoss("manifest.json: {}", what); };
  if (!j.is_object()) return wrong("not an object");
  static constexpr std::string_view kKnown[] = {
      "schema", "complete", "side",   "weights", "contracts",   "identity",
      "frames", "records",  "shards", "lines",   "lines_bytes", "lines_sha256"};
  for (const auto& [key, value] : j.items()) {
    if (std::find(std::begin(kKnown), std::end(kKnown), key) == std::end(kKnown)) {
      return DataLoss("manifest.json has an unknown key '{}'; known are {}", Printable(key),
                      fmt::join(kKnown, ", "));
    }
  }
  if (!j.contains("schema") || j["schema"] != "tare.dump/1")
    return wrong("schema is not tare.dump/1");
  if (!j.contains("complete") || !j["complete"].is_boolean())
    return wrong("'complete' is not true or false");
  m.complete = j["complete"].get<bool>();
  if (!j.contains("side") || !j["side"].is_string()) return wrong("'side' is not a string");
  m.side = j["side"].get<std::string>();
  if (!j.contains("weights") || !j["weights"].is_array()) return wrong("'weights' is not an array");
  for (const Json& w : j["weights"]) {
    if (!w.is_object() || w.size() != 2 || !w.contains("version") || !w["version"].is_string() ||
        !w.contains("sha256") || !w["sha256"].is_string()) {
      return wrong("'weights' holds other than {version, sha256}");
    }
    DumpWeights weights;
    weights.version = w["version"].get<std::string>();
    TARE_ASSIGN_OR_RETURN(weights.sha256, ParseSha256(w["sha256"].get<std::string>()));
    m.weights.push_back(std::move(weights));
  }
  if (!j.contains("contracts") || !j["contracts"].is_array())
    return wrong("'contracts' is not an array");
  for (const Json& c : j["contracts"]) {
    if (!c.is_string()) return wrong("'contracts' holds other than strings");
    m.contracts.push_back(c.get<std::string>());
  }
  if (!j.contains("identity") || !j["identity"].is_object())
    return wrong("'identity' is not an object");
  m.identity = j["identity"];
  if (!m.complete) {
    *cut = "the writer did not finish: manifest.json is not marked complete";
    return m;
  }
  for (const char* key : {"frames", "records", "shards", "lines", "lines_bytes"}) {
    if (!j.contains(key) || !j[key].is_number_unsigned() ||
        j[key].get<uint64_t>() > uint64_t{1} << 53) {
      return DataLoss("manifest.json: '{}' is not a count", key);
    }
  }
  if (!j.contains("lines_sha256") || !j["lines_sha256"].is_string())
    return wrong("'lines_sha256' is missing");
  totals->lines = j["lines"].get<int64_t>();
  totals->bytes = j["lines_bytes"].get<int64_t>();
  TARE_ASSIGN_OR_RETURN(totals->sha256, ParseSha256(j["lines_sha256"].get<std::string>()));
  return m;
}

}  // namespace

bool Dump::IsDump(Env* env, const std::string& path) {
  return env->Exists(path + "/manifest.json") || env->Exists(path + "/records.jsonl");
}

Result<Dump> Dump::Open(Env* env, const std::string& path) {
  if (!IsDump(env, path)) {
    return Error(Code::kNotFound, "{}: no dump (neither manifest.json nor records.jsonl is there)",
                 path);
  }
  Dump dump;
  dump.env_ = env;
  dump.path_ = path;
  Totals totals;
  if (env->Exists(path + "/manifest.json")) {
    TARE_ASSIGN_OR_RETURN(const std::string text, env->ReadFile(path + "/manifest.json"));
    Result<DumpManifest> manifest = ParseManifest(text, &totals, &dump.cut_);
    if (!manifest.ok()) return manifest.status().Annotate(path);
    dump.manifest_ = *std::move(manifest);
  } else {
    dump.cut_ = "manifest.json is missing";
  }
  const auto cut = [&](const std::string& why) {
    if (!dump.cut_.empty()) dump.cut_ += "; ";
    dump.cut_ += why;
  };

  std::unique_ptr<ReadableFile> records;
  std::string_view text;
  if (env->Exists(path + "/records.jsonl")) {
    TARE_ASSIGN_OR_RETURN(records, env->OpenReadable(path + "/records.jsonl"));
    text = records->bytes();
  } else {
    cut("records.jsonl is missing");
  }
  if (dump.manifest_.complete) {
    const int64_t size = static_cast<int64_t>(text.size());
    if (size > totals.bytes) {
      return DataLoss(
          "{}/records.jsonl has {} bytes, the manifest counts {}: lines were added after the end",
          path, size, totals.bytes);
    }
    if (size < totals.bytes) {
      cut(fmt::format("records.jsonl ends at byte {} of {}", size, totals.bytes));
    } else if (Sha256Of(text) != totals.sha256) {
      return DataLoss(
          "{}/records.jsonl does not match the manifest's digest: it was changed after the end",
          path);
    }
  }
  size_t at = 0;
  while (at < text.size()) {
    const size_t end = text.find('\n', at);
    if (end == std::string_view::npos) {
      cut(fmt::format("line {} of records.jsonl is torn at byte {}", dump.index_.lines() + 1,
                      text.size()));
      break;
    }
    const Status status = dump.index_.AddLine(text.substr(at, end - at));
    if (!status.ok()) return status.Annotate(path + "/records.jsonl");
    at = end + 1;
  }
  if (dump.manifest_.complete && dump.cut_.empty() && dump.index_.lines() != totals.lines) {
    return DataLoss("{}/records.jsonl has {} lines, the manifest counts {}", path,
                    dump.index_.lines(), totals.lines);
  }

  // A payload that does not fit in its shard's file ends the dump there.
  std::vector<int64_t> sizes;
  for (const DumpRecord& r : dump.index_.records()) {
    if (r.shard < 0) continue;
    const std::string name = DumpShardName(r.shard);
    while (static_cast<int64_t>(sizes.size()) <= r.shard) {
      const Result<FileInfo> info =
          env->Stat(path + "/" + DumpShardName(static_cast<int64_t>(sizes.size())));
      sizes.push_back(info.ok() && info->kind == FileInfo::Kind::kFile
                          ? static_cast<int64_t>(info->size_bytes)
                          : -1);
    }
    const int64_t need = r.offset + ElementCount(r.shape).value() * SizeOf(r.dtype);
    const int64_t have = sizes[static_cast<size_t>(r.shard)];
    if (have >= need) continue;
    cut(have < 0 ? fmt::format("{} is missing", name)
                 : fmt::format("{} ends at byte {}, {} needs {}", name, have,
                               Printable(r.point.name), need));
    dump.index_.CutAt(r.seq);
    break;
  }
  return dump;
}

Result<Tensor> Dump::Payload(const DumpRecord& record) const {
  if (record.shard < 0) {
    return Error(Code::kNotFound, "{}: no payload of {} was kept, only its digest", path_,
                 record.point.name);
  }
  const size_t i = static_cast<size_t>(record.shard);
  if (shards_.size() <= i) shards_.resize(i + 1);
  if (shards_[i] == nullptr) {
    TARE_ASSIGN_OR_RETURN(std::unique_ptr<ReadableFile> file,
                          env_->OpenReadable(path_ + "/" + DumpShardName(record.shard)));
    shards_[i] = std::move(file);
  }
  const std::string_view bytes = shards_[i]->bytes();
  const int64_t size = ElementCount(record.shape).value() * SizeOf(record.dtype);
  if (record.offset < 0 || record.offset + size > static_cast<int64_t>(bytes.size())) {
    return DataLoss("{}/{} shrank while it was read", path_, DumpShardName(record.shard));
  }
  return Tensor::Wrap(bytes.data() + record.offset, record.dtype, record.shape, shards_[i]);
}

Status Dump::Verify(const DumpRecord& record, ThreadPool* pool) const {
  TARE_ASSIGN_OR_RETURN(const Tensor tensor, Payload(record));
  const Sha256Digest digest = TensorDigest(tensor, pool);
  if (digest == record.digest) return Ok();
  return DataLoss("{}: payload of {} (line {}) has digest {}, recorded is {}", path_,
                  Printable(record.point.name), record.seq + 1, Hex(digest), Hex(record.digest));
}

}  // namespace tare
