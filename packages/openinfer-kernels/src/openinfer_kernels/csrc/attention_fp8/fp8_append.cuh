// A head of one token into a cache in FP8: `kLanes` neighbouring threads hold it, 8 values each.
#pragma once
#include "attention_fp8/fp8_cache.cuh"

namespace attention {

// Of sizes as integers, where NaN is above all.
__device__ __forceinline__ uint32_t largest_size(const float (&values)[8]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) largest = max(largest, __float_as_uint(values[i]) & 0x7FFFFFFF);
  return largest;
}

// Eight values of a head from `column` on, of which `largest` is the largest size of all.
template <int kHeadDim, class Arguments>
__device__ __forceinline__ void store_fp8(int64_t kv_slot, int head, const Arguments& a, const float (&values)[8],
                                          int column, uint32_t largest) {
  if (kv_slot < 0 || head < 0) return;
  const uint32_t block = uint32_t(kv_slot) / uint32_t(a.block_tokens);
  const uint32_t token = uint32_t(kv_slot) - block * a.block_tokens;
  uint8_t* piece = reinterpret_cast<uint8_t*>(a.cache) + block * a.block_stride +
                   int64_t(head) * a.block_tokens * (kHeadDim + 4);
  const float s = scale_of(largest);
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; i++) pairs[i] = e4m3_codes(__fdiv_rn(values[2 * i], s), __fdiv_rn(values[2 * i + 1], s));
  *reinterpret_cast<uint2*>(piece + token * kHeadDim + column) = make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
  if (column == 0) reinterpret_cast<float*>(piece + a.block_tokens * kHeadDim)[token] = s;
}

// `head`: of keys, then values; below 0, as a `kv_slot` below 0, nothing is written. In the arguments `cache` is of bytes,
// as is `block_stride`. All threads of a warp come here.
template <int kLanes, class Arguments>
__device__ __forceinline__ void append_fp8(int64_t kv_slot, int head, const Arguments& a, const float (&values)[8],
                                           int lane) {
  uint32_t largest = largest_size(values);
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, mask));
  store_fp8<8 * kLanes>(kv_slot, head, a, values, lane * 8, largest);
}

}  // namespace attention
