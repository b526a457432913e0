#include "engine/scheduler.h"

#include <algorithm>

#include "base/check.h"
#include "engine/faults.h"

namespace tare::engine {

const char* FinishReasonName(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kAbort:
      return "abort";
    case FinishReason::kError:
      return "error";
  }
  return "unknown";
}

Scheduler::Scheduler(const SchedulerConfig& config)
    : config_(config), pool_(config.num_blocks, config.prefix_caching) {
  TARE_CHECK(config.block_size > 0 && config.max_num_seqs > 0 && config.max_num_batched_tokens > 0);
}

Status Scheduler::CanHold(int64_t tokens) const {
  if (tokens > config_.max_model_len) {
    return Error(Code::kExhausted, "{} tokens are more than the model length of {}", tokens,
                 config_.max_model_len);
  }
  const int64_t blocks = (tokens + config_.block_size - 1) / config_.block_size;
  if (blocks > config_.num_blocks) {
    return Error(Code::kExhausted, "{} tokens need {} cache blocks of {}; there are {}", tokens,
                 blocks, config_.block_size, config_.num_blocks);
  }
  return Ok();
}

void Scheduler::InsertWaiting(std::unique_ptr<Sequence> sequence) {
  const auto before = std::find_if(waiting_.begin(), waiting_.end(), [&](const auto& other) {
    if (sequence->request->priority != other->request->priority) {
      return sequence->request->priority < other->request->priority;
    }
    return sequence->id < other->id;
  });
  waiting_.insert(before, std::move(sequence));
}

void Scheduler::Add(std::unique_ptr<Sequence> sequence) {
  sequence->id = next_id_++;
  InsertWaiting(std::move(sequence));
}

void Scheduler::FreeBlocks(Sequence* sequence) {
  // The last block first: the front of a prefix stays cached longest.
  for (auto it = sequence->blocks.rbegin(); it != sequence->blocks.rend(); ++it) pool_.Release(*it);
  sequence->blocks.clear();
  sequence->keys.clear();
  sequence->computed = 0;
}

bool Scheduler::Reserve(Sequence* sequence, int64_t tokens) {
  const auto needed = static_cast<size_t>((tokens + config_.block_size - 1) / config_.block_size);
  const size_t had = sequence->blocks.size();
  while (sequence->blocks.size() < needed) {
    const std::optional<int32_t> block = pool_.Allocate();
    if (!block) {
      while (sequence->blocks.size() > had) {
        pool_.Release(sequence->blocks.back());
        sequence->blocks.pop_back();
      }
      return false;
    }
    sequence->blocks.push_back(*block);
  }
  return true;
}

void Scheduler::Preempt(List::iterator victim) {
  FreeBlocks(victim->get());
  (*victim)->preemptions++;
  counters_.preemptions++;
  std::unique_ptr<Sequence> sequence = std::move(*victim);
  running_.erase(victim);
  InsertWaiting(std::move(sequence));
}

void Scheduler::PreemptAll() {
  while (!running_.empty()) Preempt(std::prev(running_.end()));
}

void Scheduler::LookUp(Sequence* sequence, int64_t weight_version) {
  TARE_CHECK(sequence->blocks.empty());
  sequence->weight_version = weight_version;
  // Rows found in the cache are not computed, so they have no logits: whoever wants the prompt's
  // logprobs computes every row.
  const bool wants_rows =
      sequence->request->params.prompt_logprobs.has_value() && !sequence->prompt_sent;
  if (!config_.prefix_caching ||
      (wants_rows && !fault::Active(kDirtyPromptLogprobs, fault::Side::kRollout))) {
    return;
  }
  const int64_t b = config_.block_size;
  // At least one token is computed: the last one's logits are needed.
  const int64_t most = (static_cast<int64_t>(sequence->tokens.size()) - 1) / b;
  BlockKey key =
      RootKey(fault::Active(kKeepPrefixCache, fault::Side::kRollout) ? 0 : weight_version);
  for (int64_t i = 0; i < most; ++i) {
    key = ExtendKey(key, std::span<const int32_t>(sequence->tokens)
                             .subspan(static_cast<size_t>(i * b), static_cast<size_t>(b)));
    const std::optional<int32_t> block = pool_.Acquire(key);
    if (!block) break;
    sequence->blocks.push_back(*block);
    sequence->keys.push_back(key);
    sequence->computed += b;
  }
}

int64_t Scheduler::begun() const {
  return running() + std::count_if(waiting_.begin(), waiting_.end(),
                                   [](const auto& s) { return s->generated() > 0; });
}

StepPlan Scheduler::Schedule(int64_t weight_version, bool admit) {
  StepPlan plan;
  int64_t budget = config_.max_num_batched_tokens;
  const auto take = [&](Sequence* s, int64_t count) {
    ScheduledRun run{.sequence = s, .begin = s->computed, .count = count};
    run.samples = run.begin + count == static_cast<int64_t>(s->tokens.size());
    (count == 1 && s->computed >= s->prompt_tokens ? plan.decode_runs : plan.prefill_runs)++;
    if (!run.samples) counters_.chunked_runs++;
    plan.runs.push_back(run);
    plan.tokens += count;
    budget -= count;
  };
  const auto chunk_of = [&](const Sequence& s) {
    int64_t count = std::min(s.remaining(), budget);
    const auto& top = s.request->params.prompt_logprobs;
    if (top && *top > 0 && !s.prompt_sent) count = std::min(count, config_.max_logit_rows);
    return count;
  };

  // What runs goes on first, in order of admission, so that nobody starves.
  for (auto it = running_.begin(); it != running_.end() && budget > 0;) {
    Sequence* s = it->get();
    const int64_t count = chunk_of(*s);
    bool reserved = Reserve(s, s->computed + count);
    while (!reserved) {
      // The victim: lowest priority, then latest arrival; never one that this step already runs.
      auto victim = running_.end();
      for (auto v = it; v != running_.end(); ++v) {
        if (victim == running_.end() || (*v)->request->priority > (*victim)->request->priority ||
            ((*v)->request->priority == (*victim)->request->priority && (*v)->id > (*victim)->id)) {
          victim = v;
        }
      }
      if (victim == it) break;
      Preempt(victim);
      reserved = Reserve(s, s->computed + count);
    }
    if (!reserved) {
      const auto self = it++;
      Preempt(self);
      continue;
    }
    take(s, count);
    ++it;
  }

  // Then whoever waits, as long as there is room.
  const bool preempted = std::any_of(waiting_.begin(), waiting_.end(),
                                     [](const auto& s) { return s->preemptions > 0; });
  while (budget > 0 && running() < config_.max_num_seqs) {
    const auto next = std::find_if(waiting_.begin(), waiting_.end(),
                                   [&](const auto& s) { return admit || s->generated() > 0; });
    if (next == waiting_.end()) break;
    Sequence* s = next->get();
    LookUp(s, weight_version);
    const int64_t count = chunk_of(*s);
    if (!config_.chunked_prefill && count < s->remaining() && !plan.runs.empty()) {
      FreeBlocks(s);
      break;  // waits until its whole prompt fits a step
    }
    // After a preemption keep a block a running sequence in hand, or they chase each other.
    const int64_t keep = preempted ? running() : 0;
    const int64_t needed = (s->computed + count + config_.block_size - 1) / config_.block_size -
                           static_cast<int64_t>(s->blocks.size());
    if (pool_.free_blocks() < needed + keep && !running_.empty()) {
      FreeBlocks(s);
      break;
    }
    if (!Reserve(s, s->computed + count)) {
      FreeBlocks(s);
      break;
    }
    running_.push_back(std::move(*next));
    waiting_.erase(next);
    if (config_.prefix_caching) {
      const int64_t hit = std::min(s->computed, s->prompt_tokens);
      counters_.prefix_queries += s->prompt_tokens;
      counters_.prefix_hits += hit;
      if (s->preemptions == 0) s->cached_tokens = hit;
    }
    take(s, count);
  }

  if (!plan.runs.empty()) {
    counters_.steps++;
    counters_.computed_tokens += plan.tokens;
    counters_.widest_step = std::max(counters_.widest_step, std::ssize(plan.runs));
    if (plan.prefill_runs > 0 && plan.decode_runs > 0) counters_.mixed_steps++;
  }
  return plan;
}

void Scheduler::Computed(const StepPlan& plan) {
  const int64_t b = config_.block_size;
  for (const ScheduledRun& run : plan.runs) {
    Sequence* s = run.sequence;
    s->computed = run.begin + run.count;
    const bool dirty = fault::Active(kDirtyBlocks, fault::Side::kRollout);
    const int64_t full = dirty ? (s->computed + b - 1) / b : s->computed / b;
    for (auto i = static_cast<int64_t>(s->keys.size()); i < full; ++i) {
      const int64_t version =
          fault::Active(kKeepPrefixCache, fault::Side::kRollout) ? 0 : s->weight_version;
      const BlockKey parent = i == 0 ? RootKey(version) : s->keys[static_cast<size_t>(i - 1)];
      std::vector<int32_t> tokens(
          s->tokens.begin() + i * b,
          s->tokens.begin() + std::min<int64_t>((i + 1) * b, std::ssize(s->tokens)));
      // With the planted fault the missing tokens are guessed as repeats of the last.
      tokens.resize(static_cast<size_t>(b), tokens.back());
      s->keys.push_back(ExtendKey(parent, tokens));
      pool_.Publish(s->blocks[static_cast<size_t>(i)], s->keys.back());
    }
  }
}

void Scheduler::Finish(Sequence* sequence) {
  const auto taken = Take([&](const Sequence& s) { return &s == sequence; });
  TARE_CHECK(taken.size() == 1);
}

}  // namespace tare::engine
