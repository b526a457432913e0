#pragma once

// What every operator call is given, and how every operator is shaped.
//
// An operator lives in src/ops/<op>/<op>.h as
//   namespace tare::ops::<op> {
//     struct Params { ... };                       // dimensions, dtypes, eps, ...: decides the
//     contract struct Args { const void* x; ... void* y; }; // raw pointers on ctx.device, shapes
//     beside each Status Forward(const Ctx& ctx, const Params& params, const Args& args); Status
//     Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args);
//   }
// One entry for both devices: ctx.device picks the CPU or the CUDA implementation. Arguments are
// checked in full on the host before anything is written. A call allocates no device memory: what
// it needs beyond its outputs comes from `ctx.workspace` and is stated by WorkspaceBytes(params,
// ...).

#include <cstddef>
#include <cstdint>

#include "base/fault.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "numerics/profile.h"
#include "tensor/device.h"
#include "tensor/dtype.h"

namespace tare::ops {

// kOn: no bit depends on anything but inputs and contract. kOff, the native arm: the fast
// batch-dependent choices people use today (split by batch, cuBLAS), so that the switch proves
// something.
enum class BatchInvariance : uint8_t { kOn, kOff };

class LaunchTrace;  // ops/trace.h: records which kernel ran for which op, shape and dtype

struct Ctx {
  ThreadPool* pool = nullptr;  // CPU; REQUIRES: not null when device is kCpu
  Profile profile = Profile::kIeeeF32;
  BatchInvariance batch_invariance = BatchInvariance::kOn;
  Device device = Device::kCpu;
  fault::Side side = fault::Side::kNone;
  StreamHandle stream = nullptr;  // CUDA
  void* workspace = nullptr;      // CUDA: at least WorkspaceBytes(), aligned to 256 bytes
  size_t workspace_bytes = 0;
  LaunchTrace* trace = nullptr;  // may be null
};

}  // namespace tare::ops
