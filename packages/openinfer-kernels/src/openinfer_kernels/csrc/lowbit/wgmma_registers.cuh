// Warpgroup products whose first operand is in registers, for the widths that `lowbit_gemm.cuh` uses.
#pragma once
#include <cstdint>
#include <cuda_fp16.h>

namespace hopper {

// d[64 x N] = a[64 x 16] b[N x 16]^T, plus what d was where `adds` is not 0; d as in `wgmma`. Thread t holds of a, in
// pairs, columns 2 (t % 4) (+ 1) of rows 16 (t / 32) + (t % 32) / 4 and 8 further, then columns 8 further of both.
template <int N>
__device__ __forceinline__ void wgmma_of_registers(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int adds);

#define TEN_REGISTERS(TENS)                                                                                       \
  "%" #TENS "0, %" #TENS "1, %" #TENS "2, %" #TENS "3, %" #TENS "4, %" #TENS "5, %" #TENS "6, %" #TENS "7, %" #TENS \
  "8, %" #TENS "9, "
#define TWO_REGISTERS(TENS) "%" #TENS "0, %" #TENS "1, "
#define REGISTERS_4 "%0, %1, %2, %3"
#define REGISTERS_8 REGISTERS_4 ", %4, %5, %6, %7"
#define REGISTERS_16 TEN_REGISTERS() "%10, %11, %12, %13, %14, %15"
#define REGISTERS_32 TEN_REGISTERS() TEN_REGISTERS(1) TEN_REGISTERS(2) "%30, %31"
#define REGISTERS_60 TEN_REGISTERS() TEN_REGISTERS(1) TEN_REGISTERS(2) TEN_REGISTERS(3) TEN_REGISTERS(4) TEN_REGISTERS(5)
#define REGISTERS_64 REGISTERS_60 "%60, %61, %62, %63"
#define REGISTERS_90 REGISTERS_60 TEN_REGISTERS(6) TEN_REGISTERS(7) TEN_REGISTERS(8)
#define REGISTERS_96 REGISTERS_90 "%90, %91, %92, %93, %94, %95"
#define REGISTERS_128                                                                        \
  REGISTERS_90 TEN_REGISTERS(9) TEN_REGISTERS(10) TEN_REGISTERS(11) "%120, %121, %122, %123, %124, %125, %126, %127"

#define SUMS_4(I) "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3])
#define SUMS_8(I) SUMS_4(I), SUMS_4(I + 4)
#define SUMS_16(I) SUMS_8(I), SUMS_8(I + 8)
#define SUMS_32(I) SUMS_16(I), SUMS_16(I + 16)
#define SUMS_64(I) SUMS_32(I), SUMS_32(I + 32)
#define SUMS_96(I) SUMS_64(I), SUMS_32(I + 64)
#define SUMS_128(I) SUMS_64(I), SUMS_64(I + 64)

// A0 to A3, B and ADDS are the numbers of the operands after the SUMS registers of d.
#define WGMMA_OF_REGISTERS(N, SUMS, A0, A1, A2, A3, B, ADDS)                                                           \
  template <>                                                                                                          \
  __device__ __forceinline__ void wgmma_of_registers<N>(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,         \
                                                        int adds) {                                                    \
    asm volatile(                                                                                                      \
        "{\n"                                                                                                          \
        ".reg .pred p;\n"                                                                                              \
        "setp.ne.b32 p, %" #ADDS ", 0;\n"                                                                              \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGISTERS_##SUMS "}, {%" #A0 ", %" #A1 ", %" #A2  \
        ", %" #A3 "}, %" #B ", p, 1, 1, 0;\n"                                                                          \
        "}\n"                                                                                                          \
        : SUMS_##SUMS(0)                                                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));                                              \
  }

WGMMA_OF_REGISTERS(8, 4, 4, 5, 6, 7, 8, 9)
WGMMA_OF_REGISTERS(16, 8, 8, 9, 10, 11, 12, 13)
WGMMA_OF_REGISTERS(32, 16, 16, 17, 18, 19, 20, 21)
WGMMA_OF_REGISTERS(64, 32, 32, 33, 34, 35, 36, 37)
WGMMA_OF_REGISTERS(128, 64, 64, 65, 66, 67, 68, 69)
WGMMA_OF_REGISTERS(192, 96, 96, 97, 98, 99, 100, 101)
WGMMA_OF_REGISTERS(256, 128, 128, 129, 130, 131, 132, 133)

// d[64 x N] = a[64 x 32] b[N x 32]^T of E4M3, sums as of `wgmma`. Thread t holds of a, in fours, columns 4 (t % 4) to + 3 of
// rows 16 (t / 32) + (t % 32) / 4 and 8 further, then columns 16 further of both.
template <int N>
__device__ __forceinline__ void wgmma_of_codes(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int adds);

#define WGMMA_OF_CODES(N, SUMS, A0, A1, A2, A3, B, ADDS)                                                               \
  template <>                                                                                                          \
  __device__ __forceinline__ void wgmma_of_codes<N>(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int adds) {  \
    asm volatile(                                                                                                      \
        "{\n"                                                                                                          \
        ".reg .pred p;\n"                                                                                              \
        "setp.ne.b32 p, %" #ADDS ", 0;\n"                                                                              \
        "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGISTERS_##SUMS "}, {%" #A0 ", %" #A1 ", %" #A2  \
        ", %" #A3 "}, %" #B ", p, 1, 1;\n"                                                                             \
        "}\n"                                                                                                          \
        : SUMS_##SUMS(0)                                                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));                                              \
  }

WGMMA_OF_CODES(16, 8, 8, 9, 10, 11, 12, 13)
WGMMA_OF_CODES(32, 16, 16, 17, 18, 19, 20, 21)

// Two numbers of E4M3, the nearest ones, as the lower and the higher byte.
__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ float2 floats_of_e4m3(uint32_t pair) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(pair)));
  return __half22float2(*reinterpret_cast<__half2*>(&halves));
}

// What threads have written to shared memory may be read by tensor cores after the next barrier.
__device__ __forceinline__ void fence_for_async_reads() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace hopper
