// Codes, scales and zero points on their way into the tiles of lowbit_tiles.cuh, and whole matrices out of them.
#include "common/pdl.cuh"
#include "gemm/gemm_epilogue.cuh"
#include "lowbit/lowbit_tiles.cuh"

using namespace lowbit;

namespace {

// Where the tiles of a matrix lie.
struct Tiles {
  uint8_t* first;
  int chunks, tile_bytes;  // along K

  __device__ uint8_t* of(int row, int chunk) const {
    return first + (int64_t(tile_of_row(row)) * chunks + chunk) * tile_bytes;
  }
};

__device__ int64_t thread_index() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }

// Four codes of a byte each, of one row; `places` has the byte of a word to which each of them goes.
__device__ void arrange_bytes(const uint32_t* from, const Tiles& tiles, int64_t first, int64_t count, int row_bytes,
                              int first_row, uint32_t places) {
  const int64_t at = thread_index() * 4;
  if (at >= count) return;
  const uint32_t word = from[at / 4];
  const int row = first_row + int((first + at) / row_bytes), column = int((first + at) % row_bytes);
  uint8_t* tile = tiles.of(row, column / kTileColumns);
  for (int i = 0; i < 4; i++) {
    const int place = byte_place(row_in_tile(row), (column + i) % kTileColumns);
    tile[place / 4 * 4 + (places >> 4 * (place % 4) & 3)] = word >> 8 * i;
  }
}

}  // namespace

// `count` bytes of a matrix's codes with rows of `row_bytes`, from byte `first` on; its first row is row `first_row` of
// the tiles. Bytes are a multiple of 4.
extern "C" __global__ void arrange_tiles_bytes(const uint32_t* from, uint8_t* tiles, int64_t first, int64_t count,
                                               int row_bytes, int first_row, int chunks, int tile_bytes) {
  arrange_bytes(from, {tiles, chunks, tile_bytes}, first, count, row_bytes, first_row, 0x3210);
}

extern "C" __global__ void arrange_tiles_fp8(const uint32_t* from, uint8_t* tiles, int64_t first, int64_t count,
                                             int row_bytes, int first_row, int chunks, int tile_bytes) {
  arrange_bytes(from, {tiles, chunks, tile_bytes}, first, count, row_bytes, first_row, 0x2031);
}

// The same for codes of four bits, the even column the low half of a byte. Bytes are a multiple of 8: 16 columns.
extern "C" __global__ void arrange_tiles_nibbles(const uint32_t* from, uint8_t* tiles, int64_t first, int64_t count,
                                                 int row_bytes, int first_row, int chunks, int tile_bytes) {
  const int64_t at = thread_index() * 8;
  if (at >= count) return;
  const uint32_t low = from[at / 4], high = from[at / 4 + 1];
  const int row = first_row + int((first + at) / row_bytes), column = int((first + at) % row_bytes) * 2;
  uint8_t* tile = Tiles{tiles, chunks, tile_bytes}.of(row, column / kTileColumns);
  for (int thread = 0; thread < 4; thread++) {
    const NibblePlace place = nibble_place(row_in_tile(row), column % kTileColumns + 2 * thread);
    uint8_t* word = tile + place.word * 4 + place.shift / 8;
    word[0] = (low >> 8 * thread & 15) | (high >> 8 * thread & 15) << 4;
    word[2] = (low >> (8 * thread + 4) & 15) | (high >> (8 * thread + 4) & 15) << 4;
  }
}

namespace {

// One value of `from [rows / block_rows, columns / block_columns]` for each group of 128 / `groups` columns of each row,
// or of each tile where `tile_rows` is 1; zeros where there is nothing.
template <typename Value>
__device__ void arrange_scales(const Value* from, uint8_t* tiles, int64_t count, int offset, int tile_rows, int groups,
                               int rows, int columns, int block_rows, int block_columns, int chunks, int tile_bytes) {
  const int64_t index = thread_index();
  if (index >= count) return;
  const int in_tile = int(index % tile_rows), group = int(index / tile_rows % groups);
  const int64_t tile = index / tile_rows / groups;
  const int tile_row = int(tile / chunks), chunk = int(tile % chunks);
  const int row = tile_row / 2 * 64 + in_tile / 8 * 16 + tile_row % 2 * 8 + in_tile % 8;
  const int column = chunk * kTileColumns + group * (kTileColumns / groups);
  const int pitch = (columns + block_columns - 1) / block_columns;
  Value* to = reinterpret_cast<Value*>(tiles + tile * tile_bytes + offset);
  to[group * tile_rows + in_tile] =
      row < rows && column < columns ? from[int64_t(row / block_rows) * pitch + column / block_columns] : Value(0);
}

}  // namespace

#define ARRANGE_SCALES(BITS)                                                                                           \
  extern "C" __global__ void arrange_scales_##BITS(const uint##BITS##_t* from, uint8_t* tiles, int64_t count,          \
                                                   int offset, int tile_rows, int groups, int rows, int columns,       \
                                                   int block_rows, int block_columns, int chunks, int tile_bytes) {    \
    arrange_scales(from, tiles, count, offset, tile_rows, groups, rows, columns, block_rows, block_columns, chunks,    \
                   tile_bytes);                                                                                        \
  }

ARRANGE_SCALES(16)
ARRANGE_SCALES(32)

namespace {

// Two BF16 numbers times a float32, rounded once.
__device__ uint32_t times(uint32_t pair, float factor) {
  return bits_of(__floats2bfloat162_rn(__uint_as_float(pair << 16) * factor,
                                       __uint_as_float(pair & 0xFFFF0000u) * factor));
}

// A block has a tile; 16 columns of a row are of four threads. The next kernel may not begin before: it would read what
// is written here as a weight, which is read before any wait.
template <typename Format>
__device__ void dequantise_tile(const uint8_t* tiles, __nv_bfloat16* to, int rows, int columns, int tile_bytes,
                                const Scales& scales, const float* factors = nullptr) {
  constexpr int kStepsOfPiece = kSteps / Format::kPieces;
  const int thread = threadIdx.x, in_tile = thread / 4, chunk = blockIdx.x, tile_row = blockIdx.y;
  const uint8_t* tile = tiles + (int64_t(tile_row) * gridDim.x + chunk) * tile_bytes;
  const Rows<Format> from{{tile, tile}, thread};
  const int row = tile_row / 2 * 64 + in_tile / 8 * 16 + tile_row % 2 * 8 + in_tile % 8;
  wait_for_previous_kernel();
  const float factor = Format::kHasFactors && row < rows ? factors[row] : 0;
#pragma unroll
  for (int first = 0; first < kSteps; first += 2) {  // 32 columns, of one group or of two
    const int group = first * scales.groups / kSteps, column = chunk * kTileColumns + first * 16 + thread % 4 * 8;
    const typename Format::Factor scale(from.scale(scales, 0, group));
    const auto zero = from.zero(scales, 0, group);
    uint32_t words[kGroup];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int step = first + i;
      uint32_t pairs[2];
      if constexpr (Format::kHasFactors) {
        const typename Format::Factor own(from.scale(scales, 0, step * scales.groups / kSteps));
        Format::weights(from.piece(0, step / kStepsOfPiece), step % kStepsOfPiece, zero, own, pairs);
        pairs[0] = times(pairs[0], factor), pairs[1] = times(pairs[1], factor);
      } else {
        Format::weights(from.piece(0, step / kStepsOfPiece), step % kStepsOfPiece, zero, scale, pairs);
      }
      words[2 * i] = pairs[0], words[2 * i + 1] = pairs[1];
    }
    const uint4 eight = gathered(words);
    if (row < rows && column < columns) *reinterpret_cast<uint4*>(to + int64_t(row) * columns + column) = eight;
  }
}

}  // namespace

// `to [rows, columns]` BF16; the grid has a block for each tile, those along K first.
#define DEQUANTISE_TILES(NAME, FORMAT)                                                                                \
  extern "C" __global__ void dequantise_tiles_##NAME(const uint8_t* tiles, __nv_bfloat16* to, int rows, int columns,  \
                                                     int tile_bytes, int groups, int float16_scales, int scale_rows,  \
                                                     int zeros) {                                                     \
    dequantise_tile<FORMAT>(tiles, to, rows, columns, tile_bytes, {groups, float16_scales, scale_rows, zeros});       \
  }

DEQUANTISE_TILES(fp8, Fp8)
DEQUANTISE_TILES(int8, Int8)
DEQUANTISE_TILES(int4, Int4)
DEQUANTISE_TILES(int4_min, Int4Min)
DEQUANTISE_TILES(fp4, Fp4)

// The same, with `factors [rows]`.
extern "C" __global__ void dequantise_tiles_nvfp4(const uint8_t* tiles, __nv_bfloat16* to, int rows, int columns,
                                                  int tile_bytes, int groups, int float16_scales, int scale_rows,
                                                  int zeros, const float* factors) {
  dequantise_tile<Nvfp4>(tiles, to, rows, columns, tile_bytes, {groups, float16_scales, scale_rows, zeros}, factors);
}
