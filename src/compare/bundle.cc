#include "compare/bundle.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/reasons.h"
#include "compare/bits.h"
#include "tensor/digest.h"
#include "tensor/safetensors.h"

namespace tare::compare {
namespace {

const DumpRecord* FindRecord(const Dump& dump, int64_t frame, const std::string& name) {
  for (const DumpRecord& r : dump.records()) {
    if (r.frame == frame && r.point.name == name && r.point.role != TapRole::kExpected) return &r;
  }
  return nullptr;
}

// The run and row of the site in one dump's frame.
struct Where {
  const TapRun* run = nullptr;
  int64_t row = -1;
};

Where FindRow(const Dump& dump, int64_t frame, const TokenHash& key, int64_t position) {
  for (const TapRun& run : dump.frames()[static_cast<size_t>(frame)].frame.runs) {
    const int64_t at = position - run.position;
    if (at < 0 || at >= static_cast<int64_t>(run.tokens.size())) continue;
    const std::span<const int32_t> tokens(run.tokens);
    if (ExtendTokenHash(run.history, tokens.first(static_cast<size_t>(at) + 1)) == key)
      return {&run, run.row + at};
  }
  return {};
}

std::string InputName(const std::string& side) { return "input." + side + ".jsonl"; }

// A file of the bundle that bundle.json names, with the digest that stands there.
Result<std::string> ReadFile(Env* env, const Bundle& bundle, const std::string& name) {
  const Json& files = bundle.description["files"];
  const auto at = files.find(name);
  if (at == files.end()) return Error(Code::kNotFound, "{} holds no {}", bundle.path, name);
  TARE_ASSIGN_OR_RETURN(std::string bytes, env->ReadFile(bundle.path + "/" + name));
  if (!at->is_string() || *at != Hex(Sha256Of(bytes))) {
    return DataLoss("{}/{} does not match its digest in bundle.json: the bundle was altered",
                    bundle.path, name);
  }
  return bytes;
}

Json SideJson(const Dump& dump, int64_t frame) {
  Json weights = Json::array();
  for (const DumpWeights& w : dump.manifest().weights)
    weights.push_back({{"version", w.version}, {"sha256", Hex(w.sha256)}});
  return {{"side", dump.manifest().side},
          {"phase", TapPhaseName(dump.frames()[static_cast<size_t>(frame)].frame.phase)},
          {"weights", std::move(weights)},
          {"contracts", dump.manifest().contracts},
          {"identity", dump.manifest().identity}};
}

}  // namespace

Status WriteBundle(Env* env, const std::string& path, const Dump& a, const Dump& b,
                   const LocateReport& report) {
  const Site& site = report.site;
  if (site.position < 0 || !site.words_known) {
    return Unsupported("{}: a bundle needs a site with rows whose payloads were kept", path);
  }
  // The row's key, from side A.
  const TapRun* run_a = nullptr;
  for (const TapRun& run : a.frames()[static_cast<size_t>(site.frame_a)].frame.runs) {
    const int64_t at = site.position - run.position;
    if (run.sequence == site.sequence && at >= 0 && at < static_cast<int64_t>(run.tokens.size()))
      run_a = &run;
  }
  if (run_a == nullptr)
    return Error(Code::kInternal, "the site's sequence {} is not in its frame", site.sequence);
  const int64_t count = site.position - run_a->position + 1;
  const std::span<const int32_t> tokens =
      std::span<const int32_t>(run_a->tokens).first(static_cast<size_t>(count));
  const TokenHash key = ExtendTokenHash(run_a->history, tokens);

  std::vector<std::pair<std::string, Tensor>> tensors;
  TARE_ASSIGN_OR_RETURN(Tensor ids, Tensor::Allocate(DType::kI32, {count}));
  std::memcpy(ids.mutable_data(), tokens.data(), tokens.size_bytes());
  tensors.emplace_back("tokens", std::move(ids));
  for (const bool first : {true, false}) {
    const Dump& dump = first ? a : b;
    const int64_t frame = first ? site.frame_a : site.frame_b;
    const char* suffix = first ? ".a" : ".b";
    const Where where = FindRow(dump, frame, key, site.position);
    if (where.run == nullptr)
      return Error(Code::kInternal, "the site's row is not in frame {} of {}", frame, dump.path());
    const DumpRecord* output = FindRecord(dump, frame, site.name);
    TARE_ASSIGN_OR_RETURN(const Tensor out, dump.Payload(*output));
    TARE_ASSIGN_OR_RETURN(Tensor row, out.Slice(where.row, where.row + 1));
    tensors.emplace_back(std::string("output") + suffix, std::move(row));
    for (const std::string& input : site.inputs) {
      const DumpRecord* record = FindRecord(dump, frame, input);
      if (record == nullptr || record->shard < 0) continue;
      TARE_ASSIGN_OR_RETURN(const Tensor in, dump.Payload(*record));
      // Rows of the run up to the site's, so that an operator that reads history finds it.
      TARE_ASSIGN_OR_RETURN(Tensor rows, record->point.per_row && where.row < in.dim(0)
                                             ? in.Slice(where.run->row, where.row + 1)
                                             : Result<Tensor>(in));
      tensors.emplace_back("input." + input + suffix, std::move(rows));
    }
  }
  TARE_RETURN_IF_ERROR(env->CreateDir(path));
  TARE_RETURN_IF_ERROR(WriteSafetensors(env, path + "/tensors.safetensors", tensors));
  TARE_ASSIGN_OR_RETURN(const std::string bytes, env->ReadFile(path + "/tensors.safetensors"));
  Json files = {{"tensors.safetensors", Hex(Sha256Of(bytes))}};
  for (const bool first : {true, false}) {
    const Result<ReplayBatch> batch =
        BatchOfFrame(first ? a : b, first ? site.frame_a : site.frame_b, key, site.position);
    if (!batch.ok() && batch.status().code() == Code::kNotFound) continue;
    TARE_RETURN_IF_ERROR(batch.status());
    const std::string text = FormatReplayBatch(*batch);
    TARE_RETURN_IF_ERROR(env->WriteFileAtomic(path + "/" + InputName(first ? "a" : "b"), text));
    files[InputName(first ? "a" : "b")] = Hex(Sha256Of(text));
  }
  Json description = {
      {"schema", "tare.bundle/1"},
      {"site", LocateJson(report)["site"]},
      {"verdict", VerdictName(report.verdict)},
      {"key",
       {{"history", Hex(key)},
        {"position", site.position},
        {"weights", a.frames()[static_cast<size_t>(site.frame_a)].frame.weight_version}}},
      {"first_position", run_a->position},
      {"a", SideJson(a, site.frame_a)},
      {"b", SideJson(b, site.frame_b)},
      {"files", std::move(files)}};
  return env->WriteFileAtomic(
      path + "/bundle.json",
      description.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
}

Result<Bundle> OpenBundle(Env* env, const std::string& path) {
  Bundle bundle;
  bundle.path = path;
  TARE_ASSIGN_OR_RETURN(const std::string text, env->ReadFile(path + "/bundle.json"));
  Result<Json> parsed = ParseJson(text);
  if (!parsed.ok()) return DataLoss("{}/bundle.json: {}", path, parsed.status().message());
  bundle.description = *std::move(parsed);
  const Json& d = bundle.description;
  if (!d.is_object() || d.value("schema", Json()) != "tare.bundle/1")
    return DataLoss("{}/bundle.json: schema is not tare.bundle/1", path);
  const auto has = [&](const char* object, const char* key) {
    return d.contains(object) && d[object].is_object() && d[object].contains(key);
  };
  if (!has("files", "tensors.safetensors") || !d["files"]["tensors.safetensors"].is_string() ||
      !has("key", "history") || !d["key"]["history"].is_string() || !has("key", "position") ||
      !d["key"]["position"].is_number_unsigned() || !has("site", "name") ||
      !d["site"]["name"].is_string() || !has("key", "weights") ||
      !d["key"]["weights"].is_string()) {
    return DataLoss(
        "{}/bundle.json: needs files.tensors.safetensors, key.history, key.position, key.weights "
        "and site.name",
        path);
  }
  const Result<TokenHash> history = ParseSha256(d["key"]["history"].get<std::string>());
  if (!history.ok()) return history.status().Annotate(path + "/bundle.json");
  bundle.history = *history;
  if (d["key"]["position"].get<uint64_t>() > uint64_t{1} << 53)
    return DataLoss("{}/bundle.json: key.position is no position", path);
  bundle.position = d["key"]["position"].get<int64_t>();
  for (const auto& [name, digest] : d["files"].items()) {
    if (name != "tensors.safetensors" && name != InputName("a") && name != InputName("b"))
      return DataLoss("{}/bundle.json: files names {}, which no bundle holds", path,
                      Printable(name));
    TARE_RETURN_IF_ERROR(ReadFile(env, bundle, name).status());
  }
  TARE_ASSIGN_OR_RETURN(const SafetensorsFile file,
                        SafetensorsFile::Open(env, path + "/tensors.safetensors"));
  TARE_ASSIGN_OR_RETURN(const Tensor out_a, file.Get("output.a"));
  TARE_ASSIGN_OR_RETURN(const Tensor out_b, file.Get("output.b"));
  bundle.output_a = TensorDigest(out_a);
  bundle.output_b = TensorDigest(out_b);
  return bundle;
}

std::vector<std::string> ReplayCommand(const Bundle& bundle, const std::string& side) {
  std::vector<std::string> out;
  const Json& d = bundle.description;
  if (!d.contains(side) || !d[side].is_object() || !d[side].contains("identity")) return out;
  const Json& identity = d[side]["identity"];
  if (!identity.is_object() || !identity.contains("replay") || !identity["replay"].is_array())
    return out;
  for (const Json& arg : identity["replay"]) {
    if (!arg.is_string()) return {};
    out.push_back(arg.get<std::string>());
  }
  return out;
}

Result<ReplayBatch> ReplayInput(Env* env, const Bundle& bundle, const std::string& side) {
  TARE_ASSIGN_OR_RETURN(const std::string text, ReadFile(env, bundle, InputName(side)));
  Result<ReplayBatch> batch = ParseReplayBatch(text);
  if (!batch.ok()) return batch.status().Annotate(bundle.path + "/" + InputName(side));
  if (SequenceOfRow(*batch, bundle.history, bundle.position) < 0) {
    return DataLoss("{}/{} holds no sequence with the tokens of the bundle's row", bundle.path,
                    InputName(side));
  }
  return batch;
}

Result<ReplayResult> CheckReplay(const Bundle& bundle, const std::string& side, const Dump& fresh) {
  ReplayResult result;
  const auto say = [&](Verdict verdict, std::string_view code, std::string detail) {
    result.verdict = verdict;
    result.reason = code;
    result.detail = std::move(detail);
    return result;
  };
  const Json& d = bundle.description;
  const std::string version = d["key"]["weights"];
  const Json* weights = nullptr;
  if (const auto at = d.find(side); at != d.end() && at->is_object() && at->contains("weights"))
    weights = &(*at)["weights"];
  for (const Json& w : weights != nullptr && weights->is_array() ? *weights : Json::array()) {
    for (const DumpWeights& now : fresh.manifest().weights) {
      if (!w.is_object() || !w.contains("version") || !w.contains("sha256")) continue;
      if (w["version"] == now.version && w["sha256"] != Hex(now.sha256)) {
        return say(Verdict::kRefused, reason::kWeightHashMismatch,
                   fmt::format("{} is {} now, recorded is {}", now.version, Hex(now.sha256),
                               w["sha256"].dump()));
      }
    }
  }
  const TokenHash key = bundle.history;
  const int64_t position = bundle.position;
  const std::string name = d["site"]["name"];
  // The key may occur in several frames (a prefix that sequences share): one of them is the row.
  bool found = false;
  for (const DumpRecord& r : fresh.records()) {
    if (r.point.name != name || r.shard < 0 || !r.point.per_row ||
        r.point.role == TapRole::kExpected)
      continue;
    if (fresh.frames()[static_cast<size_t>(r.frame)].frame.weight_version != version) continue;
    const Where where = FindRow(fresh, r.frame, key, position);
    if (where.run == nullptr || where.row >= r.shape[0]) continue;
    TARE_ASSIGN_OR_RETURN(const Tensor t, fresh.Payload(r));
    TARE_ASSIGN_OR_RETURN(const Tensor row, t.Slice(where.row, where.row + 1));
    found = true;
    if (TensorDigest(row) == (side == "a" ? bundle.output_a : bundle.output_b))
      return say(Verdict::kPass, {}, "the recorded bits came back");
  }
  if (found) {
    return say(Verdict::kFail, reason::kReplayDiffers,
               fmt::format("{} at position {} has other bits", name, position));
  }
  return say(Verdict::kInconclusive, reason::kMissingCapture,
             fmt::format("no row of {} for the bundle's tokens at {}", name, version));
}

}  // namespace tare::compare
