// Weights of few bits in registers: 16 bytes of codes become BF16 pairs, eight values at a time.
//
// Each format has: kValues in 16 bytes of codes; kScaleBytes of a scale, which 32 columns share at least; `Scale`, what
// a scale is held as; `eight(codes, part, scale)`, values 8 part to 8 part + 7. Values are rounded to BF16 once.
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

struct Bf16 {
  static constexpr int kValues = 8, kScaleBytes = 0;
  using Scale = int;
  static __device__ __forceinline__ Scale scale(const uint8_t*) { return 0; }
  static __device__ __forceinline__ uint4 eight(const uint4& codes, int, Scale) { return codes; }
};

// E4M3 with float32 scales, which are uploaded times 2^120. A code's exponent and fraction are shifted into those of a
// BF16, which makes a number 2^120 times too small, also where the exponent is 0.
struct Fp8 {
  static constexpr int kValues = 16, kScaleBytes = 4;
  using Scale = float;
  static __device__ __forceinline__ Scale scale(const uint8_t* from) { return *reinterpret_cast<const float*>(from); }

  static __device__ __forceinline__ uint32_t two(uint32_t high_bytes, float scale) {
    const uint32_t pair = (high_bytes & 0x80008000u) | (high_bytes & 0x7F007F00u) >> 4;
    const float low = __uint_as_float(pair << 16) * scale, high = __uint_as_float(pair & 0xFFFF0000u) * scale;
    return bits_of(__floats2bfloat162_rn(low, high));
  }

  static __device__ __forceinline__ uint4 eight(const uint4& codes, int part, Scale scale) {
    const uint32_t first = word(codes, 2 * part), second = word(codes, 2 * part + 1);
    return {two(__byte_perm(first, 0, 0x1404), scale), two(__byte_perm(first, 0, 0x3424), scale),
            two(__byte_perm(second, 0, 0x1404), scale), two(__byte_perm(second, 0, 0x3424), scale)};
  }
};

// Nibbles of a word lie so that the even values are in its lower half and the odd ones in its upper half, in order:
// one shift and mask gives a pair.
struct Int4 {
  static constexpr int kValues = 32, kScaleBytes = 2;
  using Scale = uint32_t;  // the BF16 scale twice
  static __device__ __forceinline__ Scale scale(const uint8_t* from) {
    return *reinterpret_cast<const uint16_t*>(from) * 0x10001u;
  }

  // 0x4300 | n is 128 + n; less 136 it is the signed number, exactly.
  static __device__ __forceinline__ uint32_t two(uint32_t nibbles, Scale scale) {
    const __nv_bfloat162 shifted = pair_of((nibbles & 0x000F000Fu) | 0x43004300u);
    return product(bits_of(__hsub2(shifted, pair_of(0x43084308u))), scale);
  }

  static __device__ __forceinline__ uint4 eight(const uint4& codes, int part, Scale scale) {
    const uint32_t w = word(codes, part);
    return {two(w, scale), two(w >> 4, scale), two(w >> 8, scale), two(w >> 12, scale)};
  }
};

// E2M1 with E8M0 scales, nibbles as of Int4. Exponent and fraction are shifted as for Fp8, 2^126 too small.
struct Fp4 {
  static constexpr int kValues = 32, kScaleBytes = 1;
  using Scale = uint32_t;
  static __device__ __forceinline__ Scale scale(const uint8_t* from) {
    const uint32_t exponent = *from;
    const uint32_t bits = exponent == 0 ? 0x40u : exponent == 255 ? 0x7FC0u : exponent << 7;
    return bits * 0x10001u;
  }

  static __device__ __forceinline__ uint32_t two(uint32_t nibbles, Scale scale) {
    const uint32_t pair = (nibbles & 0x00080008u) << 12 | (nibbles & 0x00070007u) << 6;
    return product(product(pair, 0x7E807E80u), scale);
  }

  static __device__ __forceinline__ uint4 eight(const uint4& codes, int part, Scale scale) {
    const uint32_t w = word(codes, part);
    return {two(w, scale), two(w >> 4, scale), two(w >> 8, scale), two(w >> 12, scale)};
  }
};

}  // namespace formats
