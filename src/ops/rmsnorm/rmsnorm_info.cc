// The contract and the registry entry of rmsnorm.

#include "ops/cast/cast.h"
#include "ops/info.h"
#include "ops/registry.h"
#include "ops/rmsnorm/rmsnorm.h"

namespace tare::ops::rmsnorm {
namespace {

Params ParamsOf(const OpKey& key) {
  Params p;
  p.hidden = key.dim("hidden");
  p.dtype = key.dtype;
  p.weight_dtype = key.dtype;
  p.residual_dtype = key.out_dtype;
  p.grad_dtype = key.dtype;
  p.add_residual = key.variant.starts_with("residual");
  p.unit_offset = key.variant.ends_with("unit-offset");
  return p;
}

Signature SignatureOf(const OpKey& key, int64_t rows) {
  const Params p = ParamsOf(key);
  const Shape row = {rows, p.hidden};
  Signature s;
  s.inputs.push_back(
      {.name = "x", .dtype = p.dtype, .shape = row, .grad = true, .grad_dtype = p.grad_dtype});
  if (p.add_residual) {
    s.inputs.push_back({.name = "residual",
                        .dtype = p.residual_dtype,
                        .shape = row,
                        .scale = 2.0f,
                        .grad = true,
                        .grad_dtype = p.grad_dtype});
  }
  s.inputs.push_back({.name = "w",
                      .dtype = p.weight_dtype,
                      .shape = {p.hidden},
                      .role = Role::kShared,
                      .grad = true});
  s.outputs.push_back(
      {.name = "y", .dtype = p.dtype, .shape = row, .grad = true, .grad_dtype = p.grad_dtype});
  if (p.add_residual) {
    s.outputs.push_back({.name = "residual_out",
                         .dtype = p.residual_dtype,
                         .shape = row,
                         .grad = true,
                         .grad_dtype = p.grad_dtype});
  }
  s.outputs.push_back({.name = "rstd", .dtype = DType::kF32, .shape = {rows}, .saved = true});
  return s;
}

Status CallForward(const Ctx& ctx, const OpKey& key, const ForwardCall& call) {
  const Params p = ParamsOf(key);
  Args a;
  a.rows = call.rows;
  a.x = call.in[0].data();
  if (p.add_residual) a.residual = call.in[1].data();
  a.w = call.in[p.add_residual ? 2 : 1].data();
  a.y = call.out[0].mutable_data();
  if (p.add_residual) a.residual_out = call.out[1].mutable_data();
  a.rstd = Out<float>(call.out[p.add_residual ? 2 : 1]);
  return Forward(ctx, p, a);
}

Status CallBackward(const Ctx& ctx, const OpKey& key, const BackwardCall& call) {
  const Params p = ParamsOf(key);
  BackwardArgs a;
  a.rows = call.rows;
  a.h = p.add_residual ? call.out[1].data() : call.in[0].data();
  a.w = call.in[p.add_residual ? 2 : 1].data();
  a.rstd = In<float>(call.out[p.add_residual ? 2 : 1]);
  a.dy = call.dout[0].data();
  if (p.add_residual) a.dresidual_out = call.dout[1].data();
  a.dx = call.din[0].mutable_data();
  a.dw = Out<float>(call.din[p.add_residual ? 2 : 1]);
  a.units = call.units;
  TARE_RETURN_IF_ERROR(Backward(ctx, p, a));
  // One gradient serves x and residual.
  if (p.add_residual && call.din[1].size_bytes() > 0) {
    return cast::Forward(ctx, {p.grad_dtype, p.grad_dtype},
                         {call.din[1].elements(), a.dx, call.din[1].mutable_data()});
  }
  return Ok();
}

std::vector<OpKey> Keys() {
  std::vector<OpKey> keys;
  for (const char* variant : {"residual", "", "residual-unit-offset", "unit-offset"}) {
    for (const auto& [dtype, residual] :
         {std::pair(DType::kBF16, DType::kBF16), std::pair(DType::kBF16, DType::kF32),
          std::pair(DType::kF32, DType::kF32)}) {
      if (variant[0] != 'r' && dtype != residual) continue;
      keys.push_back(
          {.dtype = dtype, .out_dtype = residual, .variant = variant, .dims = {{"hidden", 192}}});
    }
  }
  return keys;
}

}  // namespace

Contract ContractOf(const Params& p) {
  Contract c;
  c.op = "rmsnorm";
  c.variant = fmt::format("{}{}", p.add_residual ? "residual" : "plain",
                          p.unit_offset ? "-unit-offset" : "");
  const std::string_view y = DTypeName(p.dtype);
  if (p.add_residual) {
    c.formula.push_back(
        fmt::format("h = {}(x + residual); residual_out = h", DTypeName(p.residual_dtype)));
  } else {
    c.formula.push_back("h = x");
  }
  c.formula.push_back("s = lanes(128) of fma(h, h, .)");
  c.formula.push_back("r = 1 / sqrt(fma(s, 1/H, eps))");
  if (p.unit_offset) c.formula.push_back("w = 1 + w");
  c.formula.push_back(fmt::format("y = {}((h * r) * w)", y));
  c.backward.push_back("g = dy * w; x^ = h * r");
  c.backward.push_back("c = (lanes(128) of fma(g, x^, .)) * 1/H");
  c.backward.push_back("u = fma(-c, x^, g)");
  c.backward.push_back(
      fmt::format("dx = {}(u * r), or {}(fma(u, r, dresidual_out)) where a gradient reaches "
                  "residual_out; it is the "
                  "gradient of x and of residual",
                  DTypeName(p.grad_dtype), DTypeName(p.grad_dtype)));
  c.backward.push_back("dw += per unit: lanes(32) over its tokens of fma(dy, x^, .)");
  c.lanes = 128;
  c.token_lanes = 32;
  c.unit_rows = kUnitRows;
  c.constants = {{"eps", HexWord(p.eps)}};
  c.inputs = {{"x", std::string(y), "[T, H]"},
              {"w", std::string(DTypeName(p.weight_dtype)), "[H]"}};
  c.outputs = {{"y", std::string(y), "[T, H]"}, {"rstd", "f32", "[T]"}};
  if (p.add_residual) {
    c.inputs.push_back({"residual", std::string(DTypeName(p.residual_dtype)), "[T, H]"});
    c.outputs.push_back({"residual_out", std::string(DTypeName(p.residual_dtype)), "[T, H]"});
    c.rounding_points.push_back(
        fmt::format("residual_out: f32 sum to {}, once; the norm reads it rounded",
                    DTypeName(p.residual_dtype)));
  }
  c.rounding_points.push_back(fmt::format("y: f32 to {}, once", y));
  c.rounding_points.push_back(fmt::format("dx: f32 to {}, once", DTypeName(p.grad_dtype)));
  c.saved_for_backward = {p.add_residual ? "residual_out" : "x", "rstd"};
  c.invariant_over = RowInvariance();
  const bool narrow_sum = p.add_residual && p.residual_dtype == DType::kBF16;
  if (p.dtype == DType::kF32 && !narrow_sum) {
    c.forward_tolerance = {-21, -100, "f32: a chain of H/128 fma a lane and four roundings"};
    c.gradient_tolerance = {-19, -100, "f32: two such chains and a cancellation in u"};
  } else {
    c.forward_tolerance = {-7, -100, "bf16: one rounding of y, one of the stored sum"};
    c.gradient_tolerance = {
        -6, -100,
        "bf16: one rounding of dx; straight-through for the rounding of the stored sum, "
        "whose value the gradient is taken at"};
  }
  return c;
}

const OpInfo& Info() {
  static const auto* info = new OpInfo{
      .name = "rmsnorm",
      .dtypes = {DType::kBF16, DType::kF32},
      .devices = {Device::kCpu, Device::kCuda},
      .profiles = {Profile::kIeeeF32, Profile::kSm90Mma},
      .keys = Keys(),
      .select = [](const OpKey& key) { return ContractOf(ParamsOf(key)); },
      .signature = SignatureOf,
      .forward = CallForward,
      .backward = CallBackward,
      .width_dim = "hidden",
  };
  return *info;
}

}  // namespace tare::ops::rmsnorm
