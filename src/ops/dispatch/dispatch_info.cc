// The contract and the registry entry of dispatch. The suite sees one expert buffer of [T * k, H]:
// row (t, s) holds slot s of token t, so that its rows stay with their tokens.

#include "ops/dispatch/dispatch.h"
#include "ops/info.h"

namespace tare::ops::dispatch {
namespace {

Params ParamsOf(const OpKey& key) {
  Params p;
  p.hidden = key.dim("hidden");
  p.top_k = key.dim("top_k");
  p.dtype = p.grad_dtype = key.dtype;
  return p;
}

}  // namespace

Contract ContractOf(const Params& p) {
  Contract c;
  c.op = "dispatch";
  c.formula = {"rows sorted by (expert, token, slot); out[row(t, s)] = x[t]"};
  c.backward = {
      fmt::format("dx[t] = {}(sum from +0 over slots ascending of dout[row(t, s)]), f32 adds",
                  DTypeName(p.grad_dtype))};
  c.constants = {{"top_k", std::to_string(p.top_k)}};
  c.inputs = {{"x", Name(p.dtype), "[T, H]"}, {"row_token", "i32", "[R]"}};
  c.outputs = {{"out", Name(p.dtype), "[R, H]"}};
  c.rounding_points = {fmt::format("dx: f32 to {}, once", DTypeName(p.grad_dtype))};
  c.saved_for_backward = {"slot_row"};
  c.errors = {"an expert outside [-1, E) names row and slot",
              "a row outside its buffer names itself"};
  c.invariant_over = RowInvariance();
  c.forward_tolerance = {-60, -1000, "a copy"};
  c.gradient_tolerance = ElementTolerance(p.grad_dtype, "k - 1 adds");
  return c;
}

const OpInfo& Info() {
  static const auto* info = [] {
    auto* op = new OpInfo(RowOpInfo("dispatch"));
    for (DType dtype : op->dtypes) {
      op->keys.push_back(
          {.dtype = dtype, .out_dtype = dtype, .dims = {{"hidden", 40}, {"top_k", 3}}});
    }
    op->select = [](const OpKey& key) { return ContractOf(ParamsOf(key)); };
    op->signature = [](const OpKey& key, int64_t rows) {
      const Params p = ParamsOf(key);
      Signature s;
      s.inputs = {RowOperand("x", p.dtype, {rows, p.hidden}, true)};
      s.outputs = {RowOperand("out", p.dtype, {rows, p.top_k, p.hidden}, true)};
      return s;
    };
    op->forward = [](const Ctx& ctx, const OpKey& key, const ForwardCall& call) -> Status {
      const Params p = ParamsOf(key);
      std::vector<int32_t> row_token;
      row_token.reserve(static_cast<size_t>(call.rows * p.top_k));
      for (int64_t r = 0; r < call.rows * p.top_k; ++r)
        row_token.push_back(static_cast<int32_t>(r / p.top_k));
      Args a;
      a.rows = call.rows;
      a.out_rows = call.rows * p.top_k;
      TARE_ASSIGN_OR_RETURN(a.row_token, OnDevice(ctx, row_token.data(), a.out_rows));
      a.x = call.in[0].data();
      a.out = call.out[0].mutable_data();
      return Forward(ctx, p, a);
    };
    op->backward = [](const Ctx& ctx, const OpKey& key, const BackwardCall& call) -> Status {
      const Params p = ParamsOf(key);
      std::vector<int32_t> slot_row;
      slot_row.reserve(static_cast<size_t>(call.rows * p.top_k));
      for (int64_t r = 0; r < call.rows * p.top_k; ++r) slot_row.push_back(static_cast<int32_t>(r));
      BackwardArgs a;
      a.rows = call.rows;
      a.out_rows = call.rows * p.top_k;
      TARE_ASSIGN_OR_RETURN(a.slot_row,
                            OnDevice(ctx, slot_row.data(), static_cast<int64_t>(slot_row.size())));
      a.dout = call.dout[0].data();
      a.dx = call.din[0].mutable_data();
      return Backward(ctx, p, a);
    };
    op->width_dim = "hidden";
    return op;
  }();
  return *info;
}

}  // namespace tare::ops::dispatch
