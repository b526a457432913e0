#include "models/score.h"

#include <algorithm>
#include <numeric>

namespace tare::models {
namespace {

// A sequence's inputs and targets: token t is scored at the row of token t - 1.
struct Job {
  std::vector<int32_t> targets;  // one for each input row
  int64_t rows = 0;
};

TokenHash HistoryOf(const ScoreSequence& s, int64_t position) {
  return ExtendTokenHash(TokenHash{}, std::span(s.tokens).first(position));
}

}  // namespace

Result<ScoreResult> ScoreSequences(const ops::Ctx& ctx, const Model& model,
                                   const std::vector<ScoreSequence>& sequences,
                                   const ScoreOptions& options, Scratch* scratch, Tap* tap) {
  if (options.batch_tokens < 1 || options.chunk < 0 || options.page_size < 1) {
    return InvalidArgument("batch_tokens {}, chunk {} and page_size {} must be at least 1, 0 and 1",
                           options.batch_tokens, options.chunk, options.page_size);
  }
  if (options.tape && options.chunk != 0)
    return InvalidArgument("a tape records whole sequences, not chunks");
  ScoreResult result;
  result.logprob.resize(sequences.size());
  result.entropy.resize(sequences.size());
  std::vector<Job> jobs(sequences.size());
  for (size_t i = 0; i < sequences.size(); ++i) {
    const ScoreSequence& s = sequences[i];
    const int64_t n = static_cast<int64_t>(s.tokens.size());
    if (n < 2 || s.first < 1 || s.first >= n) {
      return InvalidArgument(
          "sequence {} (\"{}\") has {} tokens and is scored from token {}; at least one token "
          "after "
          "the first is needed",
          i, s.name, n, s.first);
    }
    jobs[i].rows = n - 1;
    jobs[i].targets.assign(n - 1, -1);
    std::copy(s.tokens.begin() + s.first, s.tokens.end(), jobs[i].targets.begin() + s.first - 1);
  }
  std::vector<size_t> order(sequences.size());
  std::iota(order.begin(), order.end(), 0);
  if (options.longest_first) {
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return jobs[a].rows > jobs[b].rows; });
  }

  // Runs the batch and hands its values to the sequences.
  const auto run = [&](Batch& batch, const std::vector<size_t>& owner) -> Status {
    batch.entropy = options.entropy;
    batch.row_align = options.row_align;
    batch.phase = options.phase;
    batch.weight_version = options.weight_version;
    Tape tape;
    TARE_ASSIGN_OR_RETURN(const ForwardOutput out,
                          Forward(ctx, model, batch, scratch, options.tape ? &tape : nullptr, tap));
    ++result.batches;
    size_t at = 0;
    for (size_t r = 0; r < batch.runs.size(); ++r) {
      result.rows += static_cast<int64_t>(batch.runs[r].tokens.size());
      for (int32_t target : batch.runs[r].targets) {
        if (target < 0) continue;
        result.logprob[owner[r]].push_back(out.logprob[at]);
        if (options.entropy) result.entropy[owner[r]].push_back(out.entropy[at]);
        ++at;
      }
    }
    return Ok();
  };
  const auto token_run = [&](size_t i, int64_t begin, int64_t count) {
    TokenRun r;
    r.tokens = std::span(sequences[i].tokens).subspan(begin, count);
    r.targets = std::span(jobs[i].targets).subspan(begin, count);
    r.position = begin;
    r.temperature = sequences[i].temperature;
    r.name = sequences[i].name;
    if (tap != nullptr) r.history = HistoryOf(sequences[i], begin);
    return r;
  };

  for (size_t next = 0; next < order.size();) {
    // A group of sequences that fit together.
    std::vector<size_t> group;
    int64_t rows = 0, longest = 0;
    while (next < order.size() &&
           (group.empty() || rows + jobs[order[next]].rows <= options.batch_tokens)) {
      rows += jobs[order[next]].rows;
      longest = std::max(longest, jobs[order[next]].rows);
      group.push_back(order[next++]);
    }
    if (options.chunk == 0) {
      Batch batch;
      for (size_t i : group) batch.runs.push_back(token_run(i, 0, jobs[i].rows));
      TARE_RETURN_IF_ERROR(run(batch, group));
      continue;
    }
    const int64_t pages = (longest + options.page_size - 1) / options.page_size;
    const int64_t count = static_cast<int64_t>(group.size());
    TARE_ASSIGN_OR_RETURN(KvCache cache, KvCache::Create(model.config(), pages * count,
                                                         options.page_size, model.device()));
    std::vector<int32_t> table(pages * count);
    std::iota(table.begin(), table.end(), 0);
    for (int64_t begin = 0; begin < longest; begin += options.chunk) {
      Batch batch;
      batch.cache = &cache;
      batch.block_table = table;
      batch.block_rows = count;
      batch.max_pages = pages;
      std::vector<size_t> owner;
      for (int64_t g = 0; g < count; ++g) {
        const size_t i = group[g];
        if (begin >= jobs[i].rows) continue;
        TokenRun r = token_run(i, begin, std::min(options.chunk, jobs[i].rows - begin));
        r.block_row = static_cast<int32_t>(g);
        batch.runs.push_back(std::move(r));
        owner.push_back(i);
      }
      TARE_RETURN_IF_ERROR(run(batch, owner));
    }
  }
  return result;
}

}  // namespace tare::models
