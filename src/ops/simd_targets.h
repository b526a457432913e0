// The SIMD targets that row operators are compiled for: the baseline of the build (AVX2 with FMA on
// x86-64) and AVX-512. Include before hwy/foreach_target.h. All targets give the same bits; a
// target without a fused multiply-add is never built.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#endif
