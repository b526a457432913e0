#include "tools/backward_subject.h"

#include <utility>

#include "base/fault.h"

namespace tare {

BackwardQuestions::BackwardQuestions(int64_t vocab, int32_t salt) {
  const int lengths[] = {14, 23};
  for (int s = 0; s < 2; ++s) {
    std::vector<int32_t> t, next;
    for (int i = 0; i < lengths[s]; ++i)
      t.push_back(
          static_cast<int32_t>((int64_t{salt} * 29 + s * 131 + i * i * 17 + i * 53 + 7) % vocab));
    next.assign(t.begin() + 1, t.end());
    t.pop_back();
    for (int i = 0; i + 1 < lengths[s]; ++i)
      upstream.push_back(static_cast<float>((i * 5 + s) % 9 - 4) / 64);
    tokens.push_back(std::move(t));
    targets.push_back(std::move(next));
  }
}

models::Batch BackwardQuestions::MakeBatch() const {
  models::Batch batch;
  for (size_t s = 0; s < tokens.size(); ++s) {
    models::TokenRun run;
    run.tokens = tokens[s];
    run.targets = targets[s];
    run.name = fmt::format("s{}", s);
    batch.runs.push_back(run);
  }
  batch.phase = TapPhase::kTrain;
  return batch;
}

Result<models::Model> BackwardModel(ThreadPool* pool, const BackwardSubject& subject, DType dtype) {
  models::ModelConfig c = subject.config;
  if (dtype == DType::kF32) c.dtype = c.residual_dtype = c.rope.dtype = dtype;
  models::ModelOptions options;
  options.side = fault::Side::kTrainer;
  options.max_positions = 128;
  return models::Model::FromTensors(pool, c, subject.tensors, options);
}

ops::Ctx BackwardCtx(ThreadPool* pool, ops::LaunchTrace* trace) {
  ops::Ctx ctx;
  ctx.pool = pool;
  ctx.side = fault::Side::kTrainer;
  ctx.trace = trace;
  return ctx;
}

}  // namespace tare
