// What both attention kernels share: tensor core products of 16 x 8 x 16, the fast exponential, where a page lies.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>

namespace attention {

using bf16 = __nv_bfloat16;

constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xFF800000u);

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// d[16 x 8] += a[16 x 16] b[16 x 8]. With g = lane / 4 and t = lane % 4, a thread holds of a: rows g, g + 8 in columns
// 2t, 2t + 1 (a0, a1) and 2t + 8, 2t + 9 (a2, a3); of b: rows 2t, 2t + 1 (b0) and 2t + 8, 2t + 9 (b1) in column g; of
// d: columns 2t, 2t + 1 in row g (d0, d1) and in row g + 8 (d2, d3).
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two floats rounded to BF16 in one register, `low` in its low half.
__device__ __forceinline__ uint32_t packed(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// The cache of one layer: [blocks, 2, heads, block tokens, D] with `block_stride` values between blocks.
struct LayerCache {
  using Tile = const bf16*;

  const bf16* data;
  int64_t block_stride;
  int num_heads, block_shift;  // a block has 1 << block_shift tokens

  // Values from a head's keys to its values in one block.
  __device__ __forceinline__ int64_t value_offset(int head_dim) const {
    return (int64_t(num_heads) << block_shift) * head_dim;
  }

  // The key of a token of a block, for one head.
  __device__ __forceinline__ const bf16* key(int block, int head, int token, int head_dim) const {
    return data + block * block_stride + ((int64_t(head) << block_shift) + token) * head_dim;
  }
};

// The keys of a head from a token of a block on, and its values by those.
__device__ __forceinline__ const bf16* tile_of(const LayerCache& cache, int block, int head, int token, int head_dim) {
  return cache.key(block, head, token, head_dim);
}
__device__ __forceinline__ const bf16* values_of(const bf16* keys, int64_t value_offset) { return keys + value_offset; }

// Counts the arrival of a block, or of a warpgroup, with a partial. It releases what the others of the group have
// written (a barrier has brought that to this thread), and the last one to arrive acquires the partials of all.
__device__ __forceinline__ int arrive(int* arrivals) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
  return before;
}

}  // namespace attention
