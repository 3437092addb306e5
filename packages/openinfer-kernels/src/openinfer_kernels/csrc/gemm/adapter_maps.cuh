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

  // Of a piece.
  __device__ __forceinline__ int chunks() const { return columns / kAdapterColumns * halves; }

  // Whose rows are among those from `unit` to `end`, in units of 16; of gate and up that alternate both.
  __device__ __forceinline__ int first_piece(int unit) const {
    int piece = 0;
#pragma unroll
    for (int i = 1; i < kMostAdapterPieces; i++) piece += i < pieces && starts[i] > 0 && starts[i] <= unit;
    return piece;
  }
  __device__ __forceinline__ int end_piece(int end) const {
    int piece = 1;
#pragma unroll
    for (int i = 1; i < kMostAdapterPieces; i++) piece += i < pieces && starts[i] < end;
    return piece;
  }
};

struct AdapterChunk {
  int piece, column, half;

  // Chunk `index` of those of a tile, of which `first_piece` is the first.
  __device__ __forceinline__ AdapterChunk(const AdapterMaps& maps, int first_piece, int index) {
    half = index % maps.halves;
    index /= maps.halves;
    const int chunks = maps.columns / kAdapterColumns;
    piece = first_piece + index / chunks, column = index % chunks * kAdapterColumns;
  }

  __device__ __forceinline__ int shrunk_column(const AdapterMaps& maps, int which) const {
    return (piece * 2 + which) * maps.columns + column;
  }
};

// Of the product that runs, as in lora/decode_adapters.cuh.
__device__ unsigned parts_ready, blocks_served;

// Where a tile's columns are rows of A: its sums become A x. As Target of gemm_epilogue.cuh, but for 4 blocks always.
//
// Slots of the thread's two tokens are read once: stores may alias them for all that a compiler knows, so that each of
// dozens of columns waited for a read of its own.
struct ShrunkTarget {
  const AdapterMaps& maps;
  int m, token, first_column, end_column;  // what is beyond the tile's end is the next tile's
  int slot, lower_slot;                    // of `token`, and of the eighth after it

  __device__ __forceinline__ ShrunkTarget(const AdapterMaps& maps, int m, int token, int first_column, int columns)
      : maps(maps),
        m(m),
        token(token),
        first_column(first_column),
        end_column(min(first_column + columns, maps.columns * maps.pieces)),
        slot(slot_of(token)),
        lower_slot(slot_of(token + 8)) {}

  __device__ __forceinline__ ShrunkTarget below(int high) const {
    return high == 0 ? *this : ShrunkTarget(maps, m, token + high * 64, first_column, end_column - first_column);
  }

  __device__ __forceinline__ int slot_of(int of) const { return of < m ? __ldcg(maps.slots + of) : -1; }

  // Two columns of a token: zeros but in those of its own slot.
  __device__ __forceinline__ void write(uint16_t* at, bool is_own, float first, float second) const {
    const lora::Halves halves(is_own ? first : 0.0f, is_own ? second : 0.0f);
    *reinterpret_cast<uint32_t*>(at) = halves.high;
    if (maps.halves > 1) *reinterpret_cast<uint32_t*>(at + maps.columns) = halves.low;
  }

  __device__ __forceinline__ void store(int group, const float4 (&sums)[kGroup]) const {
    const int64_t token_values = int64_t(maps.pieces) * 2 * maps.columns;
#pragma unroll
    for (int block = 0; block < kGroup; block++) {
      const int column = first_column + (group * kGroup + block) * 8;  // whole ranks are multiples of 8
      if (column >= end_column) continue;
      const int row = column / maps.rank, of = row / maps.pieces, piece = row % maps.pieces;
      uint16_t* at = maps.out + token * token_values + piece * 2 * maps.columns + of * maps.rank + column % maps.rank +
                     threadIdx.x % 4 * 2;
      if (token < m) write(at, slot == of, sums[block].x, sums[block].y);
      if (token + 8 < m) write(at + 8 * token_values, lower_slot == of, sums[block].z, sums[block].w);
    }
  }
};

}  // namespace
