// W8A8: activations to codes and scales, codes of weights out of tiles into rows, as libraries want them, and sums of
// INT8 scaled. What is rounded how: weights/low_bit_activations.py.
#include <cuda_fp8.h>

#include "common/pdl.cuh"
#include "common/vectors.cuh"
#include "gemm/gemm_epilogue.cuh"
#include "lowbit/lowbit_places.cuh"

using namespace lowbit;

namespace {

constexpr int kValues = 8;  // of a thread
constexpr float kSmallestMaximum = 1e-12f;
constexpr int kThreads = 256;  // of a block that has a token
constexpr int kCodeBytes = kTileRows * kTileColumns;

struct ToFp8 {
  static constexpr float kLargest = 448;
  static __device__ __forceinline__ uint32_t four(const float* values, float scale) {
    const uint32_t low = __nv_cvt_float2_to_fp8x2(
        make_float2(__fdiv_rn(values[0], scale), __fdiv_rn(values[1], scale)), __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(
        make_float2(__fdiv_rn(values[2], scale), __fdiv_rn(values[3], scale)), __NV_SATFINITE, __NV_E4M3);
    return low | high << 16;
  }
};

struct ToInt8 {
  static constexpr float kLargest = 127;
  static __device__ __forceinline__ uint32_t four(const float* values, float scale) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) word |= (__float2int_rn(__fdiv_rn(values[i], scale)) & 0xFF) << 8 * i;
    return word;
  }
};

// Of the bits of the largest size. Sizes are compared as integers, among which a NaN is the largest: it makes the scale
// a NaN, and so all that the token is multiplied with.
template <typename To>
__device__ __forceinline__ float scale_of(uint32_t size) {
  const float maximum = __uint_as_float(size);
  return __fdiv_rn(maximum < kSmallestMaximum ? kSmallestMaximum : maximum, To::kLargest);
}

__device__ __forceinline__ uint32_t largest_size(const float (&values)[kValues]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kValues; i++) largest = max(largest, __float_as_uint(fabsf(values[i])));
  return largest;
}

template <typename To>
__device__ __forceinline__ void store_codes(uint8_t* to, const float (&values)[kValues], float scale) {
  *reinterpret_cast<uint2*>(to) = make_uint2(To::four(values, scale), To::four(values + 4, scale));
}

// --- activations ------------------------------------------------------------------------------------------------------

// A block has a token, or a row of a matrix.
template <typename To>
__device__ void quantise_rows(const bf16* from, uint8_t* codes, float* scales, int columns) {
  __shared__ uint32_t largest_of_warps[kThreads / 32];
  wait_for_previous_kernel();
  const bf16* row = from + int64_t(blockIdx.x) * columns;
  uint32_t largest = 0;
  float values[kValues];
  for (int column = threadIdx.x * kValues; column < columns; column += kThreads * kValues) {
    load_values<kValues>(row + column, values);
    largest = max(largest, largest_size(values));
  }
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0) largest_of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; warp++) largest = max(largest, largest_of_warps[warp]);
  const float scale = scale_of<To>(largest);
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
  for (int column = threadIdx.x * kValues; column < columns; column += kThreads * kValues) {
    load_values<kValues>(row + column, values);
    store_codes<To>(codes + int64_t(blockIdx.x) * columns + column, values, scale);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    quantise_rows_fp8(const bf16* from, uint8_t* codes, float* scales, int columns) {
  quantise_rows<ToFp8>(from, codes, scales, columns);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    quantise_rows_int8(const bf16* from, uint8_t* codes, float* scales, int columns) {
  quantise_rows<ToInt8>(from, codes, scales, columns);
}

// 16 threads have 128 columns of a token; `scales [columns / 128, pitch]`, so that those of one group lie side by side.
extern "C" __global__ void quantise_groups_fp8(const bf16* from, uint8_t* codes, float* scales, int64_t groups,
                                               int groups_of_row, int pitch) {
  constexpr int kGroupThreads = kTileColumns / kValues;
  const int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, group = index / kGroupThreads;
  if (group >= groups) return;
  wait_for_previous_kernel();
  float values[kValues];
  load_values<kValues>(from + index * kValues, values);
  // All 16 threads are here, or none is.
  const float scale = scale_of<ToFp8>(__reduce_max_sync(0xFFFFu << (threadIdx.x & 16), largest_size(values)));
  store_codes<ToFp8>(codes + index * kValues, values, scale);
  if (index % kGroupThreads == 0) scales[group % groups_of_row * pitch + group / groups_of_row] = scale;
}

// --- weights ----------------------------------------------------------------------------------------------------------

namespace {

// A block has a tile. Thread q of four holds, of each 16 columns, 2 q, 2 q + 1, 2 q + 8 and 2 q + 9; kLow and kHigh
// choose the first two and the last two of them out of two words.
template <uint32_t kLow, uint32_t kHigh, uint32_t kFlips>
__device__ void rows_of_tile(const uint8_t* tiles, uint8_t* codes, float* scales, int rows, int columns, int tile_bytes,
                             int scale_rows, int blocks_pitch) {
  const int thread = threadIdx.x, in_tile = thread / 4, quarter = thread % 4, chunk = blockIdx.x, tile_row = blockIdx.y;
  const uint8_t* tile = tiles + (int64_t(tile_row) * gridDim.x + chunk) * tile_bytes;
  const int row = tile_row / 2 * 64 + in_tile / 8 * 16 + tile_row % 2 * 8 + in_tile % 8;
  const float* tile_scales = reinterpret_cast<const float*>(tile + kCodeBytes);
  // Weights depend on nothing; where they go, the kernel ahead may still read those of another matrix.
  uint4 pieces[2];
#pragma unroll
  for (int piece = 0; piece < 2; piece++)
    pieces[piece] = *reinterpret_cast<const uint4*>(tile + (piece * kTileThreads + thread) * 16);
  wait_for_previous_kernel();
#pragma unroll
  for (int piece = 0; piece < 2; piece++) {
    const uint32_t steps[4] = {pieces[piece].x, pieces[piece].y, pieces[piece].z, pieces[piece].w};
    const uint4 step = gathered(steps);  // the words of all four threads
    const int column = chunk * kTileColumns + piece * 64 + quarter * 16;
    if (row >= rows || column >= columns) continue;
    *reinterpret_cast<uint4*>(codes + int64_t(row) * columns + column) =
        make_uint4(__byte_perm(step.x, step.y, kLow) ^ kFlips, __byte_perm(step.z, step.w, kLow) ^ kFlips,
                   __byte_perm(step.x, step.y, kHigh) ^ kFlips, __byte_perm(step.z, step.w, kHigh) ^ kFlips);
  }
  if (blocks_pitch > 0) {  // of 128 rows: four tiles
    if (thread == 0 && tile_row % 4 == 0) scales[tile_row / 4 * blocks_pitch + chunk] = tile_scales[0];
  } else if (chunk == 0 && quarter == 0 && row < rows) {
    scales[row] = tile_scales[scale_rows > 1 ? in_tile : 0];
  }
}

}  // namespace

// `codes [rows, columns]`, and `scales`: of blocks of 128 x 128, `[rows / 128, blocks_pitch]`, or `[rows]` where
// blocks_pitch is 0. The grid has a block for each tile, those along K first; columns are a multiple of 16.
extern "C" __global__ void rows_of_tiles_fp8(const uint8_t* tiles, uint8_t* codes, float* scales, int rows, int columns,
                                             int tile_bytes, int scale_rows, int blocks_pitch) {
  rows_of_tile<0x7531, 0x6420, 0>(tiles, codes, scales, rows, columns, tile_bytes, scale_rows, blocks_pitch);
}

// The same, where a tile holds 128 more than each code.
extern "C" __global__ void rows_of_tiles_int8(const uint8_t* tiles, uint8_t* codes, float* scales, int rows,
                                              int columns, int tile_bytes, int scale_rows, int blocks_pitch) {
  rows_of_tile<0x5410, 0x7632, 0x80808080u>(tiles, codes, scales, rows, columns, tile_bytes, scale_rows, blocks_pitch);
}

// --- sums of INT8 -----------------------------------------------------------------------------------------------------

namespace {

// Eight columns of a token: `sums * (scale of the token * scale of the row)`.
__device__ __forceinline__ void scaled(const int32_t* sums, const float* row_scales, float token_scale,
                                       float (&values)[kValues]) {
  float scales[kValues];
  load_values(row_scales, scales);
#pragma unroll
  for (int i = 0; i < kValues; i += 4) {
    const int4 four = *reinterpret_cast<const int4*>(sums + i);
    values[i] = float(four.x) * (token_scale * scales[i]);
    values[i + 1] = float(four.y) * (token_scale * scales[i + 1]);
    values[i + 2] = float(four.z) * (token_scale * scales[i + 2]);
    values[i + 3] = float(four.w) * (token_scale * scales[i + 3]);
  }
}

}  // namespace

// `y [tokens, columns]` BF16; the grid is tokens, then columns.
extern "C" __global__ void scale_sums_store(const int32_t* sums, const float* token_scales, const float* row_scales,
                                            bf16* y, int columns) {
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * kValues;
  if (column >= columns) return;
  wait_for_previous_kernel();
  const int64_t at = int64_t(blockIdx.x) * columns + column;
  float values[kValues];
  scaled(sums + at, row_scales + column, token_scales[blockIdx.x], values);
  store<kValues>(y + at, pack(values));
}

// `y [tokens, columns]` of `sums [tokens, 2 columns]`: silu(gate) * up, with the roundings of linear.cu.
extern "C" __global__ void scale_sums_swiglu(const int32_t* sums, const float* token_scales, const float* row_scales,
                                             bf16* y, int columns) {
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * kValues;
  if (column >= columns) return;
  wait_for_previous_kernel();
  const int32_t* row = sums + int64_t(blockIdx.x) * 2 * columns + column;
  const float token_scale = token_scales[blockIdx.x];
  float gate[kValues], up[kValues], values[kValues];
  scaled(row, row_scales + column, token_scale, gate);
  scaled(row + columns, row_scales + columns + column, token_scale, up);
#pragma unroll
  for (int i = 0; i < kValues; i++) values[i] = silu(rounded(gate[i])) * rounded(up[i]);
  store<kValues>(y + int64_t(blockIdx.x) * columns + column, pack(values));
}
