// The contract and the registry entry of grouped_linear. The entry routes every row to one expert
// by an id operand, so that the generic suite can cut and move rows.

#include <cstring>

#include "ops/dispatch/dispatch.h"
#include "ops/grouped_linear/grouped_linear.h"
#include "ops/registry.h"

namespace tare::ops::grouped_linear {
namespace {

constexpr int64_t kExperts = 5;

Params ParamsOf(const OpKey& key) {
  Params p;
  p.experts = kExperts;
  p.linear.n = key.dim("n");
  p.linear.k = key.dim("k");
  p.linear.x_dtype = p.linear.w_dtype = p.linear.dy_dtype = p.linear.dx_dtype = key.dtype;
  p.linear.backward_operand = key.dtype;
  p.linear.y_dtype = key.out_dtype;
  return p;
}

Signature SignatureOf(const OpKey& key, int64_t rows) {
  const Params p = ParamsOf(key);
  Signature s;
  s.inputs.push_back({.name = "x",
                      .dtype = p.linear.x_dtype,
                      .shape = {rows, p.linear.k},
                      .grad = true,
                      .grad_dtype = p.linear.dx_dtype});
  s.inputs.push_back({.name = "expert",
                      .dtype = DType::kI32,
                      .shape = {rows},
                      .fill = Fill::kIndex,
                      .limit = kExperts});
  s.inputs.push_back({.name = "w",
                      .dtype = p.linear.w_dtype,
                      .shape = {kExperts, p.linear.n, p.linear.k},
                      .role = Role::kShared,
                      .scale = 0.125f,
                      .grad = true});
  s.outputs.push_back({.name = "y",
                       .dtype = p.linear.y_dtype,
                       .shape = {rows, p.linear.n},
                       .grad = true,
                       .grad_dtype = p.linear.dy_dtype});
  return s;
}

// Rows of `width` bytes between token order and routed order.
void Scatter(const dispatch::Plan& plan, const std::vector<uint8_t>& routed, size_t width,
             void* out) {
  for (size_t r = 0; r < plan.row_token.size(); ++r) {
    std::memcpy(static_cast<uint8_t*>(out) + static_cast<size_t>(plan.row_token[r]) * width,
                &routed[r * width], width);
  }
}

Status CallForward(const Ctx& ctx, const OpKey& key, const ForwardCall& call) {
  const Params p = ParamsOf(key);
  TARE_ASSIGN_OR_RETURN(const dispatch::Plan plan,
                        dispatch::BuildPlan(call.rows, 1, kExperts, call.in[1].as<int32_t>()));
  const auto width = static_cast<size_t>(p.linear.n * SizeOf(p.linear.y_dtype));
  std::vector<uint8_t> y(static_cast<size_t>(call.rows) * width);
  Args a;
  a.rows = a.x_rows = call.rows;
  a.offsets = plan.offsets;
  a.token_of = plan.row_token.data();
  a.x = call.in[0].data();
  a.w = call.in[2].data();
  a.y = y.data();
  TARE_RETURN_IF_ERROR(Forward(ctx, p, a));
  Scatter(plan, y, width, call.out[0].mutable_data());
  return Ok();
}

Status CallBackward(const Ctx& ctx, const OpKey& key, const BackwardCall& call) {
  const Params p = ParamsOf(key);
  TARE_ASSIGN_OR_RETURN(const dispatch::Plan plan,
                        dispatch::BuildPlan(call.rows, 1, kExperts, call.in[1].as<int32_t>()));
  const auto dy_width = static_cast<size_t>(p.linear.n * SizeOf(p.linear.dy_dtype));
  const auto dx_width = static_cast<size_t>(p.linear.k * SizeOf(p.linear.dx_dtype));
  std::vector<uint8_t> dy(static_cast<size_t>(call.rows) * dy_width),
      dx(static_cast<size_t>(call.rows) * dx_width);
  for (size_t r = 0; r < plan.row_token.size(); ++r) {
    std::memcpy(&dy[r * dy_width],
                static_cast<const uint8_t*>(call.dout[0].data()) +
                    static_cast<size_t>(plan.row_token[r]) * dy_width,
                dy_width);
  }
  BackwardArgs a;
  a.rows = a.x_rows = call.rows;
  a.offsets = plan.offsets;
  a.token_of = plan.row_token.data();
  a.dy = dy.data();
  a.x = call.in[0].data();
  a.w = call.in[2].data();
  a.units = call.units;
  a.dx = dx.data();
  a.dw = call.din[2].mutable_as<float>();
  TARE_RETURN_IF_ERROR(Backward(ctx, p, a));
  Scatter(plan, dx, dx_width, call.din[0].mutable_data());
  return Ok();
}

std::vector<OpKey> Keys() {
  std::vector<OpKey> keys;
  for (Profile profile : {Profile::kIeeeF32, Profile::kSm90Mma}) {
    keys.push_back({profile, DType::kBF16, DType::kBF16, "", {{"n", 40}, {"k", 72}}});
    if (profile == Profile::kIeeeF32)
      keys.push_back({profile, DType::kF32, DType::kF32, "", {{"n", 24}, {"k", 40}}});
  }
  return keys;
}

}  // namespace

Contract ContractOf(const Params& p, Profile profile) {
  Contract c = linear::ContractOf(p.linear, profile);
  c.op = "grouped_linear";
  for (std::string& line : c.formula) {
    if (const size_t at = line.find("x[m, k], w[n, k]"); at != std::string::npos) {
      line.replace(at, 16, "x[token(r), k], w[e(r), n, k]");
    }
    if (const size_t at = line.find("y[m, n]"); at != std::string::npos)
      line.replace(at, 7, "y[r, n]");
  }
  c.formula.insert(c.formula.begin(),
                   "routed rows r sorted by (expert, token); e(r) is the row's expert");
  for (std::string& line : c.backward) {
    if (line.starts_with("dw[n, k] += per unit:")) {
      line.insert(21,
                  " over the unit's tokens that chose e, groups counted from the first of them,");
      line.replace(0, 8, "dw[e, n, k]");
    }
  }
  c.constants.emplace_back("experts", std::to_string(p.experts));
  c.inputs = {{"x", std::string(DTypeName(p.linear.x_dtype)), "[T, K]"},
              {"token", "i32", "[R]"},
              {"w", std::string(DTypeName(p.linear.w_dtype)), "[E, N, K]"}};
  c.outputs = {{"y", std::string(DTypeName(p.linear.y_dtype)), "[R, N]"}};
  c.errors.push_back(
      "offsets that descend or do not end at R, a token outside x, tokens of an expert that do not "
      "ascend: by name");
  c.invariant_over.push_back("routes of other tokens");
  return c;
}

const OpInfo& Info() {
  static const auto* info = new OpInfo{
      .name = "grouped_linear",
      .dtypes = {DType::kBF16, DType::kF16, DType::kF32},
      .devices = {Device::kCpu},
      .profiles = {Profile::kIeeeF32, Profile::kSm90Mma},
      .keys = Keys(),
      .select = [](const OpKey& key) { return ContractOf(ParamsOf(key), key.profile); },
      .signature = SignatureOf,
      .forward = CallForward,
      .backward = CallBackward,
  };
  return *info;
}

}  // namespace tare::ops::grouped_linear
