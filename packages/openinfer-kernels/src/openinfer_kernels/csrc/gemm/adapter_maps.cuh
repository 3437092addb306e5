// Adapters as more columns of a product's K: y = x W^T + (A x) B^T, summed in float32 and rounded once.
//
// The B of all slots lie next to each other, and A x is zero but in the columns of its token's slot, so that tokens of
// any adapters and of none are one product. A x is float32 cut into two BF16 halves, which are multiplied by the same
// B. Each piece of the rows (Q, K, V; gate, up) has a B of its own: the map of a piece ends where its rows do, and the
// copy engine writes zeros into the rows of a tile that are not the piece's, which are not read from memory.
//
// A x is made by tiles like those of W, whose rows are the A's of all slots: the first tiles of the same grid, which
// those of W wait for when they have all chunks but these; or those of a launch ahead that has no others.
//
// Where one tile has all tokens (kParts) each weight is read once, and a tile of A with all of K would take as long as
// those of W, which would wait for it: so K is divided into parts, each of which leaves float32 sums of every token's
// own slot. Who multiplies a tile of W adds them up and leaves A x in the stages of B's chunks, where the copy engine
// leaves X, while the last chunks of W are on their way.
#pragma once
#include <cstdint>
#include <cuda.h>

#include "gemm/gemm_epilogue.cuh"
#include "lora/halves.cuh"
#include "lora/lora_mma.cuh"

namespace {

constexpr int kMostAdapterPieces = 3;
constexpr int kAdapterColumns = 64;  // of a chunk
constexpr int kMostParts = 5;  // cuda/gemm/tiles.py repeats it

// Prompts (kSteps) have a launch of their own ahead that makes A x and says which steps of 16 columns each 64 tokens need,
// of one adapter one: lora/prompt_shrink.cu. A tile has those steps of B and A x alone, in boxes of 16 columns, several
// in a stage.
//
// How a product has adapters. With kBeside tiles of W are those without adapters, bit for bit: A x is left as kParts
// leaves it, in one part, and the kernel after this one adds B (A x): lora/deferred_delta.cuh.
enum Adapted { kNone, kHalves, kParts, kBeside, kSteps };

// cuda/lora/adapted_gemm.py repeats it.
struct alignas(128) AdapterMaps {
  CUtensorMap b[kMostAdapterPieces];  // of each piece [its rows, columns]
  CUtensorMap shrunk;                 // [T, pieces, 2, columns]; for kSteps [T, pieces, columns]
  CUtensorMap a;                      // [slots P r, k], where tiles make A x
  const int* slots;                   // [T]
  void* out;                          // what `shrunk` is a map of; or float32 [parts, T, pieces rank]
  int starts[kMostAdapterPieces];     // row of each piece, in units of 16; 0 where gate and up rows alternate
  int pieces, columns, rank;          // columns: a multiple of kAdapterColumns
  int halves;                         // of A x that are multiplied: 2, or 1, which leaves A x rounded
  int shrink_tiles;                   // column tiles of A in this launch, before those of W
  int parts;                          // into which K of A x is divided for kParts
  const uint32_t* steps;              // [ceil(T / 64)], a bit for each 16 columns, for kSteps

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
      uint16_t* at = static_cast<uint16_t*>(maps.out) + token * token_values + piece * 2 * maps.columns +
                     of * maps.rank + column % maps.rank + threadIdx.x % 4 * 2;
      if (token < m) write(at, slot == of, sums[block].x, sums[block].y);
      if (token + 8 < m) write(at + 8 * token_values, lower_slot == of, sums[block].z, sums[block].w);
    }
  }
};

// The same where K is divided into parts: float32 sums, and of each token's own slot alone.
struct PartTarget : ShrunkTarget {
  int part;

  __device__ __forceinline__ PartTarget(const ShrunkTarget& target, int part) : ShrunkTarget(target), part(part) {}

  __device__ __forceinline__ PartTarget below(int) const { return *this; }  // these tiles have 64 tokens a warpgroup

  __device__ __forceinline__ void store(int group, const float4 (&sums)[kGroup]) const {
    const int token_values = maps.pieces * maps.rank;
#pragma unroll
    for (int block = 0; block < kGroup; block++) {
      const int column = first_column + (group * kGroup + block) * 8;
      if (column >= end_column) continue;
      const int row = column / maps.rank, of = row / maps.pieces, piece = row % maps.pieces;
      float* at = static_cast<float*>(maps.out) + (int64_t(part) * m + token) * token_values + piece * maps.rank +
                  column % maps.rank + threadIdx.x % 4 * 2;
      if (slot == of) *reinterpret_cast<float2*>(at) = make_float2(sums[block].x, sums[block].y);
      if (lower_slot == of)
        *reinterpret_cast<float2*>(at + 8 * token_values) = make_float2(sums[block].z, sums[block].w);
    }
  }
};

// Leaves A x of a tile's tokens, in the columns of a chunk of B, where chunks of X lie: rounded to BF16, swizzled by 128
// bytes, and zero but in a token's own columns. By two threads a token, which have every other group of 8 columns.
__device__ __forceinline__ void fill_from_parts(uint8_t* x, const AdapterMaps& maps, const AdapterChunk& chunk, int m,
                                                int slot) {
  constexpr int kGroups = kAdapterColumns / 8;
  const int token = threadIdx.x / 2, token_values = maps.pieces * maps.rank;
  uint8_t* row = x + token * kGroups * 16;
  auto place = [&](int of) { return reinterpret_cast<uint4*>(row + (of ^ token % 8) * 16); };
  const int first = (slot * maps.rank - chunk.column) / 8;  // group of the slot's first column, which may be outside
  const int begin = slot < 0 ? 0 : max(first, 0), end = slot < 0 ? 0 : min(first + maps.rank / 8, kGroups);
#pragma unroll
  for (int i = 0; i < kGroups; i += 2) {
    const int group = i + threadIdx.x % 2;
    if (group < begin || group >= end) *place(group) = make_uint4(0, 0, 0, 0);
  }
  const float* shrunk =
      static_cast<const float*>(maps.out) + int64_t(token) * token_values + chunk.piece * maps.rank - first * 8;
  for (int group = begin + (begin + threadIdx.x) % 2; group < end; group += 2) {
    float4 parts[kMostParts][2];
#pragma unroll
    for (int part = 0; part < kMostParts; part++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        parts[part][half] = lora::four_if(part < maps.parts,
                                          shrunk + int64_t(part) * m * token_values + group * 8 + half * 4);
    float4 sums[2] = {parts[0][0], parts[0][1]};
#pragma unroll
    for (int part = 1; part < kMostParts; part++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        sums[half].x += parts[part][half].x, sums[half].y += parts[part][half].y;
        sums[half].z += parts[part][half].z, sums[half].w += parts[part][half].w;
      }
    *place(group) = make_uint4(packed(sums[0].x, sums[0].y), packed(sums[0].z, sums[0].w), packed(sums[1].x, sums[1].y),
                               packed(sums[1].z, sums[1].w));
  }
}

}  // namespace
