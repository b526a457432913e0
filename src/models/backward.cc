// The walk back over a tape: every operator's backward in reverse order, gradients of parameters
// added unit by unit.

#include <algorithm>
#include <cstring>

#include "models/op_params.h"
#include "models/pass.h"
#include "ops/refusals.h"
#include "ops/token_units.h"

namespace tare::models {
namespace {

namespace lin = ops::linear;
namespace grouped = ops::grouped_linear;

// dlogits of about this many bytes exist at once: whole units, at least one.
constexpr int64_t kDlogitBytes = int64_t{64} << 20;
constexpr int64_t kLogitBlockBytes = int64_t{32} << 20;
// The longest step group: leading zero rows are left out in whole groups.
constexpr int64_t kStepGroup = 16;

class BackwardPass {
 public:
  BackwardPass(const ops::Ctx& ctx, const Model& model, const Batch& batch,
               const Prepared& prepared, std::vector<ops::TokenUnit> units, Tape* tape,
               Scratch* scratch, Gradients* gradients, int32_t segment, Reporter* reporter)
      : ctx_(ctx),
        model_(model),
        c_(model.config()),
        batch_(batch),
        prepared_(prepared),
        units_(std::move(units)),
        tape_(tape),
        scratch_(scratch),
        gradients_(gradients),
        segment_(segment),
        report_(*reporter),
        rows_(prepared.layout.rows) {}

  // Gradient of the loss with respect to the final norm's output, and dW of the head.
  Status Head(const LossGradient& loss, Tensor* dx_final);
  // In and out: `g` [T, H], the gradient of the residual stream above and below the layer.
  Status Layer(int64_t layer, const Tape::Layer& saved, Tensor* g);
  Status Norm(int weight, const Tensor& h, const Tensor& rstd, const Tensor& dy,
              const Tensor* dstream, Tensor* dx);
  Status Embedding(const Tensor& g);
  Result<Tensor> Buffer(const char* slot, DType dtype, Shape shape) {
    return scratch_->Get(slot, dtype, std::move(shape), ctx_.device);
  }

 private:
  const void* Value(int parameter) const { return model_.parameters()[parameter].value.data(); }
  float* Slot(int parameter, int half = 0) { return gradients_->slot(parameter, segment_, half); }
  Status Linear(const lin::Params& params, int weight, int bias, const Tensor& x, const void* dy,
                void* dx);
  Status Attention(int64_t layer, const Tape::Layer& saved, const Tensor& dattn, Tensor* dnormed);
  Status Mlp(int64_t layer, const Tape::Layer& saved, const Tensor& g, Tensor* dnormed);
  Status Experts(int64_t layer, const Tape::Layer& saved, const Tensor& g, Tensor* dnormed);

  const ops::Ctx& ctx_;
  const Model& model_;
  const ModelConfig& c_;
  const Batch& batch_;
  const Prepared& prepared_;
  std::vector<ops::TokenUnit> units_;
  Tape* tape_;
  Scratch* scratch_;
  Gradients* gradients_;
  int32_t segment_;
  Reporter& report_;
  int64_t rows_;
};

Status BackwardPass::Linear(const lin::Params& params, int weight, int bias, const Tensor& x,
                            const void* dy, void* dx) {
  TARE_ASSIGN_OR_RETURN(
      const ops::Ctx with,
      WithWorkspace(
          ctx_, scratch_,
          lin::BackwardWorkspaceBytes(ctx_, params, rows_, static_cast<int64_t>(units_.size()))));
  lin::BackwardArgs args;
  args.m = rows_;
  args.dy = dy;
  args.x = x.data();
  args.w = Value(weight);
  args.units = units_;
  args.dx = dx;
  args.dw = Slot(weight);
  if (params.bias) args.dbias = Slot(bias);
  return lin::Backward(with, params, args);
}

Status BackwardPass::Norm(int weight, const Tensor& h, const Tensor& rstd, const Tensor& dy,
                          const Tensor* dstream, Tensor* dx) {
  ops::rmsnorm::BackwardArgs args;
  args.rows = rows_;
  args.h = h.data();
  args.w = Value(weight);
  args.rstd = static_cast<const float*>(rstd.data());
  args.dy = dy.data();
  if (dstream != nullptr) args.dresidual_out = dstream->data();
  args.dx = dx->mutable_data();
  args.dw = Slot(weight);
  args.units = units_;
  return ops::rmsnorm::Backward(ctx_, NormParams(c_, true), args);
}

// Rows without a target have zero dlogits. Of each unit only the stretch from its first to its last
// target takes part, begun at a whole step group: what is left out are zero products, which move no
// bit of any chain.
Status BackwardPass::Head(const LossGradient& loss, Tensor* dx_final) {
  struct Piece {
    int64_t begin, rows;   // rows of the batch
    int64_t first, count;  // entries of target_rows
  };
  std::vector<Piece> pieces;
  const std::vector<int64_t>& targets = tape_->target_rows;
  size_t at = 0;
  for (const ops::TokenUnit& unit : units_) {
    const size_t first = at;
    while (at < targets.size() && targets[at] < unit.begin + unit.rows) ++at;
    if (at == first) continue;
    const int64_t skip = (targets[first] - unit.begin) / kStepGroup * kStepGroup;
    pieces.push_back({unit.begin + skip, targets[at - 1] + 1 - unit.begin - skip,
                      static_cast<int64_t>(first), static_cast<int64_t>(at - first)});
  }
  TARE_CHECK(at == targets.size());
  const lin::Params params = HeadParams(c_);
  const int64_t align = batch_.row_align;
  const auto round_up = [&](int64_t n) { return (n + align - 1) / align * align; };
  const int64_t dlogit_row = c_.vocab * SizeOf(c_.dtype);
  std::vector<int32_t> target_ids;
  std::vector<float> temperatures;
  for (const TokenRun& run : batch_.runs) {
    for (int32_t id : run.targets) {
      if (id < 0) continue;
      target_ids.push_back(id);
      temperatures.push_back(run.temperature);
    }
  }

  std::vector<int64_t> all_rows;  // rows of the batch that have a gradient, in compact order
  int64_t total = 0;
  for (const Piece& piece : pieces) total += round_up(piece.rows);
  TARE_ASSIGN_OR_RETURN(Tensor dx_all,
                        Buffer("dx_head", c_.grad_dtype, {std::max<int64_t>(total, 1), c_.hidden}));
  int64_t done = 0;  // compact rows written to dx_all
  for (size_t p = 0; p < pieces.size();) {
    // A group of whole pieces.
    size_t end = p;
    int64_t compact = 0;
    std::vector<ops::TokenUnit> units;
    std::vector<int64_t>
        rows;  // batch row of each compact row; padding repeats a row, its dy is zero
    while (end < pieces.size() &&
           (end == p || (compact + pieces[end].rows) * dlogit_row <= kDlogitBytes)) {
      const Piece& piece = pieces[end++];
      units.push_back({compact, piece.rows});
      for (int64_t i = 0; i < piece.rows; ++i) rows.push_back(piece.begin + i);
      compact += round_up(piece.rows);
      rows.resize(compact, piece.begin);
    }
    TARE_ASSIGN_OR_RETURN(Tensor x, Buffer("head_x", c_.dtype, {compact, c_.hidden}));
    TARE_RETURN_IF_ERROR(GatherRows(ctx_, tape_->x_final, rows, &x));
    TARE_ASSIGN_OR_RETURN(Tensor dlogits, Buffer("dlogits", c_.dtype, {compact, c_.vocab}));
    TARE_RETURN_IF_ERROR(SetZero(&dlogits));

    // dlogits of each stretch of consecutive rows with targets.
    const int64_t block =
        std::max<int64_t>(1, kLogitBlockBytes / (c_.vocab * SizeOf(c_.logits_dtype)));
    for (size_t i = p; i < end; ++i) {
      const Piece& piece = pieces[i];
      for (int64_t e = piece.first; e < piece.first + piece.count;) {
        int64_t n = 1;
        while (n < block && e + n < piece.first + piece.count && targets[e + n] == targets[e] + n)
          ++n;
        const int64_t compact_row = units[i - p].begin + targets[e] - piece.begin;
        Tensor logits;
        if (tape_->logits.data() != nullptr) {
          TARE_ASSIGN_OR_RETURN(logits, tape_->logits.Slice(e, e + n));
        } else {
          TARE_ASSIGN_OR_RETURN(logits, Buffer("logit_block", c_.logits_dtype, {block, c_.vocab}));
          const char* from =
              static_cast<const char*>(x.data()) + compact_row * c_.hidden * SizeOf(c_.dtype);
          TARE_RETURN_IF_ERROR(RunLinear(ctx_, model_, params, model_.head(), -1, from, n,
                                         logits.mutable_data(), scratch_));
        }
        const auto host = [&](const auto* data, DType dtype) {
          return ToDevice(data + e, dtype, {n}, ctx_.device);
        };
        TARE_ASSIGN_OR_RETURN(const Tensor ids, host(target_ids.data(), DType::kI32));
        TARE_ASSIGN_OR_RETURN(const Tensor temperature, host(temperatures.data(), DType::kF32));
        TARE_ASSIGN_OR_RETURN(const Tensor dlogprob, host(loss.dlogprob.data(), DType::kF32));
        Tensor dentropy;
        ops::logprob::BackwardArgs args;
        args.rows = n;
        args.logits = logits.data();
        args.targets = static_cast<const int32_t*>(ids.data());
        args.temperature = static_cast<const float*>(temperature.data());
        args.max = static_cast<const float*>(tape_->max.data()) + e;
        args.log_sum = static_cast<const float*>(tape_->log_sum.data()) + e;
        args.dlogprob = static_cast<const float*>(dlogprob.data());
        if (!loss.dentropy.empty()) {
          TARE_ASSIGN_OR_RETURN(dentropy, host(loss.dentropy.data(), DType::kF32));
          args.dentropy = static_cast<const float*>(dentropy.data());
          args.entropy = static_cast<const float*>(tape_->entropy.data()) + e;
        }
        args.dlogits = static_cast<char*>(dlogits.mutable_data()) + compact_row * dlogit_row;
        TARE_RETURN_IF_ERROR(ops::logprob::Backward(ctx_, LogprobParams(c_), args));
        e += n;
      }
    }

    TARE_ASSIGN_OR_RETURN(
        const ops::Ctx with,
        WithWorkspace(ctx_, scratch_,
                      lin::BackwardWorkspaceBytes(ctx_, params, compact,
                                                  static_cast<int64_t>(units.size()))));
    lin::BackwardArgs args;
    args.m = compact;
    args.dy = dlogits.data();
    args.x = x.data();
    args.w = Value(model_.head());
    args.units = units;
    args.dx = static_cast<char*>(dx_all.mutable_data()) + done * c_.hidden * SizeOf(c_.grad_dtype);
    args.dw = Slot(model_.head());
    TARE_RETURN_IF_ERROR(lin::Backward(with, params, args));
    // Padding rows are not scattered: mark them with the padding's own absence.
    for (size_t i = p; i < end; ++i) {
      const Piece& piece = pieces[i];
      for (int64_t r = 0; r < round_up(piece.rows); ++r)
        all_rows.push_back(r < piece.rows ? piece.begin + r : -1);
    }
    done += compact;
    p = end;
  }
  TARE_ASSIGN_OR_RETURN(*dx_final, Buffer("dnormed", c_.grad_dtype, {rows_, c_.hidden}));
  return ScatterRows(ctx_, dx_all, all_rows, dx_final);
}

Status BackwardPass::Layer(int64_t layer, const Tape::Layer& saved, Tensor* g) {
  const LayerParameters& ids = model_.layer(layer);
  const Shape stream = {rows_, c_.hidden};
  TARE_ASSIGN_OR_RETURN(Tensor dnormed, Buffer("dnormed", c_.grad_dtype, stream));
  TARE_RETURN_IF_ERROR(c_.layers[layer].moe ? Experts(layer, saved, *g, &dnormed)
                                            : Mlp(layer, saved, *g, &dnormed));
  TARE_RETURN_IF_ERROR(Norm(ids.post_norm, saved.h_mid, saved.rstd_mid, dnormed, g, g));

  TARE_ASSIGN_OR_RETURN(Tensor dattn, Buffer("dattn", c_.dtype, {rows_, c_.q_width()}));
  TARE_RETURN_IF_ERROR(
      Linear(OParams(c_), ids.o, ids.o_bias, saved.attn, g->data(), dattn.mutable_data()));
  TARE_RETURN_IF_ERROR(Attention(layer, saved, dattn, &dnormed));
  TARE_RETURN_IF_ERROR(Norm(ids.input_norm, saved.h_in, saved.rstd_in, dnormed, g, g));
  if (report_.on()) {
    const int l = static_cast<int>(layer);
    const std::string above = report_.Name(l + 1, "grad");
    report_.Emit(l, "grad", "layer", *g,
                 {layer + 1 < static_cast<int64_t>(c_.layers.size()) ? above : "norm.grad"},
                 TapRole::kValue, true);
  }
  return Ok();
}

Status BackwardPass::Attention(int64_t layer, const Tape::Layer& saved, const Tensor& dattn,
                               Tensor* dnormed) {
  const LayerParameters& ids = model_.layer(layer);
  const int64_t width = c_.qkv_width(), item = SizeOf(c_.dtype);
  TARE_ASSIGN_OR_RETURN(Tensor dqkv, Buffer("dqkv", c_.dtype, {rows_, width}));
  // Rows of no run are not written, and the weight's gradient reads them.
  if (prepared_.padded) TARE_RETURN_IF_ERROR(SetZero(&dqkv));
  const Tensor& qk = c_.qk_norm ? saved.qk : saved.qkv;
  const int64_t v_column = c_.q_width() + c_.kv_width();
  const ops::attention::Params params = AttentionParams(c_, c_.layers[layer]);
  ops::attention::BackwardArgs args;
  args.tokens = rows_;
  args.q = qk.data();
  args.k = static_cast<const char*>(qk.data()) + c_.q_width() * item;
  args.q_stride = args.k_stride = qk.dim(1);
  args.v = static_cast<const char*>(saved.qkv.data()) + v_column * item;
  args.v_stride = width;
  args.kv_rows = rows_;
  if (params.sink) {
    args.sink = static_cast<const float*>(model_.sink_f32(layer).data());
    args.dsink = Slot(ids.sink);
  }
  args.out = saved.attn.data();
  args.lse2 = static_cast<const float*>(saved.lse2.data());
  args.dout = dattn.data();
  args.runs = prepared_.runs;
  char* d = static_cast<char*>(dqkv.mutable_data());
  args.dq = d;
  args.dk = d + c_.q_width() * item;
  args.dv = d + v_column * item;
  args.dq_stride = args.dk_stride = args.dv_stride = width;
  TARE_ASSIGN_OR_RETURN(
      const ops::Ctx with,
      WithWorkspace(ctx_, scratch_,
                    ops::attention::BackwardWorkspaceBytes(
                        ctx_, params, rows_, static_cast<int64_t>(prepared_.runs.size()),
                        prepared_.max_keys)));
  TARE_RETURN_IF_ERROR(ops::attention::Backward(with, params, args));

  ops::rope::Args rope;
  rope.rows = rows_;
  rope.heads = c_.q_heads + c_.kv_heads;
  rope.positions = static_cast<const int32_t*>(prepared_.positions.data());
  rope.cos = static_cast<const float*>(model_.rope_cos().data());
  rope.sin = static_cast<const float*>(model_.rope_sin().data());
  rope.table_positions = model_.max_positions();
  rope.x = d;
  rope.y = d;
  rope.x_stride = rope.y_stride = width;
  TARE_RETURN_IF_ERROR(ops::rope::Backward(ctx_, c_.rope, rope));

  if (c_.qk_norm) {
    const auto norm = [&](int weight, int64_t column, int64_t heads, const Tensor& rstd) -> Status {
      ops::headnorm::BackwardArgs head;
      head.rows = rows_;
      head.x = static_cast<const char*>(saved.qkv.data()) + column * item;
      head.x_stride = width;
      head.w = Value(weight);
      head.rstd = static_cast<const float*>(rstd.data());
      head.dy = d + column * item;
      head.dx = d + column * item;
      head.dy_stride = head.dx_stride = width;
      head.dw = Slot(weight);
      head.units = units_;
      const ops::headnorm::Params params = HeadNormParams(c_, heads);
      TARE_ASSIGN_OR_RETURN(const ops::Ctx with,
                            WithWorkspace(ctx_, scratch_,
                                          ops::headnorm::BackwardWorkspaceBytes(
                                              ctx_, params, static_cast<int64_t>(units_.size()))));
      return ops::headnorm::Backward(with, params, head);
    };
    TARE_RETURN_IF_ERROR(norm(ids.q_norm, 0, c_.q_heads, saved.rstd_q));
    TARE_RETURN_IF_ERROR(norm(ids.k_norm, c_.q_width(), c_.kv_heads, saved.rstd_k));
  }
  return Linear(QkvParams(c_), ids.qkv, ids.qkv_bias, saved.x_attn, d, dnormed->mutable_data());
}

Status BackwardPass::Mlp(int64_t layer, const Tape::Layer& saved, const Tensor& g,
                         Tensor* dnormed) {
  const LayerParameters& ids = model_.layer(layer);
  const int64_t width = c_.intermediate, item = SizeOf(c_.dtype);
  TARE_ASSIGN_OR_RETURN(Tensor dact, Buffer("dact", c_.dtype, {rows_, width}));
  TARE_RETURN_IF_ERROR(
      Linear(DownParams(c_), ids.down, ids.down_bias, saved.act, g.data(), dact.mutable_data()));
  TARE_ASSIGN_OR_RETURN(Tensor dgate_up, Buffer("dgate_up", c_.dtype, {rows_, 2 * width}));
  ops::gate::BackwardArgs gate;
  gate.rows = rows_;
  gate.gate = saved.gate_up.data();
  gate.up = static_cast<const char*>(saved.gate_up.data()) + width * item;
  gate.stride = 2 * width;
  gate.dy = dact.data();
  gate.dgate = dgate_up.mutable_data();
  gate.dup = static_cast<char*>(dgate_up.mutable_data()) + width * item;
  gate.dstride = 2 * width;
  TARE_RETURN_IF_ERROR(ops::gate::Backward(ctx_, GateParams(c_, width), gate));
  return Linear(GateUpParams(c_), ids.gate_up, ids.gate_up_bias, saved.x_mlp, dgate_up.data(),
                dnormed->mutable_data());
}

Status BackwardPass::Experts(int64_t layer, const Tape::Layer& saved, const Tensor& g,
                             Tensor* dnormed) {
  const LayerParameters& ids = model_.layer(layer);
  const int64_t width = c_.expert_intermediate, item = SizeOf(c_.dtype);
  const ops::dispatch::Plan& plan = saved.plan;
  const int64_t routed = plan.offsets.back();

  TARE_ASSIGN_OR_RETURN(Tensor dy, Buffer("dexpert", c_.grad_dtype, {routed, c_.hidden}));
  TARE_ASSIGN_OR_RETURN(Tensor dweights, Buffer("drouter_w", DType::kF32, {rows_, c_.top_k}));
  ops::combine::BackwardArgs combine;
  combine.rows = rows_;
  combine.expert_rows = routed;
  combine.y = saved.expert_out.data();
  combine.slot_row = static_cast<const int32_t*>(saved.row_of.data());
  combine.weights = static_cast<const float*>(saved.router_weights.data());
  combine.dout = g.data();
  combine.dy = dy.mutable_data();
  combine.dweights = static_cast<float*>(dweights.mutable_data());
  TARE_RETURN_IF_ERROR(ops::combine::Backward(ctx_, CombineParams(c_), combine));

  TARE_ASSIGN_OR_RETURN(const Tensor offsets,
                        ToDevice(plan.offsets.data(), DType::kI64, {c_.experts + 1}, ctx_.device));
  const auto expert_linear = [&](const grouped::Params& params, int weight, const Tensor& x,
                                 bool by_row, const Tensor& d, Tensor* dx) -> Status {
    TARE_ASSIGN_OR_RETURN(
        const ops::Ctx with,
        WithWorkspace(ctx_, scratch_,
                      grouped::BackwardWorkspaceBytes(ctx_, params, routed,
                                                      static_cast<int64_t>(units_.size()))));
    grouped::BackwardArgs args;
    args.rows = routed;
    args.offsets = plan.offsets;
    if (ctx_.device != Device::kCpu) {
      args.device_offsets = static_cast<const int64_t*>(offsets.data());
      args.host_token_of = plan.row_token.data();
    }
    args.token_of = static_cast<const int32_t*>(saved.token_of.data());
    args.x_rows = x.dim(0);
    args.dy = d.data();
    args.x = x.data();
    args.x_by_row = by_row;
    args.w = Value(weight);
    args.units = units_;
    args.dx = dx->mutable_data();
    args.dw = Slot(weight);
    return grouped::Backward(with, params, args);
  };
  TARE_ASSIGN_OR_RETURN(Tensor dact, Buffer("dact", c_.dtype, {routed, width}));
  TARE_RETURN_IF_ERROR(expert_linear(ExpertDownParams(c_), ids.down, saved.act, true, dy, &dact));
  TARE_ASSIGN_OR_RETURN(Tensor dgate_up, Buffer("dgate_up", c_.dtype, {routed, 2 * width}));
  ops::gate::BackwardArgs gate;
  gate.rows = routed;
  gate.gate = saved.gate_up.data();
  gate.up = static_cast<const char*>(saved.gate_up.data()) + width * item;
  gate.stride = 2 * width;
  gate.dy = dact.data();
  gate.dgate = dgate_up.mutable_data();
  gate.dup = static_cast<char*>(dgate_up.mutable_data()) + width * item;
  gate.dstride = 2 * width;
  TARE_RETURN_IF_ERROR(ops::gate::Backward(ctx_, GateParams(c_, width), gate));
  const grouped::Params gate_up = ExpertGateUpParams(c_);
  TARE_ASSIGN_OR_RETURN(Tensor dx_rows, Buffer("dexpert", c_.grad_dtype, {routed, c_.hidden}));
  TARE_RETURN_IF_ERROR(expert_linear(gate_up, ids.gate_up, saved.x_mlp, false, dgate_up, &dx_rows));

  // Two gradients meet at the norm's output: the experts' (slots ascending), then the router's.
  TARE_ASSIGN_OR_RETURN(Tensor both, Buffer("dmoe", c_.grad_dtype, {2 * rows_, c_.hidden}));
  ops::dispatch::BackwardArgs gather;
  gather.rows = rows_;
  gather.out_rows = routed;
  gather.slot_row = static_cast<const int32_t*>(saved.row_of.data());
  gather.dout = dx_rows.data();
  gather.dx = both.mutable_data();
  TARE_RETURN_IF_ERROR(ops::dispatch::Backward(ctx_, DispatchParams(c_), gather));

  TARE_ASSIGN_OR_RETURN(Tensor dlogits, Buffer("drouter", DType::kF32, {rows_, c_.experts}));
  ops::router::BackwardArgs route;
  route.rows = rows_;
  route.ids = static_cast<const int32_t*>(saved.router_ids.data());
  route.probs = static_cast<const float*>(saved.router_probs.data());
  route.dweights = static_cast<const float*>(dweights.data());
  route.dlogits = dlogits.mutable_data();
  route.logits = saved.router_logits.data();  // null but under a planted fault
  TARE_RETURN_IF_ERROR(ops::router::Backward(ctx_, RouterParams(c_), route));
  char* second =
      static_cast<char*>(both.mutable_data()) + rows_ * c_.hidden * SizeOf(c_.grad_dtype);
  TARE_RETURN_IF_ERROR(
      Linear(RouterLinearParams(c_), ids.router, -1, saved.x_mlp, dlogits.data(), second));

  // Their sum by the combine operator with weights of 1: acc = fma(1, d, acc), experts first.
  std::vector<int32_t> slots(2 * rows_);
  for (int64_t t = 0; t < rows_; ++t) {
    slots[2 * t] = static_cast<int32_t>(t);
    slots[2 * t + 1] = static_cast<int32_t>(rows_ + t);
  }
  const std::vector<float> ones(2 * rows_, 1.0f);
  TARE_ASSIGN_OR_RETURN(const Tensor slot_row,
                        ToDevice(slots.data(), DType::kI32, {rows_, 2}, ctx_.device));
  TARE_ASSIGN_OR_RETURN(const Tensor weights,
                        ToDevice(ones.data(), DType::kF32, {rows_, 2}, ctx_.device));
  const ops::combine::Params sum{
      .hidden = c_.hidden, .top_k = 2, .dtype = c_.grad_dtype, .grad_dtype = c_.grad_dtype};
  ops::combine::Args add;
  add.rows = rows_;
  add.expert_rows = 2 * rows_;
  add.y = both.data();
  add.slot_row = static_cast<const int32_t*>(slot_row.data());
  add.weights = static_cast<const float*>(weights.data());
  add.out = dnormed->mutable_data();
  return ops::combine::Forward(ctx_, sum, add);
}

Status BackwardPass::Embedding(const Tensor& g) {
  ops::embedding::BackwardArgs args;
  args.rows = rows_;
  args.ids = static_cast<const int32_t*>(prepared_.ids.data());
  args.dout = g.data();
  args.dtable = Slot(model_.embedding(), c_.tied ? 1 : 0);
  args.units = units_;
  return ops::embedding::Backward(ctx_, EmbeddingParams(c_), args);
}

Status CheckRecomputed(const ops::Ctx&, const ModelConfig& c, const Tensor& saved,
                       const Tensor& again) {
  TARE_ASSIGN_OR_RETURN(const Tensor a, saved.To(Device::kCpu));
  TARE_ASSIGN_OR_RETURN(const Tensor b, again.To(Device::kCpu));
  return ops::router::CheckDecision(a.dim(0), c.top_k, a.as<int32_t>(), b.as<int32_t>());
}

}  // namespace

Status Backward(const ops::Ctx& ctx, const Model& model, const Batch& batch,
                const LossGradient& loss, Tape* tape, Scratch* scratch, Gradients* gradients,
                int32_t batch_segment, Tap* tap) {
  const ModelConfig& c = model.config();
  if (tape == nullptr || !tape->filled)
    return Error(Code::kPrecondition,
                 "Backward needs a tape that Forward has filled; each serves once");
  if (tape->generation != model.generation()) {
    return Error(Code::kPrecondition,
                 "the weights were opened for writing between Forward and Backward: the gradient "
                 "would be of no weights that any forward saw; run Forward again");
  }
  if (batch_segment < 0 || batch_segment >= gradients->batch_segments()) {
    return InvalidArgument("batch segment {} of {}", batch_segment, gradients->batch_segments());
  }
  TARE_ASSIGN_OR_RETURN(const Prepared prepared, Prepare(model, batch));
  if (prepared.layout.rows != tape->layout.rows ||
      prepared.layout.row_of_run != tape->layout.row_of_run) {
    return InvalidArgument("the tape is of another batch: {} rows there, {} here",
                           tape->layout.rows, prepared.layout.rows);
  }
  const size_t count = tape->target_rows.size();
  if (loss.dlogprob.size() != count || (!loss.dentropy.empty() && loss.dentropy.size() != count)) {
    return InvalidArgument("{} logprobs, but {} gradients for them and {} for the entropy", count,
                           loss.dlogprob.size(), loss.dentropy.size());
  }
  if (!loss.dentropy.empty() && tape->entropy.data() == nullptr) {
    return InvalidArgument("a gradient for the entropy needs Batch::entropy in the forward");
  }
  std::vector<ops::TokenSequence> sequences;
  sequences.reserve(batch.runs.size());
  for (size_t r = 0; r < batch.runs.size(); ++r) {
    sequences.push_back(
        {prepared.layout.row_of_run[r], static_cast<int64_t>(batch.runs[r].tokens.size())});
  }
  TARE_ASSIGN_OR_RETURN(std::vector<ops::TokenUnit> units,
                        ops::CutUnits(sequences, prepared.layout.rows));
  tape->filled = false;
  if (count == 0) return Ok();  // nothing to learn from

  Batch reported = batch;
  reported.phase = TapPhase::kBackward;
  Reporter report(tap, model, reported, prepared, ctx.side);
  Reporter silent(nullptr, model, batch, prepared, ctx.side);
  BackwardPass pass(ctx, model, batch, prepared, std::move(units), tape, scratch, gradients,
                    batch_segment, &report);
  Tensor dx_final;
  TARE_RETURN_IF_ERROR(pass.Head(loss, &dx_final).Annotate("head"));
  tape->logits = tape->options.recompute ? Tensor() : tape->logits;
  TARE_ASSIGN_OR_RETURN(Tensor g,
                        pass.Buffer("dstream", c.grad_dtype, {prepared.layout.rows, c.hidden}));
  TARE_RETURN_IF_ERROR(
      pass.Norm(model.final_norm(), tape->h_final, tape->rstd_final, dx_final, nullptr, &g));
  report.Emit(-1, "norm.grad", "rmsnorm", g, {});

  LayerPass forward(ctx, model, batch, prepared, scratch, &silent);
  forward.set_backward_only();
  SpareLayer spare_owner(scratch);
  Tape::Layer& spare = spare_owner.layer;
  for (int64_t l = static_cast<int64_t>(c.layers.size()) - 1; l >= 0; --l) {
    Tape::Layer& kept = tape->layers[l];
    const Tape::Layer* saved = &kept;
    if (tape->options.recompute) {
      Tensor x = kept.h_in, h;
      if (Status s = forward.Run(l, &x, &h, &spare); !s.ok())
        return s.Annotate(fmt::format("layer {}, recomputed", l));
      if (c.layers[l].moe) {
        if (Status s = CheckRecomputed(ctx, c, kept.router_ids, spare.router_ids); !s.ok()) {
          return s.Annotate(fmt::format("layer {}", l));
        }
      }
      saved = &spare;
    }
    if (Status s = pass.Layer(l, *saved, &g); !s.ok())
      return s.Annotate(fmt::format("layer {}, backward", l));
    if (tape->options.recompute) {
      spare.h_in = Tensor();  // shared with the tape's own
      scratch->Recycle(&kept.h_in);
    }
  }
  TARE_RETURN_IF_ERROR(pass.Embedding(g));
  return ops::TakeRefusals(ctx);
}

}  // namespace tare::models
