#pragma once

// The Hopper matrix step: d[64 x kN] += A[64 x 16] * B[16 x kN], bf16 operands, f32 accumulator in
// registers, one asynchronous instruction of a warpgroup. B lies in shared memory, A there too
// (Step) or in registers (StepRegisters).
//
// Fragment: warp w of the four holds rows 16w..16w+15; lane l holds, for each block j of 8 columns,
// d[4j], d[4j+1] at row l / 4, columns 8j + 2(l % 4) and the next, and d[4j+2], d[4j+3] eight rows
// below. A in registers: a[0] row l / 4, k 2(l % 4) and the next; a[1] eight rows below; a[2], a[3]
// the same rows, k + 8. A chain starts from d = +0: cleared by the caller, or by StepClear as its
// first step, or by StepOnto (B MN-major) where `onto` is 0. kTransA and kTransB say that
// the operand lies MN-major.

#include <cstdint>

namespace tare::ops::sm90 {

template <int kN>
struct Wgmma;

// Eight registers of the accumulator: as text from %0 on, and as operands.
#define TARE_T0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TARE_T1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TARE_T2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TARE_T3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TARE_T4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TARE_T5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TARE_T6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define TARE_T7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define TARE_T8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define TARE_T9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define TARE_T10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define TARE_T11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define TARE_T12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define TARE_T13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define TARE_T14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define TARE_T15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define TARE_D(i)                                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])

// One width: N columns, the register texts, the register operands, then the texts of the operands
// that follow the registers.
#define TARE_WGMMA(N, TEXT, OPERANDS, O0, O1, O2, O3, O4, O5)                                     \
  template <>                                                                                     \
  struct Wgmma<N> {                                                                               \
    template <int kTransA, int kTransB>                                                           \
    __device__ __forceinline__ static void Step(float (&d)[N / 2], uint64_t a, uint64_t b) {      \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" TEXT "}, " O0     \
                   ", " O1 ", 1, 1, 1, " O2 ", " O3 ";"                                           \
                   : OPERANDS                                                                     \
                   : "l"(a), "l"(b), "n"(kTransA), "n"(kTransB));                                 \
    }                                                                                             \
    template <int kTransA, int kTransB>                                                           \
    __device__ __forceinline__ static void StepClear(float (&d)[N / 2], uint64_t a, uint64_t b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" TEXT "}, " O0     \
                   ", " O1 ", 0, 1, 1, " O2 ", " O3 ";"                                           \
                   : OPERANDS                                                                     \
                   : "l"(a), "l"(b), "n"(kTransA), "n"(kTransB));                                 \
    }                                                                                             \
    template <int kTransB>                                                                        \
    __device__ __forceinline__ static void StepRegisters(float (&d)[N / 2], const uint32_t* a,    \
                                                         uint64_t b) {                            \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" TEXT "}, {" O0    \
                   ", " O1 ", " O2 ", " O3 "}, " O4 ", 1, 1, 1, " O5 ";"                          \
                   : OPERANDS                                                                     \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransB));           \
    }                                                                                             \
    __device__ __forceinline__ static void StepOnto(float (&d)[N / 2], const uint32_t* a,         \
                                                    uint64_t b, int onto) {                       \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " O5                                         \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" TEXT        \
                   "}, {" O0 ", " O1 ", " O2 ", " O3 "}, " O4 ", p, 1, 1, 1;\n}"                  \
                   : OPERANDS                                                                     \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(onto));              \
    }                                                                                             \
  };

// Lists of 1, 2, ... blocks of eight registers.
#define TARE_TEXT1 TARE_T0
#define TARE_REGS1 TARE_D(0)
#define TARE_TEXT2 TARE_TEXT1 TARE_T1
#define TARE_REGS2 TARE_REGS1, TARE_D(8)
#define TARE_TEXT3 TARE_TEXT2 TARE_T2
#define TARE_REGS3 TARE_REGS2, TARE_D(16)
#define TARE_TEXT4 TARE_TEXT3 TARE_T3
#define TARE_REGS4 TARE_REGS3, TARE_D(24)
#define TARE_TEXT6 TARE_TEXT4 TARE_T4 TARE_T5
#define TARE_REGS6 TARE_REGS4, TARE_D(32), TARE_D(40)
#define TARE_TEXT8 TARE_TEXT6 TARE_T6 TARE_T7
#define TARE_REGS8 TARE_REGS6, TARE_D(48), TARE_D(56)
#define TARE_TEXT11 TARE_TEXT8 TARE_T8 TARE_T9 TARE_T10
#define TARE_REGS11 TARE_REGS8, TARE_D(64), TARE_D(72), TARE_D(80)
#define TARE_TEXT12 TARE_TEXT11 TARE_T11
#define TARE_REGS12 TARE_REGS11, TARE_D(88)
#define TARE_TEXT16 TARE_TEXT12 TARE_T12 TARE_T13 TARE_T14 TARE_T15
#define TARE_REGS16 TARE_REGS12, TARE_D(96), TARE_D(104), TARE_D(112), TARE_D(120)

TARE_WGMMA(16, TARE_TEXT1, TARE_REGS1, "%8", "%9", "%10", "%11", "%12", "%13")
TARE_WGMMA(32, TARE_TEXT2, TARE_REGS2, "%16", "%17", "%18", "%19", "%20", "%21")
TARE_WGMMA(48, TARE_TEXT3, TARE_REGS3, "%24", "%25", "%26", "%27", "%28", "%29")
TARE_WGMMA(64, TARE_TEXT4, TARE_REGS4, "%32", "%33", "%34", "%35", "%36", "%37")
TARE_WGMMA(96, TARE_TEXT6, TARE_REGS6, "%48", "%49", "%50", "%51", "%52", "%53")
TARE_WGMMA(128, TARE_TEXT8, TARE_REGS8, "%64", "%65", "%66", "%67", "%68", "%69")
TARE_WGMMA(176, TARE_TEXT11, TARE_REGS11, "%88", "%89", "%90", "%91", "%92", "%93")
TARE_WGMMA(192, TARE_TEXT12, TARE_REGS12, "%96", "%97", "%98", "%99", "%100", "%101")
TARE_WGMMA(256, TARE_TEXT16, TARE_REGS16, "%128", "%129", "%130", "%131", "%132", "%133")

#undef TARE_TEXT1
#undef TARE_REGS1
#undef TARE_TEXT2
#undef TARE_REGS2
#undef TARE_TEXT3
#undef TARE_REGS3
#undef TARE_TEXT4
#undef TARE_REGS4
#undef TARE_TEXT6
#undef TARE_REGS6
#undef TARE_TEXT8
#undef TARE_REGS8
#undef TARE_TEXT11
#undef TARE_REGS11
#undef TARE_TEXT12
#undef TARE_REGS12
#undef TARE_TEXT16
#undef TARE_REGS16
#undef TARE_T0
#undef TARE_T1
#undef TARE_T2
#undef TARE_T3
#undef TARE_T4
#undef TARE_T5
#undef TARE_T6
#undef TARE_T7
#undef TARE_T8
#undef TARE_T9
#undef TARE_T10
#undef TARE_T11
#undef TARE_T12
#undef TARE_T13
#undef TARE_T14
#undef TARE_T15
#undef TARE_D
#undef TARE_WGMMA

}  // namespace tare::ops::sm90
