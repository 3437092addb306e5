// The two warpgroup products of attention, and how its two consumers synchronise. Accumulators as in `hopper::wgmma`: a
// thread holds rows 16 (t / 32) + (t % 32) / 4 (+ 8) and, for each 8 columns c, columns 8 c + 2 (t % 4) (+ 1).
//
// Assembly names each register: a product of N columns has N / 2 accumulators, in groups of 32, and its operands after
// them.
#pragma once
#include <cstdint>

namespace attention {

#define WGMMA_NAMES_A \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21,  " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_B \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51,  " \
  "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_C \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83,  " \
  "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NAMES_D \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113,  " \
  "%114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_NAMES_32 WGMMA_NAMES_A
#define WGMMA_NAMES_64 WGMMA_NAMES_32 ", " WGMMA_NAMES_B
#define WGMMA_NAMES_128 WGMMA_NAMES_64 ", " WGMMA_NAMES_C ", " WGMMA_NAMES_D

#define WGMMA_SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_SUMS_16(d, i) WGMMA_SUMS_4(d, i), WGMMA_SUMS_4(d, i + 4), WGMMA_SUMS_4(d, i + 8), WGMMA_SUMS_4(d, i + 12)
#define WGMMA_SUMS_32(d, i) WGMMA_SUMS_16(d, i), WGMMA_SUMS_16(d, i + 16)
#define WGMMA_SUMS_64(d, i) WGMMA_SUMS_32(d, i), WGMMA_SUMS_32(d, i + 32)
#define WGMMA_SUMS_128(d, i) WGMMA_SUMS_64(d, i), WGMMA_SUMS_64(d, i + 64)

// d[64 x N] (+)= a[64 x 16] b[N x 16]^T, both in shared memory with their 16 side by side; `adds` 0 forgets what d was.
template <int N>
__device__ __forceinline__ void multiply_keys(float (&d)[N / 2], uint64_t a, uint64_t b, int adds);

// d[64 x N] += a[64 x 16] b[16 x N], a in registers, b in shared memory with its N side by side.
template <int N>
__device__ __forceinline__ void multiply_values(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b);

// COUNT accumulators; the operands' numbers follow.
#define MULTIPLY_KEYS(N, COUNT, A, B, ADDS)                                                                       \
  template <>                                                                                                     \
  __device__ __forceinline__ void multiply_keys<N>(float (&d)[COUNT], uint64_t a, uint64_t b, int adds) {         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADDS ", 0;\n"                                             \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" WGMMA_NAMES_##COUNT "}, %" #A ", %" #B \
                 ", p, 1, 1, 0, 0;\n}\n"                                                                          \
                 : WGMMA_SUMS_##COUNT(d, 0)                                                                       \
                 : "l"(a), "l"(b), "r"(adds));                                                                    \
  }

#define MULTIPLY_VALUES(N, COUNT, A0, A1, A2, A3, B)                                                              \
  template <>                                                                                                     \
  __device__ __forceinline__ void multiply_values<N>(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b) {     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" WGMMA_NAMES_##COUNT "}, {%" #A0      \
                 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", 1, 1, 1, 1;\n"                                        \
                 : WGMMA_SUMS_##COUNT(d, 0)                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                           \
  }

MULTIPLY_KEYS(64, 32, 32, 33, 34)
MULTIPLY_KEYS(128, 64, 64, 65, 66)
MULTIPLY_VALUES(64, 32, 32, 33, 34, 35, 36)
MULTIPLY_VALUES(128, 64, 64, 65, 66, 67, 68)
MULTIPLY_VALUES(256, 128, 128, 129, 130, 131, 132)

// --- the two consumer warpgroups of a block --------------------------------------------------------------------

constexpr int kConsumers = 2;

__device__ __forceinline__ void warpgroup_sync(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// wgmma and the copy engine reach shared memory by another way (the async proxy) than the stores of threads.
__device__ __forceinline__ void copies_see_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Ping-pong scheduling, as FlashAttention-3 has it: a consumer starts products once the other one has started its own.
// Each has a named barrier, at which the other one only arrives, so that it goes on to its softmax.
__device__ __forceinline__ void warp_scheduler_barrier_sync(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(kConsumers + 1 + group), "n"(kConsumers * 128) : "memory");
}
__device__ __forceinline__ void warp_scheduler_barrier_arrive(int group) {
  asm volatile("bar.arrive %0, %1;" ::"r"(kConsumers + 1 + group), "n"(kConsumers * 128) : "memory");
}

}  // namespace attention
