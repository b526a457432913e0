#pragma once

// Tensor maps: what the Hopper copy engine needs to know of a matrix in device memory.

#include <cuda.h>

#include <cstdint>

#include "base/status.h"

namespace tare::ops::cuda {

// A matrix of 16-bit elements [rows, columns], rows `stride` elements apart, read or written in
// boxes of box_rows x 64 columns that lie in shared memory with the 128-byte swizzle. Elements of a
// box outside the matrix are read as +0 and not written. kUnsupported when the copy engine cannot
// take it (CanMap), kInternal when the driver refuses.
Status MapMatrix16(const void* data, int64_t rows, int64_t columns, int64_t stride, int box_rows,
                   CUtensorMap* map);

// The same for rows of heads, [rows, heads, head_dim] with rows `stride` elements apart: boxes of
// box_rows x box_heads x 64 elements, which lie in shared memory as box_rows * box_heads rows.
Status MapHeads16(const void* data, int64_t rows, int64_t heads, int64_t head_dim, int64_t stride,
                  int box_rows, int box_heads, CUtensorMap* map);

// Base aligned to 16 bytes, row stride a multiple of 16 bytes, dimensions in 1 .. 2^31 - 1.
bool CanMap(const void* data, int64_t rows, int64_t columns, int64_t stride);

}  // namespace tare::ops::cuda
