// What both kernels for chunks of the gated delta rule share: sizes, copies to shared memory, operands of `mma`.
#pragma once
#include "attention/attention.cuh"
#include "common/ampere.cuh"
#include "linear_attention/gated_delta.cuh"

namespace gated_delta {

using ampere::commit_copies;
using ampere::copy_16;
using ampere::load_matrices;
using ampere::load_transposed;
using ampere::shared_address;
using ampere::wait_for_copies;
using attention::mma;
using attention::packed;

constexpr int kDim = 128, kChunk = 64;
constexpr int kThreads = 256, kWarps = 8;
constexpr int kWide = kDim + 8, kNarrow = kChunk + 8;  // rows in shared memory, in values, against bank conflicts

// What `gated_delta_prepare.cu` leaves for the walk over the chunks.
struct Scratch {
  bf16 *u, *w;            // [T, N, 128]
  bf16* p;                // [T, N, 64]
  float *of_query;        // [N, T]: e^{G_i} / (|q_i| sqrt(128))
  float *until_end;       // [N, T]: e^{G_C - G_i} / |k_i|
  float *of_chunk;        // [N, T], at a chunk's first token: e^{G_C}
  int num_tokens;
};

__device__ __forceinline__ void copy4(float* to, const float* from, bool is_there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(is_there ? 4 : 0)
               : "memory");
}

// `count` of 64 rows of kValues values, `stride` apart, to rows of kRow values; the others become zeros.
template <int kValues, int kRow>
__device__ __forceinline__ void copy_rows(bf16* to, const bf16* from, int64_t stride, int count) {
  constexpr int kVectors = kValues / 8;
#pragma unroll
  for (int i = threadIdx.x; i < kChunk * kVectors; i += kThreads) {
    const int row = i / kVectors, vector = i % kVectors;
    copy_16(to + row * kRow + vector * 8, from + (row < count ? row * stride : 0) + vector * 8, row < count);
  }
}

// Operands of `mma` from matrices in shared memory, in the thread's lane: 16 x 16 values from (row, column) on.
//   a        of a matrix [m, k]              a_transposed   of a matrix [k, m]
//   b        of a matrix [n, k]              b_transposed   of a matrix [k, n]     both for two products, 8 columns each
template <int kRow>
struct Matrix {
  const bf16* data;
  int lane;

  __device__ __forceinline__ void a(uint32_t (&r)[4], int row, int column) const {
    load_matrices(r, data + (row + lane % 16) * kRow + column + lane / 16 * 8);
  }
  __device__ __forceinline__ void a_transposed(uint32_t (&r)[4], int k, int m) const {
    load_transposed(r, data + (k + lane % 8 + lane / 16 * 8) * kRow + m + lane / 8 % 2 * 8);
  }
  __device__ __forceinline__ void b(uint32_t (&r)[4], int n, int k) const {
    load_matrices(r, data + (n + lane % 8 + lane / 16 * 8) * kRow + k + lane / 8 % 2 * 8);
  }
  __device__ __forceinline__ void b_transposed(uint32_t (&r)[4], int k, int n) const {
    load_transposed(r, data + (k + lane % 16) * kRow + n + lane / 16 * 8);
  }
};

template <int kTiles>
__device__ __forceinline__ void clear(float (&sums)[kTiles][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) sums[j][i] = 0;
}

__device__ __forceinline__ void multiply(float (&left)[4], float (&right)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[4]) {
  mma(left, a[0], a[1], a[2], a[3], b[0], b[1]);
  mma(right, a[0], a[1], a[2], a[3], b[2], b[3]);
}

__device__ __forceinline__ void store2(bf16* to, float low, float high) {
  *reinterpret_cast<uint32_t*>(to) = packed(low, high);
}

}  // namespace gated_delta
