#include "trainer/trainer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/env.h"
#include "ops/cast/cast.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/grad_norm/grad_norm.h"
#include "tensor/digest.h"
#include "tensor/weight_hash.h"
#include "trainer/plain_model.h"

namespace tare::trainer {
namespace {

using ops::TokenUnit;

Status CheckSequences(std::span<const Sequence> sequences, int64_t vocab) {
  if (sequences.empty()) return InvalidArgument("no sequence to compute");
  for (size_t i = 0; i < sequences.size(); ++i) {
    const Sequence& s = sequences[i];
    const int64_t size = static_cast<int64_t>(s.tokens.size());
    if (s.prompt_tokens < 1 || s.prompt_tokens >= size) {
      return InvalidArgument("sequence {} ({}): prompt_tokens is {}; 1 to {} leaves a target", i,
                             s.name, s.prompt_tokens, size - 1);
    }
    if (!s.mask.empty() && static_cast<int64_t>(s.mask.size()) != s.targets()) {
      return InvalidArgument("sequence {} ({}): mask has {} entries for {} targets", i, s.name,
                             s.mask.size(), s.targets());
    }
    for (const uint8_t bit : s.mask) {
      if (bit > 1)
        return InvalidArgument("sequence {} ({}): mask holds {}; 0 or 1", i, s.name, bit);
    }
    for (const int32_t t : s.tokens) {
      if (t < 0 || t >= vocab)
        return InvalidArgument("sequence {} ({}): token {} is outside [0, {})", i, s.name, t,
                               vocab);
    }
  }
  return Ok();
}

int64_t ValidTokens(std::span<const Sequence> sequences) {
  int64_t valid = 0;
  for (const Sequence& s : sequences) {
    valid += s.mask.empty() ? s.targets() : std::count(s.mask.begin(), s.mask.end(), uint8_t{1});
  }
  return valid;
}

// Ends of micro-batches over the sequences, in order.
std::vector<size_t> Cut(std::span<const Sequence> sequences, int64_t limit) {
  std::vector<size_t> ends;
  int64_t rows = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const int64_t n = static_cast<int64_t>(sequences[i].tokens.size()) - 1;
    if (rows > 0 && rows + n > limit) {
      ends.push_back(i);
      rows = 0;
    }
    rows += n;
  }
  ends.push_back(sequences.size());
  return ends;
}

Result<Tensor> ToF32(const ops::Ctx& ctx, const Tensor& x) {
  TARE_ASSIGN_OR_RETURN(Tensor y, Tensor::Allocate(DType::kF32, x.shape()));
  if (x.dtype() == DType::kF32) {
    std::memcpy(y.mutable_data(), x.data(), static_cast<size_t>(x.size_bytes()));
    return y;
  }
  const ops::cast::Params params{.from = x.dtype(), .to = DType::kF32};
  TARE_RETURN_IF_ERROR(ops::cast::Forward(
      ctx, params, {.count = x.elements(), .x = x.data(), .y = y.mutable_data()}));
  return y;
}

constexpr int64_t kPiece = 64 << 10;  // elements that one thread takes at once

// Fills the report's counts of the gradient. Counts and a maximum: any order gives the same.
void CountGradient(ThreadPool* pool, const float* g, int64_t count, ParameterReport* report) {
  std::mutex mutex;
  pool->ParallelRanges(count, kPiece, [&](int64_t begin, int64_t end) {
    int64_t nonzero = 0, non_finite = 0;
    float largest = 0;
    for (int64_t k = begin; k < end; ++k) {
      const float size = std::fabs(g[k]);
      nonzero += size != 0.0f;
      non_finite += !(size <= std::numeric_limits<float>::max());
      largest = size > largest ? size : largest;
    }
    const std::lock_guard<std::mutex> hold(mutex);
    report->gradient_nonzero += nonzero;
    report->gradient_non_finite += non_finite;
    report->gradient_max_abs = std::max(report->gradient_max_abs, largest);
  });
}

template <typename T>
int64_t CountChanged(const void* before, const void* after, int64_t count) {
  const T* a = static_cast<const T*>(before);
  const T* b = static_cast<const T*>(after);
  int64_t changed = 0;
  for (int64_t i = 0; i < count; ++i) changed += a[i] != b[i];
  return changed;
}

}  // namespace

// One walk over the sequences in micro-batches.
struct Trainer::Pass {
  TapPhase phase = TapPhase::kScore;
  std::string version;
  bool record = false;    // with a tape
  bool backward = false;  // loss and gradient too
  Loss loss = Loss::kPolicy;
  ops::policy_loss::Params policy;
  Tap* tap = nullptr;
  LossReport report;
};

Trainer::~Trainer() = default;

Trainer::Trainer(ThreadPool* pool, models::Model model, const Options& options)
    : pool_(pool), model_(std::move(model)), options_(options) {}

ops::Ctx Trainer::MakeCtx(ops::LaunchTrace* trace) const {
  ops::Ctx ctx;
  ctx.pool = pool_;
  ctx.profile = options_.profile;
  ctx.batch_invariance = options_.batch_invariance;
  ctx.side = fault::Side::kTrainer;
  ctx.trace = trace;
  return ctx;
}

Result<std::unique_ptr<Trainer>> Trainer::Create(ThreadPool* pool, models::Model model,
                                                 const Options& options) {
  if (options.micro_batch_tokens < 1) {
    return InvalidArgument("micro_batch_tokens is {}; 1 or more", options.micro_batch_tokens);
  }
  if (!(options.max_gradient_norm >= 0) || !std::isfinite(options.max_gradient_norm)) {
    return InvalidArgument("max_gradient_norm is {}; 0 (no clip) or a positive number",
                           options.max_gradient_norm);
  }
  std::unique_ptr<Trainer> t(new Trainer(pool, std::move(model), options));
  t->scratch_.KeepTapes();
  const ops::Ctx ctx = t->MakeCtx(nullptr);
  for (const models::Parameter& p : t->model_.parameters()) {
    TARE_ASSIGN_OR_RETURN(Tensor master, ToF32(ctx, p.value));
    t->master_.push_back(std::move(master));
    TARE_ASSIGN_OR_RETURN(Tensor m, Tensor::Allocate(DType::kF32, p.value.shape()));
    TARE_ASSIGN_OR_RETURN(Tensor v, Tensor::Allocate(DType::kF32, p.value.shape()));
    t->m_.push_back(std::move(m));
    t->v_.push_back(std::move(v));
  }
  return t;
}

Status Trainer::RunPass(std::span<const Sequence> sequences, Pass* pass) {
  TARE_RETURN_IF_ERROR(CheckSequences(sequences, model_.config().vocab));
  LossReport& report = pass->report;
  report.logprobs.recorded = pass->record;
  report.valid_tokens = ValidTokens(sequences);
  if (pass->backward && report.valid_tokens == 0) {
    return InvalidArgument("the mask excludes every token, so there is no loss");
  }
  ops::LaunchTrace trace, backward_trace;
  const ops::Ctx ctx = MakeCtx(&trace), backward_ctx = MakeCtx(&backward_trace);
  times_ = Times();
  if (pass->backward && options_.surrogate) {
    if (plain_ == nullptr) {
      TARE_ASSIGN_OR_RETURN(PlainModel<float> plain, PlainModel<float>::Create(pool_, model_));
      plain_ = std::make_unique<PlainModel<float>>(std::move(plain));
    }
    plain_->Load(model_);
    plain_->ZeroGradients();
  }
  size_t begin = 0;
  for (const size_t end : Cut(sequences, options_.micro_batch_tokens)) {
    const auto part = sequences.subspan(begin, end - begin);
    begin = end;
    // The last token of a sequence predicts nothing that is scored, so it is no input.
    std::vector<std::vector<int32_t>> targets;
    models::Batch batch;
    batch.phase = pass->phase;
    batch.weight_version = pass->version;
    batch.step = step_;
    for (const Sequence& s : part) {
      const size_t rows = s.tokens.size() - 1;
      std::vector<int32_t> wanted(rows, -1);
      for (size_t r = static_cast<size_t>(s.prompt_tokens) - 1; r < rows; ++r)
        wanted[r] = s.tokens[r + 1];
      targets.push_back(std::move(wanted));
      report.logprobs.rows += static_cast<int64_t>(rows);
    }
    for (size_t i = 0; i < part.size(); ++i) {
      models::TokenRun run;
      run.tokens = std::span(part[i].tokens).first(targets[i].size());
      run.targets = targets[i];
      run.temperature = part[i].temperature;
      run.name = part[i].name;
      batch.runs.push_back(std::move(run));
    }
    models::TapeOptions tape_options;
    tape_options.recompute = options_.recompute;
    models::Tape tape(tape_options);
    // Its memory serves the next micro-batch, whatever becomes of this one.
    const std::unique_ptr<models::Tape, std::function<void(models::Tape*)>> recycled(
        &tape, [this](models::Tape* used) { scratch_.Recycle(used); });
    // The surrogate's backward follows the decisions of the visible forward.
    DecisionTap decisions(pass->tap);
    Tap* const tap = pass->backward && options_.surrogate && model_.config().experts > 0
                         ? &decisions
                         : pass->tap;
    const int64_t forward_start = Env::Real()->MonotonicNs();
    TARE_ASSIGN_OR_RETURN(
        const models::ForwardOutput output,
        models::Forward(ctx, model_, batch, &scratch_, pass->record ? &tape : nullptr, tap));
    const int64_t loss_start = Env::Real()->MonotonicNs();
    times_.forward_ns += loss_start - forward_start;
    ++report.logprobs.forwards;
    size_t at = 0;
    for (const Sequence& s : part) {
      const size_t n = static_cast<size_t>(s.targets());
      TARE_CHECK(at + n <= output.logprob.size()) << "forward answered fewer logprobs than targets";
      report.logprobs.values.emplace_back(output.logprob.begin() + static_cast<ptrdiff_t>(at),
                                          output.logprob.begin() + static_cast<ptrdiff_t>(at + n));
      at += n;
    }
    if (!pass->backward) continue;

    const int64_t rows = static_cast<int64_t>(output.logprob.size());
    std::vector<float> old, advantage, dlogprob(static_cast<size_t>(rows));
    std::vector<uint8_t> mask;
    std::vector<int32_t> sequence_tokens;
    std::vector<TokenUnit> units;
    for (const Sequence& s : part) {
      const size_t n = static_cast<size_t>(s.targets());
      // The loss' units count from the sequence's first target, cut like every sum over tokens.
      for (int64_t from = 0; from < s.targets(); from += ops::kUnitRows) {
        units.push_back({static_cast<int64_t>(mask.size()) + from,
                         std::min(ops::kUnitRows, s.targets() - from)});
      }
      const std::vector<uint8_t> m = s.mask.empty() ? std::vector<uint8_t>(n, 1) : s.mask;
      mask.insert(mask.end(), m.begin(), m.end());
      sequence_tokens.insert(
          sequence_tokens.end(), n,
          static_cast<int32_t>(std::max<int64_t>(1, std::count(m.begin(), m.end(), uint8_t{1}))));
      if (pass->loss != Loss::kPolicy) continue;
      if (s.old_logprob.size() != n) {
        return InvalidArgument("sequence {}: {} old logprobs for {} targets", s.name,
                               s.old_logprob.size(), n);
      }
      old.insert(old.end(), s.old_logprob.begin(), s.old_logprob.end());
      advantage.insert(advantage.end(), n, s.advantage);
    }
    if (pass->loss == Loss::kPolicy) {
      const bool per_sequence = pass->policy.normalise == ops::policy_loss::Normalise::kSequence;
      const int64_t count =
          per_sequence ? static_cast<int64_t>(sequences.size()) : report.valid_tokens;
      int64_t valid = 0, clipped = 0;
      ops::policy_loss::Args args;
      args.rows = rows;
      args.logprob = output.logprob.data();
      args.old_logprob = old.data();
      args.advantage = advantage.data();
      args.mask = mask.data();
      args.global_count = count;
      args.sequence_tokens = per_sequence ? sequence_tokens.data() : nullptr;
      args.units = units;
      args.loss = &report.loss;
      args.valid_tokens = &valid;
      args.clipped_tokens = &clipped;
      TARE_RETURN_IF_ERROR(ops::policy_loss::Forward(ctx, pass->policy, args));
      report.clipped_tokens += clipped;
      for (size_t i = 0; i < mask.size(); ++i) {
        report.ratio_not_one += mask[i] && std::bit_cast<uint32_t>(old[i]) !=
                                               std::bit_cast<uint32_t>(output.logprob[i]);
      }
      ops::policy_loss::BackwardArgs back;
      back.rows = rows;
      back.logprob = output.logprob.data();
      back.old_logprob = old.data();
      back.advantage = advantage.data();
      back.mask = mask.data();
      back.global_count = count;
      back.sequence_tokens = args.sequence_tokens;
      back.dlogprob = dlogprob.data();
      TARE_RETURN_IF_ERROR(ops::policy_loss::Backward(ctx, pass->policy, back));
    } else {
      ops::cross_entropy::Args args;
      args.rows = rows;
      args.logprob = output.logprob.data();
      args.mask = mask.data();
      args.global_count = report.valid_tokens;
      args.units = units;
      args.loss = &report.loss;
      TARE_RETURN_IF_ERROR(ops::cross_entropy::Forward(ctx, {}, args));
      ops::cross_entropy::BackwardArgs back;
      back.rows = rows;
      back.mask = mask.data();
      back.global_count = report.valid_tokens;
      back.dlogprob = dlogprob.data();
      TARE_RETURN_IF_ERROR(ops::cross_entropy::Backward(ctx, {}, back));
    }
    const int64_t backward_start = Env::Real()->MonotonicNs();
    times_.loss_ns += backward_start - loss_start;
    if (options_.surrogate) {
      std::vector<PlainModel<float>::Run> runs;
      size_t first = 0;
      for (const Sequence& s : part) {
        const size_t n = static_cast<size_t>(s.targets());
        runs.push_back({s.tokens, s.prompt_tokens, static_cast<double>(s.temperature),
                        std::span<const float>(dlogprob).subspan(first, n)});
        first += n;
      }
      TARE_RETURN_IF_ERROR(plain_->Compute(runs, decisions.decisions).status());
    } else {
      models::LossGradient gradient;
      gradient.dlogprob = dlogprob;
      TARE_RETURN_IF_ERROR(models::Backward(backward_ctx, model_, batch, gradient, &tape, &scratch_,
                                            gradients_.get(), 0, pass->tap));
    }
    times_.backward_ns += Env::Real()->MonotonicNs() - backward_start;
  }
  if (pass->backward) {
    TARE_RETURN_IF_ERROR(models::FinishGradients(backward_ctx, model_, gradients_.get()));
    for (size_t i = 0; options_.surrogate && i < model_.parameters().size(); ++i) {
      const std::vector<float>& g = plain_->gradient(static_cast<int>(i));
      std::copy(g.begin(), g.end(), gradients_->all()[i].mutable_as<float>());
    }
    report.backward_launches =
        options_.surrogate ? 0 : static_cast<int64_t>(backward_trace.Take().size());
  }
  report.logprobs.launches = static_cast<int64_t>(trace.Take().size());
  return Ok();
}

Result<Logprobs> Trainer::Score(std::span<const Sequence> sequences, const std::string& version,
                                Tap* tap) {
  Pass pass;
  pass.version = version;
  pass.tap = tap;
  TARE_RETURN_IF_ERROR(RunPass(sequences, &pass));
  return std::move(pass.report.logprobs);
}

Result<Logprobs> Trainer::RecordedForward(std::span<const Sequence> sequences,
                                          const std::string& version, Tap* tap) {
  Pass pass;
  pass.phase = TapPhase::kTrain;
  pass.version = version;
  pass.record = true;
  pass.tap = tap;
  TARE_RETURN_IF_ERROR(RunPass(sequences, &pass));
  return std::move(pass.report.logprobs);
}

Result<LossReport> Trainer::Accumulate(std::span<const Sequence> sequences, Loss loss,
                                       const ops::policy_loss::Params& policy,
                                       const std::string& version, Tap* tap) {
  if (gradients_ == nullptr) {
    TARE_ASSIGN_OR_RETURN(models::Gradients g, models::Gradients::Zeros(model_));
    gradients_ = std::make_unique<models::Gradients>(std::move(g));
  } else {
    TARE_RETURN_IF_ERROR(gradients_->SetZero());
  }
  Pass pass;
  pass.phase = TapPhase::kTrain;
  pass.version = version;
  pass.record = true;
  pass.backward = true;
  pass.loss = loss;
  pass.policy = policy;
  pass.tap = tap;
  TARE_RETURN_IF_ERROR(RunPass(sequences, &pass));
  return std::move(pass.report);
}

Result<StepReport> Trainer::Apply(float lr, bool deploy) {
  if (gradients_ == nullptr)
    return Error(Code::kPrecondition, "Apply before Accumulate: there is no gradient");
  if (!(lr >= 0) || !std::isfinite(lr))
    return InvalidArgument("lr is {}; 0 or a positive number", lr);
  const ops::Ctx ctx = MakeCtx(nullptr);
  StepReport report;
  report.lr = lr;
  report.step = step_;
  std::vector<ops::grad_norm::Entry> entries;
  const std::vector<models::Parameter>& parameters = model_.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Tensor& g = gradients_->of(static_cast<int>(i));
    ParameterReport p;
    p.name = parameters[i].name;
    p.elements = g.elements();
    CountGradient(pool_, g.as<float>(), g.elements(), &p);
    report.parameters.push_back(std::move(p));
    const int64_t cols = g.dim(-1);
    entries.push_back(
        {parameters[i].name, g.as<float>(), cols == 0 ? 0 : g.elements() / cols, cols});
  }
  std::sort(entries.begin(), entries.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  const Result<ops::grad_norm::Norm> norm =
      ops::grad_norm::Compute(ctx, entries, options_.max_gradient_norm);
  if (!norm.ok()) {
    report.skipped = true;
    report.skipped_why = norm.status().message();
    return report;
  }
  report.gradient_norm = norm->norm;
  report.clip_factor = norm->factor;
  report.step = ++step_;
  for (size_t i = 0; i < parameters.size(); ++i) {
    Tensor& value = model_.mutable_parameters()[i].value;
    ops::adamw::Params params = options_.adamw;
    // Norms, biases and sinks are not decayed: the field's usual parameter groups.
    const models::ParameterKind kind = parameters[i].kind;
    if (kind != models::ParameterKind::kLinear && kind != models::ParameterKind::kEmbedding)
      params.weight_decay = 0;
    // Piece by piece, so that what was there before stays in a cache until it is compared. A piece
    // is independent of its neighbours: AdamW works element by element.
    const int64_t count = value.elements(), item = SizeOf(value.dtype());
    std::mutex mutex;
    Status failed;
    ParameterReport& changed = report.parameters[i];
    pool_->ParallelRanges(count, kPiece, [&](int64_t begin, int64_t end) {
      const int64_t size = end - begin;
      char* deployed = static_cast<char*>(value.mutable_data()) + begin * item;
      std::vector<float> master_before(master_[i].as<float>() + begin,
                                       master_[i].as<float>() + end);
      std::vector<char> deployed_before(deployed, deployed + size * item);
      ops::adamw::Args args;
      args.count = size;
      args.master = master_[i].mutable_as<float>() + begin;
      args.m = m_[i].mutable_as<float>() + begin;
      args.v = v_[i].mutable_as<float>() + begin;
      args.grad = gradients_->of(static_cast<int>(i)).as<float>() + begin;
      args.copy =
          deploy && value.dtype() == DType::kBF16 ? reinterpret_cast<uint16_t*>(deployed) : nullptr;
      args.lr = lr;
      args.step = step_;
      args.grad_scale = norm->factor;
      Status s = ops::adamw::Step(ctx, params, args);
      if (s.ok() && deploy && args.copy == nullptr) {
        const ops::cast::Params cast{.from = DType::kF32, .to = value.dtype()};
        s = ops::cast::Forward(ctx, cast, {.count = size, .x = args.master, .y = deployed});
      }
      const int64_t master = CountChanged<uint32_t>(master_before.data(), args.master, size);
      const int64_t bytes = item == 2
                                ? CountChanged<uint16_t>(deployed_before.data(), deployed, size)
                                : CountChanged<uint32_t>(deployed_before.data(), deployed, size);
      const std::lock_guard<std::mutex> hold(mutex);
      changed.master_changed += master;
      changed.deployed_changed += bytes;
      if (failed.ok()) failed = std::move(s);
    });
    TARE_RETURN_IF_ERROR(failed);
  }
  TARE_RETURN_IF_ERROR(model_.Repack(pool_));
  return report;
}

Status Trainer::DeployMasters() {
  const ops::Ctx ctx = MakeCtx(nullptr);
  for (size_t i = 0; i < master_.size(); ++i) {
    Tensor& value = model_.mutable_parameters()[i].value;
    if (value.dtype() == DType::kF32) {
      std::memcpy(value.mutable_data(), master_[i].data(), static_cast<size_t>(value.size_bytes()));
      continue;
    }
    const ops::cast::Params cast{.from = DType::kF32, .to = value.dtype()};
    TARE_RETURN_IF_ERROR(ops::cast::Forward(
        ctx, cast, {.count = value.elements(), .x = master_[i].data(), .y = value.mutable_data()}));
  }
  return model_.Repack(pool_);
}

namespace {
Result<std::string> HashOf(const std::vector<std::pair<std::string, Tensor>>& tensors,
                           ThreadPool* pool) {
  TARE_ASSIGN_OR_RETURN(const Sha256Digest digest, HashOfTensors(tensors, pool));
  return Hex(digest);
}
}  // namespace

Result<std::string> Trainer::DeployedHash() const {
  TARE_ASSIGN_OR_RETURN(const auto tensors, model_.NamedTensors());
  return HashOf(tensors, pool_);
}

Result<std::string> Trainer::MasterHash() const {
  std::vector<std::pair<std::string, Tensor>> tensors;
  tensors.reserve(master_.size());
  for (size_t i = 0; i < master_.size(); ++i)
    tensors.emplace_back(model_.parameters()[i].name, master_[i]);
  return HashOf(tensors, pool_);
}

}  // namespace tare::trainer
