// The contract and the registry entry of cast.

#include "ops/cast/cast.h"
#include "ops/info.h"

namespace tare::ops::cast {
namespace {

Params ParamsOf(const OpKey& key) { return {key.dtype, key.out_dtype}; }

}  // namespace

Contract ContractOf(const Params& p) {
  Contract c;
  c.op = "cast";
  c.variant = fmt::format("{}-to-{}", DTypeName(p.from), DTypeName(p.to));
  c.formula = {fmt::format(
      "y = {}(x), nearest even; NaN becomes the canonical one; overflow becomes infinity",
      DTypeName(p.to))};
  c.backward = {fmt::format("straight-through: dx = {}(dy)", DTypeName(p.from))};
  c.inputs = {{"x", Name(p.from), "[N]"}};
  c.outputs = {{"y", Name(p.to), "[N]"}};
  c.rounding_points = {fmt::format("y: to {}, once", DTypeName(p.to))};
  c.invariant_over = RowInvariance();
  c.forward_tolerance = {-8, -100, "one rounding to 8 bits or more"};
  c.gradient_tolerance = {-8, -100, "straight-through: one rounding of the gradient"};
  return c;
}

const OpInfo& Info() {
  static const auto* info = [] {
    auto* op = new OpInfo(RowOpInfo("cast"));
    for (const auto& [from, to] :
         {std::pair(DType::kF32, DType::kBF16), std::pair(DType::kBF16, DType::kF32)}) {
      op->keys.push_back({.dtype = from, .out_dtype = to, .dims = {}});
    }
    op->select = [](const OpKey& key) { return ContractOf(ParamsOf(key)); };
    op->signature = [](const OpKey& key, int64_t rows) {
      Signature s;
      s.inputs = {RowOperand("x", key.dtype, {rows}, true)};
      s.outputs = {RowOperand("y", key.out_dtype, {rows}, true)};
      return s;
    };
    op->forward = [](const Ctx& ctx, const OpKey& key, const ForwardCall& call) {
      return Forward(ctx, ParamsOf(key),
                     {call.rows, call.in[0].data(), call.out[0].mutable_data()});
    };
    op->backward = [](const Ctx& ctx, const OpKey& key, const BackwardCall& call) {
      return Backward(ctx, ParamsOf(key),
                      {call.rows, call.dout[0].data(), call.din[0].mutable_data()});
    };
    return op;
  }();
  return *info;
}

}  // namespace tare::ops::cast
