// The contract and the registry entry of headnorm.

#include "ops/headnorm/headnorm.h"
#include "ops/info.h"

namespace tare::ops::headnorm {
namespace {

Params ParamsOf(const OpKey& key) {
  Params p;
  p.heads = key.dim("heads");
  p.head_dim = key.dim("head_dim");
  p.dtype = p.weight_dtype = p.grad_dtype = key.dtype;
  p.unit_offset = key.variant == "unit-offset";
  return p;
}

}  // namespace

Contract ContractOf(const Params& p) {
  Contract c;
  c.op = "headnorm";
  c.variant = p.unit_offset ? "unit-offset" : "plain";
  c.formula = {"for each head: s = lanes(32) of fma(x, x, .)", "r = 1 / sqrt(fma(s, 1/D, eps))"};
  if (p.unit_offset) c.formula.push_back("w = 1 + w");
  c.formula.push_back(fmt::format("y = {}((x * r) * w)", DTypeName(p.dtype)));
  c.backward = {"g = dy * w; x^ = x * r", "c = (lanes(32) of fma(g, x^, .)) * 1/D",
                fmt::format("dx = {}(fma(-c, x^, g) * r)", DTypeName(p.grad_dtype)),
                "dw += per unit: for each head lanes(32) over the unit's tokens of fma(dy, x^, .); "
                "the heads added by the "
                "tree of halves: the first ceil(n/2) heads and the rest, each the same way"};
  c.lanes = 32;
  c.token_lanes = 32;
  c.unit_rows = kUnitRows;
  c.constants = {{"eps", HexWord(p.eps)}};
  c.inputs = {{"x", Name(p.dtype), "[T, N, D], rows strided"}, {"w", Name(p.weight_dtype), "[D]"}};
  c.outputs = {{"y", Name(p.dtype), "[T, N, D], rows strided"}, {"rstd", "f32", "[T, N]"}};
  c.rounding_points = {fmt::format("y: f32 to {}, once", DTypeName(p.dtype)),
                       fmt::format("dx: f32 to {}, once", DTypeName(p.grad_dtype))};
  c.saved_for_backward = {"x", "rstd"};
  c.invariant_over = RowInvariance();
  c.invariant_over.push_back("tp");
  c.forward_tolerance = ElementTolerance(p.dtype, "a chain of D/32 fma a lane");
  c.gradient_tolerance = p.dtype == DType::kF32
                             ? Tolerance{-19, -100, "f32: two chains and a cancellation"}
                             : Tolerance{-8, -100, "bf16: one rounding of dx"};
  return c;
}

const OpInfo& Info() {
  static const auto* info = [] {
    auto* op = new OpInfo(RowOpInfo("headnorm"));
    for (DType dtype : op->dtypes) {
      for (const char* variant : {"", "unit-offset"}) {
        for (int64_t heads : {1, 3, 4}) {
          op->keys.push_back({.dtype = dtype,
                              .out_dtype = dtype,
                              .variant = variant,
                              .dims = {{"heads", heads}, {"head_dim", 48}}});
        }
      }
    }
    op->select = [](const OpKey& key) { return ContractOf(ParamsOf(key)); };
    op->signature = [](const OpKey& key, int64_t rows) {
      const Params p = ParamsOf(key);
      const Shape shape = {rows, p.heads, p.head_dim};
      Signature s;
      s.inputs = {RowOperand("x", p.dtype, shape, true),
                  SharedOperand("w", p.weight_dtype, {p.head_dim}, true)};
      s.outputs = {RowOperand("y", p.dtype, shape, true),
                   SavedOperand("rstd", DType::kF32, {rows, p.heads})};
      return s;
    };
    op->forward = [](const Ctx& ctx, const OpKey& key, const ForwardCall& call) {
      Args a;
      a.rows = call.rows;
      a.x = call.in[0].data();
      a.w = call.in[1].data();
      a.y = call.out[0].mutable_data();
      a.rstd = Out<float>(call.out[1]);
      return Forward(ctx, ParamsOf(key), a);
    };
    op->backward = [](const Ctx& ctx, const OpKey& key, const BackwardCall& call) {
      BackwardArgs a;
      a.rows = call.rows;
      a.x = call.in[0].data();
      a.w = call.in[1].data();
      a.rstd = In<float>(call.out[1]);
      a.dy = call.dout[0].data();
      a.dx = call.din[0].mutable_data();
      a.dw = Out<float>(call.din[1]);
      a.units = call.units;
      return Backward(ctx, ParamsOf(key), a);
    };
    op->width_dim = "head_dim";
    return op;
  }();
  return *info;
}

}  // namespace tare::ops::headnorm
