// Adapters as more columns of a product's K: y = x W^T + (A x) B^T, summed in float32 and rounded once.
//
// The B of all slots lie next to each other, and A x is zero but in the columns of its token's slot, so that tokens of
// any adapters and of none are one product. A x is float32 cut into two BF16 halves, which are multiplied by the same
// B. Each piece of the rows (Q, K, V; gate, up) has a B of its own: the map of a piece ends where its rows do, and the
// copy engine writes zeros into the rows of a tile that are not the piece's, which are not read from memory.
//
// A x is made by tiles like those of W, whose rows are the A's of all slots: the first tiles of the same grid, which
// those of W wait for when they have all chunks but these; or those of a launch ahead that has no others.
#pragma once
#include <cstdint>
#include <cuda.h>

#include "gemm/gemm_epilogue.cuh"
#include "lora/halves.cuh"
#include "lora/lora_mma.cuh"

namespace {

constexpr int kMostAdapterPieces = 3;
constexpr int kAdapterColumns = 64;  // of a chunk

// cuda/lora/adapted_gemm.py repeats it.
struct alignas(128) AdapterMaps {
  CUtensorMap b[kMostAdapterPieces];  // of each piece [its rows, columns]
  CUtensorMap shrunk;                 // [T, pieces, 2, columns]
  CUtensorMap a;                      // [slots P r, k], where tiles make A x
  const int* slots;                   // [T]
  uint16_t* out;                      // what `shrunk` is a map of
  int starts[kMostAdapterPieces];     // row of each piece, in units of 16; 0 where gate and up rows alternate
  int pieces, columns, rank;          // columns: a multiple of kAdapterColumns
  int halves;                         // of A x that are multiplied: 2, or 1, which leaves A x rounded
  int shrink_tiles;                   // column tiles of A in this launch, before those of W

  __device__ __forceinline__ int chunks(int halves_apart) const {
    return pieces * (columns / kAdapterColumns) * halves_apart;
  }
};

struct AdapterChunk {
  int piece, column, half;

  // `halves_apart`: chunks that have the same columns of B.
  __device__ __forceinline__ AdapterChunk(const AdapterMaps& maps, int index, int halves_apart) {
    half = index % halves_apart;
    index /= halves_apart;
    const int chunks = maps.columns / kAdapterColumns;
    piece = index / chunks, column = index % chunks * kAdapterColumns;
  }

  __device__ __forceinline__ int shrunk_column(const AdapterMaps& maps, int which) const {
    return (piece * 2 + which) * maps.columns + column;
  }
};

// Of the product that runs, as in lora/decode_adapters.cuh.
__device__ unsigned parts_ready, blocks_served;

// Where a tile's columns are rows of A: its sums become A x. As Target of gemm_epilogue.cuh, but for 4 blocks always.
struct ShrunkTarget {
  const AdapterMaps& maps;
  int m, token, first_column;

  __device__ __forceinline__ ShrunkTarget below(int high) const { return {maps, m, token + high * 64, first_column}; }

  // Two columns of a token: zeros but in those of its own slot.
  __device__ __forceinline__ void write(int to, int column, float first, float second) const {
    if (to >= m || column >= maps.columns * maps.pieces) return;
    const int row = column / maps.rank, slot = row / maps.pieces, piece = row % maps.pieces;
    const bool is_own = __ldcg(maps.slots + to) == slot;
    const lora::Halves halves(is_own ? first : 0.0f, is_own ? second : 0.0f);
    uint16_t* at = maps.out + (int64_t(to) * maps.pieces + piece) * 2 * maps.columns + slot * maps.rank + column % maps.rank;
    *reinterpret_cast<uint32_t*>(at) = halves.high;
    if (maps.halves > 1) *reinterpret_cast<uint32_t*>(at + maps.columns) = halves.low;
  }

  __device__ __forceinline__ void store(int group, const float4 (&sums)[kGroup]) const {
#pragma unroll
    for (int block = 0; block < kGroup; block++) {
      const int column = first_column + (group * kGroup + block) * 8 + threadIdx.x % 4 * 2;
      write(token, column, sums[block].x, sums[block].y);
      write(token + 8, column, sums[block].z, sums[block].w);
    }
  }
};

}  // namespace
