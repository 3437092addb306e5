// Float32 values as BF16: rounded, and in two halves for tensor cores.
#pragma once
#include <cstdint>

namespace lora {

__device__ __forceinline__ float value_of(uint32_t bits) { return __uint_as_float(bits << 16); }

// To the nearest BF16, ties to even; NaN stays NaN.
__device__ __forceinline__ uint32_t rounded_bits(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// BF16 pairs of two values, and of what rounding them has left: together as exact as float32 needs.
struct Halves {
  uint32_t high, low;

  __device__ __forceinline__ Halves(float first, float second) {
    const uint32_t one = rounded_bits(first), other = rounded_bits(second);
    high = one | other << 16;
    low = rounded_bits(first - value_of(one)) | rounded_bits(second - value_of(other)) << 16;
  }
};

}  // namespace lora
