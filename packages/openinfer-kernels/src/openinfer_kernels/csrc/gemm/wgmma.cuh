// Warpgroup products of both operands in shared memory, for the widths that `gemm.cu` and `prompt_shrink.cu` use.
#pragma once
#include <cstdint>

namespace hopper {

// d[64 x N] = a[64 x 16] b[N x 16]^T, plus what d was where `adds` is not 0; d as in `wgmma`.
template <int N>
__device__ __forceinline__ void wgmma_or_begin(float (&d)[N / 2], uint64_t a, uint64_t b, int adds);

#define REGISTERS_2(TENS) "%" #TENS "0, %" #TENS "1"
#define REGISTERS_4(TENS) REGISTERS_2(TENS) ", %" #TENS "2, %" #TENS "3"
#define REGISTERS_6(TENS) REGISTERS_4(TENS) ", %" #TENS "4, %" #TENS "5"
#define REGISTERS_8(TENS) REGISTERS_6(TENS) ", %" #TENS "6, %" #TENS "7"
#define REGISTERS_10(TENS) REGISTERS_8(TENS) ", %" #TENS "8, %" #TENS "9"
#define REGISTERS_TO_30 REGISTERS_10() ", " REGISTERS_10(1) ", " REGISTERS_10(2)
#define REGISTERS_TO_40 REGISTERS_TO_30 ", " REGISTERS_10(3)
#define REGISTERS_TO_60 REGISTERS_TO_40 ", " REGISTERS_10(4) ", " REGISTERS_10(5)
#define REGISTERS_TO_80 REGISTERS_TO_60 ", " REGISTERS_10(6) ", " REGISTERS_10(7)
#define REGISTERS_TO_90 REGISTERS_TO_80 ", " REGISTERS_10(8)
#define SUMS_8(I) \
  "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3]), "+f"(d[I + 4]), "+f"(d[I + 5]), "+f"(d[I + 6]), \
      "+f"(d[I + 7])
#define SUMS_16(I) SUMS_8(I), SUMS_8(I + 8)
#define SUMS_32(I) SUMS_16(I), SUMS_16(I + 16)
#define SUMS_64(I) SUMS_32(I), SUMS_32(I + 32)

// SUMS counts the N / 2 registers of d; A, B and ADDS are the numbers of the operands after them.
#define WGMMA_OR_BEGIN(N, REGISTERS, A, B, ADDS, ...)                                                              \
  template <>                                                                                                      \
  __device__ __forceinline__ void wgmma_or_begin<N>(float (&d)[N / 2], uint64_t a, uint64_t b, int adds) {         \
    asm volatile(                                                                                                  \
        "{\n"                                                                                                      \
        ".reg .pred p;\n"                                                                                          \
        "setp.ne.b32 p, %" #ADDS ", 0;\n"                                                                          \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGISTERS "}, %" #A ", %" #B ", p, 1, 1, 0, 0;\n" \
        "}\n"                                                                                                      \
        : __VA_ARGS__                                                                                              \
        : "l"(a), "l"(b), "r"(adds));                                                                              \
  }

WGMMA_OR_BEGIN(16, REGISTERS_8(), 8, 9, 10, SUMS_8(0))
WGMMA_OR_BEGIN(32, REGISTERS_10() ", " REGISTERS_6(1), 16, 17, 18, SUMS_16(0))
WGMMA_OR_BEGIN(48, REGISTERS_10() ", " REGISTERS_10(1) ", " REGISTERS_4(2), 24, 25, 26, SUMS_16(0), SUMS_8(16))
WGMMA_OR_BEGIN(96, REGISTERS_TO_40 ", " REGISTERS_8(4), 48, 49, 50, SUMS_32(0), SUMS_16(32))
WGMMA_OR_BEGIN(112, REGISTERS_TO_40 ", " REGISTERS_10(4) ", " REGISTERS_6(5), 56, 57, 58, SUMS_32(0), SUMS_16(32),
               SUMS_8(48))
WGMMA_OR_BEGIN(128, REGISTERS_TO_60 ", " REGISTERS_4(6), 64, 65, 66, SUMS_64(0))
WGMMA_OR_BEGIN(160, REGISTERS_TO_80, 80, 81, 82, SUMS_64(0), SUMS_16(64))
WGMMA_OR_BEGIN(192, REGISTERS_TO_90 ", " REGISTERS_6(9), 96, 97, 98, SUMS_64(0), SUMS_32(64))

}  // namespace hopper
