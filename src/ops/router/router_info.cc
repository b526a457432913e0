// The contract and the registry entry of router.

#include "ops/info.h"
#include "ops/router/router.h"

namespace tare::ops::router {
namespace {

Params ParamsOf(const OpKey& key) {
  Params p;
  p.experts = key.dim("experts");
  p.top_k = std::min<int64_t>(key.dim("top_k"), p.experts);
  p.logits_dtype = p.grad_dtype = key.dtype;
  p.renormalise = !key.variant.starts_with("raw");
  if (key.variant.ends_with("scaled")) p.scale = 2.5f;
  return p;
}

}  // namespace

Contract ContractOf(const Params& p) {
  Contract c;
  c.op = "router";
  c.variant =
      fmt::format("{}{}", p.renormalise ? "renormalised" : "raw", p.scale == 1.0f ? "" : "-scaled");
  c.formula = {
      "ids = the k largest logits: value descending, index ascending, distinct; +0 and -0 tie",
      "m = max; e = exp2((z - m) * log2e); s = lanes(32) of e; p = e / s",
      p.renormalise ? "w = p[id] / (sum over the slots in order of p[id])" : "w = p[id]"};
  if (p.scale != 1.0f) c.formula.push_back("w = w * scale");
  c.backward = {p.renormalise ? "S = sum of p[id] in slot order; d = chain over slots of fma(dw, "
                                "p[id] / S, .); dp[id] = ((dw - d) / S) * scale"
                              : "dp[id] = dw * scale",
                fmt::format("dz = {}(p * (dp - lanes(32) of fma(dp, p, .))); +0 in a padded row",
                            DTypeName(p.grad_dtype))};
  c.lanes = 32;
  c.constants = {{"experts", std::to_string(p.experts)},
                 {"top_k", std::to_string(p.top_k)},
                 {"scale", HexWord(p.scale)}};
  c.inputs = {{"logits", Name(p.logits_dtype), "[T, E]"}, {"valid", "u8", "[T]"}};
  c.outputs = {{"ids", "i32", "[T, k], -1 in a padded row"},
               {"weights", "f32", "[T, k]"},
               {"probs", "f32", "[T, E]"}};
  c.rounding_points = {"none in forward",
                       fmt::format("dlogits: f32 to {}, once", DTypeName(p.grad_dtype))};
  c.saved_for_backward = {"ids", "probs"};
  c.errors = {"a NaN logit names row and expert",
              "a recomputed decision that differs from the saved one"};
  c.invariant_over = RowInvariance();
  c.forward_tolerance = {-20, -100, "f32: a sum of E positive terms and two divisions"};
  c.gradient_tolerance = p.grad_dtype == DType::kF32
                             ? Tolerance{-18, -24, "f32: a cancelling difference of dp"}
                             : Tolerance{-8, -24, "bf16: one rounding"};
  return c;
}

const OpInfo& Info() {
  static const auto* info = [] {
    auto* op = new OpInfo(RowOpInfo("router"));
    for (DType dtype : op->dtypes) {
      for (const char* variant : {"", "raw", "scaled", "raw-scaled"}) {
        op->keys.push_back({.dtype = dtype,
                            .out_dtype = dtype,
                            .variant = variant,
                            .dims = {{"experts", 40}, {"top_k", 4}}});
      }
    }
    op->select = [](const OpKey& key) { return ContractOf(ParamsOf(key)); };
    op->signature = [](const OpKey& key, int64_t rows) {
      const Params p = ParamsOf(key);
      Signature s;
      s.inputs = {RowOperand("logits", p.logits_dtype, {rows, p.experts}, true)};
      s.inputs[0].scale = 2.0f;
      s.inputs[0].fill = Fill::kRanked;
      s.outputs = {RowOperand("ids", DType::kI32, {rows, p.top_k}),
                   RowOperand("weights", DType::kF32, {rows, p.top_k}, true),
                   SavedOperand("probs", DType::kF32, {rows, p.experts})};
      return s;
    };
    op->forward = [](const Ctx& ctx, const OpKey& key, const ForwardCall& call) {
      Args a;
      a.rows = call.rows;
      a.logits = call.in[0].data();
      a.ids = Out<int32_t>(call.out[0]);
      a.weights = Out<float>(call.out[1]);
      a.probs = Out<float>(call.out[2]);
      return Forward(ctx, ParamsOf(key), a);
    };
    op->backward = [](const Ctx& ctx, const OpKey& key, const BackwardCall& call) {
      BackwardArgs a;
      a.rows = call.rows;
      a.ids = In<int32_t>(call.out[0]);
      a.probs = In<float>(call.out[2]);
      a.dweights = In<float>(call.dout[1]);
      a.dlogits = call.din[0].mutable_data();
      a.logits = call.in[0].data();  // read by a planted fault alone
      return Backward(ctx, ParamsOf(key), a);
    };
    op->width_dim = "experts";
    op->propagates_non_finite = false;
    return op;
  }();
  return *info;
}

}  // namespace tare::ops::router
