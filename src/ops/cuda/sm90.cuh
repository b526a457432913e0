#pragma once

// Thin wrappers over the Hopper instructions that the kernels of this room use: mbarrier, the bulk
// tensor copy engine (TMA), warpgroup fences and register reallocation. One wrapper per
// instruction, named after it; no policy. The matrix instruction itself is in wgmma.cuh.
//
// Shared-memory addresses are 32-bit values in the shared window (SharedAddress).

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace tare::ops::sm90 {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The address of the same shared-memory offset in the CTA `rank` of this cluster.
__device__ __forceinline__ uint32_t MapToRank(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void ClusterSync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// True in one lane of a converged warp. Under this predicate ptxas knows that a copy's operands are
// uniform; under `threadIdx.x == 0` it wraps every copy in a loop over lanes.
__device__ __forceinline__ bool ElectOne() {
  uint32_t elected;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(elected));
  return elected != 0;
}

// mbarrier -----------------------------------------------------------------------------------

__device__ __forceinline__ void BarrierInit(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes barrier initialisation visible to the copy engine and to the other CTAs of the cluster.
__device__ __forceinline__ void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void BarrierArriveExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void BarrierArrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at a barrier of any CTA of the cluster (address from MapToRank). Default scope: what it
// releases are reads by the matrix unit that have completed, not memory writes; an explicit
// `.release.cluster` would cost a device-wide fence for each stage.
__device__ __forceinline__ void BarrierArriveRemote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits for the phase of the given parity to complete.
__device__ __forceinline__ void BarrierWait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (done == 0);
}

// A barrier among `threads` threads of the CTA (hardware barrier `id`, 1 to 15).
__device__ __forceinline__ void NamedBarrier(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at such a barrier without waiting for it.
__device__ __forceinline__ void NamedBarrierArrive(uint32_t id, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Tensor copies ------------------------------------------------------------------------------

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Box at element coordinates (x innermost, y) into shared memory; completes on `barrier`.
__device__ __forceinline__ void TensorLoad(uint32_t destination, const CUtensorMap* map,
                                           uint32_t barrier, int32_t x, int32_t y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%3, %4}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

// A box of three dimensions.
__device__ __forceinline__ void TensorLoad3d(uint32_t destination, const CUtensorMap* map,
                                             uint32_t barrier, int32_t x, int32_t y, int32_t z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%3, %4, %5}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// The same box into the same shared-memory offset of every CTA in `mask`; each one's barrier at the
// offset of `barrier` is told of its own bytes.
__device__ __forceinline__ void TensorLoadMulticast(uint32_t destination, const CUtensorMap* map,
                                                    uint32_t barrier, int32_t x, int32_t y,
                                                    uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::"
      "cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(mask)
      : "memory");
}

// Box from shared memory to global; elements outside the tensor are not written.
__device__ __forceinline__ void TensorStore(const CUtensorMap* map, uint32_t source, int32_t x,
                                            int32_t y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(source), "r"(x), "r"(y)
      : "memory");
}

__device__ __forceinline__ void BulkCommit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until at most kPending store groups of this thread still read their shared memory.
template <int kPending>
__device__ __forceinline__ void BulkWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Orders this thread's ordinary shared-memory writes before later reads by the copy engine.
__device__ __forceinline__ void FenceProxyAsync() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Four 8x8 matrices of 16-bit elements to shared memory; lane l gives the address of row l % 8 of
// matrix l / 8.
__device__ __forceinline__ void StoreMatrix4(uint32_t address, uint32_t r0, uint32_t r1,
                                             uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// Warpgroups ---------------------------------------------------------------------------------

template <int kRegisters>
__device__ __forceinline__ void RegistersIncrease() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void RegistersDecrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of an accumulator across the point where it is called.
template <int kCount>
__device__ __forceinline__ void PinRegisters(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Shared-memory matrix descriptors, 128-byte swizzle. A tile holds rows of 128 bytes (64 elements
// of 16 bits); eight rows make one swizzle atom of 1,024 bytes, and tiles start at a multiple of
// that.
//
// Contraction index innermost ("K-major"): a step of 16 elements advances the address by 32 bytes.
__device__ __forceinline__ uint64_t DescriptorKMajor(uint32_t address) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16) |
         ((address & 0x3FFFF) >> 4);
}
// Row index innermost ("MN-major"): each row of 128 bytes is one k and 64 of the M or N indices;
// the next 64 indices lie `chunk_bytes` further. A step of 16 k advances the address by 2,048
// bytes.
__device__ __forceinline__ uint64_t DescriptorMnMajor(uint32_t address, uint32_t chunk_bytes) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) |
         (uint64_t{(chunk_bytes & 0x3FFFF) >> 4} << 16) | ((address & 0x3FFFF) >> 4);
}

}  // namespace tare::ops::sm90
