// Eight BF16 values in one 16-byte access, or eight float32 in two, and single ones where addresses or sizes do not
// allow that.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>

using bf16 = __nv_bfloat16;

// kWidth values that a thread moves at once: 8, or 1 for odd sizes.
template <int kWidth>
struct Vector;

template <>
struct Vector<8> {
  uint4 bits;
};

template <>
struct Vector<1> {
  bf16 bits;
};

template <int kWidth>
__device__ __forceinline__ Vector<kWidth> load(const bf16* from) {
  return *reinterpret_cast<const Vector<kWidth>*>(from);
}

template <int kWidth>
__device__ __forceinline__ void store(bf16* to, const Vector<kWidth>& vector) {
  *reinterpret_cast<Vector<kWidth>*>(to) = vector;
}

__device__ __forceinline__ void unpack(const Vector<8>& vector, float (&values)[8]) {
  const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&vector.bits);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = __bfloat1622float2(pairs[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

__device__ __forceinline__ void unpack(const Vector<1>& vector, float (&values)[1]) {
  values[0] = __bfloat162float(vector.bits);
}

__device__ __forceinline__ Vector<8> pack(const float (&values)[8]) {
  Vector<8> vector;
  __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(&vector.bits);
#pragma unroll
  for (int i = 0; i < 4; i++) pairs[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
  return vector;
}

__device__ __forceinline__ Vector<1> pack(const float (&values)[1]) { return {__float2bfloat16_rn(values[0])}; }

template <int kWidth>
__device__ __forceinline__ void load_values(const bf16* from, float (&values)[kWidth]) {
  unpack(load<kWidth>(from), values);
}

__device__ __forceinline__ void load_values(const float* from, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    values[i] = four.x;
    values[i + 1] = four.y;
    values[i + 2] = four.z;
    values[i + 3] = four.w;
  }
}

__device__ __forceinline__ void load_values(const float* from, float (&values)[1]) { values[0] = *from; }

__device__ __forceinline__ void store_values(float* to, const float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += 4)
    *reinterpret_cast<float4*>(to + i) = make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
}

__device__ __forceinline__ void store_values(float* to, const float (&values)[1]) { *to = values[0]; }

template <int kWidth>
__device__ __forceinline__ void store(float* to, const Vector<kWidth>& vector) {
  float values[kWidth];
  unpack(vector, values);
  store_values(to, values);
}

// The value that BF16 storage would leave of a float32.
__device__ __forceinline__ float rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

// One function for all kernels that gate, so that they agree bit for bit. Where exp(-value) overflows the quotient is
// zero, which is right.
__device__ __forceinline__ float silu(float value) { return __fdividef(value, 1.0f + __expf(-value)); }
