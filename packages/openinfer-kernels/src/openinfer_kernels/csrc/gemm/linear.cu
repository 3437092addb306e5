// What follows a matrix product: the gates of SwiGLU and GEGLU, and the soft cap of logits.
//
//     y[t, i] = bf16(silu(g) * u)      g = both[t, i] and u = both[t, F + i] in BF16, silu(g) = g / (1 + exp(-g))
//     y[t, i] = bf16(gelu(g) * u)      gelu(g) = g / 2 (1 + tanh(v)) = g / (1 + exp(-2 v)),
//                                      v = sqrt(2 / pi) (g + 0.044715 g^3)
//     logits[t, i] = cap tanh(logits[t, i] / cap)
//
// Shazeer 2020, "GLU Variants Improve Transformer", eq. 6; Hendrycks and Gimpel 2016, section 2; Gemma Team 2024,
// "Gemma 2", section 2. Kernels that gate their own sums round both to BF16 first, so that they agree with this one bit
// for bit. Each block makes a chunk of one token's row.
#include "common/pdl.cuh"
#include "common/vectors.cuh"

namespace {

struct Silu {
  static __device__ __forceinline__ float of(float value) { return silu(value); }
};

struct Gelu {
  // Where exp(-2 v) overflows the quotient is zero, which is right; where g^2 does, v has the sign of g all the same.
  static __device__ __forceinline__ float of(float g) {
    constexpr float kSlope = 0.7978845608028654f, kCubic = 0.044715f;
    const float v = kSlope * g * (1.0f + kCubic * g * g);
    return __fdividef(g, 1.0f + __expf(-2.0f * v));
  }
};

template <int kWidth, class Activation>
__device__ void gate(const bf16* both, bf16* y, int width) {
  const int at = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
  wait_for_previous_kernel();
  launch_dependents();
  if (at >= width) return;
  const bf16* row = both + int64_t(blockIdx.x) * 2 * width;
  float gates[kWidth], ups[kWidth];
  unpack(load<kWidth>(row + at), gates);
  unpack(load<kWidth>(row + width + at), ups);
#pragma unroll
  for (int i = 0; i < kWidth; i++) gates[i] = Activation::of(gates[i]) * ups[i];
  store(y + int64_t(blockIdx.x) * width + at, pack(gates));
}

// kWidth 8: two accesses of 16 bytes.
template <int kWidth>
__device__ void cap_logits(float* logits, int64_t size, float cap) {
  const int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kWidth;
  wait_for_previous_kernel();
  launch_dependents();
  if (at >= size) return;
  float values[kWidth];
  load_values(logits + at, values);
#pragma unroll
  for (int i = 0; i < kWidth; i++) values[i] = cap * tanhf(values[i] / cap);
  store_values(logits + at, values);
}

}  // namespace

extern "C" __global__ void swiglu_vectors(const bf16* both, bf16* y, int width) { gate<8, Silu>(both, y, width); }

extern "C" __global__ void swiglu_singles(const bf16* both, bf16* y, int width) { gate<1, Silu>(both, y, width); }

extern "C" __global__ void geglu_vectors(const bf16* both, bf16* y, int width) { gate<8, Gelu>(both, y, width); }

extern "C" __global__ void geglu_singles(const bf16* both, bf16* y, int width) { gate<1, Gelu>(both, y, width); }

extern "C" __global__ void soft_cap_vectors(float* logits, int64_t size, float cap) {
  cap_logits<8>(logits, size, cap);
}

extern "C" __global__ void soft_cap_singles(float* logits, int64_t size, float cap) {
  cap_logits<1>(logits, size, cap);
}
