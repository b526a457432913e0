#pragma once

// Reductions over a row, in the order that the contracts name.
//
// lanes(L): element i goes to lane i mod L; a lane folds its elements in ascending order, starting
// from +0 for sums and -inf for maxima; lanes are combined by a binary tree that adds lane j and
// lane j + L/2, then halves, down to one. So any vector width that divides L gives the same bits,
// and the loops below are written so that the compiler vectorises them over lanes.

#include <cstdint>

#include "numerics/fp.h"

namespace tare::numerics {

// Adds lane[j] and lane[j + half] for half = L/2, L/4, ... 1. REQUIRES: L a power of two.
template <int L>
TARE_HD float LanesTree(float* lane) {
  static_assert(L > 0 && (L & (L - 1)) == 0, "L is a power of two");
  for (int half = L / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lane[j] = Add(lane[j], lane[j + half]);
  }
  return lane[0];
}

// A partly folded row: elements may come in pieces, as long as they come in order. `at` is the
// index of the next element.
template <int L>
struct LanesState {
  float lane[L];
  int64_t at;

  TARE_HD void Reset() {
    for (int j = 0; j < L; ++j) lane[j] = 0.0f;
    at = 0;
  }
  // lane = fold(lane, i) over i in [0, n), the i-th new element. Fold is float(float acc, int64_t
  // i).
  template <class Fold>
  TARE_HD void Run(int64_t n, Fold fold) {
    int64_t i = 0;
    for (; i < n && at % L != 0; ++i, ++at) lane[at % L] = fold(lane[at % L], i);
    for (; i + L <= n; i += L, at += L) {
      for (int j = 0; j < L; ++j) lane[j] = fold(lane[j], i + j);
    }
    for (; i < n; ++i, ++at) lane[at % L] = fold(lane[at % L], i);
  }
  // Ends the row: the lanes are used up.
  TARE_HD float Sum() { return LanesTree<L>(lane); }
};

// Sum of x[0..n).
template <int L>
TARE_HD float LanesSum(const float* x, int64_t n) {
  LanesState<L> s;
  s.Reset();
  s.Run(n, [x](float acc, int64_t i) { return Add(acc, x[i]); });
  return s.Sum();
}

// Sum of x[i] * y[i], one FMA per element.
template <int L>
TARE_HD float LanesDot(const float* x, const float* y, int64_t n) {
  LanesState<L> s;
  s.Reset();
  s.Run(n, [x, y](float acc, int64_t i) { return Fma(x[i], y[i], acc); });
  return s.Sum();
}

template <int L>
TARE_HD float LanesSumSquares(const float* x, int64_t n) {
  return LanesDot<L>(x, x, n);
}

// A maximum needs no order; NaN propagates, +-0 ties give +0, an empty row gives -inf.
TARE_HD float RowMax(const float* x, int64_t n) {
  float m = FloatOf(0xff800000u);
  for (int64_t i = 0; i < n; ++i) m = MaxOf(m, x[i]);
  return m;
}

// The balanced binary tree of neighbours: ((p0+p1)+(p2+p3))+..., for the S partial sums of a cut
// contraction and for data-parallel runs. Overwrites p. REQUIRES: n a power of two.
template <class T>
TARE_HD T NeighbourTree(T* p, int64_t n) {
  for (int64_t width = 1; width < n; width *= 2) {
    for (int64_t j = 0; j + width < n; j += 2 * width) p[j] = Add(p[j], p[j + width]);
  }
  return p[0];
}

// Sum in quad-lane order, as a tensor-core fragment holds a row: columns 8b+2q and 8b+2q+1 belong
// to lane q, a lane adds its columns with b ascending, even column first; then (l0+l1)+(l2+l3).
TARE_HD float QuadLaneSum(const float* x, int64_t n) {
  float lane[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int64_t i = 0; i < n; ++i) lane[(i % 8) / 2] = Add(lane[(i % 8) / 2], x[i]);
  return Add(Add(lane[0], lane[1]), Add(lane[2], lane[3]));
}

}  // namespace tare::numerics
