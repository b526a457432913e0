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

// What stands in the chain for a zero, with its sign, and what A is multiplied by
// (mma_chain-inl.h).
template <class T>
inline constexpr T kChainZero = static_cast<T>(sizeof(T) == 8 ? 0x1p-500 : 0x1p-80);
template <class T>
inline constexpr T kChainOff = static_cast<T>(sizeof(T) == 8 ? 1 + 0x1p-29 : 1 + 0x1p-16);

// The signs of a group of a panel of B, [64]: bit i is that of element i of the group.
inline const uint32_t* MmaSigns(const MmaRows& b, int64_t panel, int64_t k, int group) {
  return &b.signs[static_cast<size_t>((panel * b.padded_k + k) / group * kMmaPanel)];
}

using MmaTileFunction = void (*)(const MmaRows& a, int64_t m0, int64_t m1, const MmaRows& b,
                                 int64_t n0, int64_t n1, int64_t k0, int64_t k1, float* c,
                                 int64_t c_stride);

// Null where this CPU or build has none.
MmaTileFunction MmaFastTile(MmaKernel kernel);

}  // namespace tare::numerics::internal
