// What grouped_gemm.cuh multiplies and how a block divides it.
#pragma once
#include "common/vectors.cuh"
#include "gemm/weight_formats.cuh"

namespace grouped {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kVectorBytes = 16;  // bytes of one copy

enum Epilogue { kStore, kSwiglu };

struct Problem {
  const uint8_t* codes;    // [matrices, rows, row bytes]
  const uint8_t* scales;   // [matrices, rows / scale_rows, scale pitch]
  const bf16* x;           // [.., k]
  bf16* y;                 // [positions, rows], or [positions, rows / 2]
  const int4* tiles;       // (matrix, first position, positions) of each blockIdx.y; null: matrix blockIdx.z has all
  const int* sorted_tokens;  // the row of x of each position; null: its own
  int rows, k,
      row_bytes;  // of a matrix; bytes of a row of codes, a multiple of 16, of 64 where they are quantised to 4 or 8 bits
  int scale_rows, scale_pitch;  // rows that share a scale; bytes of a row of scales
  int num_positions;            // where there are no tiles
  int weights_first;            // whether tiles are older than the kernel ahead: then weights are read before it ends
  float limit;
};

template <typename Format_, int kRows_, int kTokens_, int kWarpRows_, int kWarpColumns_, int kVectors_, int kStages_>
struct Shape {
  using Format = Format_;
  static constexpr int kRows = kRows_, kTokens = kTokens_, kStages = kStages_;
  static constexpr int kVectors = kVectors_;                                      // of codes, per thread and row
  static constexpr int kFragments = Format::kFragments;                           // of 8 values, in one of them
  static constexpr int kWarpRows = kWarpRows_, kWarpColumns = kWarpColumns_;      // warps along rows, along a chunk
  static constexpr int kWarpTokens = kWarps / kWarpRows / kWarpColumns;           // and along tokens
  static constexpr int kColumns = 32 * kVectors * kFragments * kWarpColumns;      // of a chunk
  static constexpr int kRowTiles = kRows / 16 / kWarpRows, kTokenTiles = kTokens / 8 / kWarpTokens;
  static constexpr int kCodeVectors = 4 * kVectors * kWarpColumns,
                       kXVectors = kColumns * 2 / kVectorBytes;  // of a row's chunk
  static constexpr int kScaleChunk = kColumns / 32 * Format::kScaleBytes;
  static constexpr int kScaleCopyBytes = kScaleChunk < kVectorBytes ? kScaleChunk : kVectorBytes;  // of one copy
  static constexpr int kCodeBytes = kRows * kCodeVectors * kVectorBytes, kXBytes = kTokens * kXVectors * kVectorBytes;
  static constexpr int kStageBytes = kCodeBytes + kXBytes + kRows * kScaleChunk;
  static constexpr bool kScalesSums = Format::kQuantised && kTokenTiles == 1;
};

// Which part of a block's tile a warp multiplies.
template <typename S>
struct Warp {
  int g, t;                     // of mma: lane / 4, lane % 4
  int row_tile, token_tile;     // the first of each
  int split;                    // of a chunk's columns

  __device__ Warp() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, side = warp % (kWarps / S::kWarpColumns);
    g = lane / 4, t = lane % 4, split = warp / (kWarps / S::kWarpColumns);
    row_tile = side / S::kWarpTokens * S::kRowTiles, token_tile = side % S::kWarpTokens * S::kTokenTiles;
  }
};

// Which weights and positions a block multiplies. Of several matrices without tiles each has a part of every position:
// x and y are [positions, matrices, ..], and a part is a row.
template <typename S, Epilogue kEpilogue>
struct Work {
  int matrix, begin, count, first_feature;

  __device__ Work(const Problem& p) {
    first_feature = blockIdx.x * (kEpilogue == kSwiglu ? S::kRows / 2 : S::kRows);
    if (p.tiles != nullptr) {
      const int4 tile = p.tiles[blockIdx.y];
      matrix = tile.x, begin = tile.y, count = tile.z;
    } else {
      matrix = blockIdx.z, begin = blockIdx.y * S::kTokens, count = min(S::kTokens, p.num_positions - begin);
    }
  }

  // The row of y, and of x without `sorted_tokens`, of a position.
  __device__ __forceinline__ int64_t row_of_position(int position) const {
    return int64_t(position) * gridDim.z + blockIdx.z;
  }

  // The row of the matrix that row `row` of the tile is, or -1.
  __device__ __forceinline__ int row_of(const Problem& p, int row) const {
    if constexpr (kEpilogue == kStore) return first_feature + row < p.rows ? first_feature + row : -1;
    const int feature = first_feature + row / 16 * 8 + row % 8;
    return feature >= p.rows / 2 ? -1 : row % 16 < 8 ? feature : feature + p.rows / 2;
  }
};

}  // namespace grouped
