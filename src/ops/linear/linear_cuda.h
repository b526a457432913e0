#pragma once

// Between the entry points of linear on CUDA and its kernels: the contraction as data, the schedule
// that Pick chooses for it, and its launch. Benches and tests use it to run a schedule by name; the
// bits never depend on which one runs.

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "ops/linear/gpu_config.h"
#include "ops/op.h"

namespace tare::ops::linear::gpu {

enum class Pass : uint8_t { kForward, kDx, kDw };

// One contraction, d[i, j] = sum over k of a(i, k) * b(j, k), on the device.
//   kForward  a = x [m, k], b = w [n, k]
//   kDx       a = dy [m, k], b = w [k, n]          (k: output features)
//   kDw       a = dy [k, m], b = x [k, n]          (k: tokens), d f32, added to
struct Contraction {
  Pass pass = Pass::kForward;
  int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;
  int64_t a_stride = 0;  // elements between rows in memory
  const void* b = nullptr;
  int64_t b_stride = 0;
  void* y = nullptr;  // [m, n]
  int64_t y_stride = 0;
  DType a_dtype = DType::kBF16, b_dtype = DType::kBF16, y_dtype = DType::kBF16;
  DType operand = DType::kBF16;  // a and b are rounded to this before the product
  const void* bias = nullptr;    // [n] or null; kForward
  DType bias_dtype = DType::kBF16;
  bool ieee = false;  // the ieee-f32 step, else sm90-mma
  // Runs of k, `parts` to a chain. Chains are added as a tree (kForward, kDx; 1, 2, 4 or 8 of them)
  // or each in turn to d (kDw).
  int parts = 1;
  std::vector<Run> runs;

  int chains() const { return static_cast<int>(runs.size()) / parts; }
};

// Which kernel runs a contraction. `config` is an index into the list of the pass, or -1 for the
// generic kernel, which takes every dtype, stride and shape.
struct Schedule {
  Pass pass = Pass::kForward;
  int config = -1;
  int group_m = 8;                 // cluster rows of tiles that are walked together
  const GemmConfig& gemm() const;  // REQUIRES: config >= 0
  std::string Kernel() const;      // "linear_fwd_wgmma_128x256"
  std::string ToString() const;    // "tile=128x256x64 stages=4 consumers=2 cluster=2b group=8"
};

// What Pick may know of the device.
struct Arch {
  int sms = 132;
};

// The schedule for a shape: a pure function, tested without a device. `chains`: partial sums of the
// tree, or units of kDw (with more than one, the tile's gradient stays in registers between them).
Schedule Pick(Pass pass, int64_t m, int64_t n, int64_t k, int chains, const Arch& arch);

// True when the Hopper kernels can take it: bf16 operands, sm90-mma, addresses and strides that the
// copy engine accepts, runs whose ends the kernel can pad.
bool CanUseGemm(const Contraction& c);

// Runs a contraction by a schedule. kUnsupported when the schedule cannot take it.
Status Launch(const Contraction& c, const Schedule& schedule, StreamHandle stream,
              LaunchTrace* trace);
// Pick and Launch for the device of the calling thread.
Status RunContraction(const Contraction& c, StreamHandle stream, LaunchTrace* trace);

// The native arm: cuBLAS, its choice of kernel by shape (linear_native_cuda.cc). dW is one sum over
// all tokens. kUnsupported for what it does not take: other dtypes, strides, a bias, segments.
Status LaunchNative(const Contraction& c, StreamHandle stream, LaunchTrace* trace);

// Kernels by index: linear.cu, linear_bwd.cu, linear_dw.cu.
const void* ForwardKernel(int config);
const void* DxKernel(int config);
const void* DwKernel(int config);
// What a planted fault does to a contraction; linear_faulty.cu. The others change the runs.
struct Faults {
  bool accumulate_bf16 = false, split_fma = false, reversed = false, bias_late = false;
  bool any() const { return accumulate_bf16 || split_fma || reversed || bias_late; }
};
Status LaunchFaulty(const Contraction& c, const Faults& faults, StreamHandle stream);
// linear_generic.cu
Status LaunchGeneric(const Contraction& c, StreamHandle stream);
// dbias[j] += per unit, in order: lanes(32) over the unit's rows of dy [rows, n].
Status LaunchBiasGradient(const void* dy, DType dtype, int64_t stride, int64_t n,
                          const std::vector<Run>& units, float* dbias, StreamHandle stream);

// to[i, j] = from[i, j] rounded to `to_dtype` (bf16 or f16), nearest even; strides in elements.
Status LaunchRound(const void* from, DType from_dtype, int64_t from_stride, int64_t rows,
                   int64_t columns, void* to, DType to_dtype, int64_t to_stride,
                   StreamHandle stream);

}  // namespace tare::ops::linear::gpu
