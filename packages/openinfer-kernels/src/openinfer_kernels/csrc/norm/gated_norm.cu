// RMSNorm of each head, gated:  y = bf16(w * x / sqrt(mean(x^2) + eps) * silu(gate)), in float32, rounded once.
//
// Rows of `gate` may lie further apart than they are long, as columns of a wider product. The formula is that of
// `Qwen3_5RMSNormGated` of transformers, which rounds before the weight too.
#include "common/pdl.cuh"
#include "common/vectors.cuh"

namespace {

struct Arguments {
  const bf16* x;         // [T, heads n]
  const bf16* gate;      // [T, heads n], rows `gate_stride` apart
  const bf16* weight;    // [n], or
  const float* weight32; // where this is not null
  bf16* y;
  int64_t gate_stride;
  int num_tokens, heads, size;
  float eps;

  __device__ __forceinline__ float factor(int i) const {
    return weight32 != nullptr ? weight32[i] : __bfloat162float(weight[i]);
  }
};

// Heads of 8 * kLanes values: as many neighbouring threads hold one, 8 values each. Grid: blocks over all heads.
template <int kLanes>
__device__ void run_vectors(const Arguments& a) {
  constexpr int kSize = 8 * kLanes;
  const int lane = threadIdx.x % kLanes;
  const int64_t group = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
  const bool is_there = group < int64_t(a.num_tokens) * a.heads;  // a warp shuffles together
  const int64_t token = is_there ? group / a.heads : 0;
  const int head = is_there ? int(group - token * a.heads) : 0;
  float factors[8];
#pragma unroll
  for (int i = 0; i < 8; i++) factors[i] = a.factor(lane * 8 + i);
  launch_dependents();
  wait_for_previous_kernel();
  const int64_t place = (token * a.heads + head) * kSize + lane * 8;
  float values[8], gates[8], squares = 0;
  unpack(load<8>(a.x + place), values);
  unpack(load<8>(a.gate + token * a.gate_stride + head * kSize + lane * 8), gates);
#pragma unroll
  for (int i = 0; i < 8; i++) squares += values[i] * values[i];
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) squares += __shfl_xor_sync(~0u, squares, mask);
  const float scale = rsqrtf(squares / kSize + a.eps);
#pragma unroll
  for (int i = 0; i < 8; i++) values[i] = factors[i] * (values[i] * scale) * silu(gates[i]);
  if (is_there) store(a.y + place, pack(values));
}

// Any size: a warp for a head.
__device__ void run_singles(const Arguments& a) {
  const int lane = threadIdx.x % 32;
  const int64_t group = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  launch_dependents();
  wait_for_previous_kernel();
  if (group >= int64_t(a.num_tokens) * a.heads) return;
  const int64_t token = group / a.heads;
  const bf16* x = a.x + group * a.size;
  const bf16* gate = a.gate + token * a.gate_stride + (group - token * a.heads) * a.size;
  float squares = 0;
  for (int i = lane; i < a.size; i += 32) squares += __bfloat162float(x[i]) * __bfloat162float(x[i]);
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) squares += __shfl_xor_sync(~0u, squares, mask);
  const float scale = rsqrtf(squares / a.size + a.eps);
  for (int i = lane; i < a.size; i += 32) {
    const float normed = a.factor(i) * (__bfloat162float(x[i]) * scale);
    a.y[group * a.size + i] = __float2bfloat16_rn(normed * silu(__bfloat162float(gate[i])));
  }
}

}  // namespace

#define GATED_RMS_NORM(SIZE)                                                                        \
  extern "C" __global__ void gated_rms_norm_##SIZE(const __grid_constant__ Arguments a) {           \
    run_vectors<SIZE / 8>(a);                                                                       \
  }

GATED_RMS_NORM(32)
GATED_RMS_NORM(64)
GATED_RMS_NORM(128)
GATED_RMS_NORM(256)

extern "C" __global__ void gated_rms_norm_singles(const __grid_constant__ Arguments a) { run_singles(a); }
