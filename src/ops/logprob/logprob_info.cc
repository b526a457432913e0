// The contract and the registry entry of logprob.

#include "ops/info.h"
#include "ops/logprob/logprob.h"
#include "ops/logprob/logprob_operands.h"

namespace tare::ops::logprob {
namespace {

Params ParamsOf(const OpKey& key) {
  Params p;
  p.vocab = key.dim("vocab");
  p.logits_dtype = key.dtype;
  p.grad_dtype = key.out_dtype;
  return p;
}

}  // namespace

Contract ContractOf(const Params& p) {
  Contract c;
  c.op = "logprob";
  c.version = 2;  // 2: exp and what is made of it keep the rounding of the reduced argument
  c.variant = fmt::format("{}-logits", DTypeName(p.logits_dtype));
  // NOLINTBEGIN(bugprone-suspicious-missing-comma): long lines are cut.
  c.formula = {"z = f32(logit) / T; T = 1 divides by nothing",
               "leaf i of eight: ids [i * ceil(V/8), (i + 1) * ceil(V/8)); blocks of 128 ids from "
               "the leaf's start",
               "block: m = max z (-0 becomes +0); e = exp2((z - m) * log2e); l = quad-lane sum of "
               "e; u = quad-lane sum of e * (z - m)",
               "quad-lane sum: columns 8b+2q, 8b+2q+1 to lane q, b ascending, even first; (l0 + "
               "l1) + (l2 + l3)",
               "merge, m1 the larger max, s = m2 - m1, f = exp2(s * log2e): l = fma(l2, f, l1); u "
               "= fma(fma(l2, s, u2), f, u1); "
               "a run of -inf alone adds nothing",
               "blocks ascending inside a leaf, leaves by the tree of neighbours",
               "logprob = (z[target] - m) - log(l); entropy = log(l) - u / l; without a target "
               "logprob = +0"};
  // NOLINTEND(bugprone-suspicious-missing-comma)
  c.backward = {
      "q = (z - m) - log(l); p = exp(q); dz = dlogprob * (1[i = target] - p)",
      "with dentropy: dz = fma(-dentropy, p * (q + entropy), dz), the product +0 where p = 0",
      fmt::format("dlogits = {}(dz / T); +0 in a row without a target or dentropy",
                  DTypeName(p.grad_dtype))};
  c.leaves = kLeaves;
  c.block = kBlock;
  c.constants = {{"log2e", HexWord(0x1.715476p0f)}};
  c.inputs = {{"logits", Name(p.logits_dtype), "[T, V], rows strided"},
              {"targets", "i32", "[T], -1: none"},
              {"temperature", "f32", "[T]"}};
  c.outputs = {{"logprob", "f32", "[T]"},
               {"entropy", "f32", "[T]"},
               {"max", "f32", "[T]"},
               {"log_sum", "f32", "[T]"}};
  c.rounding_points = {"none in forward: logits are read as they are",
                       fmt::format("dlogits: f32 to {}, once", DTypeName(p.grad_dtype))};
  c.saved_for_backward = {"logits", "max", "log_sum", "entropy"};
  c.errors = {"a target outside [-1, V) names its row",
              "a temperature that is not finite and above 0 names its row"};
  c.invariant_over = RowInvariance();
  c.invariant_over.push_back("tp");
  c.forward_tolerance = {
      -20, -20,
      "f32: log of a sum of V positive terms in short chains; absolute for logprobs near 0"};
  c.gradient_tolerance =
      p.grad_dtype == DType::kF32
          ? Tolerance{-17, -24, "f32: exp of a difference of magnitude up to 2^5"}
          : Tolerance{-8, -24, "bf16: one rounding of dlogits"};
  return c;
}

const OpInfo& Info() {
  static const auto* info = [] {
    auto* op = new OpInfo(RowOpInfo("logprob"));
    for (const auto& [logits, grad] :
         {std::pair(DType::kF32, DType::kBF16), std::pair(DType::kF32, DType::kF32),
          std::pair(DType::kBF16, DType::kBF16)}) {
      op->keys.push_back({.dtype = logits, .out_dtype = grad, .dims = {{"vocab", 300}}});
    }
    op->select = [](const OpKey& key) { return ContractOf(ParamsOf(key)); };
    op->signature = [](const OpKey& key, int64_t rows) {
      const Params p = ParamsOf(key);
      Signature s;
      s.inputs = {RowOperand("logits", p.logits_dtype, {rows, p.vocab}, true)};
      s.inputs[0].scale = 4.0f;
      s.inputs[0].grad_dtype = p.grad_dtype;
      for (Operand& o : TargetOperands(rows, p.vocab)) s.inputs.push_back(std::move(o));
      s.outputs = RowOutputs(rows);
      return s;
    };
    op->forward = [](const Ctx& ctx, const OpKey& key, const ForwardCall& call) {
      Args a;
      a.logits = call.in[0].data();
      BindForward(call, 1, a);
      return Forward(ctx, ParamsOf(key), a);
    };
    op->backward = [](const Ctx& ctx, const OpKey& key, const BackwardCall& call) {
      BackwardArgs a;
      a.logits = call.in[0].data();
      BindBackward(call, 1, a);
      a.dlogits = call.din[0].mutable_data();
      return Backward(ctx, ParamsOf(key), a);
    };
    op->width_dim = "vocab";
    return op;
  }();
  return *info;
}

}  // namespace tare::ops::logprob
