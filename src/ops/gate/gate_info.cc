// The contract and the registry entry of gate.

#include "ops/gate/gate.h"
#include "ops/info.h"

namespace tare::ops::gate {
namespace {

Params ParamsOf(const OpKey& key) {
  Params p;
  p.width = key.dim("width");
  p.dtype = p.grad_dtype = key.dtype;
  if (key.variant == "gelu-tanh") p.activation = Activation::kGeluTanh;
  if (key.variant == "gelu-erf") p.activation = Activation::kGeluErf;
  return p;
}

}  // namespace

Contract ContractOf(const Params& p) {
  Contract c;
  c.op = "gate";
  c.version = 2;  // 2: exp and what is made of it keep the rounding of the reduced argument
  c.variant = ActivationName(p.activation);
  c.formula = {fmt::format("y = {}({}(g) * u)", DTypeName(p.dtype), c.variant)};
  c.backward = {fmt::format("du = {}(dy * {}(g))", DTypeName(p.grad_dtype), c.variant),
                fmt::format("dg = {}((dy * u) * act'(g))", DTypeName(p.grad_dtype))};
  switch (p.activation) {
    case Activation::kSilu:
      c.backward.push_back("act'(g) = s * fma(g, 1 - s, 1), s = sigmoid(g)");
      break;
    case Activation::kGeluTanh:
      c.backward.push_back(
          "q = g * g; v = c * (g * fma(0.044715, q, 1)); dv = c * fma(0.134145, q, 1); s = "
          "sigmoid(v); "
          "act'(g) = fma(g * dv, s * (1 - s), s), c = f32(2 sqrt(2/pi))");
      break;
    case Activation::kGeluErf:
      c.backward.push_back(
          "act'(g) = fma(g, exp((g * g) * -0.5) * f32(1/sqrt(2 pi)), fma(0.5, erf(g * "
          "f32(sqrt(0.5))), 0.5))");
      break;
  }
  c.inputs = {{"gate", Name(p.dtype), "[T, I], rows strided"},
              {"up", Name(p.dtype), "[T, I], rows strided"}};
  c.outputs = {{"y", Name(p.dtype), "[T, I]"}};
  c.rounding_points = {fmt::format("y: f32 to {}, once; the activation is not rounded in between",
                                   DTypeName(p.dtype)),
                       fmt::format("dg, du: f32 to {}, once", DTypeName(p.grad_dtype))};
  c.saved_for_backward = {"gate", "up"};
  c.invariant_over = RowInvariance();
  c.forward_tolerance = ElementTolerance(p.dtype, "one function of at most 1 ulp and one multiply");
  c.gradient_tolerance =
      ElementTolerance(p.grad_dtype, "a derivative of absolute error 2^-22 and two multiplies");
  if (p.grad_dtype == DType::kF32) c.gradient_tolerance.relative_log2 = -20;
  return c;
}

const OpInfo& Info() {
  static const auto* info = [] {
    auto* op = new OpInfo(RowOpInfo("gate"));
    for (DType dtype : op->dtypes) {
      for (const char* variant : {"silu", "gelu-tanh", "gelu-erf"}) {
        op->keys.push_back(
            {.dtype = dtype, .out_dtype = dtype, .variant = variant, .dims = {{"width", 40}}});
      }
    }
    op->select = [](const OpKey& key) { return ContractOf(ParamsOf(key)); };
    op->signature = [](const OpKey& key, int64_t rows) {
      const Params p = ParamsOf(key);
      Signature s;
      s.inputs = {RowOperand("gate", p.dtype, {rows, p.width}, true),
                  RowOperand("up", p.dtype, {rows, p.width}, true)};
      s.inputs[0].scale = 3.0f;
      s.outputs = {RowOperand("y", p.dtype, {rows, p.width}, true)};
      return s;
    };
    op->forward = [](const Ctx& ctx, const OpKey& key, const ForwardCall& call) {
      return Forward(
          ctx, ParamsOf(key),
          {call.rows, call.in[0].data(), call.in[1].data(), 0, call.out[0].mutable_data()});
    };
    op->backward = [](const Ctx& ctx, const OpKey& key, const BackwardCall& call) {
      BackwardArgs a;
      a.rows = call.rows;
      a.gate = call.in[0].data();
      a.up = call.in[1].data();
      a.dy = call.dout[0].data();
      a.dgate = call.din[0].mutable_data();
      a.dup = call.din[1].mutable_data();
      return Backward(ctx, ParamsOf(key), a);
    };
    op->width_dim = "width";
    return op;
  }();
  return *info;
}

}  // namespace tare::ops::gate
