#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <limits>

#include "ops/cuda/tensor_map.h"
#include "tensor/cuda_status.h"

namespace tare::ops::cuda {
namespace {

// The driver's encoder, looked up through the runtime so that nothing links against libcuda.
Result<PFN_cuTensorMapEncodeTiled_v12000> Encoder() {
  static const Result<PFN_cuTensorMapEncodeTiled_v12000> encoder =
      []() -> Result<PFN_cuTensorMapEncodeTiled_v12000> {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    TARE_CUDA_RETURN_IF_ERROR(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess || function == nullptr) {
      return Unsupported("this CUDA driver has no cuTensorMapEncodeTiled; 12.0 or newer is needed");
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encoder;
}

}  // namespace

bool CanMap(const void* data, int64_t rows, int64_t columns, int64_t stride) {
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 8 == 0 && rows > 0 &&
         columns > 0 && rows <= kLimit && columns <= kLimit && stride >= columns &&
         stride < (int64_t{1} << 38);
}

Status MapMatrix16(const void* data, int64_t rows, int64_t columns, int64_t stride, int box_rows,
                   CUtensorMap* map) {
  if (!CanMap(data, rows, columns, stride)) {
    return Unsupported(
        "a matrix [{}, {}] with row stride {} at {} cannot be tensor-mapped: base and"
        " row stride must be multiples of 16 bytes",
        rows, columns, stride, data);
  }
  TARE_ASSIGN_OR_RETURN(const auto encode, Encoder());
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), dims, strides, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return Error(Code::kInternal, "cuTensorMapEncodeTiled gave {} for [{}, {}], stride {}, box {}",
                 static_cast<int>(result), rows, columns, stride, box_rows);
  }
  return Ok();
}

Status MapHeads16(const void* data, int64_t rows, int64_t heads, int64_t head_dim, int64_t stride,
                  int box_rows, int box_heads, CUtensorMap* map) {
  if (!CanMap(data, rows, heads * head_dim, stride) || head_dim % 8 != 0) {
    return Unsupported(
        "rows of heads [{}, {}, {}] with row stride {} at {} cannot be tensor-mapped: base, row and"
        " head must be multiples of 16 bytes",
        rows, heads, head_dim, stride, data);
  }
  TARE_ASSIGN_OR_RETURN(const auto encode, Encoder());
  const cuuint64_t dims[3] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(heads),
                              static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(head_dim) * 2,
                                 static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(box_heads),
                             static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(data), dims, strides, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return Error(Code::kInternal,
                 "cuTensorMapEncodeTiled gave {} for [{}, {}, {}], stride {}, box {} x {}",
                 static_cast<int>(result), rows, heads, head_dim, stride, box_rows, box_heads);
  }
  return Ok();
}

}  // namespace tare::ops::cuda
