// Quantised weights in registers: 16 bytes of codes become BF16 pairs, eight values at a time.
//
// Of every 32 columns thread t of four has columns 8 t to 8 t + 7, a fragment. 16 bytes hold kFragments fragments, each
// of the next 32 columns; quantised.cu brings codes into that order. A scale is shared by 32 columns at least.
//
//   raw(codes, fragment)            eight codes as BF16 numbers, exact
//   eight(codes, fragment, scale)   eight weights, rounded to BF16
//   scale(scales, fragment)         of the fragments of 16 bytes, which lie side by side
#pragma once
#include <cstdint>
#include <cuda_bf16.h>

namespace formats {

__device__ __forceinline__ uint32_t word(const uint4& codes, int index) {
  return index == 0 ? codes.x : index == 1 ? codes.y : index == 2 ? codes.z : codes.w;
}

__device__ __forceinline__ uint32_t bits_of(__nv_bfloat162 pair) { return *reinterpret_cast<uint32_t*>(&pair); }

__device__ __forceinline__ __nv_bfloat162 pair_of(uint32_t bits) { return *reinterpret_cast<__nv_bfloat162*>(&bits); }

__device__ __forceinline__ uint32_t product(uint32_t pair, uint32_t other) {
  return bits_of(__hmul2(pair_of(pair), pair_of(other)));
}

// Both numbers of a pair times a float, rounded once.
__device__ __forceinline__ uint32_t scaled(uint32_t pair, float scale) {
  const float low = __uint_as_float(pair << 16) * scale, high = __uint_as_float(pair & 0xFFFF0000u) * scale;
  return bits_of(__floats2bfloat162_rn(low, high));
}

__device__ __forceinline__ uint4 scaled(uint4 pairs, float scale) {
  return {scaled(pairs.x, scale), scaled(pairs.y, scale), scaled(pairs.z, scale), scaled(pairs.w, scale)};
}

// Pairs times a BF16 number, which comes as a float whose lower half is zero.
__device__ __forceinline__ uint4 product(uint4 pairs, float scale) {
  const uint32_t twice = __byte_perm(__float_as_uint(scale), 0, 0x3232);
  return {product(pairs.x, twice), product(pairs.y, twice), product(pairs.z, twice), product(pairs.w, twice)};
}

struct Bf16 {
  static constexpr int kFragments = 1, kScaleBytes = 0;
  static constexpr bool kQuantised = false;
  using Scales = int;
  static __device__ __forceinline__ float scale(Scales, int) { return 1; }
  static __device__ __forceinline__ uint4 raw(const uint4& codes, int) { return codes; }
  static __device__ __forceinline__ uint4 eight(const uint4& codes, int, float) { return codes; }
};

// E4M3 with float32 scales. A word is codes 2, 0, 3, 1. Exponent and fraction are shifted into those of a BF16, which
// makes a number 2^120 times too small, also where the exponent is 0. NaN codes (0x7F, 0xFF) become 480: loading
// refuses them.
struct Fp8 {
  static constexpr int kFragments = 2, kScaleBytes = 4;
  static constexpr bool kQuantised = true;
  using Scales = uint2;
  static __device__ __forceinline__ float scale(const Scales& scales, int fragment) {
    return __uint_as_float(fragment == 0 ? scales.x : scales.y);
  }

  static __device__ __forceinline__ uint32_t two(uint32_t signs, uint32_t sizes) {
    return product((signs & 0x80008000u) | (sizes & 0x07F007F0u), 0x7B807B80u);
  }

  static __device__ __forceinline__ uint4 raw(const uint4& codes, int fragment) {
    const uint32_t first = word(codes, 2 * fragment), second = word(codes, 2 * fragment + 1);
    return {two(first, first >> 4), two(first << 8, first << 4), two(second, second >> 4),
            two(second << 8, second << 4)};
  }

  static __device__ __forceinline__ uint4 eight(const uint4& codes, int fragment, float scale) {
    return scaled(raw(codes, fragment), scale);
  }
};

// Nibbles of a word lie so that the even values are in its lower half and the odd ones in its upper half, in order: one
// shift and mask gives a pair. 0x4300 | n is 128 + n; less 136 it is the signed number. (A product with a constant in
// place of the subtraction is slower: four products in a chain.)
struct Int4 {
  static constexpr int kFragments = 4, kScaleBytes = 2;
  static constexpr bool kQuantised = true;
  using Scales = uint2;
  static __device__ __forceinline__ float scale(const Scales& scales, int fragment) {
    const uint32_t both = fragment < 2 ? scales.x : scales.y;
    return __uint_as_float(fragment % 2 ? both & 0xFFFF0000u : both << 16);
  }

  static __device__ __forceinline__ uint32_t two(uint32_t nibbles) {
    const __nv_bfloat162 shifted = pair_of((nibbles & 0x000F000Fu) | 0x43004300u);
    return bits_of(__hadd2(shifted, pair_of(0xC308C308u)));
  }

  static __device__ __forceinline__ uint4 raw(const uint4& codes, int fragment) {
    const uint32_t w = word(codes, fragment);
    return {two(w), two(w >> 4), two(w >> 8), two(w >> 12)};
  }

  static __device__ __forceinline__ uint4 eight(const uint4& codes, int fragment, float scale) {
    return product(raw(codes, fragment), scale);
  }
};

// E2M1 with E8M0 scales. In each half of a word, from its highest bit: s0 s3 a3 s1 b3 c3 s2 a0 b0 c0 a1 b1 c1 a2 b2 c2,
// with sign s, exponent a b and fraction c of the four values of that half; so that one shift puts most of them where a
// BF16 has them, 2^126 too small.
struct Fp4 {
  static constexpr int kFragments = 4, kScaleBytes = 1;
  static constexpr bool kQuantised = true;
  static constexpr uint32_t kBits = 0x81C081C0u;
  using Scales = uint32_t;
  static __device__ __forceinline__ float scale(const Scales& scales, int fragment) {
    const uint32_t exponent = scales >> 8 * fragment & 255;
    const uint32_t bits = exponent == 0 ? 0x00400000u : exponent == 255 ? 0x7FC00000u : exponent << 23;
    return __uint_as_float(bits);
  }

  static __device__ __forceinline__ uint4 raw(const uint4& codes, int fragment) {
    const uint32_t w = word(codes, fragment);
    const uint32_t last = (w << 1 & 0x80008000u) | (w >> 5 & 0x01000100u) | (w >> 4 & 0x00C000C0u);
    return {product(w & kBits, 0x7E807E80u), product(w << 3 & kBits, 0x7E807E80u), product(w << 6 & kBits, 0x7E807E80u),
            product(last, 0x7E807E80u)};
  }

  static __device__ __forceinline__ uint4 eight(const uint4& codes, int fragment, float scale) {
    return product(raw(codes, fragment), scale);
  }
};

}  // namespace formats
