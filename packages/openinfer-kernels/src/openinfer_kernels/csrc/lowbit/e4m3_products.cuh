// Codes multiplied as they are, by the tensor cores' products of E4M3: nothing is dequantised.
//
// A BF16 number has 8 bits of significand and E4M3 four, so that an activation is the sum of two:
//
//     y = x 2^e             e such that the largest of a token's 128 columns lies in [128, 256)
//     high = e4m3(y),  low = e4m3(16 (y - high))           x = 2^-e (high + low / 16)
//
// That is exact where |y| is at least 2^-6, and elsewhere off by 2^-14, 2^-21 of the largest. A token is two columns of
// the product, `high` and `low`, whose sums of 128 columns are added and scaled in float32. Codes of E4M3 are operands as
// they are. A code of four bits, as the byte 0x0n, is E4M3's number n 2^-9, subnormal numbers included; its zero point
// multiplies the sum of the token's 128 activations.
//
// The tensor cores of Hopper add products of E4M3 to about 14 bits; sums of 128 columns are promoted to float32, in the
// place of those of a whole row (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3.2).
//
// Activations are split by warps of their own, in place, between the copy of a box and the consumers: a row of 64 columns
// in BF16 has the bytes of 128 codes, so that the two rows of a token's 128 columns become `high` and `low`. Each of 16 lanes
// has two times four columns: those that make 8 bytes of a row, in the order in which a thread holds codes of the weight.
#pragma once
#include <cstdint>

#include "common/hopper.cuh"
#include "common/vectors.cuh"
#include "lowbit/lowbit_tiles.cuh"
#include "lowbit/wgmma_registers.cuh"

namespace lowbit {

constexpr int kMmaColumns = 32, kMmasOfTile = kTileColumns / kMmaColumns;
constexpr int kSplitLanes = 16;  // that split a token's columns of a tile
constexpr int kSplitWarps = 4;

// What a format's codes are to the tensor cores:
//     kValue               by which a product of codes is too small
//     first(lane), kNext   where a lane's columns begin, and how far the second four are from the first
//     operands(..)         of 32 columns
//     zero(stored)         what is subtracted of a code
template <typename Format>
struct E4m3Operands;

template <>
struct E4m3Operands<Fp8> {
  static constexpr float kValue = 1;
  static constexpr int kNext = -8;
  static __device__ __forceinline__ int first(int lane) { return lane / 2 * 16 + 8 + lane % 2 * 4; }

  static __device__ __forceinline__ void operands(const Rows<Fp8>& rows, uint32_t (&a)[kMmasOfTile][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int mma = 0; mma < kMmasOfTile; mma++) {
        const uint4 piece = rows.piece(half, mma / 2);
        a[mma][half] = component(piece, mma % 2 * 2), a[mma][half + 2] = component(piece, mma % 2 * 2 + 1);
      }
  }
  static __device__ __forceinline__ float zero(None) { return 0; }
};

template <>
struct E4m3Operands<Int4> {
  static constexpr bool kHasMiddles = false;
  static constexpr float kValue = 512;
  static constexpr int kNext = 16;
  static __device__ __forceinline__ int first(int lane) { return lane / 4 * 32 + lane / 2 % 2 * 8 + lane % 2 * 4; }

  template <typename Format>
  static __device__ __forceinline__ void operands(const Rows<Format>& rows, uint32_t (&a)[kMmasOfTile][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint4 piece = rows.piece(half, 0);
#pragma unroll
      for (int mma = 0; mma < kMmasOfTile; mma++) {
        const uint32_t word = component(piece, mma);
        a[mma][half] = word & 0x0F0F0F0Fu, a[mma][half + 2] = word >> 4 & 0x0F0F0F0Fu;
      }
    }
  }
  // Tiles hold 128 + zero, in BF16; the lower half of the pair goes to where a float32 has it.
  static __device__ __forceinline__ float zero(uint32_t pair) { return __uint_as_float(pair << 16) - 128; }
};

// Sign and size of a nibble are those of E4M3's number 2^-6 times as large, subnormal ones included.
template <>
struct E4m3Operands<Fp4> : E4m3Operands<Int4> {
  static constexpr float kValue = 64;

  static __device__ __forceinline__ void operands(const Rows<Fp4>& rows, uint32_t (&a)[kMmasOfTile][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint4 piece = rows.piece(half, 0);
#pragma unroll
      for (int mma = 0; mma < kMmasOfTile; mma++) {
        const uint32_t word = component(piece, mma);
        a[mma][half] = and_or(word << 4, 0x80808080u, word << 2 & 0x1C1C1C1Cu);
        a[mma][half + 2] = and_or(word, 0x80808080u, word >> 2 & 0x1C1C1C1Cu);
      }
    }
  }
  static __device__ __forceinline__ float zero(None) { return 0; }
};

template <>
struct E4m3Operands<Nvfp4> : E4m3Operands<Fp4> {
  static __device__ __forceinline__ void operands(const Rows<Nvfp4>& rows, uint32_t (&a)[kMmasOfTile][4]) {
    E4m3Operands<Fp4>::operands(Rows<Fp4>{{rows.tile[0], rows.tile[1]}, rows.thread}, a);
  }
};

// Of these tiles hold what a code of 8 stands for.
template <>
struct E4m3Operands<Int4Min> : E4m3Operands<Int4> {
  static constexpr bool kHasMiddles = true;
  static __device__ __forceinline__ float zero(uint32_t) { return 8; }
  static __device__ __forceinline__ float middle(uint32_t pair) { return __uint_as_float(pair << 16); }
};

// What sums of a token's 128 columns are multiplied with, and the sums of its activations: of all columns, or of each 32.
template <int kGroups>
struct Factor {
  float scale, sums[kGroups];
};

// The place of 16 bytes in a box of rows of 128 bytes that is swizzled by 128 bytes.
__device__ __forceinline__ int swizzled_place(int row, int sixteenth) { return row * 128 + ((sixteenth ^ row % 8) * 16); }

__device__ __forceinline__ void unpack_four(uint2 bits, float* values) {
  values[0] = __uint_as_float(bits.x << 16), values[1] = __uint_as_float(bits.x & 0xFFFF0000u);
  values[2] = __uint_as_float(bits.y << 16), values[3] = __uint_as_float(bits.y & 0xFFFF0000u);
}

// The largest size of a lane's numbers, as bits: those of sizes are in order, and NaN is above all.
__device__ __forceinline__ uint32_t largest_bits(const uint2 (&four)[2]) {
  uint32_t most = 0;
#pragma unroll
  for (int part = 0; part < 2; part++) {
    const uint32_t x = four[part].x & 0x7FFF7FFFu, y = four[part].y & 0x7FFF7FFFu;
    most = max(most, max(max(x << 16, x & 0xFFFF0000u), max(y << 16, y & 0xFFFF0000u)));
  }
  return most;
}

template <int kLanes>
__device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
  return value;
}

// 2^e and 2^-e. Where all is below 2^-119 it is multiplied by less; infinity makes NaN.
struct Exponents {
  float scale, inverse;
  __device__ __forceinline__ explicit Exponents(uint32_t most) {
    const int exponent = max(8, int(most >> 23));
    scale = __uint_as_float(uint32_t(261 - exponent) << 23);
    inverse = __uint_as_float(exponent == 255 ? 0x7FC00000u : uint32_t(exponent - 7) << 23);
  }
};

// Eight bytes of `high` and of `low` of a lane's columns.
__device__ __forceinline__ void split(const float (&x)[8], float scale, uint2& high, uint2& low) {
  uint32_t words[2][2];
#pragma unroll
  for (int word = 0; word < 2; word++) {
    uint32_t pairs[2][2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float first = x[2 * word + i] * scale, second = x[4 + 2 * word + i] * scale;
      pairs[0][i] = hopper::e4m3_pair(first, second);
      const float2 near = hopper::floats_of_e4m3(pairs[0][i]);
      pairs[1][i] = hopper::e4m3_pair((first - near.x) * 16, (second - near.y) * 16);
    }
    words[0][word] = pairs[0][0] | pairs[0][1] << 16, words[1][word] = pairs[1][0] | pairs[1][1] << 16;
  }
  high = make_uint2(words[0][0], words[0][1]), low = make_uint2(words[1][0], words[1][1]);
}

// Splits the activations of all pieces of work in their slots. A warp has a token's columns of a slot, two chunks, at a time,
// with one scale.
template <typename Format, int kTokens, int kChunks, int kSlots, class Work, class Shared>
struct Splitter {
  static_assert(kChunks * kSplitLanes == 32);
  const Work& work;
  const Shared& s;
  int warp, lane;  // `warp` of those that split

  // kCount tokens at once, so that a warp need not wait for each step of one.
  template <int kCount>
  __device__ __forceinline__ void split_tokens(int first, int slot, int num_chunks) const {
    using Operands = E4m3Operands<Format>;
    constexpr int kGroups = Shared::kGroups, kLanes = kSplitLanes / kGroups;
    const int chunk = lane / kSplitLanes, within = lane % kSplitLanes;
    uint8_t* boxes = s.x(slot) + chunk * (2 * kTokens * kTileColumns);
    uint2 four[kCount][2], high[kCount], low[kCount];
    uint32_t most[kCount];
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      const int token = first + i * kSplitWarps;
#pragma unroll
      for (int part = 0; part < 2; part++) {
        const int column = Operands::first(within) + part * Operands::kNext;
        const int row = column / 64 * kTokens + token;
        four[i][part] =
            *reinterpret_cast<const uint2*>(boxes + swizzled_place(row, column % 64 / 8) + column % 8 * 2);
      }
      // What lies where no chunk was copied to counts for nothing.
      most[i] = chunk < num_chunks ? largest_bits(four[i]) : 0;
    }
#pragma unroll
    for (int i = 0; i < kCount; i++) most[i] = __reduce_max_sync(~0u, most[i]);
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      const Exponents exponents(most[i]);
      float x[8], sum = 0;
      unpack_four(four[i][0], x), unpack_four(four[i][1], x + 4);
      split(x, exponents.scale, high[i], low[i]);
      Factor<kGroups>& factor = s.factor(slot, chunk)[first + i * kSplitWarps];
      if constexpr (Format::kHasZeros) {
#pragma unroll
        for (int j = 0; j < 8; j++) sum += x[j];
        sum = sum_of_lanes<kLanes>(sum);
        if (within % kLanes == 0) factor.sums[within / kLanes] = sum;
      }
      if (within == 0) factor.scale = exponents.inverse * Operands::kValue;
    }
    __syncwarp();  // all lanes have read
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      const int token = first + i * kSplitWarps, half = within % 2 * 8;
      *reinterpret_cast<uint2*>(boxes + swizzled_place(token, within / 2) + half) = high[i];
      *reinterpret_cast<uint2*>(boxes + swizzled_place(kTokens + token, within / 2) + half) = low[i];
    }
  }

  __device__ void run() const {
    int slot = 0, phase = 0, turn = warp;
    for (int index = 0; index < work.pieces; index++) {
      const auto piece = work.piece(index);
      const int m = piece.tile.end_token - piece.tile.first_token;
      for (int left = piece.num_chunks; left > 0; left -= kChunks) {
        hopper::barrier_wait(&s.barriers().x_full[slot], phase);
        // With one token all but one warp would have nothing to do if each slot began with the same.
        int token = turn & (kSplitWarps - 1);
        for (; token + kSplitWarps < m; token += 2 * kSplitWarps) split_tokens<2>(token, slot, left);
        if (token < m) split_tokens<1>(token, slot, left);
        turn += kSplitWarps - m % kSplitWarps;
        hopper::fence_for_async_reads();
        __syncwarp();
        if (lane == 0) hopper::barrier_arrive(&s.barriers().x_split[slot]);
        if (++slot == kSlots) slot = 0, phase ^= 1;
      }
    }
  }
};

}  // namespace lowbit
