#pragma once

// Thin wrappers over instructions of clusters and of dependent launches; see sm90.cuh.

#include <cuda_runtime.h>

#include <cstdint>

namespace tare::ops::sm90 {

// The two halves of a meeting of a cluster's threads, with work between them. This arrival
// publishes nothing, and waits for no copy under way.
__device__ __forceinline__ void ClusterArriveRelaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void ClusterWait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
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
