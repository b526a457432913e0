#pragma once

// Where bytes live. CPU memory is always there; CUDA only in a build with nvcc and on a machine
// with a device: everything else answers kUnsupported.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/status.h"

namespace tare {

enum class Device : uint8_t { kCpu, kCuda };
std::string_view DeviceName(Device device);  // "cpu", "cuda"

// A CUDA stream, opaque so that host code needs no CUDA header. Null is the default stream.
using StreamHandle = void*;

}  // namespace tare
