#include "ops/op.h"

#include "ops/trace.h"

namespace tare::ops {

// The registry of operators is generated from src/ops/CMakeLists.txt.

}  // namespace tare::ops
