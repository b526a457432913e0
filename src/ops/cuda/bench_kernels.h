#pragma once

// Device helpers for benches and tests.

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "tensor/device.h"

namespace tare::ops::cuda {

// Reads all of [data, data + bytes) once, so that a following kernel finds none of its own data in
// the L2 cache, and no dirty lines to write back. `sink` is 4 bytes of device memory.
Status LaunchReadAll(const void* data, size_t bytes, uint32_t* sink, StreamHandle stream);

// Copies `bytes` (a multiple of 16), 16 bytes a thread at a time: the bandwidth that others are
// held to.
Status LaunchCopy(const void* from, void* to, size_t bytes, StreamHandle stream);

// Adds to *count the number of 16-bit words in which two buffers differ, and keeps the lowest index
// of one in *first (set it to UINT64_MAX before).
Status LaunchCountDifferences(const void* a, const void* b, size_t words, unsigned long long* count,
                              unsigned long long* first, StreamHandle stream);

}  // namespace tare::ops::cuda
