// How grouped_gemm.cuh brings codes, scales and activations into shared memory.
#pragma once
#include "grouped_gemm_parts.cuh"

namespace grouped {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies kBytes without waiting; zeros where `present` is false, and then `from` is not read.
template <int kBytes>
__device__ __forceinline__ void copy(uint32_t to, const void* from, bool present) {
  const int bytes = present ? kBytes : 0;
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes),
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

// What one thread copies of each chunk: places that do not change from chunk to chunk, in bytes.
template <typename S, Epilogue kEpilogue>
struct Loader {
  using Format = typename S::Format;
  static constexpr uint32_t kAbsent = 0xFFFFFFFFu;
  static constexpr int kCodeRows = kThreads / S::kCodeUnits, kXRows = kThreads / S::kXUnits;  // copied at once
  static constexpr int kCodeCopies = S::kRows / kCodeRows, kXCopies = (S::kTokens + kXRows - 1) / kXRows;
  static constexpr int kScaleUnits = Format::kScaleBytes > 0 ? S::kScaleChunk / S::kScaleUnit : 1;  // of a row's chunk
  static constexpr int kScaleCopies = (S::kRows * kScaleUnits + kThreads - 1) / kThreads;
  static constexpr int kCodeChunk = S::kCodeUnits * kUnit, kXChunk = S::kXUnits * kUnit;            // bytes of a row
  static_assert(kCodeRows % 2 == 0 && kXRows % 2 == 0 && S::kRows % kCodeRows == 0 && kThreads % kScaleUnits == 0);

  const uint8_t *codes, *scales, *x;
  uint32_t code_at[kCodeCopies], scale_at[kScaleCopies], x_at[kXCopies];
  int code_end, scale_end, x_end;  // of the chunks' beginnings: beyond, there is nothing
  uint32_t code_to, scale_to, x_to;

  __device__ Loader(const Problem& p, const Work<S, kEpilogue>& work, uint8_t* shared) {
    const int code_unit = threadIdx.x % S::kCodeUnits, code_row = threadIdx.x / S::kCodeUnits;
    const int x_unit = threadIdx.x % S::kXUnits, x_row = threadIdx.x / S::kXUnits;
    codes = p.codes + int64_t(work.matrix) * p.rows * p.row_bytes;
    x = reinterpret_cast<const uint8_t*>(p.x);
    code_end = p.row_bytes - code_unit * kUnit;
    x_end = p.k * 2 - x_unit * kUnit;
    code_to = shared_address(shared) + place<S::kCodeUnits>(code_row, code_unit) * kUnit;
    x_to = shared_address(shared) + S::kCodeBytes + place<S::kXUnits>(x_row, x_unit) * kUnit;
#pragma unroll
    for (int i = 0; i < kCodeCopies; i++) {
      const int row = work.row_of(p, i * kCodeRows + code_row);
      code_at[i] = row < 0 ? kAbsent : uint32_t(row) * p.row_bytes + code_unit * kUnit;
    }
#pragma unroll
    for (int i = 0; i < kXCopies; i++) {
      const int token = i * kXRows + x_row, at = work.begin + token;
      if (token < work.count)
        x_at[i] = uint32_t(p.line == nullptr ? at : p.line[at]) * p.k * 2 + x_unit * kUnit;
      else
        x_at[i] = kAbsent;
    }
    if constexpr (Format::kQuantised) {
      const int unit = threadIdx.x % kScaleUnits;
      scales = p.scales + int64_t(work.matrix) * (p.rows / p.scale_rows) * p.scale_pitch;
      scale_end = p.scale_pitch - unit * S::kScaleUnit;
      scale_to = shared_address(shared) + S::kCodeBytes + S::kXBytes + threadIdx.x * S::kScaleUnit;
#pragma unroll
      for (int i = 0; i < kScaleCopies; i++) {
        const int row = (i * kThreads + threadIdx.x) / kScaleUnits, source = row < S::kRows ? work.row_of(p, row) : -1;
        scale_at[i] = source < 0 ? kAbsent : uint32_t(source / p.scale_rows) * p.scale_pitch + unit * S::kScaleUnit;
      }
    }
  }

  __device__ __forceinline__ void load_weights(int stage, int chunk) const {
    const int byte = chunk * kCodeChunk;
#pragma unroll
    for (int i = 0; i < kCodeCopies; i++) {
      const bool present = code_at[i] != kAbsent && byte < code_end;
      const uint32_t to = code_to + stage * S::kStageBytes + i * kCodeRows * kCodeChunk;
      copy<kUnit>(to, codes + (present ? code_at[i] + byte : 0), present);
    }
    if constexpr (Format::kQuantised) {
      const int scale_byte = chunk * S::kScaleChunk;
#pragma unroll
      for (int i = 0; i < kScaleCopies; i++) {
        const bool present = scale_at[i] != kAbsent && scale_byte < scale_end;
        if (S::kRows * kScaleUnits % kThreads == 0 || i * kThreads + threadIdx.x < S::kRows * kScaleUnits)
          copy<S::kScaleUnit>(scale_to + stage * S::kStageBytes + i * kThreads * S::kScaleUnit,
                              scales + (present ? scale_at[i] + scale_byte : 0), present);
      }
    }
  }

  __device__ __forceinline__ void load_x(int stage, int chunk) const {
    const int byte = chunk * kXChunk;
#pragma unroll
    for (int i = 0; i < kXCopies; i++) {
      if (S::kTokens % kXRows && i * kXRows + threadIdx.x / S::kXUnits >= S::kTokens) break;
      const bool present = x_at[i] != kAbsent && byte < x_end;
      copy<kUnit>(x_to + stage * S::kStageBytes + i * kXRows * kXChunk, x + (present ? x_at[i] + byte : 0), present);
    }
  }
};

}  // namespace grouped
