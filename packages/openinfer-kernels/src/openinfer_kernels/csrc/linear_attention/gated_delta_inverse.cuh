// (I + A)^-1 of a head's chunk by 128 threads, in blocks of 16 x 16 of `m` [64, kNarrow], which holds A.
//
// Blocks on the diagonal are inverted by forward substitution, in place. Those below follow from them, nearest to the
// diagonal first: M_ij = -M_ii sum_k A_ik M_kj, k from j to i - 1. As A is needed until the end, M_ij is kept where its
// transposed block is, above the diagonal, where A is zero.
#pragma once
#include "linear_attention/gated_delta_tiles.cuh"

namespace gated_delta {

constexpr int kBlock = 16;

__device__ __forceinline__ int block_at(int row, int column) { return row * kBlock * kNarrow + column * kBlock; }

__device__ __forceinline__ void invert_diagonal(float* m, int thread) {
  float* block = m + block_at(thread / kBlock, thread / kBlock);
  const int column = thread % kBlock;
  float solved[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; i++) {
    float sums[2] = {i == column ? 1.0f : 0.0f, 0};
#pragma unroll
    for (int j = 0; j < i; j++) sums[j % 2] -= block[i * kNarrow + j] * solved[j];
    solved[i] = sums[0] + sums[1];
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kBlock; i++) block[i * kNarrow + column] = solved[i];
}

__device__ __forceinline__ uint32_t tf32(float value) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

// sums[16 x 16] += left[16 x 16] right[16 x 16], by a warp; rows of both are kNarrow apart.
__device__ __forceinline__ void multiply_block(float (&sums)[2][4], const float* left, const float* right, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int k = 0; k < kBlock; k += 8) {
    const float* a = left + g * kNarrow + k + t;
    const uint32_t a0 = tf32(a[0]), a1 = tf32(a[8 * kNarrow]), a2 = tf32(a[4]), a3 = tf32(a[8 * kNarrow + 4]);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const float* b = right + (k + t) * kNarrow + n * 8 + g;
      asm volatile(
          "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])
          : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(tf32(b[0])), "r"(tf32(b[4 * kNarrow])));
    }
  }
}

__device__ __forceinline__ void store_block(float* to, const float (&sums)[2][4], float sign, int lane) {
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      *reinterpret_cast<float2*>(to + (lane / 4 + half * 8) * kNarrow + n * 8 + lane % 4 * 2) =
          make_float2(sign * sums[n][half * 2], sign * sums[n][half * 2 + 1]);
}

// M_ij of the block (i, j) below the diagonal, by a warp; those nearer to the diagonal are there.
__device__ __forceinline__ void invert_block(float* m, int i, int j, int lane) {
  float* place = m + block_at(j, i);
  float sums[2][4];
  clear(sums);
  for (int k = j; k < i; k++) multiply_block(sums, m + block_at(i, k), m + block_at(j, k), lane);
  store_block(place, sums, 1.0f, lane);
  __syncwarp();
  clear(sums);
  multiply_block(sums, m + block_at(i, i), place, lane);
  __syncwarp();
  store_block(place, sums, -1.0f, lane);
}

// For all threads of the block, 128 for each head; `is_there` says whether a thread has one.
__device__ __forceinline__ void invert(float* m, bool is_there, int thread, int lane) {
  const int warp = thread / 32;
  if (is_there && thread < kChunk) invert_diagonal(m, thread);
  __syncthreads();
  for (int away = 1; away < kChunk / kBlock; away++) {
    if (is_there && warp + away < kChunk / kBlock) invert_block(m, warp + away, warp, lane);
    __syncthreads();
  }
}

}  // namespace gated_delta
