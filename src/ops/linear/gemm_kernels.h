#pragma once

// Calls into the SIMD translation unit (gemm_simd.cc), one set per target chosen at run time.

#include <cstdint>

#include "ops/linear/gemm.h"

namespace tare::ops::gemm {

// Columns [n0, n1) and rows [m0, m1) of the problem through all of its groups. n0 is a multiple
// of 32.
void IeeeTile(const Problem& problem, int64_t m0, int64_t m1, int64_t n0, int64_t n1);

// Few rows against a packed weight, streamed once: x_f32 [m, k] dense, whole K, one or more groups
// of one range each. Panels [p0, p1). m <= kStreamRows. `splits` > 1 (native arm) cuts each chain.
inline constexpr int64_t kStreamRows = 8;
void IeeeStream(const Problem& problem, const float* x_f32, int64_t k, int64_t p0, int64_t p1,
                int splits);

// dst[i] = f32 of src[i], rounded through the operand dtype first when the matrix says so.
void ConvertRow(const Matrix& matrix, int64_t row, int64_t begin, int64_t count, float* dst);

// What a bench holds the kernels against: `iterations` times kFmaLoopVectors independent FMAs of
// full vectors, and a sum of n words that is all reading.
float FmaLoop(int64_t iterations);
int64_t FmaLoopProducts(int64_t iterations);  // FMAs on single elements that FmaLoop does
uint64_t ReadLoop(const uint64_t* data, int64_t n);

// "avx2", "avx512".
const char* SimdTargetName();

}  // namespace tare::ops::gemm
