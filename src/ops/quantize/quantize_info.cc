// The contract and the registry entry of quantize.

#include "ops/info.h"
#include "ops/quantize/quantize.h"

namespace tare::ops::quantize {
namespace {

Params ParamsOf(const OpKey& key) {
  return {.width = key.dim("width"), .dtype = key.dtype, .grad_dtype = key.dtype};
}

}  // namespace

Contract ContractOf(const Params& p) {
  Contract c;
  c.op = "quantize";
  c.variant = "e4m3-1x128";
  c.formula = {
      "per row and block of 128 along K: amax = max |x|; scale = amax / 448, 1 where that is 0",
      "q = e4m3(x / scale), nearest even, saturating at 448"};
  c.backward = {
      fmt::format("straight-through: dx = {}(gradient of q * scale)", DTypeName(p.grad_dtype))};
  c.block = kBlock;
  c.inputs = {{"x", Name(p.dtype), "[T, K]"}};
  c.outputs = {{"q", "e4m3", "[T, K]"}, {"scale", "f32", "[T, ceil(K/128)]"}};
  c.rounding_points = {"scale: one f32 division", "q: one f32 division, then to e4m3, once"};
  c.errors = {"a NaN or infinity names row and column"};
  c.invariant_over = RowInvariance();
  c.forward_tolerance = {-20, -100, "scale alone; codes have their own exact test"};
  c.gradient_tolerance = {-30, -100, "straight-through: a copy"};
  return c;
}

const OpInfo& Info() {
  static const auto* info = [] {
    auto* op = new OpInfo(RowOpInfo("quantize"));
    for (DType dtype : op->dtypes) {
      op->keys.push_back({.dtype = dtype, .out_dtype = DType::kE4M3, .dims = {{"width", 200}}});
    }
    op->select = [](const OpKey& key) { return ContractOf(ParamsOf(key)); };
    op->signature = [](const OpKey& key, int64_t rows) {
      const Params p = ParamsOf(key);
      Signature s;
      s.inputs = {RowOperand("x", p.dtype, {rows, p.width}, true)};
      // Codes are looked at as bytes: they have no oracle here, the dequantised gradient has.
      s.outputs = {SavedOperand("q", DType::kU8, {rows, p.width}),
                   RowOperand("scale", DType::kF32, {rows, (p.width + kBlock - 1) / kBlock})};
      return s;
    };
    op->forward = [](const Ctx& ctx, const OpKey& key, const ForwardCall& call) {
      return Forward(
          ctx, ParamsOf(key),
          {call.rows, call.in[0].data(), Out<uint8_t>(call.out[0]), Out<float>(call.out[1])});
    };
    op->width_dim = "width";
    op->propagates_non_finite = false;
    return op;
  }();
  return *info;
}

}  // namespace tare::ops::quantize
