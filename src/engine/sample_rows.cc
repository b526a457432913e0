// The second half of an engine step: from rows of logits to tokens, their logprobs and events.

#include <algorithm>
#include <bit>
#include <cmath>

#include "engine/engine.h"
#include "engine/faults.h"
#include "ops/logprob/logprob.h"
#include "ops/sampling/row_tools.h"
#include "ops/sampling/sampling.h"

namespace tare::engine {
namespace {

struct Row {
  size_t run = 0;
  const char* logits = nullptr;  // the model's own
  bool edited = false;
};

// Ids that may not come yet: while fewer than min_tokens are there, nothing that would end it.
std::vector<int32_t> Banned(const Sequence& s, const std::vector<int32_t>& eos) {
  const SamplingParams& p = s.request->params;
  if (s.generated() >= p.min_tokens) return {};
  std::vector<int32_t> banned = p.stop_token_ids;
  banned.insert(banned.end(), eos.begin(), eos.end());
  return banned;
}

}  // namespace

Status Engine::SampleRows(const StepPlan& plan, const models::ForwardOutput& output,
                          ops::LaunchTrace* trace) {
  const int64_t vocab = model_config_.vocab;
  const DType dtype = output.logits.dtype();
  const int64_t row_bytes = vocab * SizeOf(dtype);
  ops::Ctx ctx{.pool = &pool_,
               .profile = config_.profile,
               .batch_invariance = config_.batch_invariant.effective,
               .side = config_.side,
               .trace = trace};
  Tensor host;
  if (output.logits.elements() > 0) {
    TARE_ASSIGN_OR_RETURN(host, output.logits.To(Device::kCpu));
  }

  // Where each run's rows lie, and the prompt lists.
  std::vector<Row> rows;
  int64_t at = 0;
  for (size_t i = 0; i < plan.runs.size(); ++i) {
    const ScheduledRun& run = plan.runs[i];
    Sequence& s = *run.sequence;
    const auto& wanted = s.request->params.prompt_logprobs;
    const bool all = wanted && *wanted > 0 && !s.prompt_sent;
    const int64_t count = all ? run.count : run.samples ? 1 : 0;
    const char* base = static_cast<const char*>(host.data()) + at * row_bytes;
    at += count;
    TARE_CHECK(count == 0 || at <= host.dim(0));
    if (all) {
      s.prompt_logprobs.resize(static_cast<size_t>(s.prompt_tokens - 1));
      for (int64_t t = 0; t < run.count && run.begin + t + 1 < s.prompt_tokens; ++t) {
        const int32_t target = s.tokens[static_cast<size_t>(run.begin + t + 1)];
        TARE_ASSIGN_OR_RETURN(
            ops::sampling::RowList list,
            ops::sampling::ListRow(ctx, base + t * row_bytes, dtype, vocab, *wanted, target));
        PromptLogprob& p = s.prompt_logprobs[static_cast<size_t>(run.begin + t)];
        p = PromptLogprob{.raw_logprob = list.target_logprob, .rank = list.target_rank};
        for (const auto& e : list.top) p.top.push_back({e.token, e.logprob});
      }
    }
    if (run.samples) rows.push_back({.run = i, .logits = base + (count - 1) * row_bytes});
  }

  // Draw. Rows that stand one behind the other and need no edit go in one call.
  const size_t n = rows.size();
  std::vector<int32_t> token(n), kept(n);
  std::vector<float> raw(n), tempered(n), processed(n);
  const size_t bitmap_bytes = static_cast<size_t>((vocab + 7) / 8);
  std::vector<uint8_t> bitmaps;
  const bool any_bitmap = std::any_of(rows.begin(), rows.end(), [&](const Row& r) {
    return plan.runs[r.run].sequence->request->params.candidates;
  });
  if (any_bitmap) bitmaps.resize(n * bitmap_bytes);
  std::vector<float> edited(static_cast<size_t>(vocab));
  std::vector<float> temperature(n), top_p(n), min_p(n);
  std::vector<int32_t> top_k(n), position(n), sample(n);
  std::vector<uint64_t> seed(n);
  for (size_t r = 0; r < n; ++r) {
    const Sequence& s = *plan.runs[rows[r].run].sequence;
    const SamplingParams& p = s.request->params;
    temperature[r] = p.temperature;
    top_p[r] = p.top_p;
    min_p[r] = p.min_p;
    top_k[r] = p.top_k;
    seed[r] = s.seed;
    position[r] = static_cast<int32_t>(s.tokens.size());
    sample[r] = fault::Active(kDefaultSeed, config_.side) && !p.seed ? 0 : s.index;
    rows[r].edited = !p.logit_bias.empty() || s.generated() < p.min_tokens;
  }
  for (size_t r = 0; r < n;) {
    size_t end = r + 1;
    const void* logits = rows[r].logits;
    DType d = dtype;
    if (rows[r].edited) {
      const Sequence& s = *plan.runs[rows[r].run].sequence;
      TARE_RETURN_IF_ERROR(ops::sampling::EditRow(logits, dtype, vocab,
                                                  s.request->params.logit_bias,
                                                  Banned(s, config_.eos), edited.data()));
      logits = edited.data();
      d = DType::kF32;
    } else {
      while (end < n && !rows[end].edited && rows[end].logits == rows[end - 1].logits + row_bytes)
        ++end;
    }
    const ops::sampling::Args args{.rows = static_cast<int64_t>(end - r),
                                   .logits = logits,
                                   .temperature = &temperature[r],
                                   .top_k = &top_k[r],
                                   .top_p = &top_p[r],
                                   .min_p = &min_p[r],
                                   .seed = &seed[r],
                                   .position = &position[r],
                                   .sample = &sample[r],
                                   .token = &token[r],
                                   .logprob = &tempered[r],
                                   .processed_logprob = &processed[r],
                                   .kept = &kept[r],
                                   .candidates = any_bitmap ? &bitmaps[r * bitmap_bytes] : nullptr};
    TARE_RETURN_IF_ERROR(ops::sampling::Forward(ctx, {.vocab = vocab, .logits_dtype = d}, args));
    // The raw logprob is the tempered one where nothing stands between.
    for (size_t i = r; i < end; ++i) {
      raw[i] = tempered[i];
      if (!rows[i].edited && (temperature[i] == 1.0f || temperature[i] == 0.0f)) continue;
      TARE_RETURN_IF_ERROR(ops::logprob::Forward(
          ctx, {.vocab = vocab, .logits_dtype = dtype},
          {.rows = 1, .logits = rows[i].logits, .targets = &token[i], .logprob = &raw[i]}));
    }
    r = end;
  }

  // Lists beside the tokens, before anything changes: an error up to here leaves every sequence as
  // it was, and the step can be run again.
  std::vector<TokenOutput> outputs(n);
  for (size_t r = 0; r < n; ++r) {
    const Sequence& s = *plan.runs[rows[r].run].sequence;
    const SamplingParams& p = s.request->params;
    for (size_t i = 0; !s.prompt_sent && i < s.prompt_logprobs.size(); ++i) {
      // H06: a row that a cache hit skipped must not go out as a logprob.
      if (std::bit_cast<uint32_t>(s.prompt_logprobs[i].raw_logprob) == kAbsentLogprob)
        return Error(Code::kInternal, "prompt_logprobs: position {} was never computed", i + 1);
    }
    TokenOutput& o = outputs[r];
    o = TokenOutput{.token = token[r],
                    .raw_logprob = raw[r],
                    .tempered_logprob = tempered[r],
                    .processed_logprob = processed[r],
                    .kept = kept[r],
                    .weight_version = weight_version_};
    if (p.logprobs && *p.logprobs > 0) {
      TARE_ASSIGN_OR_RETURN(
          ops::sampling::RowList list,
          ops::sampling::ListRow(ctx, rows[r].logits, dtype, vocab, *p.logprobs, -1));
      for (const auto& e : list.top) o.top.push_back({e.token, e.logprob});
    }
    if (p.candidates) {
      o.candidates.assign(bitmaps.begin() + static_cast<int64_t>(r * bitmap_bytes),
                          bitmaps.begin() + static_cast<int64_t>((r + 1) * bitmap_bytes));
    }
  }

  scheduler_->Computed(plan);
  {
    std::lock_guard lock(mutex_);
    for (const ScheduledRun& run : plan.runs) {
      const Sequence& s = *run.sequence;
      if (run.begin < s.prompt_tokens && run.begin + run.count >= s.prompt_tokens &&
          s.preemptions == 0) {
        stats_.prompt_tokens += s.prompt_tokens;
      }
    }
  }
  for (size_t r = 0; r < n; ++r) {
    Sequence* s = plan.runs[rows[r].run].sequence;
    const SamplingParams& p = s->request->params;
    SequenceEvent event{.index = s->index};
    if (!s->prompt_sent && p.prompt_logprobs) event.prompt_logprobs = std::move(s->prompt_logprobs);
    s->prompt_sent = true;
    s->tokens.push_back(outputs[r].token);
    const int32_t id = outputs[r].token;
    event.tokens.push_back(std::move(outputs[r]));
    const bool may_stop = s->generated() >= p.min_tokens;
    const bool eos =
        !p.ignore_eos && std::find(config_.eos.begin(), config_.eos.end(), id) != config_.eos.end();
    const bool stop =
        std::find(p.stop_token_ids.begin(), p.stop_token_ids.end(), id) != p.stop_token_ids.end();
    if (may_stop && (eos || stop)) {
      if (!eos) event.stop_token = id;
      End(s, FinishReason::kStop, std::move(event));
    } else if (s->generated() >= p.max_tokens) {
      End(s, FinishReason::kLength, std::move(event));
    } else {
      Emit(s, std::move(event));
    }
  }
  return Ok();
}

}  // namespace tare::engine
