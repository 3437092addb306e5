// RMSNorm over rows, alone or after adding into the residual: one block per row, the row held in registers.
//
//     r += x;  y = bf16(w * r / sqrt(mean(r^2) + eps))    the residual is float32, x either, and y is rounded once
//     y = bf16((1 + w) * x / sqrt(mean(x^2) + eps))       zero-centred, as Gemma and Qwen3.5 have it
//
// Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4. A decode step has few rows, so what counts is
// the way from the launch to the last store: one access per thread and value, weights loaded before the wait. The next
// kernel is let in before the wait too: it is a product, which reads its weights while the one before the norm ends.
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

// A thread holds kHeld vectors of kWidth values: rows of up to 1024 * kHeld * kWidth values.
template <int kWidth, int kHeld, bool kAdd, bool kZeroCentred, typename Input>
__device__ void norm_row(const Input* x, float* residual, const bf16* weight, bf16* y, int size, float eps) {
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

#define NORM(PREFIX, ZERO_CENTRED, DTYPE, INPUT, NAME, WIDTH, HELD)                                         \
  extern "C" __global__ void __launch_bounds__(1024) PREFIX##rms_norm_##DTYPE##_##NAME(                     \
      const INPUT* x, const bf16* weight, bf16* y, int size, float eps) {                                   \
    norm_row<WIDTH, HELD, false, ZERO_CENTRED>(x, nullptr, weight, y, size, eps);                           \
  }                                                                                                         \
  extern "C" __global__ void __launch_bounds__(1024) add_##PREFIX##rms_norm_##DTYPE##_##NAME(               \
      const INPUT* x, float* residual, const bf16* weight, bf16* y, int size, float eps) {                  \
    norm_row<WIDTH, HELD, true, ZERO_CENTRED>(x, residual, weight, y, size, eps);                           \
  }
#define NORMS(PREFIX, ZERO_CENTRED, DTYPE, INPUT)             \
  NORM(PREFIX, ZERO_CENTRED, DTYPE, INPUT, vectors, 8, 1)      \
  NORM(PREFIX, ZERO_CENTRED, DTYPE, INPUT, long_vectors, 8, 3) \
  NORM(PREFIX, ZERO_CENTRED, DTYPE, INPUT, singles, 1, 8)

NORMS(, false, bfloat16, bf16)
NORMS(, false, float32, float)
NORMS(zero_centred_, true, bfloat16, bf16)
NORMS(zero_centred_, true, float32, float)

// A residual stream in BF16, 8 values a thread: what a drafter sees of it. The product after it reads its weights meanwhile.
extern "C" __global__ void __launch_bounds__(256) residual_bfloat16(const float* residual, bf16* y, int vectors) {
  launch_dependents();
  wait_for_previous_kernel();
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= vectors) return;
  float values[8];
  load_values(residual + int64_t(at) * 8, values);
  store(y + int64_t(at) * 8, pack(values));
}
