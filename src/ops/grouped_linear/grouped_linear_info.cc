// The contract and the registry entry of grouped_linear. The entry routes every row to one expert
// by an id operand, so that the generic suite can cut and move rows.

#include <cstring>

#include "ops/dispatch/dispatch.h"
#include "ops/grouped_linear/grouped_linear.h"
#include "ops/info.h"
#include "ops/registry.h"
#ifdef TARE_WITH_CUDA
#include "ops/grouped_linear/grouped_gemm.h"
#endif

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

// to[i] = from[rows[i]], rows of `width` bytes, bit for bit.
Status Reorder(const Ctx& ctx, const void* from, const std::vector<int32_t>& rows, int64_t width,
               void* to) {
  const auto count = static_cast<int64_t>(rows.size());
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda) {
    TARE_ASSIGN_OR_RETURN(const int32_t* const there, OnDevice(ctx, rows.data(), count));
    return gpu::LaunchGather(from, width, there, count, width, to, ctx.stream);
  }
#endif
  (void)ctx;
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(static_cast<uint8_t*>(to) + i * width,
                static_cast<const uint8_t*>(from) + rows[static_cast<size_t>(i)] * width,
                static_cast<size_t>(width));
  }
  return Ok();
}

Result<dispatch::Plan> PlanOf(const Tensor& experts, int64_t rows) {
  TARE_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, OnHost<int32_t>(experts));
  return dispatch::BuildPlan(rows, 1, kExperts, ids.data());
}

Status CallForward(const Ctx& ctx, const OpKey& key, const ForwardCall& call) {
  const Params p = ParamsOf(key);
  TARE_ASSIGN_OR_RETURN(const dispatch::Plan plan, PlanOf(call.in[1], call.rows));
  TARE_ASSIGN_OR_RETURN(Tensor y,
                        Tensor::Allocate(p.linear.y_dtype, {call.rows, p.linear.n}, ctx.device));
  Args a;
  a.rows = a.x_rows = call.rows;
  a.offsets = plan.offsets;
  TARE_ASSIGN_OR_RETURN(a.token_of, OnDevice(ctx, plan.row_token.data(), call.rows));
  a.x = call.in[0].data();
  a.w = call.in[2].data();
  a.y = y.mutable_data();
  TARE_RETURN_IF_ERROR(Forward(ctx, p, a));
  return Reorder(ctx, y.data(), plan.slot_row, p.linear.n * SizeOf(p.linear.y_dtype),
                 call.out[0].mutable_data());
}

Status CallBackward(const Ctx& ctx, const OpKey& key, const BackwardCall& call) {
  const Params p = ParamsOf(key);
  TARE_ASSIGN_OR_RETURN(const dispatch::Plan plan, PlanOf(call.in[1], call.rows));
  TARE_ASSIGN_OR_RETURN(Tensor dy,
                        Tensor::Allocate(p.linear.dy_dtype, {call.rows, p.linear.n}, ctx.device));
  TARE_ASSIGN_OR_RETURN(Tensor dx,
                        Tensor::Allocate(p.linear.dx_dtype, {call.rows, p.linear.k}, ctx.device));
  TARE_RETURN_IF_ERROR(Reorder(ctx, call.dout[0].data(), plan.row_token,
                               p.linear.n * SizeOf(p.linear.dy_dtype), dy.mutable_data()));
  BackwardArgs a;
  a.rows = a.x_rows = call.rows;
  a.offsets = plan.offsets;
  TARE_ASSIGN_OR_RETURN(a.token_of, OnDevice(ctx, plan.row_token.data(), call.rows));
  a.host_token_of = plan.row_token.data();
  a.dy = dy.data();
  a.x = call.in[0].data();
  a.w = call.in[2].data();
  a.units = call.units;
  a.dx = dx.mutable_data();
  a.dw = Out<float>(call.din[2]);
  TARE_RETURN_IF_ERROR(Backward(ctx, p, a));
  return Reorder(ctx, dx.data(), plan.slot_row, p.linear.k * SizeOf(p.linear.dx_dtype),
                 call.din[0].mutable_data());
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
      .devices = {Device::kCpu, Device::kCuda},
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
