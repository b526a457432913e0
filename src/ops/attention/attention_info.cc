// The registry entry of attention: one whole sequence a call, packed K and V. What cuts rows
// (chunks, pages, neighbours) is in attention_test.cc, because rows of a sequence read each other.

#include "ops/attention/attention.h"
#include "ops/registry.h"

namespace tare::ops::attention {
namespace {

Params ParamsOf(const OpKey& key) {
  Params p;
  p.q_heads = key.dim("q_heads");
  p.kv_heads = key.dim("kv_heads");
  p.head_dim = key.dim("head_dim");
  p.dtype = key.dtype;
  p.scale = 0.25f;  // 1 / sqrt(16)
  if (key.variant.find("window") != std::string::npos) p.window = 5;
  if (key.variant.find("sink") != std::string::npos) p.sink = true;
  if (key.variant.find("softcap") != std::string::npos) p.softcap = 4.0f;
  return p;
}

Signature SignatureOf(const OpKey& key, int64_t rows) {
  const Params p = ParamsOf(key);
  const Shape wide = {rows, p.q_heads, p.head_dim}, narrow = {rows, p.kv_heads, p.head_dim};
  Signature s;
  for (const auto& [name, shape] :
       {std::pair("q", wide), std::pair("k", narrow), std::pair("v", narrow)}) {
    s.inputs.push_back(
        {.name = name, .dtype = p.dtype, .shape = shape, .grad = true, .grad_dtype = p.dtype});
  }
  if (p.sink) {
    s.inputs.push_back({.name = "sink",
                        .dtype = DType::kF32,
                        .shape = {p.q_heads},
                        .role = Role::kShared,
                        .grad = true});
  }
  s.outputs.push_back(
      {.name = "out", .dtype = p.dtype, .shape = wide, .grad = true, .grad_dtype = p.dtype});
  s.outputs.push_back(
      {.name = "lse2", .dtype = DType::kF32, .shape = {rows, p.q_heads}, .saved = true});
  return s;
}

Status CallForward(const Ctx& ctx, const OpKey& key, const ForwardCall& call) {
  const Params p = ParamsOf(key);
  const Run run{.q_rows = call.rows};
  Args a;
  a.tokens = call.rows;
  a.q = call.in[0].data();
  a.kv = {.k = call.in[1].data(), .v = call.in[2].data(), .rows = call.rows};
  a.sink = p.sink ? call.in[3].as<float>() : nullptr;
  a.runs = {&run, 1};
  a.out = call.out[0].mutable_data();
  a.lse2 = call.out[1].mutable_as<float>();
  return Forward(ctx, p, a);
}

Status CallBackward(const Ctx& ctx, const OpKey& key, const BackwardCall& call) {
  const Params p = ParamsOf(key);
  const Run run{.q_rows = call.rows};
  BackwardArgs a;
  a.tokens = a.kv_rows = call.rows;
  a.q = call.in[0].data(), a.k = call.in[1].data(), a.v = call.in[2].data();
  a.sink = p.sink ? call.in[3].as<float>() : nullptr;
  a.out = call.out[0].data();
  a.lse2 = call.out[1].as<float>();
  a.dout = call.dout[0].data();
  a.runs = {&run, 1};
  a.dq = call.din[0].mutable_data(), a.dk = call.din[1].mutable_data(),
  a.dv = call.din[2].mutable_data();
  a.dsink = p.sink ? call.din[3].mutable_as<float>() : nullptr;
  return Backward(ctx, p, a);
}

std::vector<OpKey> Keys() {
  std::vector<OpKey> keys;
  for (Profile profile : {Profile::kIeeeF32, Profile::kSm90Mma}) {
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      if (dtype == DType::kF32 && profile == Profile::kSm90Mma) continue;
      for (const char* variant : {"", "window-sink", "softcap"}) {
        keys.push_back(
            {profile, dtype, dtype, variant, {{"q_heads", 4}, {"kv_heads", 2}, {"head_dim", 16}}});
      }
    }
  }
  return keys;
}

}  // namespace

const OpInfo& Info() {
  static const auto* info = new OpInfo{
      .name = "attention",
      .dtypes = {DType::kBF16, DType::kF16, DType::kF32},
      .devices = {Device::kCpu},
      .profiles = {Profile::kIeeeF32, Profile::kSm90Mma},
      .keys = Keys(),
      .select = [](const OpKey& key) { return ContractOf(ParamsOf(key), key.profile); },
      .signature = SignatureOf,
      .forward = CallForward,
      .backward = CallBackward,
      .rows_independent = false,
  };
  return *info;
}

}  // namespace tare::ops::attention
