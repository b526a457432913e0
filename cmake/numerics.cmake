# The one file that owns every compiler flag able to move a bit. A test greps the tree for others.
#
# No contraction, no value-changing optimisation. An FMA is written as one, never made by the
# compiler, so the bits follow from the source on every compiler and device. errno and trapping
# flags change no value; without them sqrt and selects are single instructions.
set(TARE_FP_FLAGS -ffp-contract=off -fno-fast-math -fno-math-errno -fno-trapping-math)

# Rooms that compute model values need a fused multiply-add in hardware. `tools/main.cc` and `base`
# stay at the plain baseline, so that an old CPU gets a sentence and not an illegal instruction. With
# aes and pclmul (every AVX2 CPU has them) Highway takes AVX2 for its baseline and never builds its
# SSE targets, whose multiply-add is two roundings.
set(TARE_SIMD_FLAGS "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(TARE_SIMD_FLAGS -mavx2 -mfma -mf16c -mbmi -mbmi2 -mlzcnt -mpopcnt -maes -mpclmul)
endif()

set(TARE_CUDA_FP_FLAGS --fmad=false --ftz=false --prec-div=true --prec-sqrt=true)
set(TARE_CUDA_ARCH_FLAGS -gencode arch=compute_90a,code=sm_90a)

add_library(tare_fp INTERFACE)
target_compile_options(tare_fp INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${TARE_FP_FLAGS}>"
                                         "$<$<COMPILE_LANGUAGE:CUDA>:${TARE_CUDA_FP_FLAGS}>")
add_library(tare_simd INTERFACE)
target_compile_options(tare_simd INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${TARE_SIMD_FLAGS}>")
