#pragma once

// Device memory below Tensor. Built where nvcc is found; on a machine without a device every call
// is an error with the runtime's reason.

#include <cstddef>
#include <memory>

#include "base/status.h"
#include "tensor/device.h"

namespace tare {

// `bytes` > 0 of zeros on the calling thread's CUDA device, freed with the last owner.
Result<std::shared_ptr<const void>> AllocateCuda(size_t bytes);

// Copies between any two places of the given devices and waits for it.
Status CopyBytesCuda(void* to, Device to_device, const void* from, Device from_device,
                     size_t bytes);

// True when this machine has a CUDA device that this build can use (compute capability 9.0).
bool CudaDeviceReady();

}  // namespace tare
