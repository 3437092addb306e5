// Arithmetic of BF16 and float16 in the names of CUDA's headers, for a host compiler: each result is rounded once.
#pragma once
#include "cuda.hpp"

struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
struct __half {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 value) { return emulated::from_bfloat16(value.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return {uint16_t(emulated::to_bfloat16(value))}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
inline __nv_bfloat162 __float2bfloat162_rn(float x) { return __floats2bfloat162_rn(x, x); }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
inline float2 __bfloat1622float2(__nv_bfloat162 pair) { return {__bfloat162float(pair.x), __bfloat162float(pair.y)}; }
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline float __half2float(__half value) { return emulated::half_float_of(value.bits, 0); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }

// Products of two numbers of 8 bits, and their sums with a third of near size, are exact in double.
inline __nv_bfloat16 rounded_once(double value) {
  float near = float(value);
  uint32_t bits;
  memcpy(&bits, &near, 4);
  if (double(near) != value && (bits & 0xFFFF) == 0x8000) {  // not between two BF16, as float32 takes it to be
    bits += (fabs(value) > fabs(double(near))) ? 1 : -1;
    memcpy(&near, &bits, 4);
  }
  return __float2bfloat16_rn(near);
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  auto of = [](__nv_bfloat16 x, __nv_bfloat16 y, __nv_bfloat16 z) {
    return rounded_once(double(__bfloat162float(x)) * __bfloat162float(y) + __bfloat162float(z));
  };
  return {of(a.x, b.x, c.x), of(a.y, b.y, c.y)};
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) { return __hfma2(a, b, {{0}, {0}}); }
inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {rounded_once(double(__bfloat162float(a.x)) - __bfloat162float(b.x)),
          rounded_once(double(__bfloat162float(a.y)) - __bfloat162float(b.y))};
}
