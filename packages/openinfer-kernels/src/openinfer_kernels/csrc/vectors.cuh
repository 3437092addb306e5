// Eight BF16 values in one 16-byte access, and single ones where addresses or sizes do not allow that.
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

// The products, each rounded once.
__device__ __forceinline__ Vector<8> product(const Vector<8>& a, const Vector<8>& b) {
  Vector<8> vector;
  const __nv_bfloat162* left = reinterpret_cast<const __nv_bfloat162*>(&a.bits);
  const __nv_bfloat162* right = reinterpret_cast<const __nv_bfloat162*>(&b.bits);
  __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(&vector.bits);
#pragma unroll
  for (int i = 0; i < 4; i++) pairs[i] = __hmul2(left[i], right[i]);
  return vector;
}

__device__ __forceinline__ Vector<1> product(const Vector<1>& a, const Vector<1>& b) {
  return {__hmul(a.bits, b.bits)};
}

// The value that BF16 storage would leave of a float32.
__device__ __forceinline__ float rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

// One function for all kernels that gate, so that they agree bit for bit.
__device__ __forceinline__ float silu(float value) { return __fdividef(value, 1.0f + __expf(-value)); }
