#pragma once

// The activations on the device, and the kernels that look them up. A bf16 gate has 65,536 values,
// so act(g) and act'(g) of those that matter are computed once a CTA, by the same functions, and
// kept in shared memory: a lookup is a tenth of silu's instructions, and the bits are the
// function's own.

#include "numerics/elementary.h"
#include "ops/cuda/eights.cuh"
#include "ops/gate/gate_cuda.h"

namespace tare::ops::gate {

using cuda::Fma;
using cuda::Mul;
using cuda::Sub;

struct ForwardArgs {
  int64_t rows, width, stride;
  const void *gate, *up;
  void* y;
};

struct BackwardArgsCuda {
  int64_t rows, width, stride, dstride;
  const void *gate, *up, *dy;
  void *dgate, *dup;
  bool detached;  // the planted fault: dgate is +0
};

constexpr float kTwoSqrtTwoOverPi = 0x1.988454p0f;  // 2 * sqrt(2 / pi)
constexpr float kCubic = 0.044715f;

template <Activation kAct>
__device__ __forceinline__ float Act(float g) {
  if constexpr (kAct == Activation::kSilu) return numerics::Silu(g);
  if constexpr (kAct == Activation::kGeluTanh) return numerics::GeluTanh(g);
  return numerics::Gelu(g);
}

// act'(g), the operations of gate.cc in their order.
template <Activation kAct>
__device__ __forceinline__ float Derivative(float g) {
  if constexpr (kAct == Activation::kSilu) {
    const float s = numerics::Sigmoid(g);
    return Mul(s, Fma(g, Sub(1.0f, s), 1.0f));
  } else if constexpr (kAct == Activation::kGeluTanh) {
    const float squared = Mul(g, g);
    const float v = Mul(kTwoSqrtTwoOverPi, Mul(g, Fma(kCubic, squared, 1.0f)));
    const float dv = Mul(kTwoSqrtTwoOverPi, Fma(3 * kCubic, squared, 1.0f));
    const float s = numerics::Sigmoid(v);
    return Fma(Mul(g, dv), Mul(s, Sub(1.0f, s)), s);
  } else {
    const float phi_cap = Fma(0.5f, numerics::Erf(Mul(g, 0x1.6a09e6p-1f)), 0.5f);
    const float phi = Mul(numerics::Exp(Mul(Mul(g, g), -0.5f)), 0x1.988454p-2f);
    return Fma(g, phi, phi_cap);
  }
}

// Gates of the table: both signs, magnitudes in [2^-12, 2^5). Others are computed.
constexpr uint32_t kTableFirst = (127 - 12) << 7;  // bits of the smallest
constexpr uint32_t kTableSide = (5 + 12) << 7;
constexpr int kTableThreads = 1024;
constexpr int64_t kTableElements = int64_t{1} << 22;  // fewer elements do not pay for a table

template <bool kBackward>
struct TableEntry {
  float act;
};
template <>
struct TableEntry<true> {
  float act, derivative;
};

template <Activation kAct, bool kBackward>
__device__ __forceinline__ TableEntry<kBackward> Compute(float g) {
  TableEntry<kBackward> entry;
  entry.act = Act<kAct>(g);
  if constexpr (kBackward) entry.derivative = Derivative<kAct>(g);
  return entry;
}
// The few gates outside of the table: not inlined eight times.
template <Activation kAct, bool kBackward>
__device__ __noinline__ TableEntry<kBackward> ComputeOutside(uint32_t bits) {
  return Compute<kAct, kBackward>(__uint_as_float(bits << 16));
}

template <Activation kAct, bool kBackward>
__device__ __forceinline__ void FillTable(TableEntry<kBackward>* table) {
  for (uint32_t i = threadIdx.x; i < 2 * kTableSide; i += kTableThreads) {
    const bool negative = i >= kTableSide;
    const uint32_t bits = (negative ? i - kTableSide + 0x8000u : i) + kTableFirst;
    table[i] = Compute<kAct, kBackward>(__uint_as_float(bits << 16));
  }
}

// The entries of eight gates as they lie in memory.
template <Activation kAct, bool kBackward>
__device__ __forceinline__ void Lookup8(const TableEntry<kBackward>* table, const uint4& gates,
                                        TableEntry<kBackward> (&entry)[8]) {
  const uint32_t words[4] = {gates.x, gates.y, gates.z, gates.w};
  bool outside = false;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const uint32_t bits = e % 2 == 0 ? words[e / 2] & 0xffffu : words[e / 2] >> 16;
    const uint32_t at = (bits & 0x7fffu) - kTableFirst;
    outside = outside || at >= kTableSide;
    entry[e] = table[min(at, kTableSide - 1) + (bits >> 15) * kTableSide];
  }
  if (!outside) return;
#pragma unroll 1
  for (int e = 0; e < 8; ++e) {
    const uint32_t word = e < 4 ? (e < 2 ? gates.x : gates.y) : (e < 6 ? gates.z : gates.w);
    const uint32_t bits = e % 2 == 0 ? word & 0xffffu : word >> 16;
    if ((bits & 0x7fffu) - kTableFirst < kTableSide) continue;
    const TableEntry<kBackward> computed = ComputeOutside<kAct, kBackward>(bits);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k == e) entry[k] = computed;
    }
  }
}

// bf16, widths and strides of whole eights, addresses of 16 bytes. kAhead eights a thread are under
// way at once.
template <Activation kAct>
__global__ void __launch_bounds__(kTableThreads, 1)
    gate_table_forward_kernel(const __grid_constant__ ForwardArgs a) {
  __shared__ TableEntry<false> table[2 * kTableSide];
  constexpr int kAhead = 2;
  const int64_t per_row = a.width / 8, total = a.rows * per_row;
  const int64_t step = int64_t{gridDim.x} * kTableThreads;
  FillTable<kAct, false>(table);
  __syncthreads();
  for (int64_t first = int64_t{blockIdx.x} * kTableThreads + threadIdx.x; first < total;
       first += kAhead * step) {
    uint4 gates[kAhead], ups[kAhead];
    uint16_t* to[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const auto [row, at] = cuda::PlaceOf(min(first + k * step, total - 1), per_row);
      const int64_t from = row * a.stride + 8 * at;
      gates[k] = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(a.gate) + from);
      ups[k] = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(a.up) + from);
      to[k] = static_cast<uint16_t*>(a.y) + row * a.width + 8 * at;
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      TableEntry<false> entry[8];
      Lookup8<kAct, false>(table, gates[k], entry);
      float up[8];
      cuda::Widen8(ups[k], up);
#pragma unroll
      for (int e = 0; e < 8; ++e) up[e] = cuda::Mul(entry[e].act, up[e]);
      if (first + k * step < total) cuda::Store8(up, to[k]);
    }
  }
}

template <Activation kAct, typename G>
__global__ void __launch_bounds__(kTableThreads, 1)
    gate_table_backward_kernel(const __grid_constant__ BackwardArgsCuda a) {
  __shared__ TableEntry<true> table[2 * kTableSide];
  const int64_t per_row = a.width / 8, total = a.rows * per_row;
  const int64_t step = int64_t{gridDim.x} * kTableThreads;
  FillTable<kAct, true>(table);
  __syncthreads();
  for (int64_t item = int64_t{blockIdx.x} * kTableThreads + threadIdx.x; item < total;
       item += step) {
    const auto [row, at] = cuda::PlaceOf(item, per_row);
    const int64_t from = row * a.stride + 8 * at, to = row * a.dstride + 8 * at;
    const uint4 gates =
        *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(a.gate) + from);
    float up[8], dy[8];
    cuda::Load8(static_cast<const uint16_t*>(a.up) + from, up);
    cuda::Load8(static_cast<const G*>(a.dy) + row * a.width + 8 * at, dy);
    TableEntry<true> entry[8];
    Lookup8<kAct, true>(table, gates, entry);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float dgate = cuda::Mul(cuda::Mul(dy[e], up[e]), entry[e].derivative);
      up[e] = cuda::Mul(dy[e], entry[e].act);
      dy[e] = a.detached ? 0.0f : dgate;
    }
    cuda::Store8(up, static_cast<G*>(a.dup) + to);
    cuda::Store8(dy, static_cast<G*>(a.dgate) + to);
  }
}

}  // namespace tare::ops::gate
