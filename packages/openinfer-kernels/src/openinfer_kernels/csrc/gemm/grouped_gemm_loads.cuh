// How grouped_gemm.cuh brings codes, scales and activations into shared memory.
#pragma once
#include "gemm/grouped_gemm_parts.cuh"

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

// Where unit `unit` of row `row` lies, so that the eight threads that read at once hit all banks.
template <int kUnitsOfRow>
__device__ __forceinline__ int place(int row, int unit) {
  if constexpr (kUnitsOfRow < 8) return row * kUnitsOfRow + unit;
  return row * kUnitsOfRow + (unit ^ row % 2 * 4);
}

template <typename S, Epilogue kEpilogue>
__device__ __forceinline__ void load_weights(uint8_t* stage, const Problem& p, const Work<S, kEpilogue>& work,
                                             int chunk) {
  using Format = typename S::Format;
  const uint8_t* codes = p.codes + int64_t(work.matrix) * p.rows * p.row_bytes;
  constexpr int kRowsAtOnce = kThreads / S::kCodeUnits;
  const int unit = threadIdx.x % S::kCodeUnits, byte = (chunk * S::kCodeUnits + unit) * kUnit;
#pragma unroll
  for (int i = 0; i < S::kRows / kRowsAtOnce; i++) {
    const int row = i * kRowsAtOnce + threadIdx.x / S::kCodeUnits, source = work.row_of(p, row);
    const bool present = source >= 0 && byte < p.row_bytes;
    const int64_t at = present ? int64_t(source) * p.row_bytes + byte : 0;
    copy<kUnit>(stage + place<S::kCodeUnits>(row, unit) * kUnit, codes + at, present);
  }
  if constexpr (Format::kScaleBytes > 0) {
    const uint8_t* scales = p.scales + int64_t(work.matrix) * (p.rows / p.scale_rows) * p.scale_pitch;
    uint8_t* to = stage + S::kCodeBytes + S::kXBytes;
    constexpr int kUnitsOfRow = S::kScaleChunk / S::kScaleUnit;
#pragma unroll
    for (int i = threadIdx.x; i < S::kRows * kUnitsOfRow; i += kThreads) {
      const int row = i / kUnitsOfRow, byte = chunk * S::kScaleChunk + i % kUnitsOfRow * S::kScaleUnit;
      const int source = work.row_of(p, row);
      const bool present = source >= 0 && byte < p.scale_pitch;
      const int64_t at = present ? int64_t(source / p.scale_rows) * p.scale_pitch + byte : 0;
      copy<S::kScaleUnit>(to + i * S::kScaleUnit, scales + at, present);
    }
  }
}

template <typename S>
__device__ __forceinline__ void load_x(uint8_t* stage, const Problem& p, const int* x_rows, int chunk) {
  constexpr int kRowsAtOnce = kThreads / S::kXUnits;
  uint8_t* to = stage + S::kCodeBytes;
  const int unit = threadIdx.x % S::kXUnits, column = chunk * S::kColumns + unit * 8;
#pragma unroll
  for (int i = 0; i < (S::kTokens + kRowsAtOnce - 1) / kRowsAtOnce; i++) {
    const int token = i * kRowsAtOnce + threadIdx.x / S::kXUnits;
    if (S::kTokens % kRowsAtOnce && token >= S::kTokens) break;
    const int row = x_rows[token];
    const bool present = row >= 0 && column < p.k;
    const bf16* from = p.x + (present ? int64_t(row) * p.k + column : 0);
    copy<kUnit>(to + place<S::kXUnits>(token, unit) * kUnit, from, present);
  }
}

}  // namespace grouped
