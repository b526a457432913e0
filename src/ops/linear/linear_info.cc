// The contract and the registry entry of linear.

#include "ops/linear/linear.h"
#include "ops/linear/linear_plain.h"
#include "ops/info.h"
#include "ops/registry.h"

namespace tare::ops::linear {
namespace {

Params ParamsOf(const OpKey& key) {
  Params p;
  p.n = key.dim("n");
  p.k = key.dim("k");
  p.x_dtype = p.w_dtype = p.bias_dtype = p.dy_dtype = p.dx_dtype = p.backward_operand = key.dtype;
  p.y_dtype = key.out_dtype;
  if (key.variant == "bias") p.bias = true;
  if (key.variant == "segments") p.segments = p.dx_segments = 4;
  if (key.variant == "head") {
    p.dx_segments = 8;
    p.dx_vocabulary_leaves = true;
    p.dy_dtype = key.out_dtype;
  }
  return p;
}

Signature SignatureOf(const OpKey& key, int64_t rows) {
  const Params p = ParamsOf(key);
  Signature s;
  s.inputs.push_back({.name = "x",
                      .dtype = p.x_dtype,
                      .shape = {rows, p.k},
                      .grad = true,
                      .grad_dtype = p.dx_dtype});
  s.inputs.push_back({.name = "w",
                      .dtype = p.w_dtype,
                      .shape = {p.n, p.k},
                      .role = Role::kShared,
                      .scale = 0.125f,
                      .grad = true});
  if (p.bias) {
    s.inputs.push_back({.name = "bias",
                        .dtype = p.bias_dtype,
                        .shape = {p.n},
                        .role = Role::kShared,
                        .grad = true});
  }
  s.outputs.push_back({.name = "y",
                       .dtype = p.y_dtype,
                       .shape = {rows, p.n},
                       .grad = true,
                       .grad_dtype = p.dy_dtype});
  return s;
}

Status CallForward(const Ctx& ctx, const OpKey& key, const ForwardCall& call) {
  const Params p = ParamsOf(key);
  return Forward(ctx, p,
                 {.m = call.rows,
                  .x = call.in[0].data(),
                  .w = call.in[1].data(),
                  .bias = p.bias ? call.in[2].data() : nullptr,
                  .y = call.out[0].mutable_data()});
}

Status CallBackward(const Ctx& ctx, const OpKey& key, const BackwardCall& call) {
  const Params p = ParamsOf(key);
  BackwardArgs a;
  a.m = call.rows;
  a.dy = call.dout[0].data();
  a.x = call.in[0].data();
  a.w = call.in[1].data();
  a.units = call.units;
  a.dx = call.din[0].mutable_data();
  a.dw = Out<float>(call.din[1]);
  if (p.bias) a.dbias = Out<float>(call.din[2]);
  return Backward(ctx, p, a);
}

std::vector<OpKey> Keys() {
  std::vector<OpKey> keys;
  for (Profile profile : {Profile::kIeeeF32, Profile::kSm90Mma}) {
    const DType b = DType::kBF16, f = DType::kF32;
    keys.push_back({profile, b, b, "", {{"n", 70}, {"k", 104}}});
    keys.push_back({profile, b, b, "bias", {{"n", 33}, {"k", 48}}});
    keys.push_back({profile, b, b, "segments", {{"n", 64}, {"k", 128}}});
    keys.push_back({profile, b, f, "head", {{"n", 130}, {"k", 64}}});
    keys.push_back({profile, DType::kF16, DType::kF16, "", {{"n", 40}, {"k", 64}}});
    if (profile == Profile::kIeeeF32)
      keys.push_back({profile, f, f, "bias", {{"n", 40}, {"k", 72}}});
  }
  return keys;
}

std::string StepText(bool sm90, DType dtype) {
  return sm90 ? fmt::format("sm90({})", DTypeName(dtype)) : "fma";
}

}  // namespace

Contract ContractOf(const Params& p, Profile profile) {
  Contract c;
  c.op = "linear";
  c.profile = ProfileName(profile);
  const bool forward_sm90 = ForwardUsesSm90(profile, p);
  const bool backward_sm90 = BackwardUsesSm90(profile, p);
  const std::string step = StepText(forward_sm90, p.x_dtype);
  const std::string back = StepText(backward_sm90, p.backward_operand);
  if (p.segments == 1) {
    c.formula.push_back(fmt::format("s = chain(k ascending) of {}(x[m, k], w[n, k], .)", step));
  } else {
    c.formula.push_back(
        fmt::format("s = tree of {} runs of K, each chain(k ascending) of {}(x[m, k], w[n, k], .)",
                    p.segments, step));
  }
  if (p.bias) c.formula.push_back("s = s + bias[n]");
  c.formula.push_back(fmt::format("y[m, n] = {}(s)", DTypeName(p.y_dtype)));
  const std::string_view op = DTypeName(p.backward_operand);
  c.backward.push_back(fmt::format("operands: dy, x and w rounded to {} first", op));
  const std::string runs =
      p.dx_vocabulary_leaves ? "tree of the eight vocabulary leaves, each "
      : p.dx_segments > 1 ? fmt::format("tree of {} segment-major runs of n, each ", p.dx_segments)
                          : "";
  c.backward.push_back(
      fmt::format("dx[m, k] = {}({}chain(n ascending) of {}(dy[m, n], w[n, k], .))",
                  DTypeName(p.dx_dtype), runs, back));
  c.backward.push_back(fmt::format(
      "dw[n, k] += per unit: chain(tokens ascending) of {}(dy[t, n], x[t, k], .)", back));
  if (p.bias) c.backward.push_back("dbias[n] += per unit: lanes(32) over its tokens of dy[t, n]");
  c.segments = p.segments;
  c.unit_rows = kUnitRows;
  if (p.bias) c.token_lanes = 32;
  if (p.dx_vocabulary_leaves) c.leaves = 8;
  c.constants = {{"n", std::to_string(p.n)},
                 {"k", std::to_string(p.k)},
                 {"segment_unit", std::to_string(p.segment_unit)},
                 {"dx_segments", std::to_string(p.dx_segments)}};
  for (size_t i = 0; i < p.parts.size(); ++i) {
    c.constants.emplace_back(fmt::format("part_{}", i), std::to_string(p.parts[i]));
  }
  c.inputs = {{"x", std::string(DTypeName(p.x_dtype)), "[M, K]"},
              {"w", std::string(DTypeName(p.w_dtype)), "[N, K]"}};
  if (p.bias) c.inputs.push_back({"bias", std::string(DTypeName(p.bias_dtype)), "[N]"});
  c.outputs = {{"y", std::string(DTypeName(p.y_dtype)), "[M, N]"}};
  c.rounding_points = {fmt::format("y: f32 to {}, nearest even, once", DTypeName(p.y_dtype)),
                       fmt::format("dx: f32 to {}, once; dw, dbias: f32", DTypeName(p.dx_dtype))};
  c.saved_for_backward = {"x", "w"};
  c.errors = {"segments other than 1, 2, 4, 8 or not cutting K into whole runs: by name",
              "a NaN result is written as the canonical one"};
  c.invariant_over = RowInvariance();
  const auto tolerance = [](DType out, bool sm90, const char* what) {
    if (out == DType::kBF16)
      return Tolerance{-7, -100, fmt::format("bf16: one rounding of {}", what)};
    if (out == DType::kF16) return Tolerance{-9, -24, fmt::format("f16: one rounding of {}", what)};
    if (sm90)
      return Tolerance{-15, -100, "sm90-mma: each step truncates at 2^-23 of the accumulator"};
    return Tolerance{-17, -100, "f32: a chain of K roundings, cancellation included"};
  };
  c.forward_tolerance = tolerance(p.y_dtype, forward_sm90, "y");
  c.gradient_tolerance = tolerance(p.dx_dtype, backward_sm90, "dx (dw is f32)");
  return c;
}

const OpInfo& Info() {
  static const auto* info = new OpInfo{
      .name = "linear",
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

}  // namespace tare::ops::linear
