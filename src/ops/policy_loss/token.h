#pragma once

// One token of the policy loss, forward and backward, on the host and on a device, so that the four
// cannot drift apart.

#include "numerics/elementary.h"
#include "ops/policy_loss/policy_loss.h"

namespace tare::ops::policy_loss {

struct Token {
  float loss;      // unweighted
  float dlogprob;  // unweighted
  bool clipped;
};

struct TokenInputs {
  const float* logprob;
  const float* old_logprob;
  const float* ref_logprob;
  const float* entropy;
  const float* advantage;
};

TARE_HD Token Evaluate(const Params& p, const TokenInputs& in, int64_t t, bool detached) {
  using namespace numerics;  // NOLINT(google-build-using-namespace)
  const float rho = Exp(Sub(in.logprob[t], in.old_logprob[t]));
  const float a = in.advantage[t];
  const float s1 = Mul(rho, a);
  const float low = Sub(1.0f, p.clip_low);
  const float high = Add(1.0f, p.clip_high);
  const float s2 = Mul(rho < low ? low : rho > high ? high : rho, a);
  Token token;
  token.clipped = s2 < s1;
  float loss = -(token.clipped ? s2 : s1);
  float gradient = token.clipped ? 0.0f : -(detached ? a : s1);
  if (p.dual_clip > 0.0f && a < 0.0f) {
    const float bound = -Mul(p.dual_clip, a);
    if (bound < loss) {
      loss = bound;
      gradient = 0.0f;
      token.clipped = true;
    }
  }
  if (p.kl != Kl::kNone) {
    const float k = Sub(in.logprob[t], in.ref_logprob[t]);
    float value = k;
    float slope = 1.0f;
    if (p.kl == Kl::kK2) {
      value = Mul(Mul(0.5f, k), k);
      slope = k;
    } else if (p.kl == Kl::kK3) {
      const float e = Expm1(-k);
      value = Add(e, k);
      slope = -e;
    }
    loss = Fma(p.kl_coef, value, loss);
    gradient = Fma(p.kl_coef, slope, gradient);
  }
  if (in.entropy != nullptr) loss = Fma(-p.entropy_coef, in.entropy[t], loss);
  token.loss = loss;
  token.dlogprob = gradient;
  return token;
}

// The weight of a token: an f64 quotient of integers, rounded once.
TARE_HD float WeightOf(const Params& p, int64_t global_count, const int32_t* sequence_tokens,
                       int64_t t) {
  using namespace numerics;  // NOLINT(google-build-using-namespace)
  switch (p.normalise) {
    case Normalise::kToken:
      return static_cast<float>(Div(1.0, static_cast<double>(global_count)));
    case Normalise::kSequence:
      return static_cast<float>(Div(
          1.0, Mul(static_cast<double>(global_count), static_cast<double>(sequence_tokens[t]))));
    case Normalise::kConstant:
      return Div(1.0f, p.divisor);
  }
  return 0.0f;
}

}  // namespace tare::ops::policy_loss
