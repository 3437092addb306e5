// RMSNorm over rows, alone or after adding into the residual: one block per row, the row held in registers.
//
//     r += x;  y = bf16(w * r / sqrt(mean(r^2) + eps))    the residual is float32, x either, and y is rounded once
//     y = bf16((1 + w) * x / sqrt(mean(x^2) + eps))       zero-centred, as Gemma and Qwen3.5 have it
//
// Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4. A decode step has few rows, so what counts is
// the way from the launch to the last store: one access per thread and value, weights loaded before the wait. The next
// kernel is let in before the wait too: it is a product, which reads its weights while the one before the norm ends.
#pragma once
#include "common/pdl.cuh"
#include "common/vectors.cuh"

namespace {

constexpr int kMaxWarps = 32;

__device__ float block_sum(float value) {
  __shared__ float sums[kMaxWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
  if (lane == 0) sums[warp] = value;
  __syncthreads();
  value = lane < warps ? sums[lane] : 0.0f;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
  return value;
}

// What is added to x first, by all threads of a block: nothing, but in lora/adapted_norm.cu.
struct NothingDeferred {
  template <int kWidth>
  __device__ __forceinline__ void add(float (&)[kWidth]) {}
};

// A thread holds kHeld vectors of kWidth values: rows of up to 1024 * kHeld * kWidth values.
template <int kWidth, int kHeld, bool kAdd, bool kZeroCentred, typename Input, typename Deferred = NothingDeferred>
__device__ void norm_row(const Input* x, float* residual, const bf16* weight, bf16* y, int size, float eps,
                         Deferred deferred = {}) {
  const int vectors = size / kWidth;
  const int64_t row = int64_t(blockIdx.x) * size;
  Vector<kWidth> weights[kHeld];
  float values[kHeld][kWidth];
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < vectors) weights[i] = load<kWidth>(weight + at * kWidth);
  }
  launch_dependents();
  wait_for_previous_kernel();
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= vectors) break;
    load_values(x + row + at * kWidth, values[i]);
    if constexpr (kAdd) {
      float before[kWidth];
      load_values(residual + row + at * kWidth, before);
      deferred.add(values[i]);
#pragma unroll
      for (int j = 0; j < kWidth; j++) values[i][j] += before[j];
      store_values(residual + row + at * kWidth, values[i]);
    }
#pragma unroll
    for (int j = 0; j < kWidth; j++) squares += values[i][j] * values[i][j];
  }
  const float scale = rsqrtf(block_sum(squares) / size + eps);
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= vectors) break;
    float factors[kWidth];
    unpack(weights[i], factors);
#pragma unroll
    for (int j = 0; j < kWidth; j++) values[i][j] *= scale * (kZeroCentred ? 1.0f + factors[j] : factors[j]);
    store(y + row + at * kWidth, pack(values[i]));
  }
}

}  // namespace
