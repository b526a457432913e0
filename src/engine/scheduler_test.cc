#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

namespace tare::engine {
namespace {

std::unique_ptr<Sequence> Make(std::vector<int32_t> prompt, int32_t max_tokens,
                               int32_t priority = 0) {
  auto request = std::make_shared<Request>();
  request->prompt = prompt;
  request->params.max_tokens = max_tokens;
  request->priority = priority;
  auto s = std::make_unique<Sequence>();
  s->request = request;
  s->prompt_tokens = std::ssize(prompt);
  s->tokens = std::move(prompt);
  return s;
}

std::vector<int32_t> Tokens(int32_t first, int count) {
  std::vector<int32_t> t(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) t[static_cast<size_t>(i)] = first + i;
  return t;
}

// Plays the engine: every run that samples gets the token `1000 + position`; ends at max_tokens.
// Checks that no step exceeds the budget, no block is shared while it is written, and rows come in
// order.
std::map<uint64_t, std::vector<int32_t>> Drive(Scheduler* scheduler, int limit = 100000) {
  std::map<uint64_t, std::vector<int32_t>> done;
  for (int step = 0; step < limit && !scheduler->idle(); ++step) {
    const StepPlan plan = scheduler->Schedule(0);
    EXPECT_FALSE(plan.runs.empty()) << "stuck with work left";
    if (plan.runs.empty()) break;
    int64_t tokens = 0;
    std::map<int32_t, uint64_t> written;
    for (const ScheduledRun& run : plan.runs) {
      tokens += run.count;
      EXPECT_GT(run.count, 0);
      EXPECT_EQ(run.begin, run.sequence->computed);
      const int64_t b = scheduler->config().block_size;
      for (int64_t i = run.begin / b; i <= (run.begin + run.count - 1) / b; ++i) {
        const int32_t block = run.sequence->blocks.at(static_cast<size_t>(i));
        EXPECT_EQ(scheduler->pool().references(block), 1) << "a shared block is written";
        EXPECT_TRUE(written.emplace(block, run.sequence->id).second);
      }
    }
    EXPECT_EQ(tokens, plan.tokens);
    EXPECT_LE(tokens, scheduler->config().max_num_batched_tokens);
    scheduler->Computed(plan);
    scheduler->pool().CheckInvariants();
    for (const ScheduledRun& run : plan.runs) {
      if (!run.samples) continue;
      Sequence* s = run.sequence;
      s->tokens.push_back(1000 + static_cast<int32_t>(s->tokens.size()));
      if (s->generated() >= s->request->params.max_tokens) {
        done[s->id] = s->tokens;
        scheduler->Finish(s);
      }
    }
  }
  EXPECT_TRUE(scheduler->idle());
  EXPECT_EQ(scheduler->pool().free_blocks(), scheduler->config().num_blocks) << "blocks leaked";
  return done;
}

// C3-05: a step holds prefill chunks and decodes together, and the counters prove it.
TEST(EngineScheduler, MixesPrefillAndDecode) {
  Scheduler scheduler(
      {.block_size = 4, .num_blocks = 64, .max_num_batched_tokens = 8, .max_model_len = 128});
  scheduler.Add(Make(Tokens(0, 5), 10));
  scheduler.Add(Make(Tokens(50, 30), 3));
  const auto done = Drive(&scheduler);
  EXPECT_EQ(done.size(), 2u);
  EXPECT_EQ(done.at(0).size(), 15u);
  EXPECT_EQ(done.at(1).size(), 33u);
  EXPECT_GT(scheduler.counters().mixed_steps, 0);
  EXPECT_GT(scheduler.counters().chunked_runs, 0);
}

// C3-06: the second of two equal prompts takes its full blocks from the cache, never the last
// token.
TEST(EngineScheduler, PrefixHitsAreWholeBlocks) {
  Scheduler scheduler(
      {.block_size = 4, .num_blocks = 64, .max_num_batched_tokens = 64, .max_model_len = 128});
  scheduler.Add(Make(Tokens(0, 12), 2));
  Drive(&scheduler);
  EXPECT_EQ(scheduler.counters().prefix_hits, 0);
  scheduler.Add(Make(Tokens(0, 12), 2));
  Drive(&scheduler);
  EXPECT_EQ(scheduler.counters().prefix_hits,
            8);  // 12 tokens are three blocks; the last is computed
  scheduler.Add(Make(Tokens(0, 13), 2));
  Drive(&scheduler);
  EXPECT_EQ(scheduler.counters().prefix_hits, 20);
  EXPECT_EQ(scheduler.counters().prefix_queries, 12 + 12 + 13);
}

// H13: another weight version finds nothing.
TEST(EngineScheduler, AnotherVersionMisses) {
  Scheduler scheduler(
      {.block_size = 4, .num_blocks = 64, .max_num_batched_tokens = 64, .max_model_len = 128});
  scheduler.Add(Make(Tokens(0, 12), 1));
  Drive(&scheduler);
  scheduler.Add(Make(Tokens(0, 12), 1));
  const StepPlan plan = scheduler.Schedule(1);
  ASSERT_EQ(plan.runs.size(), 1u);
  EXPECT_EQ(plan.runs[0].begin, 0);
}

// Preemption: too few blocks for all; everyone still ends with all tokens.
TEST(EngineScheduler, PreemptsAndResumes) {
  Scheduler scheduler(
      {.block_size = 4, .num_blocks = 10, .max_num_batched_tokens = 64, .max_model_len = 40});
  for (int i = 0; i < 4; ++i) scheduler.Add(Make(Tokens(100 * i, 8), 20));
  const auto done = Drive(&scheduler);
  ASSERT_EQ(done.size(), 4u);
  for (const auto& [id, tokens] : done) EXPECT_EQ(tokens.size(), 28u);
  EXPECT_GT(scheduler.counters().preemptions, 0);
}

// A lower number goes first, and is never the one that gives way.
TEST(EngineScheduler, Priorities) {
  Scheduler scheduler({.block_size = 4,
                       .num_blocks = 8,
                       .max_num_seqs = 1,
                       .max_num_batched_tokens = 64,
                       .max_model_len = 32});
  scheduler.Add(Make(Tokens(0, 4), 2, 5));
  scheduler.Add(Make(Tokens(10, 4), 2, 1));
  const StepPlan plan = scheduler.Schedule(0);
  ASSERT_EQ(plan.runs.size(), 1u);
  EXPECT_EQ(plan.runs[0].sequence->request->priority, 1);
}

// Too few blocks: the least important gives way, although it was there first and is next in turn.
TEST(EngineScheduler, TheLeastImportantGivesWay) {
  Scheduler scheduler(
      {.block_size = 4, .num_blocks = 4, .max_num_batched_tokens = 64, .max_model_len = 16});
  const auto step = [&] {
    StepPlan plan = scheduler.Schedule(0);
    scheduler.Computed(plan);
    for (const ScheduledRun& run : plan.runs)
      if (run.samples) run.sequence->tokens.push_back(1);
    return plan;
  };
  scheduler.Add(Make(Tokens(0, 8), 8, 5));
  step();
  scheduler.Add(Make(Tokens(50, 1), 8, 1));
  // 3 blocks and 1, all there are, until the first one's token 13 needs another.
  ASSERT_EQ(step().runs.size(), 2u);
  for (int i = 0; i < 6 && scheduler.counters().preemptions == 0; ++i) {
    const StepPlan plan = step();
    if (scheduler.counters().preemptions == 0) continue;
    ASSERT_EQ(plan.runs.size(), 1u);
    EXPECT_EQ(plan.runs[0].sequence->request->priority, 1);
  }
  EXPECT_EQ(scheduler.counters().preemptions, 1);
}

// What can never run is refused with the numbers.
TEST(EngineScheduler, CanHold) {
  Scheduler scheduler({.block_size = 4, .num_blocks = 4, .max_model_len = 32});
  EXPECT_TRUE(scheduler.CanHold(16).ok());
  EXPECT_EQ(scheduler.CanHold(17).code(), Code::kExhausted);
  EXPECT_NE(scheduler.CanHold(33).message().find("model length"), std::string::npos);
}

// During a drain only what has begun goes on, also after a preemption.
TEST(EngineScheduler, DrainStartsNothingNew) {
  Scheduler scheduler(
      {.block_size = 4, .num_blocks = 64, .max_num_batched_tokens = 64, .max_model_len = 128});
  scheduler.Add(Make(Tokens(0, 4), 5));
  StepPlan plan = scheduler.Schedule(0);
  scheduler.Computed(plan);
  plan.runs[0].sequence->tokens.push_back(7);
  scheduler.PreemptAll();
  scheduler.Add(Make(Tokens(20, 4), 5));
  EXPECT_EQ(scheduler.begun(), 1);
  plan = scheduler.Schedule(0, /*admit=*/false);
  ASSERT_EQ(plan.runs.size(), 1u);
  EXPECT_EQ(plan.runs[0].sequence->tokens.size(), 5u);
  EXPECT_EQ(scheduler.waiting(), 1);
}

// Random loads of every kind end with all tokens, no leak, and tokens that do not depend on the
// load.
TEST(EngineScheduler, RandomLoads) {
  std::mt19937 rng(3);
  for (int trial = 0; trial < 200; ++trial) {
    const int64_t block = 1 + static_cast<int64_t>(rng() % 9);
    SchedulerConfig config{
        .block_size = block,
        .num_blocks = (40 + block - 1) / block + static_cast<int64_t>(rng() % 20),
        .max_num_seqs = 1 + static_cast<int64_t>(rng() % 6),
        .max_num_batched_tokens = 1 + static_cast<int64_t>(rng() % 40),
        .max_model_len = 40,
        .prefix_caching = rng() % 2 == 0,
        .chunked_prefill = rng() % 3 != 0};
    Scheduler scheduler(config);
    const int count = 1 + static_cast<int>(rng() % 8);
    std::vector<size_t> lengths;
    for (int i = 0; i < count; ++i) {
      const int prompt = 1 + static_cast<int>(rng() % 20);
      const int generate = 1 + static_cast<int>(rng() % 20);
      ASSERT_TRUE(scheduler.CanHold(prompt + generate).ok());
      lengths.push_back(static_cast<size_t>(prompt + generate));
      scheduler.Add(
          Make(Tokens(rng() % 2 ? 0 : 100 * i, prompt), generate, static_cast<int32_t>(rng() % 3)));
    }
    const auto done = Drive(&scheduler);
    ASSERT_EQ(done.size(), lengths.size()) << "trial " << trial;
    for (const auto& [id, tokens] : done) EXPECT_EQ(tokens.size(), lengths[id]);
  }
}

}  // namespace
}  // namespace tare::engine
