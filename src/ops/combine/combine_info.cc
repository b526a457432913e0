// The contract and the registry entry of combine. The suite sees an expert buffer of [T, k, H]
// whose row (t, s) is slot s of token t, so that its rows stay with their tokens; in the variant
// `turned` the rows of a token lie in the opposite order of its slots.

#include "ops/combine/combine.h"
#include "ops/info.h"

namespace tare::ops::combine {
namespace {

Params ParamsOf(const OpKey& key) {
  Params p;
  p.hidden = key.dim("hidden");
  p.top_k = key.dim("top_k");
  p.dtype = p.grad_dtype = key.dtype;
  return p;
}

std::vector<int32_t> SlotRows(const OpKey& key, int64_t rows) {
  const int64_t k = key.dim("top_k");
  std::vector<int32_t> slot_row;
  slot_row.reserve(static_cast<size_t>(rows * k));
  for (int64_t i = 0; i < rows * k; ++i) {
    slot_row.push_back(
        static_cast<int32_t>(key.variant == "turned" ? i / k * k + (k - 1 - i % k) : i));
  }
  return slot_row;
}

}  // namespace

Contract ContractOf(const Params& p) {
  Contract c;
  c.op = "combine";
  c.formula = {
      "acc = +0; for slots s ascending in the router's order: acc = fma(w[t, s], y[row(t, s)], "
      "acc)",
      fmt::format("out = {}(acc)", DTypeName(p.dtype))};
  c.backward = {fmt::format("dy[row(t, s)] = {}(w[t, s] * dout[t])", DTypeName(p.grad_dtype)),
                "dw[t, s] = lanes(128) of fma(dout, y[row(t, s)], .)"};
  c.lanes = 128;
  c.constants = {{"top_k", std::to_string(p.top_k)}};
  c.inputs = {
      {"y", Name(p.dtype), "[R, H]"}, {"slot_row", "i32", "[T, k]"}, {"weights", "f32", "[T, k]"}};
  c.outputs = {{"out", Name(p.dtype), "[T, H]"}};
  c.rounding_points = {fmt::format("out: f32 to {}, once", DTypeName(p.dtype)),
                       fmt::format("dy: f32 to {}, once", DTypeName(p.grad_dtype))};
  c.saved_for_backward = {"y", "slot_row", "weights"};
  c.errors = {"a row outside [-1, R) names token and slot", "two slots of one row in backward"};
  c.invariant_over = RowInvariance();
  c.forward_tolerance = p.dtype == DType::kF32 ? Tolerance{-19, -24, "f32: k fma, terms may cancel"}
                                               : Tolerance{-8, -24, "bf16: one rounding"};
  c.gradient_tolerance = p.grad_dtype == DType::kF32
                             ? Tolerance{-19, -20, "f32: a chain of H/128 fma a lane"}
                             : Tolerance{-8, -20, "bf16: one rounding"};
  return c;
}

const OpInfo& Info() {
  static const auto* info = [] {
    auto* op = new OpInfo(RowOpInfo("combine"));
    for (DType dtype : op->dtypes) {
      for (int64_t top_k : {5, 2, 1}) {
        op->keys.push_back(
            {.dtype = dtype, .out_dtype = dtype, .dims = {{"hidden", 48}, {"top_k", top_k}}});
      }
      op->keys.push_back({.dtype = dtype,
                          .out_dtype = dtype,
                          .variant = "turned",
                          .dims = {{"hidden", 48}, {"top_k", 3}}});
    }
    op->select = [](const OpKey& key) { return ContractOf(ParamsOf(key)); };
    op->signature = [](const OpKey& key, int64_t rows) {
      const Params p = ParamsOf(key);
      Signature s;
      s.inputs = {RowOperand("y", p.dtype, {rows, p.top_k, p.hidden}, true),
                  RowOperand("weights", DType::kF32, {rows, p.top_k}, true)};
      s.outputs = {RowOperand("out", p.dtype, {rows, p.hidden}, true)};
      return s;
    };
    op->forward = [](const Ctx& ctx, const OpKey& key, const ForwardCall& call) -> Status {
      const Params p = ParamsOf(key);
      const std::vector<int32_t> slot_row = SlotRows(key, call.rows);
      Args a;
      a.rows = call.rows;
      a.expert_rows = call.rows * p.top_k;
      a.y = call.in[0].data();
      TARE_ASSIGN_OR_RETURN(a.slot_row, OnDevice(ctx, slot_row.data(), a.expert_rows));
      a.weights = In<float>(call.in[1]);
      a.out = call.out[0].mutable_data();
      return Forward(ctx, p, a);
    };
    op->backward = [](const Ctx& ctx, const OpKey& key, const BackwardCall& call) -> Status {
      const Params p = ParamsOf(key);
      const std::vector<int32_t> slot_row = SlotRows(key, call.rows);
      BackwardArgs a;
      a.rows = call.rows;
      a.expert_rows = call.rows * p.top_k;
      a.y = call.in[0].data();
      TARE_ASSIGN_OR_RETURN(a.slot_row, OnDevice(ctx, slot_row.data(), a.expert_rows));
      a.weights = In<float>(call.in[1]);
      a.dout = call.dout[0].data();
      a.dy = call.din[0].mutable_data();
      a.dweights = Out<float>(call.din[1]);
      return Backward(ctx, p, a);
    };
    op->width_dim = "hidden";
    return op;
  }();
  return *info;
}

}  // namespace tare::ops::combine
