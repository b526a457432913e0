#include "compare/replay_input.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/json.h"

namespace tare::compare {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 22;

// Hash over the run's tokens before index `i`.
TokenHash HashBefore(const TapRun& run, int64_t i) {
  return ExtendTokenHash(run.history,
                         std::span<const int32_t>(run.tokens).first(static_cast<size_t>(i)));
}

// The targets that follow a forward frame: runs of the frame after it when that holds logprobs.
const DumpFrame* TargetsOf(const Dump& dump, int64_t frame) {
  const auto next = static_cast<size_t>(frame + 1);
  if (next >= dump.frames().size()) return nullptr;
  const bool logprobs = std::any_of(
      dump.records().begin(), dump.records().end(),
      [&](const DumpRecord& r) { return r.frame == frame + 1 && r.point.op == "logprob"; });
  return logprobs ? &dump.frames()[next] : nullptr;
}

}  // namespace

Result<std::vector<int32_t>> HistoryTokens(const Dump& dump, const std::string& version,
                                           const TokenHash& history, int64_t position) {
  std::vector<int32_t> back;  // last token first
  TokenHash want = history;
  while (position > 0) {
    const TapRun* found = nullptr;
    int64_t taken = 0;
    for (const DumpFrame& f : dump.frames()) {
      if (f.frame.weight_version != version || f.frame.phase == TapPhase::kBackward) continue;
      for (const TapRun& run : f.frame.runs) {
        const int64_t n = position - run.position;
        if (n <= 0 || n > static_cast<int64_t>(run.tokens.size()) || n <= taken) continue;
        if (HashBefore(run, n) != want) continue;
        found = &run;
        taken = n;
      }
    }
    if (found == nullptr) {
      return Error(Code::kNotFound, "{}: no frame names the tokens before position {}", dump.path(),
                   position);
    }
    for (int64_t i = taken; i-- > 0;) back.push_back(found->tokens[static_cast<size_t>(i)]);
    want = found->history;
    position = found->position;
  }
  std::reverse(back.begin(), back.end());
  return back;
}

Result<ReplayBatch> BatchOfFrame(const Dump& dump, int64_t frame, const TokenHash& history,
                                 int64_t position) {
  const TapFrame& f = dump.frames()[static_cast<size_t>(frame)].frame;
  const bool targets_only =
      std::any_of(dump.records().begin(), dump.records().end(),
                  [&](const DumpRecord& r) { return r.frame == frame && r.point.op == "logprob"; });
  const DumpFrame* targets = targets_only ? nullptr : TargetsOf(dump, frame);
  ReplayBatch out;
  bool own = false;
  for (const TapRun& run : f.runs) {
    Result<std::vector<int32_t>> before =
        HistoryTokens(dump, f.weight_version, run.history, run.position);
    const int64_t at = position - run.position;
    const bool is_own = !own && at >= 0 && at < static_cast<int64_t>(run.tokens.size()) &&
                        HashBefore(run, at + 1) == history;
    if (!before.ok()) {
      if (is_own) return before.status();
      continue;
    }
    ReplaySequence s;
    s.name = run.sequence;
    s.tokens = *std::move(before);
    s.tokens.insert(s.tokens.end(), run.tokens.begin(), run.tokens.end());
    if (targets_only) {
      // The frame's rows are targets: the run is what was scored.
      s.first = run.position;
    } else {
      // Row p is computed to score token p + 1. Where a frame of targets follows, it says which
      // were scored; else one more token, any, makes the last row wanted.
      s.first = static_cast<int64_t>(s.tokens.size());
      if (targets != nullptr) {
        for (const TapRun& t : targets->frame.runs) {
          const int64_t n = t.position - run.position;
          if (n < 1 || n > static_cast<int64_t>(run.tokens.size()) ||
              HashBefore(run, n) != t.history) {
            continue;
          }
          const int64_t end = t.position + static_cast<int64_t>(t.tokens.size());
          if (end != s.first + 1) continue;
          s.tokens.push_back(t.tokens.back());
          s.first = t.position;
          break;
        }
      }
      if (s.first == static_cast<int64_t>(s.tokens.size())) s.tokens.push_back(s.tokens.back());
    }
    if (s.tokens.size() < 2 || s.first < 1) {
      if (is_own)
        return Error(Code::kNotFound, "{}: the row's token has none before it", dump.path());
      continue;
    }
    own = own || is_own;
    out.push_back(std::move(s));
  }
  if (!own) return Error(Code::kNotFound, "{}: frame {} does not hold the row", dump.path(), frame);
  return out;
}

int64_t SequenceOfRow(const ReplayBatch& batch, const TokenHash& history, int64_t position) {
  for (size_t i = 0; i < batch.size(); ++i) {
    const std::span<const int32_t> tokens(batch[i].tokens);
    if (static_cast<int64_t>(tokens.size()) <= position) continue;
    if (ExtendTokenHash(TokenHash{}, tokens.first(static_cast<size_t>(position) + 1)) == history) {
      return static_cast<int64_t>(i);
    }
  }
  return -1;
}

std::string FormatReplayBatch(const ReplayBatch& batch) {
  std::string out;
  for (const ReplaySequence& s : batch) {
    const auto cut = s.tokens.begin() + s.first;
    const Json line = {{"sequence", s.name},
                       {"prompt", std::vector<int32_t>(s.tokens.begin(), cut)},
                       {"tokens", std::vector<int32_t>(cut, s.tokens.end())}};
    out += line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  }
  return out;
}

Result<ReplayBatch> ParseReplayBatch(std::string_view text) {
  ReplayBatch out;
  int64_t number = 0;
  while (!text.empty()) {
    ++number;
    const auto bad = [&](std::string_view what) { return DataLoss("line {}: {}", number, what); };
    const size_t end = text.find('\n');
    if (end == std::string_view::npos) return bad("no newline at the end; the file was cut");
    Result<Json> line = ParseJson(text.substr(0, end));
    text.remove_prefix(end + 1);
    if (!line.ok()) return bad(line.status().message());
    if (!line->is_object() || line->size() != 3 || !line->contains("sequence") ||
        !(*line)["sequence"].is_string()) {
      return bad("an object of \"sequence\" (text), \"prompt\" and \"tokens\" is needed");
    }
    ReplaySequence s;
    s.name = (*line)["sequence"].get<std::string>();
    for (const char* key : {"prompt", "tokens"}) {
      if (!line->contains(key) || !(*line)[key].is_array() || (*line)[key].empty()) {
        return bad("\"prompt\" and \"tokens\" are lists of at least one token id");
      }
      if (key[0] == 't') s.first = static_cast<int64_t>(s.tokens.size());
      for (const Json& id : (*line)[key]) {
        if (!id.is_number_integer() || id < 0 || id > std::numeric_limits<int32_t>::max()) {
          return bad(fmt::format("\"{}\" holds {}; a token id is expected", key,
                                 Printable(id.dump().substr(0, 60))));
        }
        s.tokens.push_back(id.get<int32_t>());
      }
    }
    if (static_cast<int64_t>(s.tokens.size()) > kMaxTokens) return bad("too many tokens");
    out.push_back(std::move(s));
  }
  if (out.empty()) return DataLoss("no sequence");
  return out;
}

}  // namespace tare::compare
