#include "models/forward.h"

#include <algorithm>
#include <cstring>

#include "models/op_params.h"
#include "models/pass.h"
#include "ops/refusals.h"

namespace tare::models {
namespace {

// Logits of at most this many bytes exist at once when only logprobs are wanted.
constexpr int64_t kLogitBlockBytes = int64_t{32} << 20;

int64_t LogitBlockRows(const ModelConfig& c) {
  return std::max<int64_t>(1, kLogitBlockBytes / (c.vocab * SizeOf(c.logits_dtype)));
}

// The rows whose logprob or logits are wanted.
struct Wanted {
  std::vector<int64_t> target_rows, logit_rows;
  std::vector<int32_t> targets;
  std::vector<float> temperatures;
  bool tempered = false;
};

Wanted Collect(const Batch& batch, const BatchLayout& layout) {
  Wanted w;
  for (size_t r = 0; r < batch.runs.size(); ++r) {
    const TokenRun& run = batch.runs[r];
    const int64_t begin = layout.row_of_run[r], n = static_cast<int64_t>(run.tokens.size());
    for (size_t i = 0; i < run.targets.size(); ++i) {
      if (run.targets[i] < 0) continue;
      w.target_rows.push_back(begin + static_cast<int64_t>(i));
      w.targets.push_back(run.targets[i]);
      w.temperatures.push_back(run.temperature);
      w.tempered |= run.temperature != 1.0f;
    }
    for (int64_t i = n - run.logit_rows; i < n; ++i) w.logit_rows.push_back(begin + i);
  }
  return w;
}

class Head {
 public:
  Head(const ops::Ctx& ctx, const Model& model, Scratch* scratch)
      : ctx_(ctx), model_(model), scratch_(scratch) {}

  // The stream's last norm at `rows` alone: gathered x and h, [rows.size(), H].
  Result<Tensor> NormAt(const Tensor& x, const Tensor& h, std::span<const int64_t> rows) {
    const ModelConfig& c = model_.config();
    const Shape shape = {static_cast<int64_t>(rows.size()), c.hidden};
    TARE_ASSIGN_OR_RETURN(Tensor gx, scratch_->Get("head_x", c.dtype, shape, ctx_.device));
    TARE_ASSIGN_OR_RETURN(Tensor gh, scratch_->Get("head_h", c.residual_dtype, shape, ctx_.device));
    TARE_RETURN_IF_ERROR(GatherRows(ctx_, x, rows, &gx));
    TARE_RETURN_IF_ERROR(GatherRows(ctx_, h, rows, &gh));
    ops::rmsnorm::Args args;
    args.rows = shape[0];
    args.x = gx.data();
    args.residual = gh.data();
    args.residual_out = gh.mutable_data();
    args.w = model_.parameters()[model_.final_norm()].value.data();
    args.y = gx.mutable_data();
    TARE_RETURN_IF_ERROR(ops::rmsnorm::Forward(ctx_, NormParams(c, true), args));
    return gx;
  }

  Status Logits(const void* x, int64_t rows, void* y) {
    return RunLinear(ctx_, model_, HeadParams(model_.config()), model_.head(), -1, x, rows, y,
                     scratch_);
  }

  // Logprobs of entries [first, first + rows) of `w` from their logits.
  Status Logprob(const Wanted& w, int64_t first, int64_t rows, const void* logits, Tensor* out,
                 Tensor* entropy, Tensor* max, Tensor* log_sum) {
    const auto at = [&](Tensor* t) {
      return t == nullptr ? nullptr : static_cast<float*>(t->mutable_data()) + first;
    };
    TARE_ASSIGN_OR_RETURN(const Tensor targets,
                          ToDevice(w.targets.data() + first, DType::kI32, {rows}, ctx_.device));
    Tensor temperature;
    if (w.tempered) {
      TARE_ASSIGN_OR_RETURN(
          temperature, ToDevice(w.temperatures.data() + first, DType::kF32, {rows}, ctx_.device));
    }
    ops::logprob::Args args;
    args.rows = rows;
    args.logits = logits;
    args.targets = static_cast<const int32_t*>(targets.data());
    if (w.tempered) args.temperature = static_cast<const float*>(temperature.data());
    args.logprob = at(out);
    args.entropy = at(entropy);
    args.max = at(max);
    args.log_sum = at(log_sum);
    return ops::logprob::Forward(ctx_, LogprobParams(model_.config()), args);
  }

 private:
  const ops::Ctx& ctx_;
  const Model& model_;
  Scratch* scratch_;
};

Status ToHost(const Tensor& t, std::vector<float>* out) {
  TARE_ASSIGN_OR_RETURN(const Tensor host, t.To(Device::kCpu));
  out->assign(host.as<float>(), host.as<float>() + host.elements());
  return Ok();
}

Status CheckTape(const Batch& batch, const Tape* tape) {
  if (tape == nullptr) return Ok();
  if (batch.cache != nullptr)
    return InvalidArgument("a tape needs packed K and V; this batch has a cache");
  return Ok();
}

}  // namespace

Result<ForwardOutput> Forward(const ops::Ctx& ctx, const Model& model, const Batch& batch,
                              Scratch* scratch, Tape* tape, Tap* tap) {
  const ModelConfig& c = model.config();
  if (ctx.device != model.device()) {
    return InvalidArgument("the context is on {}, the model on {}", DeviceName(ctx.device),
                           DeviceName(model.device()));
  }
  if (c.residual_dtype != c.dtype)
    return Unsupported("a residual stream of another dtype than the activations");
  TARE_RETURN_IF_ERROR(CheckTape(batch, tape));
  TARE_ASSIGN_OR_RETURN(const Prepared prepared, Prepare(model, batch));
  const int64_t rows = prepared.layout.rows;
  const Shape stream = {rows, c.hidden};
  ForwardOutput output;
  if (tape != nullptr) tape->filled = false;
  if (rows == 0) return output;
  Reporter report(tap, model, batch, prepared, ctx.side);

  // Embedding. With a tape the first layer keeps this buffer as its stream.
  Tensor x, h;
  if (tape != nullptr) {
    tape->layers.resize(c.layers.size());
    TARE_ASSIGN_OR_RETURN(x, scratch->Take(c.dtype, stream, ctx.device));
  } else {
    TARE_ASSIGN_OR_RETURN(x, scratch->Get("embed", c.dtype, stream, ctx.device));
  }
  ops::embedding::Args embed;
  embed.rows = rows;
  embed.ids = static_cast<const int32_t*>(prepared.ids.data());
  embed.table = model.parameters()[model.embedding()].value.data();
  embed.out = x.mutable_data();
  TARE_RETURN_IF_ERROR(ops::embedding::Forward(ctx, EmbeddingParams(c), embed));
  report.EmitEmbedding(model, prepared, x);

  LayerPass pass(ctx, model, batch, prepared, scratch, &report);
  SpareLayer spare_owner(scratch);  // recompute: one layer's tensors, used by all in turn
  Tape::Layer& spare = spare_owner.layer;
  const int64_t layers = static_cast<int64_t>(c.layers.size());
  for (int64_t l = 0; l < layers; ++l) {
    Tape::Layer* saved = nullptr;
    if (tape != nullptr) saved = tape->options.recompute ? &spare : &tape->layers[l];
    if (Status s = pass.Run(l, &x, &h, saved); !s.ok())
      return s.Annotate(fmt::format("layer {}", l));
    if (saved == &spare) {
      // Only the stream at the layer's start stays, and the router's decision to check against.
      tape->layers[l].h_in = std::move(spare.h_in);
      tape->layers[l].router_ids = std::move(spare.router_ids);
      spare.h_in = Tensor();
      spare.router_ids = Tensor();
    }
  }

  const Wanted wanted = Collect(batch, prepared.layout);
  const int64_t count = static_cast<int64_t>(wanted.target_rows.size());
  const std::string last = report.Name(static_cast<int>(layers) - 1, "");
  Head head(ctx, model, scratch);

  // The last norm over all rows where a tape or a tap wants it, else at the wanted rows alone: a
  // row does not know which.
  Tensor x_final;
  if (tape != nullptr || tap != nullptr) {
    Tensor h_final, rstd;
    const auto buffer = [&](DType dtype, Shape shape) {
      return tape != nullptr ? scratch->Take(dtype, std::move(shape), ctx.device)
                             : Tensor::Allocate(dtype, std::move(shape), ctx.device);
    };
    TARE_ASSIGN_OR_RETURN(h_final, buffer(c.residual_dtype, stream));
    TARE_ASSIGN_OR_RETURN(x_final, buffer(c.dtype, stream));
    TARE_ASSIGN_OR_RETURN(rstd, buffer(DType::kF32, {rows}));
    ops::rmsnorm::Args args;
    args.rows = rows;
    args.x = x.data();
    args.residual = h.data();
    args.residual_out = h_final.mutable_data();
    args.w = model.parameters()[model.final_norm()].value.data();
    args.y = x_final.mutable_data();
    args.rstd = static_cast<float*>(rstd.mutable_data());
    TARE_RETURN_IF_ERROR(ops::rmsnorm::Forward(ctx, NormParams(c, true), args));
    report.Emit(static_cast<int>(layers) - 1, "out", "rmsnorm", h_final,
                {last + "mid", last + "mlp.down_proj.out"});
    report.Emit(-1, "norm.out", "rmsnorm", x_final, {last + "out"});
    if (tape != nullptr) {
      tape->h_final = std::move(h_final);
      tape->rstd_final = std::move(rstd);
      tape->x_final = x_final;
    }
  }

  if (!wanted.logit_rows.empty()) {
    const int64_t n = static_cast<int64_t>(wanted.logit_rows.size());
    Tensor at;
    if (x_final.data() == nullptr) {
      TARE_ASSIGN_OR_RETURN(at, head.NormAt(x, h, wanted.logit_rows));
    } else {
      TARE_ASSIGN_OR_RETURN(at, scratch->Get("head_x", c.dtype, {n, c.hidden}, ctx.device));
      TARE_RETURN_IF_ERROR(GatherRows(ctx, x_final, wanted.logit_rows, &at));
    }
    TARE_ASSIGN_OR_RETURN(output.logits,
                          scratch->Get("logits", c.logits_dtype, {n, c.vocab}, ctx.device));
    TARE_RETURN_IF_ERROR(head.Logits(at.data(), n, output.logits.mutable_data()));
  }

  if (count > 0) {
    Tensor at;
    if (x_final.data() == nullptr) {
      TARE_ASSIGN_OR_RETURN(at, head.NormAt(x, h, wanted.target_rows));
    } else {
      TARE_ASSIGN_OR_RETURN(at, scratch->Get("head_x", c.dtype, {count, c.hidden}, ctx.device));
      TARE_RETURN_IF_ERROR(GatherRows(ctx, x_final, wanted.target_rows, &at));
    }
    TARE_ASSIGN_OR_RETURN(Tensor logprob, Tensor::Allocate(DType::kF32, {count}, ctx.device));
    Tensor entropy, max, log_sum, kept;
    const bool with_entropy = batch.entropy;
    if (with_entropy) {
      TARE_ASSIGN_OR_RETURN(entropy, Tensor::Allocate(DType::kF32, {count}, ctx.device));
    }
    const int64_t row_bytes = c.vocab * SizeOf(c.logits_dtype);
    if (tape != nullptr) {
      TARE_ASSIGN_OR_RETURN(max, Tensor::Allocate(DType::kF32, {count}, ctx.device));
      TARE_ASSIGN_OR_RETURN(log_sum, Tensor::Allocate(DType::kF32, {count}, ctx.device));
      if (count <= tape->options.max_logit_bytes / row_bytes) {
        kept = tape->logits;
        if (kept.data() == nullptr || kept.shape() != Shape{count, c.vocab} ||
            kept.device() != ctx.device) {
          TARE_ASSIGN_OR_RETURN(kept, scratch->Take(c.logits_dtype, {count, c.vocab}, ctx.device));
        }
      }
    }
    const int64_t block = std::min(count, LogitBlockRows(c));
    for (int64_t first = 0; first < count; first += block) {
      const int64_t n = std::min(block, count - first);
      Tensor logits;
      if (kept.data() != nullptr) {
        TARE_ASSIGN_OR_RETURN(logits, kept.Slice(first, first + n));
      } else {
        TARE_ASSIGN_OR_RETURN(
            logits, scratch->Get("logit_block", c.logits_dtype, {block, c.vocab}, ctx.device));
      }
      const char* from = static_cast<const char*>(at.data()) + first * c.hidden * SizeOf(c.dtype);
      TARE_RETURN_IF_ERROR(head.Logits(from, n, logits.mutable_data()));
      TARE_RETURN_IF_ERROR(
          head.Logprob(wanted, first, n, logits.data(), &logprob, with_entropy ? &entropy : nullptr,
                       tape != nullptr ? &max : nullptr, tape != nullptr ? &log_sum : nullptr));
    }
    TARE_RETURN_IF_ERROR(ToHost(logprob, &output.logprob));
    if (with_entropy) TARE_RETURN_IF_ERROR(ToHost(entropy, &output.entropy));
    if (tape != nullptr) {
      tape->logits = std::move(kept);
      tape->max = std::move(max);
      tape->log_sum = std::move(log_sum);
      tape->entropy = std::move(entropy);
    }
  }
  TARE_RETURN_IF_ERROR(ops::TakeRefusals(ctx));
  if (tape != nullptr) {
    tape->layout = prepared.layout;
    tape->target_rows = wanted.target_rows;
    tape->filled = true;
    tape->generation = model.generation();
  }
  report.EndWithLogprobs(output.logprob, output.entropy);
  return output;
}

}  // namespace tare::models
