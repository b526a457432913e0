#include "compare/open.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/json.h"
#include "base/reasons.h"
#include "compare/dump_diff.h"
#include "tensor/checkpoint.h"

namespace tare::compare {
namespace {

class CheckpointSource : public TensorSource {
 public:
  explicit CheckpointSource(Checkpoint checkpoint) : checkpoint_(std::move(checkpoint)) {
    for (const std::string& name : checkpoint_.names()) {
      const Checkpoint::Info* info = checkpoint_.Find(name);
      entries_.push_back({name, info->dtype, info->shape});
    }
  }
  const std::vector<Entry>& entries() const override { return entries_; }
  Result<Tensor> Load(size_t i) const override { return checkpoint_.Get(entries_.at(i).name); }
  std::string name() const override { return checkpoint_.path(); }

 private:
  Checkpoint checkpoint_;
  std::vector<Entry> entries_;
};

// Tensors in the order that the recorder's metadata gives (`order`: a JSON list of names), the rest
// after them. Only the order of the report.
std::vector<std::string> RecordedOrder(const SafetensorsFile& file) {
  for (const auto& [key, value] : file.metadata()) {
    if (key != "order") continue;
    const Result<Json> parsed = ParseJson(value);
    if (!parsed.ok() || !parsed->is_array()) return {};
    std::vector<std::string> names;
    for (const Json& name : *parsed) {
      if (!name.is_string()) return {};
      names.push_back(name.get<std::string>());
    }
    return names;
  }
  return {};
}

bool EndsWith(const std::string& text, std::string_view suffix) {
  return text.size() >= suffix.size() && std::equal(suffix.rbegin(), suffix.rend(), text.rbegin());
}

}  // namespace

std::string_view InputKindName(InputKind kind) {
  switch (kind) {
    case InputKind::kTensors:
      return "tensors";
    case InputKind::kLogprobs:
      return "logprobs";
    case InputKind::kDump:
      return "dump";
  }
  return "";
}

Result<Input> OpenInput(Env* env, const std::string& path) {
  Input input;
  if (!env->Exists(path))
    return Error(Code::kNotFound, "{}: no such file or directory", Printable(path));
  if (Dump::IsDump(env, path) || IsRankSet(env, path)) {
    input.kind = InputKind::kDump;
    TARE_ASSIGN_OR_RETURN(OpenedDump opened, OpenDumpOrRanks(env, path));
    input.dump = std::move(opened.dump);
    input.ranks = std::move(opened.ranks);
    input.keep = std::move(opened.keep);
    return input;
  }
  if (EndsWith(path, ".jsonl")) {
    input.kind = InputKind::kLogprobs;
    input.logprobs.name = path;
    TARE_ASSIGN_OR_RETURN(input.logprobs.sequences, ReadLogprobs(env, path));
    return input;
  }
  if (EndsWith(path, ".safetensors")) {
    TARE_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(env, path));
    if (IsRolloutFile(file)) {
      input.kind = InputKind::kLogprobs;
      TARE_ASSIGN_OR_RETURN(input.logprobs, ReadRolloutFile(file));
      return input;
    }
    const std::vector<std::string> order = RecordedOrder(file);
    input.tensors = MakeSafetensorsSource(std::move(file), order);
    return input;
  }
  CheckpointOptions options;
  options.env = env;
  Result<Checkpoint> checkpoint = Checkpoint::Open(path, options);
  if (!checkpoint.ok()) return checkpoint.status();
  input.tensors = std::make_unique<CheckpointSource>(*std::move(checkpoint));
  return input;
}

Result<Report> DiffInputs(const Input& a, const Input& b, const DiffOptions& options) {
  if (a.kind != b.kind) {
    return InvalidArgument("A holds {}, B holds {}: only like can be compared with like",
                           InputKindName(a.kind), InputKindName(b.kind));
  }
  switch (a.kind) {
    case InputKind::kTensors:
      return DiffTensors(*a.tensors, *b.tensors, options);
    case InputKind::kLogprobs:
      return DiffLogprobs(a.logprobs, b.logprobs, options);
    case InputKind::kDump: {
      std::vector<std::string> notes;
      for (const Input* side : {&a, &b}) {
        if (side->ranks.ranks.empty()) continue;
        const char* name = side == &a ? "A" : "B";
        notes.push_back(
            fmt::format("{} is put together from {} ranks; {} elements were held twice "
                        "and bit-checked",
                        name, side->ranks.ranks.size(), side->ranks.replicas_checked));
        if (side->ranks.replica_difference.empty()) continue;
        // Which of the two would be compared? Nothing is, until the side agrees with itself.
        Report report;
        report.kind = "dumps";
        report.a = a.dump->path();
        report.b = b.dump->path();
        report.notes = notes;
        report.verdict = Verdict::kFail;
        report.reason = reason::kBitMismatch;
        report.why =
            fmt::format("side {} differs from itself: {}", name, side->ranks.replica_difference);
        return report;
      }
      TARE_ASSIGN_OR_RETURN(Report report, DiffDumps(*a.dump, *b.dump, options));
      report.notes.insert(report.notes.begin(), notes.begin(), notes.end());
      return report;
    }
  }
  return Error(Code::kInternal, "no such kind of input");
}

}  // namespace tare::compare
