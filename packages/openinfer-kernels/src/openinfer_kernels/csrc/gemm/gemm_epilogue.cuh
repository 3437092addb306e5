// What becomes of the sums of gemm.cu:
//
//     store     y = bf16(x W^T)
//     swiglu    y = silu(g) * u, with the roundings of linear.cu; TMA interleaves gate and up rows by 8
//     float32   y = x W^T, unrounded
//
// A thread holds two neighbouring columns of each block of 8. Four threads exchange theirs for a block each, so that a
// token's columns are written 16 bytes at a time.
#pragma once
#include "common/vectors.cuh"

namespace {

constexpr int kGroup = 4;  // column blocks of 8 that are stored together

enum Epilogue { kStore, kSwiglu, kFloat32 };

__device__ __forceinline__ uint32_t packed(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ uint32_t gated(float gate0, float gate1, float up0, float up1) {
  const float2 gate = __bfloat1622float2(__floats2bfloat162_rn(gate0, gate1));
  const float2 up = __bfloat1622float2(__floats2bfloat162_rn(up0, up1));
  return packed(silu(gate.x) * up.x, silu(gate.y) * up.y);
}

// Thread q of four holds words q of four blocks; returns all words of block q.
__device__ __forceinline__ uint4 gathered(const uint32_t (&words)[kGroup]) {
  const bool is_odd = threadIdx.x & 1, is_high = threadIdx.x & 2;
  const uint32_t near0 = __shfl_xor_sync(~0u, is_odd ? words[0] : words[1], 1);
  const uint32_t near1 = __shfl_xor_sync(~0u, is_odd ? words[2] : words[3], 1);
  const uint2 low = is_odd ? make_uint2(near0, words[1]) : make_uint2(words[0], near0);
  const uint2 high = is_odd ? make_uint2(near1, words[3]) : make_uint2(words[2], near1);
  const uint32_t far0 = __shfl_xor_sync(~0u, is_high ? low.x : high.x, 2);
  const uint32_t far1 = __shfl_xor_sync(~0u, is_high ? low.y : high.y, 2);
  return is_high ? make_uint4(far0, far1, high.x, high.y) : make_uint4(low.x, low.y, far0, far1);
}

// Column blocks of W whose sums make a group of y.
template <Epilogue kEpilogue>
constexpr int kHeld = kGroup * (kEpilogue == kSwiglu ? 2 : 1);

// Where a thread's sums go: tokens `token` and `token + 8`, columns from `first_column` on.
template <Epilogue kEpilogue>
struct Target {
  void* y;
  int m, n;  // of y
  int token, first_column, end_column;

  // The target of the same thread `high` times 64 tokens further.
  __device__ __forceinline__ Target below(int high) const {
    return {y, m, n, token + high * 64, first_column, end_column};
  }

  // Stores the sums of a group's column blocks; for swiglu those of gates and ups alternate.
  __device__ __forceinline__ void store(int group, const float4 (&sums)[kHeld<kEpilogue>]) const {
    const int quarter = threadIdx.x % 4;
    if constexpr (kEpilogue == kFloat32) {
#pragma unroll
      for (int block = 0; block < kGroup; block++) {
        const float4 four = sums[block];
        const int column = first_column + (group * kGroup + block) * 8 + quarter * 2;
        if (column >= end_column) continue;
        float* to = static_cast<float*>(y) + int64_t(token) * n + column;
        if (token < m) *reinterpret_cast<float2*>(to) = make_float2(four.x, four.y);
        if (token + 8 < m) *reinterpret_cast<float2*>(to + int64_t(8) * n) = make_float2(four.z, four.w);
      }
    } else {
      uint32_t upper[kGroup], lower[kGroup];
#pragma unroll
      for (int block = 0; block < kGroup; block++) {
        if constexpr (kEpilogue == kStore) {
          const float4 four = sums[block];
          upper[block] = packed(four.x, four.y), lower[block] = packed(four.z, four.w);
        } else {
          const float4 gate = sums[2 * block], up = sums[2 * block + 1];
          upper[block] = gated(gate.x, gate.y, up.x, up.y), lower[block] = gated(gate.z, gate.w, up.z, up.w);
        }
      }
      const uint4 first = gathered(upper), second = gathered(lower);
      const int column = first_column + (group * kGroup + quarter) * 8;
      if (column >= end_column) return;
      bf16* to = static_cast<bf16*>(y) + int64_t(token) * n + column;
      if (token < m) *reinterpret_cast<uint4*>(to) = first;
      if (token + 8 < m) *reinterpret_cast<uint4*>(to + int64_t(8) * n) = second;
    }
  }
};

template <class S, Epilogue kEpilogue>
constexpr int kGroupsOf = (S::kColumns / 8 + kHeld<kEpilogue> - 1) / kHeld<kEpilogue>;

template <class S, Epilogue kEpilogue>
__device__ __forceinline__ void store_tile(const float (&d)[S::kSums], const Target<kEpilogue>& target) {
#pragma unroll
  for (int group = 0; group < kGroupsOf<S, kEpilogue>; group++) {
    float4 sums[kHeld<kEpilogue>];
#pragma unroll
    for (int block = 0; block < kHeld<kEpilogue>; block++) {
      const int at = (group * kHeld<kEpilogue> + block) * 4;
      sums[block] = at < S::kSums ? make_float4(d[at], d[at + 1], d[at + 2], d[at + 3]) : make_float4(0, 0, 0, 0);
    }
    target.store(group, sums);
  }
}

}  // namespace
