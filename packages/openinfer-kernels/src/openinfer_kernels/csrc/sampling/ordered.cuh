// Floats as integers in the same order, and how far each is below the largest of its row.
#pragma once
#include <math_constants.h>

#include <cstdint>

constexpr uint32_t kLowestFinite = 0x00800000;  // of the ordered floats; -inf is right below it
constexpr uint32_t kNaN = 0xFFFFFFFF;           // above +inf; `ordered` of a NaN is anything

// Equal floats have equal integers, -0 and 0 too. Not for NaN.
__device__ __forceinline__ uint32_t ordered(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

__device__ __forceinline__ bool is_finite(uint32_t key) { return key >= kLowestFinite && key < 0xFF800000u; }

// The larger one; NaN if either is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// Distances, in representable floats, from the largest value of a row down: 0 for the largest.
struct Distances {
  uint32_t largest;

  __device__ __forceinline__ uint32_t of(float value) const { return largest - ordered(value); }
  __device__ __forceinline__ float value(uint32_t distance) const { return from_ordered(largest - distance); }
  __device__ __forceinline__ uint32_t of_lowest_finite() const { return largest - kLowestFinite; }
};
