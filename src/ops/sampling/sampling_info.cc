// The contract and the registry entry of sampling.

#include "ops/info.h"
#include "ops/sampling/sampling.h"

namespace tare::ops::sampling {
namespace {

Params ParamsOf(const OpKey& key) { return {.vocab = key.dim("vocab"), .logits_dtype = key.dtype}; }

}  // namespace

Contract ContractOf(const Params& p) {
  Contract c;
  c.op = "sampling";
  c.variant = fmt::format("{}-logits", DTypeName(p.logits_dtype));
  // NOLINTBEGIN(bugprone-suspicious-missing-comma): long lines are cut.
  c.formula = {
      "z = f32(logit) / T; T = 0 is greedy: the argmax, lowest id, kept alone, logprob at T = 1",
      "w = u64(exp2((z - max) * log2e) * 2^40), truncated",
      "top-k: the k first in the order value descending, id ascending; +0 and -0 tie",
      "top-p over what top-k kept, mass S: the smallest non-empty prefix in that order with sum w "
      ">= ceil(floor(p * 2^32) * S / 2^32)",
      "min-p over what is left: w >= ceil(floor(min_p * 2^32) * 2^40 / 2^32)",
      "r = the first 64 bits of Philox4x32-10(key = seed, counter = (position, token purpose, "
      "sample, 0)); t = mulhi(r, S_kept)",
      "token = the lowest kept id whose running sum of w in id order exceeds t",
      "logprob = log-softmax of the logprob contract over all ids; processed_logprob over the kept "
      "set, other ids -inf"};
  // NOLINTEND(bugprone-suspicious-missing-comma)
  c.leaves = 8;
  c.block = 128;
  c.inputs = {{"logits", Name(p.logits_dtype), "[B, V], rows strided"},
              {"temperature", "f32", "[B]"},
              {"top_k", "i32", "[B]"},
              {"top_p", "f32", "[B]"},
              {"min_p", "f32", "[B]"},
              {"seed", "u64", "[B]"},
              {"position", "i32", "[B]"},
              {"sample", "i32", "[B]"}};
  c.outputs = {{"token", "i32", "[B]"},
               {"logprob", "f32", "[B]"},
               {"processed_logprob", "f32", "[B]"},
               {"kept", "i32", "[B]"},
               {"candidates", "u8", "[B, ceil(V/8)], bit id % 8 of byte id / 8"}};
  c.rounding_points = {"mass: f32 to integer, toward zero"};
  c.errors = {
      "a NaN logit, a row without a finite maximum, a parameter out of range: each names its row"};
  c.invariant_over = RowInvariance();
  c.forward_tolerance = {-20, -100, "integers are exact; logprobs as in logprob"};
  return c;
}

const OpInfo& Info() {
  static const auto* info = [] {
    auto* op = new OpInfo(RowOpInfo("sampling"));
    for (DType dtype : op->dtypes) {
      op->keys.push_back({.dtype = dtype, .out_dtype = DType::kF32, .dims = {{"vocab", 300}}});
    }
    op->select = [](const OpKey& key) { return ContractOf(ParamsOf(key)); };
    op->signature = [](const OpKey& key, int64_t rows) {
      const Params p = ParamsOf(key);
      Signature s;
      s.inputs = {RowOperand("logits", p.logits_dtype, {rows, p.vocab}),
                  RowOperand("temperature", DType::kF32, {rows}),
                  IndexOperand("top_k", {rows}, 60),
                  RowOperand("top_p", DType::kF32, {rows}),
                  RowOperand("min_p", DType::kF32, {rows}),
                  IndexOperand("seed", {rows}, 1 << 30),
                  IndexOperand("position", {rows}, 4096),
                  IndexOperand("sample", {rows}, 16)};
      s.inputs[0].scale = 2.0f;
      s.inputs[1].fill = Fill::kPositive;
      s.inputs[3].fill = Fill::kUnit;
      s.inputs[4].fill = Fill::kUnit;
      s.outputs = {RowOperand("token", DType::kI32, {rows}),
                   RowOperand("logprob", DType::kF32, {rows}),
                   RowOperand("processed_logprob", DType::kF32, {rows}),
                   RowOperand("kept", DType::kI32, {rows}),
                   RowOperand("candidates", DType::kU8, {rows, (p.vocab + 7) / 8})};
      return s;
    };
    op->forward = [](const Ctx& ctx, const OpKey& key, const ForwardCall& call) -> Status {
      TARE_ASSIGN_OR_RETURN(const std::vector<int32_t> words, OnHost<int32_t>(call.in[5]));
      const std::vector<uint64_t> seeds(words.begin(), words.end());
      // Sets of useful sizes: p in [0.5, 1], min_p up to 1/32.
      TARE_ASSIGN_OR_RETURN(std::vector<float> top_p, OnHost<float>(call.in[3]));
      TARE_ASSIGN_OR_RETURN(std::vector<float> min_p, OnHost<float>(call.in[4]));
      for (float& p : top_p) p = 0.5f + 0.5f * p;
      for (float& p : min_p) p /= 32.0f;
      Args a;
      a.rows = call.rows;
      a.logits = call.in[0].data();
      a.temperature = In<float>(call.in[1]);
      a.top_k = In<int32_t>(call.in[2]);
      TARE_ASSIGN_OR_RETURN(a.top_p, OnDevice(ctx, top_p.data(), call.rows));
      TARE_ASSIGN_OR_RETURN(a.min_p, OnDevice(ctx, min_p.data(), call.rows));
      TARE_ASSIGN_OR_RETURN(a.seed, OnDevice(ctx, seeds.data(), call.rows));
      a.position = In<int32_t>(call.in[6]);
      a.sample = In<int32_t>(call.in[7]);
      a.token = Out<int32_t>(call.out[0]);
      a.logprob = Out<float>(call.out[1]);
      a.processed_logprob = Out<float>(call.out[2]);
      a.kept = Out<int32_t>(call.out[3]);
      a.candidates = Out<uint8_t>(call.out[4]);
      return Forward(ctx, ParamsOf(key), a);
    };
    op->width_dim = "vocab";
    op->propagates_non_finite = false;
    return op;
  }();
  return *info;
}

}  // namespace tare::ops::sampling
