// The contract and the registry entry of cross_entropy.

#include "ops/cross_entropy/cross_entropy.h"
#include "ops/info.h"

namespace tare::ops::cross_entropy {
namespace {

constexpr int64_t kGlobalCount = 100;

}  // namespace

Contract ContractOf(const Params&) {
  Contract c;
  c.op = "cross_entropy";
  c.formula = {
      "a masked token contributes +0 by selection",
      "token_loss = -(logprob * (weight * f32(1 / N))), N the valid tokens of the global batch; "
      "weight 1 multiplies nothing",
      "total: per unit lanes(32) over its tokens in f32, each added in f64, units ascending"};
  c.backward = {"dlogprob = -((weight * f32(1 / N)) * dloss), +0 where masked"};
  c.token_lanes = 32;
  c.unit_rows = kUnitRows;
  c.inputs = {{"logprob", "f32", "[T]"}, {"weight", "f32", "[T]"}, {"mask", "u8", "[T]"}};
  c.outputs = {{"token_loss", "f32", "[T]"}, {"loss", "f64", "[1], added to"}};
  c.rounding_points = {"none below f32"};
  c.saved_for_backward = {"weight", "mask"};
  c.errors = {"a loss at a valid token that is not finite names the token",
              "a mask value other than 0 or 1"};
  c.invariant_over = RowInvariance();
  c.forward_tolerance = {-20, -30, "f32: three products"};
  c.gradient_tolerance = {-20, -30, "f32: three products"};
  return c;
}

const OpInfo& Info() {
  static const auto* info = [] {
    auto* op = new OpInfo(RowOpInfo("cross_entropy"));
    op->dtypes = {DType::kF32};
    op->keys = {{.dtype = DType::kF32, .out_dtype = DType::kF32}};
    op->select = [](const OpKey&) { return ContractOf({}); };
    op->signature = [](const OpKey&, int64_t rows) {
      Signature s;
      s.inputs = {RowOperand("logprob", DType::kF32, {rows}, true),
                  RowOperand("weight", DType::kF32, {rows}),
                  RowOperand("mask", DType::kU8, {rows})};
      s.inputs[0].fill = Fill::kLogprob;
      s.inputs[2].fill = Fill::kMask;
      s.outputs = {RowOperand("token_loss", DType::kF32, {rows}),
                   SharedOperand("loss", DType::kF64, {1}, true)};
      s.outputs[1].grad_dtype = DType::kF32;
      return s;
    };
    op->forward = [](const Ctx& ctx, const OpKey&, const ForwardCall& call) {
      const TokenUnit unit = {0, call.rows};
      Args a;
      a.rows = call.rows;
      a.logprob = In<float>(call.in[0]);
      a.weight = In<float>(call.in[1]);
      a.mask = In<uint8_t>(call.in[2]);
      a.global_count = kGlobalCount;
      if (call.rows > 0) a.units = {&unit, 1};
      a.token_loss = Out<float>(call.out[0]);
      a.loss = Out<double>(call.out[1]);
      return Forward(ctx, {}, a);
    };
    op->backward = [](const Ctx& ctx, const OpKey&, const BackwardCall& call) -> Status {
      BackwardArgs a;
      a.rows = call.rows;
      a.weight = In<float>(call.in[1]);
      a.mask = In<uint8_t>(call.in[2]);
      a.global_count = kGlobalCount;
      TARE_ASSIGN_OR_RETURN(const std::vector<float> dloss, OnHost<float>(call.dout[1]));
      a.dloss = dloss[0];
      a.dlogprob = Out<float>(call.din[0]);
      return Backward(ctx, {}, a);
    };
    op->propagates_non_finite = false;
    return op;
  }();
  return *info;
}

}  // namespace tare::ops::cross_entropy
