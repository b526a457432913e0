// The containers around Forward: cache, layout, scratch, tape, gradients.

#include <algorithm>
#include <cstring>
#include <limits>

#include "models/forward.h"
#include "ops/token_units.h"

namespace tare::models {

Result<KvCache> KvCache::Create(const ModelConfig& config, int64_t num_pages, int64_t page_size,
                                Device device) {
  if (num_pages < 1 || page_size < 1) {
    return InvalidArgument("a KV cache of {} pages of {} tokens; both must be at least 1",
                           num_pages, page_size);
  }
  KvCache cache;
  cache.num_pages_ = num_pages;
  cache.page_size_ = page_size;
  const Shape shape = {num_pages, page_size, config.kv_heads, config.head_dim};
  for (size_t l = 0; l < config.layers.size(); ++l) {
    TARE_ASSIGN_OR_RETURN(Tensor k, Tensor::Allocate(config.dtype, shape, device));
    TARE_ASSIGN_OR_RETURN(Tensor v, Tensor::Allocate(config.dtype, shape, device));
    cache.k_.push_back(std::move(k));
    cache.v_.push_back(std::move(v));
  }
  return cache;
}

int64_t KvCache::BytesPerPage(const ModelConfig& config, int64_t page_size) {
  return 2 * static_cast<int64_t>(config.layers.size()) * page_size * config.kv_width() *
         SizeOf(config.dtype);
}

Result<BatchLayout> LayOut(const Batch& batch) {
  constexpr int64_t kMaxRows = int64_t{1} << 28;
  if (batch.row_align < 1 || batch.row_align > 4096) {
    return InvalidArgument("row_align is {}; 1 to 4,096 is possible", batch.row_align);
  }
  BatchLayout layout;
  for (size_t r = 0; r < batch.runs.size(); ++r) {
    const TokenRun& run = batch.runs[r];
    const int64_t n = static_cast<int64_t>(run.tokens.size());
    if (n == 0) return InvalidArgument("run {} has no tokens", r);
    if (run.position < 0) return InvalidArgument("run {} starts at position {}", r, run.position);
    if (!run.targets.empty() && run.targets.size() != run.tokens.size()) {
      return InvalidArgument("run {} has {} tokens and {} targets", r, n, run.targets.size());
    }
    if (run.logit_rows < 0 || run.logit_rows > n) {
      return InvalidArgument("run {} wants the logits of {} rows of {}", r, run.logit_rows, n);
    }
    const int64_t begin = (layout.rows + batch.row_align - 1) / batch.row_align * batch.row_align;
    if (n > kMaxRows - begin) return InvalidArgument("the batch has more than {} rows", kMaxRows);
    layout.row_of_run.push_back(begin);
    layout.rows = begin + n;
  }
  layout.rows = (layout.rows + batch.row_align - 1) / batch.row_align * batch.row_align;
  return layout;
}

Result<Tensor> Scratch::Get(const char* slot, DType dtype, Shape shape, Device device) {
  TARE_ASSIGN_OR_RETURN(const int64_t elements, ElementCount(shape));
  auto it = slots_.find(std::string_view(slot));
  if (it == slots_.end() || it->second.dtype() != dtype || it->second.elements() < elements ||
      it->second.device() != device) {
    if (it != slots_.end()) slots_.erase(it);
    // Room to grow, so that a growing batch does not allocate every time.
    TARE_ASSIGN_OR_RETURN(Tensor fresh, Tensor::Allocate(dtype, {elements + elements / 4}, device));
    it = slots_.emplace(slot, std::move(fresh)).first;
  }
  TARE_ASSIGN_OR_RETURN(const Tensor front, it->second.Slice(0, elements));
  return front.Reshape(std::move(shape));
}

int64_t Scratch::size_bytes() const {
  int64_t total = 0;
  for (const auto& [name, tensor] : slots_) total += tensor.size_bytes();
  for (const auto& [at, tensor] : taken_) total += tensor.size_bytes();
  for (const Tensor& tensor : spare_) total += tensor.size_bytes();
  return total;
}

Result<Tensor> Scratch::Take(DType dtype, Shape shape, Device device) {
  if (!keep_tapes_ || device != Device::kCpu)
    return Tensor::Allocate(dtype, std::move(shape), device);
  TARE_ASSIGN_OR_RETURN(const int64_t elements, ElementCount(shape));
  if (elements == 0) return Tensor::Allocate(dtype, std::move(shape), device);
  // The smallest that is large enough; where there is none, the largest goes back to the system:
  // batches have grown, and nobody will ask for it again.
  auto best = spare_.end(), largest = spare_.end();
  for (auto it = spare_.begin(); it != spare_.end(); ++it) {
    if (it->dtype() != dtype) continue;
    if (it->elements() >= elements && (best == spare_.end() || it->elements() < best->elements()))
      best = it;
    if (largest == spare_.end() || it->elements() > largest->elements()) largest = it;
  }
  Tensor whole;
  if (best != spare_.end()) {
    whole = *best;
    spare_.erase(best);
  } else {
    if (largest != spare_.end()) spare_.erase(largest);
    TARE_ASSIGN_OR_RETURN(whole, Tensor::Allocate(dtype, {elements}, device));
  }
  TARE_ASSIGN_OR_RETURN(const Tensor front, whole.Slice(0, elements));
  taken_.emplace(whole.data(), std::move(whole));
  return front.Reshape(std::move(shape));
}

void Scratch::Recycle(Tensor* part) {
  // Only what Take gave out: a tape also holds views of slots and of tensors of the caller.
  const auto it = taken_.find(part->data());
  if (it != taken_.end()) {
    spare_.push_back(std::move(it->second));
    taken_.erase(it);
  }
  *part = Tensor();
}

void Scratch::Recycle(Tape* tape) {
  tape->ForEach([&](Tensor* t) { Recycle(t); });
}

void Tape::Layer::ForEach(const std::function<void(Tensor*)>& call) {
  for (Tensor* t : {&h_in,           &rstd_in,      &x_attn,     &qk,       &rstd_q,
                    &rstd_k,         &qkv,          &attn,       &lse2,     &h_mid,
                    &rstd_mid,       &x_mlp,        &gate_up,    &act,      &router_ids,
                    &router_weights, &router_probs, &expert_out, &token_of, &row_of,
                    &router_logits}) {
    call(t);
  }
}

void Tape::ForEach(const std::function<void(Tensor*)>& call) {
  for (Layer& l : layers) l.ForEach(call);
  for (Tensor* t : {&h_final, &rstd_final, &x_final, &logits, &max, &log_sum, &entropy}) call(t);
}

int64_t Tape::size_bytes() const {
  int64_t total = 0;
  const_cast<Tape*>(this)->ForEach([&](Tensor* t) { total += t->size_bytes(); });
  return total;
}

Result<Gradients> Gradients::Zeros(const Model& model, int32_t batch_segments) {
  if (batch_segments != 1 && batch_segments != 2 && batch_segments != 4 && batch_segments != 8) {
    return InvalidArgument("batch_segments is {}; 1, 2, 4 or 8 is possible", batch_segments);
  }
  Gradients g;
  g.batch_segments_ = batch_segments;
  g.tied_ = model.config().tied ? model.embedding() : -1;
  for (size_t i = 0; i < model.parameters().size(); ++i) {
    const Tensor& value = model.parameters()[i].value;
    const int64_t halves = static_cast<int>(i) == g.tied_ ? 2 : 1;
    TARE_ASSIGN_OR_RETURN(
        Tensor t,
        Tensor::Allocate(DType::kF32, {batch_segments * halves, value.elements()}, model.device()));
    TARE_ASSIGN_OR_RETURN(const Tensor first, t.Slice(0, 1));
    TARE_ASSIGN_OR_RETURN(Tensor view, first.Reshape(value.shape()));
    g.storage_.push_back(std::move(t));
    g.final_.push_back(std::move(view));
  }
  return g;
}

Status Gradients::SetZero() {
  for (Tensor& t : storage_) {
    if (t.device() != Device::kCpu)
      return Unsupported("gradients on {} are zeroed by making them anew", DeviceName(t.device()));
    std::memset(t.mutable_data(), 0, t.size_bytes());
  }
  return Ok();
}

float* Gradients::slot(int parameter, int32_t batch_segment, int half) {
  Tensor& t = storage_[parameter];
  const int64_t halves = parameter == tied_ ? 2 : 1;
  TARE_CHECK(batch_segment >= 0 && batch_segment < batch_segments_ && half < halves);
  return static_cast<float*>(t.mutable_data()) + (batch_segment * halves + half) * t.dim(1);
}

Status FinishGradients(const ops::Ctx& ctx, const Model& model, Gradients* gradients) {
  for (size_t i = 0; i < gradients->storage_.size(); ++i) {
    Tensor& t = gradients->storage_[i];
    const bool tied = static_cast<int>(i) == gradients->tied_;
    float* data = static_cast<float*>(t.mutable_data());
    const int64_t count = t.dim(1);
    if (gradients->batch_segments_ > 1) {
      TARE_RETURN_IF_ERROR(
          ops::SumBatchSegments(ctx, data, gradients->batch_segments_, tied ? 2 * count : count)
              .Annotate(model.parameters()[i].name));
    }
    // Slot 0 holds [head, table]: the same operator adds the two, head first.
    if (tied)
      TARE_RETURN_IF_ERROR(
          ops::SumBatchSegments(ctx, data, 2, count).Annotate(model.parameters()[i].name));
  }
  return Ok();
}

}  // namespace tare::models
