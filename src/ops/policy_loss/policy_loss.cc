#include "ops/policy_loss/policy_loss.h"

#include "numerics/elementary.h"
#include "numerics/lanes.h"
#include "ops/rows.h"

namespace tare::ops::policy_loss {
namespace {

// Everything of one token, forward and backward, so that the two cannot drift apart.
struct Token {
  float loss;      // unweighted
  float dlogprob;  // unweighted
  bool clipped;
};

struct Inputs {
  const float* logprob;
  const float* old_logprob;
  const float* ref_logprob;
  const float* entropy;
  const float* advantage;
};

Token Evaluate(const Params& p, const Inputs& in, int64_t t, bool detached) {
  const float rho = numerics::Exp(in.logprob[t] - in.old_logprob[t]);
  const float a = in.advantage[t];
  const float s1 = rho * a;
  const float low = 1.0f - p.clip_low;
  const float high = 1.0f + p.clip_high;
  const float s2 = (rho < low ? low : rho > high ? high : rho) * a;
  Token token;
  token.clipped = s2 < s1;
  float loss = -(token.clipped ? s2 : s1);
  float gradient = token.clipped ? 0.0f : -(detached ? a : s1);
  if (p.dual_clip > 0.0f && a < 0.0f) {
    const float bound = -(p.dual_clip * a);
    if (bound < loss) {
      loss = bound;
      gradient = 0.0f;
      token.clipped = true;
    }
  }
  if (p.kl != Kl::kNone) {
    const float k = in.logprob[t] - in.ref_logprob[t];
    float value = k;
    float slope = 1.0f;
    if (p.kl == Kl::kK2) {
      value = (0.5f * k) * k;
      slope = k;
    } else if (p.kl == Kl::kK3) {
      const float e = numerics::Expm1(-k);
      value = e + k;
      slope = -e;
    }
    loss = __builtin_fmaf(p.kl_coef, value, loss);
    gradient = __builtin_fmaf(p.kl_coef, slope, gradient);
  }
  if (in.entropy != nullptr) loss = __builtin_fmaf(-p.entropy_coef, in.entropy[t], loss);
  token.loss = loss;
  token.dlogprob = gradient;
  return token;
}

// The weight of a token: an f64 quotient of integers, rounded once.
float WeightOf(const Params& p, int64_t global_count, const int32_t* sequence_tokens, int64_t t) {
  switch (p.normalise) {
    case Normalise::kToken:
      return static_cast<float>(1.0 / static_cast<double>(global_count));
    case Normalise::kSequence:
      return static_cast<float>(
          1.0 / (static_cast<double>(global_count) * static_cast<double>(sequence_tokens[t])));
    case Normalise::kConstant:
      return 1.0f / p.divisor;
  }
  return 0.0f;
}

Status Check(const Params& p, int64_t rows, const Inputs& in, const uint8_t* mask,
             int64_t global_count, const int32_t* sequence_tokens) {
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
  for (int64_t t = 0; t < rows; ++t) {
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
  TARE_RETURN_IF_ERROR(CheckCpu("policy_loss", ctx));
  const Inputs in = {args.logprob, args.old_logprob, args.ref_logprob, args.entropy,
                     args.advantage};
  TARE_RETURN_IF_ERROR(
      Check(params, args.rows, in, args.mask, args.global_count, args.sequence_tokens));
  TARE_RETURN_IF_ERROR(CheckUnits(args.units, args.rows).Annotate("policy_loss"));
  TARE_RETURN_IF_ERROR(CheckPointer("policy_loss", "loss", args.loss, args.rows));
  if (args.rows > 0 && (params.entropy_coef == 0.0f) != (args.entropy == nullptr)) {
    return InvalidArgument("policy_loss: entropy must be {}",
                           params.entropy_coef == 0.0f ? "null at entropy_coef 0" : "given");
  }
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
      losses[static_cast<size_t>(t)] = CanonicalNanOr(loss);
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
  TARE_RETURN_IF_ERROR(CheckCpu("policy_loss", ctx));
  const Inputs in = {args.logprob, args.old_logprob, args.ref_logprob, nullptr, args.advantage};
  TARE_RETURN_IF_ERROR(
      Check(params, args.rows, in, args.mask, args.global_count, args.sequence_tokens));
  TARE_RETURN_IF_ERROR(CheckPointer("policy_loss", "dlogprob", args.dlogprob, args.rows));
  if (args.rows > 0 && (params.entropy_coef == 0.0f) != (args.dentropy == nullptr)) {
    return InvalidArgument("policy_loss: dentropy must be {}",
                           params.entropy_coef == 0.0f ? "null at entropy_coef 0" : "given");
  }
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
