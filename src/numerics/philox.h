#pragma once

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC11):
// a counter-based generator, so that a sample is a pure function of its key and counter.
//
// Tare's use (docs/numerics.md): key = the request's 64-bit seed, counter = (position, purpose,
// sample index within the request, 0). Nothing of the batch enters.

#include <cstdint>

#include "tensor/hd.h"

namespace tare::numerics {

struct PhiloxBlock {
  uint32_t v[4];
  // The first and the second 64 random bits.
  TARE_HD uint64_t Low64() const { return (static_cast<uint64_t>(v[1]) << 32) | v[0]; }
  TARE_HD uint64_t High64() const { return (static_cast<uint64_t>(v[3]) << 32) | v[2]; }
};

TARE_HD PhiloxBlock Philox4x32(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(0xd2511f53u) * counter.v[0];
    const uint64_t b = static_cast<uint64_t>(0xcd9e8d57u) * counter.v[2];
    counter = PhiloxBlock{
        {static_cast<uint32_t>(b >> 32) ^ counter.v[1] ^ key0, static_cast<uint32_t>(b),
         static_cast<uint32_t>(a >> 32) ^ counter.v[3] ^ key1, static_cast<uint32_t>(a)}};
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return counter;
}

// What a random number is for, so that two uses at one position never share bits.
enum class RandomPurpose : uint32_t { kToken = 0, kInit = 1, kDropout = 2, kTest = 3 };

TARE_HD PhiloxBlock RandomAt(uint64_t seed, uint32_t position, RandomPurpose purpose,
                             uint32_t sample) {
  return Philox4x32(PhiloxBlock{{position, static_cast<uint32_t>(purpose), sample, 0}},
                    static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

// The high 64 bits of a * b.
TARE_HD uint64_t MulHi64(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

}  // namespace tare::numerics
