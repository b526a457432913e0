#pragma once

// TARE_HD marks a function that compiles for the host and, under nvcc, for the device too.

#ifdef __CUDACC__
#define TARE_HD __host__ __device__ __forceinline__
#else
#define TARE_HD inline
#endif
