#pragma once

// What mma.cc and the fast kernels share. Not for others.

#include "numerics/mma.h"

namespace tare::numerics::internal {

template <MmaType kType>
const typename MmaStorage<kType>::Type* MmaCodes(const MmaRows& p) {
  using T = typename MmaStorage<kType>::Type;
  return reinterpret_cast<const T*>(FormatOf(kType).bytes == 1
                                        ? static_cast<const void*>(p.codes.data())
                                        : static_cast<const void*>(p.halves.data()));
}

using MmaTileFunction = void (*)(const MmaRows& a, int64_t m0, int64_t m1, const MmaRows& b,
                                 int64_t n0, int64_t n1, int64_t k0, int64_t k1, float* c,
                                 int64_t c_stride);

// Null where this CPU or build has none.
MmaTileFunction MmaFastTile(MmaKernel kernel);

}  // namespace tare::numerics::internal
