// A decoder layer as a sequence of operators, for every caller of Forward and for recompute.

#include "models/op_params.h"
#include "models/pass.h"
#include "tensor/convert.h"

namespace tare::models {

namespace lin = ops::linear;
namespace grouped = ops::grouped_linear;

Result<ops::Ctx> WithWorkspace(const ops::Ctx& ctx, Scratch* scratch, size_t bytes) {
  if (bytes == 0 || ctx.workspace_bytes >= bytes) return ctx;
  ops::Ctx out = ctx;
  TARE_ASSIGN_OR_RETURN(Tensor workspace, scratch->Get("workspace", DType::kU8,
                                                       {static_cast<int64_t>(bytes)}, ctx.device));
  out.workspace = workspace.mutable_data();
  out.workspace_bytes = bytes;
  return out;
}

Status RunLinear(const ops::Ctx& ctx, const Model& model, const lin::Params& params, int weight,
                 int bias, const void* x, int64_t rows, void* y, Scratch* scratch) {
  TARE_ASSIGN_OR_RETURN(const ops::Ctx with,
                        WithWorkspace(ctx, scratch, lin::WorkspaceBytes(ctx, params, rows)));
  lin::Args args;
  args.m = rows;
  args.x = x;
  args.w = model.parameters()[weight].value.data();
  args.packed = model.packed(weight);
  if (params.bias) args.bias = model.parameters()[bias].value.data();
  args.y = y;
  return lin::Forward(with, params, args);
}

Result<Tensor> LayerPass::Buffer(const char* slot, Tensor* keep, DType dtype, Shape shape) {
  if (keep == nullptr) return scratch_->Get(slot, dtype, std::move(shape), ctx_.device);
  // A tape used again for a batch of the same rows keeps its memory.
  if (keep->dtype() != dtype || keep->shape() != shape || keep->device() != ctx_.device ||
      keep->data() == nullptr) {
    TARE_ASSIGN_OR_RETURN(*keep, scratch_->Take(dtype, std::move(shape), ctx_.device));
  }
  return *keep;
}

Status LayerPass::Linear(const lin::Params& params, int weight, int bias, const Tensor& x,
                         Tensor* y) {
  return RunLinear(ctx_, model_, params, weight, bias, x.data(), x.dim(0), y->mutable_data(),
                   scratch_);
}

Status LayerPass::Run(int64_t layer, Tensor* x, Tensor* h, Tape::Layer* saved) {
  const LayerParameters& ids = model_.layer(layer);
  const int64_t rows = prepared_.layout.rows;
  const Shape stream = {rows, config_.hidden};
  const int l = static_cast<int>(layer);
  Reporter& report = *reporter_;
  const auto norm = [&](const char* slot, int weight, Tensor* in, Tensor* residual,
                        Tensor* keep_sum, Tensor* keep_rstd, Tensor* keep_out,
                        Tensor* out) -> Status {
    const bool add = residual->data() != nullptr;
    ops::rmsnorm::Args args;
    args.rows = rows;
    args.x = in->data();
    args.w = model_.parameters()[weight].value.data();
    TARE_ASSIGN_OR_RETURN(*out, Buffer(slot, keep_out, config_.dtype, stream));
    args.y = out->mutable_data();
    if (saved != nullptr) {
      TARE_ASSIGN_OR_RETURN(Tensor rstd, Buffer("rstd", keep_rstd, DType::kF32, {rows}));
      args.rstd = static_cast<float*>(rstd.mutable_data());
    }
    Tensor sum = *in;
    if (add) {
      // In place in the residual's buffer, unless a tape keeps each sum.
      sum = *residual;
      if (keep_sum != nullptr) {
        TARE_ASSIGN_OR_RETURN(sum, Buffer("", keep_sum, config_.residual_dtype, stream));
      }
      args.residual = residual->data();
      args.residual_out = sum.mutable_data();
    } else if (keep_sum != nullptr) {
      *keep_sum = sum;
    }
    TARE_RETURN_IF_ERROR(ops::rmsnorm::Forward(ctx_, NormParams(config_, add), args));
    *residual = sum;
    return Ok();
  };

  const std::string before = layer == 0 ? "embed.out" : report.Name(l - 1, "out");
  Tensor normed;
  TARE_RETURN_IF_ERROR(norm("normed", ids.input_norm, x, h, saved ? &saved->h_in : nullptr,
                            saved ? &saved->rstd_in : nullptr, saved ? &saved->x_attn : nullptr,
                            &normed));
  if (report.on()) {
    if (layer > 0) {
      report.Emit(l - 1, "out", "rmsnorm", *h,
                  {report.Name(l - 1, "mid"), report.Name(l - 1, "mlp.down_proj.out")});
    }
    report.Emit(l, "input_layernorm.out", "rmsnorm", normed, {before});
  }

  Tensor attention_out;
  TARE_RETURN_IF_ERROR(Attention(layer, normed, &attention_out, saved));
  TARE_ASSIGN_OR_RETURN(Tensor o, Buffer("o", nullptr, config_.dtype, stream));
  TARE_RETURN_IF_ERROR(Linear(OParams(config_), ids.o, ids.o_bias, attention_out, &o));
  if (report.on())
    report.Emit(l, "self_attn.o_proj.out", "linear", o, {report.Name(l, "self_attn.attn.out")});

  TARE_RETURN_IF_ERROR(norm("normed", ids.post_norm, &o, h, saved ? &saved->h_mid : nullptr,
                            saved ? &saved->rstd_mid : nullptr, saved ? &saved->x_mlp : nullptr,
                            &normed));
  if (report.on()) {
    report.Emit(l, "mid", "rmsnorm", *h, {before, report.Name(l, "self_attn.o_proj.out")});
    report.Emit(l, "post_attention_layernorm.out", "rmsnorm", normed, {report.Name(l, "mid")});
  }
  TARE_ASSIGN_OR_RETURN(*x, Buffer("mlp_out", nullptr, config_.dtype, stream));
  return config_.layers[layer].moe ? Experts(layer, normed, x, saved)
                                   : Mlp(layer, normed, x, saved);
}

Status LayerPass::Attention(int64_t layer, const Tensor& x, Tensor* out, Tape::Layer* saved) {
  const ModelConfig& c = config_;
  const LayerParameters& ids = model_.layer(layer);
  const int64_t rows = prepared_.layout.rows;
  const int64_t width = c.qkv_width(), item = SizeOf(c.dtype);
  const int l = static_cast<int>(layer);
  Reporter& report = *reporter_;
  const std::string in = report.Name(l, "input_layernorm.out");

  TARE_ASSIGN_OR_RETURN(Tensor qkv,
                        Buffer("qkv", saved ? &saved->qkv : nullptr, c.dtype, {rows, width}));
  TARE_RETURN_IF_ERROR(Linear(QkvParams(c), ids.qkv, ids.qkv_bias, x, &qkv));
  if (report.on()) {
    report.EmitColumns(l, "self_attn.q_proj.out", "linear", qkv, 0, c.q_width(), {in});
    report.EmitColumns(l, "self_attn.k_proj.out", "linear", qkv, c.q_width(), c.kv_width(), {in});
    report.EmitColumns(l, "self_attn.v_proj.out", "linear", qkv, c.q_width() + c.kv_width(),
                       c.kv_width(), {in});
  }
  // Where q and k are after norms and rope: in place, unless a tape keeps what the head norms read.
  Tensor qk = qkv;
  std::string before_rope_q = "self_attn.q_proj.out", before_rope_k = "self_attn.k_proj.out";
  if (c.qk_norm) {
    if (saved != nullptr) {
      TARE_ASSIGN_OR_RETURN(qk,
                            Buffer("", &saved->qk, c.dtype, {rows, c.q_width() + c.kv_width()}));
    }
    const auto norm = [&](int weight, int64_t column, int64_t heads, Tensor* rstd) -> Status {
      ops::headnorm::Args args;
      args.rows = rows;
      args.x = static_cast<const char*>(qkv.data()) + column * item;
      args.x_stride = width;
      args.w = model_.parameters()[weight].value.data();
      args.y = static_cast<char*>(qk.mutable_data()) + column * item;
      args.y_stride = qk.dim(1);
      if (rstd != nullptr) {
        TARE_ASSIGN_OR_RETURN(Tensor kept, Buffer("", rstd, DType::kF32, {rows, heads}));
        args.rstd = static_cast<float*>(kept.mutable_data());
      }
      return ops::headnorm::Forward(ctx_, HeadNormParams(c, heads), args);
    };
    TARE_RETURN_IF_ERROR(norm(ids.q_norm, 0, c.q_heads, saved ? &saved->rstd_q : nullptr));
    TARE_RETURN_IF_ERROR(
        norm(ids.k_norm, c.q_width(), c.kv_heads, saved ? &saved->rstd_k : nullptr));
    if (report.on()) {
      report.EmitColumns(l, "self_attn.q_norm.out", "headnorm", qk, 0, c.q_width(),
                         {report.Name(l, before_rope_q)});
      report.EmitColumns(l, "self_attn.k_norm.out", "headnorm", qk, c.q_width(), c.kv_width(),
                         {report.Name(l, before_rope_k)});
    }
    before_rope_q = "self_attn.q_norm.out";
    before_rope_k = "self_attn.k_norm.out";
  }

  // Query and key heads lie side by side: one call turns both.
  ops::rope::Args rope;
  rope.rows = rows;
  rope.heads = c.q_heads + c.kv_heads;
  rope.positions = static_cast<const int32_t*>(prepared_.positions.data());
  rope.cos = static_cast<const float*>(model_.rope_cos().data());
  rope.sin = static_cast<const float*>(model_.rope_sin().data());
  rope.table_positions = model_.max_positions();
  rope.x = qk.data();
  rope.y = qk.mutable_data();
  rope.x_stride = rope.y_stride = qk.dim(1);
  TARE_RETURN_IF_ERROR(ops::rope::Forward(ctx_, c.rope, rope));
  if (report.on()) {
    report.EmitColumns(l, "self_attn.q.rope", "rope", qk, 0, c.q_width(),
                       {report.Name(l, before_rope_q)});
    report.EmitColumns(l, "self_attn.k.rope", "rope", qk, c.q_width(), c.kv_width(),
                       {report.Name(l, before_rope_k)});
  }

  const char* q = static_cast<const char*>(qk.data());
  const char* k = q + c.q_width() * item;
  const char* v = static_cast<const char*>(qkv.data()) + (c.q_width() + c.kv_width()) * item;
  ops::attention::Args args;
  args.tokens = rows;
  args.q = q;
  args.q_stride = qk.dim(1);
  args.runs = prepared_.runs;
  if (batch_.cache != nullptr) {
    KvCache& cache = *batch_.cache;
    ops::kv_cache::Args write;
    write.k = k;
    write.v = v;
    write.k_stride = qk.dim(1);
    write.v_stride = width;
    write.runs = prepared_.runs;
    write.block_table = static_cast<const int32_t*>(prepared_.block_table.data());
    write.tokens = rows;
    write.table_rows = batch_.block_rows;
    write.max_pages = batch_.max_pages;
    write.num_pages = cache.num_pages();
    write.page_size = cache.page_size();
    write.k_pages = cache.k(layer).mutable_data();
    write.v_pages = cache.v(layer).mutable_data();
    TARE_RETURN_IF_ERROR(ops::kv_cache::Forward(ctx_, KvCacheParams(c), write));
    args.kv.k = cache.k(layer).data();
    args.kv.v = cache.v(layer).data();
    args.kv.block_table = write.block_table;
    args.kv.table_rows = write.table_rows;
    args.kv.max_pages = write.max_pages;
    args.kv.num_pages = write.num_pages;
    args.kv.page_size = write.page_size;
  } else {
    args.kv.k = k;
    args.kv.v = v;
    args.kv.k_stride = qk.dim(1);
    args.kv.v_stride = width;
    args.kv.rows = rows;
  }
  const ops::attention::Params params = AttentionParams(c, c.layers[layer]);
  if (params.sink) args.sink = static_cast<const float*>(model_.sink_f32(layer).data());
  TARE_ASSIGN_OR_RETURN(
      *out, Buffer("attn", saved ? &saved->attn : nullptr, c.dtype, {rows, c.q_width()}));
  // Rows of no run are not written, and the next operator reads them. On a device the zeros are
  // other memory, so the tape and the operator are told after it.
  if (prepared_.padded) TARE_RETURN_IF_ERROR(SetZero(out));
  if (saved != nullptr) saved->attn = *out;
  args.out = out->mutable_data();
  if (saved != nullptr) {
    TARE_ASSIGN_OR_RETURN(Tensor lse2, Buffer("", &saved->lse2, DType::kF32, {rows, c.q_heads}));
    args.lse2 = static_cast<float*>(lse2.mutable_data());
  }
  TARE_ASSIGN_OR_RETURN(
      const ops::Ctx with,
      WithWorkspace(ctx_, scratch_,
                    ops::attention::WorkspaceBytes(ctx_, params, rows,
                                                   static_cast<int64_t>(prepared_.runs.size()),
                                                   prepared_.max_keys)));
  TARE_RETURN_IF_ERROR(ops::attention::Forward(with, params, args));
  if (report.on()) {
    report.Emit(l, "self_attn.attn.out", "attention", *out,
                {report.Name(l, "self_attn.q.rope"), report.Name(l, "self_attn.k.rope"),
                 report.Name(l, "self_attn.v_proj.out")},
                TapRole::kValue, true);
  }
  return Ok();
}

Status LayerPass::Mlp(int64_t layer, const Tensor& x, Tensor* out, Tape::Layer* saved) {
  const ModelConfig& c = config_;
  const LayerParameters& ids = model_.layer(layer);
  const int64_t rows = prepared_.layout.rows, width = c.intermediate;
  const int l = static_cast<int>(layer);
  Reporter& report = *reporter_;
  TARE_ASSIGN_OR_RETURN(Tensor gate_up, Buffer("gate_up", saved ? &saved->gate_up : nullptr,
                                               c.dtype, {rows, 2 * width}));
  TARE_RETURN_IF_ERROR(Linear(GateUpParams(c), ids.gate_up, ids.gate_up_bias, x, &gate_up));
  TARE_ASSIGN_OR_RETURN(Tensor act,
                        Buffer("act", saved ? &saved->act : nullptr, c.dtype, {rows, width}));
  ops::gate::Args gate;
  gate.rows = rows;
  gate.gate = gate_up.data();
  gate.up = static_cast<const char*>(gate_up.data()) + width * SizeOf(c.dtype);
  gate.stride = 2 * width;
  gate.y = act.mutable_data();
  TARE_RETURN_IF_ERROR(ops::gate::Forward(ctx_, GateParams(c, width), gate));
  if (backward_only_) return Ok();
  TARE_RETURN_IF_ERROR(Linear(DownParams(c), ids.down, ids.down_bias, act, out));
  if (report.on()) {
    const std::string in = report.Name(l, "post_attention_layernorm.out");
    report.EmitColumns(l, "mlp.gate_proj.out", "linear", gate_up, 0, width, {in});
    report.EmitColumns(l, "mlp.up_proj.out", "linear", gate_up, width, width, {in});
    report.Emit(l, "mlp.act.out", "gate", act,
                {report.Name(l, "mlp.gate_proj.out"), report.Name(l, "mlp.up_proj.out")});
    report.Emit(l, "mlp.down_proj.out", "linear", *out, {report.Name(l, "mlp.act.out")});
  }
  return Ok();
}

Status LayerPass::Experts(int64_t layer, const Tensor& x, Tensor* out, Tape::Layer* saved) {
  const ModelConfig& c = config_;
  const LayerParameters& ids = model_.layer(layer);
  const int64_t rows = prepared_.layout.rows, width = c.expert_intermediate;
  const int l = static_cast<int>(layer);
  Reporter& report = *reporter_;

  // Backward reads the saved decision; the fault that decides again needs what it was made from.
  const bool decide_again = fault::Active(ops::router::kRecompute, ctx_.side);
  TARE_ASSIGN_OR_RETURN(
      Tensor logits,
      Buffer("router_logits", saved && decide_again ? &saved->router_logits : nullptr, DType::kF32,
             {rows, c.experts}));
  TARE_RETURN_IF_ERROR(Linear(RouterLinearParams(c), ids.router, -1, x, &logits));
  TARE_ASSIGN_OR_RETURN(Tensor chosen, Buffer("router_ids", saved ? &saved->router_ids : nullptr,
                                              DType::kI32, {rows, c.top_k}));
  TARE_ASSIGN_OR_RETURN(Tensor weights,
                        Buffer("router_weights", saved ? &saved->router_weights : nullptr,
                               DType::kF32, {rows, c.top_k}));
  ops::router::Args route;
  route.rows = rows;
  route.logits = logits.data();
  if (prepared_.padded) route.valid = static_cast<const uint8_t*>(prepared_.valid.data());
  route.ids = static_cast<int32_t*>(chosen.mutable_data());
  route.weights = static_cast<float*>(weights.mutable_data());
  if (saved != nullptr) {
    TARE_ASSIGN_OR_RETURN(Tensor probs,
                          Buffer("", &saved->router_probs, DType::kF32, {rows, c.experts}));
    route.probs = static_cast<float*>(probs.mutable_data());
  }
  if (Status s = ops::router::Forward(ctx_, RouterParams(c), route); !s.ok()) {
    return s.Annotate(fmt::format("layer {}", layer));
  }
  if (report.on()) {
    report.Emit(l, "mlp.router.logits", "linear", logits,
                {report.Name(l, "post_attention_layernorm.out")});
    report.Emit(l, "mlp.router.ids", "router", chosen, {report.Name(l, "mlp.router.logits")},
                TapRole::kDiscrete);
    report.Emit(l, "mlp.router.weights", "router", weights, {report.Name(l, "mlp.router.logits")});
  }

  TARE_ASSIGN_OR_RETURN(const Tensor host_ids, chosen.To(Device::kCpu));
  TARE_ASSIGN_OR_RETURN(ops::dispatch::Plan plan,
                        ops::dispatch::BuildPlan(rows, c.top_k, c.experts, host_ids.as<int32_t>()));
  const int64_t routed = plan.offsets.back();
  TARE_ASSIGN_OR_RETURN(Tensor token_of,
                        ToDevice(plan.row_token.data(), DType::kI32, {routed}, ctx_.device));
  TARE_ASSIGN_OR_RETURN(Tensor row_of,
                        ToDevice(plan.slot_row.data(), DType::kI32, {rows, c.top_k}, ctx_.device));
  TARE_ASSIGN_OR_RETURN(const Tensor offsets,
                        ToDevice(plan.offsets.data(), DType::kI64, {c.experts + 1}, ctx_.device));

  const auto expert_linear = [&](const grouped::Params& params, int weight, const Tensor& in,
                                 bool by_token, Tensor* y) -> Status {
    TARE_ASSIGN_OR_RETURN(
        const ops::Ctx with,
        WithWorkspace(ctx_, scratch_, grouped::WorkspaceBytes(ctx_, params, routed)));
    grouped::Args args;
    args.rows = routed;
    args.offsets = plan.offsets;
    if (ctx_.device != Device::kCpu)
      args.device_offsets = static_cast<const int64_t*>(offsets.data());
    if (by_token) args.token_of = static_cast<const int32_t*>(token_of.data());
    args.x_rows = in.dim(0);
    args.x = in.data();
    args.w = model_.parameters()[weight].value.data();
    args.packed = model_.packed_experts(weight);
    args.y = y->mutable_data();
    return grouped::Forward(with, params, args);
  };
  TARE_ASSIGN_OR_RETURN(Tensor gate_up, Buffer("gate_up", saved ? &saved->gate_up : nullptr,
                                               c.dtype, {routed, 2 * width}));
  TARE_RETURN_IF_ERROR(expert_linear(ExpertGateUpParams(c), ids.gate_up, x, true, &gate_up));
  TARE_ASSIGN_OR_RETURN(Tensor act,
                        Buffer("act", saved ? &saved->act : nullptr, c.dtype, {routed, width}));
  ops::gate::Args gate;
  gate.rows = routed;
  gate.gate = gate_up.data();
  gate.up = static_cast<const char*>(gate_up.data()) + width * SizeOf(c.dtype);
  gate.stride = 2 * width;
  gate.y = act.mutable_data();
  TARE_RETURN_IF_ERROR(ops::gate::Forward(ctx_, GateParams(c, width), gate));
  TARE_ASSIGN_OR_RETURN(Tensor y, Buffer("expert_out", saved ? &saved->expert_out : nullptr,
                                         c.dtype, {routed, c.hidden}));
  TARE_RETURN_IF_ERROR(expert_linear(ExpertDownParams(c), ids.down, act, false, &y));
  ops::combine::Args combine;
  combine.rows = rows;
  combine.expert_rows = routed;
  combine.y = y.data();
  combine.slot_row = static_cast<const int32_t*>(row_of.data());
  combine.weights = static_cast<const float*>(weights.data());
  combine.out = out->mutable_data();
  TARE_RETURN_IF_ERROR(ops::combine::Forward(ctx_, CombineParams(c), combine));
  if (report.on()) {
    // Routed rows in (token, slot) order: [T, k * H], so that a row belongs to its token.
    report.EmitSlots(
        l, "mlp.experts.out", "grouped_linear", y, plan,
        {report.Name(l, "post_attention_layernorm.out"), report.Name(l, "mlp.router.ids")});
    report.Emit(l, "mlp.down_proj.out", "combine", *out,
                {report.Name(l, "mlp.experts.out"), report.Name(l, "mlp.router.weights")});
  }
  if (saved != nullptr) {
    saved->plan = std::move(plan);
    saved->token_of = std::move(token_of);
    saved->row_of = std::move(row_of);
  }
  return Ok();
}

}  // namespace tare::models
