#pragma once

// Thin wrappers over instructions of clusters and of dependent launches; see sm90.cuh.

#include <cuda_runtime.h>

#include <cstdint>

namespace tare::ops::sm90 {

// The two halves of ClusterSync, with work between them.
__device__ __forceinline__ void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void ClusterWait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Four floats at an address from MapToRank.
__device__ __forceinline__ float4 LoadRemote4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// A kernel launched with programmatic serialization may start when every CTA of the one before has
// let it; what that one wrote is there only after WaitForDependency.
__device__ __forceinline__ void LetDependentsStart() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void WaitForDependency() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace tare::ops::sm90
