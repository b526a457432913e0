// The contract and the registry entry of policy_loss.

#include "ops/info.h"
#include "ops/policy_loss/policy_loss.h"

namespace tare::ops::policy_loss {
namespace {

Params ParamsOf(const OpKey& key) {
  Params p;
  p.clip_high = 0.28f;
  p.kl_coef = 0.05f;
  p.entropy_coef = 0.01f;
  p.kl = key.variant.starts_with("k1")   ? Kl::kK1
         : key.variant.starts_with("k2") ? Kl::kK2
                                         : Kl::kK3;
  if (key.variant.ends_with("sequence")) p.normalise = Normalise::kSequence;
  if (key.variant.ends_with("constant")) {
    p.normalise = Normalise::kConstant;
    p.divisor = 64.0f;
  }
  if (key.variant.ends_with("dual")) p.dual_clip = 1.5f;
  return p;
}

constexpr int64_t kGlobalCount = 100;

}  // namespace

Contract ContractOf(const Params& p) {
  Contract c;
  c.op = "policy_loss";
  c.version = 2;  // 2: exp keeps the rounding of the reduced argument
  const char* kl[] = {"no-kl", "k1", "k2", "k3"};
  const char* normalise[] = {"token", "sequence", "constant"};
  c.variant = fmt::format("{}-{}{}", kl[static_cast<int>(p.kl)],
                          normalise[static_cast<int>(p.normalise)], p.dual_clip > 0 ? "-dual" : "");
  c.formula = {
      "a masked token contributes +0 by selection; the rest is for valid tokens",
      "rho = exp(logprob - old); s1 = rho * A; s2 = clamp(rho, 1 - clip_low, 1 + clip_high) * A",
      "pg = -s2 where s2 < s1, else -s1"};
  if (p.dual_clip > 0) c.formula.push_back("where A < 0: pg = min(pg, -(dual_clip * A))");
  if (p.kl != Kl::kNone) {
    const char* formulas[] = {"", "kl = k", "kl = (0.5 * k) * k", "kl = expm1(-k) + k"};
    c.formula.push_back(fmt::format("k = logprob - ref; {}; loss = fma(kl_coef, kl, pg)",
                                    formulas[static_cast<int>(p.kl)]));
  }
  if (p.entropy_coef != 0) c.formula.push_back("loss = fma(-entropy_coef, entropy, loss)");
  const char* weights[] = {
      "f32(1 / N), N the valid tokens of the global batch",
      "f32(1 / (N * n)), N sequences of the global batch, n valid tokens of the sequence",
      "1 / divisor"};
  c.formula.push_back(
      fmt::format("token_loss = loss * {}", weights[static_cast<int>(p.normalise)]));
  c.formula.push_back(
      "total: per unit lanes(32) over its tokens in f32, each added in f64, units ascending");
  c.backward = {"g = -s1, +0 where clipped; plus kl_coef * (k1: 1, k2: k, k3: -expm1(-k)) by fma",
                "dlogprob = g * (weight * dloss)", "dentropy = -entropy_coef * (weight * dloss)"};
  c.token_lanes = 32;
  c.unit_rows = kUnitRows;
  c.constants = {{"clip_low", HexWord(p.clip_low)},         {"clip_high", HexWord(p.clip_high)},
                 {"dual_clip", HexWord(p.dual_clip)},       {"kl_coef", HexWord(p.kl_coef)},
                 {"entropy_coef", HexWord(p.entropy_coef)}, {"divisor", HexWord(p.divisor)}};
  c.inputs = {{"logprob", "f32", "[T]"},     {"old_logprob", "f32", "[T]"},
              {"ref_logprob", "f32", "[T]"}, {"entropy", "f32", "[T]"},
              {"advantage", "f32", "[T]"},   {"mask", "u8", "[T]"}};
  c.outputs = {{"token_loss", "f32", "[T]"}, {"loss", "f64", "[1], added to"}};
  c.rounding_points = {"none below f32"};
  c.saved_for_backward = {"logprob", "old_logprob", "ref_logprob", "advantage", "mask"};
  c.errors = {"a loss or gradient at a valid token that is not finite names the token",
              "a mask value other than 0 or 1"};
  c.invariant_over = RowInvariance();
  c.forward_tolerance = {-20, -30, "f32: one exp and some products"};
  c.gradient_tolerance = {-20, -30, "f32: one exp and some products"};
  return c;
}

const OpInfo& Info() {
  static const auto* info = [] {
    auto* op = new OpInfo(RowOpInfo("policy_loss"));
    op->dtypes = {DType::kF32};
    for (const char* variant :
         {"k3-token", "k1-token", "k2-sequence", "k3-constant", "k3-token-dual"}) {
      op->keys.push_back({.dtype = DType::kF32, .out_dtype = DType::kF32, .variant = variant});
    }
    op->select = [](const OpKey& key) { return ContractOf(ParamsOf(key)); };
    op->signature = [](const OpKey&, int64_t rows) {
      Signature s;
      for (const char* name : {"logprob", "old_logprob", "ref_logprob"}) {
        s.inputs.push_back(RowOperand(name, DType::kF32, {rows}, name[0] == 'l'));
        s.inputs.back().fill = Fill::kLogprob;
        s.inputs.back().scale = 0.4f;
      }
      s.inputs.push_back(RowOperand("entropy", DType::kF32, {rows}, true));
      s.inputs.push_back(RowOperand("advantage", DType::kF32, {rows}));
      s.inputs.push_back(RowOperand("mask", DType::kU8, {rows}));
      s.inputs.back().fill = Fill::kMask;
      s.inputs.push_back(IndexOperand("sequence_tokens_less_one", {rows}, 30));
      s.outputs = {RowOperand("token_loss", DType::kF32, {rows}),
                   SharedOperand("loss", DType::kF64, {1}, true)};
      s.outputs[1].grad_dtype = DType::kF32;
      return s;
    };
    op->forward = [](const Ctx& ctx, const OpKey& key, const ForwardCall& call) -> Status {
      TARE_ASSIGN_OR_RETURN(std::vector<int32_t> lengths, OnHost<int32_t>(call.in[6]));
      for (int32_t& n : lengths) ++n;
      const TokenUnit unit = {0, call.rows};
      Args a;
      a.rows = call.rows;
      a.logprob = In<float>(call.in[0]);
      a.old_logprob = In<float>(call.in[1]);
      a.ref_logprob = In<float>(call.in[2]);
      a.entropy = In<float>(call.in[3]);
      a.advantage = In<float>(call.in[4]);
      a.mask = In<uint8_t>(call.in[5]);
      a.global_count = kGlobalCount;
      TARE_ASSIGN_OR_RETURN(a.sequence_tokens, OnDevice(ctx, lengths.data(), call.rows));
      if (call.rows > 0) a.units = {&unit, 1};
      a.token_loss = Out<float>(call.out[0]);
      a.loss = Out<double>(call.out[1]);
      return Forward(ctx, ParamsOf(key), a);
    };
    op->backward = [](const Ctx& ctx, const OpKey& key, const BackwardCall& call) -> Status {
      TARE_ASSIGN_OR_RETURN(std::vector<int32_t> lengths, OnHost<int32_t>(call.in[6]));
      for (int32_t& n : lengths) ++n;
      BackwardArgs a;
      a.rows = call.rows;
      a.logprob = In<float>(call.in[0]);
      a.old_logprob = In<float>(call.in[1]);
      a.ref_logprob = In<float>(call.in[2]);
      a.advantage = In<float>(call.in[4]);
      a.mask = In<uint8_t>(call.in[5]);
      a.global_count = kGlobalCount;
      TARE_ASSIGN_OR_RETURN(a.sequence_tokens, OnDevice(ctx, lengths.data(), call.rows));
      TARE_ASSIGN_OR_RETURN(const std::vector<float> dloss, OnHost<float>(call.dout[1]));
      a.dloss = dloss[0];
      a.dlogprob = Out<float>(call.din[0]);
      a.dentropy = Out<float>(call.din[3]);
      return Backward(ctx, ParamsOf(key), a);
    };
    op->propagates_non_finite = false;
    return op;
  }();
  return *info;
}

}  // namespace tare::ops::policy_loss
