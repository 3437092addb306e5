// What the kernels over windows and compressed entries share: where tokens stand, rotation of last dimensions, and the
// instructions that bring tiles to tensor cores.
#pragma once
#include <math_constants.h>

#include "common/state_rows.cuh"
#include "common/vectors.cuh"

namespace sparse {

// Compressed entries: the row that ends at a block's token `t` is row `t / ratio` of the block.
struct Entries {
  const bf16* cache;        // [blocks, ..., rows, d] of one layer
  const int* block_tables;  // [R, max_blocks]
  int64_t block_stride;     // values from one block to the next
  int max_blocks, block_tokens, ratio, size;

  __device__ __forceinline__ int64_t offset(int row, int entry) const {
    const int end = entry * ratio + ratio - 1, block = end / block_tokens;
    return block_tables[int64_t(row) * max_blocks + block] * block_stride +
           int64_t((end - block * block_tokens) / ratio) * size;
  }
};

// The row of a token: the last one that begins at it or before.
__device__ __forceinline__ int row_of_token(const StateRows& rows, int token) {
  int low = 0, high = rows.num_rows - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (rows.query_starts[middle] <= token) low = middle; else high = middle - 1;
  }
  return low;
}

struct Token {
  int row, slot;  // `slot`: state slot
  int position;  // below 0: padding
  int start;     // position of the row's first token
  int first;     // that token
  int last;      // the row's last token
};

__device__ __forceinline__ Token find_token(const StateRows& rows, int token) {
  const int index = row_of_token(rows, token);
  const StateRow row = state_row(rows, index);
  if (row.count == 0 || token >= row.first + row.count) return {index, row.slot, -1, 0, row.first, 0};
  const int start = rows.context_lens[index] - row.count;
  return {index, row.slot, start + token - row.first, start, row.first, row.first + row.count - 1};
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
  return value;
}

// Cosine and sine of a pair at a position; `rope` is [2, positions, pairs].
struct Rope {
  const float* table;
  int positions, pairs;

  __device__ __forceinline__ float2 at(int position, int pair) const {
    const int64_t place = int64_t(position) * pairs + pair;
    return {table[place], table[int64_t(positions) * pairs + place]};
  }
};

__device__ __forceinline__ float2 rotated(float2 pair, float2 rotation, float direction) {
  const float sine = direction * rotation.y;
  return {pair.x * rotation.x - pair.y * sine, pair.x * sine + pair.y * rotation.x};
}

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from));
}

__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from));
}

// 16 bytes from global to shared memory; zeros where there is nothing to copy.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace sparse
