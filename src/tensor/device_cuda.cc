#include <cuda_runtime_api.h>

#include "tensor/cuda_status.h"
#include "tensor/device_memory.h"

namespace tare {

Status CudaToStatus(cudaError_t error, const char* call, const char* file, int line) {
  if (error == cudaSuccess) return Ok();
  const Code code = error == cudaErrorMemoryAllocation ? Code::kExhausted : Code::kInternal;
  return Error(code, "{}:{}: {} gave {}: {}", file, line, call, cudaGetErrorName(error),
               cudaGetErrorString(error));
}

Result<std::shared_ptr<const void>> AllocateCuda(size_t bytes) {
  void* data = nullptr;
  TARE_CUDA_RETURN_IF_ERROR(cudaMalloc(&data, bytes));
  std::shared_ptr<const void> owner(data, [](const void* p) {
    // Nothing can be done about an error here; at exit the runtime may be gone before the tensor.
    (void)cudaFree(const_cast<void*>(p));
  });
  TARE_CUDA_RETURN_IF_ERROR(cudaMemset(data, 0, bytes));
  // A memset may return early; the tensor's first user can be on a stream that does not wait for
  // it.
  TARE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(nullptr));
  return owner;
}

Status CopyBytesCuda(void* to, Device to_device, const void* from, Device from_device,
                     size_t bytes) {
  const cudaMemcpyKind kind =
      to_device == Device::kCuda
          ? (from_device == Device::kCuda ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice)
          : cudaMemcpyDeviceToHost;
  // Everything enqueued so far may still write `from`: a copy of a tensor is of finished work.
  TARE_CUDA_RETURN_IF_ERROR(cudaDeviceSynchronize());
  TARE_CUDA_RETURN_IF_ERROR(cudaMemcpy(to, from, bytes, kind));
  TARE_CUDA_RETURN_IF_ERROR(cudaDeviceSynchronize());
  return Ok();
}

bool CudaDeviceReady() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    return false;
  }
  int major = 0, minor = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0) == cudaSuccess &&
         major == 9 && minor == 0;
}

}  // namespace tare
