#pragma once

// Shared-memory matrix descriptors of sm90.cuh in two steps, for loops that issue many matrix
// instructions: the low word of a tile once, then each instruction's by adding a constant. Written
// in one step, ptxas masks and shifts every address anew, between the instructions.

#include <cstdint>

namespace tare::ops::sm90 {

// The same value, and known to be the same in all lanes: what follows from it is computed once a
// warp and needs no move before a matrix instruction. REQUIRES: all lanes have it.
__device__ __forceinline__ int Uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }

// Low word of DescriptorKMajor(address), and of DescriptorMnMajor(address, chunk_bytes).
__device__ __forceinline__ uint32_t DescriptorLow(uint32_t address, uint32_t chunk_bytes = 16) {
  return ((address & 0x3FFFF) >> 4) | (((chunk_bytes & 0x3FFFF) >> 4) << 16);
}
// The descriptor `bytes` further. REQUIRES: the address stays in the shared window.
__device__ __forceinline__ uint64_t Descriptor(uint32_t low, int bytes) {
  return (uint64_t{(1u << 30) | (1024 >> 4)} << 32) |
         static_cast<uint64_t>(low + static_cast<uint32_t>(bytes / 16));
}

}  // namespace tare::ops::sm90
