// The contract and the registry entry of head_logprob.

#include "ops/head_logprob/head_logprob.h"
#include "ops/info.h"
#include "ops/logprob/logprob_operands.h"

namespace tare::ops::head_logprob {
namespace {

Params ParamsOf(const OpKey& key) {
  Params p;
  p.hidden = key.dim("hidden");
  p.vocab = key.dim("vocab");
  p.dtype = p.grad_dtype = key.dtype;
  p.logits_dtype = key.out_dtype;
  return p;
}

}  // namespace

Contract ContractOf(const Params& p, Profile profile) {
  linear::Params head;
  head.n = p.vocab;
  head.k = p.hidden;
  head.x_dtype = head.w_dtype = head.dy_dtype = head.backward_operand = p.dtype;
  head.y_dtype = p.logits_dtype;
  head.dx_dtype = p.grad_dtype;
  head.dx_segments = 8;
  head.dx_vocabulary_leaves = true;
  const Contract l = linear::ContractOf(head, profile);
  const Contract s = logprob::ContractOf(
      {.vocab = p.vocab, .logits_dtype = p.logits_dtype, .grad_dtype = p.dtype});
  Contract c;
  c.op = "head_logprob";
  c.version = 2;  // 2: exp and what is made of it keep the rounding of the reduced argument
  c.variant = fmt::format("{}-logits", DTypeName(p.logits_dtype));
  c.profile = l.profile;
  c.formula = {"the bits of linear (the head) followed by logprob, in tiles of rows"};
  for (const Contract* part : {&l, &s}) {
    for (const std::string& step : part->formula)
      c.formula.push_back(fmt::format("{}: {}", part->op, step));
    for (const std::string& step : part->backward)
      c.backward.push_back(fmt::format("{}: {}", part->op, step));
  }
  c.leaves = 8;
  c.block = 128;
  c.unit_rows = kUnitRows;
  c.constants = {{"hidden", std::to_string(p.hidden)}, {"vocab", std::to_string(p.vocab)}};
  c.inputs = {{"x", Name(p.dtype), "[T, H]"},
              {"w", Name(p.dtype), "[V, H]"},
              {"targets", "i32", "[T], -1: none"},
              {"temperature", "f32", "[T]"}};
  c.outputs = s.outputs;
  c.rounding_points = {
      fmt::format("logits: f32 to {}, once", DTypeName(p.logits_dtype)),
      fmt::format("dlogits: f32 to {}, once, before both contractions", DTypeName(p.dtype)),
      fmt::format("dx: f32 to {}, once; dw: f32", DTypeName(p.grad_dtype))};
  c.saved_for_backward = {"x", "w", "max", "log_sum", "entropy"};
  c.errors = s.errors;
  c.invariant_over = RowInvariance();
  const bool f32 = p.dtype == DType::kF32 && profile == Profile::kIeeeF32;
  c.forward_tolerance = p.logits_dtype == DType::kF32
                            ? Tolerance{-14, -14, "f32 logits, truncating steps in sm90-mma"}
                            : Tolerance{-5, -5, "bf16 logits of magnitude up to 8"};
  c.gradient_tolerance = f32 ? Tolerance{-15, -24, "f32: chains over V and H"}
                             : Tolerance{-4, -12, "bf16: dlogits rounded before two contractions"};
  return c;
}

const OpInfo& Info() {
  static const auto* info = [] {
    auto* op = new OpInfo(RowOpInfo("head_logprob"));
    for (Profile profile : op->profiles) {
      for (const auto& [dtype, logits] :
           {std::pair(DType::kBF16, DType::kF32), std::pair(DType::kBF16, DType::kBF16),
            std::pair(DType::kF32, DType::kF32)}) {
        op->keys.push_back({.profile = profile,
                            .dtype = dtype,
                            .out_dtype = logits,
                            .dims = {{"hidden", 32}, {"vocab", 75}}});
      }
    }
    op->select = [](const OpKey& key) { return ContractOf(ParamsOf(key), key.profile); };
    op->signature = [](const OpKey& key, int64_t rows) {
      const Params p = ParamsOf(key);
      Signature s;
      s.inputs = {RowOperand("x", p.dtype, {rows, p.hidden}, true),
                  SharedOperand("w", p.dtype, {p.vocab, p.hidden}, true)};
      s.inputs[1].scale = 0.25f;
      for (Operand& o : logprob::TargetOperands(rows, p.vocab)) s.inputs.push_back(std::move(o));
      s.outputs = logprob::RowOutputs(rows);
      return s;
    };
    op->forward = [](const Ctx& ctx, const OpKey& key, const ForwardCall& call) {
      Args a;
      a.x = call.in[0].data();
      a.w = call.in[1].data();
      logprob::BindForward(call, 2, a);
      return Forward(ctx, ParamsOf(key), a);
    };
    op->backward = [](const Ctx& ctx, const OpKey& key, const BackwardCall& call) {
      BackwardArgs a;
      a.x = call.in[0].data();
      a.w = call.in[1].data();
      logprob::BindBackward(call, 2, a);
      a.dx = call.din[0].mutable_data();
      a.dw = Out<float>(call.din[1]);
      a.units = call.units;
      return Backward(ctx, ParamsOf(key), a);
    };
    return op;
  }();
  return *info;
}

}  // namespace tare::ops::head_logprob
