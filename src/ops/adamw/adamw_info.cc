// The contract and the registry entry of adamw. The state comes in as master, m, v and goes out as
// new tensors, so that the suite can treat elements as rows.

#include "ops/adamw/adamw.h"
#include "ops/cast/cast.h"
#include "ops/info.h"

namespace tare::ops::adamw {
namespace {

Params ParamsOf(const OpKey& key) {
  Params p;
  p.weight_decay = 0.1f;
  p.bias_correction = key.variant != "no-bias-correction";
  return p;
}

}  // namespace

Contract ContractOf(const Params& p) {
  Contract c;
  c.op = "adamw";
  c.variant = p.bias_correction ? "bias-corrected" : "no-bias-correction";
  c.formula = {"g = grad * grad_scale",
               "m = fma(beta1, m, (1 - beta1) * g)",
               "v = fma(beta2, v, ((1 - beta2) * g) * g)",
               p.bias_correction ? "c1 = f32(1 / (1 - beta1^t)), c2 = f32(1 / (1 - beta2^t)): f64, "
                                   "powers by repeated squaring"
                                 : "c1 = c2 = 1",
               "decay = f32(1 - lr * weight_decay): f64",
               "d = (m * c1) / (sqrt(v * c2) + eps)",
               "master = fma(-lr, d, master * decay)",
               "copy = bf16(master)"};
  c.constants = {{"beta1", HexWord(p.beta1)},
                 {"beta2", HexWord(p.beta2)},
                 {"eps", HexWord(p.eps)},
                 {"weight_decay", HexWord(p.weight_decay)}};
  c.inputs = {
      {"master", "f32", "[N]"}, {"m", "f32", "[N]"}, {"v", "f32", "[N]"}, {"grad", "f32", "[N]"}};
  c.outputs = {
      {"master", "f32", "[N]"}, {"m", "f32", "[N]"}, {"v", "f32", "[N]"}, {"copy", "bf16", "[N]"}};
  c.rounding_points = {"copy: f32 to bf16, nearest even, once"};
  c.errors = {"a step below 1, a beta outside [0, 1), a non-finite lr or scale"};
  c.invariant_over = {"device", "fsdp", "repeat", "simd", "threads"};
  c.forward_tolerance = {-8, -100,
                         "the bf16 copy's rounding; the f32 outputs have their own test at 2^-20"};
  return c;
}

const OpInfo& Info() {
  static const auto* info = [] {
    auto* op = new OpInfo(RowOpInfo("adamw"));
    op->dtypes = {DType::kF32};
    for (const char* variant : {"", "no-bias-correction"}) {
      op->keys.push_back(
          {.dtype = DType::kF32, .out_dtype = DType::kBF16, .variant = variant, .dims = {}});
    }
    op->select = [](const OpKey& key) { return ContractOf(ParamsOf(key)); };
    op->signature = [](const OpKey&, int64_t rows) {
      Signature s;
      for (const char* name : {"master", "m", "v", "grad"})
        s.inputs.push_back(RowOperand(name, DType::kF32, {rows}));
      s.inputs[2].fill = Fill::kPositive;
      for (const char* name : {"master", "m", "v"})
        s.outputs.push_back(RowOperand(name, DType::kF32, {rows}));
      s.outputs.push_back(RowOperand("copy", DType::kBF16, {rows}));
      return s;
    };
    op->forward = [](const Ctx& ctx, const OpKey& key, const ForwardCall& call) -> Status {
      for (size_t i = 0; i < 3; ++i) {
        TARE_RETURN_IF_ERROR(
            cast::Forward(ctx, {DType::kF32, DType::kF32},
                          {call.rows, call.in[i].data(), call.out[i].mutable_data()}));
      }
      Args a;
      a.count = call.rows;
      a.master = Out<float>(call.out[0]);
      a.m = Out<float>(call.out[1]);
      a.v = Out<float>(call.out[2]);
      a.copy = Out<uint16_t>(call.out[3]);
      a.grad = In<float>(call.in[3]);
      a.lr = 0.01f;
      a.step = 3;
      a.grad_scale = 0.5f;
      return Step(ctx, ParamsOf(key), a);
    };
    return op;
  }();
  return *info;
}

}  // namespace tare::ops::adamw
