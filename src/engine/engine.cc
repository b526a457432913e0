#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <future>
#include <random>
#include <set>

#include "engine/faults.h"
#include "numerics/fp_environment.h"

namespace tare::engine {
namespace {

// Whether an update may take the place of what is served: the cache's layout, the tables and every
// operator's parameters were chosen for one configuration. Ok, or what differs first.
Status SameModel(const models::Model& served, const models::Model& update) {
  const auto& a = served.parameters();
  const auto& b = update.parameters();
  if (a.size() != b.size())
    return InvalidArgument("path: {} tensors, the served model has {}", b.size(), a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].name != b[i].name || a[i].value.shape() != b[i].value.shape() ||
        a[i].value.dtype() != b[i].value.dtype()) {
      return InvalidArgument("path: {} {} {}, the served model has {} {} {}", b[i].name,
                             DTypeName(b[i].value.dtype()), ShapeToString(b[i].value.shape()),
                             a[i].name, DTypeName(a[i].value.dtype()),
                             ShapeToString(a[i].value.shape()));
    }
  }
  const models::ModelConfig& c = served.config();
  const models::ModelConfig& d = update.config();
  const auto differs = [](const char* what) {
    return InvalidArgument("path: its config has another {} than the served model", what);
  };
  if (c.q_heads != d.q_heads || c.kv_heads != d.kv_heads || c.head_dim != d.head_dim)
    return differs("head count");
  if (c.tied != d.tied || c.vocab != d.vocab) return differs("vocabulary or head");
  if (c.norm_eps != d.norm_eps) return differs("rms_norm_eps");
  if (c.activation != d.activation) return differs("activation");
  if (c.top_k != d.top_k || c.renormalise != d.renormalise) return differs("router rule");
  if (c.layers.size() != d.layers.size()) return differs("number of layers");
  for (size_t i = 0; i < c.layers.size(); ++i) {
    if (c.layers[i].window != d.layers[i].window || c.layers[i].sink != d.layers[i].sink ||
        c.layers[i].moe != d.layers[i].moe) {
      return differs("kind of layer (window, sink or experts)");
    }
  }
  const auto bytes = [](const Tensor& t) {
    return std::string_view(static_cast<const char*>(t.data()),
                            static_cast<size_t>(t.size_bytes()));
  };
  if (served.device() == Device::kCpu && (bytes(served.rope_cos()) != bytes(update.rope_cos()) ||
                                          bytes(served.rope_sin()) != bytes(update.rope_sin()))) {
    return differs("rope table");
  }
  return Ok();
}

uint64_t FreshSeed() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

}  // namespace

Engine::Engine(models::Model model, const EngineConfig& config, Hooks hooks)
    : config_(config),
      model_config_(model.config()),
      hooks_(std::move(hooks)),
      pool_(config.threads, [this] { CheckWorker(); }),
      model_(std::make_unique<models::Model>(std::move(model))),
      weight_version_(config.weight_version) {}

void Engine::CheckWorker() {
  numerics::RequireFpEnvironment();
  if (!Recheck(config_.batch_invariant).ok()) other_switch_++;
  checked_++;
}

Result<std::unique_ptr<Engine>> Engine::Create(models::Model model, const EngineConfig& given,
                                               Hooks hooks) {
  EngineConfig config = given;
  SchedulerConfig& s = config.scheduler;
  if (s.block_size < 1)
    return InvalidArgument("block size {}; it must be at least 1", s.block_size);
  if (s.max_num_seqs < 1)
    return InvalidArgument("max_num_seqs {}; it must be at least 1", s.max_num_seqs);
  if (s.max_num_batched_tokens < 1) {
    return InvalidArgument("max_num_batched_tokens {}; it must be at least 1",
                           s.max_num_batched_tokens);
  }
  const int64_t longest = model.max_positions();
  if (s.max_model_len == 0) s.max_model_len = longest;
  if (s.max_model_len < 1 || s.max_model_len > longest) {
    return InvalidArgument("max_model_len {}; the model reaches {} positions", s.max_model_len,
                           longest);
  }
  if (s.num_blocks == 0) {
    s.num_blocks =
        config.kv_cache_bytes / models::KvCache::BytesPerPage(model.config(), s.block_size);
    // More than every sequence at full length is never used.
    s.num_blocks = std::min(s.num_blocks,
                            s.max_num_seqs * ((s.max_model_len + s.block_size - 1) / s.block_size));
  }
  if (s.num_blocks < 1) {
    return InvalidArgument("{} bytes of KV cache hold no block of {} bytes", config.kv_cache_bytes,
                           models::KvCache::BytesPerPage(model.config(), s.block_size));
  }
  for (const int32_t id : config.eos) {
    if (id < 0 || id >= model.config().vocab) {
      return InvalidArgument("EOS token {}; ids end at {}", id, model.config().vocab - 1);
    }
  }
  TARE_ASSIGN_OR_RETURN(
      models::KvCache cache,
      models::KvCache::Create(model.config(), s.num_blocks, s.block_size, model.device()));
  std::unique_ptr<Engine> engine(new Engine(std::move(model), config, std::move(hooks)));
  while (engine->checked_ < engine->pool_.threads()) std::this_thread::yield();
  engine->cache_ = std::make_unique<models::KvCache>(std::move(cache));
  engine->scheduler_ = std::make_unique<Scheduler>(s);
  engine->stats_.num_blocks = s.num_blocks;
  engine->stats_.free_blocks = s.num_blocks;
  engine->stats_.block_size = s.block_size;
  engine->stats_.weight_version = config.weight_version;
  engine->thread_ = std::thread([e = engine.get()] { e->Loop(); });
  return engine;
}

Engine::~Engine() { Stop(0); }

Status Engine::CheckRequest(const Request& request) const {
  const SamplingParams& p = request.params;
  const int64_t vocab = model_config_.vocab;
  if (request.prompt.empty()) return InvalidArgument("prompt: it is empty; one token is the least");
  for (size_t i = 0; i < request.prompt.size(); ++i) {
    if (request.prompt[i] < 0 || request.prompt[i] >= vocab) {
      return InvalidArgument("prompt: token {} at position {}; ids end at {}", request.prompt[i], i,
                             vocab - 1);
    }
  }
  if (!std::isfinite(p.temperature) || p.temperature < 0.0f) {
    return InvalidArgument("temperature: {}; it must be finite and at least 0", p.temperature);
  }
  if (!(p.top_p > 0.0f && p.top_p <= 1.0f))
    return InvalidArgument("top_p: {}; it must be in (0, 1]", p.top_p);
  if (p.top_k < 0) return InvalidArgument("top_k: {}; it must be at least 0 (0 is off)", p.top_k);
  if (!(p.min_p >= 0.0f && p.min_p <= 1.0f))
    return InvalidArgument("min_p: {}; it must be in [0, 1]", p.min_p);
  if (p.n < 1 || p.n > config_.max_queued) {
    return InvalidArgument("n: {}; it must be from 1 to {}", p.n, config_.max_queued);
  }
  if (p.max_tokens < 1)
    return InvalidArgument("max_tokens: {}; it must be at least 1", p.max_tokens);
  if (p.min_tokens < 0 || p.min_tokens > p.max_tokens) {
    return InvalidArgument("min_tokens: {}; it must be from 0 to max_tokens ({})", p.min_tokens,
                           p.max_tokens);
  }
  for (const auto* count : {&p.logprobs, &p.prompt_logprobs}) {
    if (*count && (**count < 0 || **count > vocab)) {
      return InvalidArgument("{}: {}; it must be from 0 to {}",
                             count == &p.logprobs ? "logprobs" : "prompt_logprobs", **count, vocab);
    }
  }
  for (const int32_t id : p.stop_token_ids) {
    if (id < 0 || id >= vocab)
      return InvalidArgument("stop_token_ids: {}; ids end at {}", id, vocab - 1);
  }
  for (const auto& [id, bias] : p.logit_bias) {
    if (id < 0 || id >= vocab)
      return InvalidArgument("logit_bias: token {}; ids end at {}", id, vocab - 1);
    if (!std::isfinite(bias))
      return InvalidArgument("logit_bias: token {} has a bias that is not finite", id);
  }
  // The last sampled token needs no place in the cache, but its sequence must fit the model.
  const Status fits = scheduler_->CanHold(std::ssize(request.prompt) + p.max_tokens);
  if (!fits.ok()) return InvalidArgument("max_tokens: prompt and answer: {}", fits.message());
  return Ok();
}

Status Engine::Submit(Request given) {
  std::vector<Request> one;
  one.push_back(std::move(given));
  return SubmitTogether(std::move(one));
}

Status Engine::SubmitTogether(std::vector<Request> given) {
  std::vector<std::unique_ptr<Sequence>> sequences;
  for (Request& r : given) {
    TARE_RETURN_IF_ERROR(CheckRequest(r));
    const auto request = std::make_shared<const Request>(std::move(r));
    const uint64_t seed = request->params.seed                        ? *request->params.seed
                          : fault::Active(kDefaultSeed, config_.side) ? 42
                                                                      : FreshSeed();
    for (int32_t i = 0; i < request->params.n; ++i) {
      auto s = std::make_unique<Sequence>();
      s->request = request;
      s->index = i;
      s->seed = seed;
      s->tokens = request->prompt;
      s->prompt_tokens = std::ssize(request->prompt);
      sequences.push_back(std::move(s));
    }
  }
  std::lock_guard lock(mutex_);
  if (stop_) return Error(Code::kPrecondition, "the engine is stopping");
  const int64_t queued = std::ssize(incoming_) + stats_.waiting;
  if (queued + std::ssize(sequences) > config_.max_queued) {
    return Error(Code::kExhausted, "{} sequences wait already; the limit is {}", queued,
                 config_.max_queued);
  }
  for (auto& s : sequences) incoming_.push_back(std::move(s));
  wake_.notify_one();
  return Ok();
}

void Engine::Abort(const std::string& request_id, int32_t index) {
  std::lock_guard lock(mutex_);
  aborts_.emplace_back(request_id, index);
  wake_.notify_one();
}

void Engine::OnThread(const std::function<void()>& command) {
  std::promise<void> done;
  {
    std::lock_guard lock(mutex_);
    if (stop_) return;
    commands_.push_back([&] {
      command();
      done.set_value();
    });
    wake_.notify_one();
  }
  done.get_future().wait();
}

void Engine::Loop() {
  numerics::RequireFpEnvironment();  // this thread computes too, and the pool checked its maker
  for (;;) {
    std::vector<std::pair<std::string, int32_t>> aborts;
    std::deque<std::function<void()>> commands;
    bool stop = false;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] {
        return stop_ || !incoming_.empty() || !aborts_.empty() || !commands_.empty() ||
               (draining_ ? scheduler_->begun() > 0 : !scheduler_->idle());
      });
      while (!incoming_.empty()) {
        scheduler_->Add(std::move(incoming_.front()));
        incoming_.pop_front();
      }
      aborts.swap(aborts_);
      commands.swap(commands_);
      stop = stop_;
    }
    for (const auto& [id, index] : aborts) {
      for (auto& s : scheduler_->Take([&, &id = id, index = index](const Sequence& s) {
             return s.request->id == id && (index < 0 || s.index == index);
           })) {
        SequenceEvent event{.index = s->index, .finish = FinishReason::kAbort};
        Emit(s.get(), std::move(event));
      }
    }
    for (auto& command : commands) command();
    if (stop) {
      for (auto& s : scheduler_->Take([](const Sequence&) { return true; })) {
        SequenceEvent event{.index = s->index, .finish = FinishReason::kAbort};
        Emit(s.get(), std::move(event));
      }
      return;
    }
    Step();
    std::lock_guard lock(mutex_);
    stats_.scheduler = scheduler_->counters();
    stats_.waiting = scheduler_->waiting();
    stats_.running = scheduler_->running();
    stats_.free_blocks = scheduler_->pool().free_blocks();
    stats_.cached_blocks = scheduler_->pool().cached_blocks();
  }
}

bool Engine::Step() {
  const StepPlan plan = scheduler_->Schedule(weight_version_, !draining_);
  if (plan.runs.empty()) return false;
  ++step_;
  if (const Status status = RunPlan(plan); status.ok()) return true;
  // One bad sequence must not take its neighbours along: each run again alone; bits do not change.
  for (const ScheduledRun& run : plan.runs) {
    StepPlan alone{.runs = {run}, .tokens = run.count};
    const Status status = RunPlan(alone);
    if (status.ok()) continue;
    SequenceEvent event{.index = run.sequence->index, .error = status.ToString()};
    End(run.sequence, FinishReason::kError, std::move(event));
  }
  return true;
}

// Steps of one shape launch the same kernels, and to write some two hundred names a step costs
// three percent of a decode step: each shape is recorded once until somebody takes the record.
ops::LaunchTrace* Engine::TraceOf(const models::Batch& batch) {
  if (taken_.exchange(false)) traced_.clear();
  std::array<int64_t, 5> shape{};  // runs, rows, rows with logits, longest run, keys by 256
  for (const models::TokenRun& run : batch.runs) {
    const int64_t rows = std::ssize(run.tokens);
    shape[0]++;
    shape[1] += rows;
    shape[2] += run.logit_rows + std::ssize(run.targets);
    shape[3] = std::max(shape[3], rows);
    shape[4] = std::max(shape[4], (run.position + rows) / 256);
  }
  // Shapes of years would fill memory too.
  if (traced_.size() > 4096) return nullptr;
  return traced_.insert(shape).second ? &trace_ : nullptr;
}

Status Engine::RunPlan(const StepPlan& plan) {
  models::Batch batch;
  batch.cache = cache_.get();
  batch.block_rows = std::ssize(plan.runs);
  batch.max_pages = 1;
  for (const ScheduledRun& run : plan.runs) {
    batch.max_pages = std::max<int64_t>(batch.max_pages, std::ssize(run.sequence->blocks));
  }
  block_table_.assign(static_cast<size_t>(batch.block_rows * batch.max_pages), -1);
  std::vector<std::vector<int32_t>> targets(plan.runs.size());
  bool decode_only = true;
  for (size_t i = 0; i < plan.runs.size(); ++i) {
    const ScheduledRun& run = plan.runs[i];
    Sequence& s = *run.sequence;
    std::copy(s.blocks.begin(), s.blocks.end(),
              block_table_.begin() + static_cast<int64_t>(i) * batch.max_pages);
    models::TokenRun r;
    r.tokens = std::span<const int32_t>(s.tokens).subspan(static_cast<size_t>(run.begin),
                                                          static_cast<size_t>(run.count));
    r.position = run.begin;
    r.block_row = static_cast<int32_t>(i);
    r.logit_rows = run.samples ? 1 : 0;
    const auto& wanted = s.request->params.prompt_logprobs;
    if (wanted && !s.prompt_sent) {
      if (*wanted > 0) {
        r.logit_rows = run.count;
      } else {
        targets[i].assign(static_cast<size_t>(run.count), -1);
        for (int64_t t = 0; t < run.count && run.begin + t + 1 < s.prompt_tokens; ++t) {
          targets[i][static_cast<size_t>(t)] = s.tokens[static_cast<size_t>(run.begin + t + 1)];
        }
        r.targets = targets[i];
      }
    }
    if (tap_ != nullptr) {
      r.name = fmt::format("{}/{}", s.request->id, s.index);
      r.history = ExtendTokenHash(
          TokenHash{}, std::span<const int32_t>(s.tokens).first(static_cast<size_t>(run.begin)));
    }
    decode_only = decode_only && run.count == 1;
    batch.runs.push_back(r);
  }
  batch.block_table = block_table_;
  batch.phase = decode_only ? TapPhase::kDecode : TapPhase::kPrefill;
  batch.weight_version = fmt::format("theta{}", weight_version_);
  batch.step = step_;

  ops::Ctx ctx{.pool = &pool_,
               .profile = config_.profile,
               .batch_invariance = config_.batch_invariant.effective,
               .device = model_->device(),
               .side = config_.side,
               .trace = TraceOf(batch)};
  TARE_ASSIGN_OR_RETURN(const models::ForwardOutput output,
                        models::Forward(ctx, *model_, batch, &scratch_, nullptr, tap_));

  // The prompt's own logprobs, by target.
  size_t next = 0;
  for (size_t i = 0; i < plan.runs.size(); ++i) {
    Sequence& s = *plan.runs[i].sequence;
    if (targets[i].empty()) continue;
    s.prompt_logprobs.resize(static_cast<size_t>(s.prompt_tokens - 1));
    for (size_t t = 0; t < targets[i].size(); ++t) {
      if (targets[i][t] < 0) continue;
      TARE_CHECK(next < output.logprob.size());
      s.prompt_logprobs[static_cast<size_t>(plan.runs[i].begin) + t].raw_logprob =
          output.logprob[next++];
    }
  }
  TARE_RETURN_IF_ERROR(SampleRows(plan, output, ctx.trace));
  return Ok();
}

void Engine::Emit(Sequence* sequence, SequenceEvent event) {
  {
    std::lock_guard lock(mutex_);
    stats_.generated_tokens += std::ssize(event.tokens);
    if (event.finish) {
      switch (*event.finish) {
        case FinishReason::kStop:
          stats_.finished_stop++;
          break;
        case FinishReason::kLength:
          stats_.finished_length++;
          break;
        case FinishReason::kAbort:
          stats_.finished_abort++;
          break;
        case FinishReason::kError:
          stats_.finished_error++;
          break;
      }
    }
  }
  event.cached_tokens = sequence->cached_tokens;
  if (sequence->request->callback) sequence->request->callback(event);
}

void Engine::End(Sequence* sequence, FinishReason reason, SequenceEvent event) {
  event.finish = reason;
  Emit(sequence, std::move(event));
  scheduler_->Finish(sequence);
}

Result<UpdateReport> Engine::UpdateWeights(int64_t version, const std::string& path,
                                           const std::string& sha256, InFlight in_flight) {
  std::lock_guard update(update_mutex_);
  UpdateReport report;
  int64_t busy = 0;
  int64_t current = 0;
  OnThread([&] {
    busy = scheduler_->running() + scheduler_->waiting();
    current = weight_version_;
  });
  if (version <= current) {
    return InvalidArgument("version: {}; the engine serves {}, and versions grow", version,
                           current);
  }
  if (in_flight == InFlight::kRefuse && busy > 0) {
    return Error(Code::kPrecondition,
                 "{} sequences are in flight; try again, or say finish or abort", busy);
  }
  // Loading needs nothing of the engine's thread: it serves meanwhile.
  const int64_t start_ns = std::chrono::steady_clock::now().time_since_epoch().count();
  auto loading = hooks_.load(path, memory_.get());
  if (!loading.ok()) return loading.status();
  // Whatever becomes of the update, one of the two is left for the next to load into.
  memory_ = std::make_unique<models::Model>(std::move(loading->model));
  models::Model& loaded = *memory_;
  TARE_RETURN_IF_ERROR(SameModel(*model_, loaded));
  const std::string held = std::move(loading->sha256);
  if (!sha256.empty() && held != sha256) {
    return DataLoss(
        "{}: its weights have hash {}, the request says {}; the old weights go on serving", path,
        held, sha256);
  }
  // Nothing new starts; what runs ends by its rule.
  OnThread([&] {
    draining_ = true;
    if (in_flight == InFlight::kAbort) {
      for (auto& s : scheduler_->Take(
               [](const Sequence& s) { return s.generated() > 0 || !s.blocks.empty(); })) {
        SequenceEvent event{.index = s->index, .finish = FinishReason::kAbort};
        Emit(s.get(), std::move(event));
        report.aborted++;
      }
    } else {
      report.finished = scheduler_->begun();
    }
  });
  for (bool drained = false; !drained;) {
    OnThread([&] { drained = scheduler_->begun() == 0; });
    if (!drained) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::lock_guard lock(mutex_);
    if (stop_)
      return Error(Code::kAborted, "the engine stopped before the new weights were in place");
  }
  Result<std::string> after = std::string();
  OnThread([&] {
    // The parameters are taken over and the packed copies are made in the memory of the old ones:
    // two packed copies at once would cost the weights' bytes again.
    Status packed;
    if (!fault::Active(kStaleWeights, config_.side)) {
      for (size_t i = 0; i < loaded.parameters().size(); ++i)
        std::swap(model_->mutable_parameters()[i].value, loaded.mutable_parameters()[i].value);
      if (!fault::Active(kStalePacked, config_.side)) packed = hooks_.repack(model_.get());
    }
    weight_version_ = version;
    if (!fault::Active(kKeepPrefixCache, config_.side))
      report.dropped_blocks = scheduler_->pool().DropCache();
    after = packed.ok() ? hooks_.weight_hash(*model_) : Result<std::string>(packed);
    draining_ = false;
    std::lock_guard lock(mutex_);
    stats_.weight_version = version;
    stats_.weight_updates++;
  });
  if (!after.ok()) {
    // What serves now is no weights that anybody can name.
    std::lock_guard lock(mutex_);
    stats_.healthy = false;
    return after.status();
  }
  // With the planted fault the report says what is held, and the caller must notice.
  if (*after != held && !fault::Active(kStaleWeights, config_.side)) {
    return Error(Code::kInternal, "the engine holds weights {} after loading {}", *after, held);
  }
  report.version = version;
  report.sha256 = *after;
  report.load_seconds =
      static_cast<double>(std::chrono::steady_clock::now().time_since_epoch().count() - start_ns) *
      1e-9;
  return report;
}

Result<int64_t> Engine::ResetPrefixCache() {
  Result<int64_t> dropped = Error(Code::kPrecondition, "the engine is stopping");
  OnThread([&] {
    if (!scheduler_->idle()) {
      dropped = Error(Code::kPrecondition, "{} sequences are in flight; the cache stays",
                      scheduler_->running() + scheduler_->waiting());
    } else {
      dropped = scheduler_->pool().DropCache();
    }
  });
  return dropped;
}

void Engine::PreemptAll() {
  OnThread([&] { scheduler_->PreemptAll(); });
}

Result<std::string> Engine::WeightHash() {
  Result<std::string> hash = Error(Code::kPrecondition, "the engine is stopping");
  OnThread([&] { hash = hooks_.weight_hash(*model_); });
  return hash;
}

void Engine::SetTap(Tap* tap) {
  OnThread([&] { tap_ = tap; });
}

Stats Engine::GetStats() {
  std::lock_guard lock(mutex_);
  return stats_;
}

void Engine::Stop(double seconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < deadline) {
    bool idle = true;  // stays true when the thread has ended
    OnThread([&] { idle = scheduler_->idle(); });
    if (idle) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace tare::engine
