#pragma once

// The scalar steps of the attention contract that the plain loops and the CUDA kernels share.

#include "numerics/elementary.h"

namespace tare::ops::attention {

inline constexpr float kLog2e = 0x1.715476p+0f;

// A tile moves a row's reference only when its largest score would exceed 2^kSlack. Far below the
// 2^28 where Probability stops, far above what scores do; so it moves in a split's first tile and
// then almost never, and a kernel may look for the maximum only where a row sum has passed
// 2^kSlack.
inline constexpr float kSlack = 14.0f;

// The reference of a row after a tile whose largest score is mc (times c): an integer, so that
// every later rescaling is by an exact power of two. Where it would be infinite it is NaN, and so
// is the row then. REQUIRES: the row sees a key of the tile.
TARE_HD float NextReference(float r, float mc) {
  if (!(mc <= r + kSlack)) {
#ifdef __CUDA_ARCH__
    r = ceilf(mc);
#else
    r = __builtin_ceilf(mc);
#endif
  }
  return numerics::Sub(r, r) == 0.0f ? r : numerics::CanonicalNan();
}

// What an old sum is multiplied by when its reference moves.
TARE_HD float Rescale(float from, float to) { return numerics::Exp2(numerics::Sub(from, to)); }

// What Probability adds to a score for reference r.
TARE_HD float ScoreOffset(float r) { return numerics::Mul(numerics::Sub(100.0f, r), 0x1p-7f); }

// The unrounded P of a score, between 2^-100 and 2^28: y = s * c - r, brought from [-100, 28] to
// [0, 1] and clamped there (one instruction of a GPU), then exp2_p's polynomial. c7 is c / 128. A
// NaN score counts as the least one.
TARE_HD float Probability(float s, float c7, float offset) {
  constexpr float kMagic = 12582912.0f - 100.0f;  // 1.5 * 2^23: adding rounds to an integer
#ifdef __CUDA_ARCH__
  // The same numbers divided by 128, the polynomial's coefficients multiplied by its powers: all of
  // them exact, so the bits are those below, and two of the operations read fewer registers.
  constexpr float kMagic7 = kMagic * 0x1p-7f;
  const float y = __saturatef(numerics::Fma(s, c7, offset));
  const float t = numerics::Add(y, kMagic7);
  const float f = numerics::Sub(y, numerics::Sub(t, kMagic7));
  float p = 0x1.c2a254p-5f * 0x1p21f;
  p = numerics::Fma(p, f, 0x1.f00c4cp-3f * 0x1p14f);
  p = numerics::Fma(p, f, 0x1.62f5fap-1f * 0x1p7f);
  p = numerics::Fma(p, f, 1.0f);
#else
  float y = numerics::Fma(s, c7, offset);
  y = y > 0.0f ? y : 0.0f;
  y = y < 1.0f ? y : 1.0f;
  const float t = numerics::Fma(y, 128.0f, kMagic);
  const float f = numerics::Fma(y, 128.0f, -numerics::Sub(t, kMagic));
  float p = 0x1.c2a254p-5f;
  p = numerics::Fma(p, f, 0x1.f00c4cp-3f);
  p = numerics::Fma(p, f, 0x1.62f5fap-1f);
  p = numerics::Fma(p, f, 1.0f);
#endif
  return numerics::FloatOf(numerics::BitsOf(p) + (numerics::BitsOf(t) << 23));
}

// The backward's P, from lse2. A NaN stays one.
TARE_HD float BackwardProbability(float s, float c, float lse2) {
  const float x = numerics::Fma(s, c, -lse2);
  return numerics::Exp2P(x < -125.0f ? -125.0f : x);
}

}  // namespace tare::ops::attention
