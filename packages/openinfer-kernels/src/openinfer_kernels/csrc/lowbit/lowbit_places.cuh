// Where rows and columns of a matrix stand in the tiles of lowbit_tiles.cuh. A compiler for the host takes this as well,
// for a test.
#pragma once

#ifdef __CUDACC__
#define LOWBIT_FUNCTION __host__ __device__ inline
#else
#define LOWBIT_FUNCTION inline
#endif

namespace lowbit {

constexpr int kTileRows = 32, kTileColumns = 128;
constexpr int kTileThreads = 128;
constexpr int kSteps = kTileColumns / 16;

// Where in a tile a code of a byte stands.
LOWBIT_FUNCTION int byte_place(int row, int column) {
  const int thread = row * 4 + column % 8 / 2, step = column / 16, inside = column % 2 + column / 8 % 2 * 2;
  return step / 4 * (kTileThreads * 16) + thread * 16 + step % 4 * 4 + inside;
}

// The bits of two neighbouring columns of four bits: those of the even one begin at bit `shift` of the lower half of
// 32-bit word `word`, those of the odd one in its upper half.
struct NibblePlace {
  int word, shift;
};

LOWBIT_FUNCTION NibblePlace nibble_place(int row, int column) {
  const int thread = row * 4 + column % 8 / 2, step = column / 16;
  return {thread * 4 + step / 2, step % 2 * 8 + column / 8 % 2 * 4};
}

LOWBIT_FUNCTION int row_in_tile(int row) { return row / 16 % 4 * 8 + row % 8; }

LOWBIT_FUNCTION int tile_of_row(int row) { return row / 64 * 2 + row / 8 % 2; }

}  // namespace lowbit
