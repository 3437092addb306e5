// Instructions of adapters that have no name in CUDA: the tensor cores' product, a hint to the second-level cache, and
// a counter that blocks of a grid wait for.
#pragma once
#include <cstdint>

namespace lora {

// d += a b, of 16 x 16 and 16 x 8 BF16 values. With group = lane / 4 and pair = 2 (lane % 4): a0 is row `group`, columns
// `pair` and the next; a1 the same of row group + 8; a2, a3 of columns + 8. b0 is column `group`, rows `pair` and the
// next, b1 rows + 8. d: row `group` and row group + 8, columns `pair` and the next each.
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Four values that other blocks have written, or zeros: without a branch, so that many are under way together.
__device__ __forceinline__ float4 four_if(bool is_there, const float* from) {
  float4 found;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@p ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&f"(found.x), "=&f"(found.y), "=&f"(found.z), "=&f"(found.w)
      : "l"(from), "r"(int(is_there))
      : "memory");
  return found;
}

// Has the second-level cache fetch a box of a tensor map.
__device__ __forceinline__ void prefetch_box(const void* map, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(x), "r"(y),
               "r"(z), "r"(w)
               : "memory");
}

// Between a thread's accesses and those of the copy engine to the same global memory, on both sides.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// The same of shared memory.
__device__ __forceinline__ void fence_shared_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Counts a part that this thread, and those that it has met at a barrier since, have written.
__device__ __forceinline__ void count_part(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// Counts one of `all` that need the parts no more; true for the last one, which leaves the counter zero. Nothing that
// is needed waits for it: it takes a way to the second-level cache and back.
__device__ __forceinline__ bool is_last_served(unsigned* counter, unsigned all) {
  return atomicInc(counter, all - 1) == all - 1;
}

// Waits for parts that other blocks count, and sees what they have written.
__device__ __forceinline__ void wait_for_parts(const unsigned* counter, unsigned parts) {
  unsigned counted;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(counted) : "l"(counter) : "memory");
  } while (counted < parts);
}

}  // namespace lora
