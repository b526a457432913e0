#pragma once

// Scheduler: which tokens of which sequences the next step computes. Continuous batching: a step
// mixes decodes and prefill chunks up to a token budget; when blocks run out the sequence of the
// lowest priority that arrived last gives up its blocks and is computed again later. None of this
// may move a bit, and with the invariant arm none does; the counters prove that it happened.
//
// Not thread-safe: the engine's thread owns it.

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "engine/block_pool.h"
#include "engine/sequence.h"

namespace tare::engine {

struct SchedulerConfig {
  int64_t block_size = 16;
  int64_t num_blocks = 0;
  int64_t max_num_seqs = 64;
  int64_t max_num_batched_tokens = 2048;
  int64_t max_model_len = 0;
  bool prefix_caching = true;
  bool chunked_prefill = true;
  // Largest chunk of a sequence that wants top lists of its prompt (whole logits of every row).
  int64_t max_logit_rows = 64;
};

struct ScheduledRun {
  Sequence* sequence = nullptr;
  int64_t begin = 0;  // first token of the run
  int64_t count = 0;
  bool samples = false;  // ends at the last known token: its logits give the next one
};

struct StepPlan {
  std::vector<ScheduledRun> runs{};
  int64_t tokens = 0;
  int64_t prefill_runs = 0;
  int64_t decode_runs = 0;
};

struct SchedulerCounters {
  int64_t steps = 0;
  int64_t widest_step = 0;   // most sequences of one step
  int64_t mixed_steps = 0;   // prefill and decode together
  int64_t chunked_runs = 0;  // runs that end before the last known token
  int64_t preemptions = 0;
  int64_t prefix_queries = 0;  // prompt tokens looked up
  int64_t prefix_hits = 0;     // prompt tokens found
  int64_t computed_tokens = 0;
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerConfig& config);

  const SchedulerConfig& config() const { return config_; }
  const SchedulerCounters& counters() const { return counters_; }
  BlockPool& pool() { return pool_; }
  int64_t waiting() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t running() const { return static_cast<int64_t>(running_.size()); }
  bool idle() const { return waiting_.empty() && running_.empty(); }

  // Whether a sequence of this many tokens (prompt and all it may generate) can ever run.
  // kExhausted with the numbers otherwise.
  Status CanHold(int64_t tokens) const;

  void Add(std::unique_ptr<Sequence> sequence);

  // Sequences that have begun: running, or preempted after their first token.
  int64_t begun() const;

  // The next step. Empty when nothing is to do. `admit` false starts nothing new: only what has
  // begun goes on (a drain before a weight update).
  StepPlan Schedule(int64_t weight_version, bool admit = true);

  // After the step was computed: advances, publishes full blocks.
  void Computed(const StepPlan& plan);

  // Ends a sequence and frees its blocks. The pointer is dead afterwards.
  void Finish(Sequence* sequence);
  // Every sequence for which `match` says so, whether waiting or running; gives them to the caller.
  template <typename F>
  std::vector<std::unique_ptr<Sequence>> Take(const F& match) {
    std::vector<std::unique_ptr<Sequence>> taken;
    for (auto* list : {&running_, &waiting_}) {
      for (auto it = list->begin(); it != list->end();) {
        if (!match(**it)) {
          ++it;
          continue;
        }
        FreeBlocks(it->get());
        taken.push_back(std::move(*it));
        it = list->erase(it);
      }
    }
    return taken;
  }
  // Sends every running sequence back to waiting; they are computed again. Used by a weight update
  // that keeps requests alive, and by tests.
  void PreemptAll();

 private:
  using List = std::list<std::unique_ptr<Sequence>>;

  void FreeBlocks(Sequence* sequence);
  bool Reserve(Sequence* sequence, int64_t tokens);  // blocks for the first `tokens` tokens
  void Preempt(List::iterator victim);
  void InsertWaiting(std::unique_ptr<Sequence> sequence);
  void LookUp(Sequence* sequence, int64_t weight_version);

  SchedulerConfig config_;
  SchedulerCounters counters_;
  BlockPool pool_;
  List running_;  // in order of admission
  List waiting_;  // by priority, then arrival
  uint64_t next_id_ = 0;
};

}  // namespace tare::engine
