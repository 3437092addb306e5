// Adapters as more columns of a product's K: y = x W^T + (A x) B^T, summed in float32 and rounded once.
//
// The B of all slots lie next to each other, and A x is zero but in the columns of its token's slot, so that tokens of
// any adapters and of none are one product. A x is float32 cut into two BF16 halves, which are multiplied by the same
// B. Each piece of the rows (Q, K, V; gate, up) has a B of its own: the map of a piece ends where its rows do, and the
// copy engine writes zeros into the rows of a tile that are not the piece's, which are not read from memory.
#pragma once
#include <cstdint>
#include <cuda.h>

namespace {

constexpr int kMostAdapterPieces = 3;
constexpr int kAdapterColumns = 64;  // of a chunk

// cuda/lora/adapted_gemm.py repeats it.
struct alignas(64) AdapterMaps {
  CUtensorMap b[kMostAdapterPieces];  // of each piece [its rows, columns]
  CUtensorMap shrunk;                 // [T, pieces, 2, columns]
  int starts[kMostAdapterPieces];     // row of each piece, in units of 16; 0 where gate and up rows alternate
  int pieces, columns;                // the last a multiple of kAdapterColumns
  int halves;                         // of A x that are multiplied: 2, or 1, which leaves A x rounded

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

}  // namespace
