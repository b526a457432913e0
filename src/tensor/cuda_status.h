#pragma once

// CUDA results as Status, with the call and its place. Only for files that are built where nvcc is
// found (*.cu, *_cuda.cc).

#include <cuda_runtime_api.h>

#include "base/status.h"

namespace tare {

// kExhausted for device memory, else kInternal.
Status CudaToStatus(cudaError_t error, const char* call, const char* file, int line);

}  // namespace tare

// Returns the error of a CUDA runtime call from the enclosing function.
#define TARE_CUDA_RETURN_IF_ERROR(call) \
  TARE_RETURN_IF_ERROR(::tare::CudaToStatus((call), #call, __FILE__, __LINE__))
