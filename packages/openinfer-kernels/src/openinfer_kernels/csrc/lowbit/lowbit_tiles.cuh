// Quantised weights of one matrix in the order in which lowbit_gemm.cuh multiplies them, and codes in registers.
//
// A tile is 32 rows x 128 columns: codes, then scales, then zero points where there are any. Tiles lie one after the
// other along K, and those of the next rows follow. Tile `t` has rows 64 (t / 2) + 16 w + 8 (t % 2) + g: row g of eight
// belongs to the four threads 4 g to 4 g + 3 of warp w, so that two tiles are the 64 rows of a warpgroup's product, rows
// r and r + 8 of a thread in different ones: of neighbouring tiles, or for SwiGLU of gate and of up.
//
// Of every 16 columns thread t of four has columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of a row, in 16 bits (codes of four
// bits) or 32. The 128 columns of a thread are one piece of 16 bytes or two, and pieces of all threads lie side by side.
//
//     scales    [groups][32 rows], or [groups] where all rows of the tile share them; float32 for codes of a byte, else
//               BF16 or float16
//     zeros     [groups][32 rows] of 16 bits, as the format wants them; of a format with minimums what it adds
//
// A group is 128, 64 or 32 columns, of Nvfp4 16. Tiles end at multiples of 16 bytes.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "lowbit/lowbit_places.cuh"

namespace lowbit {

// --- codes in registers ---------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t bits_of(__nv_bfloat162 pair) { return *reinterpret_cast<uint32_t*>(&pair); }

__device__ __forceinline__ __nv_bfloat162 pair_of(uint32_t bits) { return *reinterpret_cast<__nv_bfloat162*>(&bits); }

__device__ __forceinline__ uint32_t component(const uint4& piece, int index) {
  return index == 0 ? piece.x : index == 1 ? piece.y : index == 2 ? piece.z : piece.w;
}

// (a & b) | c in one instruction.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// A scale as the sum of two BF16 numbers, 16 bits and more of it, so that a product with it in two instructions errs by
// no more than its last rounding.
struct Scale {
  __nv_bfloat162 high, low;
  __device__ __forceinline__ explicit Scale(float scale) {
    const __nv_bfloat16 first = __float2bfloat16_rn(scale);
    high = __bfloat162bfloat162(first);
    low = __float2bfloat162_rn(scale - __bfloat162float(first));
  }
  __device__ __forceinline__ uint32_t times(uint32_t pair) const {
    return bits_of(__hfma2(pair_of(pair), high, __hmul2(pair_of(pair), low)));
  }
  // The same where it is one BF16 number.
  __device__ __forceinline__ uint32_t times_high(uint32_t pair) const { return bits_of(__hmul2(pair_of(pair), high)); }
  // The product and another pair's sum.
  __device__ __forceinline__ uint32_t times_and(uint32_t pair, uint32_t added) const {
    return bits_of(__hfma2(pair_of(pair), high, __hfma2(pair_of(pair), low, pair_of(added))));
  }
};

// A scale times 2^120, so that the shifted codes of Fp8 need no product of their own. It is less than 2^7: lowbit_tiles.py.
struct FoldedScale : Scale {
  __device__ __forceinline__ explicit FoldedScale(float scale) : Scale(scale * 0x1p120f) {}
};

// A scale that is one BF16 number.
struct HighScale {
  __nv_bfloat162 high;
  __device__ __forceinline__ explicit HighScale(float scale) : high(__float2bfloat162_rn(scale)) {}
  __device__ __forceinline__ explicit HighScale(uint16_t bits) : high(pair_of(bits * 0x10001u)) {}
  __device__ __forceinline__ uint32_t times(uint32_t pair) const { return bits_of(__hmul2(pair_of(pair), high)); }
};

// A format has kPieces of 16 bytes for 128 columns, scales for kStepsOfGroup times 16 columns or more, with kHasFactors
// also a factor of each row that sums are multiplied with, and
//     Zero                                 what is subtracted of a code; kNoZeros where none is stored
//     codes(piece, step, zero, pairs)      columns 16 `step` + {2 t, 2 t + 1} and + {2 t + 8, 2 t + 9}, exact
//     weights(.., scale, pairs)            the same times a scale, rounded once
//     high_weights(.., scale, pairs)       the same of a scale that is one BF16 number, where kHasHighWeights; with
//                                          kHighOfMiddle only where no zero points are stored
//     weights(.., Bf16Factor, pairs)       the same of the bits of such a scale, for groups within a tile; with
//                                          kBf16Groups tiles always have such scales and no zero points
struct None {};

// E4M3, four codes of a word as bytes 2, 0, 3, 1. Exponent and fraction are shifted into those of a BF16, which makes a
// number 2^120 times too small, also where the exponent is 0.
struct Fp8 {
  static constexpr int kPieces = 2;
  static constexpr int kStepsOfGroup = 2;
  static constexpr bool kHasZeros = false, kFloat32Scales = true, kHasHighWeights = true, kHasFactors = false;
  static constexpr bool kBf16Groups = false;
  static constexpr bool kHighOfMiddle = false;
  using Zero = None;
  using Factor = FoldedScale;

  // 2^120 times too small.
  static __device__ __forceinline__ void shifted(const uint4& piece, int step, uint32_t (&pairs)[2]) {
    const uint32_t word = component(piece, step);
    pairs[0] = and_or(word, 0x80008000u, word >> 4 & 0x07F007F0u);
    pairs[1] = and_or(word << 8, 0x80008000u, word << 4 & 0x07F007F0u);
  }

  static __device__ __forceinline__ void codes(const uint4& piece, int step, Zero, uint32_t (&pairs)[2]) {
    shifted(piece, step, pairs);
#pragma unroll
    for (int i = 0; i < 2; i++) pairs[i] = bits_of(__hmul2(pair_of(pairs[i]), pair_of(0x7B807B80u)));
  }

  static __device__ __forceinline__ void weights(const uint4& piece, int step, Zero, const Factor& scale,
                                                 uint32_t (&pairs)[2]) {
    shifted(piece, step, pairs);
    pairs[0] = scale.times(pairs[0]), pairs[1] = scale.times(pairs[1]);
  }

  static __device__ __forceinline__ void high_weights(const uint4& piece, int step, Zero, const Factor& scale,
                                                      uint32_t (&pairs)[2]) {
    shifted(piece, step, pairs);
    pairs[0] = scale.times_high(pairs[0]), pairs[1] = scale.times_high(pairs[1]);
  }
};

// Codes 0 to 15 less a zero point: 0x4300 | n is 128 + n, from which 128 + zero is subtracted, exactly. Tiles hold
// 128 + zero, in BF16.
struct Int4 {
  static constexpr int kPieces = 1;
  static constexpr int kStepsOfGroup = 2;
  static constexpr bool kHasZeros = true, kFloat32Scales = false, kHasHighWeights = true, kHasFactors = false;
  static constexpr bool kBf16Groups = false;
  static constexpr bool kHighOfMiddle = false;
  using Zero = uint32_t;
  using Factor = Scale;
  using Bf16Factor = HighScale;
  static constexpr uint16_t kNoZeros = 0x4308;  // 128 + 8
  static __device__ __forceinline__ Zero zero(uint16_t stored) { return stored * 0x10001u; }

  static __device__ __forceinline__ uint32_t two(uint32_t nibbles, Zero zero) {
    return bits_of(__hsub2(pair_of(and_or(nibbles, 0x000F000Fu, 0x43004300u)), pair_of(zero)));
  }

  static __device__ __forceinline__ void codes(const uint4& piece, int step, Zero zero, uint32_t (&pairs)[2]) {
    const uint32_t word = component(piece, step / 2);
    pairs[0] = two(word >> step % 2 * 8, zero);
    pairs[1] = two(word >> (step % 2 * 8 + 4), zero);
  }

  static __device__ __forceinline__ void weights(const uint4& piece, int step, Zero zero, const Factor& scale,
                                                 uint32_t (&pairs)[2]) {
    codes(piece, step, zero, pairs);
    pairs[0] = scale.times(pairs[0]), pairs[1] = scale.times(pairs[1]);
  }

  static __device__ __forceinline__ void high_weights(const uint4& piece, int step, Zero zero, const Factor& scale,
                                                      uint32_t (&pairs)[2]) {
    codes(piece, step, zero, pairs);
    pairs[0] = scale.times_high(pairs[0]), pairs[1] = scale.times_high(pairs[1]);
  }

  static __device__ __forceinline__ void weights(const uint4& piece, int step, Zero zero, const HighScale& scale,
                                                 uint32_t (&pairs)[2]) {
    codes(piece, step, zero, pairs);
    pairs[0] = scale.times(pairs[0]), pairs[1] = scale.times(pairs[1]);
  }
};

// Codes 0 to 15 times a scale, plus a minimum: q s + m is (q - 8) s + (m + 8 s). Tiles hold the second term in BF16: where
// weights lie around zero it is small, and so is what its rounding costs.
struct Int4Min {
  static constexpr int kPieces = 1;
  static constexpr int kStepsOfGroup = 2;
  static constexpr bool kHasZeros = true, kFloat32Scales = false, kHasHighWeights = false, kHasFactors = false;
  static constexpr bool kBf16Groups = false;
  using Zero = uint32_t;
  using Factor = Scale;
  static constexpr uint16_t kNoZeros = 0;
  static __device__ __forceinline__ Zero zero(uint16_t stored) { return stored * 0x10001u; }

  static __device__ __forceinline__ void weights(const uint4& piece, int step, Zero middle, const Factor& scale,
                                                 uint32_t (&pairs)[2]) {
    Int4::codes(piece, step, Int4::zero(Int4::kNoZeros), pairs);
    pairs[0] = scale.times_and(pairs[0], middle), pairs[1] = scale.times_and(pairs[1], middle);
  }
};

// Codes 0 to 255 less a zero point, in float32: 0x4B000000 | n is 2^23 + n. Tiles hold the zero point, in float16. Where it
// is 128 BF16 holds the difference, and fewer instructions make it: 0x4300 | n is 128 + n for the lower seven bits, from
// which 256 is subtracted, or 128 where the highest bit is set.
struct Int8 {
  static constexpr int kPieces = 2;
  static constexpr int kStepsOfGroup = 2;
  static constexpr bool kHasZeros = true, kFloat32Scales = true, kHasHighWeights = true, kHasFactors = false;
  static constexpr bool kBf16Groups = false;
  static constexpr bool kHighOfMiddle = true;
  using Zero = float;
  using Factor = float;
  static constexpr uint16_t kNoZeros = 0x5800;  // 128
  static __device__ __forceinline__ Zero zero(uint16_t stored) {
    return 8388608 + __half2float(__ushort_as_half(stored));
  }

  static __device__ __forceinline__ float value(uint32_t word, int byte, Zero zero) {
    return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7540 + byte)) - zero;
  }

  // Of bytes 2 `pair` and the next, whose zero point is 128.
  static __device__ __forceinline__ uint32_t two(uint32_t word, int pair) {
    const uint32_t halves = __byte_perm(word, 0, 0x4140 + 0x0202 * pair);
    const uint32_t less = (halves & 0x00800080u) ^ 0x43804380u;
    return bits_of(__hsub2(pair_of(and_or(halves, 0x007F007Fu, 0x43004300u)), pair_of(less)));
  }

  // Sums are scaled only where no zero points are stored.
  static __device__ __forceinline__ void codes(const uint4& piece, int step, Zero, uint32_t (&pairs)[2]) {
    const uint32_t word = component(piece, step);
    pairs[0] = two(word, 0), pairs[1] = two(word, 1);
  }

  static __device__ __forceinline__ void high_weights(const uint4& piece, int step, Zero zero, Factor scale,
                                                      uint32_t (&pairs)[2]) {
    codes(piece, step, zero, pairs);
    const HighScale high(scale);
    pairs[0] = high.times(pairs[0]), pairs[1] = high.times(pairs[1]);
  }

  static __device__ __forceinline__ void weights(const uint4& piece, int step, Zero zero, Factor scale,
                                                 uint32_t (&pairs)[2]) {
    const uint32_t word = component(piece, step);
#pragma unroll
    for (int pair = 0; pair < 2; pair++)
      pairs[pair] = bits_of(
          __floats2bfloat162_rn(value(word, 2 * pair, zero) * scale, value(word, 2 * pair + 1, zero) * scale));
  }
};

// A power of two, times 2^126: what a shifted code of Fp4 lacks. It is less than 4: lowbit_tiles.py.
struct PowerScale : HighScale {
  __device__ __forceinline__ explicit PowerScale(uint16_t bits) : HighScale(bits) {
    high = __hmul2(high, pair_of(0x7E807E80u));
  }
  __device__ __forceinline__ explicit PowerScale(float scale) : HighScale(scale * 0x1p126f) {}
};

// E2M1 with powers of two as scales: sign and size of a nibble are shifted into those of a BF16, 2^126 too small.
struct Fp4 {
  static constexpr int kPieces = 1;
  static constexpr int kStepsOfGroup = 2;
  static constexpr bool kHasZeros = false, kFloat32Scales = false, kHasHighWeights = false, kHasFactors = false;
  static constexpr bool kBf16Groups = true;
  using Zero = None;
  using Factor = PowerScale;
  using Bf16Factor = PowerScale;

  static __device__ __forceinline__ uint32_t shifted(uint32_t signs, uint32_t sizes) {
    return and_or(signs, 0x80008000u, sizes & 0x01C001C0u);
  }

  static __device__ __forceinline__ uint32_t two(uint32_t signs, uint32_t sizes) {
    return bits_of(__hmul2(pair_of(shifted(signs, sizes)), pair_of(0x7E807E80u)));
  }

  static __device__ __forceinline__ void codes(const uint4& piece, int step, Zero, uint32_t (&pairs)[2]) {
    const uint32_t word = component(piece, step / 2) >> step % 2 * 8;
    pairs[0] = two(word << 12, word << 6);
    pairs[1] = two(word << 8, word << 2);
  }

  static __device__ __forceinline__ void weights(const uint4& piece, int step, Zero, const HighScale& scale,
                                                 uint32_t (&pairs)[2]) {
    const uint32_t word = component(piece, step / 2) >> step % 2 * 8;
    pairs[0] = scale.times(shifted(word << 12, word << 6));
    pairs[1] = scale.times(shifted(word << 8, word << 2));
  }
};

// E2M1 with scales of E4M3 for 16 columns, whose products have six bits: BF16 holds them. Tiles have scales times 2^64, so
// that a shifted code, 2^126 too small, makes no subnormal number. The factor of a row has 2^62, and the matrix's scale.
struct Nvfp4 {
  static constexpr int kPieces = 1;
  static constexpr int kStepsOfGroup = 1;
  static constexpr bool kHasZeros = false, kFloat32Scales = false, kHasHighWeights = false, kHasFactors = true;
  static constexpr bool kBf16Groups = true;
  static constexpr float kScaleOfSums = 0x1p-126f;  // of scales for sums of codes that were not shifted
  using Zero = None;
  using Factor = HighScale;
  using Bf16Factor = HighScale;

  static __device__ __forceinline__ void weights(const uint4& piece, int step, Zero zero, const Factor& scale,
                                                 uint32_t (&pairs)[2]) {
    Fp4::weights(piece, step, zero, scale, pairs);
  }
};

// What is in a tile after its codes.
struct Scales {
  int groups;          // in its columns
  int float16_scales;  // rather than BF16, where they are not float32
  int scale_rows;      // scales of a group: 32, or 1
  int zeros;           // where they begin in the tile; 0: there are none
  int bf16_numbers;    // whether each is one
};

// What a thread reads of the two tiles of its rows.
template <typename Format>
struct Rows {
  const uint8_t* tile[2];  // of the lower and the higher row
  int thread;              // of the warpgroup

  __device__ __forceinline__ uint4 piece(int half, int index) const {
    return *reinterpret_cast<const uint4*>(tile[half] + (index * kTileThreads + thread) * 16);
  }
  template <typename Type>
  __device__ __forceinline__ Type stored_scale(const Scales& s, int half, int group) const {
    const int at = s.scale_rows == kTileRows ? group * kTileRows + thread / 4 : group;
    return reinterpret_cast<const Type*>(tile[half] + Format::kPieces * kTileThreads * 16)[at];
  }
  __device__ __forceinline__ float scale(const Scales& s, int half, int group) const {
    if constexpr (Format::kFloat32Scales) return stored_scale<float>(s, half, group);
    const auto bits = stored_scale<uint16_t>(s, half, group);
    if constexpr (Format::kHasFactors) return __uint_as_float(uint32_t(bits) << 16);
    return s.float16_scales ? __half2float(__ushort_as_half(bits)) : __uint_as_float(uint32_t(bits) << 16);
  }
  __device__ __forceinline__ typename Format::Zero zero(const Scales& s, int half, int group) const {
    if constexpr (Format::kHasZeros) {
      const auto* zeros = reinterpret_cast<const uint16_t*>(tile[half] + s.zeros);
      return Format::zero(s.zeros != 0 ? zeros[group * kTileRows + thread / 4] : Format::kNoZeros);
    } else {
      return {};
    }
  }
};

}  // namespace lowbit
