#include "tensor/device.h"

namespace tare {

std::string_view DeviceName(Device device) { return device == Device::kCpu ? "cpu" : "cuda"; }

}  // namespace tare
