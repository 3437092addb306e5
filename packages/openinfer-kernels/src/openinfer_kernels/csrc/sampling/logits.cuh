// Reading logits, BF16 or float32, in accesses of 16 bytes, or one by one where addresses or sizes do not allow that.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

using bf16 = __nv_bfloat16;

template <class Logit>
constexpr int kWide = 16 / sizeof(Logit);

// kWidth logits as they are stored.
template <class Logit, int kWidth>
struct Stored;

template <class Logit>
struct Stored<Logit, 1> {
  Logit value;
};

template <>
struct Stored<bf16, 8> {
  uint4 words;
};

template <>
struct Stored<float, 4> {
  float4 words;
};

template <int kWidth, class Logit>
__device__ __forceinline__ Stored<Logit, kWidth> read(const Logit* from) {
  return *reinterpret_cast<const Stored<Logit, kWidth>*>(from);
}

__device__ __forceinline__ void to_float32(const Stored<bf16, 1>& stored, float (&values)[1]) {
  values[0] = __bfloat162float(stored.value);
}

__device__ __forceinline__ void to_float32(const Stored<float, 1>& stored, float (&values)[1]) {
  values[0] = stored.value;
}

__device__ __forceinline__ void to_float32(const Stored<bf16, 8>& stored, float (&values)[8]) {
  const uint32_t words[4] = {stored.words.x, stored.words.y, stored.words.z, stored.words.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    values[2 * i] = __uint_as_float(words[i] << 16);
    values[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
}

__device__ __forceinline__ void to_float32(const Stored<float, 4>& stored, float (&values)[4]) {
  values[0] = stored.words.x;
  values[1] = stored.words.y;
  values[2] = stored.words.z;
  values[3] = stored.words.w;
}

// The largest; NaN if any is.
template <int kWidth>
__device__ __forceinline__ float largest_of(const float (&values)[kWidth]) {
  float largest = values[0];
#pragma unroll
  for (int i = 1; i < kWidth; i++) largest = max_nan(largest, values[i]);
  return largest;
}
