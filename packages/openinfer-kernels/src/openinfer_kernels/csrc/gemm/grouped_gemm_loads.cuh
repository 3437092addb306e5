// How grouped_gemm.cuh brings codes, scales and activations into shared memory.
#pragma once
#include "gemm/grouped_gemm_shapes.cuh"

namespace grouped {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies kBytes without waiting; zeros where `present` is false, and then `from` is not read.
template <int kBytes>
__device__ __forceinline__ void copy(void* to, const void* from, bool present) {
  const int bytes = present ? kBytes : 0;
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes));
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(kBytes),
                 "r"(bytes));
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }

template <int kPending>
__device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Where vector `vector` of row `row` lies, so that the eight threads that read at once hit all banks.
template <int kVectorsOfRow>
__device__ __forceinline__ int swizzled(int row, int vector) {
  if constexpr (kVectorsOfRow < 8) return row * kVectorsOfRow + vector;
  return row * kVectorsOfRow + (vector ^ row % 2 * 4);
}

template <typename S, Epilogue kEpilogue>
__device__ __forceinline__ void load_weights(uint8_t* stage, const Problem& p, const Work<S, kEpilogue>& work,
                                             int chunk) {
  using Format = typename S::Format;
  const uint8_t* codes = p.codes + int64_t(work.matrix) * p.rows * p.row_bytes;
  constexpr int kRowsAtOnce = kThreads / S::kCodeVectors;
  const int vector = threadIdx.x % S::kCodeVectors, byte = (chunk * S::kCodeVectors + vector) * kVectorBytes;
#pragma unroll
  for (int i = 0; i < S::kRows / kRowsAtOnce; i++) {
    const int row = i * kRowsAtOnce + threadIdx.x / S::kCodeVectors, source = work.row_of(p, row);
    const bool present = source >= 0 && byte < p.row_bytes;
    const int64_t at = present ? int64_t(source) * p.row_bytes + byte : 0;
    copy<kVectorBytes>(stage + swizzled<S::kCodeVectors>(row, vector) * kVectorBytes, codes + at, present);
  }
  if constexpr (Format::kScaleBytes > 0) {
    const uint8_t* scales = p.scales + int64_t(work.matrix) * (p.rows / p.scale_rows) * p.scale_pitch;
    uint8_t* to = stage + S::kCodeBytes + S::kXBytes;
    constexpr int kVectorsOfRow = S::kScaleChunk / S::kScaleCopyBytes;
#pragma unroll
    for (int i = threadIdx.x; i < S::kRows * kVectorsOfRow; i += kThreads) {
      const int row = i / kVectorsOfRow, byte = chunk * S::kScaleChunk + i % kVectorsOfRow * S::kScaleCopyBytes;
      const int source = work.row_of(p, row);
      const bool present = source >= 0 && byte < p.scale_pitch;
      const int64_t at = present ? int64_t(source / p.scale_rows) * p.scale_pitch + byte : 0;
      copy<S::kScaleCopyBytes>(to + i * S::kScaleCopyBytes, scales + at, present);
    }
  }
}

template <typename S>
__device__ __forceinline__ void load_x(uint8_t* stage, const Problem& p, const int* x_rows, int chunk) {
  constexpr int kRowsAtOnce = kThreads / S::kXVectors;
  uint8_t* to = stage + S::kCodeBytes;
  const int vector = threadIdx.x % S::kXVectors, column = chunk * S::kColumns + vector * 8;
#pragma unroll
  for (int i = 0; i < (S::kTokens + kRowsAtOnce - 1) / kRowsAtOnce; i++) {
    const int token = i * kRowsAtOnce + threadIdx.x / S::kXVectors;
    if (S::kTokens % kRowsAtOnce && token >= S::kTokens) break;
    const int row = x_rows[token];
    const bool present = row >= 0 && column < p.k;
    const bf16* from = p.x + (present ? int64_t(row) * p.k + column : 0);
    copy<kVectorBytes>(to + swizzled<S::kXVectors>(token, vector) * kVectorBytes, from, present);
  }
}

}  // namespace grouped
