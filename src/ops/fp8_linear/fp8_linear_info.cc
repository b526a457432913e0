// The contract and the registry entry of fp8_linear.

#include "ops/fp8_linear/fp8_linear.h"
#include "ops/info.h"

namespace tare::ops::fp8_linear {
namespace {

Params ParamsOf(const OpKey& key) {
  Params p;
  p.n = key.dim("n");
  p.y_dtype = key.out_dtype;
  p.bias = key.variant == "bias";
  if (key.variant == "segments") {
    p.segments = 4;
    p.k = key.dim("blocks_per_segment") * p.segments * kBlock;
  } else {
    p.k = key.dim("k");
  }
  return p;
}

int64_t Blocks(int64_t width) { return (width + kBlock - 1) / kBlock; }

Signature SignatureOf(const OpKey& key, int64_t rows) {
  const Params p = ParamsOf(key);
  Signature s;
  s.inputs = {RowOperand("x", p.x_dtype, {rows, p.k}),
              RowOperand("x_scale", DType::kF32, {rows, Blocks(p.k)}),
              SharedOperand("w", p.w_dtype, {p.n, p.k}),
              SharedOperand("w_scale", DType::kF32, {Blocks(p.n), Blocks(p.k)})};
  // Codes over most of their range; scales of one size, so that all blocks reach the sum's last
  // bits.
  s.inputs[0].scale = s.inputs[2].scale = 40.0f;
  s.inputs[1].fill = s.inputs[3].fill = Fill::kPositive;
  s.inputs[1].scale = s.inputs[3].scale = 0.01f;
  if (p.bias) s.inputs.push_back(SharedOperand("bias", p.bias_dtype, {p.n}));
  s.outputs = {RowOperand("y", p.y_dtype, {rows, p.n})};
  return s;
}

Status CallForward(const Ctx& ctx, const OpKey& key, const ForwardCall& call) {
  const Params p = ParamsOf(key);
  Args a;
  a.m = call.rows;
  a.x = call.in[0].data();
  a.x_scale = call.in[1].as<float>();
  a.w = call.in[2].data();
  a.w_scale = call.in[3].as<float>();
  a.bias = p.bias ? call.in[4].data() : nullptr;
  a.y = call.out[0].mutable_data();
  return Forward(ctx, p, a);
}

std::vector<OpKey> Keys() {
  std::vector<OpKey> keys;
  for (Profile profile : {Profile::kSm90Mma, Profile::kIeeeF32}) {
    const DType q = DType::kE4M3, b = DType::kBF16, f = DType::kF32;
    keys.push_back({profile, q, b, "", {{"n", 70}, {"k", 300}}});
    keys.push_back({profile, q, f, "bias", {{"n", 130}, {"k", 256}}});
    keys.push_back({profile, q, DType::kF16, "", {{"n", 40}, {"k", 96}}});
    keys.push_back({profile, q, f, "segments", {{"n", 33}, {"blocks_per_segment", 2}}});
  }
  return keys;
}

}  // namespace

Contract ContractOf(const Params& p, Profile profile) {
  const bool sm90 = profile == Profile::kSm90Mma;
  Contract c;
  c.op = "fp8_linear";
  c.variant = p.bias ? "bias" : "";
  c.profile = ProfileName(profile);
  c.formula = {
      "K in blocks of 128, the last one padded with zeros",
      sm90 ? "part = chain(steps of 32, k ascending) of sm90(e4m3)(x[m, k], w[n, k], .) from +0"
           : "part = chain(k ascending) of fma(x[m, k], w[n, k], .) from +0",
      "acc = fma(part, x_scale[m, b] * w_scale[n / 128, b], acc), blocks ascending from +0; the "
      "product of the scales is rounded once"};
  if (p.segments > 1) {
    c.formula.push_back(
        fmt::format("s = tree of the acc of {} equal runs of whole blocks", p.segments));
  } else {
    c.formula.push_back("s = acc");
  }
  if (p.bias) c.formula.push_back("s = s + bias[n]");
  c.formula.push_back(fmt::format("y[m, n] = {}(s)", DTypeName(p.y_dtype)));
  c.segments = p.segments;
  c.block = kBlock;
  c.constants = {{"n", std::to_string(p.n)}, {"k", std::to_string(p.k)}};
  c.inputs = {{"x", Name(p.x_dtype), "[M, K]"},
              {"x_scale", "f32", "[M, ceil(K/128)]"},
              {"w", Name(p.w_dtype), "[N, K]"},
              {"w_scale", "f32", "[ceil(N/128), ceil(K/128)]"}};
  if (p.bias) c.inputs.push_back({"bias", Name(p.bias_dtype), "[N]"});
  c.outputs = {{"y", Name(p.y_dtype), "[M, N]"}};
  c.rounding_points = {"the product of two scales: f32, once",
                       fmt::format("y: f32 to {}, nearest even, once", DTypeName(p.y_dtype))};
  c.errors = {
      "operands other than e4m3, segments other than 1, 2, 4, 8 or not cutting K into whole "
      "blocks: by name",
      "a NaN result is written as the canonical one"};
  c.invariant_over = RowInvariance();
  // A step cuts 33 terms at 2^-13 of the largest, and its result at as much: below 34 * 2^-13 <
  // 2^-7 of the largest term, which is below the row's largest result on data that does not cancel.
  if (sm90) {
    c.forward_tolerance = {-7, -100,
                           "sm90-mma fp8: each step cuts every term at 2^-13 of the largest"};
  } else if (p.y_dtype == DType::kF32) {
    c.forward_tolerance = {-17, -100, "f32: chains of 128 roundings, cancellation included"};
  } else if (p.y_dtype == DType::kF16) {
    c.forward_tolerance = {-10, -24, "f16: one rounding of y"};
  } else {
    c.forward_tolerance = {-7, -100, "bf16: one rounding of y"};
  }
  return c;
}

const OpInfo& Info() {
  static const auto* info = new OpInfo{
      .name = "fp8_linear",
      .dtypes = {DType::kE4M3},
      .devices = {Device::kCpu},
      .profiles = {Profile::kIeeeF32, Profile::kSm90Mma},
      .keys = Keys(),
      .select = [](const OpKey& key) { return ContractOf(ParamsOf(key), key.profile); },
      .signature = SignatureOf,
      .forward = CallForward,
      .backward = nullptr,
      .width_dim = "k",
  };
  return *info;
}

}  // namespace tare::ops::fp8_linear
