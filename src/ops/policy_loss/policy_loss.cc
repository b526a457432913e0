#include "ops/policy_loss/policy_loss.h"
#include "ops/policy_loss/policy_loss_cuda.h"

#include "numerics/lanes.h"
#include "ops/policy_loss/token.h"
#include "ops/cuda_entry.h"
#include "ops/rows.h"

namespace tare::ops::policy_loss {
namespace {

Status Check(const Ctx& ctx, const Params& p, int64_t rows, const TokenInputs& in,
             const uint8_t* mask, int64_t global_count, const int32_t* sequence_tokens) {
  const char* op = "policy_loss";
  TARE_RETURN_IF_ERROR(CheckRows(op, rows));
  if (!(p.clip_low >= 0.0f && p.clip_low < 1.0f))
    return InvalidArgument("{}: clip_low is {}; [0, 1)", op, p.clip_low);
  if (!(p.clip_high >= 0.0f))
    return InvalidArgument("{}: clip_high is {}; at least 0", op, p.clip_high);
  if (p.dual_clip != 0.0f && !(p.dual_clip > 1.0f)) {
    return InvalidArgument("{}: dual_clip is {}; 0 (off) or above 1", op, p.dual_clip);
  }
  if (!std::isfinite(p.kl_coef) || !std::isfinite(p.entropy_coef)) {
    return InvalidArgument("{}: kl_coef is {} and entropy_coef {}; finite numbers", op, p.kl_coef,
                           p.entropy_coef);
  }
  TARE_RETURN_IF_ERROR(CheckPointer(op, "logprob", in.logprob, rows));
  TARE_RETURN_IF_ERROR(CheckPointer(op, "old_logprob", in.old_logprob, rows));
  TARE_RETURN_IF_ERROR(CheckPointer(op, "advantage", in.advantage, rows));
  TARE_RETURN_IF_ERROR(CheckPointer(op, "mask", mask, rows));
  if (rows > 0 && (p.kl == Kl::kNone) != (in.ref_logprob == nullptr)) {
    return InvalidArgument("{}: ref_logprob must be {}", op,
                           p.kl == Kl::kNone ? "null without a KL term" : "given");
  }
  if (p.normalise == Normalise::kConstant) {
    if (!(p.divisor > 0.0f) || !std::isfinite(p.divisor)) {
      return InvalidArgument("{}: divisor is {}; a finite number above 0", op, p.divisor);
    }
  } else if (global_count < 1 && rows > 0) {
    return InvalidArgument("{}: global_count is {}; at least 1", op, global_count);
  }
  if (p.normalise == Normalise::kSequence)
    TARE_RETURN_IF_ERROR(CheckPointer(op, "sequence_tokens", sequence_tokens, rows));
  for (int64_t t = 0; IsHost(ctx) && t < rows; ++t) {
    if (mask[t] > 1)
      return InvalidArgument("{}: the mask of token {} is {}; 0 or 1", op, t, mask[t]);
    if (mask[t] == 1 && p.normalise == Normalise::kSequence && sequence_tokens[t] < 1) {
      return InvalidArgument("{}: token {} counts, but its sequence has {} valid tokens", op, t,
                             sequence_tokens[t]);
    }
  }
  return Ok();
}

int64_t CountOf(const Ctx& ctx, int64_t rows, const uint8_t* mask, int64_t global_count) {
  if (!fault::Active(kLocalCount, ctx.side)) return global_count;
  int64_t count = 0;
  for (int64_t t = 0; t < rows; ++t) count += mask[t];
  return std::max<int64_t>(1, count);
}

}  // namespace

Status Forward(const Ctx& ctx, const Params& params, const Args& args) {
  TARE_RETURN_IF_ERROR(CheckDevice("policy_loss", ctx));
  const TokenInputs in = {args.logprob, args.old_logprob, args.ref_logprob, args.entropy,
                          args.advantage};
  TARE_RETURN_IF_ERROR(
      Check(ctx, params, args.rows, in, args.mask, args.global_count, args.sequence_tokens));
  TARE_RETURN_IF_ERROR(CheckUnits(args.units, args.rows).Annotate("policy_loss"));
  TARE_RETURN_IF_ERROR(CheckPointer("policy_loss", "loss", args.loss, args.rows));
  if (args.rows > 0 && (params.entropy_coef == 0.0f) != (args.entropy == nullptr)) {
    return InvalidArgument("policy_loss: entropy must be {}",
                           params.entropy_coef == 0.0f ? "null at entropy_coef 0" : "given");
  }
  TARE_WITH_CUDA_RETURN("policy_loss", ctx, ForwardCuda(ctx, params, args));
  const bool multiply = fault::Active(kMaskByMultiply, ctx.side);
  const int64_t count = CountOf(ctx, args.rows, args.mask, args.global_count);
  std::vector<float> losses(static_cast<size_t>(args.rows), 0.0f);
  std::vector<uint8_t> clipped(static_cast<size_t>(args.rows), 0);
  ctx.pool->ParallelRanges(args.rows, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (args.mask[t] == 0 && !multiply) continue;
      const Token token = Evaluate(params, in, t, false);
      float loss = token.loss * WeightOf(params, count, args.sequence_tokens, t);
      if (multiply) loss *= static_cast<float>(args.mask[t]);
      losses[static_cast<size_t>(t)] = numerics::Canonical(loss);
      clipped[static_cast<size_t>(t)] = token.clipped && args.mask[t] != 0 ? 1 : 0;
    }
  });
  if (!multiply) {
    for (int64_t t = 0; t < args.rows; ++t) {
      if (!std::isfinite(losses[static_cast<size_t>(t)])) {
        return InvalidArgument(
            "policy_loss: the loss of token {} is not finite (logprob {}, old {}, advantage {})", t,
            args.logprob[t], args.old_logprob[t], args.advantage[t]);
      }
    }
  }
  if (args.token_loss != nullptr) std::copy(losses.begin(), losses.end(), args.token_loss);
  for (const TokenUnit& unit : args.units) {
    *args.loss +=
        static_cast<double>(numerics::LanesSum<32>(losses.data() + unit.begin, unit.rows));
  }
  int64_t valid = 0, cut = 0;
  for (int64_t t = 0; t < args.rows; ++t) {
    valid += args.mask[t];
    cut += clipped[static_cast<size_t>(t)];
  }
  if (args.valid_tokens != nullptr) *args.valid_tokens = valid;
  if (args.clipped_tokens != nullptr) *args.clipped_tokens = cut;
  return Ok();
}

Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args) {
  TARE_RETURN_IF_ERROR(CheckDevice("policy_loss", ctx));
  const TokenInputs in = {args.logprob, args.old_logprob, args.ref_logprob, nullptr,
                          args.advantage};
  TARE_RETURN_IF_ERROR(
      Check(ctx, params, args.rows, in, args.mask, args.global_count, args.sequence_tokens));
  TARE_RETURN_IF_ERROR(CheckPointer("policy_loss", "dlogprob", args.dlogprob, args.rows));
  if (args.rows > 0 && (params.entropy_coef == 0.0f) != (args.dentropy == nullptr)) {
    return InvalidArgument("policy_loss: dentropy must be {}",
                           params.entropy_coef == 0.0f ? "null at entropy_coef 0" : "given");
  }
  TARE_WITH_CUDA_RETURN("policy_loss", ctx, BackwardCuda(ctx, params, args));
  const bool multiply = fault::Active(kMaskByMultiply, ctx.side);
  const bool detached = fault::Active(kDetached, ctx.side);
  const int64_t count = CountOf(ctx, args.rows, args.mask, args.global_count);
  ctx.pool->ParallelRanges(args.rows, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float dlogprob = 0.0f, dentropy = 0.0f;
      if (args.mask[t] != 0 || multiply) {
        const float weight = WeightOf(params, count, args.sequence_tokens, t) * args.dloss;
        dlogprob = Evaluate(params, in, t, detached).dlogprob * weight;
        dentropy = -params.entropy_coef * weight;
        if (multiply) dlogprob *= static_cast<float>(args.mask[t]);
        if (multiply) dentropy *= static_cast<float>(args.mask[t]);
      }
      PutFloat(dlogprob, args.dlogprob + t);
      if (args.dentropy != nullptr) PutFloat(dentropy, args.dentropy + t);
    }
  });
  if (multiply) return Ok();
  for (int64_t t = 0; t < args.rows; ++t) {
    if (!std::isfinite(args.dlogprob[t])) {
      return InvalidArgument(
          "policy_loss: the gradient of token {} is not finite (logprob {}, old {}, advantage {})",
          t, args.logprob[t], args.old_logprob[t], args.advantage[t]);
    }
  }
  return Ok();
}

}  // namespace tare::ops::policy_loss
